"""Rules that forbid or force tokens, or favour the end: those of transformers, in their order.

R rows, T tokens so far (the start token or the prompt counts), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..bundle.defaults import NO_RULES, TokenRules
from ..errors import InputError
from .checks import check_integer, check_positive
from .processors import forbid_repeats
from .rules import favour_end, forbid_words


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Which tokens are forbidden or forced, and where."""

    eos: tuple[int, ...]  # the tokens that end a sequence; of none only its length does
    # Never produced, unless forced. As with transformers' bad_words_ids, an end token among them is not
    # suppressed: min_new_tokens holds that one back.
    suppressed: tuple[int, ...] = ()
    forced_bos: int | None = None  # the first token after the start token
    forced_eos: int | None = None  # the last token of a sequence that reaches max_new_tokens
    no_repeat_ngram_size: int | None = None  # no such run comes twice; the start token and a prompt's count
    min_new_tokens: int = 0  # no end token before this many others
    # What the constraints leave is made a distribution again, as by transformers' renormalize_logits.
    renormalize: bool = False
    rules: TokenRules = NO_RULES  # the rest of what a checkpoint may say

    def __post_init__(self) -> None:
        for name in ("eos", "suppressed"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple):
                raise InputError(f"{name} is {ids!r}; it must be a tuple of token ids; () for none")
            for token in ids:
                check_integer(f"a token of {name}", token, 0, "leave it out")
        for name in ("forced_bos", "forced_eos"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, "None forces nothing")
        if self.no_repeat_ngram_size is not None:
            check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 1, "None disables it")
        check_integer("min_new_tokens", self.min_new_tokens, 0, "0 disables it")
        if not isinstance(self.renormalize, bool):
            raise InputError(f"renormalize is {self.renormalize!r}; it must be True or False")
        for token in self._list_ruled():
            check_integer("a token of the rules", token, 0, "leave it out")
        check_integer("decay_start", self.rules.decay_start, 0, "0 begins at once")
        check_positive("decay_factor", self.rules.decay_factor, "1.0 disables it")

    def find_forced_token(self, length: int, max_new_tokens: int) -> int | None:
        """Return the one token that may follow `length` tokens (the start token counts), if there is one."""
        if length == max_new_tokens and self.forced_eos is not None:
            return self.forced_eos
        return self.forced_bos if length == 1 else None

    @cached_property
    def changes_scores(self) -> bool:
        """Whether scores are changed in other ways than by forbidding or forcing tokens."""
        return bool(self.rules.sequence_bias) or self.rules.decay_factor != 1.0

    @cached_property
    def forbidden(self) -> npt.NDArray[np.intp]:
        """The tokens that may never come."""
        never = [token for token in self.suppressed if token not in self.eos]
        return np.array([*never, *self.rules.suppress_tokens], np.intp)

    def describe(self) -> str:
        """Return what is set, for an error about what it leaves."""
        named = {"suppressed": self.suppressed, "min_new_tokens": self.min_new_tokens}
        named |= {field.name: getattr(self.rules, field.name) for field in fields(TokenRules)}
        usual = vars(NO_RULES) | {"suppressed": (), "min_new_tokens": 0}
        changed = [name for name, value in named.items() if value != usual[name]]
        return ", ".join(["renormalize_logits"] * self.renormalize + changed)

    def _list_ruled(self) -> list[int]:
        """Return the tokens that the rules name; refuse a sequence of none."""
        sequences = [*self.rules.bad_words, *(bias.tokens for bias in self.rules.sequence_bias)]
        if () in sequences:
            raise InputError("a sequence of bad_words or sequence_bias has no tokens; leave it out")
        tokens = [token for sequence in sequences for token in sequence]
        return [*tokens, *self.rules.suppress_tokens, *self.rules.begin_suppress_tokens]

    @cached_property
    def _highest(self) -> int:
        forced = [token for token in (self.forced_bos, self.forced_eos) if token is not None]
        return max((*self.eos, *self.suppressed, *forced, *self._list_ruled()), default=0)

    def check_vocabulary(self, V: int) -> None:
        """Refuse tokens that a model of V tokens does not have."""
        if self._highest >= V:
            raise InputError(
                f"the constraints name token {self._highest}, but the model's tokens are 0 to {V - 1}; take "
                "the ids from the model's own tokenizer"
            )


def constrain(
    scores: npt.NDArray[np.float32],
    histories: Sequence[Sequence[int]],
    constraints: Constraints,
    max_new_tokens: int = 0,
    prompt_length: int = 1,
) -> None:
    """Set forbidden tokens of scores (R, V) to -inf, and a forced token to 0 with all others at -inf.

    The R histories have T token ids each, of which `prompt_length` were there before the first new one; ids
    without a score are ignored. `max_new_tokens` is where forced_eos comes. sequence_bias comes before
    other processors, and not here.
    """
    R, V = scores.shape
    lengths = {len(history) for history in histories}
    if len(histories) != R or len(lengths) != 1 or 0 in lengths:
        raise InputError(
            f"histories has {len(histories)} rows of lengths {sorted(lengths)}; it must have {R} rows "
            "of one length from 1: give each row its start token and all that came after"
        )
    constraints.check_vocabulary(V)
    length = lengths.pop()
    new_tokens = length - prompt_length
    if (forced := constraints.find_forced_token(1 + new_tokens, max_new_tokens)) is not None:
        scores.fill(-np.inf)
        scores[:, forced] = 0
        return
    if constraints.no_repeat_ngram_size is not None:
        forbid_repeats(scores, histories, constraints.no_repeat_ngram_size)
    rules = constraints.rules
    if rules.bad_words:
        forbid_words(scores, histories, rules.bad_words)
    if new_tokens < constraints.min_new_tokens or length < rules.min_length:
        scores[:, list(constraints.eos)] = -np.inf
    if rules.decay_factor != 1.0 and new_tokens > rules.decay_start:
        favour_end(scores, constraints.eos, rules.decay_factor, new_tokens - rules.decay_start)
    if constraints.forbidden.size:
        scores[:, constraints.forbidden] = -np.inf
    first = 1 if prompt_length == 1 and constraints.forced_bos is not None else 0
    if new_tokens == first:
        scores[:, list(rules.begin_suppress_tokens)] = -np.inf
