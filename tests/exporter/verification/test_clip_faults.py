"""Faults planted in CLIP's graphs: each is refused, and named at its node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from ...helpers.faults import Fault, epsilon, perturbed, scale_factor, transposed
from ...helpers.verdicts import PlantedBundle, keep_answers
from .test_picture_faults import NORM, PRODUCT, seen_future

TEXT = "text.layers.1"
VISION = "vision.layers.1"


def early_end(model: ir.Model) -> None:
    """A text's vector is read at its last place, where padding is."""
    (found,) = [node for node in model.graph if node.op_type == "ArgMax"]
    found.attributes["select_last_index"] = ir.AttrInt64("select_last_index", 1)


def text_faults() -> list[Fault]:
    return [
        Fault(
            "a transposed weight",
            transposed(f"{TEXT}.self_attn.out_proj"),
            f"{TEXT}.self_attn.out_proj",
            PRODUCT,
        ),
        Fault("scores 10 % larger", scale_factor(f"{TEXT}.self_attn"), f"{TEXT}.self_attn", ("Mul",)),
        Fault("epsilon 1e-2", epsilon(f"{TEXT}.layer_norm1", 1e-2), f"{TEXT}.layer_norm1", NORM),
        Fault("the future is seen", seen_future, "text.layers.0.self_attn", ("Add",)),
        Fault("the last end token", early_end, "text.pooling", ("ArgMax",)),
    ]


def picture_faults() -> list[Fault]:
    return [
        Fault("a weight 1 % off", perturbed("vision.patch_embedding"), "vision.patch_embedding", ("Conv",)),
        Fault(
            "a transposed weight",
            transposed(f"{VISION}.self_attn.q_proj"),
            f"{VISION}.self_attn.q_proj",
            PRODUCT,
        ),
        Fault("scores 10 % larger", scale_factor(f"{VISION}.self_attn"), f"{VISION}.self_attn", ("Mul",)),
        Fault("epsilon 1e-2", epsilon("vision.post_layernorm", 1e-2), "vision.post_layernorm", NORM),
    ]


PLANTED = [
    (artifact, fault)
    for artifact, faults in (
        ("text_encoder.portable.fp32", text_faults()),
        ("text_encoder.portable.fp16", text_faults()[1:2]),
        ("image_encoder.portable.fp32", picture_faults()),
        ("image_encoder.portable.fp16", picture_faults()[2:3]),
    )
    for fault in faults
]


@pytest.fixture(scope="module")
def planted(clip_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    """A copy of a sound bundle."""
    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield PlantedBundle("clip", clip_bundle, tmp_path_factory.mktemp("damaged") / "clip")


@pytest.mark.parametrize(("artifact", "fault"), PLANTED, ids=[f"{a}: {fault.name}" for a, fault in PLANTED])
def test_a_fault_is_refused_and_named(planted: PlantedBundle, artifact: str, fault: Fault) -> None:
    verdict = planted.judge(artifact, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


def test_sound_graphs_have_no_node_at_fault(planted: PlantedBundle) -> None:
    report = planted.verify(*dict.fromkeys(artifact for artifact, _ in PLANTED))
    assert report.list_failures() == []
    assert report.list_locations() == []
