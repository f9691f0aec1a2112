"""Checkpoints whose weights others quantized: their codes in graphs, their answers, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from planforge.exporter import export, verify
from planforge.exporter.errors import CheckpointError, VerificationError
from planforge.exporter.passes import store_blocks
from planforge.models import quantized_files
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle

from ..helpers.cli import planforge
from ..helpers.models import edit_json
from ..helpers.quantized_checkpoints import (
    FORMATS,
    GROUP,
    Codes,
    compress,
    make_gptq,
    write_floats,
    write_fp8,
    write_in_format,
    write_quantized,
)

TEXT = "In the beginning God created the heaven and the earth"
CPU: dict[str, Any] = {"target": ["cpu"], "verify": "quick"}


def unpack(packed: Any, bits: int) -> Any:
    """Return the codes of bytes, low bits first along the last axis."""
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def read_products(bundle: Path) -> dict[str, tuple[Any, ...]]:
    """Return codes, scales, zero points and order of each MatMulNBits, by the name of its weight."""
    (artifact,) = Bundle.open(bundle).manifest.artifacts
    model = onnx.load(bundle / artifact.file)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    gathers = {n.output[0]: n for n in model.graph.node if n.op_type == "Gather"}
    found = {}
    for node in model.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        own = {a.name: a.i for a in node.attribute}
        name = next(p.value for p in node.metadata_props if p.key == "planforge.weight")
        codes = unpack(constants[node.input[1]].reshape(own["N"], -1), own["bits"])
        blocks = own["K"] // own["block_size"]
        zeros = None
        if len(node.input) > 3 and node.input[3]:
            zeros = unpack(constants[node.input[3]].reshape(own["N"], -1), own["bits"])[:, :blocks]
        order = None
        if node.input[0] in gathers:
            order = constants.get(gathers[node.input[0]].input[1])
        scales = constants[node.input[2]].reshape(own["N"], blocks)
        found[name.removesuffix(".weight")] = codes, scales, zeros, order
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_codes_scales_and_zero_points_are_the_files(name: str, tmp_path: Path) -> None:
    written = write_quantized(name, tmp_path / "checkpoint")
    bits = FORMATS[name].bits
    result = export(tmp_path / "checkpoint", tmp_path / "bundle", **CPU)
    assert [a.precision for a in result.manifest.artifacts] == [f"int{bits}"]
    assert result.manifest.source["quantized_by"]
    products = read_products(tmp_path / "bundle")
    joined = join_projections(written)
    assert products.keys() == {*joined, "lm_head"}  # which has no codes in the file, and int8 here
    for module, own in joined.items():
        codes, scales, zeros, order = products[module]
        middle = 1 << (bits - 1)
        columns = np.argsort(own.groups, kind="stable")
        if np.array_equal(columns, np.arange(len(columns))):
            assert order is None
        else:
            np.testing.assert_array_equal(order, columns)
        np.testing.assert_array_equal(codes, own.codes[:, columns])
        np.testing.assert_array_equal(scales, own.scales.astype(np.float32))
        expected = own.zeros
        np.testing.assert_array_equal(np.full_like(expected, middle) if zeros is None else zeros, expected)


def join_projections(written: dict[str, Codes]) -> dict[str, Codes]:
    """Return codes by our names of modules: queries, keys and values are one there."""
    found = {}
    for module, own in written.items():
        name = module.removeprefix("model.")
        if name.endswith("q_proj"):
            parts = [own, *(written[module.replace("q_proj", other)] for other in ("k_proj", "v_proj"))]
            codes, scales, zeros = (
                np.concatenate([getattr(part, kind) for part in parts])
                for kind in ("codes", "scales", "zeros")
            )
            found[name.replace("q_proj", "qkv_proj")] = Codes(codes, scales, zeros, own.groups)
        elif not name.endswith(("k_proj", "v_proj")):
            found[name] = own
    return found


def run(bundle: Path) -> Any:
    with TextGenerator.load(bundle) as model:
        ids = model.tokenizer.encode(TEXT)
        return ids, np.concatenate(list(model.decoder.start(1, len(ids)).extend(ids)))


@pytest.mark.parametrize("name", ["gptq act-order", "awq"])
def test_logits_are_those_of_the_weights_that_codes_stand_for(name: str, tmp_path: Path) -> None:
    """With activations that are not rounded, in fp32, they are transformers'."""
    written = write_quantized(name, tmp_path / "checkpoint")
    write_floats(written, tmp_path / "floats")
    export(tmp_path / "checkpoint", tmp_path / "bundle", precision=["fp32"], **CPU)
    ids, found = run(tmp_path / "bundle")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("block", [16, 40, None])
def test_fp8_becomes_floats(block: int | None, tmp_path: Path) -> None:
    values = write_fp8(tmp_path / "checkpoint", block)
    done = planforge("export", tmp_path / "checkpoint", "-o", tmp_path / "bundle", "--target", "cpu")
    assert done.returncode == 0, done.stderr
    assert "reading weights that fp8 quantized, of which 14 become floats" in done.stderr
    (artifact,) = Bundle.open(tmp_path / "bundle").manifest.artifacts
    assert artifact.precision == "fp32"
    model = onnx.load(tmp_path / "bundle" / artifact.file)
    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for module in ("layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"):
        wanted = values[f"model.{module}"]
        own = found.get(f"{module}.weight")
        np.testing.assert_array_equal(found[f"{module}.weight.transposed"].T if own is None else own, wanted)


def test_a_bundle_is_verified_again_and_a_changed_code_is_found(tmp_path: Path) -> None:
    write_quantized("gptq 4", tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "bundle", **CPU)
    assert verify(tmp_path / "bundle", level="quick").passed
    with pytest.raises(VerificationError, match="keep"):
        export_with(tmp_path, change_one_code)


def export_with(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Export again, with a fault in what graphs store."""
    sound = store_blocks.make_tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_blocks, "make_tensors", lambda name, weight: sound(name, change(weight)))
        export(tmp_path / "checkpoint", tmp_path / "bundle", force=True, **CPU)


def change_one_code(weight: Any) -> Any:
    if not weight.kept:
        return weight
    codes = weight.codes.copy()
    codes[3, 5] ^= 1
    return type(weight)(**{**vars(weight), "codes": codes})


# Planted faults in reading, which cannot be told from the file: the bundle is compared with what was read. So
# references that know the formats tell them: genai's own readers of GPTQ and AWQ.


@pytest.fixture(scope="module")
def loaders() -> Any:
    return pytest.importorskip("onnxruntime_genai.models.loaders")


@pytest.mark.parametrize("name", ["gptq 4", "gptq 8", "awq"])
def test_bytes_are_those_of_genais_builder(name: str, loaders: Any, tmp_path: Path) -> None:
    from onnxruntime_genai.models.loaders.awq import AWQModel
    from onnxruntime_genai.models.loaders.gptq import GPTQModel

    write_quantized(name, tmp_path)
    bits = FORMATS[name].bits
    tensors = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.mlp.down_proj"
    parts = {part: tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")}
    own: Any = type("Module", (), {})()
    own.bits, own.group_size = bits, GROUP
    own.in_features, own.out_features = 96, 64
    own.qweight, own.qzeros, own.scales = (
        parts["qweight"].clone(),
        parts["qzeros"].clone(),
        parts["scales"].float(),
    )
    own.g_idx = tensors.get(f"{module}.g_idx")
    kind = AWQModel if name == "awq" else GPTQModel
    loader = object.__new__(kind)
    if name == "awq":
        loader.set_g_idx(own)
    else:
        loader.handle_qzeros(own)
    loader.unpack(own)
    loader.repack(own)
    read = quantized_files.find_method(tmp_path, FORMATS[name].settings).read
    ours: Any = read({**parts, **({"g_idx": own.g_idx} if "gptq" in name else {})})
    packed = ours.codes if bits == 8 else ours.codes[:, 0::2] | (ours.codes[:, 1::2] << 4)
    np.testing.assert_array_equal(own.qweight.numpy().reshape(64, -1), packed)
    np.testing.assert_array_equal(unpack(own.qzeros.numpy().reshape(64, -1), bits)[:, :3], ours.zeros)


@pytest.mark.parametrize("name", ["gptq 4", "awq"])
def test_planted_faults_in_reading_change_the_bytes(
    name: str, loaders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns in another order, and words that begin with their high bits."""
    if name == "awq":
        monkeypatch.setattr(quantized_files, "AWQ_ORDER", np.arange(8))
    else:
        sound = quantized_files.unpack
        monkeypatch.setattr(quantized_files, "unpack", lambda words, bits: sound(words, bits)[..., ::-1])
    with pytest.raises(AssertionError):
        test_bytes_are_those_of_genais_builder(name, loaders, tmp_path)


def test_zero_points_that_are_one_off_are_refused(tmp_path: Path) -> None:
    """Codes lie around the zero points of real weights; one beside them, the file's version is wrong."""
    for version, told in ((1, "gptq_v2"), (2, "gptq")):
        folder = tmp_path / told
        form = make_gptq(4, version)
        form.settings["checkpoint_format"] = told
        write_in_format(form, folder)
        with pytest.raises(
            CheckpointError, match=r"codes lie 1\.\d from their zero points.*checkpoint_format"
        ):
            export(folder, tmp_path / "bundle", **CPU)


def test_a_zero_point_that_is_one_off_is_seen_where_codes_are_symmetric(tmp_path: Path) -> None:
    """Files of both versions say "gptq"; the zero points of symmetric codes tell which it is."""
    for version in (1, 2):
        form = make_gptq(4, version, symmetric=True)
        form.settings["checkpoint_format"] = "gptq"
        folder = tmp_path / str(version)
        written = write_in_format(form, folder)
        read = quantized_files.find_method(folder, form.settings).read
        tensors = load_file(folder / "model.safetensors")
        module, own = next(iter(written.items()))
        parts = {p: tensors[f"{module}.{p}"] for p in ("qweight", "qzeros", "scales", "g_idx")}
        found: Any = read(parts)
        np.testing.assert_array_equal(found.dequantize(), own.values)
        parts["qzeros"] = parts["qzeros"] + 1
        with pytest.raises(ValueError, match=r"symmetric by config\.json \(sym\), and zero points are"):
            read(parts)


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "by gptq in 3 bits, and only 4 and 8 are read"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 8}}}, r"mixed bits \(dynamic\)"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "the format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "as gemv in 4 bits, and only gemm"),
        ({"quant_method": "bitsandbytes"}, r"by bitsandbytes, which is not read.*model\.dequantize\(\)"),
        ({"quant_method": "quip"}, "by quip, which is not read: GPTQ, AWQ, compressed-tensors and fp8 are"),
        ({"bits": 4}, "by an unnamed method, which is not read"),
        ({**compress(4), "format": "marlin-24"}, "as marlin-24 with 4 bits of int"),
        (
            {**compress(8, input_activations={"num_bits": 8}), "format": "int-quantized"},
            "activations that are rounded too",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {n: {"weights": {"num_bits": n}} for n in (4, 8)},
            },
            "mixed bits",
        ),
    ],
)
def test_methods_that_are_not_read_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_quantized("gptq 4", tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint/config.json").read_text("utf-8"))
    config["quantization_config"] = settings
    (tmp_path / "checkpoint/config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "checkpoint", tmp_path / "bundle", **CPU)
    assert not (tmp_path / "bundle").exists()


def test_parts_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    write_quantized("gptq 4", tmp_path / "whole")
    module = "model.layers.0.mlp.down_proj"
    for part, replaced, message in (
        ("scales", None, rf"{module} has parts .*'scales' is missing"),
        ("qzeros", torch.zeros(2, 8, dtype=torch.int32), rf"{module} has parts .*qzeros': \[2, 8\]"),
        ("g_idx", torch.zeros(96, dtype=torch.int32), rf"{module} has parts .*blocks of different sizes"),
    ):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / part))
        tensors = load_file(folder / "model.safetensors")
        del tensors[f"{module}.{part}"]
        if replaced is not None:
            tensors[f"{module}.{part}"] = replaced
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            export(folder, tmp_path / "bundle", **CPU)


def test_a_config_without_quantized_weights_is_refused(tmp_path: Path) -> None:
    write_floats({}, tmp_path / "checkpoint")
    edit_json(tmp_path / "checkpoint/config.json", quantization_config=FORMATS["awq"].settings)
    with pytest.raises(CheckpointError, match=r"config\.json says AWQ, but no weight has qweight"):
        export(tmp_path / "checkpoint", tmp_path / "bundle", **CPU)


def test_older_tools_files_are_read(tmp_path: Path) -> None:
    write_quantized("gptq 4", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/config.json"
    config = json.loads(path.read_text("utf-8"))
    settings = config.pop("quantization_config")
    del settings["quant_method"], settings["checkpoint_format"]
    path.write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "checkpoint/quantize_config.json").write_text(json.dumps(settings), encoding="utf-8")
    result = export(tmp_path / "checkpoint", tmp_path / "bundle", **CPU)
    assert [a.id for a in result.manifest.artifacts] == ["decoder.ort.int4"]


def test_values_of_the_helper_are_those_of_the_formula() -> None:
    """The helper's own check: a code is its value in steps, from the zero point on."""
    own = Codes(np.array([[1, 15]]), np.array([[0.5]]), np.array([[8]]), np.array([0, 0]))
    np.testing.assert_array_equal(own.values, [[-3.5, 3.5]])
