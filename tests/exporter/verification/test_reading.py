"""Faults that reading a graph must show in every precision, most of which no text shows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.calibration.calibration import sample_rows
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.exporting import import_folder
from planforge.exporter.number_formats import INT8 as INT8_NUMBERS
from planforge.exporter.tasks.pytorch_decoder import open_reference
from planforge.exporter.verification.quantized_weights import measure_precision_errors
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.fault_table import Row, collect_table
from ...helpers.faults import Plant
from ...helpers.llamas import shallow_llama
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.reader import Reader
from ...helpers.reading_cases import BERT, FP16, GEMMA, INT4, INT8, LLAMA, TWO_NORMS
from ...helpers.reading_faults import ReadFault, other_epsilon

GPT2 = DEMOS / "gpt2-demo"
LETTERS = 600  # of a text that weights rounded with GPTQ are judged by


def check(reader: Reader, artifact: str, fault: ReadFault, table: list[Row], model: str) -> None:
    """Hold what reading says against a fault's words, in the first failure that it gives."""
    failures = reader.read(artifact, fault.plant)
    assert failures, f"{fault.name} passed"
    for word in fault.words:
        assert word in failures[0]
    table.append((f"{model} {artifact}", fault.name, failures[0], "yes" if fault.missed else ""))


def read_of_gpt2(model: Any, name: str) -> Any:
    """What the product of a weight reads of a text that calibrated nothing."""
    texts = (GPT2 / "prompts.txt").read_text(encoding="utf-8").splitlines()
    tokens = Tokenizer.from_file(GPT2 / "tokenizer.json").encode(texts[0][:LETTERS])
    run = functools.partial(open_reference(model).compute_logits, tokens, slice(None))
    rows = sample_rows(model, [name], run)
    return rows[name].numpy() if name in rows else None


@pytest.fixture(scope="module")
def gpt2(whole_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(whole_bundle, tmp_path_factory.mktemp("reading") / "gpt2", read_of_gpt2)


@pytest.fixture(scope="module")
def floats(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(demo_bundle, tmp_path_factory.mktemp("reading") / "floats")


def read_of_bert(model: Any, name: str) -> Any:
    import torch

    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 30, (8, 24)))
    rows = sample_rows(model, [name], lambda: model(ids))
    return rows[name].numpy()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A random BERT in int8, whose products GPTQ has rounded."""
    folder = tmp_path_factory.mktemp("reading")
    tiny_bert(folder / "checkpoint", num_hidden_layers=1)
    write_wordpiece(folder / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int8"], "verify": False}
    export(folder / "checkpoint", folder / "bundle", **options)
    yield Reader(folder / "bundle", folder / "copy", read_of_bert)


@pytest.fixture(scope="module")
def llama(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A Llama in fp16 that optimum exported."""
    folder = tmp_path_factory.mktemp("reading")
    options: dict[str, Any] = {"target": ["portable"], "precision": ["fp32", "fp16"], "verify": False}
    import_folder(exported / "llama.onnx", folder / "bundle", source=exported / "llama", **options)
    return Reader(folder / "bundle", folder / "copy")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A random Gemma 2 in fp16, with soft caps and a scale of its embeddings."""
    folder = tmp_path_factory.mktemp("reading")
    shallow_llama(folder / "checkpoint", "gemma 2")
    options: dict[str, Any] = {"target": ["portable"], "precision": ["fp16"], "verify": False}
    export(folder / "checkpoint", folder / "bundle", **options)
    return Reader(folder / "bundle", folder / "copy")


def named(faults: list[ReadFault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    with collect_table("read-faults", ("graph", "fault", "what reading says", "missed before")) as rows:
        yield rows


@named(INT8)
def test_faults_in_int8_are_read(gpt2: Reader, fault: ReadFault, table: list[Row]) -> None:
    check(gpt2, "decoder.ort.int8", fault, table, "GPT-2")


@named(INT4)
def test_faults_in_int4_are_read(gpt2: Reader, fault: ReadFault, table: list[Row]) -> None:
    check(gpt2, "decoder.ort.int4", fault, table, "GPT-2")


@named(FP16)
@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_faults_in_fp16_are_read(floats: Reader, fault: ReadFault, table: list[Row], dialect: str) -> None:
    check(floats, f"decoder.{dialect}.fp16", fault, table, "GPT-2")


@named(BERT)
def test_faults_in_an_encoder_in_int8_are_read(bert: Reader, fault: ReadFault, table: list[Row]) -> None:
    check(bert, "encoder.ort.int8", fault, table, "BERT")


@named(LLAMA)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_faults_in_an_imported_llama_are_read(
    llama: Reader, fault: ReadFault, table: list[Row], precision: str
) -> None:
    check(llama, f"decoder.portable.{precision}", fault, table, "imported Llama")


def test_both_norms_with_another_epsilon_are_named(llama: Reader) -> None:
    failures = llama.read("decoder.portable.fp16", other_epsilon(*TWO_NORMS))
    assert len(failures) == len(TWO_NORMS)
    for module, failure in zip(TWO_NORMS, failures, strict=True):
        assert f" of {module} gives " in failure


@named(GEMMA)
def test_numbers_of_a_gemma_2_in_fp16_are_read(gemma: Reader, fault: ReadFault, table: list[Row]) -> None:
    check(gemma, "decoder.portable.fp16", fault, table, "Gemma 2")


@pytest.mark.parametrize("kind", ["gpt2", "floats", "bert", "llama", "gemma"])
def test_sound_graphs_are_read_without_a_fault(kind: str, request: pytest.FixtureRequest) -> None:
    reader: Reader = request.getfixturevalue(kind)
    for artifact in reader.bundle.manifest.artifacts:
        assert reader.read(artifact.id) == ()


def test_every_weight_in_whole_numbers_is_read(gpt2: Reader) -> None:
    """Each in its turn gets a scale of 0, which is no other's business."""
    artifact = "decoder.ort.int8"
    graph = ir.load(gpt2.copy / gpt2.bundle.manifest.artifact(artifact).file).graph
    matrices = [n for n in graph if n.op_type in ("MatMulNBits", "GatherBlockQuantized")]
    assert len(matrices) == 4 * 4 + 2

    def no_scale(number: int) -> Plant:
        def plant(model: ir.Model) -> None:
            node = [n for n in model.graph if n.op_type in ("MatMulNBits", "GatherBlockQuantized")][number]
            value = node.inputs[2]
            assert value is not None and value.const_value is not None
            array = value.const_value.numpy().copy()
            array.reshape(-1)[-1] = 0
            value.const_value = ir.tensor(array, name=value.name)

        return plant

    for number, node in enumerate(matrices):
        failures = gpt2.read(artifact, no_scale(number))
        assert len(failures) == 1 and f"node {node.name!r}" in failures[0] and "not follow" in failures[0]


def test_the_bound_of_gptq_holds_for_any_rows() -> None:
    """Weights that GPTQ has rounded stay within it, also where few columns outweigh all others."""
    from planforge.exporter.passes.gptq import round_with_gptq

    random = np.random.default_rng(0)
    for spread in (0.0, 3.0):
        K, N, M = 48, 64, 96
        x = random.standard_normal((M, K)).astype(np.float32) @ random.standard_normal((K, K)).astype(
            np.float32
        )
        x *= np.exp(spread * random.standard_normal(K)).astype(np.float32)
        weight = random.standard_normal((K, N)).astype(np.float32)
        scale = np.full((1, N), np.abs(weight).max() / 60, np.float32)
        codes = round_with_gptq(weight, scale, INT8_NUMBERS, x)
        errors = (weight - codes * scale).T
        steps = np.broadcast_to(scale.T, errors.shape)
        beyond = np.zeros_like(errors)
        shares = measure_precision_errors([(errors, steps, beyond)], x, 0.01)
        assert (shares <= 1).all()
        assert np.abs(errors).max() > scale.max()  # it moves numbers by more than half a step
        worse = errors.copy()
        worse[5] = weight.T[5]  # forgotten
        assert measure_precision_errors([(worse, steps, beyond)], x, 0.01)[5] > 1
