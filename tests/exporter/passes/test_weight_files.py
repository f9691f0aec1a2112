"""What a graph's external data may name: a regular file in the graph's own folder, and nothing else."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from planforge.exporter import package, verify
from planforge.exporter.commands.inspection import inspect
from planforge.exporter.errors import CheckpointError, VerificationError
from planforge.exporter.imported.folder import read_graph
from planforge.exporter.linting.lint import lint
from planforge.exporter.passes.weight_files import list_external_tensors, load_graph
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError, IntegrityError

from ...helpers.hub import write_hub_cache
from ...helpers.patience import PATIENCE

SECRET = b"not yours" * 8192


def write_graph(folder: Path, location: str, in_constant: bool = False) -> Path:
    """Writes a graph whose weight (64, 64), or constant, lies at `location`."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[64, 64])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    constant = helper.make_node("Constant", [], ["w"], value=tensor, name="constant")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 64]) for name in "xy")
    nodes, weights = ([constant, product], []) if in_constant else ([product], [tensor])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder beside a secret, with links and a pipe in it."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "w.data").write_bytes(SECRET)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path / "others")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


BAD = [
    ("../secret", "outside"),
    ("../../../../../../../../etc/passwd", "outside"),
    ("/etc/passwd", "outside"),
    ("folder/../../secret", "outside"),
    ("..\\secret", "outside"),
    ("", "outside"),
    ("link", "link"),
    ("linked/w.data", "link"),
    ("loop", "not a regular file"),
    ("folder", "not a regular file"),
    ("pipe", "not a regular file"),
]


@pytest.mark.parametrize("in_constant", [False, True])
@pytest.mark.parametrize(("location", "why"), BAD)
def test_lint_opens_nothing_outside_of_the_folder_and_names_the_tensor(
    location: str, why: str, in_constant: bool, folder: Path
) -> None:
    path = write_graph(folder, location, in_constant)
    findings = [finding for finding in lint(path, ["cpu"]).findings if finding.severity == "error"]
    assert [finding.rule for finding in findings] == ["weights-outside"]
    assert why in findings[0].what
    assert findings[0].tensors == ("w",)
    assert "bytes" not in findings[0].what


@pytest.mark.parametrize("in_constant", [False, True])
@pytest.mark.parametrize(("location", "why"), BAD)
def test_verify_and_import_refuse_such_a_file_unopened(
    location: str, why: str, in_constant: bool, folder: Path
) -> None:
    path = write_graph(folder, location, in_constant)
    with pytest.raises(VerificationError, match=f"weight 'w' lies in .*{why}") as verification:
        verify(path)
    with pytest.raises(CheckpointError, match=f"has weights in .*{why}") as reading:
        read_graph(path)
    for caught in (verification, reading):
        assert "\n" not in str(caught.value)
    inspect(path)  # reads no weights


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    """In a process of its own, which would wait for ever."""
    path = write_graph(folder, "pipe")
    code = f"from planforge.exporter.linting.lint import lint; print(lint({str(path)!r}, ['cpu']).passed)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert child.stdout.strip() == "False", child.stderr
    with pytest.raises(InputError, match="is not a regular file"):
        lint(folder / "pipe")


@pytest.mark.parametrize("in_constant", [False, True])
def test_a_file_in_the_folder_is_read_also_of_a_folder_in_it(in_constant: bool, folder: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    (folder / "folder" / "w.data").write_bytes(weight.tobytes())
    (folder / "inside").symlink_to(folder / "folder" / "w.data")
    path = write_graph(folder, "folder/w.data", in_constant)
    assert lint(path, ["cpu"]).passed
    assert verify(path).passed
    graph = read_graph(path).graph
    read = graph[0].attributes["value"].as_tensor() if in_constant else graph.initializers["w"].const_value
    assert read is not None
    np.testing.assert_array_equal(read.numpy(), weight)
    assert lint(write_graph(folder, "inside"), ["cpu"]).passed


def test_a_name_that_is_too_long_is_a_missing_file(folder: Path) -> None:
    (finding,) = lint(write_graph(folder, "w" * 5000), ["cpu"]).findings
    assert (finding.rule, finding.tensors) == ("weights-missing", ("w",))


def test_a_bundles_graphs_are_held_to_it_too(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(head_bundle("classifier"), tmp_path / "bundle"))
    file = bundle / Bundle.open(bundle).manifest.artifacts[0].file
    shutil.copy(file, tmp_path / "graph.onnx")
    file.unlink()
    file.symlink_to(tmp_path / "graph.onnx")
    with pytest.raises(IntegrityError, match="a link that leaves the bundle"):
        lint(bundle, ["cpu"])


def test_weights_whose_file_has_a_second_name_are_read(tmp_path: Path) -> None:
    """As those of a bundle that was packaged for another runtime, or copied with `cp -l`."""
    weight = np.arange(64 * 64, dtype=np.float32)
    (tmp_path / "w.data").write_bytes(weight.tobytes())
    os.link(tmp_path / "w.data", tmp_path / "second.data")
    model = load_graph(write_graph(tmp_path, "w.data"))
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    assert np.array_equal(tensor.numpy().ravel(), weight)


@pytest.mark.parametrize("in_constant", [False, True])
def test_a_hubs_cache_is_read_and_other_links_name_the_way_out(in_constant: bool, tmp_path: Path) -> None:
    weight = np.arange(64 * 64, dtype=np.float32)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.data").write_bytes(weight.tobytes())
    write_graph(tmp_path / "model", "w.data", in_constant)
    path = write_hub_cache(tmp_path / "model", tmp_path / "cache") / "model.onnx"
    assert path.with_name("w.data").is_symlink()
    for model in (load_graph(path), read_graph(path)):
        graph = model.graph
        read = (
            graph[0].attributes["value"].as_tensor() if in_constant else graph.initializers["w"].const_value
        )
        assert read is not None and np.array_equal(read.numpy().ravel(), weight)
    assert verify(path).passed
    assert lint(path, ["cpu"]).passed
    (tmp_path / "cache" / "models--someone--model").rename(tmp_path / "elsewhere")  # no cache of a hub
    path = tmp_path / "elsewhere" / path.relative_to(tmp_path / "cache" / "models--someone--model")
    with pytest.raises(VerificationError, match=r"is a link that leaves the folder; .*local_dir=FOLDER"):
        load_graph(path)
    (finding,) = (finding for finding in lint(path, ["cpu"]).findings if finding.severity == "error")
    assert finding.rule == "weights-outside" and "local_dir=FOLDER" in finding.what


def test_a_bundle_in_a_hubs_cache_is_linted_verified_packaged_and_run(
    demo_bundle: Path, tmp_path: Path
) -> None:
    bundle = write_hub_cache(demo_bundle, tmp_path)
    assert all(path.is_symlink() for path in bundle.rglob("*") if path.is_file())
    assert lint(bundle, ["cpu"]).passed
    assert verify(bundle, only=["decoder.ort.fp32"], level="quick").with_pytorch
    package(bundle, tmp_path / "package", runtime="optimum", precision=["fp32"], verify=False)
    written = [path for path in (tmp_path / "package").rglob("*") if path.is_file()]
    assert written and not any(path.is_symlink() for path in written)
    for path in written:
        if path.suffix == ".onnx":
            onnx.checker.check_model(path)
    prompt = "In the beginning"
    with TextGenerator.load(bundle) as linked, TextGenerator.load(demo_bundle) as plain:
        assert linked.generate(prompt, max_new_tokens=4).text == plain.generate(prompt, max_new_tokens=4).text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_graphs_weights_share_one_open_file(demo_bundle: Path, tmp_path: Path) -> None:
    """A system lets a process have 256 to 1,024, and a model of experts has more weights."""
    bundle = tmp_path / "bundle"  # a copy, which no other test of this process has open
    shutil.copytree(demo_bundle, bundle)
    file = bundle / Bundle.open(bundle).manifest.artifacts[0].file
    expected = [tensor.numpy().copy() for tensor in list_external_tensors(ir.load(file))]
    gc.collect()  # onnx-ir's own tensors above held the file open
    weights = list_external_tensors(load_graph(file))
    found = [weight.numpy() for weight in weights]
    assert len(weights) > 20
    # Whatever else this process opens or closes meanwhile: count this file alone.
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert names.count(str(Path(weights[0].path).resolve())) == 1
    for weight, ours, its in zip(weights, found, expected, strict=True):
        np.testing.assert_array_equal(ours, its)
        assert weight.tobytes() == its.tobytes()
