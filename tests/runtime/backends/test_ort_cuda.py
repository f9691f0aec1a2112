"""ONNX Runtime's CUDA provider on an emulated GPU: the CPU's results, with the cache in device memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.graphs import list_tensors
from planforge.exporter.passes.weight_files import load_graph
from planforge.exporter.reference_model import load_our_model
from planforge.exporter.verification.structure import compare_structure
from planforge.runtime import TextEncoder, TextGenerator, Translator, load
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.apps.commands.selftest import list_remarks
from planforge.runtime.backends import ort_cuda_backend
from planforge.runtime.backends.backend import LoadRequest
from planforge.runtime.backends.select import make_backend
from planforge.runtime.bundle.artifact import IN_HALF
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BackendError, BackendUnavailableError, InputError, MemoryLimitError

from ...helpers.emulated_ort_cuda import emulated_ort_cuda
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.old_graphs import compute_total_in_the_graph

PROMPTS = ["Now therefore", "In the beginning God created the heaven", "And"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "bundle"
    export("gpt2-demo", folder, target=["cuda"], verify="quick")
    return folder


def answers(bundle: Path, backend: str, precision: str) -> list[tuple[int, ...]]:
    with TextGenerator.load(bundle, backend=backend, precision=precision) as model:
        found = model.generate(PROMPTS, max_new_tokens=20)
        found += model.generate(PROMPTS, max_new_tokens=20, seed=5, temperature=1.2)
        found += [model.generate(PROMPTS[0] * 60, max_new_tokens=8)]
        found += model.generate(PROMPTS, max_new_tokens=20, speculative="prompt-lookup")
    return [one.token_ids for one in found]


def test_each_precision_is_in_the_dialect_that_has_kernels(bundle: Path) -> None:
    artifacts = Bundle.open(bundle).manifest.artifacts
    assert [a.id for a in artifacts] == ["decoder.portable.fp32", "decoder.ort.fp16"]
    assert all(a.passed for a in artifacts)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_generation_is_that_of_the_cpu(
    precision: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = answers(bundle, "ort-cpu", precision)
    assert len({token for tokens in expected for token in tokens}) > 40
    with emulated_ort_cuda() as cuda:
        assert answers(bundle, "ort-cuda", precision) == expected
        assert cuda.used == 0 and not cuda.queues
    assert capsys.readouterr().out == ""


def test_a_total_that_the_graph_computes_arrives_too_late(bundle: Path, tmp_path: Path) -> None:
    """What a real GPU did to it: another answer, or none. On the CPU such a bundle goes on running."""
    old = compute_total_in_the_graph(bundle, tmp_path / "old")
    assert answers(old, "ort-cpu", "fp16") == answers(bundle, "ort-cpu", "fp16")
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp32") as model:
        in_fp32 = [one.token_ids for one in model.generate(PROMPTS, max_new_tokens=5)]
    again = "decoder.ort.fp16 was exported by an older version.*export it again"
    with emulated_ort_cuda():
        with pytest.raises(BackendUnavailableError, match=again):
            load(old, backend="ort-cuda", precision="fp16")
        with TextGenerator.load(old, backend="ort-cuda") as model:
            assert [one.token_ids for one in model.generate(PROMPTS, max_new_tokens=5)] == in_fp32
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ort_cuda_backend, "explain_misfit_on_cuda", lambda artifact, cpu_nodes: "")
            try:
                late = answers(old, "ort-cuda", "fp16")
            except BackendError:
                late = []
    assert late != answers(bundle, "ort-cpu", "fp16")


def test_attention_in_fp32_is_computed_on_the_cpu_only_where_asked_for(
    demo_bundle: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    value = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    value["artifacts"] = [a for a in value["artifacts"] if a["id"] == "decoder.ort.fp32"]
    value["plans"] = []
    (folder / "manifest.json").write_text(json.dumps(value), encoding="utf-8")
    with emulated_ort_cuda():
        with pytest.raises(BackendUnavailableError, match=r"decoder\.ort\.fp32 would compute its attention"):
            load(folder, backend="ort-cuda")
        with TextGenerator.load(folder, backend="ort-cuda", cpu_nodes=True) as model:
            found = [one.token_ids for one in model.generate(PROMPTS, max_new_tokens=5)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ort_cuda_backend, "explain_misfit_on_cuda", lambda artifact, cpu_nodes: "")
            node = r"GroupQueryAttention '.*' of h\.0\.attn"
            told = rf"run some nodes of decoder\.ort.*: 4 x GroupQueryAttention \({node}; .* and 1 more\)"
            with pytest.raises(BackendUnavailableError, match=told):
                load(folder, backend="ort-cuda")
    with TextGenerator.load(folder, backend="ort-cpu") as model:
        assert [one.token_ids for one in model.generate(PROMPTS, max_new_tokens=5)] == found


QUANTIZED = ("w8a16", "w4a16", "fp16-kv8", "w8a16-kv8")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    names = ["int8", "int4", "fp16-kv8", "int8-kv8"]
    export("gpt2-demo", folder, target=["cuda"], precision=names, verify="quick", quantizer="rtn")
    return folder


def test_int8_and_int4_mean_graphs_in_fp16_there(quantized: Path) -> None:
    artifacts = Bundle.open(quantized).manifest.artifacts
    assert [a.id for a in artifacts] == [f"decoder.ort.{name}" for name in QUANTIZED]
    assert all(a.passed and a.is_half for a in artifacts)


@pytest.mark.parametrize("precision", [*QUANTIZED, "int8", "int4", "int8-kv8"])
def test_generation_in_fewer_bits_is_that_of_the_cpu(precision: str, quantized: Path) -> None:
    own = IN_HALF.get(precision, precision)
    expected = answers(quantized, "ort-cpu", own)
    with emulated_ort_cuda():
        assert answers(quantized, "ort-cuda", precision) == expected
        with TextGenerator.load(quantized, backend="ort-cuda", precision=precision) as model:
            assert model.artifact.precision == own
            placement = model.placements[model.artifact.id]
            assert placement.gpu > 40 and placement.shapes == 2 and not placement.others


@pytest.mark.parametrize("precision", ["w8a16", "w4a16"])
def test_a_code_that_was_changed_in_the_file_is_named(
    precision: str, quantized: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(quantized, tmp_path / "copy"))
    bundle = Bundle.open(copy)
    artifact = bundle.manifest.artifact(f"decoder.ort.{precision}")
    model = load_our_model(resolve_source("gpt2-demo").folder, 64)
    tensors = {name: np.asarray(tensor) for name, tensor in list_tensors(model).items()}
    assert compare_structure(bundle, artifact, tensors).failures == ()
    graph = load_graph(copy / artifact.file).graph
    changed = "h.0.attn.c_proj.weight"
    node = next(node for node in graph if node.metadata_props.get("planforge.weight") == changed)
    codes = node.inputs[1]
    assert codes is not None and isinstance(codes.const_value, ir.ExternalTensor)
    at = (codes.const_value.offset or 0) + 5
    data = bytearray((copy / artifact.data[0]).read_bytes())
    data[at] ^= 0x40
    (copy / artifact.data[0]).write_bytes(data)
    (failure,) = compare_structure(bundle, artifact, tensors).failures
    assert f"'{changed}' of node '{node.name}' (MatMulNBits)" in failure
    assert "are more than half a step off" in failure and "first in row 0" in failure


def test_a_cache_in_int8_is_for_newer_gpus(quantized: Path) -> None:
    with emulated_ort_cuda(sm="sm75"):
        with pytest.raises(
            BackendUnavailableError,
            match=r"w8a16-kv8 has a cache in int8, .* on sm75 \(RTX 20, T4\), only on sm80 ",
        ):
            load(quantized, backend="ort-cuda", precision="int8-kv8")
        load(quantized, backend="ort-cuda", precision="int8").close()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tiny_bert(folder / "bert", "BertModel", intermediate_size=64)
    write_wordpiece(folder / "bert")
    names = ["int8", "w8a16", "w4a16"]
    accept = {"cosine_gap": 0.12}  # random weights lose more than trained ones
    options: dict[str, Any] = {"precision": names, "verify": "quick", "accept": accept}
    export(folder / "bert", folder / "bundle", target=["cpu", "cuda"], **options)
    return folder / "bundle"


def test_an_encoder_in_fewer_bits(encoder: Path) -> None:
    texts = ["a bird can fly", "the baker sells bread and the plane can not fly", "bread"] * 3
    for precision in ("w8a16", "w4a16"):
        with TextEncoder.load(encoder, backend="ort-cpu", precision=precision) as model:
            expected = model.embed(texts)
        with (
            emulated_ort_cuda(),
            TextEncoder.load(encoder, backend="ort-cuda", precision=precision) as model,
        ):
            np.testing.assert_allclose(model.embed(texts), expected, atol=1e-6)
            assert not model.placements[f"encoder.ort.{precision}"].others


def test_an_int8_graph_of_a_cpu_is_refused_by_its_nodes(encoder: Path) -> None:
    """A session that is opened all the same names nodes and modules."""
    opened = Bundle.open(encoder)
    artifact = opened.manifest.artifact("encoder.ort.int8")
    path = opened.path(artifact.file)
    with emulated_ort_cuda(), pytest.raises(BackendUnavailableError) as refused:
        make_backend("ort-cuda", opened, LoadRequest(precision="w8a16")).open(opened, artifact)
    graph = onnx.load(path, load_external_data=False).graph
    named = [node for node in graph.node if node.op_type in ("MatMulIntegerToFloat", "QuantizeLinear")]
    assert {node.domain for node in named} == {"com.microsoft"}  # whose kernels on a GPU are for fp16
    counts = Counter(node.op_type for node in named)
    told = ", ".join(f"{count} x {operator}" for operator, count in counts.most_common())
    words = str(refused.value)
    assert f"{told} ({named[0].op_type} {named[0].name!r}" in words and len(counts) == 2
    product = next(node for node in named if node.op_type == "MatMulIntegerToFloat")
    assert f"MatMulIntegerToFloat {product.name!r} of layers.0.attention." in words
    assert f"and {len(named) - 3} more); export it with --target cuda" in words


def test_selftest_says_where_nodes_ran(quantized: Path) -> None:
    with emulated_ort_cuda():
        result = selftest(quantized, "ort-cuda", "int4")
    assert result.passed and result.artifacts == ("decoder.ort.w4a16",)
    nodes = result.to_json()["nodes"]
    assert isinstance(nodes, dict)
    counts = nodes["decoder.ort.w4a16"]
    graph = onnx.load(next(quantized.glob("onnx/decoder.ort.w4a16-*.onnx")), load_external_data=False).graph
    assert counts["gpu"] + counts["cpu_shapes"] == len(graph.node) and counts["cpu_others"] == 0
    told = f"decoder.ort.w4a16: {counts['gpu']} nodes on the GPU, {counts['cpu_shapes']} of shapes on the CPU"
    captured = f"{told}; {counts['captured']} CUDA graphs captured, {counts['captured_bytes'] / 1e6:.1f} MB"
    assert captured in list(list_remarks(result)) and counts["captured"] > 1
    assert selftest(quantized, "ort-cpu", "w4a16").to_json()["nodes"] == {}


def test_embeddings_and_labels(head_bundle: Callable[[str], Path]) -> None:
    folder = head_bundle("classifier")
    texts = ["a bird can fly", "the baker sells bread and the plane can not fly", "bread"] * 3
    with TextEncoder.load(folder, backend="ort-cpu", precision="fp16") as model:
        expected = model.embed(texts)
        labels = model.classify(texts)
    with emulated_ort_cuda(), TextEncoder.load(folder, backend="ort-cuda", precision="fp16") as model:
        np.testing.assert_allclose(model.embed(texts), expected, atol=1e-6)
        assert [one.label for one in model.classify(texts)] == [one.label for one in labels]


def test_translation_with_beams(marian_bundle: Path) -> None:
    from ...helpers.translation import SENTENCES

    def translations(backend: str) -> list[Any]:
        with Translator.load(marian_bundle, backend=backend, precision="fp32") as model:
            found = model.translate(SENTENCES[:5], max_new_tokens=10)
            found += model.translate(SENTENCES[:5], max_new_tokens=10, num_beams=3)
            return [one.token_ids for one in found]

    expected = translations("ort-cpu")
    with emulated_ort_cuda() as cuda:
        assert translations("ort-cuda") == expected
        assert "cudaMemcpy2DAsync" in cuda.calls


def test_auto_prefers_it_to_the_cpu_and_takes_fp16_only_if_verified(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planforge")

    def line(folder: Path) -> str:
        caplog.clear()
        with TextGenerator.load(folder) as model:
            assert model.generate(PROMPTS[0], max_new_tokens=1)
        return next(r.getMessage() for r in caplog.records if " runs on " in r.getMessage())

    with emulated_ort_cuda():
        assert "runs on ort-cuda, Emulated GPU, fp16; tensorrt-rtx was skipped" in line(bundle)
        copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
        value = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
        value["artifacts"][1]["gate"] = {}
        (copy / "manifest.json").write_text(json.dumps(value), encoding="utf-8")
        assert "runs on ort-cuda, Emulated GPU, fp32" in line(copy)
    with emulated_ort_cuda(available=False):
        assert "runs on ort-cpu" in line(bundle) and "ort-cuda was skipped, as the ONNX Runtime here" in line(
            bundle
        )


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"available": False}, "has no CUDAExecutionProvider: pip uninstall onnxruntime, then pip install"),
        ({"starts": False}, "could not start CUDAExecutionProvider, usually because cuDNN"),
        ({"driver": 0}, "no NVIDIA driver was found"),
        ({"driver": 12040}, "the NVIDIA driver is too old"),
    ],
)
def test_what_is_missing_is_said(machine: dict[str, Any], message: str, bundle: Path) -> None:
    with emulated_ort_cuda(**machine), pytest.raises(BackendUnavailableError, match=message):
        load(bundle, backend="ort-cuda")


def test_precisions_that_are_not_for_it(whole_bundle: Path, demo_bundle: Path) -> None:
    with emulated_ort_cuda():
        with pytest.raises(BackendUnavailableError, match=r"no graphs in fp16 or fp32 .* --target cpu,cuda"):
            load(whole_bundle, backend="ort-cuda")
        with pytest.raises(BackendUnavailableError, match="no graphs in w8a16"):
            load(demo_bundle, backend="ort-cuda", precision="int8")
        with pytest.raises(InputError, match="device=3 does not exist"):
            load(demo_bundle, backend="ort-cuda", device=3)


def test_a_default_for_cpus_does_not_keep_a_bundle_from_the_gpu(bundle: Path) -> None:
    """As `bench --set-default` writes it on a CPU."""
    manifest = Bundle.open(bundle).manifest
    for default, expected in (("int8", "fp16"), ("fp32", "fp32"), (None, "fp16")):
        opened = Bundle(bundle, dataclasses.replace(manifest, default_precision=default))
        assert ort_cuda_backend.choose_precision(opened, None, cpu_nodes=False) == expected


def test_a_full_gpu_says_what_fits(bundle: Path) -> None:
    with emulated_ort_cuda(memory=1_500_000), TextGenerator.load(bundle, backend="ort-cuda") as model:
        with pytest.raises(MemoryLimitError, match="a cache for 8 rows"):
            model.generate([PROMPTS[0] * 20] * 8, max_new_tokens=100)
        assert model.generate(PROMPTS[0], max_new_tokens=2)
