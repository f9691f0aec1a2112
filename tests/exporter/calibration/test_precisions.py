"""Which precisions an export can have, and how the size of their blocks is chosen."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from planforge.exporter import export
from planforge.exporter.calibration.blocks import choose_blocks
from planforge.exporter.calibration.repeat import read_calibration
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import DEMOS, resolve_source
from planforge.exporter.errors import ExportError
from planforge.exporter.graphs import plan_artifacts
from planforge.exporter.limits import CAPS, Gaps
from planforge.exporter.number_formats import INT4
from planforge.exporter.options import list_usual_precisions
from planforge.exporter.passes.quantize import QuantizedWeights, quantize
from planforge.exporter.precisions import PRECISIONS, resolve_precisions
from planforge.exporter.reference_model import load_our_model, offload_weights
from planforge.exporter.tasks.rounding import Rounding
from planforge.runtime.apps.check.metrics import Metrics, TextMetrics
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.models import edit_json

Array = npt.NDArray[np.float32]
DEMO_NAMES = ("gpt2-demo", "bert-demo", "transformer-demo")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """The demos, and "heads of 4": gpt2-demo with 64 heads."""
    odd = Path(shutil.copytree(DEMOS / "gpt2-demo", tmp_path_factory.mktemp("odd") / "odd"))
    edit_json(odd / "config.json", n_head=64)
    found = {name: Checkpoint(resolve_source(name)) for name in DEMO_NAMES}
    return {**found, "heads of 4": Checkpoint(resolve_source(odd))}


@pytest.mark.parametrize(
    ("model", "targets", "precisions", "ids"),
    [
        ("gpt2-demo", "cpu", "fp32", "decoder.ort.fp32"),
        ("gpt2-demo", "cpu", "int8-kv8,fp32", "decoder.ort.int8-kv8 decoder.ort.fp32"),
        ("gpt2-demo", "cpu,rtx", "fp16,int8", "decoder.inplace.fp16 decoder.ort.int8"),
        (
            *("gpt2-demo", "cpu,portable", "fp32,int4"),
            "decoder.ort.fp32 decoder.portable.fp32 decoder.ort.int4",
        ),
        ("transformer-demo", "cpu", "int8", "encoder.ort.int8 decoder.ort.int8"),
        ("transformer-demo", "cuda", "w8a16", "encoder.ort.w8a16 decoder.ort.w8a16"),
        ("gpt2-demo", "cuda", "fp32,fp16,w4a16", "decoder.portable.fp32 decoder.ort.fp16 decoder.ort.w4a16"),
        ("gpt2-demo", "cpu,cuda", "int8,w8a16", "decoder.ort.int8 decoder.ort.w8a16"),
        ("gpt2-demo", "cuda,rtx", "w8a16", "decoder.ort.w8a16 decoder.inplace.w8a16"),
        ("gpt2-demo", "cuda", "fp16-kv8,w4a16-kv8", "decoder.ort.fp16-kv8 decoder.ort.w4a16-kv8"),
        ("bert-demo", "cuda", "w8a16,w4a16", "encoder.ort.w8a16 encoder.ort.w4a16"),
        ("heads of 4", "cpu", "fp32", "decoder.portable.fp32"),
        ("heads of 4", "cpu,portable", "fp16", "decoder.portable.fp16"),
    ],
)
def test_each_target_gets_its_graphs_in_what_they_can_be(
    checkpoints: dict[str, Checkpoint], model: str, targets: str, precisions: str, ids: str
) -> None:
    artifacts = plan_artifacts(checkpoints[model], targets.split(","), precisions.split(","))
    assert [artifact.id for artifact in artifacts] == ids.split()
    assert len({artifact.file for artifact in artifacts}) == len(artifacts)


def test_precisions_of_the_same_weights_share_a_file_and_caches_are_typed(
    checkpoints: dict[str, Checkpoint],
) -> None:
    of_encoders = {name for name, kind in PRECISIONS.items() if kind.rows is not None or kind.engine}
    names = [name for name in PRECISIONS if name not in of_encoders]
    artifacts = plan_artifacts(checkpoints["gpt2-demo"], ["cpu", "cuda", "rtx"], names)
    data = {(a.precision, a.dialect): a.data for a in artifacts}
    for bits in ("fp32", "int8", "int4", "fp16", "w8a16", "w4a16"):
        assert data[bits, "ort"] == data[f"{bits}-kv8", "ort"]
    for bits in ("fp32", "w8a16"):
        assert data[bits, "ort"] == data[bits, "inplace"]
    assert len(set(data.values())) == len({PRECISIONS[name].weights for name in names}) == 8
    for artifact in artifacts:
        cache = {s.dtype for s in (*artifact.inputs, *artifact.outputs) if "cache" in s.name or "." in s.name}
        expected = "int8" if "kv8" in artifact.precision else "float16"
        assert cache == {expected if artifact.precision not in ("fp32", "int8", "int4") else "float32"}
        assert artifact.output("logits").dtype == "float32"


HEADS = "head size is not a multiple of 8.*GroupQueryAttention needs. Leave it out, or export fp32"


@pytest.mark.parametrize(
    ("model", "targets", "precisions", "words"),
    [
        ("gpt2-demo", "cpu", "fp16", "'fp16' is in no graph of the targets .*add the target portable"),
        ("gpt2-demo", "portable", "int8", "'int8' runs in .*decoder.portable only.*add the target cpu"),
        ("gpt2-demo", "cpu,rtx", "int8,int4", "'rtx' gets the decoder.inplace .* not int8, int4"),
        ("gpt2-demo", "cpu", "fp32,fp16", "'fp16' is in no graph of the targets .*add the target portable"),
        ("gpt2-demo", "rtx", "fp16,fp32-kv8", "'fp32-kv8' .*decoder.inplace only.*add the target cpu"),
        (
            "gpt2-demo",
            "cpu,cuda",
            "int8",
            "'cuda' gets the decoder.* can be fp32, fp16, .*w8a16, .* not int8",
        ),
        ("gpt2-demo", "cpu", "w8a16", "'w8a16' is in no graph of the targets"),
        ("gpt2-demo", "cuda", "fp32-kv8", "'fp32-kv8' is in no graph of the targets"),
        ("gpt2-demo", "rtx", "fp16,fp16-kv8", "'fp16-kv8' runs in .*decoder.inplace only"),
        ("bert-demo", "cuda", "fp16-kv8", "'fp16-kv8' is for models that generate text; export 'fp16'"),
        ("bert-demo", "cpu", "fp32-kv8", "'fp32-kv8' is for models that generate text; export 'fp32'"),
        ("bert-demo", "cpu", "fp32,int8-kv8", "'int8-kv8' is for models that generate .* export 'int8'"),
        ("transformer-demo", "cpu", "fp32-kv8", "'fp32-kv8' is for models that generate text"),
        ("transformer-demo", "cpu,portable", "fp32,int4-kv8", "'int4-kv8' is .* export 'int4'"),
        ("heads of 4", "cpu", "fp32,int8", f"'int8' .*decoder.portable only, because its {HEADS}"),
        ("heads of 4", "cpu", "fp32,fp32-kv8", f"'fp32-kv8' .*, because its {HEADS}"),
        ("heads of 4", "cpu", "int8", HEADS),
    ],
)
def test_what_a_model_or_target_cannot_have_is_refused(
    checkpoints: dict[str, Checkpoint], model: str, targets: str, precisions: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        plan_artifacts(checkpoints[model], targets.split(","), precisions.split(","))


@pytest.mark.parametrize("names", [[], ["fp64"], ["fp32", "int3"], ["INT8"], "int8"])
def test_unknown_precisions_list_the_known(names: list[str]) -> None:
    known = "fp32, fp16, int8, int4, fp32-kv8, int8-kv8, int4-kv8, "
    known += "fp16-kv8, w8a16, w4a16, w8a16-kv8, w4a16-kv8, fp8a16, nvfp4a16, w8a8, bf16, fp8a8"
    with pytest.raises(InputError, match=f"must name one or more of {known}(; did you mean|$)"):
        resolve_precisions(names)


def test_a_precision_counts_once_and_the_first_stays_first() -> None:
    assert resolve_precisions(["int4", "fp32", "int4", "fp32"]) == ["int4", "fp32"]


@pytest.mark.parametrize(
    ("targets", "precisions"),
    [
        (["cpu"], ["fp32"]),
        (["portable"], ["fp32", "fp16"]),
        (["rtx"], ["fp32", "fp16"]),
        (["cpu", "rtx"], ["fp32", "fp16"]),
    ],
)
def test_unless_told_otherwise_a_target_gets_floats(targets: list[str], precisions: list[str]) -> None:
    assert list_usual_precisions(targets) == precisions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": ["int8"], "target": ["portable"]}, "add the target cpu"),
        ({"precision": ["int3"]}, "must name one or more of"),
        ({"quantizer": "gtpq"}, "quantizer 'gtpq' is not one of gptq, rtn; did you mean 'gptq'"),
        ({"precision": ["fp16"], "target": ["cpu"]}, "add the target portable"),
    ],
)
def test_an_export_refuses_at_once(tmp_path: Path, options: Any, words: str) -> None:
    stages: list[str] = []
    with pytest.raises(InputError, match=words):
        export("gpt2-demo", tmp_path / "B", progress=stages.append, **options)
    assert stages == [] and list(tmp_path.iterdir()) == []


def weights(**widths: int) -> dict[str, Callable[[], Array]]:
    """Functions that give a weight (40, width) each."""
    random = np.random.default_rng(0)
    arrays = {n: random.standard_normal((40, width)).astype(np.float32) for n, width in widths.items()}
    return {name: lambda array=array: array for name, array in arrays.items()}  # type: ignore[misc]


class Asked:
    """A model whose loss is given by a function of the rounding that is tried."""

    def __init__(self, loss: Callable[[Rounding], dict[str, float]], rows: int = 9) -> None:
        self.loss = loss
        self.rows = rows
        self.roundings: list[Rounding] = []

    @property
    def sizes(self) -> list[int]:
        return [rounding.activation_block for rounding in self.roundings]

    def __call__(self, rounding: Rounding) -> Gaps:
        self.roundings.append(rounding)
        loss = self.loss(rounding)
        metrics = Metrics(loss.get("max_error", 0.0), 0.0, loss.get("mean_kl", 0.0), 1.0, 1.0, 0.0, True, 9)
        text = {name: loss.get(name, 0.0) for name in TextMetrics.LIMITED}
        return {"": metrics, "text": TextMetrics(**text, finite=True, rows=self.rows)}


def numbers_in(weight: Array, size: int) -> int:
    """The most different numbers that a block has."""
    return max(len(np.unique(block)) for block in weight.reshape(-1, size))


GOOD: dict[str, float] = {}


def losses(bits: int, kl: float, counted: float) -> dict[str, float]:
    """A model's losses as shares of the design's caps."""
    caps = {8: (0.005, 0.02, 0.01), 4: (0.1, 0.1, 0.08)}[bits]
    return {
        "text_kl": kl * caps[0],
        "top1_changes": counted * caps[1],
        "perplexity_change": counted * caps[2],
    }


def read_nothing(names: Iterable[str]) -> dict[str, torch.Tensor]:
    """No weight reads rows that are known, so that GPTQ rounds none."""
    return {}


# Shares of the caps.
WELL = (0.89, 0.89)
FAR = (0.91, 0.0)
FLIPS = (0.0, 0.91)
NAN = (math.nan, 0.0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("shares", "tried"),
    [
        ({32: WELL, 128: WELL}, [128]),
        ({32: WELL, 128: FAR, 64: WELL}, [128, 32, 64]),
        ({32: WELL, 128: FLIPS, 64: WELL}, [128, 32, 64]),
        ({32: WELL, 128: NAN, 64: FAR}, [128, 32, 64]),
    ],
)
def test_the_largest_block_inside_the_caps_is_taken(
    bits: int, shares: dict[int, tuple[float, float]], tried: list[int]
) -> None:
    given = weights(a=256, b=128)
    asked = Asked(lambda rounding: losses(bits, *shares[rounding.activation_block]))
    found = choose_blocks(begin(given, bits), read_nothing, [asked])
    size = max(size for size, share in shares.items() if share == WELL)
    assert (found.size, asked.sizes) == (size, tried)
    assert {name: blocks.size for name, blocks in found.items()} == {"a": size, "b": size}
    for rounding, own in zip(asked.roundings, tried, strict=True):
        assert set(rounding.weights) == {"a", "b"} and not rounding.cache_scales
        assert all(array.shape == given[name]().shape for name, array in rounding.weights.items())
        if bits == 4:  # 16 integers; two blocks have scales of their own
            assert numbers_in(rounding.weights["a"], own) <= 16
            assert own == 128 or numbers_in(rounding.weights["a"], 2 * own) > 16


def begin(read: Mapping[str, Callable[[], Array]], bits: int) -> QuantizedWeights:
    """Weights that have no blocks yet."""
    return QuantizedWeights(bits, 0, {}, read)


@pytest.mark.parametrize("share", [FAR, FLIPS, (3.9, 3.9)])
def test_where_none_is_close_the_smallest_block_is_taken(share: tuple[float, float]) -> None:
    asked = Asked(lambda rounding: losses(8, *share))
    assert choose_blocks(begin(weights(a=256, b=128), 8), read_nothing, [asked]).size == 32
    assert asked.sizes == [128, 32]  # none between is better: the gate will say so


@pytest.mark.parametrize("share", [(4.1, 0.0), (0.0, 4.1), NAN])
def test_what_nothing_brings_near_stays_as_it_was_asked_for(share: tuple[float, float]) -> None:
    """Smaller blocks and int8 for some weights would be slower, and refused as well."""
    eight = choose_blocks(begin(weights(a=256, b=128), 8), None, [Asked(lambda rounding: losses(8, *share))])
    assert eight.size == 128
    four = choose_blocks(
        begin(weights(**{"h.0.a": 256, "table": 256}), 4),
        None,
        [Asked(lambda rounding: losses(4, *share))],
        ["table"],
    )
    assert four.size == 256 and dict(four.bits) == {"h.0.a": 4, "table": 4}


@pytest.mark.parametrize(
    ("quick", "exact", "size", "asked_exactly"),
    [
        ((0.29, 0.0), FAR, 128, 0),  # so little that more texts need not tell
        ((0.31, 0.0), WELL, 128, 1),
        ((0.31, 0.0), FAR, 32, 2),
        ((2.6, 0.0), WELL, 128, 1),
        ((2.8, 0.0), WELL, 32, 0),  # so much that no size is asked of exactly
        (NAN, WELL, 128, 0),  # and no size is better
        # Of 5,000 tokens 90 may change, and twice the root of 90 is 0.19 of the 100 that the cap is.
        ((0.29, 0.70), FLIPS, 128, 0),
        ((0.29, 0.72), FLIPS, 32, 2),
        ((0.29, 1.08), WELL, 128, 1),
        ((0.29, 1.10), WELL, 32, 0),
    ],
)
def test_a_quick_measure_decides_where_it_is_sure(
    quick: tuple[float, float], exact: tuple[float, float], size: int, asked_exactly: int
) -> None:
    first = Asked(lambda rounding: losses(8, *quick), rows=5000)
    last = Asked(lambda rounding: losses(8, *exact))
    found = choose_blocks(begin(weights(a=128, b=128), 8), read_nothing, [first, last])
    assert (found.size, len(last.roundings)) == (size, asked_exactly)


def test_whether_a_weight_is_there_rounds_none() -> None:
    def fail() -> Array:
        raise AssertionError("it was read")

    there = QuantizedWeights(8, 32, {"a": 8}, {"a": fail})
    assert "a" in there and "b" not in there


def test_without_a_sample_no_gptq_rounds() -> None:
    given = weights(a=64)
    found = choose_blocks(begin(given, 4), None, [Asked(lambda rounding: GOOD)])
    np.testing.assert_array_equal(found["a"].codes, quantize(given["a"](), INT4, 64).codes)


def count_bits(rounding: Rounding) -> dict[str, int]:
    """The bits of each weight, by how many numbers a block of 32 has."""
    return {name: 4 if numbers_in(array, 32) <= 16 else 8 for name, array in rounding.weights.items()}


def test_int4_tables_and_then_kinds_of_weights_are_int8_where_int4_is_not_close() -> None:
    """Those first that lose most by themselves for their size, until the rest is close."""
    alone = {"h.*.down": 0.6, "h.*.up": 0.3, "table": 0.5, "h.*.q": 0.1}
    names = {f"h.{layer}.{name}": 128 for layer in range(2) for name in ("down", "up", "q")}

    def loss(rounding: Rounding) -> dict[str, float]:
        in_int4 = {re.sub(r"[.]\d[.]", ".*.", n) for n, bits in count_bits(rounding).items() if bits == 4}
        return losses(4, sum(alone[kind] for kind in in_int4), 0.0)

    def bits_for(limit: float) -> dict[str, int]:
        shares = dict(alone)
        alone.update({kind: share * limit for kind, share in shares.items()})
        asked = Asked(loss)
        found = choose_blocks(begin(weights(**names, table=256), 4), read_nothing, [asked], ["table"])
        alone.update(shares)
        return {name: blocks.format.bits for name, blocks in found.items()}

    assert set(bits_for(0.5).values()) == {4}
    assert {name for name, bits in bits_for(0.8).items() if bits == 8} == {"table"}
    assert {n for n, bits in bits_for(1.8).items() if bits == 8} == {"table", "h.0.down", "h.1.down"}
    # Half of all numbers is not reached by a second kind of three.
    assert {n for n, bits in bits_for(9.0).items() if bits == 8} == {"table", "h.0.down", "h.1.down"}


def test_gptq_rounds_what_is_multiplied_by_and_no_table() -> None:
    """A table's rows are the words' vectors too, which products alone say nothing of."""
    given = weights(table=64, other=64)
    rows = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)

    def sample(names: Iterable[str]) -> dict[str, torch.Tensor]:
        return dict.fromkeys(names, torch.from_numpy(rows))

    found = choose_blocks(begin(given, 4), sample, [Asked(lambda rounding: GOOD)], ["table"])
    nearest = {name: quantize(read(), INT4, 64) for name, read in given.items()}
    np.testing.assert_array_equal(found["table"].codes, nearest["table"].codes)
    assert (found["other"].codes != nearest["other"].codes).any()
    own = quantize(given["other"](), INT4, 64, rows)
    np.testing.assert_array_equal(found["other"].codes, own.codes)


@pytest.mark.parametrize(("widths", "sizes"), [((256, 96), [32]), ((64, 192), [64]), ((384, 128), [128])])
def test_only_blocks_that_divide_all_widths_are_tried(widths: tuple[int, int], sizes: list[int]) -> None:
    asked = Asked(lambda rounding: losses(4, *WELL))
    assert choose_blocks(begin(weights(a=widths[0], b=widths[1]), 4), read_nothing, [asked]).size == sizes[0]
    assert asked.sizes == sizes


def test_a_width_that_no_block_divides_is_named_with_the_way_out() -> None:
    given = weights(**{"h.0.attn.c_attn.weight": 64, "h.0.mlp.c_fc.weight": 40})
    with pytest.raises(ExportError) as caught:
        choose_blocks(begin(given, 4), read_nothing, [Asked(lambda rounding: GOOD)])
    words = str(caught.value)
    assert all(word in words for word in ("int4", "h.0.mlp.c_fc.weight", "40", "multiple of 32"))
    assert "export fp32" in words
    with pytest.raises(ValueError, match="multiple of the block of 32"):
        quantize(given["h.0.mlp.c_fc.weight"](), INT4, 32)


def test_the_caps_are_those_of_the_design() -> None:
    names = ("text_kl", "top1_changes", "perplexity_change")
    for precision, caps in (("int8", (0.005, 0.02, 0.01)), ("int4", (0.1, 0.1, 0.08))):
        for name in (precision, f"{precision}-kv8"):
            assert tuple(CAPS[name][n] for n in names) == caps
    assert CAPS["fp32-kv8"] == CAPS["int8"]
    assert set(CAPS) == set(PRECISIONS)


def test_weights_to_compare_with_are_read_from_what_the_model_holds_then(llama_demo_bundle: Path) -> None:
    """So a model that rests keeps no second copy of its weights in fp32."""
    model = load_our_model(DEMOS / "llama-demo", max_length=64)
    calibration = read_calibration(Bundle.open(llama_demo_bundle), model)
    name = "layers.0.mlp.down_proj.weight"
    while_awake = calibration.weights["int8"][name].dequantize()
    offload_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    np.testing.assert_array_equal(calibration.weights["int8"][name].dequantize(), while_awake)
    parameter = model.get_parameter(name)
    parameter.data = torch.zeros_like(parameter)  # not in place: what a model holds that rests is its file
    assert not calibration.weights["int8"][name].dequantize().any()
