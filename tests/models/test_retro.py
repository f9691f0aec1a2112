"""RETRO in PyTorch: labml_nn's logits, what each token sees, and settings that are refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planforge.models import Retro, load_model, save_model

from ..helpers.retro import LABML, TINY, make_retro, write_retro

M = TINY["chunk_length"]


@pytest.fixture(scope="module")
def labml() -> Iterator[Any]:
    """The module of labml_nn that has the model; of the package `labml` it wants a printer alone."""
    spec = importlib.util.find_spec("labml_nn")
    assert spec is not None, "make install installs labml-nn"
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "transformers" / "retro" / "model.py"
    logger = ModuleType("labml.logger")
    logger.inspect = print  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "labml", ModuleType("labml"))
        patch.setitem(sys.modules, "labml.logger", logger)
        found = importlib.util.spec_from_file_location("labml_retro", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        yield module


def take(weights: dict[str, Tensor], name: str, module: nn.Module, **parts: str) -> None:
    """Add a module's weights under our names; `parts` are its own by ours."""
    for ours, theirs in parts.items():
        for kind, tensor in getattr(module, theirs).state_dict().items():
            weights[f"{name}.{ours}.{kind}"] = tensor


def read_labml(
    reference: Any, crosses: tuple[int, ...], encoder_crosses: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return the weights of a model of labml_nn under our names."""
    weights = {"words.weight": reference.emb.weight}
    weights |= {f"output.{kind}": tensor for kind, tensor in reference.read.state_dict().items()}
    encoder = reference.encoder
    weights |= {f"encoder.chunk_norm.{kind}": tensor for kind, tensor in encoder.norm_h.state_dict().items()}
    weights |= {f"encoder.norm.{kind}": tensor for kind, tensor in reference.norm_e.state_dict().items()}
    attention = {name: name for name in ("norm", "query", "key", "value", "output")}
    for prefix, stack, cross, numbers in (
        ("", reference, reference.cca, crosses),
        ("encoder.", encoder, encoder.ca, encoder_crosses),
    ):
        for layer, (own, feed_forward) in enumerate(zip(stack.attn, stack.ffw, strict=True)):
            take(weights, f"{prefix}layers.{layer}.attention", own, **attention)
            take(
                weights,
                f"{prefix}layers.{layer}.feed_forward",
                feed_forward,
                norm="norm",
                inner="lin1",
                output="lin2",
            )
        for number, module in zip(numbers, cross, strict=True):
            take(weights, f"{prefix}layers.{number}.cross", module, **attention)
    return weights


@pytest.mark.parametrize("length", [M, 3 * M, 4 * M + 3])
def test_logits_are_labmls(labml: Any, length: int) -> None:
    """labml_nn follows the paper but for LayerNorm, ReLU, biases and rotary positions, which are settings."""
    model = make_retro(**LABML)
    c = model.config
    encoder = labml.NearestNeighborEncoder(
        M, c.encoder_layers, {1}, c.encoder_size, c.encoder_heads, c.encoder_head_size, c.intermediate_size
    )
    reference = labml.RetroModel(
        c.vocab_size,
        c.hidden_size,
        c.num_hidden_layers,
        {1, 2},
        M,
        c.num_attention_heads,
        c.head_size,
        c.intermediate_size,
        encoder=encoder,
    ).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.requires_grad and parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    model.load_state_dict(read_labml(reference, (1, 2), (1,)))
    ids = torch.randint(c.vocab_size, (3, length), generator=random)
    shape = (3, length // M, c.neighbours, c.neighbour_length)
    neighbours = torch.randint(c.vocab_size, shape, generator=random)
    with torch.no_grad():
        wanted = reference(ids, neighbours)
        torch.testing.assert_close(model(ids, neighbours), wanted, rtol=0, atol=1e-5)
        without = (model(ids) - wanted).abs().amax((0, 2))
    assert (without > 1e-3).tolist() == [place >= M - 1 for place in range(length)]


@pytest.fixture(scope="module")
def model() -> Retro:
    return make_retro()


def sample(model: Retro, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the ids (1, T) and the neighbours (1, L, K, R) of a random text."""
    random = torch.Generator().manual_seed(seed)
    c = model.config
    shape = (1, length // M, c.neighbours, c.neighbour_length)
    ids = torch.randint(c.vocab_size, (1, length), generator=random)
    return ids, torch.randint(c.vocab_size, shape, generator=random)


def find_changed(one: Tensor, other: Tensor) -> list[int]:
    """Return the tokens whose logits differ."""
    return ((one - other).abs().amax((0, 2)) > 1e-6).nonzero().flatten().tolist()


def test_no_token_sees_a_later_one(model: Retro) -> None:
    """Each token is changed, beside the same neighbours."""
    ids, neighbours = sample(model, 4 * M + 3)
    with torch.no_grad():
        wanted = model(ids, neighbours)
        for place in range(ids.shape[1]):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % model.config.vocab_size
            assert min(find_changed(model(other, neighbours), wanted)) == place


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("neighbour", range(2))
def test_neighbours_reach_from_their_chunks_last_token_on(model: Retro, number: int, neighbour: int) -> None:
    """Each token of each neighbour is changed."""
    ids, neighbours = sample(model, 4 * M + 3)
    with torch.no_grad():
        wanted = model(ids, neighbours)
        for place in range(model.config.neighbour_length):
            other = neighbours.clone()
            other[0, number, neighbour, place] = (
                other[0, number, neighbour, place] + 1
            ) % model.config.vocab_size
            changed = find_changed(model(ids, other), wanted)
            assert min(changed) == M * number + M - 1


def test_padding_of_neighbours_is_not_read(model: Retro) -> None:
    ids, neighbours = sample(model, 3 * M)
    mask = torch.ones_like(neighbours)
    mask[0, 0, 1] = 0  # a neighbour that is missing
    mask[0, 1, 0, 5:] = 0  # one that is short
    mask[0, 2] = 0  # no neighbour at all
    other = torch.where(mask.bool(), neighbours, (neighbours + 1) % model.config.vocab_size)
    with torch.no_grad():
        wanted = model(ids, neighbours, mask)
        torch.testing.assert_close(model(ids, other, mask), wanted, rtol=0, atol=1e-6)
        last = (model(ids, neighbours) - wanted)[0, -1].abs().max()
    assert last > 1e-3


def test_a_row_without_neighbours_reads_none(model: Retro) -> None:
    ids, neighbours = sample(model, 3 * M + 2)
    with torch.no_grad():
        masked = model(ids, neighbours, torch.zeros_like(neighbours))
        torch.testing.assert_close(masked, model(ids), rtol=0, atol=1e-6)


def test_a_saved_model_is_read_again(tmp_path: Path) -> None:
    model = make_retro()
    folder = write_retro(tmp_path / "checkpoint")
    again = load_model(folder)
    ids, neighbours = sample(model, 3 * M)
    assert torch.equal(again(ids, neighbours), model(ids, neighbours))
    with pytest.raises(ValueError, match="model_type='gpt2' is not one of retro"):
        save_model(model, tmp_path / "other", "gpt2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cross_layers": (3,)}, r"cross_layers=\(3,\) must name different layers from 0 to 2"),
        ({"cross_layers": ()}, r"cross_layers=\(\) must name different layers"),
        ({"cross_layers": (1, 1)}, "must name different layers"),
        ({"cross_layers": 1}, "must be a list of layers' numbers"),
        ({"encoder_cross_layers": ["0"]}, "must be a list of layers' numbers"),
        ({"chunk_length": 1}, "chunk_length=1"),
        ({"neighbours": 0}, "neighbours=0"),
        ({"head_size": 15}, "head_size=15 and encoder_head_size=16 must be even"),
        ({"neighbour_length": 7}, "neighbour_length=7 must be at least chunk_length=8"),
        ({"max_positions": 15}, "max_positions=15 must be at least two chunks of 8 tokens"),
        ({"norm": "batch"}, "norm='batch' is not one of rms, layer"),
        ({"encoder_words": False}, "encoder_size=64 must be hidden_size=32"),
        ({"activation": "swoosh"}, "swoosh"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_retro(**settings)


def test_neighbours_of_another_number_of_chunks_are_refused(model: Retro) -> None:
    ids, neighbours = sample(model, 3 * M)
    with pytest.raises(ValueError, match=r"neighbour_ids has shape \(1, 2, 2, 16\); 24 tokens of 1 rows"):
        model(ids, neighbours[:, :2])
