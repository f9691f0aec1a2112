"""What an export holds in memory: half precision becomes fp32 piece by piece, while it is written."""

from __future__ import annotations

import mmap
import re
import shutil
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from planforge.exporter import export, exporting, memory
from planforge.exporter.calibration import blocks
from planforge.exporter.memory import Reclaimer, give_back_mapped_pages
from planforge.exporter.passes import weights
from planforge.exporter.passes.weights import LazyMapping, ParameterTensor, read_array
from planforge.exporter.reference_model import load_our_model, offload_weights, restore_weights
from planforge.exporter.tasks import piecewise
from planforge.exporter.tasks.piecewise import PiecewiseCache
from planforge.exporter.tasks.rounding import ExchangedWeights
from planforge.exporter.tasks.verifier import Verifier
from planforge.models import DynamicCache, Llama, load_model

from ..helpers.llamas import tiny_llama

PIECE = 2**12  # bytes; the largest weight has 128 times as many


class LiveBytes:
    """Counts the bytes of arrays that exist at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.total = 0

    def watch(self, array: Any) -> Any:
        size = array.nbytes
        self.now += size
        self.total += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(array, self.drop, size)
        return array

    def drop(self, size: int) -> None:
        self.now -= size


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bf16 shards, and the same numbers as one file in fp32."""
    folder = tmp_path_factory.mktemp("written")
    model = tiny_llama(folder / "single", "qwen2", num_hidden_layers=2)
    model.to(torch.bfloat16).save_pretrained(folder / "shards", max_shard_size="60KB")
    model.to(torch.float32).save_pretrained(folder / "single")
    for file in (folder / "single").glob("tokenizer*.json"):
        shutil.copy(file, folder / "shards")
    return folder


def export_unverified(checkpoint: Path, bundle: Path) -> Path:
    export(checkpoint, bundle, target=["cpu"], precision=["fp32"], verify=False)
    (data,) = (bundle / "onnx").glob("weights.fp32-*.data")
    return data


def test_an_unverified_export_converts_each_weight_once_and_holds_a_piece(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = export_unverified(written / "single", tmp_path / "fp32")
    live = LiveBytes()
    monkeypatch.setattr(weights, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(weights, "read_array", lambda tensor: live.watch(read_array(tensor)))
    sharded = export_unverified(written / "shards", tmp_path / "bf16")
    assert sharded.read_bytes() == single.read_bytes()
    numbers = sharded.stat().st_size
    assert live.peak <= 2 * PIECE  # one is made while the last is there
    assert numbers <= live.total < 1.1 * numbers  # small ones, which lie in the .onnx, are beside them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_is_written_in_pieces_as_it_is_at_once(
    dtype: torch.dtype, turned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 100)
    tensor = (torch.randn(37, 5) * 9).to(dtype)
    parameter = ParameterTensor(tensor, "weight", transposed=turned)
    tensor = tensor.T if turned else tensor
    wanted = (tensor.float() if dtype.itemsize == 2 else tensor).numpy()
    assert parameter.dtype == ir.DataType.from_numpy(wanted.dtype)
    assert tuple(parameter.shape) == tensor.shape
    np.testing.assert_array_equal(parameter.numpy(), wanted)
    with (tmp_path / "data").open("wb") as file:
        file.write(b"before")
        parameter.tofile(file)
        file.write(b"behind")
    assert (tmp_path / "data").read_bytes() == b"before" + wanted.tobytes() + b"behind"


def test_a_number_alone_is_a_parameter_too(tmp_path: Path) -> None:
    parameter = ParameterTensor(torch.tensor(2.5, dtype=torch.bfloat16), "scale")
    with (tmp_path / "data").open("wb") as file:
        parameter.tofile(file)
    assert (tmp_path / "data").read_bytes() == np.float32(2.5).tobytes()
    assert parameter.numpy().shape == tuple(parameter.shape) == ()


@pytest.mark.parametrize("past", [0, 7])
def test_attention_in_pieces_is_that_at_once(
    written: Path, monkeypatch: pytest.MonkeyPatch, past: int
) -> None:
    """To rounding: products of fewer rows may add in another order."""
    model = load_model(written / "single")
    assert isinstance(model, Llama)
    ids = torch.arange(2 * 40).reshape(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    monkeypatch.setattr(piecewise, "SCORE_BYTES", 2 * 4 * 40 * 4 * 9)  # of 9 queries

    def compute(kind: type[DynamicCache]) -> torch.Tensor:
        first = kind(model.empty_past(2), mask[:, :past])
        if past:
            model.hidden_states(ids[:, :past], first)
        cache = kind(first.present or model.empty_past(2), mask)
        return model.hidden_states(ids[:, past:], cache)

    with torch.no_grad():
        torch.testing.assert_close(compute(PiecewiseCache), compute(DynamicCache), rtol=1e-5, atol=1e-5)


def test_a_model_rests_in_its_files_and_wakes_as_it_was(written: Path) -> None:
    model = load_our_model(written / "shards", 64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = ParameterTensor(
        dict(model.named_parameters())["layers.0.mlp.up_proj.weight"], "w", transposed=True
    )
    written_before = stored.numpy().copy()
    offload_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.embed_tokens.weight  # type: ignore[union-attr]
    arrays = LazyMapping(dict(model.named_parameters()), read_array)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name].numpy())
    np.testing.assert_array_equal(stored.numpy(), written_before)
    restore_weights(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name])


def test_pages_are_given_back_while_weights_become_fp32(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `restore_weights`, and by a rounding that ends: else the weights' files are in memory as well."""
    model = load_our_model(written / "shards", 64)
    given: list[int] = []
    monkeypatch.setattr(memory, "give_back_mapped_pages", lambda: given.append(1))
    monkeypatch.setattr(Reclaimer, "EVERY", 2**12)
    offload_weights(model)
    restore_weights(model)
    assert len(given) > 4
    exchanged = ExchangedWeights(model)
    exchanged.release(model.parameters())
    given.clear()
    exchanged.put_back()
    assert len(given) > 4


def test_while_graphs_run_a_verified_model_rests(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    types: list[set[torch.dtype]] = []
    compare = Verifier.compare

    def load(*arguments: Any, **options: Any) -> Any:
        models.append(load_our_model(*arguments, **options))
        return models[-1]

    def watch(*arguments: Any) -> Any:
        types.append({parameter.dtype for parameter in models[0].parameters()})
        return compare(*arguments)

    monkeypatch.setattr(exporting, "load_our_model", load)
    monkeypatch.setattr(Verifier, "compare", watch)
    result = export(written / "shards", tmp_path / "B", target=["cpu"], precision=["fp32"])
    assert result.report is not None and result.report.passed
    assert types == [{torch.bfloat16}]


def test_while_gptq_rounds_and_files_are_written_the_model_rests_and_nothing_changes(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of fp32 weights, whose model holds them all the time."""
    models: list[Any] = []
    types: dict[str, set[torch.dtype]] = {}
    left: list[int] = []

    def load(*arguments: Any, **options: Any) -> Any:
        models.append(load_our_model(*arguments, **options))
        return models[-1]

    def watch(module: Any, name: str) -> None:
        work = getattr(module, name)

        def watched(*arguments: Any) -> Any:
            types[name] = {parameter.dtype for parameter in models[-1].parameters()}
            found = work(*arguments)
            if name == "round_weights":
                left.append(len(arguments[2]))
            return found

        monkeypatch.setattr(module, name, watched)

    monkeypatch.setattr(exporting, "load_our_model", load)
    watch(blocks, "round_weights")
    watch(exporting, "write_graphs")
    data = []
    for folder in ("single", "shards"):
        bundle = tmp_path / folder
        export(written / folder, bundle, target=["cpu"], precision=["int4", "int8"], verify=False)
        data.append({path.name.split("-")[0]: path.read_bytes() for path in bundle.glob("onnx/*.data")})
    assert types == {name: {torch.bfloat16} for name in ("round_weights", "write_graphs")}
    assert left == [0, 0]  # rows of weights that are done
    assert data[0] == data[1]
    assert len(data[0]) == 2


def test_weights_in_fp32_are_mapped_once(written: Path) -> None:
    model = load_our_model(written / "single", 64)
    before = {parameter.data_ptr() for parameter in model.parameters()}
    offload_weights(model)
    assert before == {parameter.data_ptr() for parameter in model.parameters()}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_pages_of_weights_files_are_given_back_but_those_that_were_changed(tmp_path: Path) -> None:
    size = 2**22
    maps = []
    for name in ("read.safetensors", "changed.safetensors", "other.bin"):
        (tmp_path / name).write_bytes(b"w" * size)
        with (tmp_path / name).open("r+b") as file:
            kind = mmap.PROT_READ if name.startswith("read") else mmap.PROT_READ | mmap.PROT_WRITE
            maps.append(mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=kind))
        assert maps[-1][:].count(b"w") == size
    maps[1][5:8] = b"own"
    give_back_mapped_pages()

    def count_resident(name: str) -> int:
        smaps = Path("/proc/self/smaps").read_text()
        found = re.search(rf"{re.escape(str(tmp_path / name))}\n(?:.*\n)*?Rss: +([0-9]+) kB", smaps)
        assert found is not None
        return 1024 * int(found[1])

    assert count_resident("read.safetensors") == 0
    assert count_resident("other.bin") == size
    assert maps[1][:10] == b"wwwwwownww"
    assert maps[0][:] == b"w" * size


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_pages_are_given_back_only_while_their_owner_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address at which a weights file was mapped may be another thread's heap by now."""
    (tmp_path / "w.safetensors").write_bytes(b"w" * 2**22)
    storage: Any = torch.UntypedStorage.from_file(str(tmp_path / "w.safetensors"), False, 2**22)
    tensor = torch.tensor([], dtype=torch.uint8).set_(storage)
    assert int(tensor.sum()) == 2**22 * ord("w")
    heap = torch.full((2**20,), 7.0)
    begin = heap.data_ptr()
    stale = [(begin, begin + heap.nbytes), (storage.data_ptr(), storage.data_ptr() + 2**22)]
    monkeypatch.setattr(memory, "find_mapped_weights", lambda smaps: stale)
    give_back_mapped_pages()
    assert bool((heap == 7).all())
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{re.escape(str(tmp_path / 'w.safetensors'))}\n(?:.*\n)*?Rss: +([0-9]+) kB", smaps)
    assert found is not None
    assert int(found[1]) == 0
    assert int(tensor.sum()) == 2**22 * ord("w")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_other_threads_can_build_tuples_meanwhile() -> None:
    """Python refuses to finish a tuple that somebody else holds; what looks at all objects holds it."""
    many = [[number] for number in range(100_000)]  # so that looking at all takes a while
    ended = threading.Event()
    errors: list[SystemError] = []

    def build() -> None:
        while not (ended.is_set() or errors):
            try:
                tuple(number for number in range(2000))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(20):
        give_back_mapped_pages()
    ended.set()
    thread.join()
    assert len(many) == 100_000 and not errors
