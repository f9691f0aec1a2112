"""Has a row for each task: how its models are explained, and which options are of no use there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from ...model import Model
from ...tasks import refuse_others
from .encoder import explain_text
from .explanation import Explanation
from .generator import explain_generation, measure_answer
from .graphs import ExplanationGraphs, find_graphs
from .options import USUAL_NEW_TOKENS, Request, ResolvedOptions, make_choices
from .translator import explain_translation, measure_translation

READS_PAIRS = "models that read two texts"
WRITES = "models that write text"


@dataclass(frozen=True)
class Task:
    """How models of a task are explained.

    Attributes:
        explain: explains what was asked for.
        measure: returns the answer that is explained, and how many tokens it has or may get.
        min_room: tokens that a context must hold beside the text; None where texts are no prompts.
        useless: options without an effect, and what they are for.
    """

    explain: Callable[[Any, Request, ExplanationGraphs, ResolvedOptions], Explanation]
    measure: Callable[[Any, Request], tuple[Any, int]] = lambda model, request: (request.answer, 0)
    min_room: int | None = None
    useless: Mapping[str, str] = field(default_factory=dict)

    def check_use(self, options: Mapping[str, object]) -> None:
        """Refuse an option that has no effect on models of this task; None and () count as not given."""
        for name, whose in self.useless.items():
            if options.get(name) not in (None, ()):
                raise InputError(f"{name} is for {whose}; leave it out", option=name)


TASKS = {
    "text-generation": Task(explain_generation, measure_answer, 1, {"pair": READS_PAIRS}),
    "text-encoding": Task(explain_text, useless={"watch": WRITES, "max_new_tokens": WRITES}),
    "translation": Task(
        explain_translation,
        measure_translation,
        0,
        {
            "pair": READS_PAIRS,
            "max_new_tokens": "text generators: a translation is explained as a whole",
        },
    ),
}


def explain(
    model: Model,
    text: str | Sequence[int],
    answer: str | Sequence[int] | None = None,
    *,
    pair: str | None = None,
    methods: str | Sequence[str] | None = None,
    objective: str = "logit",
    watch: str | Sequence[str] = (),
    factors: int = 5,
    grouping: str = "nmf",
    layer: int | None = None,
    max_new_tokens: int | None = None,
    parse_special: bool = False,
    on_step: Callable[[], None] | None = None,
) -> Explanation:
    """Return why a model answered so: by which tokens, and at which layer.

    All methods but occlusion run graphs of their own in fp32, which `planforge export --outputs explain`
    adds; occlusion runs the graph that answers, in whatever precision and engine. The memory that they take
    counts in the model's `memory_limit`.

    Args:
        model: a model that was loaded from a bundle.
        text: a prompt, a source, or a text; of a ranker the query. Prompts may be token ids.
        answer: what to explain; by default the model's own greedy answer, its translation with its end, or
            up to ten labels, the likeliest first. Token ids, where the model writes text.
        pair: of an encoder the other text; of one without labels the one whose likeness to `text` is
            explained by the tokens of `text`: the cosine of their vectors, whatever `objective` is.
        methods: of "gradient" (gradient x input, and the shares of its norm), "integrated_gradients",
            "occlusion", "lens" (what each layer would answer), "attention" and "neurons" (groups of them,
            which needs scikit-learn). By default gradient, lens and attention; of a bundle without graphs
            for them, occlusion.
        objective: "logit" or "probability" of the token or label, which gradients are of.
        watch: words of one token each, whose ranks the lens tells too.
        factors: how many groups of neurons.
        grouping: of neurons, "nmf" (non-negative matrix factorization) or "kmeans".
        layer: groups the neurons of this layer alone, from 1; by default those of all.
        max_new_tokens: of a text generator's own answer; 20 by default.
        parse_special: read special tokens such as <|endoftext|> in a prompt or source as such.
        on_step: called between parts of the work, up to some hundred times; what it raises ends it.

    Raises:
        InputError: a choice that there is not, that the bundle has no graphs for, or that is of no use for
            a model of its task.
        ContextLengthError: text and answer are longer than the model takes.
    """
    refuse_others(model.bundle, "explain")
    if model.task not in TASKS:
        raise InputError(f"explain is for {', '.join(TASKS)}, and this model is for {model.task}")
    task = TASKS[model.task]
    task.check_use({"pair": pair, "watch": watch, "max_new_tokens": max_new_tokens})
    graphs = find_graphs(model)
    choices = make_choices(graphs, methods, objective, factors, watch, on_step, grouping, layer)
    most = USUAL_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    with graphs.lend():
        return task.explain(model, Request(text, answer, pair, most, parse_special), graphs, choices)
