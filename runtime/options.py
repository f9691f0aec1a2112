"""The options that methods share: their names and types, and how unknown ones are refused.

Each TypedDict is the `**options: Unpack[...]` of the methods that take it, so that an editor completes the
names and a type checker refuses others; `check_options` refuses them at run time.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeAlias, TypedDict

from .errors import InputError

ProgressOption: TypeAlias = bool | Callable[[int], None]
"""True writes a counter to stderr; a callable gets the number of finished texts."""

Truncation: TypeAlias = Literal["head", "tail", "head+tail", "windows"] | None
"""What happens to a text that is too long: None refuses it, "head" keeps its beginning, "tail" its end,
"head+tail" both, "windows" all of it. Each class names those that it takes."""

Pooling: TypeAlias = Literal["cls", "mean", "max"]
Layers: TypeAlias = Literal[
    "embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"
]


class EncoderOptions(TypedDict, total=False):
    """The options of every task of an encoder.

    Attributes:
        truncation: what happens to a text that is longer than the model: "head", "tail", "head+tail",
            "windows", or None, which refuses it.
        stride: tokens that neighbouring windows share; a quarter of the model's length unless given.
        parse_special: read special tokens such as [SEP] in the text as such.
        batch_size: the most sequences that run together; as many as the bundle allows unless given. Fewer
            run together where they are long.
        progress: True counts finished texts on stderr; a callable gets their number.
    """

    truncation: Truncation
    stride: int | None
    parse_special: bool
    batch_size: int | None
    progress: ProgressOption


class EmbedOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.embed`.

    Attributes:
        pooling: "cls", "mean" or "max" over the tokens' last hidden states; the checkpoint's unless given.
        normalize: to length 1; the checkpoint's choice unless given.
        truncate_dim: keep only so many of a vector's first numbers, before it is normalized.
        prompt_name: the name of a prompt of the checkpoint to put before each text.
        prompt: a text to put before each text, "" for none; takes precedence over prompt_name.
    """

    pooling: Pooling | None
    normalize: bool | None
    truncate_dim: int | None
    prompt_name: str | None
    prompt: str | None


class FeatureOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.features`.

    Attributes:
        layers: whose hidden states; all but "last" need a bundle exported with `--outputs hidden_states`.
    """

    layers: Layers


class RankOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.rank`.

    Attributes:
        top_k: return only so many texts.
    """

    top_k: int | None


class FillMaskOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.fill_mask`, which always reads special tokens as such.

    Attributes:
        top_k: words for each place, 5 unless given.
    """

    top_k: int


class AnswerOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.answer`.

    Attributes:
        n_best: how many answers, 1 unless given.
        max_answer_tokens: the most tokens of an answer, 30 unless given.
    """

    n_best: int
    max_answer_tokens: int


class TranslationOptions(TypedDict, total=False):
    """The options of every method that translates: as in transformers, and the checkpoint's unless given.

    Attributes:
        num_beams: translations that are followed at a time; 1 is greedy.
        length_penalty: above 0 favours long translations.
        early_stopping: True, False or "never".
        n_best: candidates that are returned; num_beams is at least as many unless it is given.
        max_new_tokens: the most tokens of a translation.
        min_new_tokens: the fewest.
        no_repeat_ngram_size: no sequence of so many tokens comes twice.
        truncation: None refuses a text that is too long, "head" keeps its beginning, "tail" its end.
        parse_special: read special tokens such as </s> in the text as such.
    """

    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    n_best: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    no_repeat_ngram_size: int | None
    truncation: Literal["head", "tail"] | None
    parse_special: bool


def option_names(options: type) -> tuple[str, ...]:
    """Return the names of the options that a TypedDict has, those it inherits first."""
    return tuple(options.__annotations__)


def check_options(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse an option that does not exist.

    Args:
        given: names of options.
        known: names of the options that there are; see `option_names`.

    Raises:
        InputError: names the first unknown one, the one that may be meant, and all that there are.
    """
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise InputError(f"unknown option {name!r}{hint} There are: {', '.join(known)}")


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Refuse a value that is none of those allowed.

    Raises:
        InputError: names the option, what it got, and what is allowed.
    """
    # A list or an array is no choice, and comparing it with one may fail.
    if not isinstance(value, str | None) or value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise InputError(f"{name}={value!r} is not one of {choices}")


def check_batch_size(batch_size: int | None, most: int) -> int:
    """Return how many rows may run together.

    Args:
        batch_size: what the caller asks for; None: the most.
        most: what the bundle allows.

    Raises:
        InputError: no whole number from 1, or more than the bundle allows.
    """
    if batch_size is None:
        return most
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r} must be None or a whole number of at least 1")
    if batch_size > most:
        raise InputError(
            f"batch_size={batch_size} is more than the {most} rows that this bundle allows; ask for fewer, or"
            " export it again with a larger max_batch"
        )
    return batch_size


def check_not_pair(texts: Any, call: str = "") -> None:
    """Refuse a tuple of two strings, which could be one pair or two texts.

    Args:
        texts: what a method got for its texts.
        call: how to pass a pair to that method, such as "classify(text, pair=other)"; nothing where the
            method takes no pairs.

    Raises:
        InputError: says how to write either.
    """
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts):
        pair = f" a pair: {call} or [(text, other)];" if call else ""
        raise InputError(
            f"a tuple of two texts could be a pair or two texts;{pair} two texts: [a, b]. Got {texts!r:.80}"
        )
