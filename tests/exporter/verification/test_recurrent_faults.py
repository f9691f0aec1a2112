"""Exports of recurrent models: what is in a bundle, and faults that are refused and named at modules."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, package, verify
from planforge.exporter.tensorrt.profiles import derive_profiles
from planforge.exporter.tracing.modules import find_module
from planforge.exporter.verification import verify as verify_module
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.decoder import DecoderRun
from planforge.runtime.errors import InputError

from ...helpers.faults import Fault, change_weight, perturbed
from ...helpers.graphs import nodes, replace_graph
from ...helpers.models import edit_json
from ...helpers.recurrent import write_recurrent
from ...helpers.verdicts import PlantedBundle, keep_answers

ENCODER = "encoder.portable.fp32"
DECODER = "decoder.portable.fp32"


@pytest.fixture
def own(recurrent_bundle: Path, tmp_path: Path) -> Path:
    """The fp32 graphs of `recurrent_bundle`, to damage."""
    bundle = Path(shutil.copytree(recurrent_bundle, tmp_path / "bundle"))
    artifacts = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    edit_json(
        bundle / "manifest.json", artifacts=[a for a in artifacts if a["precision"] == "fp32"], plans=[]
    )
    return bundle


def test_the_cases(recurrent_bundle: Path) -> None:
    parity = next((recurrent_bundle / "checks").glob("parity-*.json"))
    report = json.loads(parity.read_text(encoding="utf-8"))
    assert report["passed"] and report["with_pytorch"]
    cases = {(c["artifact"], c["case"]) for c in report["comparisons"]}
    for precision in ("fp32", "fp16"):
        for case in ("one by one", "4 sources, padded", "1 token", "32 tokens", "weights and modules"):
            assert (f"encoder.portable.{precision}", case) in cases
        for case in (
            *("decode, batch 1", "at once, batch 1", "greedy, 4 sources, padded", "weights and modules"),
            *("full target of 32 tokens", "4 beams, 4 sources, padded", "attention, 2 rows of a source"),
        ):
            assert (f"decoder.portable.{precision}", case) in cases
    modules = {
        c["artifact"]: c["metrics"] for c in report["comparisons"] if c["case"] == "weights and modules"
    }
    assert modules[ENCODER]["modules"] >= 5 and modules[DECODER]["modules"] >= 10


def test_plans_of_both_graphs(recurrent_bundle: Path) -> None:
    """TensorRT-RTX builds GRUs of two directions with lengths; the decoder's step has one profile."""
    manifest = Bundle.open(recurrent_bundle).manifest
    assert [plan.built_from for plan in manifest.plans] == ["encoder.portable.fp16", "decoder.portable.fp16"]
    for plan in manifest.plans:
        assert (recurrent_bundle / plan.file).stat().st_size > 10_000
    (profile,) = manifest.plans[1].profiles
    assert profile["name"] == "decode" and profile["axes"]["source_tokens"] == [1, 32, 32]
    smaller = derive_profiles(manifest.artifact("decoder.portable.fp16"), max_batch=2, max_length=8)
    assert [(p.axes["batch"][2], p.axes["source_tokens"][2]) for p in smaller] == [(16, 8)]


def half_percent(name: str) -> Callable[[ir.Model], None]:
    """Return a fault: a weight of the encoder's layers, half a percent too large."""
    return lambda model: change_weight(model.graph.initializers[name], lambda weight: 1.005 * weight)


def reset_before_the_product(model: ir.Model) -> None:
    """ONNX's own formula of a GRU, which is not PyTorch's."""
    nodes(model, "GRU")[1].attributes["linear_before_reset"] = ir.AttrInt64("linear_before_reset", 0)


def read_whole_rows(model: ir.Model) -> None:
    """Padding is read: the last states, and all of the second direction, are those of another text."""
    (*nodes(model, "GRU"), *nodes(model, "LSTM"))[0].replace_input_with(4, None)


def one_direction_twice(model: ir.Model) -> None:
    """The second direction has the first one's weights."""
    weight = model.graph.initializers["encoder.0.weight_hidden"]
    change_weight(weight, lambda both: np.stack([both[0], both[0]]))


def exchange(one: ir.Value, other: ir.Value) -> None:
    """Let the readers of each value read the other."""
    uses = [(use, other) for use in one.uses()] + [(use, one) for use in other.uses()]
    for (node, index), value in uses:
        node.replace_input_with(index, value)


def swap_gates(model: ir.Model) -> None:
    """Exchange a GRU's update and reset, or an LSTM's input and output."""
    (gates, _), *_ = nodes(model, "Sigmoid")[0].outputs[0].uses()
    exchange(gates.outputs[0], gates.outputs[1])


def find_input(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.inputs if value.name == name)


def feed_a_state(model: ir.Model) -> None:
    """The step reads the top state where it should read what is fed."""
    uses = find_input(model, "state.feed").uses()
    concat, index = next((node, index) for node, index in uses if node.op_type == "Concat")
    concat.replace_input_with(index, find_input(model, "state.1.hidden"))


def attend_before(model: ir.Model) -> None:
    """Bahdanau's time: scores compare the state that the step begins with."""
    view = next(node for node in nodes(model, "Reshape") if find_module(node) == "attention")
    view.replace_input_with(0, find_input(model, "state.1.hidden"))


def normalize_over_rows(model: ir.Model) -> None:
    """A softmax over the rows of a source, not over its tokens."""
    (softmax,) = nodes(model, "Softmax")
    softmax.attributes["axis"] = ir.AttrInt64("axis", 1)


def read_context_first(model: ir.Model) -> None:
    """The step reads the context before the word; the weights are for the other order."""
    concat = next(
        n
        for n in nodes(model, "Concat")
        if find_module(next(iter(n.outputs[0].uses())).node) == "cells.0.input"
    )
    first, second = concat.inputs
    concat.replace_input_with(0, second)
    concat.replace_input_with(1, first)


def swap_states(model: ir.Model) -> None:
    exchange(*(value for value in model.graph.inputs if str(value.name).startswith("state.")))


def forget_padding(model: ir.Model) -> None:
    """Rows that have ended go on: their padding changes their states."""
    for node in nodes(model, "Where"):
        if any(output.is_graph_output() for output in node.outputs):
            node.replace_input_with(2, node.inputs[1])


def see_padding(model: ir.Model) -> None:
    """The source's mask keeps everything."""
    where = next(node for node in nodes(model, "Where") if find_module(node) == "attention")
    where.replace_input_with(2, where.inputs[1])


PRODUCT = ("MatMul", "Gemm")
ENCODERS = [
    Fault("a weight 0.5 % off", half_percent("encoder.1.weight_hidden"), "encoder.1", ("GRU",)),
    Fault("one direction's weights twice", one_direction_twice, "encoder.0", ("GRU",)),
    Fault("the reset before the product", reset_before_the_product, "encoder.1", ("GRU",)),
    Fault("a bridge 1 % off", perturbed("bridges.0"), "bridges.0", PRODUCT),
    Fault("keys 1 % off", perturbed("attention.key"), "attention.key", PRODUCT),
    Fault("padding is read", read_whole_rows, "encoder.0", ("GRU",)),
]
DECODERS = [
    Fault("scores 1 % off", perturbed("attention.score"), "attention.score", PRODUCT),
    Fault("a cell 1 % off", perturbed("cells.1.hidden"), "cells.1.hidden", PRODUCT),
    Fault("two gates exchanged", swap_gates, "cells.0", ("Add", "Sigmoid", "Mul", "Sub")),
    Fault("padding is attended to", see_padding, "attention", ("Where", "Add")),
    Fault("states exchanged", swap_states, "attention.query", PRODUCT),
    Fault("rows that ended go on", forget_padding, "", ("Where",)),
]
# Of the other kinds of models, what they have that Bahdanau's has not.
OF_KINDS = [
    (
        "luong",
        ENCODER,
        Fault("an LSTM's weight 0.5 % off", half_percent("encoder.1.weight_hidden"), "encoder.1", ("LSTM",)),
    ),
    ("luong", DECODER, Fault("two gates exchanged", swap_gates, "cells.0", ("Mul",))),
    ("luong", DECODER, Fault("a state is fed", feed_a_state, "", ("Concat",))),
    ("luong", DECODER, Fault("attention before the step", attend_before, "attention", ("Reshape",))),
    ("luong", DECODER, Fault("its vector 1 % off", perturbed("combine"), "combine", PRODUCT)),
    ("dot", ENCODER, Fault("a bridge 1 % off", perturbed("bridges.0"), "bridges.0", PRODUCT)),
    ("dot", DECODER, Fault("a softmax of rows", normalize_over_rows, "attention", ("Softmax",))),
    ("cho", ENCODER, Fault("padding is read", read_whole_rows, "encoder.0", ("LSTM",))),
    ("cho", DECODER, Fault("the context before the word", read_context_first, "", ("Concat",))),
    ("sutskever", DECODER, Fault("the output 1 % off", perturbed("output"), "output", PRODUCT)),
]
PLANTED = [
    *(("bahdanau", ENCODER, fault) for fault in ENCODERS),
    *(("bahdanau", DECODER, fault) for fault in DECODERS),
]


@pytest.fixture(scope="module")
def planted(
    recurrent_bundle: Path,
    recurrent_kind: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], PlantedBundle]]:
    """Return a copy of the sound bundle of a kind."""
    copies = tmp_path_factory.mktemp("damaged")

    @functools.cache
    def copy(kind: str) -> PlantedBundle:
        sound = recurrent_bundle if kind == "bahdanau" else recurrent_kind(kind)
        return PlantedBundle(kind, sound, copies / kind)

    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield copy


@pytest.mark.parametrize(
    ("kind", "artifact", "fault"),
    [*PLANTED, *OF_KINDS],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_fault_is_refused_and_named(
    planted: Callable[[str], PlantedBundle], kind: str, artifact: str, fault: Fault
) -> None:
    verdict = planted(kind).judge(artifact, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


def test_sound_graphs_have_no_node_at_fault(planted: Callable[[str], PlantedBundle]) -> None:
    report = planted("bahdanau").verify()
    assert report.list_failures() == []
    assert report.list_locations() == []


GOLDEN = [(artifact, fault) for _, artifact, fault in PLANTED]


@pytest.mark.parametrize(("artifact", "fault"), GOLDEN, ids=lambda value: getattr(value, "name", value))
def test_golden_data_refuses_faults(
    own: Path, artifact: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    replace_graph(own, artifact, fault.plant)
    report = verify(own, only=[artifact])
    assert not report.with_pytorch
    assert artifact in {c.artifact for c in report.comparisons if not c.passed}


def test_states_of_beams_that_stay_where_they_are_are_refused(
    own: Path, recurrent_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_nothing(self: DecoderRun, copies: Sequence[tuple[int, int]]) -> None: ...

    monkeypatch.setattr(DecoderRun, "copy_rows", copy_nothing)
    report = verify(own, source=recurrent_bundle.parent / "checkpoint", only=[DECODER], level="quick")
    assert [c.case for c in report.comparisons if not c.passed] == ["4 beams, 3 sources, padded"]


def test_what_a_recurrent_model_cannot_have(
    recurrent_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = recurrent_bundle.parent / "checkpoint"
    with pytest.raises(
        InputError, match=r"its encoder is exported as encoder\.portable only, as a recurrent model"
    ):
        export(checkpoint, tmp_path / "bundle", precision=["int8"], target=["cpu"])
    with pytest.raises(InputError, match="output 'explain' is for Transformers; cross_attentions shows"):
        export(checkpoint, tmp_path / "bundle", outputs=["explain"])
    with pytest.raises(InputError, match=r"transformers\.js does not run recurrent decoders"):
        package(recurrent_bundle, tmp_path / "package", runtime="transformers.js")
    with caplog.at_level(logging.WARNING, "planforge"):
        export(checkpoint, tmp_path / "bundle", precision=["fp32"], target=["cpu"], verify=False)
    assert not caplog.records  # nothing is said of a head size


def test_a_checkpoint_without_prompts_has_usual_texts(tmp_path: Path) -> None:
    checkpoint = write_recurrent(tmp_path / "checkpoint", "sutskever")
    (checkpoint / "prompts.txt").unlink()
    report = export(
        checkpoint, tmp_path / "bundle", precision=["fp32"], target=["portable"], verify="quick"
    ).report
    assert report is not None and report.passed
