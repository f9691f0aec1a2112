"""GGUF files: values against llama.cpp's own package, answers against transformers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from planforge.exporter import export, verify
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.errors import CheckpointError
from planforge.models import gguf_types
from planforge.models.gguf_file import TYPES, GgufTensor, read_gguf
from planforge.models.gguf_names import compute_llama3_factors
from planforge.models.gguf_tokenizer import make_tokenizer
from planforge.models.gguf_types import read_tensor
from planforge.models.quantized_files import FileCodes
from planforge.runtime import TextGenerator

from ..helpers import gguf_files
from ..helpers.cli import planforge
from ..helpers.gguf_files import CONFIGS, SIZES, write_gguf
from ..helpers.random_checkpoints import TOKENIZER

TEXT = "In the beginning God created the heaven and the earth"
CPU: dict[str, Any] = {"target": ["cpu"], "verify": "quick"}
KEPT = {"Q4_0": 4, "Q8_0": 8, "Q5_0": 8, "Q6_K": 8}  # the bits of their codes


def make_blocks(name: str) -> Any:
    """Return the bytes of 8 rows of 512 values: rounded by the package, or random where it has no way."""
    rng = np.random.default_rng(0)
    _, values, size = next(row for row in TYPES.values() if row[0] == name)
    if not name.endswith("K"):
        weight = (rng.standard_normal((8, 512)) * 0.05).astype(np.float32)
        return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name])
    blocks = rng.integers(0, 256, (8, 512 // values, size), dtype=np.uint8)
    scales = rng.uniform(1e-4, 1e-3, (8, 512 // values, 2)).astype(np.float16).view(np.uint8)
    if name == "Q6_K":
        blocks[..., -2:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(8, -1)


def read_blocks(name: str, blocks: Any) -> Any:
    data = np.ascontiguousarray(blocks).view(np.uint8).reshape(8, -1)
    return read_tensor(GgufTensor(name, (8, 512), data))


@pytest.mark.parametrize("name", [row[0] for row in TYPES.values() if row[0] != "F32"])
def test_values_are_those_of_the_package(name: str) -> None:
    blocks = make_blocks(name)
    found = read_blocks(name, blocks)
    assert isinstance(found, FileCodes) == (name in KEPT)
    if isinstance(found, FileCodes):
        assert found.bits == KEPT[name]
        found = found.dequantize()
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(found, wanted)


FAULTS = ("a zero point that is one off", "halves of bytes exchanged", "scales of another block")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_change_the_values(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, halves = gguf_types.make_codes, gguf_types.nibbles
    if fault == FAULTS[0]:
        monkeypatch.setattr(gguf_types, "make_codes", lambda c, s, zero, bits: codes(c, s, zero + 1, bits))
    elif fault == FAULTS[1]:
        monkeypatch.setattr(gguf_types, "nibbles", lambda data: halves((data << 4) | (data >> 4)))
    else:
        monkeypatch.setattr(gguf_types, "make_codes", lambda c, s, z, bits: codes(c, s[:, ::-1], z, bits))
    with pytest.raises(AssertionError):
        test_values_are_those_of_the_package("Q4_0")


def run(bundle: Path) -> Any:
    with TextGenerator.load(bundle) as model:
        ids = model.tokenizer.encode(TEXT)
        return ids, np.concatenate(list(model.decoder.start(1, len(ids)).extend(ids)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "F16") for name in CONFIGS), ("llama", "Q4_0"), ("llama", "Q4_1"), ("qwen2", "Q8_0")],
)
def test_logits_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """Of the model that was written, with the weights that its codes stand for."""
    path = tmp_path / "model.gguf"
    model = write_gguf(name, path, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                rounded = round_as(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(rounded))
    result = export(path, tmp_path / "bundle", precision=["fp32"], **CPU)
    assert result.manifest.source["quantized_by"] == "llama.cpp"
    ids, found = run(tmp_path / "bundle")
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_biases_of_queries_and_keys_are_turned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    biased = LlamaConfig(**SIZES, attention_bias=True)
    monkeypatch.setitem(CONFIGS, "llama", biased)
    model = write_gguf("llama", tmp_path / "model.gguf", "F32")
    export(tmp_path / "model.gguf", tmp_path / "bundle", precision=["fp32"], **CPU)
    ids, found = run(tmp_path / "bundle")
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def round_as(weight: Any, kind: str) -> Any:
    if kind == "F16":
        return weight.astype(np.float16).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(weight, number), number)


def test_codes_are_kept_in_the_graph_and_verified_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf("llama", path, "Q4_0")
    done = planforge("export", path, "-o", tmp_path / "bundle", "--target", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert "reading weights that llama.cpp quantized, of which 16 keep their 4-bit codes" in done.stderr
    report = verify(tmp_path / "bundle", level="quick")
    assert report.passed
    (compared,) = (c for c in report.comparisons if c.case == "weights and modules")
    assert compared.failures == ()


def test_a_tokenizers_ids_are_those_of_the_original(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf("qwen2", path, "F16")
    ours = make_tokenizer(read_gguf(path))
    theirs = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    for text in (
        TEXT,
        "  two  spaces\n\nand 12345 numbers' ends",
        "naïve Straße 日本",
        "it's<|endoftext|>so",
    ):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_llama_3s_words_are_tokens_whatever_the_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp has it, and transformers' own tokenizer of Llama 3 (ignore_merges)."""

    def add(writer: Any) -> None:
        tokens = ["<|begin|>", "<|end|>", *"heloĠwrd", "he", "hello"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)

    monkeypatch.setattr(gguf_files, "add_vocabulary", add)
    write_gguf("llama", tmp_path / "model.gguf", "F32")
    tokenizer = make_tokenizer(read_gguf(tmp_path / "model.gguf"))
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]
    assert tokenizer.encode("hellohe").tokens == ["<|begin|>", "he", "l", "l", "o", "he"]


def test_pieces_of_sentencepiece_are_merged_by_their_scores(tmp_path: Path) -> None:
    """Against SentencePiece itself, whose BPE model gives the vocabulary."""
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text(
        (TEXT + "\nAnd God said, Let there be light: and there was light.\n") * 40, encoding="utf-8"
    )
    options: dict[str, Any] = {
        "vocab_size": 320,
        "model_type": "bpe",
        "byte_fallback": True,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "m"), **options)
    theirs: Any = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    path = tmp_path / "model.gguf"
    writer: Any = gguf.GGUFWriter(path, "llama")
    count = theirs.get_piece_size()
    writer.add_tokenizer_model("llama")
    writer.add_token_list([theirs.id_to_piece(i) for i in range(count)])
    writer.add_token_scores([theirs.get_score(i) for i in range(count)])
    kinds = [1] * count
    for number, is_kind in ((2, theirs.is_unknown), (3, theirs.is_control), (6, theirs.is_byte)):
        kinds = [number if is_kind(i) else own for i, own in enumerate(kinds)]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = make_tokenizer(read_gguf(path))
    for sample in (TEXT, "Let there be light", "日本 and naïve", "light: light,"):
        assert ours.encode(sample).ids == [1, *theirs.encode(sample)]
        assert ours.decode(ours.encode(sample).ids) == theirs.decode(theirs.encode(sample))


def test_factors_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    given = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    given |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(**CONFIGS["llama"].to_dict() | {"rope_parameters": given, "head_dim": 128})
    rotary: Any = LlamaForCausalLM(config).model.rotary_emb
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    factors = compute_llama3_factors(64, given)
    np.testing.assert_allclose(plain / factors, rotary.inv_freq.numpy(), rtol=1e-5)


# What is refused


def test_a_file_that_is_cut_is_refused_wherever(tmp_path: Path) -> None:
    whole = tmp_path / "model.gguf"
    write_gguf("llama", whole, "Q4_0")
    data = whole.read_bytes()
    for tenth in range(10):
        cut = tmp_path / f"cut{tenth}.gguf"
        cut.write_bytes(data[: len(data) * tenth // 10])
        message = "is empty" if tenth == 0 else r"it is not\s+whole; download it again"
        with pytest.raises(CheckpointError, match=message):
            export(cut, tmp_path / "bundle", **CPU)
    for size in (3, 7, 20, 30, 100):  # within the first values
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"not whole|does not begin with GGUF"):
            export(cut, tmp_path / "bundle", **CPU)
    assert not (tmp_path / "bundle").exists()


def change(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF\x03", b"GGUF\x09", r"has GGUF's version 9, and \(2, 3\) are read"),
        (
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama",
            b"\x05\x00\x00\x00\x00\x00\x00\x00mamba",
            "architecture 'mamba'",
        ),
        (b"gpt-2", b"whale", "cuts texts into words as 'whale'"),
        (b"blk.0.attn_q.weight", b"blk.0.mystery.weigh", "mystery.weigh is a tensor that llama is not known"),
        (b"llama.block_count", b"llama.black_count", r"has no setting llama\.block_count"),
    ],
)
def test_files_that_are_not_read_are_refused(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf("llama", path, "F16")
    change(path, old, new)
    with pytest.raises(CheckpointError, match=message):
        export(path, tmp_path / "bundle", **CPU)


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q2_K
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((1, 84), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = r"blk\.0\.attn_q\.weight has the type 10 of GGML, which is not read; give one in F16"
    with pytest.raises(CheckpointError, match=message):
        resolve_source(tmp_path / "model.gguf")


def test_counts_that_no_file_has_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") + bytes(64))
    with pytest.raises(CheckpointError, match=f"has a count of {2**60} at byte 8"):
        resolve_source(path)
