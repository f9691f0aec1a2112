"""Chooses the cases of a model of pictures, at several sizes.

There are prompts, single steps, whole ways from noise, and both ways of the autoencoder.

T tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Denoising, Known, Measure, Noise, Row, Text
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import FieldMetrics, PathMetrics, VectorMetrics
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.image_defaults import ImageDefaults, PromptDefaults
from ...runtime.images.prompt import encode_prompt
from ...runtime.images.scheduler_config import SchedulerConfig
from ...runtime.images.schedulers import make_scheduler
from ...runtime.text.tokenizer import Tokenizer
from ..levels import FULL, Level
from .random_cases import count_weights

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

TEXT = Measure("vectors", ("text",), VectorMetrics.LIMITED, "text.")
NOISE = Measure("fields", ("noise",), FieldMetrics.LIMITED, "noise.")
LATENTS = Measure("paths", ("latents",), PathMetrics.LIMITED, "latents.")
PICTURES = Measure("fields", ("pictures",), FieldMetrics.LIMITED, "pictures.")
MEAN = Measure("fields", ("mean",), FieldMetrics.LIMITED, "mean.")
DEVIATION = Measure("fields", ("deviation",), FieldMetrics.LIMITED, "deviation.")
MEASURES = (TEXT, NOISE, LATENTS, PICTURES, MEAN, DEVIATION)

NEGATIVE = 0  # the number of the empty prompt, which guidance needs
PROMPTS = 6  # with a picture of their own
RANDOM_PROMPTS = 2  # of random tokens, as long as the model reads
MOST_STEPS = 20
LEAST_STEPS = 3
GUIDANCE = 4.0
LEAST_SIDE = 8  # of latents
PIXEL_WORK = 0.1  # weights that a step reads for each of its latents, as a share of all: most read few
CALIBRATED = 4  # prompts to calibrate with
WORDS_OF_PROMPT = 12  # of a long text that are a prompt
KEPT_STEPS = ((8,), (4,), (2,), (1,))  # of a picture, in golden data; the first that fits its file


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return the cases of a model of pictures, without answers; a level below "full" has fewer steps."""
    defaults = bundle.manifest.images
    assert defaults is not None
    tokenizer = Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
    random = np.random.default_rng(seed)
    weights = count_weights(model)
    steps = int(np.clip(level.step_work / weights, LEAST_STEPS, MOST_STEPS))
    sizes = list_sizes(defaults, weights, level)
    prompts = cut_prompts(texts)
    chosen = [prompts[i] for i in choose_evenly(len(prompts), min(PROMPTS, len(prompts)))]
    found = [Text(encode_prompt(tokenizer, defaults, "").ids)]
    for number, prompt in enumerate(chosen * math.ceil(PROMPTS / len(chosen))):
        noise = Noise(seed + number, *sizes[number // 2 % len(sizes)])
        found.append(Text(encode_prompt(tokenizer, defaults, prompt).ids, noise=noise))
    found += sample_prompts(random, defaults, bundle.manifest.tokenizer["vocab_size"])
    count = len(make_scheduler(SchedulerConfig.from_json(defaults.scheduler), steps).timesteps)
    cases = list_cases(found, count)
    few, replays, ranges = list_node_cases(found, count)
    rest = [prompt for prompt in prompts if prompt not in chosen] or prompts
    return CaseSet(
        texts=tuple(found),
        cases=tuple(cases),
        answers=want_answers(found, count, defaults),
        left_out=() if level is FULL else (f"steps beyond {steps}",) if steps < MOST_STEPS else (),
        calibration=tuple(
            Text(encode_prompt(tokenizer, defaults, prompt).ids, noise=Noise(seed + 1000 + number, *sizes[0]))
            for number, prompt in enumerate(rest[:CALIBRATED])
        ),
        denoising=Denoising(steps, GUIDANCE, NEGATIVE),
        few=few,
        replays=replays,
        ranges=ranges,
    )


def list_sizes(defaults: ImageDefaults, weights: int, level: Level) -> list[tuple[int, int]]:
    """Return heights and widths of latents: about the usual size, a wide one, and a small odd one."""
    usual = defaults.height // defaults.multiple
    most = math.isqrt(max(1, int(level.prefill_work / (PIXEL_WORK * weights))))
    side = max(LEAST_SIDE, min(usual, most // LEAST_SIDE * LEAST_SIDE))
    return [(side, side), (side // 2, side), (5, 7)]


def cut_prompts(texts: Sequence[str]) -> list[str]:
    """Return short texts: each line of few words is one, and of a longer one its parts are."""
    prompts = []
    for text in texts:
        words = text.split()
        prompts += [
            " ".join(words[begin : begin + WORDS_OF_PROMPT])
            for begin in range(0, len(words), WORDS_OF_PROMPT)
        ]
    return list(dict.fromkeys(prompts)) or [""]


def sample_prompts(random: np.random.Generator, defaults: PromptDefaults, vocab_size: int) -> list[Text]:
    """Return prompts of random tokens, which no text would give."""
    inside = defaults.max_length - 2
    return [
        Text((defaults.start, *random.integers(0, vocab_size, inside).tolist(), defaults.end))
        for _ in range(RANDOM_PROMPTS)
    ]


def list_pictured(texts: Sequence[Text]) -> dict[tuple[int, int], list[int]]:
    """Return the numbers of prompts with a picture, by the size of its latents."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for number, text in enumerate(texts):
        if text.noise is not None:
            by_size.setdefault((text.noise.height, text.noise.width), []).append(number)
    return by_size


def list_cases(texts: Sequence[Text], count: int) -> list[Case]:
    """Return the cases of all graphs; `count` is how often the UNet runs for a picture."""
    whole = len(texts[0].tokens)
    prompts = tuple(Row(number, (whole,)) for number in range(len(texts)))
    cases = [Case("prompts", "text_encoder", prompts, (TEXT,), "once")]
    steps = tuple(range(1, count + 1))
    for (height, width), numbers in list_pictured(texts).items():
        size = f"{height} x {width}"
        rows = tuple(Row(number, steps) for number in numbers)
        once = tuple(Row(number, (1,)) for number in numbers)
        cases += [
            Case(f"steps of {size}, batch {len(rows)}", "unet", rows, (NOISE,)),
            Case(f"from noise of {size}", "unet", once[:1], (LATENTS,), "greedy"),
            Case(f"pictures of {size}", "vae_decoder", once, (PICTURES,), "once"),
            Case(f"latents of {size}", "vae_encoder", once, (MEAN, DEVIATION), "once"),
        ]
    return cases


def list_node_cases(
    texts: Sequence[Text], count: int
) -> tuple[tuple[Case, ...], tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases that run node by node: the few that are compared, replays, and those for ranges."""
    whole = len(texts[0].tokens)
    numbers = min(list_pictured(texts).items(), key=lambda pair: math.prod(pair[0]))[1][:2]
    rows = tuple(Row(number, (1,)) for number in numbers)
    ends = tuple(sorted({1, (count + 1) // 2, count}))
    steps = tuple(Row(number, ends) for number in numbers)
    middle = tuple(Row(number, ((count + 1) // 2,)) for number in numbers)
    prompts = tuple(Row(number, (whole,)) for number in numbers)

    def make(name: str, of_unet: tuple[Row, ...]) -> tuple[Case, ...]:
        return (
            Case(f"{name} prompts", "text_encoder", prompts, (TEXT,), "once"),
            Case(f"{name} steps", "unet", of_unet, (NOISE,)),
            Case(f"{name} pictures", "vae_decoder", rows, (PICTURES,), "once"),
            Case(f"{name} latents", "vae_encoder", rows, (MEAN, DEVIATION), "once"),
        )

    return make("a few", steps), make("one row's", middle), make("ranges of", steps)


def want_answers(texts: Sequence[Text], count: int, defaults: ImageDefaults) -> dict[str, dict[int, Known]]:
    """Return the places whose values are wanted: tokens of prompts, and of pictures steps and fields."""
    pictured = [number for numbers in list_pictured(texts).values() for number in numbers]
    steps = {number: Known.wanted(range(count)) for number in pictured}
    fields = {number: Known.wanted((0,)) for number in pictured}
    tokens = {number: Known.wanted(range(defaults.max_length)) for number in range(len(texts))}
    return {
        "text": tokens,
        "sample": steps,
        "noise": steps,
        **dict.fromkeys(("latents", "pictures", "mean", "deviation"), fields),
    }


def count_kept(case_set: CaseSet, output: str, text: int, counts: tuple[int, ...]) -> int | None:
    """Return how many steps of a picture golden data keeps; of all else, what graphs read is kept."""
    return counts[0] if output in ("sample", "noise") else None
