"""The `ort` dialect: its graphs and the cache that runs them, held against transformers.

B batch, T tokens, V vocabulary, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter.calibration.calibration import Calibration
from planforge.exporter.calibration.convert import write_graphs
from planforge.exporter.graphs import attach_weights, make_artifact
from planforge.exporter.tracing.recipes import TraceOptions
from planforge.exporter.tracing.recipes import decoder as recipes
from planforge.exporter.tracing.trace import trace
from planforge.models import GPT2, load_model
from planforge.runtime.backends.ort_program import OrtBuffer, OrtProgram, OrtStep
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.decoding.decoder import Decoder, DecoderRun, pad
from planforge.runtime.decoding.static_cache import GroupQueryCache
from planforge.runtime.errors import ContextLengthError, InputError

from ...helpers.cache import RoundingCache, in_steps
from ...helpers.fake_program import FakeProgram
from ...helpers.graphs import nodes
from ...helpers.models import TINY, reference_logits, tiny_gpt2

Array: TypeAlias = npt.NDArray[np.float32]
V = TINY["vocab_size"]
LAYERS = TINY["n_layer"]
H = TINY["n_head"]
D = 8
CAPACITY = 40
SLOTS = [f"cache.{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]


@dataclass(frozen=True)
class Tiny:
    """A random GPT-2, and its graphs of the `ort` dialect in the runtime's own loop.

    Attributes:
        graph: in fp32.
        scales: of its keys and values in int8, (H * D,); some are small enough to clip.
    """

    published: transformers.GPT2LMHeadModel
    graph: ir.Model
    fp32: Decoder
    kv8: Decoder
    scales: Mapping[str, Array]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    published = tiny_gpt2(folder)
    model = load_model(folder)
    assert isinstance(model, GPT2) and model.config.head_size == D
    recipe = recipes.make_decoder(model.config, TraceOptions(4, TINY["n_positions"]), "ort")
    graphs = {recipe.id: trace(model, recipe)}
    attach_weights({recipe.id: recipe}, graphs, model)
    scales = scales_of(published)
    artifacts = [make_artifact(recipe, p, f"onnx/{p}.onnx", "onnx/w.data") for p in ("fp32", "fp32-kv8")]
    artifacts, _ = write_graphs(graphs, artifacts, Calibration(cache_scales=scales), folder)
    fp32, kv8 = (Decoder(OrtProgram(folder / a.file, threads=1), a) for a in artifacts)
    return Tiny(published, ir.load(folder / artifacts[0].file), fp32, kv8, scales)


def scales_of(published: transformers.GPT2LMHeadModel) -> dict[str, Array]:
    """A step for each channel; a third of the channels are clipped at half of what they reach."""
    tokens = np.random.default_rng(0).integers(0, V, TINY["n_positions"]).tolist()
    clipped = np.where(np.arange(H * D) % 3 == 0, 0.5, 1.25).astype(np.float32)
    found = in_steps(published, tokens, None)
    return {name: np.abs(x).max(1).reshape(-1) * clipped / 127 for name, x in found.items()}


class Reference:
    """transformers' logits (T, V) of one row in one pass, without batch or padding."""

    def __init__(self, tiny: Tiny, rounded: bool = False) -> None:
        self.tiny = tiny
        self.scales = tiny.scales if rounded else None
        self.logits = lru_cache(None)(self.compute)

    def compute(self, tokens: tuple[int, ...]) -> Array:
        if self.scales is None:
            found: Array = reference_logits(self.tiny.published, torch.tensor([tokens]))[0].numpy()
            return found
        with torch.inference_mode():
            cache = RoundingCache(self.scales)
            out = self.tiny.published(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        rounded: Array = out.logits[0].numpy()
        return rounded

    def last(self, rows: Sequence[Sequence[int]]) -> Array:
        """(B, V): the logits that follow each row."""
        return np.stack([self.logits(tuple(row))[-1] for row in rows])


def slots(run: DecoderRun) -> dict[str, npt.NDArray[Any]]:
    """The memory of the cache itself, (B, H, S, D) each."""
    cache = run.cache
    assert isinstance(cache, GroupQueryCache)
    return {name: cast(OrtBuffer, cache.buffers[name]).array for name in SLOTS}


def start(decoder: Decoder, batch: int, garbage: float = np.nan, capacity: int = CAPACITY) -> DecoderRun:
    """An empty cache whose slots are full of garbage."""
    run = decoder.start(batch, capacity)
    for array in slots(run).values():
        array[...] = garbage if array.dtype == np.float32 else -128
    return run


def assert_close(got: Any, want: Array, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


tokens = st.integers(0, V - 1)
texts = st.lists(tokens, min_size=1, max_size=6)


class Session:
    """A cache, and what each of its rows should have taken in."""

    def __init__(self, tiny: Tiny, rounded: bool, data: st.DataObject) -> None:
        self.reference = Reference(tiny, rounded)
        self.tolerance = 2e-2 if rounded else 1e-4  # a number between two steps may become either
        self.data = data
        self.batch = data.draw(st.integers(1, 4), "batch")
        garbage = data.draw(st.sampled_from([np.nan, 7e3, 0.0]), "garbage")
        self.run = start(tiny.kv8 if rounded else tiny.fp32, self.batch, garbage)
        self.rows: list[list[int]] = [[] for _ in range(self.batch)]

    def prefill(self) -> None:
        new = [self.data.draw(texts) for _ in self.rows]
        logits = self.run.prefill(new, self.data.draw(st.integers(1, 7), "chunk"))
        self.rows = [row + more for row, more in zip(self.rows, new, strict=True)]
        assert_close(logits, self.reference.last(self.rows), self.tolerance)

    def decode(self) -> None:
        new = [self.data.draw(tokens) for _ in self.rows]
        active = [self.data.draw(st.booleans(), "active") for _ in self.rows]
        logits = self.run.decode(new, active)
        for row, token, growing in zip(self.rows, new, active, strict=True):
            row += [token] * growing
        for b in np.flatnonzero(active):
            assert_close(logits[b], self.reference.last([self.rows[b]])[0], self.tolerance)

    def truncate(self) -> None:
        length = self.data.draw(st.integers(0, 12), "length")
        self.run.truncate(length)
        self.rows = [row[:length] for row in self.rows]

    def copy(self) -> None:
        order = self.data.draw(st.permutations(range(self.batch)))
        cut = self.data.draw(st.integers(1, self.batch))
        sources = order[:cut]
        targets = order[cut:]
        copies = [(self.data.draw(st.sampled_from(sources)), target) for target in targets]
        self.run.copy_rows(copies)
        for source, target in copies:
            self.rows[target] = list(self.rows[source])

    def any_rows(self) -> None:
        """New tokens of unequal number, some none, and the logits of some of them in any order."""
        new = [self.data.draw(st.lists(tokens, max_size=5)) for _ in self.rows]
        new[self.data.draw(st.integers(0, self.batch - 1))].append(0)
        ids, valid = pad(new, "right")
        if not any(map(len, self.rows)):
            valid[:, 0] = True  # of an empty batch a prefill, which gives every row something
            new = [row or [0] for row in new]
        self.rows = [row + more for row, more in zip(self.rows, new, strict=True)]
        places = [(b, i) for b, more in enumerate(new) for i in range(len(more))]
        wanted = self.data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=6), "wanted")
        logits = self.run.step(ids, valid, [b * ids.shape[1] + i for b, i in wanted])
        for found, (b, i) in zip(logits, wanted, strict=True):
            everything = self.reference.logits(tuple(self.rows[b]))
            assert_close(found, everything[len(self.rows[b]) - len(new[b]) + i], self.tolerance)


STEPS = ["prefill", "decode", "truncate", "copy", "any_rows"]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_whatever_way_tokens_come_the_logits_are_those_of_one_pass(tiny: Tiny, data: st.DataObject) -> None:
    session = Session(tiny, False, data)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5), "steps"):
        getattr(session, step)()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_an_int8_cache_holds_and_reads_rounded_numbers(tiny: Tiny, data: st.DataObject) -> None:
    session = Session(tiny, True, data)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4), "steps"):
        getattr(session, step)()


@pytest.mark.parametrize("chunk", [64, 3])
def test_int8_slots_are_the_rounded_keys_and_values(tiny: Tiny, chunk: int) -> None:
    prompts = [[5, 17, 80, 3, 41, 7, 22], [9, 1], [60, 60, 2, 33]]
    run = start(tiny.kv8, len(prompts))
    run.prefill(prompts, chunk)
    for b, prompt in enumerate(prompts):
        steps = in_steps(tiny.published, prompt, tiny.scales)
        for name, stored in slots(run).items():
            assert stored.dtype == np.int8
            exact = steps[name]
            got = stored[b, :, : len(prompt)].astype(np.float32)
            want = np.clip(np.rint(exact), -128, 127)
            assert (np.abs(want) >= 127).any() and len(np.unique(want)) > 20  # some are clipped, most are not
            between = np.abs(exact - np.floor(exact) - 0.5) < 1e-3  # may be rounded either way
            np.testing.assert_array_equal(got[~between], want[~between])
            assert np.abs(got - want).max() <= 1 and between.mean() < 0.05


def test_stale_slots_of_longer_rows_are_never_read(tiny: Tiny) -> None:
    reference = Reference(tiny)
    run = start(tiny.fp32, 2)
    run.prefill([[5] * 30, [9] * 25])
    for array in slots(run).values():
        array[...] = np.nan  # even what was a past before
    run.truncate(0)
    prompts = [[3, 1, 4], [15, 9, 26, 53]]
    assert_close(run.prefill(prompts), reference.last(prompts))
    assert_close(run.prefill([[7, 7], [8]]), reference.last([[3, 1, 4, 7, 7], [15, 9, 26, 53, 8]]))


def test_a_row_that_ended_with_its_slots_full_disturbs_no_other(tiny: Tiny) -> None:
    reference = Reference(tiny)
    run = start(tiny.fp32, 3, capacity=8)
    rows = [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13], [21]]
    run.prefill(rows, chunk=3)
    for token in range(30, 35):
        logits = run.decode([0, token, token], [False, True, True])
        rows[1:] = [[*row, token] for row in rows[1:]]
        assert_close(logits[1:], reference.last(rows[1:]))
    with pytest.raises(ContextLengthError, match="holds 8 tokens per row, 9 are needed"):
        run.decode([0, 1, 1], [False, True, True])
    logits = run.decode([0, 1, 40], [False, False, True])
    assert_close(logits[2:], reference.last([[*rows[2], 40]]))


def test_what_does_not_fit_is_refused_before_anything_is_written(tiny: Tiny) -> None:
    run = start(tiny.fp32, 2, capacity=8)
    rows = [[1, 2, 3, 4, 5], [6]]
    run.prefill(rows)
    before = {name: array.copy() for name, array in slots(run).items()}
    ids, valid = pad([[9] * 4, [9]], "right")
    with pytest.raises(ContextLengthError, match="holds 8 tokens per row, 9 are needed"):
        run.step(ids, valid, [0])
    for name, array in slots(run).items():
        np.testing.assert_array_equal(array, before[name])
    # By rows 5 + 3 and 1 + 4 fit, though 5 + 4 would not.
    ids, valid = pad([[7, 7, 7], [8, 8, 8, 8]], "right")
    logits = run.step(ids, valid, [2, 7])
    assert_close(logits, Reference(tiny).last([[*rows[0], 7, 7, 7], [*rows[1], 8, 8, 8, 8]]))


def test_several_tokens_on_a_past_run_row_by_row_and_all_else_at_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    original = OrtStep.__call__

    def watched(self: OrtStep, inputs: Any) -> Any:
        shapes.append(inputs["input_ids"].shape)
        return original(self, inputs)

    monkeypatch.setattr(OrtStep, "__call__", watched)
    run = tiny.fp32.start(3, CAPACITY)
    run.prefill([[1, 2], [3], [4, 5, 6]])
    run.decode([7, 8, 9])
    assert shapes == [(3, 3), (3, 1)]
    run.prefill([[1, 2], [3, 4, 5], [6]])
    assert shapes[2:] == [(1, 2), (1, 3), (1, 1)]
    one = tiny.fp32.start(1, CAPACITY)
    one.prefill([[1, 2, 3, 4, 5]], chunk=2)
    assert shapes[5:] == [(1, 2), (1, 2), (1, 1)]


def test_several_rows_that_take_several_tokens_on_a_past_give_logits_alone(tiny: Tiny) -> None:
    def unused(given: Any) -> Any:
        raise AssertionError("the graph must not run")

    ids = np.zeros((2, 2), np.int64)
    cache = GroupQueryCache(FakeProgram(unused), tiny.fp32.artifact, 2, CAPACITY)
    cache.lengths = [3, 3]
    with pytest.raises(InputError, match="returns only logits, not logits, cross_attentions"):
        cache.step(ids, np.ones_like(ids, bool), np.array([0]), ("logits", "cross_attentions.0"))


def test_the_graph_is_fused_and_computes_few_rows_behind_the_last_attention(tiny: Tiny) -> None:
    operators = [node.op_type for node in tiny.graph.graph]
    assert not {"Split", "Transpose", "Gelu", "Softmax", "Concat", "Where"} & set(operators)
    attention = nodes(tiny.graph, "GroupQueryAttention")
    assert len(attention) == operators.count("FastGelu") == LAYERS
    for node in attention:  # queries, keys and values side by side
        assert [value is None for value in node.inputs[:3]] == [False, True, True]
    every = list(tiny.graph.graph)
    behind = every[every.index(attention[-1]) :]
    products = [node for node in behind if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 4  # of the attention, two of the feed-forward part, and the head
    for node in products:
        assert node.inputs[0] is not None and node.inputs[0].shape is not None
        assert len(node.inputs[0].shape) == 2 and str(node.inputs[0].shape[0]) == "rows"


def test_the_cache_is_written_in_place(tiny: Tiny) -> None:
    artifact: Artifact = tiny.fp32.artifact
    assert artifact.aliases == {name.replace("cache", "present"): name for name in SLOTS}
    assert (artifact.padding_side, artifact.input("past.0.key").dtype) == ("right", "float32")
    assert tiny.kv8.artifact.input("past.0.key").dtype == "int8"
    assert tiny.kv8.artifact.output("present.0.key").dtype == "int8"
    run = start(tiny.fp32, 1)
    addresses = {name: array.ctypes.data for name, array in slots(run).items()}
    run.prefill([[1, 2, 3]])
    for name, array in slots(run).items():
        assert array.ctypes.data == addresses[name]
        assert np.isfinite(array[0, :, :3]).all() and np.isnan(array[0, :, 3:]).all()
