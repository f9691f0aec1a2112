"""A memory limit counts the logits of all words for each token, of which SPLADE makes its weights.

V vocabulary
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder

from planforge.exporter import export
from planforge.runtime import TextEncoder
from planforge.runtime.activations import count_batch_bytes
from planforge.runtime.bundle.artifact import SPARSE
from planforge.runtime.bundle.manifest import Axis, TensorSpec
from planforge.runtime.encode.encoder import Encoder, Outputs, count_section_bytes
from planforge.runtime.encode.results import SparseEmbedding
from planforge.runtime.errors import MemoryLimitError
from planforge.runtime.memory_budget import MemoryBudget

from ..helpers import retrieval_folders
from ..helpers.retrieval_folders import WORDS
from .test_memory_peaks import MB, measure

V = 50_000
LONG = 64  # tokens of the model's longest text
NEAR = 1e-5
RANDOM = np.random.default_rng(5)
TEXTS = [" ".join(RANDOM.choice(WORDS[7:-2], LONG - 2)) for _ in range(12)]
# Prints the bytes that were counted, and those that the process took.
SPLADE = """
    from planforge.runtime.bundle.artifact import SPARSE
    from planforge.runtime.encode.encoder import count_section_bytes
    model.embed_sparse("cat", max_active_dims=1)
    ctypes.CDLL(None).malloc_trim(0)
    before = read()
    model.embed_sparse(["cat " * 62] * 10, max_active_dims=1)
    after = read()
    outputs = model.encoder.list_outputs([SPARSE])
    print(json.dumps([count_section_bytes(model.encoder.config, outputs, 10, 64, 0), after - before]))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SPLADE of many words, beside its folder."""
    root = tmp_path_factory.mktemp("words")
    torch.manual_seed(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval_folders, "WORDS", [*WORDS, *(f"w{n}" for n in range(V - len(WORDS)))])
        patch.setitem(retrieval_folders.SIZE, "vocab_size", V)
        retrieval_folders.write_splade(root / "folder")
    return export(root / "folder", root / "bundle", target=["cpu"], precision=["fp32"]).bundle


@pytest.fixture
def model(bundle: Path) -> Iterator[TextEncoder]:
    with TextEncoder.load(bundle) as model:
        yield model


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The texts of each batch that runs."""
    counts: list[int] = []
    run = Encoder.run_batch

    def count(self: Encoder, pieces: Sequence[Any], *arguments: Any) -> Any:
        counts.append(len(pieces))
        return run(self, pieces, *arguments)

    monkeypatch.setattr(Encoder, "run_batch", count)
    return counts


def densify(embeddings: list[SparseEmbedding]) -> Any:
    """Return weights (N, V)."""
    dense = np.zeros((len(embeddings), V), np.float32)
    for row, one in zip(dense, embeddings, strict=True):
        row[one.indices] = one.values
    return dense


def count_logits(tokens: int) -> int:
    """The bytes of all words' logits of some tokens in float32, before and after they are masked."""
    return 2 * tokens * V * 4


def count_needed(model: TextEncoder, count: int, tokens: int) -> int:
    """What a limit counts for texts of so many tokens."""
    return count_section_bytes(model.encoder.config, model.encoder.list_outputs([SPARSE]), count, tokens, 0)


def test_tokens_times_words_are_counted() -> None:
    config = {"intermediate_size": 40, "hidden_size": 10, "num_attention_heads": 2}
    batch = Axis("batch", 1, 1, 8)
    for words in (1000, 2000):
        weights = TensorSpec("w", SPARSE, "float32", (batch, words))
        counted = count_section_bytes(config, Outputs([weights]), 3, 10, 0)
        assert counted - count_batch_bytes(config, 30, 10) == 2 * 30 * words * 4 + 3 * words * 4
    # Of many words fewer tokens run together: 128 MiB of logits.
    weights = TensorSpec("w", SPARSE, "float32", (batch, 100_000))
    counted = count_section_bytes(config, Outputs([weights]), 500, 10, 0)
    assert counted - count_batch_bytes(config, 335, 10) == 2 * 335 * 100_000 * 4 + 500 * 100_000 * 4


def test_long_texts_run_in_smaller_batches(bundle: Path, model: TextEncoder, batches: list[int]) -> None:
    free = densify(model.embed_sparse(TEXTS))
    theirs = SparseEncoder(str(bundle.parent / "folder"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(free, theirs.to_dense().numpy(), atol=NEAR)
    assert sum(batches) == len(TEXTS) and 4 < max(batches) <= 2**25 // (LONG * V)
    batches.clear()
    room = count_needed(model, 3, LONG)
    assert count_logits(3 * LONG) < room < count_logits(4 * LONG)
    with TextEncoder.load(bundle, memory_limit=model.encoder.budget.weight_bytes + room) as limited:
        np.testing.assert_allclose(densify(limited.embed_sparse(TEXTS)), free, atol=NEAR)
        assert batches == [3] * 4
        assert limited.encoder.budget.count_held() == 0


def test_a_text_that_does_not_fit_is_refused_with_the_numbers(model: TextEncoder) -> None:
    room = count_needed(model, 1, LONG // 2)
    model.encoder.budget = MemoryBudget(room)
    with pytest.raises(MemoryLimitError, match=f"for 1 text of {LONG} tokens with activations") as caught:
        model.embed_sparse(TEXTS)
    words = r"^([\d.]+) MB are needed.* memory_limit is ([\d.]+) MB.* up to (\d+) tokens fit$"
    needed, limit, fitting = map(float, re.findall(words, str(caught.value))[0])
    assert count_logits(LONG) < caught.value.needed < 1.1 * count_logits(LONG)
    assert needed == pytest.approx(caught.value.needed / MB, abs=0.05)
    assert limit == pytest.approx(room / MB, abs=0.05)
    assert fitting == LONG // 2
    short = [" ".join(text.split()[: LONG // 2 - 2]) for text in TEXTS]
    assert len(model.embed_sparse(short)) == len(TEXTS)
    with pytest.raises(MemoryLimitError, match=f"for 1 text of {LONG // 2 + 1} tokens"):
        model.embed_sparse(f"{short[0]} cat")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
def test_what_is_counted_bounds_what_is_taken(bundle: Path) -> None:
    counted, taken = measure(bundle, SPLADE)
    assert counted > count_logits(10 * LONG)
    assert counted / 3 < taken <= 1.05 * counted  # and what an engine adds to two copies of all logits
