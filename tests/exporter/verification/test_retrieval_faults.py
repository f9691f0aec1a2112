"""Exports of a model that reads neighbours: their cases, and faults that are refused and named at modules."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, verify
from planforge.exporter.tracing.modules import find_module
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.retrieval import RetrievalState
from planforge.runtime.errors import InputError

from ...helpers.faults import Fault, change_weight, node_of, perturbed
from ...helpers.graphs import nodes
from ...helpers.retro import write_retro
from ...helpers.verdicts import PlantedBundle, keep_answers

ENCODER = "encoder.ort.fp32"
DECODER = "decoder.ort.fp32"
CROSS = "layers.1.cross"


def test_the_cases(retro_bundle: Path) -> None:
    parity = next((retro_bundle / "checks").glob("parity-*.json"))
    report = json.loads(parity.read_text(encoding="utf-8"))
    assert report["passed"] and report["with_pytorch"]
    cases = {(c["artifact"], c["case"]) for c in report["comparisons"]}
    on_cpu = [("ort", "fp32"), ("ort", "int8")]
    for dialect, precision in (*on_cpu, ("inplace", "fp16")):
        for case in (
            *(
                "a text at once",
                "parts of 3 tokens",
                "parts of 64 tokens",
                "a token at a time",
                "a batch of 4",
                "full context",
            ),
            *("real text", "prompts that end about a chunk's end, 8 tokens", "weights and modules"),
        ):
            assert (f"decoder.{dialect}.{precision}", case) in cases
    for dialect, precision in (*on_cpu, ("portable", "fp16")):
        for case in ("neighbours of a chunk", "neighbours of 6 chunks", "weights and modules"):
            assert (f"encoder.{dialect}.{precision}", case) in cases
    modules = {
        c["artifact"]: c["metrics"] for c in report["comparisons"] if c["case"] == "weights and modules"
    }
    assert modules[ENCODER]["modules"] >= 20 and modules[DECODER]["modules"] >= 25
    assert modules[ENCODER]["modules_left_out"] == modules[DECODER]["modules_left_out"] == 0


def test_plans_of_both_graphs(retro_bundle: Path) -> None:
    manifest = Bundle.open(retro_bundle).manifest
    assert {plan.built_from for plan in manifest.plans} == {"encoder.portable.fp16", "decoder.inplace.fp16"}
    for plan in manifest.plans:
        assert (retro_bundle / plan.file).stat().st_size > 10_000


def keep_everything(model: ir.Model) -> None:
    """Padding of neighbours is attended to."""
    where = next(node for node in nodes(model, "Where") if is_bias(node))
    where.replace_input_with(2, where.inputs[1])


def is_bias(where: ir.Node) -> bool:
    """Tell whether a Where makes the mask of neighbours."""
    return any(find_module(user) == CROSS for user, _ in where.outputs[0].uses())


def see_other_neighbours(model: ir.Model) -> None:
    """Tokens of a neighbour attend to those of the other."""
    outer = nodes(model, "Where")[-1]
    inner = outer.inputs[1]
    assert inner is not None
    outer.replace_input_with(2, inner)


def shift_places(by: int) -> Callable[[ir.Model], None]:
    """Return a fault: queries stand at other places behind the beginning of their chunk."""

    def plant(model: ir.Model) -> None:
        (mod,) = nodes(model, "Mod")
        (add, _), *_ = mod.outputs[0].uses()
        (constant,) = [value for value in add.inputs if value is not mod.outputs[0]]
        assert constant is not None
        change_weight(constant, lambda array: array + by)

    return plant


def begin_chunks_early(model: ir.Model) -> None:
    """A chunk begins a token early: the place of a token is that of the one before it."""
    (mod,) = nodes(model, "Mod")
    before = mod.inputs[0]
    assert before is not None
    add = before.producer()
    assert add is not None and add.op_type == "Add"
    mod.replace_input_with(
        0, next(value for value in add.inputs if value is not None and not value.const_value)
    )


def flip_rotation(model: ir.Model) -> None:
    """Queries of the attention to neighbours are turned the other way."""
    sub = node_of(model, CROSS, "Sub")
    sub.replace_input_with(0, sub.inputs[1])


def exchange_layers(model: ir.Model) -> None:
    """Two layers of the encoder have each other's feed-forward part."""
    for part in ("inner", "output"):
        names = [f"encoder.layers.{layer}.feed_forward.{part}.weight.transposed" for layer in (0, 1)]
        one, other = (model.graph.initializers[name] for name in names)
        assert one.const_value is not None and other.const_value is not None
        one.const_value, other.const_value = (
            ir.tensor(value.const_value.numpy().copy(), name=name)  # type: ignore[union-attr]
            for value, name in ((other, names[0]), (one, names[1]))
        )


def forget_missing_neighbours(model: ir.Model) -> None:
    """A row that reads no neighbour attends to padding all the same."""
    node = next(node for node in nodes(model, "ReduceMax"))
    (mul, index), *_ = find_product(node.outputs[0])
    other = mul.inputs[1 - index]
    ir.convenience.replace_all_uses_with(mul.outputs[0], other)  # type: ignore[arg-type]


def find_product(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the products that read a value, through nodes that only move it."""
    found = []
    for user, index in value.uses():
        found += [(user, index)] if user.op_type == "Mul" else find_product(user.outputs[0])
    return found


def swap_cross_inputs(model: ir.Model) -> None:
    """Two layers read each other's neighbours."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    for kind in ("key", "value"):
        one, other = inputs[f"cross.0.{kind}"], inputs[f"cross.1.{kind}"]
        uses = [(use, other) for use in one.uses()] + [(use, one) for use in other.uses()]
        for (node, index), value in uses:
            node.replace_input_with(index, value)


PRODUCT = ("MatMul", "Gemm")
DECODERS = [
    Fault("queries of neighbours 1 % off", perturbed(f"{CROSS}.query"), f"{CROSS}.query", PRODUCT),
    Fault("padding is attended to", keep_everything, "", ("Where",)),
    Fault("places one off", shift_places(1), "", ("Add",)),
    Fault("a chunk begins early", begin_chunks_early, "", ("Mod", "Add")),
    Fault("a rotation flipped", flip_rotation, CROSS, ("Sub", "Concat")),
    Fault("missing neighbours are read", forget_missing_neighbours, "layers.1", ("Add",)),
    Fault("two layers' neighbours exchanged", swap_cross_inputs, CROSS, (*PRODUCT, "Transpose")),
]
ENCODERS = [
    Fault("keys 1 % off", perturbed("layers.2.cross.key"), "layers.2.cross.key", PRODUCT),
    Fault("two layers exchanged", exchange_layers, "encoder.layers.0.feed_forward.inner", PRODUCT),
    Fault("neighbours see each other", see_other_neighbours, "encoder", ("Where",)),
    Fault(
        "the chunk's norm 1 % off",
        lambda model: change_weight(
            model.graph.initializers["encoder.chunk_norm.weight"], lambda weight: 1.01 * weight
        ),
        "encoder.chunk_norm",
        ("SimplifiedLayerNormalization", "Mul"),
    ),
]


@pytest.fixture(scope="module")
def planted(retro_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield PlantedBundle("retro", retro_bundle, tmp_path_factory.mktemp("damaged") / "bundle")


@pytest.mark.parametrize(
    ("artifact", "fault"),
    [*((DECODER, fault) for fault in DECODERS), *((ENCODER, fault) for fault in ENCODERS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_fault_is_refused_and_named(planted: PlantedBundle, artifact: str, fault: Fault) -> None:
    verdict = planted.judge(artifact, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


def test_sound_graphs_have_no_node_at_fault(planted: PlantedBundle) -> None:
    report = planted.verify()
    assert report.list_failures() == []
    assert report.list_locations() == []


def read_early(self: RetrievalState) -> None:
    """Look up the neighbours of the chunk's beginning moved by a token."""
    self.tokens = np.roll(self.tokens, 1, axis=1)
    READ(self)


def read_once(self: RetrievalState) -> None:
    """Go on with the first chunk's neighbours."""
    if self.length == self.chunk_length:
        READ(self)
    self.tokens = self.tokens[:, :0]


def read_another_row(self: RetrievalState) -> None:
    """Let each row have the neighbours of the next one."""
    self.tokens = np.roll(self.tokens, 1, axis=0)
    READ(self)


READ = RetrievalState.read_neighbours


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (read_early, {"a text at once", "a token at a time", "a batch of 4"}),
        (read_once, {"a text at once", "a token at a time", "a batch of 4"}),
        (read_another_row, {"a batch of 4"}),
    ],
)
def test_neighbours_of_the_wrong_chunk_are_refused(
    retro_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[RetrievalState], None],
    cases: set[str],
) -> None:
    bundle = Path(shutil.copytree(retro_bundle, tmp_path / "bundle"))
    monkeypatch.setattr(RetrievalState, "read_neighbours", broken)
    report = verify(bundle, source=retro_bundle.parent / "checkpoint", only=[DECODER], level="quick")
    failed = {c.case for c in report.comparisons if not c.passed}
    assert cases <= failed
    if len(cases) == 1:
        assert failed == cases


def test_what_such_a_model_cannot_have(tmp_path: Path) -> None:
    checkpoint = write_retro(tmp_path / "checkpoint")
    with pytest.raises(InputError, match="max_length=15 must be at least 16, two chunks of 8 tokens"):
        export(checkpoint, tmp_path / "bundle", max_length=15)
    with pytest.raises(InputError, match="a decoder that reads neighbours has none to add"):
        export(checkpoint, tmp_path / "bundle", outputs=["cross_attentions"])
