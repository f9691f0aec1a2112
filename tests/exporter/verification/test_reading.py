"""Faults that reading a graph must show in every precision, most of which no text shows."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.calibration.calibration import sample_rows
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.import_folder import import_folder
from planforge.exporter.reference.decoder import make_reference
from planforge.exporter.reference.model import is_module
from planforge.exporter.verification.gptq_bound import measure_losses
from planforge.exporter.verification.meant import read_meant
from planforge.exporter.verification.reading import list_tensors_to_compare
from planforge.exporter.verification.structure import compare_structure
from planforge.exporter.verification.verify import find_recorded_source, load_model_to_compare
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.fault_table import Row, collect_table
from ...helpers.faults import Plant, epsilon
from ...helpers.graphs import replace_graph
from ...helpers.llamas import shallow_llama
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.reading_faults import (
    ReadFault,
    attribute,
    behind,
    changed_codes,
    changed_unsmoothing,
    doubled_scales,
    exact_gelu,
    exchanged_columns,
    exchanged_rows,
    other_epsilon,
    other_id,
    other_rotary_base,
    own_vector,
    reads,
    scaled_number,
    summed_epsilon,
    word_is_nan,
    zero_points,
)

GPT2 = DEMOS / "gpt2-demo"
LETTERS = 600  # of a text that weights rounded with GPTQ are judged by


class Reader:
    """A sound bundle, in whose copy faults are planted, and what its graphs are read against."""

    def __init__(self, folder: Path, copy: Path, rows: Callable[[Any, str], Any] | None = None) -> None:
        self.copy = Path(shutil.copytree(folder, copy))
        self.bundle = Bundle.open(folder)
        source = find_recorded_source(self.bundle)
        assert source is not None
        self.model = load_model_to_compare(self.bundle, source)
        self.tensors = list_tensors_to_compare(self.bundle, self.model)
        assert is_module(self.model)
        self.meant = read_meant(self.model, not self.bundle.manifest.source.get("exporter"))
        self.rows = functools.cache(lambda name: None if rows is None else rows(self.model, name))

    def read(self, artifact: str, plant: Plant = lambda model: None) -> tuple[str, ...]:
        """What reading a graph of the copy says when a fault is in it."""
        files = [self.copy / "manifest.json", self.copy / self.bundle.manifest.artifact(artifact).file]
        sound = [path.read_bytes() for path in files]
        try:
            replace_graph(self.copy, artifact, plant)
            bundle = Bundle.open(self.copy)
            one = bundle.manifest.artifact(artifact)
            return compare_structure(bundle, one, self.tensors, None, self.meant, self.rows).failures
        finally:
            for path, content in zip(files, sound, strict=True):
                path.write_bytes(content)

    def check(self, artifact: str, fault: ReadFault, table: list[Row], model: str) -> None:
        """Hold what reading says against a fault's words, in the first failure that it gives."""
        failures = self.read(artifact, fault.plant)
        assert failures, f"{fault.name} passed"
        for word in fault.words:
            assert word in failures[0]
        table.append((f"{model} {artifact}", fault.name, failures[0], "yes" if fault.missed else ""))


def read_of_gpt2(model: Any, name: str) -> Any:
    """What the product of a weight reads of a text that calibrated nothing."""
    texts = (GPT2 / "prompts.txt").read_text(encoding="utf-8").splitlines()
    tokens = Tokenizer.from_file(GPT2 / "tokenizer.json").encode(texts[0][:LETTERS])
    run = functools.partial(make_reference(model).compute_logits, tokens, slice(None))
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


def a_step_off(codes: Any) -> None:
    codes.reshape(-1)[7] ^= 1


def forgotten_block(codes: Any) -> None:
    """A row's block is all zeros, in the place of a hundredth of the row."""
    codes[3, 0] = 0x88


def exchanged_halves(codes: Any) -> None:
    """The two int4 of every byte the wrong way round."""
    codes[...] = (codes >> 4) | (codes << 4)


def wrong_rows(codes: Any) -> None:
    codes[[0, 1]] = codes[[1, 0]]


GROUP = "GroupQueryAttention"
OFF = "more than half a step off"
SCALES = "scales that do not follow from the checkpoint"
MIDDLE = "are not the middle of its numbers"
INT8 = [
    ReadFault(
        "a block's scale doubled in c_fc",
        doubled_scales("h.1.mlp.c_fc"),
        ("of h.1.mlp.c_fc", SCALES),
        missed=True,
    ),
    ReadFault(
        "a block's scale doubled in c_proj",
        doubled_scales("h.2.mlp.c_proj"),
        ("h.2.mlp", "1 of 1024"),
        missed=True,
    ),
    ReadFault(
        "1 % of a weight's blocks doubled",
        doubled_scales("h.0.mlp.c_proj", 0.01),
        ("10 of 1024",),
        missed=True,
    ),
    ReadFault(
        "two rare rows exchanged", exchanged_rows(1990, 2001), ("wte.weight", "2 of 2048 scales"), missed=True
    ),
    ReadFault("a rare word NaN", word_is_nan(1999), ("not finite, the first at [1999, 0]",), missed=True),
    ReadFault("one number a step off", changed_codes("h.3.attn.c_attn", a_step_off), ("1 of 196608", OFF)),
    ReadFault("two outputs exchanged", changed_codes("h.1.attn.c_proj", wrong_rows), (OFF, "first in row 0")),
    ReadFault(
        "a window", attribute(GROUP, "local_window_size", 250), ("of h.1.attn", "250", "is -1"), missed=True
    ),
    ReadFault("other heads", attribute(GROUP, "kv_num_heads", 2), ("kv_num_heads 2, the model's is 4",)),
    ReadFault("rotated", attribute(GROUP, "do_rotary", 1), ("do_rotary 1, the model's is 0",)),
    ReadFault("a cap", attribute(GROUP, "softcap", 50.0), ("softcap 50",)),
    ReadFault("smooth", attribute(GROUP, "smooth_softmax", 1), ("which no graph of this model has",)),
    ReadFault("scale 0.2 % off", attribute(GROUP, "scale", 0.12525), ("has scale 0.12525",)),
    ReadFault(
        "the exact GELU", exact_gelu, ("computes the exact GELU, the model's is GELU by tanh",), missed=True
    ),
    ReadFault("epsilon 1e-6", epsilon("h.1.ln_1", 1e-6), ("of h.1.ln_1 has epsilon 1e-06",)),
    ReadFault(
        "a bias 0.4 % off", own_vector("h.2.attn.c_attn", ("MatMulNBits",), 5), ("'mine'", "is no tensor of")
    ),
]
INT8 += [
    ReadFault(
        "a rare word's zero points", zero_points("wte", 118, slice(1990, 1992)), ("wte", MIDDLE), missed=True
    ),
    ReadFault(
        "zero points of a product",
        zero_points("h.1.mlp.c_fc", 100, slice(0, 20)),
        ("h.1.mlp.c_fc", MIDDLE),
        missed=True,
    ),
    ReadFault(
        "another layer's norm",
        reads("h.1.ln_1", 1, "h.2.ln_1.weight", "LayerNormalization"),
        ("of h.1.ln_1 reads 'h.2.ln_1.weight'",),
        missed=True,
    ),
    ReadFault(
        "0.01 added to a norm's result",
        behind("h.1.ln_2", "LayerNormalization", "Add", 0.01),
        ("computes with 0.01",),
        missed=True,
    ),
]
INT4 = [
    ReadFault(
        "a block's zero point 7",
        zero_points("h.1.attn.c_proj", 0x77, slice(5, 6)),
        ("h.1.attn.c_proj", MIDDLE),
        missed=True,
    ),
    ReadFault(
        "another module's bias",
        reads("h.2.mlp.c_proj", 5, "h.1.attn.c_proj.bias", "MatMulNBits"),
        ("of h.2.mlp.c_proj reads 'h.1.attn.c_proj.bias'",),
        missed=True,
    ),
    ReadFault(
        "no bias",
        reads("h.0.attn.c_attn", 5, None, "MatMulNBits"),
        ("no node reads 'h.0.attn.c_attn.bias'",),
        missed=True,
    ),
    ReadFault(
        "clipped to 2",
        behind("h.1.ln_2", "LayerNormalization", "Clip", -2.0, 2.0),
        ("(Clip) computes with -2",),
        missed=True,
    ),
    ReadFault("a block's scale doubled", doubled_scales("h.1.mlp.c_proj"), ("of h.1.mlp.c_proj", SCALES)),
    ReadFault(
        "1 % of a weight's blocks doubled",
        doubled_scales("h.3.mlp.c_proj", 0.01),
        ("10 of 1024",),
        missed=True,
    ),
    ReadFault("a block of zeros", changed_codes("h.1.mlp.c_proj", forgotten_block), ("row 3", "real text")),
    ReadFault(
        "halves exchanged", changed_codes("h.0.attn.c_attn", exchanged_halves), ("in 768 of 768 rows",)
    ),
    ReadFault("two outputs exchanged", changed_codes("h.0.attn.c_proj", wrong_rows), ("first in row 0",)),
    ReadFault("two rare rows exchanged", exchanged_rows(1990, 2001), ("wte.weight", "2 of 2048 scales")),
    ReadFault("a rare word NaN", word_is_nan(1999), ("not finite",)),
]
FP16 = [
    ReadFault("a rare word as another", other_id(1999, 1998), ("reads ids that", "(Where)"), missed=True),
    ReadFault(
        "0.002 behind a GELU",
        behind("h.1.mlp.activation", "Gelu", "Add", 0.002),
        ("(Add) computes with 0.002",),
        missed=True,
    ),
    ReadFault(
        "a bias 0.4 % off",
        own_vector("h.2.ln_2", ("LayerNormalization",), 2),
        ("'mine'", "no tensor"),
        missed=True,
    ),
    ReadFault("the exact GELU", exact_gelu, ("of h.0.mlp", "the model's is GELU by tanh"), missed=True),
    ReadFault("epsilon 1e-6", epsilon("h.3.ln_2", 1e-6), ("of h.3.ln_2 has epsilon 1e-06",)),
]
BERT = [
    ReadFault(
        "zero points of three columns",
        zero_points("layers.0.intermediate", 6, slice(3, 6)),
        ("of layers.0.intermediate", "are not 0"),
        missed=True,
    ),
    ReadFault(
        "a column's scale doubled", doubled_scales("layers.0.intermediate"), (SCALES, "layers.0"), missed=True
    ),
    ReadFault("two results exchanged", exchanged_columns("layers.0.output"), (SCALES, "2 of ")),
    ReadFault("smoothing 2 % off", changed_unsmoothing("layers.0.attention.query"), ("layers.0.attention",)),
    ReadFault(
        "joined biases 0.4 % off",
        own_vector("layers.0.attention.query", ("MatMulIntegerToFloat",), 6),
        ("'mine'", "is no tensor of the checkpoint"),
    ),
    ReadFault("epsilon 1e-5", epsilon("layers.0.attention_norm", 1e-5), ("the model's is 1e-12",)),
]
LLAMA = [
    ReadFault(
        "attention's scale 0.5 % off",
        scaled_number("model.layers.1.self_attn", "Mul", 1.005),
        ("layers.1.self_attn computes with 0.50", "no number of the model"),
        missed=True,
    ),
    ReadFault(
        "epsilon",
        other_epsilon("model.layers.1.input_layernorm"),
        ("layers.1", "the model's is 1e-06"),
        missed=True,
    ),
    ReadFault(
        "rotary base 10,100", other_rotary_base, ("rotary_emb", "inv_freq", "off by up to"), missed=True
    ),
]


GEMMA = [
    ReadFault("final cap 3.015", scaled_number("", "Div", 1.005), ("soft cap 3.01", "is 3"), missed=True),
    ReadFault(
        "attention's cap 5.1",
        scaled_number("layers.1.self_attn", "Div", 1.02),
        ("of layers.1.self_attn has the soft cap 5.", "is 5"),
        missed=True,
    ),
    ReadFault(
        "embeddings times 1.002", scaled_number("", "Mul", 1.002), ("computes with 8.01",), missed=True
    ),
    ReadFault(
        "epsilon as a sum", summed_epsilon("layers.1.mlp_norm"), ("(Add) computes with 9e-06",), missed=True
    ),
]


def named(faults: list[ReadFault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    with collect_table("read-faults", ("graph", "fault", "what reading says", "missed before")) as rows:
        yield rows


@named(INT8)
def test_faults_in_int8_are_read(gpt2: Reader, fault: ReadFault, table: list[Row]) -> None:
    gpt2.check("decoder.ort.int8", fault, table, "GPT-2")


@named(INT4)
def test_faults_in_int4_are_read(gpt2: Reader, fault: ReadFault, table: list[Row]) -> None:
    gpt2.check("decoder.ort.int4", fault, table, "GPT-2")


@named(FP16)
@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_faults_in_fp16_are_read(floats: Reader, fault: ReadFault, table: list[Row], dialect: str) -> None:
    floats.check(f"decoder.{dialect}.fp16", fault, table, "GPT-2")


@named(BERT)
def test_faults_in_an_encoder_in_int8_are_read(bert: Reader, fault: ReadFault, table: list[Row]) -> None:
    bert.check("encoder.ort.int8", fault, table, "BERT")


@named(LLAMA)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_faults_in_an_imported_llama_are_read(
    llama: Reader, fault: ReadFault, table: list[Row], precision: str
) -> None:
    llama.check(f"decoder.portable.{precision}", fault, table, "imported Llama")


@named(GEMMA)
def test_numbers_of_a_gemma_2_in_fp16_are_read(gemma: Reader, fault: ReadFault, table: list[Row]) -> None:
    gemma.check("decoder.portable.fp16", fault, table, "Gemma 2")


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
        codes = round_with_gptq(weight, scale, -127, 127, x)
        errors = (weight - codes * scale).T
        steps = np.broadcast_to(scale.T, errors.shape)
        beyond = np.zeros_like(errors)
        shares = measure_losses([(errors, steps, beyond)], x)
        assert (shares <= 1).all()
        assert np.abs(errors).max() > scale.max()  # it moves numbers by more than half a step
        worse = errors.copy()
        worse[5] = weight.T[5]  # forgotten
        assert measure_losses([(worse, steps, beyond)], x)[5] > 1
