"""`verify` of a single .onnx file, of whatever model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx.parser
import pytest

from planforge.exporter import verify
from planforge.exporter.errors import VerificationError
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from .helpers_cli import planforge
from .helpers_faults import perturbed
from .helpers_graphs import replace_graph

MASKED = """
<ir_version: 10, opset_import: ["" : 20]>
masked (float[2, 4] x, bool[2, 4] keep) => (float[2, 4] y)
<float low = {LOW}, float zero = {0}, float factor = {FACTOR}>
{
  mask = Where (keep, zero, low)
  scores = Mul (x, factor)
  hidden = Add (scores, mask)
  y = Softmax <axis = -1> (hidden)
}
"""
CHOICE = """
<ir_version: 10, opset_import: ["" : 20]>
choice (float[2, 4] x, bool flag) => (float[2, 4] y)
<float factor = {FACTOR}>
{
  y = If (flag) <
    then_branch = twice () => (float[2, 4] a) { a = Mul (x, factor) },
    else_branch = same () => (float[2, 4] b) { b = Identity (x) }
  >
}
"""


def write_file(path: Path, text: str, low: str = "-1e9", factor: str = "1") -> Path:
    model = onnx.parser.parse_model(text.replace("LOW", low).replace("FACTOR", factor))
    for tensor in model.graph.initializer:
        if tensor.name == "low":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(low, np.float32), "low"))
    onnx.save(model, path)
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    keep = np.array([[True, False, True, True], [True, True, True, False]])
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x, keep=keep, flag=np.array(True))
    return tmp_path / "inputs.npz"


def test_a_mask_may_be_minus_infinity(tmp_path: Path, inputs: Path) -> None:
    sound = write_file(tmp_path / "a.onnx", MASKED, low="-inf")
    assert verify(sound, inputs=inputs).passed
    report = verify(write_file(tmp_path / "b.onnx", MASKED, "-inf", "1.5"), inputs=inputs, against=sound)
    (culprit,) = report.culprits
    assert (culprit.op_type, culprit.value) == ("Mul", "scores")
    assert verify(sound, inputs=inputs, against=write_file(tmp_path / "c.onnx", MASKED)).passed


def test_what_a_mask_of_minus_infinity_makes_nan_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", x=np.ones((2, 4), np.float32), keep=np.zeros((2, 4), bool))
    report = verify(write_file(tmp_path / "a.onnx", MASKED, low="-inf"), inputs=tmp_path / "none.npz")
    assert not report.passed
    assert "(Softmax, float32) gives nan" in report.comparisons[0].failures[0]


def test_nodes_that_hold_graphs_run_on_onnx_runtime_alone(tmp_path: Path, inputs: Path) -> None:
    one, same, other = (
        write_file(tmp_path / f"{name}.onnx", CHOICE, factor=factor)
        for name, factor in (("one", "2"), ("same", "2"), ("other", "3"))
    )
    with pytest.raises(VerificationError, match=r"If .* cannot be run node by node.*--against"):
        verify(one, inputs=inputs)
    report = verify(one, inputs=inputs, against=same)
    assert report.passed
    assert report.against == "same.onnx"
    assert not verify(one, inputs=inputs, against=other).passed


def test_a_file_that_onnx_runtime_cannot_load_fails_and_is_reported(tmp_path: Path, inputs: Path) -> None:
    broken = write_file(tmp_path / "broken.onnx", MASKED.replace("Softmax", "Sofmax"))
    junit, page = tmp_path / "junit.xml", tmp_path / "page.html"
    done = planforge("verify", broken, "--inputs", inputs, "--junit", junit, "--report", page, "--json")
    assert done.returncode == 1
    (comparison,) = json.loads(done.stdout)["comparisons"]
    assert "cannot load broken.onnx" in comparison["failures"][0]
    assert "Sofmax" in page.read_text(encoding="utf-8")
    assert ElementTree.parse(junit).getroot().find(".//failure") is not None


def test_an_onnx_file_of_any_model_is_held_against_itself_and_another(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(minilm_bundle)
    sound = bundle.path(bundle.manifest.artifacts[0].file)
    report = verify(sound)
    assert report.passed
    assert report.against == "itself node by node"
    own = Path(shutil.copytree(minilm_bundle, tmp_path / "own"))
    replace_graph(own, bundle.manifest.artifacts[0].id, perturbed("layers.2.attention.output"))
    damaged = own / bundle.manifest.artifacts[0].file
    report = verify(damaged, against=sound)
    assert not report.passed
    (culprit,) = report.culprits
    assert (culprit.module, culprit.layer) == ("layers.2.attention.output", 2)
    assert culprit.artifact == damaged.name


def test_what_an_onnx_file_cannot_be_run_with_is_said(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    decoder = bundle.path(bundle.manifest.artifact("decoder.portable.fp32").file)
    with pytest.raises(VerificationError, match=r"--inputs FILE\.npz"):
        verify(decoder)  # its axes depend on each other, which its shapes do not say
    np.savez(tmp_path / "some.npz", input_ids=np.ones((1, 2), np.int64))
    with pytest.raises(InputError, match="no array 'attention_mask'"):
        verify(decoder, inputs=tmp_path / "some.npz")
    (tmp_path / "none.npz").write_text("no archive")
    with pytest.raises(InputError, match=r"cannot be read as \.npz"):
        verify(decoder, inputs=tmp_path / "none.npz")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(VerificationError, match="is not an ONNX file"):
        verify(tmp_path / "text.onnx")
    with pytest.raises(InputError, match=r"\.onnx file"):
        verify(demo_bundle, inputs=tmp_path / "some.npz")
