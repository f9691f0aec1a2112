"""Chooses the cases of an encoder: real text, a single token, a full sequence, random batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Measure, Row, Text
from ...runtime.apps.check.encoder import ONE_LABEL, is_per_token, list_measures
from ...runtime.apps.check.files import choose_evenly
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults
from ...runtime.text.long_text import fit
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from ..levels import FULL, Level
from . import ranked
from .random_cases import (
    Random,
    count_alike,
    count_tokens,
    count_weights,
    list_sizes,
    sample_rows,
    sample_text,
)

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

GRAPH = "encoder"
QUERIES = "query_encoder"
RANDOM = "random batches, padded"  # how the name of their case begins
MAX_BATCH = 8  # of the padded case, or the graph's largest
TEXT_TOKENS = 48  # at most; several lengths below that are used
JUDGED = 1 / 3  # of a long text; the rest is to calibrate with
CALIBRATION_TOKENS = 64  # of a sequence
RANDOM_TEXTS = 12  # of any length
POSITIONS = 12  # compared in each sequence, the first and last among them


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return an encoder's cases, without answers; a level below "full" has fewer.

    There is real text, a pair, a single token, a full sequence, and padded batches of random texts of
    any length; for a model that tells padding by its token, also a text that ends with that.
    """
    manifest = bundle.manifest
    assert manifest.encoder is not None
    artifact = next(one for one in manifest.artifacts if one.graph == GRAPH)
    tokenizer = Tokenizer.from_file(bundle.path(str(manifest.tokenizer["files"][0])))
    has_segments = any(spec.role == "segments" for spec in artifact.inputs)
    encoded = [tokenizer.encode(text) for text in texts]
    weights = count_weights(model)
    every = cut_texts(encoded, manifest.encoder, has_segments, manifest.config.get("pad_token"))
    real = thin_texts(every, level.count_samples(weights, TEXT_TOKENS))
    random = np.random.default_rng(seed)
    sampled: list[Text] = []
    if level.random_work:
        sampled = sample_texts(random, encoded, manifest.encoder, has_segments, weights, level)
    rows = max(one.axis("batch").max for one in manifest.artifacts)
    problem_type = read_problem_type(bundle)
    cases = list_cases(real, rows, list_measures(artifact, problem_type, of_texts=True))
    few, replay, ranges = list_node_cases(real, cases)
    sizes = list_sizes(rows)[1:]
    pool = [*range(len(real), len(real) + len(sampled)), len(real) - 2, len(real) - 1]
    chosen = (*real, *sampled)
    if sampled:
        batches = sample_rows(random, [len(chosen[i].tokens) for i in pool], sizes, weights, level)
        measures = list_measures(artifact, problem_type, of_texts=False)
        name = f"{RANDOM}, seed {seed}"
        numbers = [[pool[i] for i in batch] for batch in batches]
        made = [make_case(name, chosen, batch, measures, is_padded=True) for batch in numbers]
        cases += [replace(case, is_costly=True) for case in made]
    graphs = {one.graph: one for one in manifest.artifacts}
    outputs = [spec for one in graphs.values() for spec in one.outputs]
    of_queries = graphs.get(QUERIES)
    case_set = CaseSet(
        texts=chosen,
        cases=repeat_for(of_queries, cases, problem_type),
        answers={spec.name: want_answers(chosen, is_per_token(spec)) for spec in outputs},
        left_out=tuple(describe_left_out(len(real), len(every), bool(sampled), weights, sizes, level)),
        calibration=tuple(cut_calibration_texts(encoded, manifest.encoder)),
        few=repeat_for(of_queries, few, problem_type),
        replays=repeat_for(of_queries, (replay,), problem_type),
        ranges=repeat_for(of_queries, (ranges,), problem_type),
    )
    if not level.random_work:
        return case_set
    verses = [tokenizer.encode(verse) for verse in ranked.VERSES.read_text(encoding="utf-8").splitlines()]
    searched = [cut_text(manifest.encoder, ids, None, TEXT_TOKENS) for ids in verses]
    return ranked.add_ranking(case_set, list(graphs.values()), manifest.encoder.roles.similarity, searched)


def list_first_measures(case_set: CaseSet) -> list[Measure]:
    """Return what is measured of each graph's first case, which is real text, and of ranked texts."""
    first: dict[tuple[str, bool], Case] = {}
    for case in case_set.cases:
        first.setdefault((case.graph, case.name == ranked.NAME), case)
    return [measure for case in first.values() for measure in case.measures]


def repeat_for(artifact: Artifact | None, cases: Sequence[Case], problem_type: str) -> tuple[Case, ...]:
    """Return cases, and the same ones for the graph that reads queries, where there is one."""
    if artifact is None:
        return tuple(cases)
    measures = {
        costly: list_measures(artifact, problem_type, of_texts=not costly) for costly in (False, True)
    }
    repeated = (
        replace(case, graph=artifact.graph, measures=measures[case.is_costly] if case.measures else ())
        for case in cases
    )
    return (*cases, *repeated)


def list_node_cases(texts: Sequence[Text], cases: Sequence[Case]) -> tuple[tuple[Case, Case], Case, Case]:
    """Return the cases that run node by node: the few that are compared, a replay, and one for ranges."""
    *real, single, _ = range(len(texts))
    numbers = [*real[:2], single]
    batch = make_case(f"{len(numbers)} texts, padded", texts, numbers, cases[0].measures, is_padded=True)
    longest = max(cases, key=lambda case: case.rows[0].ends[0] if len(case.rows) == 1 else 0)
    replay = make_case(f"{len(numbers)} texts", texts, numbers, ())
    return (batch, longest), replay, make_case(f"{len(texts)} texts", texts, range(len(texts)), ())


def want_answers(texts: Sequence[Text], per_token: bool) -> dict[int, Known]:
    """Return the places of an output whose values are wanted: some of the tokens, or that of a whole text."""
    return {
        number: Known.wanted(choose_evenly(len(text.tokens), POSITIONS) if per_token else (0,))
        for number, text in enumerate(texts)
    }


def list_cases(texts: Sequence[Text], most: int, measures: tuple[Measure, ...]) -> list[Case]:
    """Return the cases of real text and, as the last two, a single token and a full sequence."""
    *real, single, full = range(len(texts))
    batch = [*real, single][-min(MAX_BATCH, most) :]
    length = len(texts[full].tokens)
    return [
        *(make_case("one by one", texts, [number], measures) for number in real),
        make_case(f"{len(batch)} texts, padded", texts, batch, measures, is_padded=True),
        make_case("1 token", texts, [single], measures),
        make_case(f"{length} tokens", texts, [full], measures),
    ]


def make_case(
    name: str,
    texts: Sequence[Text],
    numbers: Sequence[int],
    measures: tuple[Measure, ...],
    is_padded: bool = False,
) -> Case:
    """Return the case of texts that an encoder reads together."""
    rows = tuple(Row(number, (len(texts[number].tokens),)) for number in numbers)
    return Case(name, GRAPH, rows, measures, "once", is_padded=is_padded)


def read_problem_type(bundle: Bundle) -> str:
    """Return the meaning of a classifier's logits."""
    defaults = bundle.manifest.encoder
    assert defaults is not None
    return defaults.problem_type or ONE_LABEL


def thin_texts(texts: list[Text], count: float) -> list[Text]:
    """Return about so many of the texts, followed by the pair, the token and the full sequence."""
    real = texts[:-3]
    if len(real) <= count:
        return texts
    return [*(real[i] for i in choose_evenly(len(real), int(count))), *texts[-3:]]


def describe_left_out(
    compared: int, every: int, has_random: bool, weights: int, sizes: Sequence[int], level: Level
) -> Iterator[str]:
    """Yield the cases of "full" that the level leaves out, in words."""
    if compared < every:
        yield f"{every - compared} of {every} texts"
    if not has_random:
        yield "random sequences and batches"
        return
    if count_tokens(weights, level) < count_tokens(weights, FULL):
        yield f"random sequences beyond {count_tokens(weights, level):,} tokens together"
    if count_alike(weights, sizes, level) < count_alike(weights, sizes, FULL):
        yield "a second random batch of each size"


def sample_texts(
    random: Random,
    encoded: Sequence[Sequence[int]],
    defaults: EncoderDefaults,
    has_segments: bool,
    weights: int,
    level: Level,
) -> list[Text]:
    """Return sequences of all lengths, evenly spread by their logarithm, every third of them a pair."""
    real = [token for ids in encoded for token in ids]
    steps = np.linspace(0, math.log(defaults.max_length), RANDOM_TEXTS + 1)
    lengths = np.exp(random.uniform(steps[:-1], steps[1:]))
    lengths *= min(1.0, count_tokens(weights, level) / 2 / float(lengths.sum()))
    texts = []
    for number, length in enumerate(lengths.round().clip(1).astype(int).tolist()):
        first = sample_text(random, real, length)
        second = sample_text(random, real, length) if has_segments and number % 3 == 2 else None
        texts.append(cut_text(defaults, first, second, length))
    return texts


def cut_texts(
    encoded: Sequence[Sequence[int]], defaults: EncoderDefaults, has_segments: bool, pad: int | None
) -> list[Text]:
    """Return sequences of unequal length from real text; the last are a pair, a token, a full sequence.

    The first ends with `pad`, if the model takes that for padding wherever it stands.
    """
    windows = [window for ids in encoded for window in split_text(ids)[0]]
    if not windows:
        raise VerificationError(
            "the texts to verify with have no tokens of the model's vocabulary; give others with --prompts"
        )
    texts = [cut_text(defaults, ids, None, TEXT_TOKENS // (1 + i % 3)) for i, ids in enumerate(windows)]
    if pad is not None:
        texts.insert(0, Text((*texts[0].tokens[: defaults.max_length - 1], pad)))
    if has_segments:
        texts.append(cut_text(defaults, windows[0], windows[-1], TEXT_TOKENS))
    texts.append(Text((defaults.tokens.get("cls", windows[0][0]),)))
    joined = [token for ids in windows for token in ids]
    full = (joined * (defaults.max_length // len(joined) + 1))[: defaults.max_length]
    return [*texts, cut_text(defaults, full, None, defaults.max_length)]


def cut_text(
    defaults: EncoderDefaults, first: Sequence[int], second: Sequence[int] | None, most: int
) -> Text:
    """Return one sequence of a text's beginning, or of a pair's, of about `most` tokens."""
    special_tokens = defaults.make_special_tokens(is_pair=second is not None)
    length = max(3 + defaults.separators, min(most, defaults.max_length))
    fitted = fit(first, second, max_length=length, special_tokens=special_tokens, truncation="head")
    piece = fitted.pieces[0]
    return Text(tuple(piece.ids), segments=tuple(piece.segments) if any(piece.segments) else ())


def split_text(ids: Sequence[int]) -> tuple[list[Sequence[int]], Sequence[int]]:
    """Return a text's beginning, cut into windows to judge, and the rest, to calibrate with."""
    end = max(TEXT_TOKENS, round(JUDGED * len(ids)))
    cuts = [ids[start : min(start + TEXT_TOKENS, end)] for start in range(0, end, TEXT_TOKENS)]
    return [window for window in cuts if len(window) > 1], ids[end:]


def cut_calibration_texts(encoded: Sequence[Sequence[int]], defaults: EncoderDefaults) -> list[Text]:
    """Return sequences to calibrate with, from the rest of `split_text`; if there is none, from all texts."""
    rest = [token for ids in encoded for token in split_text(ids)[1]]
    rest = rest or [token for ids in encoded for token in ids]
    length = min(CALIBRATION_TOKENS, defaults.max_length) - 2
    cuts = [rest[start : start + length] for start in range(0, len(rest), length)]
    return [cut_text(defaults, ids, None, defaults.max_length) for ids in cuts]
