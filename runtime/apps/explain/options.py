"""What a caller may choose of an explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import ContextLengthError, InputError
from ...option_checks import check_choice, check_whole
from ...suggest import did_you_mean
from .graphs import ExplanationGraphs
from .neurons import GROUPINGS

METHODS = ("gradient", "integrated_gradients", "occlusion", "lens", "attention", "neurons")
USUAL = ("gradient", "lens", "attention")
OBJECTIVES = ("logit", "probability")
MAX_WATCHED = 16
USUAL_NEW_TOKENS = 20  # of an answer of the model's own


@contextmanager
def advising_shorter_texts(option: str = "text") -> Iterator[None]:
    """Let the error of a text that is too long advise a shorter one: here none is truncated.

    `option` is the parameter that has the text.
    """
    try:
        yield
    except ContextLengthError as error:
        raise ContextLengthError(
            f"the {option} has {error.tokens} tokens, special ones included; the model takes {error.limit}."
            " Explain a shorter one",
            tokens=error.tokens,
            limit=error.limit,
            option=option,
        ) from None


def check_not_empty(text: object, option: str) -> None:
    """Refuse an empty text, which the parameter `option` has."""
    if text == "":
        raise InputError(f"the {option} is empty: there is nothing to explain", option=option)


@dataclass(frozen=True)
class Request:
    """What is to be explained; see `explain`."""

    text: Any
    answer: Any = None
    pair: str | None = None
    max_new_tokens: int = USUAL_NEW_TOKENS
    parse_special: bool = False


@dataclass(frozen=True)
class ResolvedOptions:
    """What is to be computed; see `explain`.

    Attributes:
        on_step: is called between parts of the work; what it raises ends it.
    """

    methods: tuple[str, ...]
    objective: str
    factors: int
    grouping: str = "nmf"
    layer: int | None = None
    watch: tuple[str, ...] = ()
    on_step: Callable[[], None] = lambda: None

    def __contains__(self, method: str) -> bool:
        return method in self.methods

    @property
    def needs_graphs(self) -> bool:
        """Whether a method runs the graphs that explain; occlusion runs the one that answers."""
        return any(method != "occlusion" for method in self.methods)


def make_choices(
    graphs: ExplanationGraphs,
    methods: Sequence[str] | None,
    objective: str,
    factors: int,
    watch: Sequence[str] = (),
    on_step: Callable[[], None] | None = None,
    grouping: str = "nmf",
    layer: int | None = None,
) -> ResolvedOptions:
    """Return the choices, checked; by default what the bundle's graphs can, else occlusion."""
    if isinstance(methods, str):
        methods = [methods]
    if isinstance(watch, str):
        watch = [watch]
    usual = USUAL if graphs else ("occlusion",)
    chosen = usual if methods is None or not len(methods) else tuple(dict.fromkeys(methods))
    for method in chosen:
        if method not in METHODS:
            hint = did_you_mean(method, METHODS) if isinstance(method, str) else ""
            raise InputError(f"method {method!r} is not one of {', '.join(METHODS)}{hint}", option="methods")
        if method != "occlusion":
            graphs.need(method)
    if objective not in OBJECTIVES:
        raise InputError(f"objective={objective!r} is not one of {', '.join(OBJECTIVES)}", option="objective")
    check_whole("factors", factors, 1, 64)
    check_choice("grouping", grouping, GROUPINGS)
    check_whole("layer", layer, 1, optional=True)
    if watch and "lens" not in chosen:
        raise InputError("watch needs the method lens; add it to methods", option="watch")
    if len(watch) > MAX_WATCHED:
        raise InputError(f"watch has {len(watch)} words; at most {MAX_WATCHED} are allowed", option="watch")
    return ResolvedOptions(
        chosen, objective, factors, grouping, layer, tuple(watch), on_step or (lambda: None)
    )
