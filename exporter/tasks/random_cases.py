"""Samples batches, lengths, pasts and split points at random, from the whole range that a bundle allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...runtime.apps.check.case import Row, list_widths
from ..levels import FULL, Level

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

Random: TypeAlias = np.random.Generator
Rows: TypeAlias = tuple[Row, ...]  # of a batch

RANDOM_PREFIX = "random."  # of the limits' names, as golden data has them
MAX_STEP_ROWS = 8
MAX_TOKENS = 4096
TEXTS = 8  # of different tokens; the first is as long as all others together
SMALL_SIZES = 8  # batches of every size up to this one are run, then powers of two, and the largest
PHRASE = 32  # tokens at most that follow each other as in real text
BEGINNING = 48  # tokens of a text at most, whose keys and values fill a longer context several times
CONTEXT_ROWS = 8  # positions compared at the end of a full context
TAIL = 8  # tokens behind a past
WIDEST = 6  # tokens of the first step behind it, at most
PLACES = 16  # in the context, where pasts end
MANY_REPEATS = 32  # from here on some batches have fewer
KNOWN_TOKENS = 256  # of the vocabulary, whose logits are compared


@dataclass(frozen=True)
class RandomCases:
    """The ingredients and the number of a decoder's random cases.

    Attributes:
        weights: how many the model has.
        real: tokens of real text, whose phrases random texts are made of; of a translator targets that it
            wrote.
        context: the most tokens of a row.
        max_batch: the most rows of a batch.
        seed: of the random generator.
        parts: in how many steps of several tokens a row reads its text at most. After more than one there is
            padding between a row's tokens.
        level: how many cases there are, and how long.
    """

    weights: int
    real: tuple[int, ...]
    context: int
    max_batch: int
    seed: int
    parts: int
    level: Level

    @property
    def longest(self) -> int:
        """Return how many tokens the longest text has."""
        return count_longest(self.weights, self.context, self.level)

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of batches."""
        return list_sizes(self.max_batch)

    @property
    def alike(self) -> int:
        """Return how many batches of each size there are, one or two."""
        return count_alike(self.weights, self.sizes, self.level)

    @property
    def room(self) -> int:
        """Return how many tokens a batch has, padding included, unless it has a past."""
        batches = len(self.sizes) * self.alike
        return max(self.longest // 2, int(self.level.prefill_work / self.weights / batches))

    @property
    def step_rows(self) -> int:
        """Return how many rows share the single steps at all positions of a text; fewer rows take longer."""
        return min(MAX_STEP_ROWS, math.ceil(self.longest * self.weights / self.level.step_work))


def count_weights(model: ReferenceModel) -> int:
    return max(1, sum(parameter.numel() for _, parameter in model.named_parameters()))


def count_tokens(weights: int, level: Level) -> int:
    """Return how many tokens of random texts a model of so many weights reads."""
    return int(np.clip(level.random_work / weights, level.min_random, MAX_TOKENS))


def count_longest(weights: int, context: int, level: Level) -> int:
    """Return how many tokens the longest random text of a decoder has."""
    return min(context, count_tokens(weights, level) // 2)


def count_alike(weights: int, sizes: Sequence[int], level: Level) -> int:
    """Return how many random batches of each size there are."""
    return 2 if 2 * len(sizes) * weights <= level.batch_work else 1


def list_sizes(most: int) -> list[int]:
    """Return the sizes of batches up to the largest one, which is among them."""
    powers = [2**power for power in range(4, most.bit_length())]
    return list(dict.fromkeys([*range(1, min(SMALL_SIZES, most) + 1), *powers, most]))


def sample_batches(
    random: Random, cases: RandomCases, lengths: Mapping[int, int], sources: Mapping[int, int]
) -> list[Rows]:
    """Return batches of every size whose longest rows stand in different places: any other is padded.

    Args:
        random: the generator.
        cases: how many there are, and how long.
        lengths: of the texts, by their numbers. The first is the longest.
        sources: the lengths of a translator's source for each text. Those of a batch have `room` too.
    """
    first, *others = lengths
    longest_text = lengths[first]
    room = cases.room

    def list_texts(size: int) -> list[int]:
        return [first, *(text for text in others if not sources or sources[text] * size <= room)]

    batches = []
    for size in cases.sizes:
        places = random.permutation(size)[: cases.alike]
        # The longest row of the first is long, that of the second of any length, as a small engine takes too.
        for place, is_long in zip(places, (True, False), strict=False):
            most = min(longest_text, max(4, (room if is_long else longest_text // 2) // size))
            longest = sample_length(random, max(1, most // 2) if is_long else 1, most)
            batches.append(sample_batch(random, cases, lengths, list_texts(size), size, int(place), longest))
    if longest_text > 1 and cases.max_batch > 1:  # padding as long as there can be
        place = int(random.integers(2))
        batches.append(sample_batch(random, cases, lengths, list_texts(2), 2, place, longest_text))
    return batches


def sample_length(random: Random, least: int, most: int) -> int:
    """Return a length, of which any size is as likely as one twice as large."""
    return round(float(np.exp(random.uniform(np.log(least), np.log(most)))))


def sample_batch(
    random: Random,
    cases: RandomCases,
    lengths: Mapping[int, int],
    texts: Sequence[int],
    size: int,
    place: int,
    longest: int,
) -> Rows:
    """Return a batch whose row `place` reads `longest` tokens, and whose other rows read fewer if possible.

    Steps of one or two parts come first, and then some single tokens. `texts` are those that rows may read.
    """
    first = texts[0]
    others = random.permutation(texts[1:]).tolist()
    chosen = []
    totals = []
    for row in range(size):
        # Only the first text is long enough for any length. Its beginnings are other rows' as well.
        text = first if row == place or not others or random.random() < 1 / 3 else others[row % len(others)]
        most = max(1, min(lengths[text], longest - 1))
        chosen.append(text)
        totals.append(longest if row == place else sample_length(random, 1, most))
    # A row takes part in every step: the shortest has few tokens, or more steps make it longer.
    steps = int(random.integers(2, 6))
    steps = min(
        steps, min(totals) if random.random() < 1 / 3 else min(lengths[text] for text in chosen), longest
    )
    totals = [max(total, steps) for total in totals]
    rows = sample_steps(random, chosen, totals, steps, parts=min(cases.parts, steps))
    if sum(list_widths(rows)) > cases.context:
        rows = sample_steps(random, chosen, totals, steps, parts=1)
    return rows


def sample_steps(random: Random, texts: Sequence[int], totals: Sequence[int], steps: int, parts: int) -> Rows:
    """Return rows that read so many tokens of their texts, in single steps after the first `parts`."""
    rows = []
    for text, total in zip(texts, totals, strict=True):
        wide = total - (steps - parts)
        cuts = random.choice(np.arange(1, wide), parts - 1, replace=False) if parts > 1 else np.array([], int)
        rows.append(Row(text, (*sorted(cuts.tolist()), *range(wide, total + 1))))
    return tuple(rows)


def sample_text(random: Random, real: Sequence[int], length: int) -> tuple[int, ...]:
    """Return so many tokens: phrases of real text in a random order."""
    text: list[int] = []
    while len(text) < length:
        start = int(random.integers(len(real)))
        text += real[start : start + int(random.integers(1, PHRASE + 1))]
    return tuple(text[:length])


def sample_rows(
    random: Random, lengths: Sequence[int], sizes: Sequence[int], weights: int, level: Level = FULL
) -> tuple[tuple[int, ...], ...]:
    """Return the rows of batches, one or two of every size, as numbers of some sequences.

    Their longest rows stand in different places, and all others are padded.

    Args:
        random: the generator.
        lengths: of the sequences, of which the last is the longest.
        sizes: of the batches.
        weights: of the model.
        level: how many cases there are, and how long.
    """
    tokens = count_tokens(weights, level)
    room = min(lengths[-1], tokens // 4)  # tokens of a batch with its padding, about
    by_length = np.argsort(lengths, kind="stable").tolist()
    batches = []

    def add(size: int, place: int, longest: int) -> None:
        shorter = [i for i in by_length if lengths[i] < lengths[longest]] or [longest]
        rows = [shorter[i] for i in random.integers(len(shorter), size=size)]
        rows[place] = longest
        batches.append(tuple(rows))

    for size in sizes:
        fitting = [i for i in by_length if lengths[i] * size <= room] or by_length[:2]
        places = random.permutation(size).tolist()
        add(size, places[0], fitting[-1])
        if count_alike(weights, sizes, level) == 2:
            add(size, places[1], fitting[int(random.integers(len(fitting)))])
    if sizes:  # padding as long as there can be
        widest = [i for i in by_length if 2 * lengths[i] <= tokens] or by_length[:2]
        add(2, int(random.integers(2)), widest[-1])
    return tuple(batches)


def sample_columns(random: Random, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens whose logits are compared."""
    columns = np.sort(random.choice(vocabulary, min(KNOWN_TOKENS, vocabulary), replace=False))
    return tuple(columns.tolist())


def describe_fewer_cases(weights: int, context: int, max_batch: int, level: Level) -> Iterator[str]:
    """Yield the random cases of "full" that a level leaves out, in words."""
    if not level.random_work:
        yield "random batches, and single steps at every position"
        return
    longest = count_longest(weights, context, level)
    usual = count_longest(weights, context, FULL)
    if longest < usual:
        yield f"random prompts of {longest + 1:,} to {usual:,} tokens, and single steps at each position"
    if count_alike(weights, list_sizes(max_batch), level) == 1:
        yield "a second random batch of each size"


def sample_far_batches(
    random: Random, cases: RandomCases, repeats: int, find_text: Callable[[int, int], int]
) -> list[Rows]:
    """Return a batch of every size whose rows have pasts of any length, up to the end of the context.

    A past is read once for all rows, so it costs little. Behind it come a step of several tokens and some
    single ones. `find_text` returns the number of the text whose past, of so many tokens, is there so often.
    """
    longest = cases.longest
    end = cases.context if repeats > 1 else longest
    if end <= TAIL + 1:
        return []
    if repeats > 1:  # a past is a multiple of it, so each seed has other positions
        repeats += int(random.integers(repeats // 4 + 1))
    often = [repeats] if repeats <= MANY_REPEATS else [repeats, math.isqrt(repeats)]
    places = {times: sample_places(random, (end - TAIL) // times, longest - TAIL) for times in often}
    batches = []
    for size in cases.sizes:
        times = often[int(random.integers(len(often)))] if len(often) > 1 else repeats
        room = min(end, max(cases.context, cases.level.cached) // size)
        most = max(1, min((room - TAIL) // times, longest - TAIL))
        pasts = random.choice([past for past in places[times] if past < most] + [most], size)
        place = int(random.integers(size))
        if size > 1:  # of a single row, the end of the context is a case of its own
            pasts[place] = most
        if cases.parts == 1:
            pasts[:] = most
        wide = int(random.integers(2, WIDEST + 1))
        steps = (0, *range(wide, TAIL + 1))
        batches.append(
            tuple(Row(find_text(past, times), tuple(past + end for end in steps)) for past in pasts.tolist())
        )
    return batches


def sample_places(random: Random, most: int, known: int) -> list[int]:
    """Return lengths of at most `most` and `known`: evenly spread, and as many by octaves."""
    most = max(1, min(most, known))
    shares = (np.arange(PLACES // 2) + random.uniform(size=(2, PLACES // 2))) / (PLACES // 2)
    lengths = np.concatenate([shares[0] * most, most ** shares[1]])
    return sorted({max(1, int(length)) for length in lengths})
