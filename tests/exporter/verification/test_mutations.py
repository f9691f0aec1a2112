"""Proof that the checks can fail: faults planted in exported graphs, and in what feeds them.

Each must be caught by a comparison, and the search must name the node. What caught what is written to
build/planted-faults.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.verification.bisect import (
    PYTORCH,
    Culprit,
)
from planforge.exporter.verification.structure import READING
from planforge.runtime.decoding.growing_cache import GrowingCache
from planforge.runtime.decoding.slot_cache import SlotCache
from planforge.runtime.diagnostics.metrics import Comparison

from ...helpers.faults import (
    Fault,
    epsilon,
    future_after_a_past,
    late_positions,
    low_mask,
    no_mask,
    perturbed,
    scale_attribute,
    scale_factor,
    swapped,
    transposed,
)
from ...helpers.ground import Ground
from ...helpers.paths import ROOT

TABLE = ROOT / "build" / "planted-faults.md"
PRODUCT = ("MatMul",)
NORM = ("LayerNormalization",)


@pytest.fixture(scope="session")
def ground(
    demo_bundle: Path,
    head_bundle: Callable[[str], Path],
    marian_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Ground]:
    copies = tmp_path_factory.mktemp("damaged")
    folders = {
        "GPT-2": lambda: demo_bundle,
        "BERT": lambda: head_bundle("classifier"),
        "translation": lambda: marian_bundle,
    }
    return functools.cache(lambda family: Ground(folders[family](), copies / family))


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, str, str, str]]]:
    """Rows of graph, fault, what caught it, node named; written when the module is through."""
    rows: list[tuple[str, str, str, str]] = []
    yield rows
    head = ("graph", "fault", "caught by", "node named")
    lines = [" | ".join(row) for row in (head, ("---",) * len(head), *sorted(rows))]
    TABLE.parent.mkdir(exist_ok=True)
    named = sum(row[-1] != "none" for row in rows)  # each test asserts that the name is right
    share = f"{named} of {len(rows)} are named rightly."
    text = "\n".join(f"| {line} |" for line in lines)
    TABLE.write_text(f"{text}\n\n{share}\n", encoding="utf-8")


def decoder_faults(artifact: str) -> list[Fault]:
    layer = [f"h.2.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    half = artifact.endswith("fp16")
    faults = [
        Fault("a transposed weight", transposed("h.1.attn.c_proj"), "h.1.attn.c_proj", PRODUCT),
        Fault("a layer's weights 1 % off", perturbed(*layer), "h.2.attn.c_attn", PRODUCT),
        Fault("one weight 1 % off", perturbed("h.2.mlp.c_fc"), "h.2.mlp.c_fc", PRODUCT, hidden=half),
        Fault("epsilon 1e-2", epsilon("h.3.ln_2", 1e-2), "h.3.ln_2", NORM, hidden=half),
        Fault("epsilon 1e-6", epsilon("h.1.ln_1", 1e-6), "h.1.ln_1", NORM, hidden=True),
        Fault("a position off by one", late_positions("wpe"), "wpe", ("Gather",)),
    ]
    if ".ort." not in artifact:
        faults.append(Fault("no mask", no_mask(), "", ("Where",)))
    if "portable" in artifact:
        faults += [
            Fault("swapped K and V", swapped("h.2.attn", "Concat", index=1), "h.2.attn", ("Concat",)),
            Fault("scores 10 % larger", scale_factor("h.1.attn"), "h.1.attn", ("Mul",)),
        ]
    if "inplace" in artifact:
        swap = swapped("h.2.attn", "TensorScatter", index=1)
        faults += [
            Fault("swapped K and V", swap, "h.2.attn", ("TensorScatter",)),
            Fault("scores 10 % larger", scale_attribute("h.1.attn", "Attention"), "h.1.attn", ("Attention",)),
        ]
    if ".ort." in artifact:
        scores = scale_attribute("h.1.attn", "GroupQueryAttention")
        faults.append(Fault("scores 10 % larger", scores, "h.1.attn", ("GroupQueryAttention",)))
    if "portable.fp16" in artifact:
        faults.append(Fault("fp16 overflow: -648 on a mask of -65504", low_mask, "", ("Where",)))
    return faults


def encoder_faults(artifact: str) -> list[Fault]:
    output = "layers.1.attention.output"
    inner = "layers.0.intermediate"
    half = artifact.endswith("fp16")
    return [
        Fault("a transposed weight", transposed(output), output, PRODUCT),
        Fault("a layer's weights 1 % off", perturbed(inner, "layers.0.output"), inner, PRODUCT, hidden=half),
        Fault(
            "epsilon 1e-2", epsilon("layers.0.output_norm", 1e-2), "layers.0.output_norm", NORM, hidden=half
        ),
        Fault("no mask", no_mask(), "", ("Where",)),
        Fault(
            "a position off by one",
            late_positions("embeddings.positions"),
            "embeddings.positions",
            ("Gather",),
        ),
        Fault("scores 10 % larger", scale_factor("layers.1.attention"), "layers.1.attention", ("Mul",)),
    ]


def translator_faults(artifact: str) -> list[Fault]:
    side = artifact.partition(".")[0]
    half = artifact.endswith("fp16")
    words = {"encoder": "source", "decoder": "target"}[side]
    output = f"{side}.layers.1.attention.output"
    norm = f"{side}.layers.0.attention_residual.norm"
    inner = f"{side}.layers.1.feed_forward.inner"
    faults = [
        Fault("a transposed weight", transposed(output), output, PRODUCT),
        Fault("a layer's weights 1 % off", perturbed(output, inner), output, PRODUCT, hidden=half),
        Fault("epsilon 1e-2", epsilon(norm, 1e-2), norm, NORM, hidden=half),
        Fault("no mask of padding", no_mask(), "", ("Where",)),
        Fault(
            "a position off by one",
            late_positions(f"{words}.positions"),
            f"{words}.positions",
            ("Gather", "GatherND"),
        ),
    ]
    if side == "decoder":
        faults.append(Fault("the future is seen", no_mask(1), "", ("Where",)))
    if "decoder.inplace" in artifact:
        swap = swapped("decoder.layers.1.attention", "TensorScatter", index=1)
        faults.append(Fault("swapped K and V", swap, "decoder.layers.1.attention", ("TensorScatter",)))
    return faults


GRAPHS = {
    "GPT-2": (
        decoder_faults,
        [f"decoder.{d}.{p}" for d in ("portable", "inplace") for p in ("fp32", "fp16")]
        + ["decoder.ort.fp32"],
    ),
    "BERT": (encoder_faults, ["encoder.portable.fp32", "encoder.portable.fp16"]),
    "translation": (
        translator_faults,
        ["encoder.portable.fp32", "encoder.portable.fp16", "decoder.inplace.fp32", "decoder.inplace.fp16"],
    ),
}
PLANTED = [
    pytest.param(family, artifact, fault, id=f"{family} {artifact}: {fault.name}")
    for family, (faults_of, artifacts) in GRAPHS.items()
    for artifact in artifacts
    for fault in faults_of(artifact)
]


def row_of(
    family: str, artifact: str, fault: str, failed: list[Comparison], culprit: Culprit | None
) -> tuple[str, str, str, str]:
    first = max(failed, key=lambda comparison: comparison.backend == "ort-cpu")
    named = "none" if culprit is None else f"{culprit.op_type} of {culprit.module or 'no module'}"
    if culprit is None and first.backend == READING:
        named = "the one that was read"
    return f"{family} {artifact}", fault, f"{first.case}: {first.failures[0]}".replace("|", "/"), named


@pytest.mark.parametrize(("family", "artifact", "fault"), PLANTED)
def test_a_planted_fault_is_caught_and_its_node_named(
    ground: Callable[[str], Ground],
    table: list[tuple[str, str, str, str]],
    family: str,
    artifact: str,
    fault: Fault,
) -> None:
    own = ground(family)
    with own.damaged(artifact, fault) as bundle:
        failed, culprit = own.examined(bundle, bundle.manifest.artifact(artifact))
    assert failed
    table.append(row_of(family, artifact, fault.name, failed, culprit))
    if fault.hidden:
        reading = next(c for c in failed if c.backend == READING)
        assert fault.module in reading.failures[0]
        return
    assert culprit is not None
    assert (culprit.module, culprit.op_type) in {(fault.module, op_type) for op_type in fault.op_types}


@pytest.mark.parametrize("family", list(GRAPHS))
def test_healthy_graphs_have_no_node_at_fault(ground: Callable[[str], Ground], family: str) -> None:
    own = ground(family)
    for artifact in GRAPHS[family][1]:
        failed, culprit = own.examined(own.bundle, own.bundle.manifest.artifact(artifact))
        assert failed == []
        assert culprit is None


def stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's newest key and value are written over the ones before."""
    honest = SlotCache.step

    def step(self: Any, *args: Any) -> Any:
        results = honest(self, *args)
        self.lengths[-1] -= 1
        return results

    monkeypatch.setattr(SlotCache, "step", step)


def stale_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not see what the last one wrote."""
    honest = GrowingCache.step

    def step(self: Any, *args: Any) -> Any:
        results = honest(self, *args)
        self.past, self.present = self.present, self.past
        return results

    monkeypatch.setattr(GrowingCache, "step", step)


@pytest.mark.parametrize(
    ("artifact", "name", "break_cache"),
    [
        ("decoder.inplace.fp32", "a stale cache row", stale_row),
        ("decoder.ort.fp32", "a stale cache row", stale_row),
        ("decoder.portable.fp32", "a stale cache", stale_buffers),
    ],
)
def test_a_stale_cache_is_caught(
    ground: Callable[[str], Ground],
    table: list[tuple[str, str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    artifact: str,
    name: str,
    break_cache: Callable[[pytest.MonkeyPatch], None],
) -> None:
    own = ground("GPT-2")
    graph = ground("GPT-2").bundle.manifest.artifact(artifact)
    break_cache(monkeypatch)
    failed, culprit = own.examined(own.bundle, graph, own.make_references(graph))
    assert failed
    assert culprit is not None
    # The graph is sound, and so the same as the reference: PyTorch alone, which has no cache, contradicts.
    assert culprit.reference == PYTORCH
    assert culprit.step == "decode"  # nothing is stale in a prefill
    table.append(row_of("GPT-2", artifact, f"in the decoder: {name}", failed, culprit))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_beams_whose_cache_rows_are_not_copied_are_caught(
    ground: Callable[[str], Ground],
    table: list[tuple[str, str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    own = ground("translation")
    monkeypatch.setattr(SlotCache, "copy_rows", lambda self, copies: None)
    artifact = own.bundle.manifest.artifact(f"decoder.inplace.{precision}")
    failed, culprit = own.examined(own.bundle, artifact)
    assert {comparison.case.split(",")[0] for comparison in failed} == {"4 beams"}
    assert culprit is None  # the graph is sound
    table.append(row_of("translation", artifact.id, "in the decoder: beams keep their rows", failed, culprit))


def test_a_fault_of_steps_of_several_tokens_is_caught(
    ground: Callable[[str], Ground], table: list[tuple[str, str, str, str]]
) -> None:
    own = ground("GPT-2")
    artifact = "decoder.portable.fp32"
    fault = Fault("the future is seen after a past", future_after_a_past, "", ())
    with own.damaged(artifact, fault) as bundle:
        failed, culprit = own.examined(bundle, bundle.manifest.artifact(artifact))
    assert {comparison.case.split(",")[0] for comparison in failed} >= {"parts of 7 tokens"}
    assert culprit is not None  # in the drawn batch that failed: a step of a single token has no future
    assert (culprit.module, culprit.op_type) in {("", "And"), ("", "Where"), ("", "Or")}
    table.append(row_of("GPT-2", artifact, fault.name, failed, culprit))


def test_padding_on_the_wrong_side_is_caught(
    ground: Callable[[str], Ground], table: list[tuple[str, str, str, str]]
) -> None:
    own = ground("GPT-2")
    artifact = own.bundle.manifest.artifact("decoder.inplace.fp32")
    assert artifact.padding_side == "right"
    wrong = dataclasses.replace(artifact, padding_side="left")
    failed, culprit = own.examined(own.bundle, wrong, own.make_references(wrong))
    assert failed
    assert culprit is not None
    assert culprit.reference == PYTORCH
    assert culprit.step == "prefill"
    table.append(row_of("GPT-2", artifact.id, "in the decoder: padding on the left", failed, culprit))
