"""What a chat template may spend: steps, and the sizes of what its operators, filters and methods make.

A template is data from elsewhere, and a single call of a filter may make gigabytes, or compare lists in lists
for years. So every call is weighed before it runs, by what it is given, and costs steps by what it reads and
makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import GeneratorType
from typing import Any, NoReturn, TypeAlias

MAX_STEPS = 1_000_000  # turns of loops; what a call costs is said in so many turns
CALL_STEPS = 10
MAX_LENGTH = 2**24  # characters or elements of what operators make
MAX_MADE = 2**26  # characters that a filter or a method could make
MAX_ELEMENTS = 2**20  # of lists in lists that are read through
MAX_BITS = 4096  # of integers that operators make
REPEATED = 10  # characters that repr makes of one, at most
NUMBER = re.compile("[0-9]+")
# Characters that are read or made in one step, by what is slow and makes an object of each character, and by
# what is quick.
SLOW = 10
QUICK = 100
QUICK_NAMES = frozenset(
    {"capitalize", "count", "d", "default", "e", "endswith", "escape", "find", "length", "lower", "lstrip"}
    | {"replace", "rstrip", "safe", "startswith", "string", "strip", "tojson", "trim", "upper"}
)
# Whose numbers say how much is made, and whose texts are put between or into others.
GROWING = frozenset(
    {"%", "batch", "center", "expandtabs", "format", "format_map", "indent", "ljust", "rjust", "round"}
    | {"slice", "to_bytes", "tojson", "zfill"}
)
FORMATS = frozenset(("format", "format_map", "%"))
SPREADING = frozenset(("indent", "join", "translate", "urlize", "wordwrap", "xmlattr"))


Watch: TypeAlias = Callable[[str, Any, Sequence[Any]], Any]


class LimitError(Exception):
    """A template asks for more than it may have."""


class Weight:
    """How much of everything there is in values, lists in lists included."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.characters = 0  # of texts that stand alone
        self.nested = 0  # of those in lists
        self.elements = 0
        self.largest = 0  # number
        self.depth = 0
        level: list[Any] = list(values)
        while level:
            level = self._add(level)
            self.depth += 1

    def _add(self, level: list[Any]) -> list[Any]:
        """Add values; return those that lie in them."""
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str | bytes):
                if self.depth:
                    self.nested += len(value)
                else:
                    self.characters += len(value)
            elif isinstance(value, int):
                self.largest = max(self.largest, abs(value))
            elif isinstance(value, Mapping):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, Collection):
                inner += value
            check_size("what it reads", self.elements + len(inner), MAX_ELEMENTS, "elements")
        self.elements += len(inner)
        return inner

    @property
    def text_length(self) -> int:
        """The most characters that the values have as texts."""
        return self.characters + REPEATED * (self.nested + self.elements)


class Budget:
    """Counts steps, and refuses what is too large.

    Attributes:
        steps: since a rendering began.
        watch: what returns, in place of what a filter or method makes, what a template gets. Called with the
            name, what was made, and the values that it was made of.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.watch: Watch = keep

    def step(self, count: int = 1) -> None:
        self.steps += count
        check_size("its work", self.steps, MAX_STEPS, "steps")

    def count_steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield self.watch("for", value, [values]) if isinstance(values, str) else value

    def read(self, value: Any) -> Any:
        """Pay for reading a value whole, as comparing, hashing and writing it do; return it."""
        if isinstance(value, str | bytes):
            self.step(len(value) // QUICK)
        elif isinstance(value, Collection):
            weight = Weight([value])
            self.step((weight.elements + weight.nested // SLOW) // SLOW)
        return value

    def cut(self, value: Any, *bounds: Any) -> Any:
        """Return `value[start:stop:step]`, after paying for the copy."""
        if isinstance(value, Sequence):
            self.step(len(value) // QUICK)
        return self.watch("[:]", value[slice(*bounds)], [value])

    def call(self, name: str, receiver: Any, arguments: Sequence[Any], make: Callable[[], Any]) -> Any:
        """Return what a filter or method makes, after paying for it."""
        weight = Weight([receiver, *arguments])
        check_size(f"{name!r}", estimate(name, receiver, arguments, weight), MAX_MADE, "characters")
        per_step = QUICK if name in QUICK_NAMES else SLOW
        self.step((weight.characters + weight.nested) // per_step + weight.elements // SLOW)
        made = make()
        if isinstance(made, GeneratorType):
            made = self.count_steps(made)
            if isinstance(receiver, str):
                return (self.watch(name, part, [receiver]) for part in made)
            return made
        if isinstance(made, Collection):
            self.step(len(made) // (QUICK if isinstance(made, str | bytes) else SLOW))
        return self.watch(name, made, [receiver, *arguments])

    def guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or test that is paid for."""
        first = int(hasattr(function, "jinja_pass_arg"))  # behind jinja2's context or environment

        @wraps(function)
        def guarded(*arguments: Any, **options: Any) -> Any:
            whole = list_generators(arguments)
            named = dict(zip(options, list_generators(options.values()), strict=True))
            receiver, *others = [*whole[first:], *named.values()]
            return self.call(name, receiver, others, lambda: function(*whole, **named))

        return guarded

    def check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Refuse operands of `+`, `*`, `**` and `%` that make too much; pay for what they make."""
        if operator == "%":
            if isinstance(left, str | bytes):
                weight = Weight([left, right])
                check_size("'%'", estimate("%", left, [right], weight), MAX_MADE, "characters")
                self.step(weight.text_length // QUICK)
            return
        if isinstance(left, int) and isinstance(right, int):
            check_bits(operator, left, right)
        elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            check_size("'+'", len(left) + len(right), MAX_LENGTH, "elements")
            self.step((len(left) + len(right)) // QUICK)
        elif operator == "*":
            for values, times in ((left, right), (right, left)):
                if isinstance(values, Sequence) and isinstance(times, int):
                    check_size("'*'", len(values) * times, MAX_LENGTH, "elements")
                    self.step(max(0, len(values) * times // QUICK))

    def join(self, values: Sequence[Any]) -> str:
        """Join the operands of `~`."""
        check_size("'~'", Weight(values).text_length, MAX_MADE, "characters")
        texts = [str(value) for value in values]
        length = sum(map(len, texts))
        check_size("'~'", length, MAX_LENGTH, "characters")
        self.step(length // QUICK)
        return "".join(texts)

    def write(self, value: Any) -> Any:
        """Pay for a value that is written out; return it."""
        if not isinstance(value, str):
            check_size("'{{ }}'", Weight([value]).text_length, MAX_MADE, "characters")
        return self.read(value)


def keep(name: str, made: Any, given: Sequence[Any]) -> Any:
    return made


def list_generators(values: Iterable[Any]) -> list[Any]:
    """Return values with lists in place of generators, which can be weighed."""
    return [list(value) if isinstance(value, GeneratorType) else value for value in values]


def estimate(name: str, receiver: Any, arguments: Sequence[Any], weight: Weight) -> int:
    """Return the most characters that a filter or method can make of what it is given."""
    size = weight.text_length
    texts = [value for value in (receiver, *arguments) if isinstance(value, str | bytes)]
    if name == "replace" and len(texts) > 2:
        old, new = texts[1:3]
        if type(texts[0]) is type(old):
            size += texts[0].count(old) * len(new)  # type: ignore[arg-type]
    if name in SPREADING:
        inserted = max((Weight([value]).text_length for value in arguments), default=0)
        size += (weight.characters + weight.elements) * inserted
    if name in GROWING:
        size += count_places(receiver, weight) * find_width(name, receiver, arguments, weight)
    return size


def count_places(receiver: Any, weight: Weight) -> int:
    """Return how often a number may count: at each line, tab, field or element."""
    places = 1 + weight.elements * weight.depth
    if isinstance(receiver, str):
        places += sum(map(receiver.count, "\n\t{%"))
    return places


def find_width(name: str, receiver: Any, arguments: Sequence[Any], weight: Weight) -> int:
    """Return the largest number that says how much is to be made."""
    if name in FORMATS:
        numbers = NUMBER.findall(receiver) if isinstance(receiver, str) else []
        if any(len(number) > len(str(MAX_MADE)) for number in numbers):
            return MAX_MADE + 1
        return max(weight.largest, *map(int, numbers), 1)
    numbers = [abs(value) for value in arguments if isinstance(value, int)]
    return max(numbers, default=1)


def check_bits(operator: str, left: int, right: int) -> None:
    """Refuse integers of thousands of digits."""
    bits = left.bit_length(), right.bit_length()
    most = sum(bits)
    if operator == "**":
        most = bits[0] * abs(right)
    elif operator == "+":
        most = max(bits)
    check_size(f"a number from {operator!r}", most, MAX_BITS, "bits")


def check_size(what: str, size: int, most: int, unit: str) -> None:
    if size > most:
        refuse(f"{what} has more than {most} {unit}")


def refuse(message: str) -> NoReturn:
    raise LimitError(message)
