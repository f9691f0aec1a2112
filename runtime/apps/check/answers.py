"""Calls a model's own methods, as programs do, and compares their texts with PyTorch's golden tokens.

Golden data has ids. The texts are those that read as these ids, which golden texts vouch for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...bundle.artifact import Artifact
from ...bundle.defaults import GenerationDefaults
from ...bundle.manifest import Manifest
from ...errors import InputError
from ...text.tokenizer import Tokenizer
from .case_arrays import from_arrays
from .cases import find_room
from .divergence import Sample, list_samples
from .files import Arrays
from .golden_texts import GoldenInput
from .metrics import measure_scale
from .outcome import Comparison
from .texts import make_comparison, make_input_reader, show

if TYPE_CHECKING:
    from ...translate.translator import Translator

Limits: TypeAlias = Mapping[str, Mapping[str, float]]  # of each metric, by precision
CASE = "texts to texts"
MOST = 3  # texts


class GeneratedText(Protocol):
    """What a generator answers: a `Generation`, or what another runtime gave."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...


class Generates(Protocol):
    """A `TextGenerator`, or what stands for the answers of another runtime."""

    @property
    def artifact(self) -> Artifact: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def defaults(self) -> GenerationDefaults: ...
    def generate(self, prompt: str, /, *, max_new_tokens: int, **options: Any) -> GeneratedText: ...


def compare_generator(
    model: Generates, manifest: Manifest, arrays: Arrays, limits: Limits
) -> list[Comparison]:
    """Let a language model continue prompts that are texts."""
    room = find_room(model.artifact)
    allowed = limits[model.artifact.precision]["max_error"]
    faults: list[str] = []
    for sample in list_samples(from_arrays(arrays)):
        text = find_text(manifest, model.tokenizer, sample.prompt)
        if text and len(sample) <= room and len(faults) < MOST:
            names = model.defaults.adapters
            options = {"adapter": names[sample.adapter - 1]} if sample.adapter else {}
            answer = model.generate(text, max_new_tokens=len(sample.continuation), **options)
            want = cut_at_end(sample.continuation, model.defaults.eos)
            fault = compare_tokens(answer.token_ids, want, sample, model.tokenizer, allowed)
            faults.append(fault or compare_text(answer.text, answer.token_ids, want, model.tokenizer))
    return report_texts(faults)


def compare_translator(
    model: Translator, manifest: Manifest, arrays: Arrays, limits: Limits
) -> list[Comparison]:
    """Let an encoder-decoder translate texts greedily."""
    defaults = model.defaults
    rules = (defaults.forced_bos, defaults.no_repeat_ngram_size, defaults.min_new_tokens or None)
    if any(rule is not None for rule in rules) or defaults.repetition_penalty != 1.0:
        return []  # golden targets are without these rules
    room = min(find_room(model.artifact), find_room(model.encoder.artifact))
    allowed = limits[model.artifact.precision]["max_error"]
    faults: list[str] = []
    for sample in list_samples(from_arrays(arrays)):
        text = find_text(manifest, model.source_tokenizer, sample.source)
        count = len(sample.continuation)
        if not text or max(len(sample.source), count) > room or len(faults) == MOST:
            continue
        answer = model.translate(text, num_beams=1, max_new_tokens=count)
        want = cut_at_end(sample.continuation, defaults.eos)
        got = answer.token_ids
        if len(want) == len(got) == count:  # at full length some models force the last token
            want = want[:-1]
            got = got[:-1]
        fault = compare_tokens(got, want, sample, model.target_tokenizer, allowed)
        faults.append(fault or compare_text(answer.text, answer.token_ids, want, model.target_tokenizer))
    return report_texts(faults)


def report_texts(faults: Sequence[str]) -> list[Comparison]:
    """Return the comparison of so many texts; none where no sample is a text."""
    return [make_comparison(CASE, "texts", len(faults), list(filter(None, faults)))] if faults else []


def find_text(manifest: Manifest, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text that the model reads as these ids; "" where there is none."""
    text = tokenizer.decode_known(ids)
    try:
        read = make_input_reader(manifest, tokenizer)(GoldenInput(text, None, ()))
    except InputError:  # an empty one
        return ""
    return text if tuple(read) == tuple(ids) else ""


def cut_at_end(tokens: Sequence[int], eos: Sequence[int]) -> tuple[int, ...]:
    """Return an answer's tokens up to the first that ends it, which is kept."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in eos), len(tokens))
    return tuple(tokens[:end])


def compare_tokens(
    got: Sequence[int], want: Sequence[int], sample: Sample, tokenizer: Tokenizer, allowed: float
) -> str:
    """Return where an answer leaves PyTorch's by more than rounding explains, or ""."""
    pairs = enumerate(zip(got, want, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), None)
    if place is None:
        if len(got) == len(want):
            return ""
        return f"an answer has {len(got)} tokens, PyTorch's has {len(want)}"
    margin = sample.margins[place]
    most = 2 * allowed * measure_scale(sample.logits)
    if margin <= most:
        return ""
    here, there = (show(tokenizer.decode_known([tokens[place]])) for tokens in (got, want))
    return (
        f"token {place} of an answer is {here}, PyTorch's is {there} by a margin of {margin:.3g} (at most"
        f" {most:.3g} is rounding)"
    )


def compare_text(text: str, got: Sequence[int], want: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return how the text of PyTorch's tokens differs from an answer of the same tokens, or ""."""
    if tuple(got) != tuple(want):
        return ""  # rounding; its text is another one
    expected = tokenizer.decode_known(want)
    return "" if text == expected else f"an answer's text is {show(text)}, its tokens' is {show(expected)}"
