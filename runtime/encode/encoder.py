"""Runs an encoder's graph over sequences of unequal length: pads them, and removes the padding.

B batch, T tokens, N logit rows
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..activations import count_batch_bytes, count_output_bytes, count_word_bytes, count_words
from ..backends.backend import Array, BoundGraph, GraphRunner, Program
from ..backends.buckets import find_bucket
from ..bundle.defaults import EncoderDefaults
from ..bundle.manifest import Artifact, TensorSpec
from ..errors import ManifestError
from ..memory_budget import MemoryBudget, find_largest
from ..text.batching import TOKEN_BUDGET, group_by_length
from ..text.long_text import Piece

# Tokens of a batch, padding included, up to which its launches are a large part of its time; it is captured.
MAX_CAPTURED = 8192
MAX_LOGITS = 2**25  # of a batch's tokens, of which weights of words are made: 128 MiB
MAX_PADDING = 1.25  # of a captured batch's tokens to those without padding to its shape
FEW_TOKENS = 512  # of a batch that is captured whatever its padding: launching it takes longer than computing
INPUTS = ("ids", "mask", "segments", "logit_rows")  # the roles that a graph's inputs may have


class Encoder(GraphRunner):
    """An opened encoder graph, which pads with the token `pad`."""

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        pad: int,
        budget: MemoryBudget | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(program, artifact, budget)
        self.config = config or {}  # whose sizes a memory limit needs
        self.pad = pad
        self.max_batch = artifact.axis("batch").max
        self.inputs = {spec.role: spec.name for spec in artifact.inputs}
        self.steps: dict[tuple[str, ...], BoundGraph] = {}  # by their outputs

    def run_batches(
        self,
        pieces: Sequence[Piece],
        roles: Sequence[str],
        rows: Sequence[Sequence[int]] | None = None,
        batch_size: int | None = None,
    ) -> Iterator[dict[int, list[Array]]]:
        """Yield for each sequence of a batch, by its index, an array per role, without padding.

        Sequences of similar length run together. The batch that has the first sequence whose outputs are
        still missing runs next, so that what was read first comes out first. `rows` holds the positions of
        each sequence whose "masked_lm" logits are wanted.
        """
        available = self.budget.count_available()
        outputs = self.list_outputs(roles)
        sections = split_into_sections(
            self.config,
            outputs,
            [len(piece) for piece in pieces],
            [0] * len(pieces) if rows is None else [len(positions) for positions in rows],
            available,
        )
        for section, needed in sections:
            lengths = [len(pieces[i]) for i in section]
            groups = group_by_length(lengths, batch_size or self.max_batch, limit_tokens(outputs))
            what, hint = "", ""
            if available is not None:
                what = name_section(len(section), max(len(pieces[i]) for i in section))
                first = section[0]
                logits = 0 if rows is None else len(rows[first])
                hint = suggest_length(self.config, outputs, len(pieces[first]), logits, available)
            for group in sorted(groups, key=min):
                indices = [section[i] for i in group]
                batch_rows = None if rows is None else [rows[i] for i in indices]
                # Nothing is held while the caller has the turn, who may call this encoder again.
                with self.budget.reserve(needed, what, hint):
                    arrays = self.run_batch([pieces[i] for i in indices], roles, batch_rows)
                yield dict(zip(indices, arrays, strict=True))

    def list_outputs(self, roles: Sequence[str]) -> Outputs:
        """Return the graph's outputs, those of the given roles and the others."""
        asked = [self.artifact.output(role) for role in roles]
        return Outputs(asked, [spec for spec in self.artifact.outputs if spec not in asked])

    def run_batch(
        self, pieces: Sequence[Piece], roles: Sequence[str], rows: Sequence[Sequence[int]] | None = None
    ) -> list[list[Array]]:
        """Return the outputs of sequences that run together, padded to the longest."""
        needed = len(pieces), max(len(piece) for piece in pieces)
        captured = self.find_captured_shape(*needed)
        B, T = captured or needed
        ids = np.full((B, T), self.pad, np.int64)
        mask = np.zeros_like(ids)
        segments = np.zeros_like(ids)
        for b, piece in enumerate([*pieces, *[pieces[0]] * (B - len(pieces))]):
            ids[b, : len(piece)] = piece.ids
            mask[b, : len(piece) - piece.unseen] = 1
            mask[b, : piece.unpooled] = 2  # attended to, but not pooled
            segments[b, : len(piece)] = piece.segments
        # A graph with a masked-word head always computes one row at least.
        flat = [b * T + t for b, positions in enumerate(rows or ()) for t in positions] or [0]
        if captured:
            flat += [0] * (find_bucket(len(flat), B * T) - len(flat))
        values = {"ids": ids, "mask": mask, "segments": segments, "logit_rows": np.asarray(flat, np.int64)}
        specs = [self.artifact.output(role) for role in roles]
        with self.turn():
            given = {name: values[role] for role, name in self.inputs.items()}
            names = tuple(spec.name for spec in specs)
            if captured:
                if names not in self.steps:
                    self.steps[names] = self.program.bind({}, names, fixed=True)
                outputs = self.steps[names](given)
            else:
                outputs = self.program.run(given, {}, names)
        ends = np.cumsum([len(positions) for positions in rows or ()])
        by_role: list[list[Array]] = []
        for spec in specs:
            array = outputs[spec.name]
            axes = spec.axis_names()
            if axes[0] == "rows":
                by_role.append(np.split(array, ends)[:-1])
            elif "tokens" in axes:
                by_role.append([array[b, : len(piece)] for b, piece in enumerate(pieces)])
            else:
                by_role.append(list(array[: len(pieces)]))
        return [list(arrays) for arrays in zip(*by_role, strict=True)]

    def find_captured_shape(self, batch: int, tokens: int) -> tuple[int, int] | None:
        """Return the batch and the length that sequences are padded to, if the engine is to capture them.

        None where it captures nothing, where computing the padding would take longer than the launches
        that a graph saves, and under a memory_limit, which does not count with padding.
        """
        if not self.program.captures_steps or self.budget.limit is not None:
            return None
        wider = find_bucket(batch, self.max_batch), find_bucket(tokens, self.artifact.axis("tokens").max)
        count = math.prod(wider)
        is_near = count <= max(FEW_TOKENS, MAX_PADDING * batch * tokens)
        return wider if is_near and count <= MAX_CAPTURED else None


def check_manifest(artifact: Artifact, defaults: EncoderDefaults, config: Mapping[str, Any]) -> None:
    """Refuse a manifest whose parts contradict each other, before anything relies on them."""
    if unknown := [spec.role for spec in artifact.inputs if spec.role not in INPUTS]:
        raise ManifestError(
            f"artifact {artifact.id} has an input {unknown[0]!r}; known are {', '.join(INPUTS)}"
        )
    roles = {spec.role for spec in artifact.outputs}
    if not defaults.heads and not any(re.fullmatch(r"hidden\.\d+", role) for role in roles):
        raise ManifestError(f"artifact {artifact.id} has neither an output with a hidden state nor a head")
    for head in defaults.heads:
        outputs = [spec for spec in artifact.outputs if spec.role.partition(".")[0] == head]
        if not outputs:
            raise ManifestError(f"artifact {artifact.id} has no output of the head {head!r}")
        width = outputs[0].axes[-1]
        if head in ("sequence_classification", "token_classification") and width != len(defaults.labels):
            raise ManifestError(f"{head} has {width} classes, encoder.labels has {len(defaults.labels)}")
    for name in ("intermediate_size", "hidden_size", "num_attention_heads"):
        if type(config.get(name)) is not int:
            raise ManifestError(f"config.{name} is {config.get(name)!r}, not an integer")
    if not 4 <= defaults.max_length <= artifact.axis("tokens").max:
        raise ManifestError(f"encoder.max_length={defaults.max_length} is not within the graph's tokens")
    counts = [len(frame.prefix + frame.between + frame.suffix) for frame in defaults.frames or ()]
    around = max(counts, default=0)
    if around + 2 > defaults.max_length:
        raise ManifestError(f"encoder.frames has {around} tokens, which leave no room for two texts")


class Outputs(NamedTuple):
    """A graph's outputs: those that are asked for, and others, which an engine computes and drops."""

    asked: Sequence[TensorSpec]
    others: Sequence[TensorSpec] = ()


def limit_tokens(outputs: Outputs) -> int:
    """Return the most tokens of a batch, padding included: fewer where each has logits of many words."""
    words = count_words((*outputs.asked, *outputs.others))
    return min(TOKEN_BUDGET, MAX_LOGITS // words) if words else TOKEN_BUDGET


def name_section(count: int, longest: int) -> str:
    """Return in words what a section's memory is for."""
    texts = "1 text" if count == 1 else f"{count} texts"
    return f"{texts} of {longest} tokens with activations and outputs"


def suggest_length(
    config: Mapping[str, Any], outputs: Outputs, length: int, rows: int, available: int
) -> str:
    """Return what fits where one sequence of a length, with so many rows of logits, does not, in words."""
    fitting = find_largest(
        lambda tokens: count_section_bytes(config, outputs, 1, tokens, rows) <= available, length - 1
    )
    return f"Texts of up to {fitting} tokens fit" if fitting else "No text fits"


def count_section_bytes(
    config: Mapping[str, Any], outputs: Outputs, count: int, longest: int, rows: int
) -> int:
    """Return what a section needs: its largest batch, and the outputs of all its `count` sequences.

    `rows` is the number of positions whose masked-word logits are wanted.
    """
    tokens = min(count * longest, max(limit_tokens(outputs), longest))
    words = count_word_bytes((*outputs.asked, *outputs.others), tokens)
    kept = count_output_bytes(outputs.asked, count, longest, rows)
    dropped = count_output_bytes(outputs.others, -(-tokens // longest), longest, 0)
    return kept + dropped + words + count_batch_bytes(config, tokens, longest)


def split_into_sections(
    config: Mapping[str, Any],
    outputs: Outputs,
    lengths: Sequence[int],
    rows: Sequence[int],
    available: int | None,
) -> Iterator[tuple[range, int]]:
    """Yield sections of sequences in their order, as large as the memory allows, and what each needs.

    Outputs wait for their turn, as results are given out in the order in which texts came. So under a limit
    sequences are computed in sections, each of which is given out before the next begins. A sequence that
    needs more than the available bytes makes a section of its own; without a limit there is one for all.
    `rows` says how many masked-word logits of each sequence are wanted.
    """
    if available is None:
        yield range(len(lengths)), 0
        return
    begin = 0
    while begin < len(lengths):
        end = begin
        longest = 0
        logits = 0
        needed = 0
        while end < len(lengths):
            longest = max(longest, lengths[end])
            logits += rows[end]
            more = count_section_bytes(config, outputs, end + 1 - begin, longest, logits)
            if end > begin and more > available:
                break
            end += 1
            needed = more
        yield range(begin, end), needed
        begin = end
