"""Rules that forbid or force tokens: those of transformers, in their order.

R rows, T tokens so far (the start token or the prompt counts), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .processors import forbid_repeats
from .sampling import check_integer


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

    def find_forced_token(self, length: int, max_new_tokens: int) -> int | None:
        """Return the one token that may follow `length` tokens (the start token counts), if there is one."""
        if length == max_new_tokens and self.forced_eos is not None:
            return self.forced_eos
        return self.forced_bos if length == 1 else None

    def check_vocabulary(self, V: int) -> None:
        """Refuse tokens that a model of V tokens does not have."""
        forced = [token for token in (self.forced_bos, self.forced_eos) if token is not None]
        highest = max((*self.eos, *self.suppressed, *forced), default=0)
        if highest >= V:
            raise InputError(
                f"the constraints name token {highest}, but the model's tokens are 0 to {V - 1}; take "
                "the ids from the model's own tokenizer"
            )


def constrain(
    scores: npt.NDArray[np.float32],
    histories: Sequence[Sequence[int]],
    constraints: Constraints,
    max_new_tokens: int,
    prompt_length: int = 1,
) -> None:
    """Set forbidden tokens of scores (R, V) to -inf, and a forced token to 0 with all others at -inf.

    The R histories have T token ids each, of which `prompt_length` were there before the first new one; ids
    without a score are ignored.
    """
    R, V = scores.shape
    lengths = {len(history) for history in histories}
    if len(histories) != R or len(lengths) != 1 or 0 in lengths:
        raise InputError(
            f"histories has {len(histories)} rows of lengths {sorted(lengths)}; it must have {R} rows "
            "of one length from 1: give each row its start token and all that came after"
        )
    constraints.check_vocabulary(V)
    new_tokens = lengths.pop() - prompt_length
    if (forced := constraints.find_forced_token(1 + new_tokens, max_new_tokens)) is not None:
        scores.fill(-np.inf)
        scores[:, forced] = 0
        return
    if constraints.no_repeat_ngram_size is not None:
        forbid_repeats(scores, histories, constraints.no_repeat_ngram_size)
    for token in constraints.suppressed:
        if token not in constraints.eos:
            scores[:, token] = -np.inf
    if new_tokens < constraints.min_new_tokens:
        scores[:, list(constraints.eos)] = -np.inf
