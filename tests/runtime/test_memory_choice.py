"""Under a memory limit `load` takes the default precision if it fits, else the most exact one that does."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.precisions import PRECISIONS
from planforge.runtime import TextEncoder, TextGenerator, load
from planforge.runtime.bundle.artifact import EXACTNESS, rank_exactness
from planforge.runtime.errors import MemoryLimitError
from planforge.runtime.memory_needs import count_weight_bytes, sum_memory

from .test_memory_needs import MB, find


@pytest.mark.parametrize(("limit", "precision"), [(0, "fp32"), (-1, "int8")])
def test_load_takes_what_fits(
    llama_demo_bundle: Path, caplog: pytest.LogCaptureFixture, limit: int, precision: str
) -> None:
    """Of fp32, int8 and int4, which all passed."""
    need = sum_memory(*find(llama_demo_bundle, "decoder.ort.fp32"), 1, 512, True)
    limit += need.total
    with (
        caplog.at_level(logging.WARNING),
        TextGenerator.load(llama_demo_bundle, backend="ort-cpu", memory_limit=limit) as model,
    ):
        assert model.artifact.precision == precision
        assert model.generate("a", max_new_tokens=2).token_ids
    told = f"is loaded in int8: fp32 needs {need.total / 1e6:.1f} MB for 1 x 512 tokens: "
    assert (told in caplog.text) == (precision == "int8")


def test_a_cpu_has_no_memory_for_less_in_fp16(demo_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There its weights are widened to fp32, so that it needs no less; a GPU takes them as they are."""
    manifest, (full,) = find(demo_bundle, "decoder.portable.fp32")
    _, (half,) = find(demo_bundle, "decoder.portable.fp16")
    stored = manifest.count_weight_bytes(half)
    assert count_weight_bytes(manifest, [half], widens_half=False) == stored
    assert count_weight_bytes(manifest, [half], widens_half=True) == 2 * stored
    assert 2 * stored == pytest.approx(manifest.count_weight_bytes(full), rel=0.001)
    with load(demo_bundle, backend="ort-cpu", memory_limit=17 * MB) as model:  # for a shorter text
        assert model.artifact.precision == "fp32"
    for options in ({}, {"precision": "fp16"}):
        with pytest.raises(MemoryLimitError, match=r"15\.0 MB of weights in .* MB\. No other .* needs less$"):
            load(demo_bundle, backend="ort-cpu", memory_limit=12 * MB, **options)  # type: ignore[arg-type]
    assert not caplog.records


def test_the_most_exact_that_fits_is_taken_and_not_the_largest(
    llama_demo_bundle: Path, tmp_path: Path
) -> None:
    """The graph in int4 stands for others: w8a16 and fp16-kv8, more exact than int8, and w4a16, less so.

    In fp16-kv8 it has the weights of fp32, widened, but another cache.
    """
    limit = sum_memory(*find(llama_demo_bundle, "decoder.ort.fp32"), 1, 512, True).total - 1
    for name, taken in (("w8a16", "w8a16"), ("fp16-kv8", "fp16-kv8"), ("w4a16", "int8")):
        bundle = shutil.copytree(llama_demo_bundle, tmp_path / name)
        manifest = json.loads((bundle / "manifest.json").read_text())
        for artifact in manifest["artifacts"]:
            if artifact["precision"] == "int4":
                artifact["precision"] = name
                artifact["id"] = artifact["id"].replace("int4", name)
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        with load(bundle, backend="ort-cpu", memory_limit=limit) as model:
            assert model.artifact.precision == taken


def test_a_smaller_precision_is_told_where_there_is_one(llama_demo_bundle: Path) -> None:
    manifest, graphs = find(llama_demo_bundle, "decoder.ort.int8")
    size = count_weight_bytes(manifest, graphs, widens_half=True)
    told = rf" MB\. A precision of fewer bits needs less \(.*int8 has {size / 1e6:.1f} MB"
    with pytest.raises(MemoryLimitError, match=told):
        load(llama_demo_bundle, backend="ort-cpu", precision="fp32", memory_limit=size + 1)
    with pytest.raises(MemoryLimitError, match=r" MB\. No other precision fits either: the smallest has "):
        load(llama_demo_bundle, backend="ort-cpu", precision="fp32", memory_limit=1)


def test_every_precision_has_its_place_in_the_order() -> None:
    assert sorted(EXACTNESS) == sorted(PRECISIONS)
    assert [rank_exactness(name) for name in ("fp32", "int4-kv8", "other")] == [0, 16, 17]


def test_what_was_asked_for_or_did_not_pass_is_not_exchanged(
    own_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        MemoryLimitError, match=r"15\.0 MB of weights in fp32 .* MB\. No other .* needs less$"
    ):
        load(own_bundle, backend="ort-cpu", precision="fp32", memory_limit=12 * MB)
    with load(own_bundle, backend="ort-cpu", precision="fp32", memory_limit=17 * MB) as model:
        assert model.artifact.precision == "fp32"
    with pytest.raises(MemoryLimitError) as caught:
        load(own_bundle, memory_limit=7 * MB)
    assert caught.value.needed > caught.value.limit == 7 * MB
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    for artifact in manifest["artifacts"]:
        if artifact["precision"] == "fp16":
            artifact["gate"] = {"passed": False}
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        MemoryLimitError, match=r" MB\. No other verified precision that runs here needs less$"
    ):
        load(own_bundle, backend="ort-cpu", memory_limit=12 * MB)
    assert not caplog.records


def test_of_several_that_fit_the_one_that_loses_least_is_taken(whole_bundle: Path) -> None:
    """int8 is the default of a bundle with int8 and int4, none of them verified."""
    needs = {
        name: sum_memory(*find(whole_bundle, f"decoder.ort.{name}"), 1, 256, True)
        for name in ("int8", "int4")
    }
    for limit, precision in ((needs["int8"].total, "int8"), (needs["int8"].total - 1, "int4")):
        with load(whole_bundle, memory_limit=limit) as model:
            assert model.artifact.precision == precision


def test_an_encoder_runs_in_smaller_batches_before_it_changes_its_precision(
    head_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    """What is summed for one text is what its run needs. The graph in fp16 stands for one in int8."""
    bundle = shutil.copytree(head_bundle("classifier"), tmp_path / "bundle")
    content = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(re.sub(r'"(encoder\.portable\.)?fp16"', r'"\1int8"', content))
    manifest, graphs = find(bundle, "encoder.ort.fp32")
    need = sum_memory(manifest, graphs, 1, manifest.max_length, True)
    texts = ["bread " * manifest.max_length] * 8
    with TextEncoder.load(bundle, backend="ort-cpu", precision="fp32") as model:
        expected = model.classify(texts, logits=True)[0].logits
    with TextEncoder.load(bundle, backend="ort-cpu", memory_limit=need.total) as model:
        assert model.artifact.precision == "fp32"
        assert [one.logits for one in model.classify(texts, logits=True)] == [pytest.approx(expected)] * 8
    with TextEncoder.load(bundle, backend="ort-cpu", memory_limit=need.total - 1) as model:
        assert model.artifact.precision == "int8"
    options: Any = {"precision": "fp32", "memory_limit": need.total - 1}
    with (
        TextEncoder.load(bundle, backend="ort-cpu", **options) as model,
        pytest.raises(MemoryLimitError) as caught,
    ):
        model.classify(texts)
    assert caught.value.needed == need.total


def test_encoders_and_translators_take_what_fits(
    head_bundle: Callable[[str], Path], marian_bundle: Path
) -> None:
    """In fp16 a CPU needs no less: shorter texts and translations fit."""
    for bundle in (head_bundle("classifier"), marian_bundle):
        with load(bundle, backend="ort-cpu", precision="fp32") as model:
            manifest = model.bundle.manifest
            graphs = [model.artifact]
            if manifest.task == "translation":
                graphs.append(model.encoder.artifact)  # type: ignore[union-attr]
            length = min(manifest.max_length, *(graph.axis("tokens").max for graph in graphs))
            needed = sum_memory(manifest, graphs, 1, length, widens_half=True).total
        for limit in (needed, needed - 1):
            with load(bundle, backend="ort-cpu", memory_limit=limit) as model:
                assert model.artifact.precision == "fp32"
