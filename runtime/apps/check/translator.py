"""Runs a translator's cases through the runtime's own encoder and decoder, and compares them with PyTorch's.

L layers, H heads, D head size, S source tokens, P chosen positions, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...bundle.manifest import Artifact
from ...decoding.beam import BeamSearch, Hypothesis, Search
from ...decoding.constraints import Constraints
from ...decoding.decoder import Decoder
from ...decoding.sampling import compute_logprobs
from ...translate.source_encoder import SourceEncoder
from .case import Array, Case, CaseSet, Encoding, Integers, Known, Location, Text
from .cases import find_room
from .decoder import Tokenizers, compare_greedy, run
from .judge import Limits, Seen, compare_known
from .metrics import ErrorMetrics, Logits, ScoreMetrics
from .outcome import Outcome, judge_outcome

SEARCH = "search."  # how the names of what is measured along a beam search begin


class Follower(Protocol):
    """The model in PyTorch, which is fed what an engine's search feeds its rows."""

    errors: list[float]  # the largest of each step and source, in units of the logits' spread

    def compare(self, logits: Logits, tokens: Sequence[int], active: Sequence[bool]) -> None:
        """Compare the engine's logits (R, V) with the model's, where rows are still searched."""

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows as the engine does."""


class Model(Protocol):
    """What scores the targets that a search finds: PyTorch, or the engine itself where that is not there."""

    def score(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Return the mean log-probability of a target's tokens, of which the first is the start token."""

    def follow(self, case_set: CaseSet, case: Case) -> Follower | None:
        """Start PyTorch beside a search; None where it is not there."""


@dataclass(frozen=True)
class TranslatorEngine:
    """An encoder, and a decoder that reads what it writes, in the runtime's own loops."""

    encoder: SourceEncoder
    decoder: Decoder
    open_tokenizers: Callable[[], Tokenizers]
    model: Model | None = None  # scores the targets that a search finds, if PyTorch is there

    @property
    def artifacts(self) -> tuple[Artifact, Artifact]:
        return self.encoder.artifact, self.decoder.artifact

    @property
    def encoding(self) -> Encoding:
        """What the encoder takes beside the decoder."""
        return Encoding(self.encoder.max_batch, find_room(self.encoder.artifact))

    def score(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Return the mean log-probability of a target's tokens, taken one by one."""
        running = self.decoder.start(1, len(target), self.encoder.prepare([source]))
        logits = [running.decode([token]) for token in target[:-1]]
        return float(compute_logprobs(np.concatenate(logits), np.asarray(target[1:])).mean())

    def follow(self, case_set: CaseSet, case: Case) -> None:
        """Return nothing: PyTorch is not there."""

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        if case.graph == self.encoder.artifact.graph:
            return read_sources(self.encoder, case_set, case)
        if case.runner == "attention":
            return read_attention(self, case_set, case)
        return run(self.decoder, case_set, case, self.encoder)

    def compare(self, case_set: CaseSet, cases: Sequence[Case], limits: Limits) -> Outcome:
        runner = cases[0].runner
        if runner == "greedy":
            tokenizers = self.open_tokenizers()
            return compare_greedy(self.decoder, case_set, cases, limits, tokenizers, self.encoder)
        if runner == "beams":
            return compare_beams(self, case_set, cases, limits, self.model or self)
        return compare_known(self.run, case_set, cases, limits)

    def close(self) -> None:
        self.encoder.close()
        self.decoder.close()


def read_sources(encoder: SourceEncoder, case_set: CaseSet, case: Case) -> Iterator[Seen]:
    """Yield what the decoder would read of sources, as one padded batch; see `stack_places`."""
    context = encoder.encode([case_set.texts[row.text].tokens for row in case.rows])
    tensors = [context.buffers[read.name].numpy() for _, read in encoder.reads]
    for row, one in enumerate(case.rows):
        known = case_set.answers.get("cross", {}).get(one.text)
        if known is None:
            continue
        values = stack_places([tensor[row] for tensor in tensors], known.positions)
        yield Seen(one.text, {"cross": Known(known.positions, values)}, Location(case, 0, row))


def stack_places(tensors: Sequence[Array], places: Integers) -> Array:
    """Return what an encoder gives of a source at some places: (P, N, W), of each of its N tensors.

    Keys and values are (H, S, D), a recurrent model's memory (S, W), and its states (1, W), which every place
    has. Narrower ones than the widest are filled up with zeros.
    """
    flat = []
    for tensor in tensors:
        if tensor.ndim == 3:
            flat.append(tensor[:, places].swapaxes(0, 1).reshape(len(places), -1))
        else:
            flat.append(tensor.repeat(len(places), axis=0) if len(tensor) == 1 else tensor[places])
    width = max(array.shape[1] for array in flat)
    wide = [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in flat]
    return np.stack(wide, axis=1).astype(np.float32)


def read_attention(engine: TranslatorEngine, case_set: CaseSet, case: Case) -> Iterator[Seen]:
    """Yield what each known token attends to, (P, L, H, S), in rows that share a source."""
    names = [s.name for s in engine.decoder.artifact.outputs if s.role.startswith("cross_attention.")]
    text = case_set.texts[case.rows[0].text]
    length = case.rows[0].ends[-1]
    sources = case_set.list_sources(case)[:1]
    running = engine.decoder.start(len(case.rows), length, engine.encoder.prepare(sources))
    ids = np.asarray([text.tokens[:length]] * len(case.rows))
    results = running.run_graph(ids, np.ones_like(ids, bool), [0], names)
    every = np.stack([results[name] for name in names], axis=1)  # (2, L, H, T, S)
    for row, one in enumerate(case.rows):
        known = case_set.answers.get("attention", {}).get(one.text)
        if known is None:
            continue
        values = np.moveaxis(every[row][:, :, known.positions], 2, 0)
        yield Seen(one.text, {"attention": Known(known.positions, values)}, Location(case, 0, row))


def make_search(case_set: CaseSet) -> Search:
    """Return the search of a set's beams, which forbids the tokens that the model itself never generates."""
    chosen = case_set.search
    assert chosen is not None
    constraints = Constraints(eos=tuple(chosen.eos), suppressed=tuple(chosen.suppressed))
    return Search(
        num_beams=chosen.num_beams,
        n_best=chosen.num_beams,
        max_new_tokens=chosen.max_new_tokens,
        constraints=constraints,
    )


def search_beams(
    engine: TranslatorEngine, case_set: CaseSet, case: Case, follower: Follower | None = None
) -> list[list[Hypothesis]]:
    """Return the best targets of each source, with a follower beside the engine, if there is one."""
    search = make_search(case_set)
    sources = case_set.list_sources(case)
    starts = [list(case_set.texts[row.text].tokens[:1]) for row in case.rows]
    beams = BeamSearch(starts, search)
    rows = len(sources) * search.num_beams
    running = engine.decoder.start(rows, search.max_new_tokens, engine.encoder.prepare(sources))
    while not beams.done:
        logits = running.decode(beams.tokens)
        if follower is not None:
            follower.compare(logits, beams.tokens, beams.active)
        copies = beams.advance(logits)
        running.copy_rows(copies)
        if follower is not None:
            follower.copy_rows(copies)
    return beams.list_hypotheses()


def find_targets(engine: TranslatorEngine, case_set: CaseSet) -> list[Text]:
    """Return the targets that an engine's own searches of a set's sources find."""
    found: list[Text] = []
    artifact = engine.decoder.artifact
    searches = [case for case in case_set.cases if case.runner == "beams"]
    for case in (part for one in searches for part in case_set.fit(one, artifact, engine.encoding)):
        for row, targets in zip(case.rows, search_beams(engine, case_set, case), strict=True):
            text = case_set.texts[row.text]
            found += [replace(text, tokens=(text.tokens[0], *one.token_ids)) for one in targets]
    return found


def compare_beams(
    engine: TranslatorEngine,
    case_set: CaseSet,
    cases: Sequence[Case],
    limits: Limits,
    model: Model,
) -> Outcome:
    """Return the outcome of beams over a padded batch: the scores are those that the model gives the targets.

    Which targets the search finds says nothing: where two are as good as equal another is pruned, and what
    the one that is kept comes to is anybody's guess. But the search decides by its logits alone, and it is
    the same code with every engine. So where PyTorch is there each of its logits is compared with PyTorch's,
    whichever targets they lead to. Golden data knows the scores of targets that PyTorch found.
    """
    known = list_known_scores(case_set)
    errors: list[float] = []
    along: list[float] = []
    follower = None
    for case in cases:
        follower = model.follow(case_set, case)
        found = search_beams(engine, case_set, case, follower)
        for row, hypotheses in zip(case.rows, found, strict=True):
            text = case_set.texts[row.text]
            assert text.source is not None
            for one in hypotheses:
                tokens = (text.tokens[0], *one.token_ids)
                score = known.get((text.source, tokens))
                if score is None:
                    score = model.score(case_set.texts[text.source].tokens, tokens)
                errors.append(abs(one.score - score))
        along += [] if follower is None else follower.errors
    worst = float(np.max(errors))
    outcome = judge_outcome(ScoreMetrics(worst, math.isfinite(worst), len(errors)), limits)
    if follower is None:
        return outcome
    worst = float(np.max(along))
    metrics = ErrorMetrics(worst, math.isfinite(worst), len(along))
    followed = judge_outcome(metrics, limits, SEARCH, outcome.failures)
    return replace(
        followed,
        metrics={**outcome.metrics, **followed.metrics},
        limits={**outcome.limits, **followed.limits},
    )


def list_known_scores(case_set: CaseSet) -> dict[tuple[int, tuple[int, ...]], float]:
    """Return the scores of the targets that PyTorch found, by the source's number and the tokens."""
    scores = {}
    for number, known in case_set.answers.get("score", {}).items():
        text = case_set.texts[number]
        assert text.source is not None
        scores[text.source, text.tokens] = float(known.values[0])
    return scores
