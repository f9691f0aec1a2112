"""Greedy and beam search over an encoder-decoder's logits, step by step, as transformers searches.

The engine computes logits and holds a K/V cache; this only says what to feed, which cache rows to
copy, and what came out. R engine rows = sources * num_beams, the rows of a source adjacent; V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..bundle.defaults import GenerationDefaults
from ..errors import InputError
from .constraints import Constraints, constrain
from .sampling import Logits, check_integer, check_logits

Float32 = npt.NDArray[np.float32]
BLOCKS_OF = 256  # tokens: the best candidates are looked for in the few blocks that have them
FLOAT32_LEAST = np.finfo(np.float32).min
MOST_PENALTY = 1e30  # what a length may divide a score by, or multiply it with, and stay in float32


@dataclass(frozen=True, kw_only=True)
class Search:
    """How one translate call chooses its tokens.

    Attributes:
        num_beams: Hypotheses followed at a time; 1 takes the likeliest token always (greedy).
        length_penalty: A hypothesis is ranked by its log-probability divided by its length to this
            power: above 0 favours long ones, 0.0 turns it off.
        early_stopping: True ends a source at num_beams finished hypotheses. False goes on while
            the best running one, as long as it is now, would be better than the worst of them;
            "never" while it could still become so.
        n_best: Hypotheses returned for each source; at most num_beams.
        max_new_tokens: The most tokens that follow the start token.
        constraints: Tokens that are forbidden or forced, and those that end a sequence.

    Raises:
        InputError: A value is of the wrong type or outside its range.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    max_new_tokens: int = 512
    constraints: Constraints

    def __post_init__(self) -> None:
        check_integer("num_beams", self.num_beams, 1, "1 searches greedily")
        check_integer("n_best", self.n_best, 1, "1 returns the best only")
        check_integer("max_new_tokens", self.max_new_tokens, 1, "each token costs a step of the engine")
        if self.n_best > self.num_beams:
            raise InputError(
                f"n_best is {self.n_best}; it must be at most num_beams, {self.num_beams}; lower it, or "
                f"search with num_beams={self.n_best}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InputError(
                f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'; False "
                "is the usual choice"
            )
        penalty = self.length_penalty
        number = isinstance(penalty, Real) and not isinstance(penalty, bool) and math.isfinite(penalty)
        if not number or abs(penalty) * math.log(self.max_new_tokens) > math.log(MOST_PENALTY):
            raise InputError(
                f"length_penalty is {penalty!r}; it must be a number for which max_new_tokens "
                f"({self.max_new_tokens}) to its power stays within 1e-30 and 1e30; 0.0 disables it"
            )
        least = self.constraints.min_new_tokens
        if least > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {least}; it must be at most max_new_tokens, {self.max_new_tokens}; "
                "lower the one or raise the other"
            )


def search_of(defaults: GenerationDefaults, **given: Any) -> Search:
    """A bundle's own way to search, but for what is given.

    Args:
        defaults: the bundle's.
        **given: fields of `Search` and `Constraints`; None is the same as nothing.

    Raises:
        InputError: A value is of the wrong type or outside its range.
    """
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
    )
    n_best = chosen.get("n_best")
    usual = {
        "num_beams": max(defaults.num_beams, n_best) if type(n_best) is int else defaults.num_beams,
        "length_penalty": defaults.length_penalty,
        "early_stopping": defaults.early_stopping,
    }
    return Search(constraints=constraints, max_new_tokens=most, **{**usual, **chosen})


@dataclass(frozen=True)
class Hypothesis:
    """One result for a source.

    Attributes:
        token_ids: Without the start token; with the end token, if it ended by one.
        score: The sum of the tokens' log-probabilities divided by their number to the power of
            length_penalty: transformers' ``sequences_scores``. A forced token adds 0. Greedy
            search has the same score, where transformers has none.
        finish_reason: "eos" after an end token, "length" at max_new_tokens.
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: Literal["eos", "length"]


class Extension(NamedTuple):
    """A token that may follow what a row has, and the sum of log-probabilities it would have."""

    score: np.float32
    row: int
    token: int


class BeamSearch:
    """One batch being searched; feed `tokens`, copy cache rows as `advance` says, until `done`.

    Args:
        sources: How many; each has num_beams rows of the engine, and all of these begin alike.
        start: The decoder's start token.
        search: The options.

    Attributes:
        histories: What each of the R rows has been fed so far, `tokens` included.
        active: Of each row, whether its source is still searched. The logits of the others are
            ignored, whatever they are fed.

    Raises:
        InputError: `sources` or `start` is not an integer, or too low.
    """

    def __init__(self, sources: int, start: int, search: Search) -> None:
        check_integer("sources", sources, 1, "a search needs a source")
        check_integer("start", start, 0, "give the decoder's start token")
        self.search = search
        R = sources * search.num_beams
        self.histories = [[start] for _ in range(R)]
        self.active = [True] * R
        self._finished: list[list[Hypothesis]] = [[] for _ in range(sources)]
        # At first a source's rows are alike: all but one are dead, or each token would come num_beams times.
        self._sums = np.full(R, -np.inf, dtype=np.float32)
        self._sums[:: search.num_beams] = 0
        self._ranks = np.arange(R)  # of a source's rows, the best first; orders equal candidates
        self._room: Float32 | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute."""
        return not any(self.active)

    @property
    def tokens(self) -> list[int]:
        """The token to feed next to each of the R rows."""
        return [history[-1] for history in self.histories]

    def advance(self, logits: Logits) -> list[tuple[int, int]]:
        """Take one step, from the logits that follow `tokens`.

        Args:
            logits: (R, V), any float type; never modified.

        Returns:
            The cache rows to copy before the next step, as (from, to). Rows of one source, never
            to a row that is copied from: their order does not matter.

        Raises:
            BackendError: An active row has NaN, infinity, or nothing but -inf.
            InputError: The logits have another shape, the search was done, a constraint names a
                token beyond V, or the constraints leave no token at all.
        """
        R = len(self.histories)
        if self.done or logits.ndim != 2 or len(logits) != R:
            raise InputError(
                f"logits of shape {logits.shape} came to a search of {R} rows that is "
                f"{'done' if self.done else 'not done'}; give ({R}, V) until it is done"
            )
        copies: list[tuple[int, int]] = []
        with np.errstate(over="ignore", divide="ignore"):  # infinities are looked at in _candidates
            for source, first in enumerate(range(0, R, self.search.num_beams)):
                if self.active[first]:
                    copies += self._advance_source(source, first, logits)
        for row in range(R):
            if not self.active[row]:
                self.histories[row].append(self.histories[row][-1])  # the engine feeds all rows
        return copies

    def hypotheses(self) -> list[list[Hypothesis]]:
        """The n_best hypotheses of each source, best first.

        Fewer where the constraints leave fewer, and those finished so far of a source that is
        still active.
        """
        return [finished[: self.search.n_best] for finished in self._finished]

    def _advance_source(self, source: int, first: int, logits: Logits) -> list[tuple[int, int]]:
        n, finished = self.search.num_beams, self._finished[source]
        length = len(self.histories[first])  # of the hypotheses after this step: the start is left out
        running: list[Extension] = []
        for place, extension in enumerate(self._candidates(first, logits)):
            reason = self._finish_reason(extension.token, length)
            if reason is None:
                running.append(extension)
            elif place < n:  # those after are there only so that num_beams can go on
                ids = (*self.histories[extension.row][1:], extension.token)
                finished.append(Hypothesis(ids, self._penalized(extension.score, length), reason))
        finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equal ones the older first
        del finished[n:]
        if not running and not finished:
            raise InputError(
                f"the constraints leave no token at position {length} of source {source}; loosen "
                "no_repeat_ngram_size or suppressed, or raise num_beams"
            )
        if not running or self._ends(finished, running[0], length):
            self.active[first : first + n] = [False] * n
            return []
        return self._move(first, running[:n])

    def _finish_reason(self, token: int, length: int) -> Literal["eos", "length"] | None:
        if token in self.search.constraints.eos:
            return "eos"
        return "length" if length == self.search.max_new_tokens else None

    def _penalized(self, score: np.float32, length: int) -> float:
        return float(score / np.float32(length**self.search.length_penalty))

    def _ends(self, finished: list[Hypothesis], best: Extension, length: int) -> bool:
        """Whether a source keeps what it has: its running hypotheses are not expected to be better."""
        search = self.search
        if len(finished) < search.num_beams:
            return False
        if search.early_stopping == "never" and search.length_penalty > 0:
            length = search.max_new_tokens
        return search.early_stopping is True or self._penalized(best.score, length) <= finished[-1].score

    def _move(self, first: int, running: list[Extension]) -> list[tuple[int, int]]:
        """Give each candidate a row: a parent's first child stays, the others go where nothing lives."""
        staying = {extension.row for extension in running}
        dead = [row for row in range(first, first + self.search.num_beams) if row not in staying]
        self._sums[dead] = -np.inf
        copies, placed = [], []
        for rank, extension in enumerate(running):
            row = extension.row
            if row in staying:
                staying.remove(row)
            else:
                row = dead.pop(0)
                if self.histories[row] != self.histories[extension.row]:  # at first all rows are alike
                    self.histories[row] = self.histories[extension.row].copy()
                    copies.append((extension.row, row))
            self._sums[row], self._ranks[row] = extension.score, rank
            placed.append((row, extension.token))
        # Only after all copies, for these come from what the rows were fed so far.
        for row, token in placed + [(row, running[0].token) for row in dead]:
            self.histories[row].append(token)
        return copies

    def _candidates(self, first: int, logits: Logits) -> list[Extension]:
        """The best continuations of a source, best first, and enough of them that num_beams go on."""
        n, V = self.search.num_beams, logits.shape[1]
        rows = slice(first, first + n)
        room = self._buffer(V)
        scores = room[:n, :V]
        scores[:] = logits[rows]
        highest = scores.max(axis=-1)
        if not np.isfinite(highest).all():
            check_logits(logits.astype(np.float32))
        constraints, limit = self.search.constraints, self.search.max_new_tokens
        if constraints.renormalize:
            constrain(scores, self.histories[rows], constraints, limit)
            highest = np.maximum(scores.max(axis=-1), FLOAT32_LEAST)  # of a row with nothing left, no NaN
        normalizers = np.array([_log_sum(room[row], highest[row], room[n]) for row in range(n)])
        normalizers = np.maximum(normalizers, FLOAT32_LEAST)
        if not constraints.renormalize:
            constrain(scores, self.histories[rows], constraints, limit)
        if constraints.forced(len(self.histories[first]), limit) is not None:
            highest[:] = normalizers[:] = 0  # a forced token adds 0, not its log-probability
        terms = np.stack([highest, normalizers, self._sums[rows]], axis=-1)
        if n == 1:  # by the logits themselves, as transformers: rounded log-probabilities have more ties
            token = int(scores.argmax())
            score = _total(scores[:, token], terms)[0]
            return [Extension(score, first, token)] if score > -np.inf else []
        count = max(2, 1 + len(constraints.eos)) * n
        found = best_candidates(room[:n], terms, self._ranks[rows], count)
        return [Extension(score, first + row, token) for score, row, token in found]

    def _buffer(self, V: int) -> Float32:
        """Room for a source's scores and one row more; its width in whole blocks, -inf beyond V."""
        width = -(-V // BLOCKS_OF) * BLOCKS_OF
        if self._room is None or self._room.shape[1] != width:
            self._room = np.empty((self.search.num_beams + 1, width), dtype=np.float32)
        self._room[:, V:] = -np.inf
        return self._room


def best_candidates(
    scores: Float32, terms: Float32, ranks: npt.NDArray[np.int64], count: int
) -> list[Extension]:
    """The `count` best tokens of all rows together, best first, without -inf.

    Of equal ones the first: by the row's rank, then by token. The rank is what transformers counts
    rows by; which of equal ones it takes is up to torch.topk.

    Args:
        scores: (rows, whole blocks), before the terms are applied.
        terms: (rows, 3): the highest logit and the logarithm that normalize a row's scores, and
            the row's sum so far.
        ranks: (rows,), each another.
        count: At least 1.
    """
    # A block is a column: tokens `width` apart. numpy finds maxima across rows faster than along them.
    blocks = scores.reshape(len(scores), BLOCKS_OF, -1)
    width = blocks.shape[-1]
    peaks = _total(blocks.max(axis=1), terms[:, None])
    # The terms keep the order within a row, so the peaks are sums that exist: at least `count`
    # tokens reach the count-th highest peak, and all that do are in blocks whose peak does.
    border = np.float32(-np.inf)
    if count < peaks.size:
        border = np.partition(peaks, peaks.size - count, axis=None)[peaks.size - count]
    rows, columns = np.nonzero((peaks >= border) & (peaks > -np.inf))
    totals = _total(blocks[rows, :, columns], terms[rows, None])  # (blocks that count, BLOCKS_OF)
    which, lines = np.nonzero((totals >= border) & (totals > -np.inf))
    found, rows, tokens = totals[which, lines], rows[which], lines * width + columns[which]
    order = np.lexsort((tokens, ranks[rows], -found))[:count]
    return [Extension(found[i], int(rows[i]), int(tokens[i])) for i in order]


def _total(scores: Float32, terms: Float32) -> Float32:
    """The rows' sums with these scores added: torch's float32 operations in torch's order."""
    total: Float32 = scores - terms[..., 0]
    total -= terms[..., 1]
    total += terms[..., 2]
    return total


def _log_sum(row: Float32, highest: np.float32, room: Float32) -> np.float32:
    """The logarithm of a softmax's divisor, computed in `room`: a row at a time stays in the CPU's cache."""
    np.subtract(row, highest, out=room)
    np.exp(room, out=room)
    return np.log(room.sum())  # type: ignore[no-any-return]
