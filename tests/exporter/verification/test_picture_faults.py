"""Faults planted in the graphs of a model of pictures: each is refused, and named at its node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from planforge.exporter.tracing.modules import find_module

from ...helpers.faults import Fault, epsilon, perturbed, scale_factor, transposed
from ...helpers.reading_faults import behind
from ...helpers.verdicts import PlantedBundle, keep_answers

CONV = ("Conv",)
NORM = ("InstanceNormalization", "LayerNormalization")
FUSED = "MultiHeadAttention"
PRODUCT = ("MatMul", "Gemm", "MatMulNBits")
ATTENTION = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2"
GATED = "unet.down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0"
BLOCK = "unet.mid_block.resnets.0"
LAYER = "text_encoder.layers.1"
OUTPUT = f"{LAYER}.self_attn.out_proj"
SIDES = {"vae_decoder": "vae.decoder", "vae_encoder": "vae.encoder"}


def flipped_waves(model: ir.Model) -> None:
    """Sines stand where the cosines should."""
    joined = next(n for n in model.graph if n.op_type == "Concat" and reads_wave(n, 0) and reads_wave(n, 1))
    first, second = joined.inputs
    joined.replace_input_with(0, second)
    joined.replace_input_with(1, first)


def reads_wave(node: ir.Node, index: int) -> bool:
    """Tell whether a node reads sines or cosines, perhaps cast."""
    value = node.inputs[index] if index < len(node.inputs) else None
    giver = None if value is None else value.producer()
    if giver is not None and giver.op_type == "Cast":
        return reads_wave(giver, 0)
    return giver is not None and giver.op_type in ("Sin", "Cos")


def seen_future(model: ir.Model) -> None:
    """A prompt's tokens see those behind them."""
    (mask,) = [node for node in model.graph if node.op_type == "Trilu"]
    users = list(mask.outputs[0].uses())
    zeros = ir.node("Sub", [mask.outputs[0], mask.outputs[0]], name="no_mask")
    zeros.outputs[0].type = mask.outputs[0].type
    zeros.outputs[0].shape = mask.outputs[0].shape
    model.graph.insert_after(mask, zeros)
    for user, index in users:
        user.replace_input_with(index, zeros.outputs[0])


def late_step(model: ir.Model) -> None:
    """The time step before is meant."""
    step = next(value for value in model.graph.inputs if value.name == "timestep")
    user, index = next(iter(step.uses()))
    one = ir.tensor([1.0], ir.DataType.FLOAT, name="one")
    value = ir.Value(name="one", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT), const_value=one)
    model.graph.register_initializer(value)
    late = ir.node("Sub", [step, value], name="late")
    late.outputs[0].type = step.type
    late.outputs[0].shape = step.shape
    model.graph.insert_before(user, late)
    user.replace_input_with(index, late.outputs[0])


def swapped_halves(model: ir.Model) -> None:
    """A gated layer's value and gate change places."""
    split = next(n for n in model.graph if n.op_type == "Split" and find_module(n).endswith("ff.net.0"))
    first, second = split.outputs
    uses = [(value, list(value.uses())) for value in (first, second)]
    for (_, users), other in zip(uses, (second, first), strict=True):
        for user, index in users:
            user.replace_input_with(index, other)


def text_faults() -> list[Fault]:
    return [
        Fault("a transposed weight", transposed(OUTPUT), OUTPUT, PRODUCT),
        Fault("scores 10 % larger", scale_factor(f"{LAYER}.self_attn"), f"{LAYER}.self_attn", ("Mul",)),
        Fault("epsilon 1e-2", epsilon(f"{LAYER}.layer_norm1", 1e-2), f"{LAYER}.layer_norm1", NORM),
        Fault("the future is seen", seen_future, "text_encoder.layers.0.self_attn", ("Add",)),
    ]  # fmt: skip


def unet_faults() -> list[Fault]:
    return [
        Fault("a weight 1 % off", perturbed(f"{BLOCK}.conv1"), f"{BLOCK}.conv1", CONV),
        Fault("a group norm's epsilon", epsilon(f"{BLOCK}.norm1", 1e-2), f"{BLOCK}.norm1", NORM),
        Fault("scores 10 % larger", scale_factor(ATTENTION), ATTENTION, ("Mul",)),
        Fault("a transposed weight", transposed(f"{ATTENTION}.to_q"), f"{ATTENTION}.to_q", PRODUCT),
        Fault("a sign", behind(f"{BLOCK}.conv2", "Conv", "Neg"), BLOCK, ("Add",)),
        Fault("sines and cosines flipped", flipped_waves, "unet", ("Concat",)),
        Fault("a time step late", late_step, "unet", ("Unsqueeze",)),
        Fault("value and gate exchanged", swapped_halves, GATED, ("Mul", "Gelu")),
    ]  # fmt: skip


def autoencoder_faults(graph: str) -> list[Fault]:
    side = SIDES[graph]
    block = f"{side}.mid_block.resnets.1"
    attention = f"{side}.mid_block.attentions.0"
    return [
        Fault("a weight 1 % off", perturbed(f"{side}.conv_in"), f"{side}.conv_in", CONV),
        Fault("a group norm's epsilon", epsilon(f"{block}.norm2", 1e-2), f"{block}.norm2", NORM),
        Fault("a transposed weight", transposed(f"{attention}.to_v"), f"{attention}.to_v", PRODUCT),
        Fault("scores 10 % larger", scale_factor(attention), attention, ("Mul",)),
        Fault("a sign", behind(f"{block}.conv2", "Conv", "Neg"), block, ("Add",)),
    ]


def change_attention(change: Callable[[ir.Node], None]) -> Callable[[ir.Model], None]:
    """Return what changes the one node of an attention."""

    def plant(model: ir.Model) -> None:
        change(next(n for n in model.graph if n.op_type == FUSED and find_module(n) == ATTENTION))

    return plant


def scale(node: ir.Node) -> None:
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.1 * node.attributes["scale"].as_float())


def exchange(node: ir.Node) -> None:
    """Exchange keys and values."""
    _, keys, values = node.inputs
    node.replace_input_with(1, values)
    node.replace_input_with(2, keys)


def halve_heads(node: ir.Node) -> None:
    node.attributes["num_heads"] = ir.AttrInt64("num_heads", node.attributes["num_heads"].as_int() // 2)


def fused_faults() -> list[Fault]:
    return [
        Fault("scores 10 % larger", change_attention(scale), ATTENTION, (FUSED,)),
        Fault("keys and values exchanged", change_attention(exchange), ATTENTION, (FUSED,)),
        Fault("half of the heads", change_attention(halve_heads), ATTENTION, (FUSED,)),
    ]


PLANTED = [
    (artifact, fault)
    for artifact, faults in (
        ("text_encoder.portable.fp32", text_faults()),
        ("unet.portable.fp32", unet_faults()),
        (
            "unet.portable.fp16",
            unet_faults()[1:6:2],
        ),  # what is found in fp32 is found there, but for rounding
        ("unet.ort.fp32", fused_faults()),
        ("vae_decoder.portable.fp32", autoencoder_faults("vae_decoder")),
        ("vae_encoder.portable.fp16", autoencoder_faults("vae_encoder")),
    )
    for fault in faults
]


@pytest.fixture(scope="module")
def planted(picture_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    """A copy of a sound bundle."""
    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield PlantedBundle("pictures", picture_bundle, tmp_path_factory.mktemp("damaged") / "pictures")


@pytest.mark.parametrize(("artifact", "fault"), PLANTED, ids=[f"{a}: {fault.name}" for a, fault in PLANTED])
def test_a_fault_is_refused_and_named(planted: PlantedBundle, artifact: str, fault: Fault) -> None:
    verdict = planted.judge(artifact, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


def test_sound_graphs_have_no_node_at_fault(planted: PlantedBundle) -> None:
    report = planted.verify(*dict.fromkeys(artifact for artifact, _ in PLANTED))
    assert report.list_failures() == []
    assert report.list_locations() == []
