"""optimum's exports of the families that have a model of ours: a second opinion, on the same fast path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from planforge.exporter.exporting import import_folder
from planforge.exporter.imported.optimum import write_for_transformers_4
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle

from ...conftest import Once
from ...helpers.llamas import WINDOW
from ...helpers.optimums import write_optimums_exports
from ...helpers.plans import only

LIMIT = 1e-4  # the issue's, on logits
# Gemma is like Gemma 2 without caps and windows, Qwen3's norms of heads are Gemma 3's too.
FAMILIES = (
    "llama 3.1", "mistral", "qwen2, windows", "smollm3",
    "gemma 2", "gemma 3", "phi-3", "olmo 2", "granite",
)  # fmt: skip
GRAPHS = ("decoder.ort.fp32", "decoder.portable.fp32")
TEXT = "In the beginning God created the heaven and the earth. And the earth was without form"


@pytest.fixture(scope="session")
def optimums(once: Callable[[str], Once], llama_bundle: Callable[[str], Path]) -> Path:
    """Checkpoints of `FAMILIES` as transformers 4 reads them, and beside them what optimum made of each."""
    with once("native-optimum") as (folder, first):
        if first:
            folder.mkdir()
            for name in FAMILIES:
                write_for_transformers_4(llama_bundle(name) / "checkpoint", folder / name)
            write_optimums_exports(folder, *FAMILIES)
    return folder


@pytest.fixture(scope="session")
def imported(
    once: Callable[[str], Once], optimums: Path, llama_bundle: Callable[[str], Path]
) -> Callable[[str], Path]:
    """A verified bundle of an export of `optimums`. Don't change it."""

    @functools.cache
    def bundle(name: str) -> Path:
        with once(f"native-{name}") as (folder, first):
            if first:
                options: dict[str, Any] = {
                    "precision": ["fp32"],
                    "target": ["cpu", "portable"],
                    "verify": "quick",
                }
                source = llama_bundle(name) / "checkpoint"
                import_folder(optimums / f"{name}.onnx", folder, source=source, **options)
        return folder

    return bundle


def compute_logits(model: TextGenerator, tokens: list[int]) -> Any:
    """The logits behind all but the first tokens, several on top of a past."""
    run = model.decoder.start(1, len(tokens))
    run.prefill([tokens[:3]])
    return np.concatenate([*run.extend(tokens[3:9]), *run.extend(tokens[9:])])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_our_own_export(
    name: str, imported: Callable[[str], Path], llama_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    ours = only(llama_bundle(name) / "bundle", tmp_path / "ours", "decoder.ort.fp32")
    with TextGenerator.load(ours) as model:
        tokens = model.tokenizer.encode(TEXT)
        assert len(tokens) > 2 * WINDOW + 3
        want = compute_logits(model, tokens)
        turn = [*tokens[:-3], *model.tokenizer.encode(" Let")]
        answer = model.generate(turn, max_new_tokens=8, ignore_eos=True)
    for graph in GRAPHS:
        with TextGenerator.load(only(imported(name), tmp_path / graph, graph)) as model:
            np.testing.assert_allclose(compute_logits(model, tokens), want, rtol=0, atol=LIMIT)
            model.generate(tokens, max_new_tokens=2, reuse_prompt=True)
            again = model.generate(turn, max_new_tokens=8, ignore_eos=True, reuse_prompt=True)
            assert again.prompt_tokens_reused == len(tokens) - 3
            assert again.token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("name", "windows", "softcap"),
    [
        ("mistral", [WINDOW, WINDOW], None),
        ("gemma 2", [WINDOW, None], 5.0),
        ("llama 3.1", [None, None], None),
    ],
)
def test_windows_and_caps_are_the_operators(
    name: str, windows: list[int | None], softcap: float | None, imported: Callable[[str], Path]
) -> None:
    bundle = imported(name)
    file = bundle / Bundle.open(bundle).manifest.artifact(GRAPHS[0]).file
    graph = onnx.load(file, load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    assert [found.get("local_window_size") for found in attributes] == windows
    assert [found.get("softcap") for found in attributes] == [softcap, softcap]
    assert not [node for node in graph.node if node.op_type == "Softmax"]
