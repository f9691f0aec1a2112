"""What rounding does to a beam search is measured on all that the search reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from planforge.exporter.tasks.pytorch_translator import Reference
from planforge.exporter.tasks.rounding import Rounding
from planforge.exporter.tasks.translator_search import measure_found_gaps
from planforge.models import Transformer
from planforge.runtime.apps.check.case import CaseSet, Known, Searching, Text
from planforge.runtime.apps.check.metrics import ErrorMetrics, ScoreMetrics
from planforge.runtime.apps.check.translator import SEARCH, make_search

from ...helpers.models import random_transformer

START = 1
SOURCE = (5, 9, 3, 7)


def search(model: Transformer) -> tuple[CaseSet, set[int], list[Text]]:
    """Return a set of a search, the tokens that the search reads, and the targets that it finds."""
    searching = Searching(num_beams=4, max_new_tokens=6, eos=(0,), suppressed=())
    logits = Reference(model, START).compute_results(SOURCE, [2, 3, 4])[0]
    known = Known(np.arange(len(logits)), logits)
    case_set = CaseSet((Text(SOURCE), Text((START, 2, 3), source=0)), (), {"logits": {1: known}})
    case_set = CaseSet(case_set.texts, (), case_set.answers, search=searching)
    read: set[int] = set()

    def note(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        read.update(inputs[0].flatten().tolist())

    handle = model.target.words.register_forward_pre_hook(note)
    found = Reference(model, START).search(SOURCE, make_search(case_set))
    handle.remove()
    return case_set, read, [Text((START, *one.token_ids), source=0) for one in found]


def test_beams_that_are_pruned_count_in_the_limit_of_a_search() -> None:
    """A token that no found target has is rounded: their scores stay, the search's logits do not."""
    model = random_transformer()
    case_set, read, found = search(model)
    pruned = read - {token for text in found for token in text.tokens}
    assert pruned
    moved = model.target.words.weight.detach().clone()
    moved[sorted(pruned)] += 1
    rounding = Rounding(weights={"target.words.weight": moved.numpy()})
    gaps = measure_found_gaps(Reference(model, START), model, case_set, found, rounding)
    assert gaps["score"] == ScoreMetrics(0.0, True, len(found))
    along = gaps[SEARCH]
    assert isinstance(along, ErrorMetrics)
    assert along.max_error > 0.01
