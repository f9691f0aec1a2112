"""Zero-shot classification: a model of natural language inference judges labels that a caller names.

N labels, W windows of a text, C classes of the model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.backend import Array
from ..errors import InputError
from ..option_checks import check_switch
from ..options import ClassifyOptions
from ..text.tokenizer import Tokenizer
from .pooling import softmax

TEMPLATE = "This example is {}."  # transformers' own
PLACE = "{}"  # where a template has the label
NEEDS_INFERENCE = "needs a natural language inference model, with a label that begins with 'entail'"
OPTIONS = ("hypothesis_template", "multi_label")  # that go with candidate_labels


@dataclass(frozen=True)
class Hypotheses:
    """What is said of a text, for each label that a caller names.

    Attributes:
        labels: the caller's.
        tokens: of each label the tokens of its hypothesis.
        entailment: the model's class that says a hypothesis follows from the text.
        contradiction: the class that says it does not.
        multi_label: whether each label is judged by itself.
    """

    labels: tuple[str, ...]
    tokens: Sequence[list[int]]
    entailment: int
    contradiction: int
    multi_label: bool

    def choose_logits(self, logits: Array) -> Array:
        """Return the logits (N,) of entailment, of a text's logits (N, C)."""
        chosen: Array = logits[:, self.entailment]
        return chosen

    def share(self, logits: Array) -> Array:
        """Return the probability of each label (N,), of a text's logits (N, C), as transformers has it."""
        if self.multi_label or len(self.labels) == 1:
            return softmax(logits[:, [self.contradiction, self.entailment]])[:, 1]
        return softmax(self.choose_logits(logits))


def read_hypotheses(
    options: ClassifyOptions, classes: Sequence[str], tokenizer: Tokenizer
) -> Hypotheses | None:
    """Return a call's hypotheses for a model of these classes; None where it names no labels."""
    labels = options.get("candidate_labels")
    if labels is None:
        for name in OPTIONS:
            if name in options:
                raise InputError(f"{name} needs candidate_labels", option=name)
        return None
    labels = check_labels(labels)
    template = options.get("hypothesis_template", TEMPLATE)
    if not isinstance(template, str) or PLACE not in template:
        raise InputError(
            f"hypothesis_template={template!r:.80} must be a text with {PLACE} where the label goes",
            option="hypothesis_template",
        )
    multi_label = options.get("multi_label", False)
    check_switch("multi_label", multi_label)
    if options.get("truncation") == "windows":
        raise InputError(
            "truncation='windows' cannot be used with candidate_labels; use 'head' or 'tail'",
            option="truncation",
        )
    entailment = find_entailment(classes)
    said = [template.replace(PLACE, label) for label in labels]
    return Hypotheses(
        labels=labels,
        tokens=[tokenizer.encode(one, parse_special=options.get("parse_special", False)) for one in said],
        entailment=entailment,
        contradiction=len(classes) - 1 if entailment == 0 else 0,  # as transformers takes it
        multi_label=multi_label,
    )


def check_labels(labels: Any) -> tuple[str, ...]:
    """Return a caller's labels; refuse what is no list of different texts."""
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str | bytes) and len(labels) > 0
    if not is_list or not all(isinstance(label, str) and label for label in labels):
        raise InputError(
            f"candidate_labels={labels!r:.80} must be a list of texts, such as ['politics', 'sports']",
            option="candidate_labels",
        )
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(
            f"candidate_labels has {twice} more than once; give each label once", option="candidate_labels"
        )
    return tuple(labels)


def find_entailment(classes: Sequence[str]) -> int:
    """Return the number of the class that says that a hypothesis follows; refuse a model without one."""
    found = [number for number, name in enumerate(classes) if name.lower().startswith("entail")]
    if not found or len(classes) < 2:
        raise make_no_inference_error(classes)
    return found[0]


def make_no_inference_error(classes: Sequence[str]) -> InputError:
    """Return the error of labels that a caller names to a model of these classes."""
    has = f"has the labels {', '.join(map(repr, classes))}" if classes else "is not a classifier"
    return InputError(f"candidate_labels {NEEDS_INFERENCE}; this one {has}", option="candidate_labels")


def stack_logits(outputs: Sequence[Sequence[Array]]) -> Array:
    """Return the logits (W, C) or (N, C) of a text's sequences."""
    return np.stack([array for (array,) in outputs])
