"""Chooses the cases of a model that compares pictures with texts: real texts, and pictures of noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Measure, Noise, Row, Text
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import VectorMetrics
from ...runtime.bundle.bundle import Bundle
from ...runtime.images.prompt import encode_prompt
from ...runtime.text.tokenizer import Tokenizer
from ..levels import FULL, Level
from .images import cut_prompts, sample_prompts
from .random_cases import count_weights

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

TEXT = Measure("vectors", ("text",), VectorMetrics.LIMITED, "text.")
IMAGE = Measure("vectors", ("image",), VectorMetrics.LIMITED, "image.")
MOST_TEXTS = 24
MOST_PICTURES = 12
LEAST = 4  # of each
PATCHES = (2, 5, 9)  # a picture's noise has so many squares in a row, or one for each pixel
CALIBRATED = 8  # texts, and pictures, to calibrate with
FEW = 2  # that run node by node
KEPT = ((1,),)  # places of a text in golden data: its vector


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return the cases of both graphs, without answers; a level below "full" has fewer."""
    defaults = bundle.manifest.likeness
    assert defaults is not None
    tokenizer = Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
    weights = count_weights(model)
    most = int(np.clip(level.count_samples(weights, defaults.max_length), LEAST, MOST_TEXTS))
    prompts = cut_prompts(texts)
    chosen = [prompts[i] for i in choose_evenly(len(prompts), min(most, len(prompts)))]
    random = np.random.default_rng(seed)
    read = [Text(encode_prompt(tokenizer, defaults, prompt).ids) for prompt in ("", *chosen)]
    read += sample_prompts(random, defaults, bundle.manifest.tokenizer["vocab_size"])
    seen = list_pictures(seed, min(most, MOST_PICTURES), defaults.size)
    found = (*read, *seen)
    groups = {
        "text_encoder": (TEXT, list(range(len(read)))),
        "image_encoder": (IMAGE, list(range(len(read), len(found)))),
    }
    rest = [prompt for prompt in prompts if prompt not in chosen] or prompts
    others = [Text(encode_prompt(tokenizer, defaults, prompt).ids) for prompt in rest[:CALIBRATED]]

    def make(name: str, graph: str, numbers: Sequence[int]) -> Case:
        return make_case(name, graph, groups[graph][0], numbers, defaults.max_length)

    few = tuple(make("a few", graph, every[:FEW]) for graph, (_, every) in groups.items())
    return CaseSet(
        texts=found,
        cases=tuple(
            make(name, graph, numbers)
            for graph, (_, every) in groups.items()
            for name, numbers in (("one", every[:1]), (f"a batch of {len(every)}", every))
        ),
        answers={
            "text": {number: Known.wanted((0,)) for number in groups["text_encoder"][1]},
            "image": {number: Known.wanted((0,)) for number in groups["image_encoder"][1]},
        },
        left_out=() if level is FULL else (f"texts beyond {most}",) if most < MOST_TEXTS else (),
        calibration=(*others, *list_pictures(seed + 1000, CALIBRATED, defaults.size)),
        few=few,
        replays=few,
        ranges=tuple(make("ranges of", graph, every[: 2 * FEW]) for graph, (_, every) in groups.items()),
    )


def list_pictures(seed: int, count: int, size: int) -> list[Text]:
    """Return pictures of noise, fine and coarse."""
    patches = [min(size, number) for number in (*PATCHES, size)]
    return [
        Text(
            (),
            noise=Noise(seed + number, patches[number % len(patches)], patches[-1 - number % len(patches)]),
        )
        for number in range(count)
    ]


def make_case(name: str, graph: str, measure: Measure, numbers: Sequence[int], whole: int) -> Case:
    """Return a case that reads some texts, of `whole` tokens each, or pictures at once."""
    is_text = graph == "text_encoder"
    ends = (whole if is_text else 1,)
    rows = tuple(Row(number, ends) for number in numbers)
    return Case(f"{name}, {'texts' if is_text else 'pictures'}", graph, rows, (measure,), "once")
