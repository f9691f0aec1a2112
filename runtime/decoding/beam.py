"""Greedy and beam search over a decoder's logits, step by step, as transformers searches.

The engine computes logits and holds a K/V cache; this module only says what to feed, which cache rows to
copy, and what came out. A source is a text to translate, or a prompt to continue. R engine rows = sources *
num_beams, the rows of a source adjacent; V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ..bundle.defaults import GenerationDefaults
from ..errors import InputError
from .beam_candidates import (
    BLOCKS_OF,
    FLOAT32_LEAST,
    BeamCandidate,
    compute_log_sum,
    find_candidates,
)
from .checks import check_integer, check_positive, is_number
from .constraints import Constraints, constrain
from .processors import Float32, penalize_repeats
from .rules import add_sequence_bias
from .sampling import Logits, check_logits

Ending: TypeAlias = Literal["eos", "length", "context", "cancelled"]
ZERO = np.float32(0)
MAX_PENALTY = 1e30  # what a length may divide a score by, or multiply it with, and stay in float32


@dataclass(frozen=True, kw_only=True)
class Search:
    """How one call searches; `GenerationOptions` says what the fields mean."""

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    max_new_tokens: int = 512  # behind the start token, or the prompt
    constraints: Constraints
    # As in transformers it multiplies the log-probabilities of tokens that a row already has, or of a greedy
    # search their negative logits, and divides the others.
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_integer("num_beams", self.num_beams, 1, "1 searches greedily")
        check_integer("n_best", self.n_best, 1, "1 returns the best only")
        check_integer("max_new_tokens", self.max_new_tokens, 1, "each token costs a step of the engine")
        if self.n_best > self.num_beams:
            raise InputError(
                f"n_best is {self.n_best}; it must be at most num_beams, {self.num_beams}; lower it, or "
                f"search with num_beams={self.n_best}",
                option="n_best",
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InputError(
                f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'; False "
                "is the usual choice",
                option="early_stopping",
            )
        penalty = self.length_penalty
        is_finite = is_number(penalty) and math.isfinite(penalty)
        if not is_finite or abs(penalty) * math.log(self.max_new_tokens) > math.log(MAX_PENALTY):
            raise InputError(
                f"length_penalty is {penalty!r}; it must be a number such that max_new_tokens **"
                f" length_penalty ({self.max_new_tokens} ** it) is between 1e-30 and 1e30; 0.0 disables it",
                option="length_penalty",
            )
        check_positive("repetition_penalty", self.repetition_penalty, "1.0 disables it")
        least = self.constraints.min_new_tokens
        if least > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {least}; it must be at most max_new_tokens, {self.max_new_tokens}; "
                "lower min_new_tokens or raise max_new_tokens",
                option="min_new_tokens",
            )

    @property
    def changes_scores(self) -> bool:
        """Whether more is done to scores than to forbid or force tokens."""
        return self.repetition_penalty != 1.0 or self.constraints.changes_scores


def make_search(defaults: GenerationDefaults, **given: Any) -> Search:
    """Return a bundle's default search, changed by fields of `Search` and `Constraints` that are not None."""
    chosen = {name: value for name, value in given.items() if value is not None}
    most = chosen.pop("max_new_tokens", defaults.max_new_tokens or defaults.max_length)
    least = defaults.min_new_tokens
    if "max_new_tokens" in given and type(most) is int:
        least = min(least, max(0, most))  # a default over what is given is not the caller's mistake
    constraints = Constraints(
        eos=defaults.eos,
        suppressed=defaults.suppressed,
        forced_bos=defaults.forced_bos,
        forced_eos=defaults.forced_eos,
        no_repeat_ngram_size=chosen.pop("no_repeat_ngram_size", defaults.no_repeat_ngram_size),
        min_new_tokens=chosen.pop("min_new_tokens", least),
        renormalize=defaults.renormalize,
        rules=defaults.rules,
    )
    n_best = chosen.get("n_best")
    usual: dict[str, Any] = {
        "num_beams": max(defaults.num_beams, n_best) if type(n_best) is int else defaults.num_beams,
        "length_penalty": defaults.length_penalty,
        "early_stopping": defaults.early_stopping,
        "repetition_penalty": defaults.repetition_penalty,
    }
    return Search(constraints=constraints, max_new_tokens=most, **(usual | chosen))


@dataclass(frozen=True)
class Hypothesis:
    """One result for a source."""

    token_ids: tuple[int, ...]  # without the start token or the prompt; with the end token
    # The sum of the tokens' log-probabilities, 0 for a forced one, divided by their number to the power of
    # length_penalty: transformers' sequences_scores, which it does not have of greedy search.
    score: float
    finish_reason: Ending  # "context" at a limit of its source's own, below max_new_tokens
    # Of each token under the model itself, before any constraint and penalty.
    logprobs: tuple[float, ...] = field(default=(), compare=False)


class BeamSearch:
    """One batch being searched; feed `tokens`, copy cache rows as `advance` says, until `done`.

    Each prompt has num_beams rows of the engine, which begin alike, and at most `limits` new tokens, or
    max_new_tokens if that is less. A translation's is the decoder's start token. A prompt's tokens count for
    no_repeat_ngram_size and repetition_penalty, but for no length, as with transformers' decoders.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], search: Search, limits: Sequence[int] | None = None
    ) -> None:
        if len(prompts) == 0:
            raise InputError("there are no prompts; a search needs at least one")
        for prompt in prompts:
            if len(prompt) == 0:
                raise InputError("a prompt has no tokens; give at least the model's start token")
            for token in prompt:
                check_integer("a prompt's token", token, 0, "give the decoder's start token, or a text's ids")
        most = search.max_new_tokens
        self.search = search
        R = len(prompts) * search.num_beams
        # What each row has been fed so far, `tokens` included.
        self.histories = [list(prompt) for prompt in prompts for _ in range(search.num_beams)]
        self.logprobs: list[list[float]] = [[] for _ in range(R)]  # of the tokens that each row chose
        self.active = [True] * R  # rows whose source is still searched; the others' logits are ignored
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._limits = [min(limit, most) for limit in limits or [most] * len(prompts)]  # of new tokens
        self._finished: list[list[Hypothesis]] = [[] for _ in prompts]
        # At first a source's rows are alike: all but one are dead, or each token would come num_beams times.
        self._sums = np.full(R, -np.inf, dtype=np.float32)
        self._sums[:: search.num_beams] = 0
        self._ranks = np.arange(R)  # of a source's rows, the best first; orders equal candidates
        self._room: Float32 | None = None
        self._vocabulary = 0  # V of the logits that it is for

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute."""
        return not any(self.active)

    @property
    def tokens(self) -> list[int]:
        """The token to feed next to each of the R rows."""
        return [history[-1] for history in self.histories]

    def advance(self, logits: Logits) -> list[tuple[int, int]]:
        """Take one step, from the logits (R, V) of any float type that follow `tokens`.

        Return the cache rows to copy before the next step, as (from, to): rows of one source, never to a row
        that is copied from, so that their order does not matter.
        """
        R = len(self.histories)
        if self.done or logits.ndim != 2 or len(logits) != R:
            raise InputError(
                f"logits of shape {logits.shape} came to a search of {R} rows that is "
                f"{'done' if self.done else 'not done'}; give ({R}, V) until it is done"
            )
        copies: list[tuple[int, int]] = []
        with np.errstate(over="ignore", divide="ignore"):  # infinities are looked at in _find_candidates
            for source, first in enumerate(range(0, R, self.search.num_beams)):
                if self.active[first]:
                    copies += self._advance_source(source, first, logits)
        for row in range(R):
            if not self.active[row]:
                self.histories[row].append(self.histories[row][-1])  # the engine feeds all rows
        return copies

    def cancel(self, source: int) -> None:
        """End a source of a greedy search with the tokens that it has; nothing happens if it has ended."""
        assert self.search.num_beams == 1
        if not self.active[source]:
            return
        token_ids = tuple(self.histories[source][self._prompt_lengths[source] :])
        score = self._penalize_length(self._sums[source], max(1, len(token_ids)))
        logprobs = tuple(self.logprobs[source])
        self._finished[source] = [Hypothesis(token_ids, score, "cancelled", logprobs)]
        self.active[source] = False

    def drop(self, source: int) -> None:
        """End a source's search without a result; nothing happens if it has ended."""
        n = self.search.num_beams
        if self.active[source * n]:
            self._finished[source] = []
            self.active[source * n : source * n + n] = [False] * n

    def list_hypotheses(self) -> list[list[Hypothesis]]:
        """Return each source's finished hypotheses, n_best at most, best first; none of one dropped."""
        return [finished[: self.search.n_best] for finished in self._finished]

    def _advance_source(self, source: int, first: int, logits: Logits) -> list[tuple[int, int]]:
        n = self.search.num_beams
        finished = self._finished[source]
        prompt_length = self._prompt_lengths[source]
        length = len(self.histories[first]) - prompt_length + 1  # new tokens after this step
        find = self._find_likeliest if n == 1 else self._find_candidates
        running: list[BeamCandidate] = []
        for place, extension in enumerate(find(source, first, logits)):
            reason = self._find_ending(extension.token, length, self._limits[source])
            if reason is None:
                running.append(extension)
            elif place < n:  # those after are there only so that num_beams can go on
                ids = (*self.histories[extension.row][prompt_length:], extension.token)
                logprobs = (*self.logprobs[extension.row], extension.logprob)
                score = self._penalize_length(extension.score, length)
                finished.append(Hypothesis(ids, score, reason, logprobs))
        finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equal ones the older first
        del finished[n:]
        if not running and not finished:
            raise InputError(
                f"the constraints leave no token at position {length} of source {source}; loosen "
                "no_repeat_ngram_size or suppressed, or raise num_beams",
                option="no_repeat_ngram_size",
            )
        if not running or self._has_ended(finished, running[0], length, self._limits[source]):
            self.active[first : first + n] = [False] * n
            return []
        return self._move(first, running[:n])

    def _find_ending(self, token: int, length: int, limit: int) -> Ending | None:
        if token in self.search.constraints.eos:
            return "eos"
        if length < limit:
            return None
        return "length" if limit == self.search.max_new_tokens else "context"

    def _penalize_length(self, score: np.float32, length: int) -> float:
        return float(score / np.float32(length**self.search.length_penalty))

    def _has_ended(self, finished: list[Hypothesis], best: BeamCandidate, length: int, limit: int) -> bool:
        """Return whether a source's running hypotheses are not expected to be better than the finished."""
        search = self.search
        if len(finished) < search.num_beams:
            return False
        if search.early_stopping is True:
            return True
        if search.early_stopping == "never" and search.length_penalty > 0:
            length = limit
        return self._penalize_length(best.score, length) <= finished[-1].score

    def _move(self, first: int, running: list[BeamCandidate]) -> list[tuple[int, int]]:
        """Give each candidate a row: a parent's first child stays, the others go where nothing lives."""
        if self.search.num_beams == 1:
            self._extend_row(first, running[0])
            return []
        staying = {extension.row for extension in running}
        dead = [row for row in range(first, first + self.search.num_beams) if row not in staying]
        self._sums[dead] = -np.inf
        copies = []
        placed = []
        for rank, extension in enumerate(running):
            row = extension.row
            if row in staying:
                staying.remove(row)
            else:
                row = dead.pop(0)
                if self.histories[row] != self.histories[extension.row]:  # at first all rows are alike
                    self.histories[row] = self.histories[extension.row].copy()
                    copies.append((extension.row, row))
                self.logprobs[row] = self.logprobs[extension.row].copy()
            self._ranks[row] = rank
            placed.append((row, extension))
        # Only after all copies, for these come from what the rows were fed so far.
        for row, extension in placed:
            self._extend_row(row, extension)
        for row in dead:
            self._extend_row(row, running[0]._replace(score=np.float32(-np.inf)))
        return copies

    def _extend_row(self, row: int, extension: BeamCandidate) -> None:
        self._sums[row] = extension.score
        self.histories[row].append(extension.token)
        self.logprobs[row].append(extension.logprob)

    def _find_likeliest(self, source: int, row: int, logits: Logits) -> list[BeamCandidate]:
        """Return the continuation of a greedy search's row; none where the constraints leave none.

        It is the best of `_find_candidates`, found with numbers in place of arrays of one: a small model's
        whole step takes less time than those.
        """
        terms, log_sum = self._score_row(source, row, 0, logits)
        line = self._make_room(logits.shape[1])[0]
        # By the logits themselves, as transformers: rounded log-probabilities have more ties.
        token = int(line.argmax())
        score = line[token] - terms[0] - terms[1] + self._sums[row]
        if not score > -np.inf:
            return []
        return [BeamCandidate(score, row, token, float(logits[row, token]) - log_sum)]

    def _find_candidates(self, source: int, first: int, logits: Logits) -> list[BeamCandidate]:
        """Return a source's best continuations, best first, enough of them that num_beams go on."""
        n = self.search.num_beams
        rows = slice(first, first + n)
        scored = [self._score_row(source, first + place, place, logits) for place in range(n)]
        terms = np.array([(*row_terms, self._sums[first + i]) for i, (row_terms, _) in enumerate(scored)])
        count = max(2, 1 + len(self.search.constraints.eos)) * n
        scores = self._make_room(logits.shape[1])[:n]
        best = find_candidates(scores, terms, self._ranks[rows], count)
        return [
            BeamCandidate(score, first + row, token, float(logits[first + row, token]) - scored[row][1])
            for score, row, token, _ in best
        ]

    def _score_row(
        self, source: int, row: int, place: int, logits: Logits
    ) -> tuple[tuple[np.float32, np.float32], float]:
        """Fill a place of the room with what a row's tokens are chosen by: its logits, constrained.

        Returns:
            The highest score and the logarithm that make log-probabilities of the scores, and the logarithm
            of the sum of the exponentials of the row's own logits.
        """
        search = self.search
        constraints = search.constraints
        limit = self._limits[source]
        prompt_length = self._prompt_lengths[source]
        histories = self.histories[row : row + 1]
        V = logits.shape[1]
        room = self._make_room(V)
        scores = room[place : place + 1, :V]
        line = scores[0]
        spare = room[-1, :V]
        line[:] = logits[row]
        highest = line.max()
        if not math.isfinite(highest):
            check_logits(logits.astype(np.float32))
        normalizer = compute_log_sum(line, highest, spare)
        log_sum = float(highest) + float(normalizer)
        if search.changes_scores:
            if search.num_beams > 1:  # transformers changes the log-probabilities of beams
                line -= highest
                line -= normalizer
                highest = normalizer = ZERO
            self._change_scores(scores, histories)
        if constraints.renormalize:
            constrain(scores, histories, constraints, limit, prompt_length)
        if constraints.renormalize or (search.changes_scores and search.num_beams == 1):
            highest = np.maximum(line.max(), FLOAT32_LEAST)  # of a row with nothing left, no NaN
            normalizer = np.maximum(compute_log_sum(line, highest, spare), FLOAT32_LEAST)
        if not constraints.renormalize:
            constrain(scores, histories, constraints, limit, prompt_length)
        if constraints.find_forced_token(1 + len(histories[0]) - prompt_length, limit) is not None:
            highest = normalizer = ZERO  # a forced token adds 0, not its log-probability
        return (highest, normalizer), log_sum

    def _change_scores(self, scores: Float32, histories: Sequence[Sequence[int]]) -> None:
        """Apply what comes before all constraints to scores (rows, V)."""
        add_sequence_bias(scores, histories, self.search.constraints.rules.sequence_bias)
        if self.search.repetition_penalty != 1.0:
            for row, history in zip(scores, histories, strict=True):
                penalize_repeats(row, history, np.float32(self.search.repetition_penalty))

    def _make_room(self, V: int) -> Float32:
        """Return room for a source's scores and one row more; its width in whole blocks, -inf beyond V."""
        if self._room is None or self._vocabulary != V:
            width = -(-V // BLOCKS_OF) * BLOCKS_OF
            self._room = np.full((self.search.num_beams + 1, width), -np.inf, dtype=np.float32)
            self._vocabulary = V
        return self._room
