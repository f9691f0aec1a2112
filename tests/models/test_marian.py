from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from planforge.models import PaddedAttention, SourceAttention, Transformer, marian_names
from planforge.models.checkpoint import describe, load_model
from planforge.models.saving import save_model
from planforge.models.weights import read_weights

from ..helpers.models import (
    edit_json,
    edit_weights,
    random_marian,
    random_transformer,
    tiny_marian,
    tiny_transformer,
)

LIMIT = 1e-4
FAR = 100 * LIMIT  # what must differ in the reference differs by more than this
LENGTHS = (9, 4, 1)
UNSHARED = {"share_encoder_decoder_embeddings": False}
WORDS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
ONE = {"share_embeddings": True, "target_vocab_size": 60}

Reference = transformers.MarianMTModel


def a_batch(vocab_size: int, padded: bool = True) -> dict[str, Tensor]:
    """By transformers' names: 3 sources of up to 9 tokens, and targets of 7."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS if padded else (9, 9, 9))
    return {
        "input_ids": torch.randint(vocab_size, (3, 9), generator=generator),
        "attention_mask": (torch.arange(9) < lengths[:, None]).long(),
        "decoder_input_ids": torch.randint(vocab_size, (3, 7), generator=generator),
    }


def reference_logits(reference: Reference, batch: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(**batch, use_cache=False).logits
    return logits


def our_logits(ours: Transformer, batch: dict[str, Tensor]) -> Tensor:
    return ours(batch["input_ids"], batch["decoder_input_ids"], batch["attention_mask"])  # type: ignore[no-any-return]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def loaded(folder: Path) -> Transformer:
    model = load_model(folder)
    assert isinstance(model, Transformer) and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    return model


def assert_equal(folder: Path, reference: Reference) -> Transformer:
    ours = loaded(folder)
    for padded in (True, False):
        batch = a_batch(min(ours.config.source_vocab_size, ours.config.target_vocab_size), padded)
        wanted = reference_logits(reference, batch)
        assert distance(wanted[0], wanted[1]) > FAR and distance(wanted[:, 0], wanted[:, 1]) > FAR
        torch.testing.assert_close(our_logits(ours, batch), wanted, rtol=0, atol=LIMIT)
    return ours


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    return str(caught.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("written") / "tiny"
    return folder, tiny_marian(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def tiny(folder: Path, written: tuple[Path, Reference]) -> Reference:
    """The reference of the checkpoint that lies in `folder`."""
    shutil.copytree(written[0], folder)
    return written[1]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own output"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "unshared"])
def test_logits_equal_transformers(folder: Path, shared: bool, tied: bool) -> None:
    reference = random_marian(share_encoder_decoder_embeddings=shared, tie_word_embeddings=tied)
    reference.save_pretrained(folder)
    ours = assert_equal(folder, reference)
    source = ours.source.words.weight
    target = ours.target.words.weight
    output = ours.output.weight
    assert (target is source) == (shared and tied)  # transformers 5 shares nothing where nothing is tied
    assert (output is target) == tied
    assert tied or min(distance(source, target), distance(target, output)) > FAR


@pytest.mark.parametrize(
    "settings",
    [
        *({"activation_function": name} for name in ("relu", "gelu", "gelu_new", "silu", "tanh")),
        {"scale_embedding": False},
        {"encoder_attention_heads": 1, "decoder_attention_heads": 32},
        {"encoder_layers": 1, "decoder_layers": 3, "encoder_ffn_dim": 7},
        {**UNSHARED, "decoder_vocab_size": 70},
        {**UNSHARED, "decoder_vocab_size": 50, "tie_word_embeddings": False},
        {"max_position_embeddings": 9},
    ],
    ids=str,
)
def test_logits_equal_transformers_for_other_settings(folder: Path, settings: dict[str, Any]) -> None:
    reference = random_marian(**settings)
    reference.save_pretrained(folder)
    ours = assert_equal(folder, reference)
    sizes = len(ours.source.words.weight), len(ours.output.weight)
    assert sizes == (60, settings.get("decoder_vocab_size", 60))


def test_logits_equal_transformers_at_marians_width(folder: Path) -> None:
    layers: dict[str, Any] = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 8 for side in ("encoder", "decoder")}
    ffn = {f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")}
    reference = random_marian(d_model=512, vocab_size=500, init_std=0.05, **layers, **heads, **ffn)
    reference.save_pretrained(folder)
    assert_equal(folder, reference)


def test_attention_over_the_source_is_transformers(folder: Path, tiny: Reference) -> None:
    batch = a_batch(60)
    ours = loaded(folder)
    eager = Reference.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        wanted = eager(**batch, output_attentions=True).cross_attentions
    memory = ours.encode(batch["input_ids"], PaddedAttention(batch["attention_mask"]))
    decoder: Any = ours.decoder
    source = SourceAttention(decoder.keys_values(memory), batch["attention_mask"])
    ours.step(batch["decoder_input_ids"], source)
    torch.testing.assert_close(list(source.weights.values()), list(wanted), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("prefix", [True, False], ids=["model.", "no prefix"])
def test_a_file_without_final_logits_bias_has_none(folder: Path, tiny: Reference, prefix: bool) -> None:
    if prefix:
        edit_weights(folder, final_logits_bias=None)
    else:
        tiny.model.save_pretrained(folder)  # MarianModel
    assert {name.startswith("model.") for name in load_file(folder / "model.safetensors")} == {prefix}
    ours = loaded(folder)
    batch = a_batch(60)
    assert not ours.config.output_bias and ours.output.bias is None
    wanted = reference_logits(tiny, batch) - tiny.final_logits_bias
    torch.testing.assert_close(our_logits(ours, batch), wanted, rtol=0, atol=LIMIT)


def test_the_prefix_may_be_missing_where_there_is_a_bias(folder: Path, tiny: Reference) -> None:
    weights = load_file(folder / "model.safetensors")
    changes: dict[str, Tensor | None] = {name: None for name in weights}
    edit_weights(folder, **changes | {name.removeprefix("model."): t.clone() for name, t in weights.items()})
    assert loaded(folder).config.output_bias
    assert_equal(folder, tiny)


@pytest.mark.parametrize("shared", [True, False], ids=["and shared", "alone"])
@pytest.mark.parametrize("names", [*((name,) for name in WORDS), WORDS], ids=len)
def test_old_files_carry_copies(folder: Path, tiny: Reference, names: tuple[str, ...], shared: bool) -> None:
    words = tiny.model.shared.weight.detach()
    own = {"model.shared.weight": words if shared else None}
    edit_weights(folder, **own | {name: words.clone() for name in names})
    ours = assert_equal(folder, tiny)
    assert ours.source.words.weight is ours.target.words.weight is ours.output.weight


@pytest.mark.parametrize("name", WORDS)
def test_a_copy_that_differs_is_refused_by_name(folder: Path, tiny: Reference, name: str) -> None:
    edit_weights(folder, **{name: tiny.model.shared.weight.detach() + 1})
    ours = dict(zip(WORDS, ("source.words", "target.words", "output"), strict=True))[name]
    message = refusal(folder)
    assert str(folder) in message and f"{ours}.weight" in message and "differ" in message


def test_a_tied_output_that_differs_is_refused_where_embeddings_are_not_shared(folder: Path) -> None:
    reference = random_marian(**UNSHARED)
    reference.save_pretrained(folder)
    edit_weights(folder, **{"lm_head.weight": reference.lm_head.weight.detach().clone()})
    assert_equal(folder, reference)
    edit_weights(folder, **{"lm_head.weight": reference.lm_head.weight.detach() + 1})
    assert "output.weight differs from target.words.weight" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [TABLES[:1], TABLES[1:], TABLES], ids=["encoder", "decoder", "both"])
def test_old_files_carry_tables(folder: Path, tiny: Reference, names: Any, dtype: torch.dtype) -> None:
    table = MarianSinusoidalPositionalEmbedding(64, 32).create_weight()
    edit_weights(folder, **{name: table.to(dtype, copy=True) for name in names})
    assert_equal(folder, tiny)


@pytest.mark.parametrize(("name", "ours"), [(TABLES[0], "source"), (TABLES[1], "target")])
@pytest.mark.parametrize("wrong", ["one number", "interleaved", "shorter", "NaN"])
def test_another_table_is_refused(folder: Path, tiny: Reference, name: str, ours: str, wrong: str) -> None:
    table = MarianSinusoidalPositionalEmbedding(64, 32).create_weight()
    changed = {
        "one number": table.index_put((torch.tensor(63), torch.tensor(5)), table[63, 5] + 0.01),
        "interleaved": torch.stack(table.chunk(2, dim=1), dim=-1).flatten(1),
        "shorter": table[:63].clone(),
        "NaN": table.index_put((torch.tensor(3), torch.tensor(0)), torch.tensor(torch.nan)),
    }
    edit_weights(folder, **{name: changed[wrong]})
    assert f"{folder}: {ours}.positions.weight differs from the sines" in refusal(folder)


NORMS = ("normalize_before", "normalize_embedding", "add_final_layer_norm")


@pytest.mark.parametrize(
    ("name", "value"), [*((name, True) for name in NORMS), ("static_position_embeddings", False)]
)
def test_unsupported_settings_are_named(folder: Path, tiny: Reference, name: str, value: bool) -> None:
    edit_json(folder / "config.json", **{name: not value})  # as most published files have it
    assert_equal(folder, tiny)
    edit_json(folder / "config.json", **{name: value})
    assert f"config.json sets {name}={value}; only {not value} is supported" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("activation_function", "mish", "activation='mish'"),
        ("d_model", "32", "d_model='32'"),
        ("encoder_attention_heads", 5, "encoder_heads=5"),
        ("decoder_layers", None, "decoder_layers=None"),
        ("decoder_layers", 2**31, "decoder_layers=2147483648 in config.json"),
        ("scale_embedding", "yes", "scale_embedding='yes'"),
        ("share_encoder_decoder_embeddings", 1, "share_embeddings=1"),
        ("model_type", "mbart", "model_type 'mbart'"),
    ],
)
def test_nonsense_is_named(folder: Path, tiny: Reference, name: str, value: object, named: str) -> None:
    edit_json(folder / "config.json", **{name: value})
    assert named in refusal(folder)


def test_defaults_are_transformers(folder: Path, tiny: Reference) -> None:
    (folder / "config.json").write_text('{"model_type": "marian"}')
    edit_weights(folder, **{"model.shared.weight": torch.ones(58101, 1)})
    ours = describe(folder).config
    theirs = transformers.MarianConfig()
    for published, (name, _) in marian_names.SETTINGS.items():
        assert getattr(ours, name) == getattr(theirs, published), name
    assert ours.vocab_size == theirs.decoder_vocab_size


def marian_like(**settings: Any) -> Transformer:
    return random_transformer(positions="concatenated", **settings).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        ONE,
        {**ONE, "tie_word_embeddings": True},
        {"activation": "swish"},
    ],
    ids=str,
)
def test_transformers_reads_what_save_model_writes(
    folder: Path, settings: dict[str, Any], bias: bool
) -> None:
    model = marian_like(output_bias=bias, **settings)
    save_model(model, folder, "marian")
    read: Any = Reference.from_pretrained(folder, output_loading_info=True)
    reference, report = read
    assert not any(report.values()), report
    again = assert_equal(folder, reference)
    batch = a_batch(50)
    assert torch.equal(our_logits(again, batch), our_logits(model, batch))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True, "output_bias": True},
        ONE,
        {**ONE, "tie_word_embeddings": True, "positions": "learned"},
        {"norm_first": True, "final_norms": True, "layer_norm_eps": 1e-6, "scale_embedding": False},
        {"positions": "concatenated", "activation": "gelu", "encoder_heads": 2, "decoder_heads": 8},
    ],
    ids=str,
)
def test_saving_and_loading_changes_no_bit(folder: Path, settings: dict[str, Any]) -> None:
    model = tiny_transformer(folder, **settings)
    again = loaded(folder)
    assert again.config == model.config
    config_json = json.loads((folder / "config.json").read_text())
    assert config_json == {"model_type": "transformer", **vars(model.config)}
    assert set(load_file(folder / "model.safetensors")) == set(dict(model.named_parameters()))
    assert set(again.state_dict()) == set(model.state_dict())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    words = again.target.words.weight
    assert (again.source.words.weight is words) == model.config.share_embeddings
    assert (again.output.weight is words) == model.config.tie_word_embeddings
    batch = a_batch(50)
    assert torch.equal(our_logits(again, batch), our_logits(model, batch))


def test_marians_weights_survive_both_ways(folder: Path, tiny: Reference, tmp_path: Path) -> None:
    ours = loaded(folder)
    save_model(ours, tmp_path / "own")
    assert_equal(tmp_path / "own", tiny)
    save_model(loaded(tmp_path / "own"), tmp_path / "back", "marian")
    published, back = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert set(back) == set(published) and all(torch.equal(back[name], published[name]) for name in back)
    assert set(read_weights(describe(folder))) == set(dict(ours.named_parameters()))


@pytest.mark.parametrize(
    "other",
    [
        *({"positions": "interleaved"}, {"positions": "learned"}, {"layer_norm_eps": 1e-6}),
        *({"norm_first": True}, {"final_norms": True}, {"norm_first": True, "final_norms": True}),
    ],
    ids=str,
)
def test_what_marian_cannot_be_is_refused_and_nothing_is_written(folder: Path, other: dict[str, Any]) -> None:
    model = random_transformer(**{"positions": "concatenated", **other})
    with pytest.raises(ValueError, match=f"this model has {other}"):
        save_model(model, folder, "marian")
    assert not folder.exists()
