"""Batches, lengths, pasts and split points that an export drew at random, and a decoder that runs them.

B rows of a batch, K tokens whose logits are known, R rows of the single steps, T tokens of a text,
L layers, P known places of a source, H heads, D head size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from ...bundle.manifest import Artifact
from ...decoding.cache import NONE_PENDING, PendingContext
from ...decoding.cache_shapes import PREFILL_CHUNK
from ...decoding.decoder import Decoder, DecoderRun
from ...translate.source_encoder import SourceEncoder
from .cases import Case, Skipped, find_room, name_sizes, skip_batches
from .files import Arrays, choose_evenly
from .metrics import DrawMetrics, Logits, Outcome, Spot, judge_outcome, locate_failure

Floats = npt.NDArray[np.float64]

PREFIX = "drawn."  # of the limits' names
PLACES = 3  # of each source, whose keys and values are known
SPARE = 8  # slots of a cache behind what a batch needs
REPEATED = "drawn.repeated."  # of the names of arrays


@dataclass(frozen=True)
class Batch:
    """Rows that a decoder reads together, in several steps."""

    texts: tuple[int, ...]  # which of the texts each row reads
    ends: tuple[tuple[int, ...], ...]  # of each step, how many tokens each row has read behind it
    # Where it is not 0, the first step is a past: it is read once for all rows, and its keys and values are
    # there so many times.
    repeats: int = 0

    @property
    def columns(self) -> int:
        """How many tokens wide a cache gets in which all rows are padded in each step."""
        begins = ((0,) * len(self.texts), *self.ends)
        first, *others = [
            max(after - before for before, after in zip(*ends, strict=True))
            for ends in zip(begins, self.ends, strict=False)
        ]
        return first * max(1, self.repeats) + sum(others)

    def count_past(self, step: int, row: int) -> int:
        """Return how many tokens a row's cache holds behind a step."""
        return self.ends[step][row] + self.ends[0][row] * max(0, self.repeats - 1)


@dataclass(frozen=True)
class Draws:
    """Texts that were drawn from a seed, what PyTorch makes of them, and the batches that read them."""

    seed: int
    texts: tuple[tuple[int, ...], ...]  # the first is the longest, its beginnings are rows too
    columns: tuple[int, ...]  # tokens whose logits are known
    logits: tuple[Logits, ...]  # of each text (T, K), behind each of its tokens
    scale: float  # the unit of an error
    batches: tuple[Batch, ...]
    step_rows: int  # that take single steps together, each at positions of its own
    # PyTorch's logits (T, K) of the first text's next tokens behind its beginnings, whose keys and values are
    # there more than once: by the beginning's length, and how often.
    repeated: Mapping[tuple[int, int], Logits] = field(default_factory=dict)
    # What a translator reads beside each text, and its keys and values (2 * L, P, H * D); none of a decoder.
    sources: tuple[tuple[int, ...], ...] = ()
    cross: tuple[Logits, ...] = ()

    def list_sources(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return the sources that a batch reads: of rows that share a past a single one, as of beams."""
        texts = batch.texts[:1] if batch.repeats else batch.texts
        return [self.sources[text] for text in texts]

    def find_logits(self, batch: Batch, step: int, row: int) -> Logits:
        """Return PyTorch's logits (K,) behind a step of a row."""
        end = batch.ends[step][row]
        past = batch.ends[0][row]
        if batch.repeats < 2:
            found: Logits = self.logits[batch.texts[row]][end - 1]
        else:
            found = self.repeated[past, batch.repeats][end - past - 1]
        return found

    def list_repeated(self) -> list[tuple[int, int]]:
        """Return the keys that `repeated` has to have."""
        repeating = [batch for batch in self.batches if batch.repeats > 1]
        return sorted({(past, batch.repeats) for batch in repeating for past in batch.ends[0]})


def to_arrays(draws: Draws | None) -> dict[str, npt.NDArray[np.generic]]:
    """Return the draws as golden data stores them."""
    if draws is None:
        return {}
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "drawn.seed": np.array(draws.seed),
        "drawn.columns": np.array(draws.columns),
        "drawn.scale": np.array(draws.scale),
        "drawn.step_rows": np.array(draws.step_rows),
    }
    for i, (text, logits) in enumerate(zip(draws.texts, draws.logits, strict=True)):
        arrays |= {f"drawn.text.{i}": np.array(text), f"drawn.logits.{i}": logits}
    for i, (source, cross) in enumerate(zip(draws.sources, draws.cross, strict=True)):
        arrays |= {f"drawn.source.{i}": np.array(source), f"drawn.cross.{i}": cross}
    for i, batch in enumerate(draws.batches):
        arrays |= {f"drawn.batch.{i}": np.array(batch.texts), f"drawn.ends.{i}": np.array(batch.ends)}
        arrays[f"drawn.repeats.{i}"] = np.array(batch.repeats)
    for (past, repeats), logits in draws.repeated.items():
        arrays[f"{REPEATED}{past}.{repeats}"] = logits
    return arrays


def from_arrays(arrays: Arrays) -> Draws | None:
    """Return the draws that `to_arrays` stored; None where an earlier export made none."""
    if "drawn.seed" not in arrays:
        return None
    texts = range(sum(name.startswith("drawn.text.") for name in arrays))
    batches = range(sum(name.startswith("drawn.batch.") for name in arrays))
    sources = range(sum(name.startswith("drawn.source.") for name in arrays))
    return Draws(
        seed=int(arrays["drawn.seed"]),
        texts=tuple(tuple(arrays[f"drawn.text.{i}"].tolist()) for i in texts),
        columns=tuple(arrays["drawn.columns"].tolist()),
        logits=tuple(arrays[f"drawn.logits.{i}"] for i in texts),
        scale=float(arrays["drawn.scale"]),
        batches=tuple(
            Batch(
                tuple(arrays[f"drawn.batch.{i}"].tolist()),
                tuple(tuple(ends) for ends in arrays[f"drawn.ends.{i}"].tolist()),
                int(arrays.get(f"drawn.repeats.{i}", 0)),  # earlier exports have none
            )
            for i in batches
        ),
        step_rows=int(arrays["drawn.step_rows"]),
        repeated={
            (int(past), int(repeats)): logits
            for name, logits in arrays.items()
            if name.startswith(REPEATED)
            for past, repeats in [name.removeprefix(REPEATED).split(".")]
        },
        sources=tuple(tuple(arrays[f"drawn.source.{i}"].tolist()) for i in sources),
        cross=tuple(arrays[f"drawn.cross.{i}"] for i in sources),
    )


def choose_places(source: Sequence[int]) -> tuple[int, ...]:
    """Return the places of a source whose keys and values are known."""
    return choose_evenly(len(source), PLACES)


def make_draw_cases(
    decoder: Decoder, draws: Draws, limits: Mapping[str, float], encoder: SourceEncoder | None = None
) -> dict[str, Case]:
    """Return what is compared, by name, as far as the graphs take so many rows and tokens.

    `encoder` is that of a translator, which reads the sources.
    """
    read_by = None if encoder is None else encoder.artifact
    batches = list_batches(decoder.artifact, draws, read_by)
    steps = plan_steps(decoder.artifact, draws)
    if read_by is not None and not reads(read_by, draws.sources[:1]):
        steps = Steps((), 0)
    cases: dict[str, Case] = {}

    def compare_batches() -> Outcome:
        errors: dict[Spot, float] = {}
        for number in batches:
            batch = draws.batches[number]
            found = measure_batch(decoder, draws, batch, encoder)
            errors |= {(number, *place): error for place, error in found}
        return judge_errors(errors, draws, limits)

    def compare_steps() -> Outcome:
        found = measure_steps(decoder, draws, steps, encoder)
        errors = {(STEPS, *place): error for place, error in found}
        return judge_errors(errors, draws, limits)

    if batches:
        cases[name_batches(draws, batches)] = compare_batches
    if steps.count:
        cases[name_steps(steps)] = compare_steps
    return cases


STEPS = -1  # stands for the single steps where a number names a batch


def name_batches(draws: Draws, batches: Sequence[int]) -> str:
    sizes = sorted({len(draws.batches[number].texts) for number in batches})
    return f"batches of {name_sizes(sizes)}, padded, drawn with seed {draws.seed}"


def list_batches(artifact: Artifact, draws: Draws, encoder: Artifact | None = None) -> list[int]:
    """Return the numbers of the batches whose rows and tokens a decoder takes, and a translator's encoder."""
    return [
        number
        for number, batch in enumerate(draws.batches)
        if fits(artifact, batch) and (encoder is None or reads(encoder, draws.list_sources(batch)))
    ]


def fits(artifact: Artifact, batch: Batch) -> bool:
    """Tell whether a graph takes so many rows and tokens."""
    rows = artifact.axis("batch")
    return rows.min <= len(batch.texts) <= rows.max and batch.columns <= find_room(artifact)


def reads(encoder: Artifact, sources: Sequence[Sequence[int]]) -> bool:
    """Tell whether a translator's encoder takes so many sources of so many tokens."""
    rows = encoder.axis("batch")
    return rows.min <= len(sources) <= rows.max and max(map(len, sources)) <= find_room(encoder)


def find_skipped_draws(artifact: Artifact, draws: Draws | None) -> list[Skipped]:
    """Return what `make_draw_cases` leaves out because of the decoder."""
    if draws is None:
        return []
    left = [batch for batch in draws.batches if not fits(artifact, batch)]
    skipped = []
    if left:
        what = f"{len(left)} of {len(draws.batches)} drawn batches"
        rows = max(len(batch.texts) for batch in left)
        skipped.append(skip_batches(artifact, what, rows, max(batch.columns for batch in left)))
    return skipped


@dataclass(frozen=True)
class Steps:
    """Single steps at every position but the first, which the rows divide among them."""

    pasts: tuple[int, ...]  # how many tokens each row has read before its first step
    count: int  # steps of each row; 0 where there are none


def plan_steps(artifact: Artifact, draws: Draws) -> Steps:
    """Divide the positions of the longest text among as many rows as the graph takes."""
    length = min(len(draws.texts[0]), find_room(artifact))
    most = artifact.axis("batch").max
    rows = min(draws.step_rows, most, length - 1)
    if rows < max(1, artifact.axis("batch").min):
        return Steps((), 0)
    count = math.ceil((length - 1) / rows)
    return Steps(tuple(min(1 + row * count, length - count) for row in range(rows)), count)


def name_steps(steps: Steps) -> str:
    last = steps.pasts[-1] + steps.count - 1
    rows = len(steps.pasts)
    return f"single steps at positions 1 to {last}, {rows} row{'s' if rows > 1 else ''}"


Errors = Iterator[tuple[tuple[int, int], float]]  # by the step and the row


def measure_batch(
    decoder: Decoder, draws: Draws, batch: Batch, encoder: SourceEncoder | None = None
) -> Errors:
    """Yield the largest error behind each step of each row of a batch."""
    run = start_batch(decoder, draws, batch, encoder)
    for step, rows in list_compared_steps(draws, batch):
        got = keep_known(take_step(run, rows, has_past=step > 0), draws)
        for row in range(len(rows)):
            yield (step, row), measure_error(got[row], draws.find_logits(batch, step, row), draws.scale)


def start_batch(
    decoder: Decoder, draws: Draws, batch: Batch, encoder: SourceEncoder | None = None
) -> DecoderRun:
    """Return a run of a batch's rows, which have read their past where they have one."""
    # A graph that writes a slot too far is told by its results, where the engine itself would raise an error.
    capacity = min(find_room(decoder.artifact), batch.columns + SPARE)
    if not batch.repeats:
        context = NONE_PENDING if encoder is None else encoder.prepare(draws.list_sources(batch))
        return decoder.start(len(batch.texts), capacity, context)
    run = start_rows(decoder, draws, batch.ends[0], capacity, encoder)
    if batch.repeats > 1:
        run.repeat(batch.repeats)
    return run


def list_compared_steps(draws: Draws, batch: Batch) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield the number of each step behind the past, and the tokens that each row reads in it."""
    yield from islice(enumerate(list_steps(draws, batch)), 1 if batch.repeats else 0, None)


def list_steps(draws: Draws, batch: Batch) -> Iterator[list[tuple[int, ...]]]:
    """Yield the tokens that each row reads in each step."""
    begins = [0] * len(batch.texts)
    for ends in batch.ends:
        spans = zip(batch.texts, begins, ends, strict=True)
        yield [draws.texts[text][begin:end] for text, begin, end in spans]
        begins = list(ends)


def take_step(run: DecoderRun, rows: Sequence[Sequence[int]], has_past: bool) -> Logits:
    """Run each row's tokens on top of what it has read; return the logits (B, V) behind the last of each."""
    width = max(map(len, rows))
    if width == 1:
        return run.decode([tokens[0] for tokens in rows])
    return run.prefill(rows, choose_chunk(run.decoder.artifact, len(rows), width, has_past))


def choose_chunk(artifact: Artifact, rows: int, width: int, has_past: bool) -> int:
    """Return how many tokens of each row a graph reads in one run.

    A translator's graph whose kernel takes one behind a past reads one, and without a past all of them.
    """
    reads_source = any(spec.role.startswith("cross.") for spec in artifact.inputs)
    if artifact.dialect != "ort" or not reads_source or rows == 1:
        return PREFILL_CHUNK
    return 1 if has_past else width


def keep_known(logits: Logits, draws: Draws) -> Logits:
    """Return the logits (B, K) of the known tokens; NaN in rows of which any other is not finite."""
    known = logits[:, draws.columns]
    known[~np.isfinite(logits).all(axis=1)] = np.nan
    return known


def measure_steps(
    decoder: Decoder, draws: Draws, steps: Steps, encoder: SourceEncoder | None = None
) -> Errors:
    """Yield the error behind each single step of each row."""
    text = draws.texts[0]
    run = start_rows(decoder, draws, steps.pasts, steps.pasts[-1] + steps.count, encoder)
    for step in range(steps.count):
        places = [past + step for past in steps.pasts]
        got = keep_known(run.decode([text[place] for place in places]), draws)
        for row, place in enumerate(places):
            yield (step, row), measure_error(got[row], draws.logits[0][place], draws.scale)


def start_rows(
    decoder: Decoder,
    draws: Draws,
    pasts: Sequence[int],
    capacity: int,
    encoder: SourceEncoder | None = None,
) -> DecoderRun:
    """Return a run whose rows have read so many tokens of the first text."""
    context = NONE_PENDING if encoder is None else encoder.prepare(draws.sources[:1])
    return start_on_past(decoder, draws.texts[0], pasts, capacity, context)


def start_on_past(
    decoder: Decoder,
    tokens: Sequence[int],
    pasts: Sequence[int],
    capacity: int,
    context: PendingContext = NONE_PENDING,
) -> DecoderRun:
    """Return a run whose rows have read so many of some tokens, which are read once."""
    if decoder.artifact.window is None:
        run = decoder.start(1, capacity, context, copies=len(pasts))
        run.prefill([tokens[: max(pasts)]])
        run.spread()
        for row, past in enumerate(pasts):
            run.truncate_row(row, past)
        return run
    run = decoder.start(len(pasts), capacity)  # what a window needs of shorter ones is gone
    for row, past in enumerate(pasts):
        for begin in range(0, past, PREFILL_CHUNK):
            run.extend_row(row, tokens[begin : min(begin + PREFILL_CHUNK, past)])
    return run


def measure_error(got: Logits, want: Logits, scale: float) -> float:
    """Return the largest difference in units of `scale`; infinite where a number is not finite."""
    error = float(np.abs(got.astype(np.float64) - want).max()) / scale
    return error if math.isfinite(error) else math.inf


def judge_errors(errors: Mapping[Spot, float], draws: Draws, limits: Mapping[str, float]) -> Outcome:
    """Return the outcome of errors by their spots, with the first that is over the limit."""
    limit = limits[f"{PREFIX}max_error"]
    over = [spot for spot, error in errors.items() if not error <= limit]
    worst = max(errors.values())
    metrics = DrawMetrics(worst, math.isfinite(worst), len(errors))
    outcome = judge_outcome(metrics, limits, PREFIX)
    return locate_failure(outcome, f"at first {describe_spot(draws, over[0])}", over[0]) if over else outcome


def describe_spot(draws: Draws, spot: Spot) -> str:
    """Return a spot in words."""
    number, step, row = spot
    if number == STEPS:
        return f"in single step {step} of row {row}"
    batch = draws.batches[number]
    lengths = ", ".join(str(batch.count_past(step, each)) for each in range(len(batch.texts)))
    begin = batch.count_past(step - 1, row) if step else 0
    end = batch.count_past(step, row) - 1
    return (
        f"in row {row} of a batch of {len(batch.texts)}, in the step of its tokens {begin} to {end}, where"
        f" the rows have read {lengths}"
    )
