from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from planforge.exporter.tracing.dialects import PortableTargetDecoder, SourceEncoder
from planforge.models import PaddedAttention, SourceAttention, Transformer, save_model
from planforge.models.attention import AttentionCache, KeyValue
from planforge.models.masked import MASKED
from planforge.models.transformer import Decoder, Encoder

from ..helpers.models import embedded, paper_table, random_transformer, torch_reference

LIMIT = 1e-5
FAR = 1e-2  # what must differ, differs by more than this
SOURCE_LENGTHS = (9, 4, 1)
TARGET_LENGTHS = (7, 7, 3)

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # source_ids, target_ids and their masks
Results: TypeAlias = tuple[Tensor, Tensor, Tensor]  # memory, what the output reads, logits


def expected(model: Transformer, batch: Batch, **biases: Tensor) -> Results:
    """PyTorch's; biases are (B * H, queries, keys)."""
    source_ids, target_ids, source_mask, target_mask = batch
    source_bias, target_bias, cross_bias = (
        biases.get(f"{name}_bias") for name in ("source", "target", "cross")
    )
    drop = [torch.zeros(m.shape).masked_fill(m == 0, -math.inf) for m in (source_mask, target_mask)]
    causal = nn.Transformer.generate_square_subsequent_mask(target_ids.shape[1])
    reference = torch_reference(model)
    source = embedded(model, "source", source_ids)
    memory = reference.encoder(source, source_bias, drop[0])
    hidden = reference(
        source,
        embedded(model, "target", target_ids),
        src_mask=source_bias,
        tgt_mask=causal if target_bias is None else causal + target_bias,
        memory_mask=cross_bias,
        src_key_padding_mask=drop[0],
        tgt_key_padding_mask=drop[1],
        memory_key_padding_mask=drop[0],
    )
    return memory, hidden, nn.functional.linear(hidden, model.output.weight, model.output.bias)


def actual(model: Transformer, batch: Batch, **biases: Tensor) -> Results:
    """Ours, in one forward pass."""
    seen: list[Tensor] = []
    parts = (model.encoder, model.decoder)
    hooks = [part.register_forward_hook(lambda _part, _inputs, out: seen.append(out)) for part in parts]
    logits = model(*batch, **biases)
    for hook in hooks:
        hook.remove()
    memory, hidden = seen
    return memory, hidden, logits


def assert_as_expected(
    model: Transformer, batch: Batch, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> None:
    """Ours and PyTorch's are near where nothing is padded; `ours` and `theirs` are the biases."""
    masks = (batch[2], batch[3], batch[3])
    for got, wanted, mask in zip(
        actual(model, batch, **ours), expected(model, batch, **theirs), masks, strict=True
    ):
        assert wanted[mask > 0].std() > 0.3 and distance(wanted[0, :3], wanted[1, :3]) > FAR
        torch.testing.assert_close(got[mask > 0], wanted[mask > 0], rtol=0, atol=LIMIT)


def a_batch(model: Transformer, padded: bool = True) -> Batch:
    """3 sources of up to 9 tokens, and targets of up to 7."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    source_ids = torch.randint(config.source_vocab_size, (3, 9), generator=generator)
    target_ids = torch.randint(config.target_vocab_size, (3, 7), generator=generator)
    masks = [
        (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        if padded
        else torch.ones_like(ids)
        for ids, lengths in ((source_ids, SOURCE_LENGTHS), (target_ids, TARGET_LENGTHS))
    ]
    return source_ids, target_ids, masks[0], masks[1]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_transformer(norm_first=True, final_norms=True, output_bias=True).requires_grad_(False)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("final_norms", [False, True], ids=["plain", "final norms"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_it_equals_pytorchs_own(norm_first: bool, final_norms: bool, activation: str) -> None:
    model = random_transformer(norm_first=norm_first, final_norms=final_norms, activation=activation)
    assert_as_expected(model, a_batch(model), {}, {})
    assert_as_expected(model, a_batch(model, padded=False), {}, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_first": True},
        {"final_norms": True},
        {"activation": "gelu"},
        {"layer_norm_eps": 0.1},
        {"positions": "concatenated"},
        {"positions": "learned"},
        {"scale_embedding": False},
        {"encoder_heads": 1, "decoder_heads": 32},
        {"encoder_heads": 3, "decoder_heads": 1, "d_model": 33, "encoder_ffn": 1},
        {"encoder_layers": 1, "decoder_layers": 1, "output_bias": True},
        {"final_norms": "decoder"},
        {"share_layers": True},
        {"share_layers": True, "final_norms": "decoder", "target_positions": False},
        {"target_positions": False},
        {"bias": False},
        {"norm_first": True, "residual_from_norm": True, "final_norms": True},
        {"norm_first": True, "residual_from_norm": True, "final_norms": True, "bias": False},
        {"share_embeddings": True, "tie_word_embeddings": True, "target_vocab_size": 60},
    ],
    ids=str,
)
def test_each_setting_shows_and_is_pytorchs(settings: dict[str, Any]) -> None:
    model = random_transformer(**settings)
    usual = random_transformer()
    batch = a_batch(model)
    assert_as_expected(model, batch, {}, {})
    others = {"d_model", "encoder_layers", "share_embeddings", "share_layers"}  # which have other weights
    if not others & set(settings):
        usual.load_state_dict(model.state_dict(), strict=False)
        assert distance(model(*batch), usual(*batch)) > FAR


def test_a_target_may_be_padded_on_the_left(model: Transformer) -> None:
    source_ids, target_ids, source_mask, _ = a_batch(model)
    mask = (torch.arange(7) >= 7 - torch.tensor(TARGET_LENGTHS)[:, None]).long()
    together = model(source_ids, target_ids * mask, source_mask, mask)
    for b, (S, T) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        row = source_ids[b : b + 1, :S], target_ids[b : b + 1, -T:]
        alone = expected(model, (*row, torch.ones(1, S), torch.ones(1, T)))[2]
        torch.testing.assert_close(together[b : b + 1, -T:], alone, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("positions", ["interleaved", "concatenated"])
@pytest.mark.parametrize(("length", "E"), [(64, 32), (1024, 16), (40, 7), (3, 1), (1, 6)])
def test_tables_are_the_papers(positions: str, length: int, E: int) -> None:
    sizes = {"max_positions": length, "d_model": E, "encoder_heads": 1, "decoder_heads": 1}
    model = random_transformer(positions=positions, **sizes)
    table = model.source.positions.weight
    torch.testing.assert_close(table, paper_table(length, E, positions), rtol=0, atol=1e-6)
    assert model.target.positions is model.source.positions
    assert not any("positions" in name for name in model.state_dict())


@pytest.mark.parametrize(("length", "E"), [(512, 64), (40, 7), (1, 2)])
def test_concatenated_tables_are_marians(length: int, E: int) -> None:
    sizes = {"max_positions": length, "d_model": E, "encoder_heads": 1, "decoder_heads": 1}
    marian = MarianSinusoidalPositionalEmbedding(length, E).create_weight()
    table = random_transformer(positions="concatenated", **sizes).source.positions.weight
    torch.testing.assert_close(table, marian, rtol=0, atol=1e-6)


def test_learned_positions_are_parameters_of_each_side() -> None:
    model = random_transformer(positions="learned")
    names = [name for name, _ in model.named_parameters() if "positions" in name]
    assert names == ["source.positions.weight", "target.positions.weight"]
    batch = a_batch(model, padded=False)
    usual = model(*batch)
    with torch.no_grad():
        model.target.positions.weight[4:] += 1
    assert torch.equal(model(*batch)[:, :4], usual[:, :4])
    assert distance(model(*batch)[:, 4], usual[:, 4]) > FAR


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied output"])
@pytest.mark.parametrize("shared", [False, True], ids=["two embeddings", "one embedding"])
def test_what_is_shared_is_one_tensor_and_learns_as_one(shared: bool, tied: bool) -> None:
    settings = {"share_embeddings": shared, "tie_word_embeddings": tied, "target_vocab_size": 60}
    model = random_transformer(**settings)
    apart = random_transformer(target_vocab_size=60)
    apart.load_state_dict(model.state_dict())
    weights = []
    for m in (model, apart):
        m(*a_batch(apart, padded=False)).square().sum().backward()
        weights.append([m.source.words.weight, m.target.words.weight, m.output.weight])
    source, target, output = weights[0]
    assert (source is target) == shared and (target is output) == tied
    assert len(dict(model.named_parameters())) == len(dict(apart.named_parameters())) - shared - tied
    gradients = [weight.grad for weight in weights[1]]
    for weight in weights[0]:
        parts = [g for g, own in zip(gradients, weights[0], strict=True) if own is weight]
        torch.testing.assert_close(weight.grad, sum(parts), rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        source[5, 5] = 77
    assert (target[5, 5] == 77) == shared and (output[5, 5] == 77) == (shared and tied)


def test_every_parameter_gets_a_gradient() -> None:
    model = random_transformer(positions="learned", final_norms=True, output_bias=True)
    model(*a_batch(model)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if not name.endswith("key.bias"):  # adds the same to all scores of a query
            assert parameter.grad.abs().max() > FAR, name


def test_a_later_target_token_changes_nothing_before_it(model: Transformer) -> None:
    source_ids, target_ids, source_mask, target_mask = a_batch(model, padded=False)
    usual = model(source_ids, target_ids, source_mask, target_mask)
    for t in range(7):
        other = target_ids.clone()
        other[:, t] = (other[:, t] + 1) % 50
        logits = model(source_ids, other, source_mask, target_mask)
        assert torch.equal(logits[:, :t], usual[:, :t])
        assert min(distance(logits[:, later], usual[:, later]) for later in range(t, 7)) > FAR


def test_what_padding_holds_and_how_much_there_is_makes_no_difference(model: Transformer) -> None:
    source_ids, target_ids, source_mask, target_mask = a_batch(model)
    usual = model(source_ids, target_ids, source_mask, target_mask)
    real = target_mask.bool()
    other_source = torch.where(source_mask.bool(), source_ids, 59 - source_ids)
    other_target = torch.where(real, target_ids, 49 - target_ids)
    assert torch.equal(model(other_source, other_target, source_mask, target_mask)[real], usual[real])
    unmasked = model(other_source, target_ids), model(source_ids, target_ids)
    assert distance(unmasked[0][1], unmasked[1][1]) > FAR  # so it is the mask that does it
    longer = [nn.functional.pad(t, (0, 20)) for t in (source_ids, target_ids, source_mask, target_mask)]
    torch.testing.assert_close(model(*longer)[:, :7][real], usual[real], rtol=0, atol=LIMIT)
    all_real = torch.ones_like(source_ids), torch.ones_like(target_ids)
    assert torch.equal(unmasked[1], model(source_ids, target_ids, *all_real))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["source_bias", "target_bias", "cross_bias", "all"])
def test_masks_of_the_callers_own_are_pytorchs(model: Transformer, kind: str, padded: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    batch = a_batch(model, padded)
    shapes = {"source_bias": (3, 4, 9, 9), "target_bias": (3, 2, 7, 7), "cross_bias": (3, 2, 7, 9)}
    ours = {}
    theirs = {}
    for name in shapes if kind == "all" else [kind]:
        numbers = torch.randn(shapes[name], generator=generator)
        dropped = torch.rand(shapes[name], generator=generator) < 0.3
        dropped[..., 0] = False  # each sees something, also where the rest is padding
        ours[name] = torch.where(dropped, MASKED, numbers)
        theirs[name] = torch.where(dropped, -math.inf, numbers).flatten(0, 1)
    assert_as_expected(model, batch, ours, theirs)
    assert distance(model(*batch, **ours), model(*batch)) > FAR


def test_masks_of_the_callers_own_broadcast(model: Transformer) -> None:
    batch = a_batch(model)
    near = torch.where((torch.arange(9)[:, None] - torch.arange(9)).abs() < 3, 0.0, MASKED)
    ours = {"source_bias": near, "target_bias": near[:7, :7], "cross_bias": near[:7] * 0 + 2}
    theirs = {"source_bias": near, "target_bias": near[:7, :7]}
    assert_as_expected(model, batch, ours, theirs)  # the same number for all keys changes nothing


def source_of(model: Transformer, source_ids: Tensor, mask: Tensor) -> SourceAttention:
    decoder = model.decoder
    assert isinstance(decoder, Decoder)
    return SourceAttention(decoder.keys_values(model.encode(source_ids, PaddedAttention(mask))), mask)


def stepped(
    model: Transformer, target_ids: Tensor, source: SourceAttention, chunks: Sequence[int]
) -> tuple[Tensor, list[KeyValue]]:
    logits: list[Tensor] = []
    past: list[KeyValue] | None = None
    for ids in torch.split(target_ids, list(chunks), dim=1):
        step, past = model.step(ids, source, past)
        logits.append(step)
    assert past is not None
    return torch.cat(logits, dim=1), past


CHUNKS = [(1,) * 7, (2, 2, 2, 1), (4, 3), (1, 5, 1), (7,)]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"positions": "learned", "norm_first": True}], ids=str)
def test_steps_equal_one_pass(settings: dict[str, Any], chunks: tuple[int, ...]) -> None:
    model = random_transformer(**settings).requires_grad_(False)
    source_ids, target_ids, source_mask, _ = a_batch(model)
    whole = expected(model, (source_ids, target_ids, source_mask, torch.ones(3, 7)))[2]
    logits, past = stepped(model, target_ids, source_of(model, source_ids, source_mask), chunks)
    torch.testing.assert_close(logits, whole, rtol=0, atol=LIMIT)
    torch.testing.assert_close(model(source_ids, target_ids, source_mask), logits, rtol=0, atol=LIMIT)
    assert [tuple(t.shape) for pair in past for t in pair] == [(3, 2, 7, 16)] * 6


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_folded_beams_equal_each_alone(model: Transformer, chunks: tuple[int, ...]) -> None:
    source_ids, _, source_mask, _ = a_batch(model)
    target_ids = torch.randint(50, (9, 7), generator=torch.Generator().manual_seed(3))
    source = source_of(model, source_ids, source_mask)
    together, _ = stepped(model, target_ids, source, chunks)
    assert [k.shape[0] for k, _ in source.keys_values] == [3] * 3  # nothing of the source was repeated
    for r in range(9):
        own = source_ids[r // 3, : SOURCE_LENGTHS[r // 3]][None]
        alone, _ = stepped(model, target_ids[r : r + 1], source_of(model, own, torch.ones_like(own)), chunks)
        torch.testing.assert_close(together[r : r + 1], alone, rtol=0, atol=LIMIT)
        assert r == 0 or distance(together[r], together[r - 1]) > FAR


def test_keys_and_values_of_the_source_are_computed_once(model: Transformer) -> None:
    calls: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in model.named_modules()
        if name.endswith(("cross_attention.key", "cross_attention.value"))
    ]
    source_ids, target_ids, source_mask, _ = a_batch(model)
    source = source_of(model, source_ids, source_mask)
    assert len(hooks) == len(set(calls)) == len(calls) == 6
    stepped(model, target_ids, source, (1,) * 7)
    for hook in hooks:
        hook.remove()
    assert len(calls) == 6


class Halving(nn.Module):
    """An encoder without layers."""

    def forward(self, x: Tensor, attention: AttentionCache) -> Tensor:
        return x / 2


class LastLayerTwice(Decoder):
    def forward(self, x: Tensor, cache: AttentionCache, source: SourceAttention) -> Tensor:
        return super().forward(x, cache, source) + x


def test_modules_of_the_callers_own_run_in_pytorch(model: Transformer) -> None:
    own = Transformer(model.config, encoder=Halving(), decoder=LastLayerTwice(model.config)).eval()
    report = own.load_state_dict(model.state_dict(), strict=False)
    assert not report.missing_keys and all(n.startswith("encoder.") for n in report.unexpected_keys)
    batch = a_batch(model)
    memory, hidden, logits = actual(own, batch)
    assert torch.equal(memory, embedded(model, "source", batch[0]) / 2)
    reference = torch_reference(model)
    target = embedded(model, "target", batch[1])
    drop = torch.zeros(3, 9).masked_fill(batch[2] == 0, -math.inf)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    wanted = reference.decoder(target, memory, causal, memory_key_padding_mask=drop) + target
    real = batch[3].bool()
    torch.testing.assert_close(hidden[real], wanted[real], rtol=0, atol=LIMIT)
    torch.testing.assert_close(logits, own.output(hidden))


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (["encoder"], "encoder (Halving)"),
        (["decoder"], "decoder (LastLayerTwice)"),
        (["encoder", "decoder"], "encoder (Halving) and decoder (LastLayerTwice)"),
    ],
)
def test_modules_of_the_callers_own_are_neither_saved_nor_exported(
    model: Transformer, tmp_path: Path, parts: list[str], named: str
) -> None:
    given = {"encoder": Halving(), "decoder": LastLayerTwice(model.config)}
    own = Transformer(model.config, **{part: given[part] for part in parts})
    assert not Transformer(model.config, Encoder(model.config), Decoder(model.config)).custom_parts()
    assert " and ".join(own.custom_parts()) == named
    refused: list[Callable[[], object]] = [
        lambda: save_model(own, tmp_path / "new"),
        lambda: save_model(own, tmp_path / "new", "marian"),
        lambda: SourceEncoder(own),
        lambda: PortableTargetDecoder(own, False),
    ]
    for action in refused:
        with pytest.raises(ValueError) as caught:
            action()
        assert named in str(caught.value)
    assert not (tmp_path / "new").exists()
