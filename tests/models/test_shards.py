"""Checkpoints in shards and in half precision are those in one file and fp32; faults are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planforge.models import Llama
from planforge.models.checkpoint import load_model
from planforge.models.folder import INDEX, read_headers

from ..helpers.llamas import tiny_llama
from ..helpers.models import reference_logits, tiny_gpt2

IDS = torch.arange(24).reshape(2, 12)
SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of one tiny Llama: bf16 in shards, and the same numbers as one file in fp32."""
    folder = tmp_path_factory.mktemp("written")
    model = tiny_llama(folder / "published", "qwen3", **SMALL)
    model.to(torch.bfloat16).save_pretrained(folder / "shards", max_shard_size="60KB")
    model.to(torch.float32).save_pretrained(folder / "single")
    assert len(list((folder / "shards").glob("model-*.safetensors"))) > 3
    assert {t.dtype for t in load_file(folder / "single/model.safetensors").values()} == {torch.float32}
    return folder


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "shards", tmp_path / "shards"))


def list_shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def read_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]  # type: ignore[no-any-return]


def write_map(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert message.endswith("; download the checkpoint again")
    return message


def test_shards_in_bf16_are_the_same_model_as_one_file_in_fp32(written: Path) -> None:
    single = load_model(written / "single")
    sharded = load_model(written / "shards")
    assert {parameter.dtype for parameter in sharded.parameters()} == {torch.float32}
    for name, tensor in single.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], tensor), name


def test_shards_in_bf16_compute_what_transformers_computes(written: Path) -> None:
    import transformers

    reference: Any = transformers.Qwen3ForCausalLM.from_pretrained(written / "shards", dtype=torch.float32)
    model = load_model(written / "shards")
    assert isinstance(model, Llama)
    torch.testing.assert_close(model(IDS)[0], reference_logits(reference.eval(), IDS), rtol=0, atol=1e-4)


def test_weights_that_keep_their_types_are_views_of_the_files(written: Path) -> None:
    kept = load_model(written / "shards", keep_types=True)
    single = load_model(written / "single")
    parameters = dict(kept.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    maps = Path("/proc/self/maps")
    for name, parameter in single.named_parameters():
        assert torch.equal(parameters[name].float(), parameter), name
        if maps.exists() and "qkv_proj" not in name:  # three weights of the files, joined
            assert lies_in_a_file(parameters[name], maps.read_text()), name


def lies_in_a_file(tensor: torch.Tensor, maps: str) -> bool:
    for line in maps.splitlines():
        addresses, *_, last = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < end:
            return last.endswith(".safetensors")
    return False


def test_what_is_computed_of_published_weights_is_fp32_either_way(tmp_path: Path) -> None:
    """Gemma's norms get 1 added: in bf16 that would round."""
    model = tiny_llama(tmp_path / "published", "gemma 2", **SMALL)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    kept = dict(load_model(tmp_path / "bf16", keep_types=True).named_parameters())
    for name, parameter in load_model(tmp_path / "bf16").named_parameters():
        assert torch.equal(kept[name].float(), parameter), name
        assert kept[name].dtype == (torch.float32 if name.endswith("norm.weight") else torch.bfloat16)


def test_the_bytes_that_are_read_are_reported(written: Path) -> None:
    reports: list[tuple[int, int]] = []
    load_model(written / "shards", report=lambda done, total: reports.append((done, total)))
    size = sum(path.stat().st_size for path in list_shards(written / "shards"))
    assert {total for _, total in reports} == {size}
    done = [count for count, _ in reports]
    assert done == sorted(done) and 0.8 * size < done[-1] <= size  # the rest are headers


def test_headers_say_where_each_tensor_lies(shards: Path) -> None:
    headers = read_headers(shards)
    assert {name: header.path.name for name, header in headers.items()} == read_map(shards)
    table = headers["model.embed_tokens.weight"]
    assert (table.shape, table.dtype) == ((2048, 64), "BF16")


def test_a_missing_shard_names_what_it_should_hold(shards: Path) -> None:
    lost = list_shards(shards)[1]
    lost.unlink()
    first, *others = [name for name, shard in read_map(shards).items() if shard == lost.name]
    assert f"lists {lost.name}, which is missing, for {first} and {len(others)} more" in refusal(shards)


def test_a_tensor_that_its_shard_lacks_is_named(shards: Path) -> None:
    shard = list_shards(shards)[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file({n: t for n, t in tensors.items() if n != name}, shard)
    assert f"{shards / INDEX} lists {name} in {shard.name}, which lacks it" in refusal(shards)


def test_a_tensor_in_another_shard_than_listed_is_named(shards: Path) -> None:
    listed = read_map(shards)
    first, other = (path.name for path in list_shards(shards)[:2])
    name = next(name for name, shard in listed.items() if shard == other)
    write_map(shards, {**listed, name: first})
    assert f"lists {name} in {first}, but it lies in {other}" in refusal(shards)


def test_a_tensor_in_two_shards_is_named_with_both(shards: Path) -> None:
    one, other = list_shards(shards)[:2]
    tensors = load_file(one)
    name = sorted(tensors)[0]
    save_file({**load_file(other), name: tensors[name].clone()}, other)
    assert f"{shards}: {name} lies in {one.name} and in {other.name}" in refusal(shards)


def test_a_tensor_that_the_index_lists_twice_is_named_with_both(shards: Path) -> None:
    name, shard = next(iter(read_map(shards).items()))
    other = next(path.name for path in list_shards(shards) if path.name != shard)
    path = shards / INDEX
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "{other}",', 1))
    assert f"{path} lists {name} twice, in {other} and in {shard}" in refusal(shards)


@pytest.mark.parametrize("cut", [lambda content: content[:-1], lambda content: content[:4]])
def test_a_shard_that_is_cut_short_is_named(shards: Path, cut: Callable[[bytes], bytes]) -> None:
    shard = list_shards(shards)[2]
    shard.write_bytes(cut(shard.read_bytes()))
    assert f"{shard} is not a whole safetensors file" in refusal(shards)


def test_shards_that_nothing_lists_are_left_alone(shards: Path, written: Path) -> None:
    (shards / "model-00009-of-00009.safetensors").write_bytes(b"left by an earlier download")
    assert len(load_model(shards).state_dict()) == len(load_model(written / "shards").state_dict())


def test_one_file_beside_an_index_is_read_without_it(tmp_path: Path) -> None:
    tiny_gpt2(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    load_model(tmp_path)
