"""Modules of PyTorch's model beside graphs, on the graphs' own values; also of wrong passes and tracers."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.calibration import convert
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.passes import fusions, store_blocks
from planforge.exporter.passes.weight_files import load_graph
from planforge.exporter.passes.weights import MICROSOFT
from planforge.exporter.tracing import modules, trace
from planforge.exporter.tracing.modules import SCOPES

from ...helpers.faults import Plant, constant, exchanged_caches
from ...helpers.graphs import nodes
from ...helpers.llamas import tiny_llama
from ...helpers.models import TINY, random_gpt2, tiny_bert, tiny_transformer, write_wordpiece
from ...helpers.reader import Reader, nothing
from ...helpers.traces import EndedProcess


def times_one(model: ir.Model) -> None:
    """A multiplication that changes nothing."""
    add = nodes(model, "Add")[-1]
    (result,) = add.outputs
    users = list(result.uses())
    one = constant(model, "one", np.array(1, result.dtype.numpy() if result.dtype else np.float32))
    product = ir.node("Mul", [result, one], name="extra")
    product.outputs[0].name = "extra_output"
    model.graph.insert_after(add, product)
    for user, index in users:
        user.replace_input_with(index, product.outputs[0])


def other_number(model: ir.Model) -> None:
    """The largest number that a mask adds is another one, which hides as much."""
    where = next(n for n in nodes(model, "Where") if n.inputs[2] is not None)
    value = where.inputs[2]
    assert value is not None and value.dtype is not None
    where.replace_input_with(2, constant(model, "low", np.array(-20000, value.dtype.numpy())))


def other_axis(model: ir.Model) -> None:
    node = nodes(model, "Transpose")[0]
    order = list(node.attributes["perm"].as_ints())
    node.attributes["perm"] = ir.AttrInt64s("perm", [order[0], order[2], order[1], *order[3:]])


def renamed_and_shuffled(model: ir.Model) -> None:
    """Other names, an Identity, and the terms of a sum in another order: the same computation."""
    for number, node in enumerate(model.graph):
        node.name = f"other_{number}"
    add = next(n for n in nodes(model, "Add") if n.inputs[0] is not n.inputs[1])
    first, second = add.inputs
    add.replace_input_with(0, second)
    add.replace_input_with(1, first)
    same = ir.node("Identity", [second])
    same.outputs[0].name = "same_output"
    model.graph.insert_before(add, same)
    add.replace_input_with(0, same.outputs[0])


def other_epsilon(model: ir.Model) -> None:
    node = next(n for n in model.graph if "Normalization" in n.op_type)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 2 * node.attributes["epsilon"].as_float())


def other_accuracy(model: ir.Model) -> None:
    nodes(model, "MatMulNBits")[1].attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 3)


@pytest.fixture(scope="module")
def bert_in_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier in int8, whose rows are rounded too."""
    folder = tmp_path_factory.mktemp("modules")
    tiny_bert(folder / "checkpoint", "BertForSequenceClassification", num_labels=3, num_hidden_layers=1)
    write_wordpiece(folder / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int8"], "verify": False}
    export(folder / "checkpoint", folder / "bundle", **options)
    return folder / "bundle"


@pytest.fixture(scope="module")
def gpt2_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of two layers."""
    folder = Path(shutil.copytree(find_demo("gpt2-demo"), tmp_path_factory.mktemp("modules") / "checkpoint"))
    random_gpt2(**TINY | {"vocab_size": 2048}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2_in_int8(gpt2_checkpoint: Path) -> Path:
    """A random GPT-2 in int4, and with its cache in int8."""
    bundle = gpt2_checkpoint.with_name("bundle")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int4", "fp32-kv8"], "verify": False}
    export(gpt2_checkpoint, bundle, **options)
    return bundle


@pytest.fixture(scope="module")
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Reader]:
    """Reads graphs of a bundle, by its name."""

    @functools.cache
    def make(name: str) -> Reader:
        fixture, _, argument = name.partition(":")
        found = request.getfixturevalue(fixture)
        folder: Path = found(argument) if argument else found
        folder = folder / "bundle" if (folder / "bundle").exists() else folder
        return Reader(folder, tmp_path_factory.mktemp("family") / "bundle")

    return make


FAMILIES = [
    ("llama_bundle:qwen3", "decoder.ort.fp32", other_epsilon, "(SimplifiedLayerNormalization) of"),
    ("marian_bundle", "decoder.inplace.fp16", other_axis, " fails: "),
    ("demo_bundle", "decoder.portable.fp16", other_axis, " fails: "),
    ("demo_bundle", "decoder.inplace.fp32", other_axis, " fails: "),
    ("gpt2_in_int8", "decoder.ort.fp32-kv8", exchanged_caches("key"), "(GroupQueryAttention) of h.0.attn"),
    ("gpt2_in_int8", "decoder.ort.fp32-kv8", exchanged_caches("value"), "(GroupQueryAttention) of h.0.attn"),
]


@pytest.mark.parametrize(("name", "artifact", "plant", "word"), FAMILIES)
def test_a_small_change_is_told_by_its_node(
    reader: Callable[[str], Reader], name: str, artifact: str, plant: Plant, word: str
) -> None:
    assert reader(name).read(artifact) == ()
    first, *_ = reader(name).read(artifact, plant)
    assert word in first


LEFT_ALONE = [
    ("head_bundle:ranker", "encoder.portable.fp16", times_one),
    ("bert_in_int8", "encoder.ort.int8", other_epsilon),  # 2e-12 for 1e-12
    ("marian_bundle", "encoder.portable.fp32", other_number),
    ("gpt2_in_int8", "decoder.ort.int4", other_accuracy),
    ("demo_bundle", "decoder.portable.fp16", renamed_and_shuffled),
    ("demo_bundle", "decoder.inplace.fp32", renamed_and_shuffled),
]


@pytest.mark.parametrize(("name", "artifact", "plant"), LEFT_ALONE)
def test_what_changes_no_result_is_left_alone(
    reader: Callable[[str], Reader], name: str, artifact: str, plant: Plant
) -> None:
    assert reader(name).read(artifact) == ()
    assert reader(name).read(artifact, plant) == ()


def test_values_that_are_not_compared_are_counted(reader: Callable[[str], Reader]) -> None:
    """An encoder looks its positions up once for all texts; a decoder for each."""
    of_bert = reader("bert_in_int8").compare("encoder.ort.int8").metrics
    assert of_bert["modules"] > 15
    assert of_bert["modules_left_out"] == 1
    assert reader("gpt2_in_int8").compare("decoder.ort.int4").metrics["modules_left_out"] == 0


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def followed(owner: Any, name: str, change: Plant) -> AbstractContextManager[None]:
    """Let a pass be followed by a change of its graph."""
    real = getattr(owner, name)

    def run(model: ir.Model, *args: Any, **options: Any) -> None:
        real(model, *args, **options)
        change(model)

    return patched(owner, name, run)


def forget_activation(self: Any, op: Any, x: Any, bias: Any) -> Any:
    """Write the exact GELU for its form by tanh."""
    return op.BiasGelu(x, bias, _domain=MICROSOFT)


def fuse_wrongly() -> AbstractContextManager[None]:
    wrong = type("Wrong", (fusions.FastGeluFusion,), {"rewrite": forget_activation})
    rules = fusions.pattern.RewriteRuleSet([*wrong.rule().commute()])  # type: ignore[attr-defined]
    return patched(fusions, "fused", rules)


def set_epsilons(value: float) -> Plant:
    def change(model: ir.Model) -> None:
        for node in nodes(model, "LayerNormalization"):
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", value)

    return change


def forget_bias(graph: ir.Graph, node: ir.Node, *args: Any) -> None:
    store(graph, node, *args)
    for product in graph:
        if product.op_type == "MatMulNBits" and "h.0.attn.c_attn" in str(product.metadata_props):
            product.replace_input_with(5, None)


store = store_blocks.replace_product
PASSES: Mapping[str, tuple[str, Callable[[], AbstractContextManager[None]], str]] = {
    "a fusion writes the exact GELU": ("fp32", fuse_wrongly, "(BiasGelu) of h.0.mlp"),
    "fp16 has another epsilon": (
        "fp16",
        lambda: followed(convert, "convert_to_fp16", set_epsilons(1e-6)),
        "(LayerNormalization) of h.0.ln_1 gives",
    ),
    "int4 forgets a bias": (
        "int4",
        lambda: patched(store_blocks, "replace_product", forget_bias),
        "(MatMulNBits) of h.0.attn.c_attn gives",
    ),
}


def read_export(checkpoint: Path, folder: Path, precision: str) -> tuple[str, ...]:
    """Export a checkpoint to one graph, and read it."""
    target = "portable" if precision == "fp16" else "cpu"
    export(checkpoint, folder / "bundle", target=[target], precision=[precision], verify=False)
    reader = Reader(folder / "bundle", folder / "copy")
    return reader.read(reader.bundle.manifest.artifacts[0].id)


@pytest.mark.parametrize("name", PASSES)
def test_a_fault_of_a_pass_is_told(name: str, gpt2_checkpoint: Path, tmp_path: Path) -> None:
    precision, plant, word = PASSES[name]
    with plant():
        first, *_ = read_export(gpt2_checkpoint, tmp_path, precision)
    assert word in first


def list_scoped(model: ir.Model, op_type: str, scope: str) -> list[ir.Node]:
    return [n for n in nodes(model, op_type) if f"'{scope}'" in str(n.metadata_props.get(SCOPES, ""))]


def trace_epsilon(model: ir.Model) -> None:
    for node in list_scoped(model, "LayerNormalization", "model.h.1.ln_1"):
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-6)


def trace_scale(model: ir.Model) -> None:
    """Scores are a little larger."""
    for node in nodes(model, "GroupQueryAttention")[1:]:
        scale = node.attributes["scale"].as_float()
        node.attributes["scale"] = ir.AttrFloat32("scale", 1.002 * scale)


def trace_caches(model: ir.Model) -> None:
    """Keys of two layers are read for each other's."""
    one, other = (next(v for v in model.graph.inputs if v.name == f"cache.{layer}.key") for layer in (0, 1))
    uses = [(list(one.uses()), other), (list(other.uses()), one)]
    for readers, value in uses:
        for node, index in readers:
            node.replace_input_with(index, value)


TRACED = {
    "another epsilon": (trace_epsilon, "(LayerNormalization) of h.1.ln_1 gives"),
    "another scale": (trace_scale, "(GroupQueryAttention) of h.1.attn gives"),
    "keys of another layer": (trace_caches, "(GroupQueryAttention) of h.0.attn gives"),
    "nothing": (nothing, ""),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_fault_of_the_tracer_is_told(name: str, gpt2_checkpoint: Path, tmp_path: Path) -> None:
    """The graph that torch.onnx writes is another, before anything is noted of it."""
    change, word = TRACED[name]
    real = modules.record_modules

    def record(model: ir.Model) -> None:
        change(model)
        real(model)

    def start(checkpoint: Path, recipe: str, choices: Any, out: Path) -> EndedProcess:
        limits = (str(choices.max_batch), str(choices.max_length), ",".join(choices.outputs))
        trace.write_trace(str(checkpoint.resolve()), recipe, *limits, str(out))
        return EndedProcess()

    with patched(trace, "record_modules", record), patched(trace, "start_tracer", start):
        failures = read_export(gpt2_checkpoint, tmp_path, "fp32")
    assert word in failures[0] if word else failures == ()


@pytest.mark.parametrize("window", [40, 300])
def test_windows_longer_than_what_is_read_at_once(window: int, tmp_path: Path) -> None:
    """A full past has a window's tokens, where the runtime reads so many in one run."""
    tiny_llama(tmp_path / "checkpoint", "mistral", sliding_window=window, max_position_embeddings=700)
    assert read_export(tmp_path / "checkpoint", tmp_path, "fp32") == ()


def double_product(model: ir.Model) -> None:
    """The logits are multiplied by 2: their product's own weight is another."""
    (product,) = nodes(model, "Gemm")
    product.attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)


def test_a_tied_weight_that_only_the_lookup_has_in_int8(tmp_path: Path) -> None:
    """A product of 14 words stays in fp32: its module has that, and the lookup's module the int8 values."""
    checkpoint = Path(shutil.copytree(find_demo("transformer-demo"), tmp_path / "checkpoint"))
    sizes = {"source_vocab_size": 42, "target_vocab_size": 14, "encoder_ffn": 64, "decoder_ffn": 64}
    tiny_transformer(checkpoint, tie_word_embeddings=True, **sizes)
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int8"], "verify": False}
    export(checkpoint, tmp_path / "bundle", **options)
    reader = Reader(tmp_path / "bundle", tmp_path / "copy")
    graph = load_graph(reader.bundle.path(reader.bundle.manifest.artifact("decoder.ort.int8").file)).graph
    assert "target.words.weight" in graph.initializers
    assert any(node.op_type == "GatherBlockQuantized" for node in graph)
    assert reader.read("decoder.ort.int8") == ()
    first, *_ = reader.read("decoder.ort.int8", double_product)
    assert "(Gemm) of output gives" in first
