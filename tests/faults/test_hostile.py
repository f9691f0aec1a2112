"""Bundles from strangers: links, pipes, devices, sparse terabytes, bombs, names that deceive, deep JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from planforge.exporter.bundle.locks import hold_lock
from planforge.exporter.bundle.writer import check_output, replace_manifest
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import OutputError
from planforge.exporter.imported.folder import read_folder
from planforge.exporter.linting.lint import lint
from planforge.runtime.apps.check import files
from planforge.runtime.apps.check.files import read_golden
from planforge.runtime.backends.runtime_cache import RuntimeCache
from planforge.runtime.bundle.artifact import TensorSpec
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.defaults import EncoderDefaults
from planforge.runtime.encode.encoder import check_manifest
from planforge.runtime.errors import (
    BundleError,
    IntegrityError,
    ManifestError,
    PlanForgeError,
    TokenizerError,
)
from planforge.runtime.text.chat import Chat
from planforge.runtime.text.tokenizer import Tokenizer

from ..helpers.patience import PATIENCE
from ..helpers.staging import whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no pipes and devices among its files")


def run_to_end(call: Callable[[], Any]) -> Any:
    """The result of a call, or what it raised; an error where it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, f"no end in {PATIENCE} s"
    return found[0]


def change(folder: Path, **keys: Any) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | keys))


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_device_in_the_place_of_any_file_is_not_waited_for(
    folder: Path, make: Callable[[Path], None]
) -> None:
    names = [*Bundle.open(folder).manifest.files, "manifest.json"]
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        make(folder / name)
        error = run_to_end(lambda: Bundle.open(folder).verify_files())
        assert isinstance(error, IntegrityError) and name in str(error)
        if name != names[-1]:
            (folder / name).unlink()
            (folder / name).write_bytes(content)
    assert isinstance(run_to_end(lambda: check_output(folder, force=True)), OutputError)


def test_a_pipe_in_the_place_of_a_graph_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.onnx")
    error = run_to_end(lambda: read_folder(tmp_path).graph)
    assert "model.onnx is not a regular file" in str(error)


def test_a_manifest_that_is_a_link_out_of_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").rename(tmp_path / "secret.json")
    (folder / "manifest.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(IntegrityError, match=r"manifest\.json is a link that leaves the bundle"):
        Bundle.open(folder)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(IntegrityError, match="not a regular file"):
        Bundle.open(folder)
    (folder / "manifest.json").unlink()
    (tmp_path / "secret.json").rename(folder / "real.json")
    (folder / "manifest.json").symlink_to("real.json")  # as volumes of Kubernetes are made
    assert whole(folder) == "old"


def test_nothing_is_written_through_a_strangers_links(folder: Path, tmp_path: Path) -> None:
    """A bundle may come with links where a temporary file, or a lock, is going to be."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / "manifest.json.new").symlink_to(precious)
    replace_manifest(folder, lambda manifest: manifest)
    assert precious.read_text() == "mine"
    assert not (folder / "manifest.json").is_symlink() and whole(folder) == "old"
    (folder / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError), hold_lock(folder / ".lock"):
        pass
    with pytest.raises(OutputError, match="cannot be written"):
        replace_manifest(folder, lambda manifest: manifest)
    assert not (tmp_path / "made").exists()


def test_kernels_that_a_stranger_put_beside_a_plan_are_passed_over(tmp_path: Path) -> None:
    cache = RuntimeCache(tmp_path / "a.plan", "1.7.1.116", "sm86")
    os.mkfifo(cache.path)
    assert run_to_end(cache.load) is None
    cache.path.unlink()
    cache.path.write_text("[" * 4000)
    assert cache.load() is None
    cache.path.unlink()
    (tmp_path / "precious").write_text("mine")
    cache.path.symlink_to(tmp_path / "precious")
    cache.save(b"kernels")
    assert (tmp_path / "precious").read_text() == "mine"
    assert RuntimeCache(tmp_path / "a.plan", "1.7.1.116", "sm86").load() == b"kernels"


def test_sparse_terabytes_are_not_hashed(folder: Path) -> None:
    (name,) = [name for name in Bundle.open(folder).manifest.files if name.startswith("tokenizer/")]
    with (folder / name).open("r+b") as file:
        file.truncate(2**40)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    change(folder, files=listed | {name: {"sha256": listed[name]["sha256"], "bytes": 2**40}})
    error = run_to_end(lambda: Bundle.open(folder).path(name))
    assert isinstance(error, IntegrityError) and "only weights and plans may have more" in str(error)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("onnx/\u202egnp.exe", "non-printable"),
        ("onnx/\x1b[2Jred", "non-printable"),
        ("onnx/two\nlines", "non-printable"),
        ("onnx/zero\u200bwidth", "non-printable"),
        ("onnx/\ud800", "surrogates not allowed|non-printable"),
        ("\uff0e\uff0e/outside", "is missing"),  # wide dots are letters of a name, here as on every disk
        ("onnx/..\u2215outside", "is missing"),  # and so is a slash of mathematics
        ("onnx/e\u0301.onnx", "is missing"),
    ],
)
def test_names_do_not_deceive(folder: Path, name: str, words: str) -> None:
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    change(folder, files=listed | {name: {"sha256": "0" * 64, "bytes": 1}})
    with pytest.raises((IntegrityError, ManifestError), match=words) as caught:
        Bundle.open(folder).verify_files()
    assert all(sign.isprintable() for sign in str(caught.value))


def test_what_a_terminal_obeys_is_written_out_in_errors(folder: Path) -> None:
    change(folder, task="\x1b]0;owned\x07\u202e")
    from planforge.runtime import load

    with pytest.raises(ManifestError, match=r"\\x1b\]0;owned\\x07\\u202e"):
        load(folder)
    assert str(PlanForgeError("a\x1b[2J\n  b\tc é 我")) == "a\\x1b[2J\n  b\tc é 我"


@pytest.mark.parametrize(
    "deep", ["[" * 100_000, '{"a":' * 100_000, '{"format": ' + "[" * 9_000 + "]" * 9_000 + "}"]
)
def test_deep_json_is_refused(folder: Path, deep: str) -> None:
    (folder / "manifest.json").write_text(deep)
    with pytest.raises(BundleError):
        Bundle.open(folder)
    with pytest.raises(OutputError):
        check_output(folder, force=True)


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400, "NaN", "-Infinity"])
def test_numbers_that_nobody_can_write_again_are_refused(folder: Path, number: str) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"config": {}', f'"config": {{"eps": {number}}}'))
    with pytest.raises(ManifestError, match=r"manifest\.json is not valid JSON: .* is not a finite number"):
        Bundle.open(folder)


def test_a_token_with_a_large_id_is_refused_before_a_list_of_all_ids_is_made() -> None:
    value = json.loads((find_demo("gpt2-demo") / "tokenizer.json").read_text())
    value["model"]["vocab"] |= {"far": 2**31}
    with pytest.raises(TokenizerError, match="a token with the id 2147483648, above 16777215"):
        Tokenizer(json.dumps(value).encode())


def test_a_tokenizer_of_which_two_tokens_have_one_id_is_one_line() -> None:
    """The library reads it, and does not read what it writes of it."""
    value = json.loads((find_demo("gpt2-demo") / "tokenizer.json").read_text())
    vocabulary = value["model"]["vocab"]
    merged = "".join(value["model"]["merges"][0])
    vocabulary[merged.replace(" ", "")] = vocabulary["a"]
    with pytest.raises(TokenizerError, match=r"is unusable: Token .* out of vocabulary"):
        Tokenizer(json.dumps(value).encode()).encode("a", parse_special=True)


def test_a_weight_of_texts_is_linted(tmp_path: Path) -> None:
    texts = onnx.numpy_helper.from_array(np.array(["a" * 2**21], object), "texts")
    output = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.STRING, [1])
    node = onnx.helper.make_node("Identity", ["texts"], ["out"])
    graph = onnx.helper.make_graph([node], "graph", [], [output], [texts])
    onnx.save(onnx.helper.make_model(graph, ir_version=10), tmp_path / "model.onnx")
    lint(tmp_path / "model.onnx")


def test_an_encoder_with_an_input_that_nobody_knows_is_refused() -> None:
    spec = TensorSpec("more", "i/../s", "int64", (1, 1))
    artifact = SimpleNamespace(id="encoder.ort.fp32", inputs=[spec], outputs=[])
    with pytest.raises(ManifestError, match=r"an input 'i/../s'; known are ids, mask, segments, logit_rows"):
        check_manifest(artifact, EncoderDefaults(max_length=8, tokens={}), {})  # type: ignore[arg-type]


def write_members(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_golden_data_that_unpacks_to_more_than_is_sound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.MAX_FILE_BYTES < 10**9
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2**24)
    path = write_members(tmp_path / "golden.npz", a=bytes(2**24), b=b"1")
    assert path.stat().st_size < 2**16
    with pytest.raises(BundleError, match="not valid golden data: its arrays have 16777217 bytes"):
        read_golden(path)


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1,)", "(4611686018427387904, 4)"])
def test_an_array_that_claims_what_is_not_there_is_refused(tmp_path: Path, shape: str) -> None:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    path = write_members(tmp_path / "golden.npz", a=b"\x93NUMPY\x01\x00\x76\x00" + head)
    with pytest.raises(BundleError, match="not valid golden data"):
        read_golden(path)


def test_golden_data_is_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "golden.npz"
    np.savez(path, limits=np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(BundleError, match="Object arrays cannot be loaded"):
        read_golden(path)


# Each took more than 5 s or 1 GB while calls of filters and methods were not counted by what they make.
BURNING = (
    "{{ 'ab' | center(999999999) }}",
    "{{ 'ab'.ljust(999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{0:>{1}}'.format(1, 999999999) }}",
    "{{ '{0:999999999}'.format(1) }}",
    "{{ 1.5 | round(999999999) }}",
    "{{ 1.to_bytes(999999999, 'big') }}".replace("1.to", "(1).to"),
    "{{ [[1]] | tojson(indent=999999999) }}",
    "{{ self | indent(999999999) }}",
    "{{ ('a\n' * 99999) | indent(99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999) | join('b' * 99999) }}",
    "{{ (['a' * 999999] * 9999) | map('upper') | join }}",
    "{{ ['a'] | batch(999999999, 'b') | list }}",
    "{% set n = namespace(x='a' * 999999) %}{% for i in range(99999) %}{% if n.x == n.x[1:] %}"
    "{% endif %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "{% set n = namespace(x='a' * 99999) %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}{{ n.x }}",
    "{% for i in range(99999) %}{{ ('a' * 16777216) | length }}{% endfor %}",
)


@pytest.mark.parametrize("template", BURNING)
def test_a_template_that_would_burn_time_or_memory_is_stopped(template: str) -> None:
    chat = Chat(template, {}, "chat_template.jinja")
    tokenizer = Tokenizer.from_file(find_demo("gpt2-demo") / "tokenizer.json")
    error = run_to_end(lambda: chat.encode([{"role": "user", "content": "hi"}], tokenizer))
    assert isinstance(error, BundleError) and "the chat template was stopped" in str(error)


def test_hashes_bind_what_a_link_inside_or_a_second_name_leads_to(folder: Path, tmp_path: Path) -> None:
    """A hard link cannot be told from a file; what counts is that its content is what the manifest lists."""
    (name,) = [name for name in Bundle.open(folder).manifest.files if name.startswith("onnx/a")]
    content = (folder / name).read_bytes()
    (tmp_path / "other").write_bytes(content)
    (folder / name).unlink()
    os.link(tmp_path / "other", folder / name)
    assert Bundle.open(folder).path(name).read_bytes() == content
    (tmp_path / "other").write_bytes(bytes(len(content)))
    with pytest.raises(IntegrityError, match="has changed"):
        Bundle.open(folder).path(name)
    assert hashlib.sha256(content).hexdigest() == Bundle.open(folder).manifest.files[name].sha256
