"""From a graph that fails to the node at fault, through `verify` as a user calls it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, verify
from planforge.exporter.errors import VerificationError
from planforge.exporter.limits import measure_distance
from planforge.exporter.reports.html import Subject, render_html
from planforge.exporter.tracing.modules import RESULTS, find_layer, find_module, read_results
from planforge.exporter.verification import verify as verify_module
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.faults import (
    Plant,
    coarse,
    low_at_late_positions,
    low_padding,
    perturbed,
    swapped,
    transposed,
)
from ...helpers.graphs import replace_graph
from ...helpers.models import one_layer_gpt2

pytestmark = pytest.mark.usefixtures("kept_answers")


def test_a_fault_is_named_in_the_users_words(own_bundle: Path) -> None:
    replace_graph(own_bundle, "decoder.inplace.fp16", swapped("h.2.attn", "TensorScatter", index=1))
    report = verify(own_bundle, source="gpt2-demo", only=["decoder.inplace.fp16"], level="quick")
    (mismatch,) = report.mismatches
    assert (mismatch.artifact, mismatch.step) == ("decoder.inplace.fp16", "prefill of 2 rows")
    assert (mismatch.module, mismatch.layer) == ("h.2.attn", 2)
    assert (mismatch.op_type, mismatch.dtype) == ("TensorScatter", "float16")
    assert mismatch.node in {node.name for node in graph_of(own_bundle, mismatch.artifact)}
    assert mismatch.error is not None
    assert mismatch.error > mismatch.allowed
    with pytest.raises(
        VerificationError, match=r"TensorScatter, float16\) of h\.2\.attn, layer 2 is the first"
    ):
        report.raise_if_failed()
    written = json.loads(json.dumps(report.to_json()))["mismatches"][0]
    assert (written["module"], written["reference"]) == ("h.2.attn", mismatch.reference)


@pytest.mark.parametrize(
    ("family", "artifact", "plant", "module"),
    [
        (
            "BERT",
            "encoder.portable.fp16",
            transposed("layers.1.attention.output"),
            "layers.1.attention.output",
        ),
        ("BERT", "encoder.ort.fp32", perturbed("layers.0.output"), "layers.0.output"),
        (
            "translation",
            "decoder.inplace.fp16",
            transposed("decoder.layers.1.attention.output"),
            "decoder.layers.1.attention.output",
        ),
        (
            "translation",
            "encoder.ort.fp32",
            perturbed("encoder.layers.1.feed_forward.inner"),
            "encoder.layers.1.feed_forward.inner",
        ),
        ("int8", "decoder.ort.int8", coarse("h.2.mlp.c_fc"), "h.2.mlp.c_fc"),
        ("int8", "decoder.ort.int4", coarse("h.1.attn.c_proj", 2.0), "h.1.attn.c_proj"),
    ],
)
def test_verify_names_the_module_in_every_family(
    family: str,
    artifact: str,
    plant: Plant,
    module: str,
    head_bundle: Callable[[str], Path],
    marian_bundle: Path,
    whole_bundle: Path,
    tmp_path: Path,
) -> None:
    folder = {
        "BERT": lambda: head_bundle("classifier"),
        "translation": lambda: marian_bundle,
        "int8": lambda: whole_bundle,
    }[family]()
    checkpoint = Bundle.open(folder).manifest.source
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    source = "gpt2-demo" if family == "int8" else (folder / str(checkpoint["argument"])).resolve()
    replace_graph(damaged, artifact, plant)
    report = verify(damaged, source=source, only=[artifact], level="quick")
    assert artifact in {c.artifact for c in report.comparisons if not c.passed}
    (mismatch,) = report.mismatches
    assert (mismatch.artifact, mismatch.module) == (artifact, module)


def test_an_overflow_of_padding_alone_is_found_by_rounding_a_padded_batch(own_bundle: Path) -> None:
    replace_graph(own_bundle, "decoder.portable.fp16", low_padding)
    report = verify(own_bundle, source="gpt2-demo", only=["decoder.portable.fp16"], level="quick")
    failed = [c for c in report.comparisons if not c.passed and c.case.startswith("every result")]
    assert len(failed) == 1
    assert failed[0].backend == "node by node, rounded to fp16"
    assert "gives inf" in failed[0].failures[0]


def test_an_overflow_at_late_positions_alone_is_found(own_bundle: Path) -> None:
    replace_graph(own_bundle, "decoder.portable.fp16", low_at_late_positions(200))
    report = verify(own_bundle, source="gpt2-demo", only=["decoder.portable.fp16"])
    (failed,) = [c for c in report.comparisons if not c.passed]
    assert (failed.backend, failed.case) == ("node by node, rounded to fp16", "full context")
    assert any("gives inf" in failure for failure in failed.failures)


def graph_of(bundle: Path, artifact: str) -> ir.Graph:
    opened = Bundle.open(bundle)
    return ir.load(opened.path(opened.manifest.artifact(artifact).file)).graph


def test_without_pytorch_the_fp32_graph_is_the_reference(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    replace_graph(own_bundle, "decoder.portable.fp16", transposed("h.1.attn.c_proj"))
    report = verify(own_bundle, only=["decoder.portable.fp32", "decoder.portable.fp16"], level="quick")
    assert not report.with_pytorch
    assert "without PyTorch" in report.against
    (mismatch,) = report.mismatches
    assert mismatch.module == "h.1.attn.c_proj"
    assert mismatch.reference == "decoder.portable.fp32"


def test_a_changed_checkpoint_is_said_and_golden_data_judges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = one_layer_gpt2(tmp_path / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["fp32"], "verify": "quick"}
    bundle = export(checkpoint, tmp_path / "bundle", **options).bundle
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-3}))
    report = verify(bundle)
    assert report.passed
    assert not report.with_pytorch
    assert "has changed; comparing with golden data" in caplog.text
    shutil.rmtree(checkpoint)
    assert verify(bundle).passed
    assert "does not exist" in caplog.text


def test_limits_can_be_tightened_and_not_loosened(
    demo_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"only": ["decoder.portable.fp16"], "level": "quick"}
    usual = verify(demo_bundle, **options)
    assert usual.passed
    strict = verify(demo_bundle, **options, limits={"max_error": 1e-6, "mean_error": 1.0})
    assert not strict.passed
    assert any("at most 1e-06 is wanted" in f for c in strict.comparisons for f in c.failures)
    assert not strict.list_locations()  # nothing is at fault, the user wants more than fp16 can give
    loose = verify(demo_bundle, **options, limits={"max_error": 1e9})
    assert [c.limits for c in loose.comparisons] == [c.limits for c in usual.comparisons]
    assert "--limit max_error=1e+09 changes nothing" in caplog.text
    with pytest.raises(InputError, match=r"'accuracy'.*max_error"):
        verify(demo_bundle, **options, limits={"accuracy": 1.0})
    with pytest.raises(InputError, match=r"no graph 'decoder\.fp64'.*decoder\.ort\.fp32"):
        verify(demo_bundle, only=["decoder.fp64"])


def test_a_graph_that_onnx_runtime_cannot_load_is_said_in_one_line(own_bundle: Path) -> None:
    def break_it(model: ir.Model) -> None:
        next(node for node in model.graph if node.op_type == "MatMul").op_type = "MatMull"

    replace_graph(own_bundle, "decoder.portable.fp32", break_it)
    report = verify(own_bundle, source="gpt2-demo", only=["decoder.portable.fp32"], level="quick")
    modules, failed = [c for c in report.comparisons if not c.passed]
    assert "MatMull" in modules.failures[0] and "\n" not in modules.failures[0]
    assert (failed.artifact, failed.case) == ("decoder.portable.fp32", "running it at all")
    assert "MatMull" in failed.failures[0]
    assert "\n" not in failed.failures[0]
    assert "cannot be run alone" in report.unexplained["decoder.portable.fp32"]
    assert render_html(report, Subject.of(own_bundle, report)).count("MatMull") >= 2


def test_prompts_longer_than_the_context_are_cut(demo_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "long.txt"
    prompts.write_text("And it came to pass in those days, " * 400 + "\n")
    assert verify(demo_bundle, prompts=prompts, only=["decoder.ort.fp32"], level="quick").passed


def test_every_node_of_a_layer_knows_its_module(demo_bundle: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    for artifact in bundle.manifest.artifacts:
        model = ir.load(bundle.path(artifact.file))
        products = [
            n for n in model.graph if n.op_type in ("MatMul", "Gemm", "Attention", "GroupQueryAttention")
        ]
        assert all(find_module(node) for node in products)
        assert {find_layer(find_module(node)) for node in products} == {0, 1, 2, 3, None}
        assert RESULTS in model.graph.metadata_props
        assert {"h.0.ln_1", "h.3.mlp.c_proj", "ln_f"} <= set(read_results(model).values())


@pytest.mark.parametrize(("path", "layer"), [("h.3.attn", 3), ("layers.11", 11), ("wte", None), ("", None)])
def test_the_layer_is_the_first_number(path: str, layer: int | None) -> None:
    assert find_layer(path) == layer


def test_distance_is_in_units_of_spread() -> None:
    want = np.array([0.0, 2.0], np.float32)  # whose standard deviation is 1
    assert measure_distance(want + np.float32(0.5), want) == pytest.approx(0.5)
    assert measure_distance(np.array([1, 2]), np.array([1, 2])) == 0
    assert measure_distance(np.array([1, 3]), np.array([1, 2])) == np.inf
    assert np.isnan(measure_distance(np.array([np.nan, 0]), want))
