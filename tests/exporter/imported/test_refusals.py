"""Folders of ONNX files that cannot be imported, and what is said of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from planforge.exporter import export
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.exporting import import_folder
from planforge.exporter.imported.folder import read_graph
from planforge.runtime import TextGenerator
from planforge.runtime.errors import InputError

from ...helpers.models import edit_json
from ...helpers.optimums import OPTIMUM_PYTHON

TEXT = "In the beginning God created the heaven and the earth"


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Path:
    """A copy of a folder to damage."""
    return Path(shutil.copytree(exported / "llama.onnx", tmp_path / "folder"))


def test_pickles_are_never_read(own: Path, exported: Path, tmp_path: Path) -> None:
    (own / "model.onnx").unlink()
    (own / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, a pickle, which is never read"):
        import_folder(own, tmp_path / "bundle")
    hint = r"only pytorch_model\.bin, a pickle.*convert it: python -c .*import LlamaForCausalLM as M"
    with pytest.raises(CheckpointError, match=hint):
        import_folder(exported / "llama.onnx", tmp_path / "bundle", source=own)
    (own / "decoy.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=hint):
        export(own, tmp_path / "bundle", exporter="optimum", optimum_python=str(OPTIMUM_PYTHON))
    with pytest.raises(CheckpointError, match=r"has graphs and no weights: planforge import .*llama\.onnx"):
        export(exported / "llama.onnx", tmp_path / "bundle", optimum_python=str(OPTIMUM_PYTHON))


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        *(("llama", "model"), ("roberta", "model"), ("t5", "encoder_model")),
        *(("t5", "decoder_model_merged"), ("bart", "decoder_model"), ("bart", "decoder_with_past_model")),
    ],
)
def test_graphs_whose_roles_cannot_be_told_are_refused(
    folder: str, file: str, exported: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(exported / f"{folder}.onnx", tmp_path / "folder"))
    if folder == "bart":
        (own / "decoder_model_merged.onnx").unlink(missing_ok=True)
    original = onnx.load(own / f"{file}.onnx").graph
    inputs = [value.name for value in original.input if ".1." not in value.name]
    outputs = [value.name for value in original.output if ".0." not in value.name]

    def refused(change: Callable[[onnx.GraphProto], None]) -> str:
        model = onnx.load(exported / f"{folder}.onnx" / f"{file}.onnx")
        change(model.graph)
        onnx.save(model, own / f"{file}.onnx")
        with pytest.raises((CheckpointError, ExportError)) as caught:
            import_folder(own, tmp_path / "bundle", precision=["fp32"], target=["portable"], verify=False)
        assert not (tmp_path / "bundle").exists()
        return str(caught.value)

    for name in (*inputs, *outputs):
        text = refused(partial(renamed, name, "what_is_this"))
        assert "what_is_this is not a known" in text
        assert set(outputs) - {name} < {word.strip(",;.") for word in text.split()}
    for name in outputs if file != "model" or folder == "llama" else ():
        assert f"{name} is missing; the graph has {original.input[0].name}" in refused(partial(without, name))
    text = refused(partial(renamed, inputs[0], "pixel_values"))
    assert text == f"{own} is not a text model: its graph has the input pixel_values"


def test_first_and_later_steps_of_other_models_are_refused(exported: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(exported / "bart.onnx", tmp_path / "folder"))
    (own / "decoder_model_merged.onnx").unlink()
    first = onnx.load(own / "decoder_model.onnx")
    for value in [value for value in first.graph.output if ".1." in value.name]:
        first.graph.output.remove(value)
    onnx.save(first, own / "decoder_model.onnx")
    with pytest.raises(ExportError, match="of 2 layers, but those of 1 are computed"):
        import_folder(own, tmp_path / "bundle", precision=["fp32"], target=["portable"], verify=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [("pooler_output", "outputs none of"), ("start_logits", "start_logits is not a known output")],
)
def test_an_encoder_of_no_use_is_refused(name: str, message: str, exported: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(exported / "roberta.onnx", tmp_path / "folder"))
    model = onnx.load(own / "model.onnx")
    renamed("last_hidden_state", name, model.graph)
    onnx.save(model, own / "model.onnx")
    with pytest.raises(ExportError, match=message):
        import_folder(own, tmp_path / "bundle", precision=["fp32"], target=["portable"], verify=False)


def renamed(old: str, new: str, graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output):
        value.name = new if value.name == old else value.name
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = new if name == old else name


def without(output: str, graph: onnx.GraphProto) -> None:
    graph.output.remove(next(value for value in graph.output if value.name == output))


def test_weights_beside_the_graph_are_read_those_of_constants_too(
    own: Path, exported: Path, tmp_path: Path
) -> None:
    """As optimum writes models beyond protobuf's 2 GB."""
    model = onnx.load(own / "model.onnx")
    beside: dict[str, Any] = {"location": "model.onnx_data", "size_threshold": 0, "convert_attribute": True}
    onnx.save(model, own / "model.onnx", save_as_external_data=True, **beside)
    written = onnx.load(own / "model.onnx", load_external_data=False).graph
    constants = [a.t for node in written.node for a in node.attribute if a.HasField("t")]
    assert any(tensor.external_data for tensor in constants)
    texts = []
    for name, folder in (("beside", own), ("inside", exported / "llama.onnx")):
        import_folder(folder, tmp_path / name, precision=["fp32"], target=["cpu"], verify=False)
        with TextGenerator.load(tmp_path / name) as generator:
            texts.append(generator.generate(TEXT, max_new_tokens=20).token_ids)
    assert texts[0] == texts[1]


def outside(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=64)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../secret" if entry.key == "location" else entry.value
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def outside_of_a_constant(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "Constant")
    tensor = node.attribute[0].t
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def in_a_function(folder: Path) -> None:
    """An ONNX function's constants have no folder, so onnx_ir checks no path of theirs."""
    model = onnx.load(folder / "model.onnx")
    node = helper.make_node("Identity", ["x"], ["y"])
    opsets = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("local", "F", ["x"], ["y"], [node], opsets))
    onnx.save(model, folder / "model.onnx")


def without_shapes(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.ClearField("shape")
    onnx.save(model, folder / "model.onnx")


def linked(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=64)
    (folder / "w.data").rename(folder.parent / "w.data")
    (folder / "w.data").symlink_to(folder.parent / "w.data")


def in_halves(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, folder / "model.onnx")


def without_cache(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for value in [value for value in model.graph.input if value.name.startswith("past")]:
        value.name = value.name.replace("past", "gone")
    onnx.save(model, folder / "model.onnx")


def too_old(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.opset_import[0].version = 6
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            r"config\.json does not exist; give a folder",
        ),
        (lambda folder: (folder / "manifest.json").touch(), "is a bundle already: planforge run"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no"), "is not an ONNX file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "model.onnx").rename(folder / "graph.onnx"), r"has graph\.onnx; expected"),
        (lambda folder: edit_json(folder / "config.json", max_position_embeddings=None), "has no length"),
        (outside, r"has weights in \.\./\.\./secret, outside of its folder"),
        (outside_of_a_constant, r"has weights in \.\./secret, outside of its folder"),
        (in_a_function, "has functions of its own; inline them: onnx"),
        (without_shapes, "the layers' caches have different shapes"),
        (linked, r"has weights in w\.data, which is a link that leaves the folder; copy the files"),
        (
            in_halves,
            "in half precision, and inputs and outputs must be in fp32; export it in fp32, then import it",
        ),
        (without_cache, "has no cache, and LlamaForCausalLM generates text; export it again"),
        (too_old, "has opset 6 and cannot be brought to 18"),
    ],
)
def test_folders_that_cannot_be_used(
    change: Callable[[Path], None], message: str, own: Path, tmp_path: Path
) -> None:
    change(own)
    with pytest.raises(Exception, match=message) as caught:
        import_folder(own, tmp_path / "bundle")
    assert type(caught.value).__module__.startswith("planforge") and "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_a_graph_may_be_a_link(exported: Path, tmp_path: Path) -> None:
    """As in the cache of a hub."""
    (tmp_path / "model.onnx").symlink_to(exported / "electra.onnx/model.onnx")
    linked, own = (read_graph(folder / "model.onnx") for folder in (tmp_path, exported / "electra.onnx"))
    assert len(own.graph.initializers) > 10
    for name, value in own.graph.initializers.items():
        twin = linked.graph.initializers[name]
        assert value.const_value is not None and twin.const_value is not None
        np.testing.assert_array_equal(twin.const_value.numpy(), value.const_value.numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": ["fp32-kv8"]}, "'fp32-kv8' is not one of an imported model's: fp32, fp16, int8, int4"),
        ({"max_length": 9999}, "max_length=9999 must be from 2 to the model's context of 256"),
        ({"target": ["phone"]}, "phone"),
    ],
)
def test_choices_that_cannot_be(
    options: dict[str, Any], message: str, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        import_folder(exported / "llama.onnx", tmp_path / "bundle", source=exported / "llama", **options)


def test_what_others_graphs_do_not_have(exported: Path, tmp_path: Path) -> None:
    for exporter, named in (("auto", "transformers"), ("optimum", "optimum")):
        with pytest.raises(InputError, match=f"{named} cannot add outputs to a graph"):
            export(exported / "electra", tmp_path / "bundle", outputs=["hidden_states"], exporter=exporter)


def test_a_bundle_is_not_imported(demo_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a bundle already: planforge run"):
        import_folder(demo_bundle, tmp_path / "new" / "B")
    assert not (tmp_path / "new").exists()
