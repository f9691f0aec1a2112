from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planforge.models import GPT2, GPT2Config
from planforge.models.checkpoint import load_model

from ..helpers.models import TINY, random_gpt2, reference_logits, tiny_gpt2

LIMIT = 1e-4  # the issue's, on logits

Pair = tuple[GPT2, transformers.GPT2LMHeadModel]


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=LIMIT)  # NaN is never close


def through_a_folder(model: transformers.GPT2LMHeadModel) -> GPT2:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, of which pytest keeps three
        model.save_pretrained(folder)
        ours = load_model(Path(folder))
    assert isinstance(ours, GPT2)
    return ours


def some_ids(vocab_size: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(ids: Tensor, padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The ids with `padding[b]` columns of row b blotted out, and the mask that says so."""
    mask = (torch.arange(ids.shape[1])[None] >= torch.tensor(padding)[:, None]).long()
    return ids * mask, mask


def in_chunks(model: GPT2, ids: Tensor, mask: Tensor, widths: Sequence[int]) -> Tensor:
    """Logits (B, T, V) of steps of the given widths, each on top of the last one's cache."""
    past = None
    out = []
    start = 0
    for width in widths:
        stop = start + width
        logits, past = model(ids[:, start:stop], past, mask[:, :stop])
        out.append(logits)
        start = stop
    assert start == ids.shape[1]
    return torch.cat(out, dim=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("tiny")
    reference = tiny_gpt2(folder)
    ours = load_model(folder)
    assert isinstance(ours, GPT2)
    return ours, reference


def test_logits_equal_transformers(tiny: Pair) -> None:
    ours, reference = tiny
    ids = some_ids(96, 3, 64)
    logits, present = ours(ids)
    assert_close(logits, reference_logits(reference, ids))
    assert [tuple(t.shape) for pair in present for t in pair] == [(3, 4, 64, 8)] * 4


@pytest.mark.parametrize(
    "overrides",
    [
        {"activation_function": "gelu"},
        {"activation_function": "gelu_pytorch_tanh"},
        {"activation_function": "relu"},
        {"activation_function": "silu"},
        {"n_inner": 24},
        {"n_inner": 200},
        {"n_head": 1},
        {"n_head": 32},
        {"n_layer": 1, "layer_norm_epsilon": 0.1},
        {"tie_word_embeddings": False},
        {"vocab_size": 1, "n_positions": 1, "n_embd": 1, "n_head": 1},
    ],
    ids=str,
)
def test_logits_equal_transformers_for_other_configs(overrides: dict[str, Any]) -> None:
    reference = random_gpt2(**TINY | overrides)
    ids = some_ids(reference.config.vocab_size, 2, min(20, reference.config.n_positions))
    assert_close(through_a_folder(reference)(ids)[0], reference_logits(reference, ids))


def test_every_layer_and_every_bias_counts(tiny: Pair) -> None:
    """Otherwise equal logits would say little: the reference has no idle weight."""
    _, reference = tiny
    ids = some_ids(96, 1, 64)
    want = reference_logits(reference, ids)
    for name, parameter in reference.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.5)
            moved = (reference_logits(reference, ids) - want).abs().max()
            parameter.copy_(kept)
        assert moved > 10 * LIMIT, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="gpt2, 124M"),
        pytest.param({"n_embd": 1024, "n_head": 16, "n_layer": 2}, id="gpt2-medium, 2 layers"),
    ],
)
def test_logits_equal_transformers_at_full_width(shape: dict[str, int]) -> None:
    reference = random_gpt2(**shape, initializer_range=0.05)
    ours = through_a_folder(reference)
    ids, mask = left_padded(some_ids(50257, 2, 40), [0, 7])
    want = reference_logits(reference, ids, mask)[mask.bool()]
    assert want.std() > 0.5  # logits of a published checkpoint's order of size, not all alike
    with torch.inference_mode():
        assert_close(ours(ids, None, mask)[0][mask.bool()], want)
        assert_close(in_chunks(ours, ids, mask, [32, 7, 1])[mask.bool()], want)


def test_cached_equals_uncached_token_by_token(tiny: Pair) -> None:
    ours, reference = tiny
    ids = some_ids(96, 2, 64)
    cached = in_chunks(ours, ids, torch.ones_like(ids), [1] * 64)
    assert_close(cached, ours(ids)[0])
    assert_close(cached, reference_logits(reference, ids))


@settings(deadline=None, max_examples=20)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    padding=st.lists(st.integers(0, 50), min_size=1, max_size=4),
)
def test_a_padded_batch_in_chunks_equals_each_row_alone(
    tiny: Pair, widths: list[int], padding: list[int]
) -> None:
    ours, reference = tiny
    length = sum(widths)
    padding = [min(count, length - 1) for count in padding]  # whole chunks of a row may be padding
    ids, mask = left_padded(some_ids(96, len(padding), length), padding)
    got = in_chunks(ours, ids, mask, widths)
    assert_close(got[mask.bool()], reference_logits(reference, ids, mask)[mask.bool()])
    for b, count in enumerate(padding):
        assert_close(got[b, count:], ours(ids[b : b + 1, count:])[0][0])


def test_what_padding_holds_makes_no_difference(tiny: Pair) -> None:
    ours, _ = tiny
    ids, mask = left_padded(some_ids(96, 2, 12), [5, 0])
    other = torch.where(mask.bool(), ids, 77)
    assert_close(ours(ids, None, mask)[0][mask.bool()], ours(other, None, mask)[0][mask.bool()])


def test_a_row_of_padding_alone_is_finite_and_leaves_the_others_as_they_are(tiny: Pair) -> None:
    ours, _ = tiny
    ids, mask = left_padded(some_ids(96, 2, 12), [12, 0])
    for widths in ([12], [5, 7], [1] * 12):
        logits = in_chunks(ours, ids, mask, widths)
        assert torch.isfinite(logits).all()
        assert_close(logits[1], ours(ids[1:])[0][0])


def test_the_past_that_is_given_stays_as_it_is(tiny: Pair) -> None:
    ours, _ = tiny
    _, past = ours(some_ids(96, 1, 5))
    before = [t.clone() for pair in past for t in pair]
    first, _ = ours(some_ids(96, 1, 3), past)
    second, _ = ours(some_ids(96, 1, 3), past)
    assert torch.equal(first, second)
    assert all(torch.equal(a, t) for a, t in zip(before, (t for p in past for t in p), strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in TINY if name.startswith("n_") for value in (0, -1, 1.5, "8", None)),
        *(("n_inner", value) for value in (0, -4, 2.5, "8", True)),
        ("vocab_size", 0),
        ("n_layer", True),
        ("n_head", 5),  # does not divide n_embd
        ("activation_function", "mish"),
        ("activation_function", None),
        ("activation_function", ["gelu"]),
        *(("layer_norm_epsilon", value) for value in (-1e-5, math.nan, math.inf, "1e-5", None, True)),
        *(("tie_word_embeddings", value) for value in ("false", 0, None)),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*"):
        GPT2Config(**{"n_embd": 32, "n_head": 4, name: value})  # type: ignore[arg-type]


def test_an_unknown_activation_names_those_that_work() -> None:
    with pytest.raises(ValueError, match=r"'mish' is not one of .*'gelu_new'"):
        GPT2Config(activation_function="mish")
