"""Embeddings and searches for an event loop: they are what the others give, and sentence-transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from planforge.runtime import AsyncTextEncoder, InputError

from ..helpers.event_loop import run, wait_until
from ..helpers.results import assert_equal

# Kinds of retrieval models, each with the tasks that it is made for.
RETRIEVAL = {
    "router": ["embed_sparse"],
    "colbert": ["embed_multi"],
    "bge-m3": ["embed", "embed_sparse", "embed_multi", "embed_hybrid"],
}
DOCUMENTS = ["the cat sat on the mat", "a dog ran away from the cat", "he saw her", "they walked home"]


@pytest.mark.parametrize("kind", RETRIEVAL)
def test_an_encoder_s_embeddings(retrieval_bundle: Callable[[str], Path], kind: str) -> None:
    async def main() -> None:
        async with await AsyncTextEncoder.load(retrieval_bundle(kind)) as encoder:
            for task in RETRIEVAL[kind]:
                for options in ({"input_type": "query"}, {"input_type": "document"}, {}):
                    for given in (DOCUMENTS, DOCUMENTS[0]):
                        want = getattr(encoder.model, task)(given, **options)
                        assert_equal(await getattr(encoder, task)(given, **options), want)
                if task != "embed":
                    assert await getattr(encoder, task)([]) == []
            with pytest.raises(InputError, match="input_type='passage' is not one of"):
                await getattr(encoder, RETRIEVAL[kind][0])(DOCUMENTS[0], input_type="passage")

    run(main())


@pytest.mark.parametrize("kind", ["qwen3", "splade", "colbert"])
def test_an_encoder_searches(retrieval_bundle: Callable[[str], Path], kind: str) -> None:
    """The scores are sentence-transformers'."""
    folder = str(retrieval_bundle(kind).parent / "checkpoint")
    classes: dict[str, Any] = {"qwen3": SentenceTransformer, "splade": SparseEncoder}
    theirs = classes.get(kind, MultiVectorEncoder)(folder, device="cpu")
    queries = ["cat", "who saw him"]
    scores = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(DOCUMENTS)).numpy()

    async def main() -> None:
        async with await AsyncTextEncoder.load(retrieval_bundle(kind)) as encoder:
            for row, hits in zip(scores, await encoder.search(iter(queries), DOCUMENTS, 3), strict=True):
                assert [hit.index for hit in hits] == np.argsort(-row, kind="stable")[:3].tolist()
                assert [hit.score for hit in hits] == pytest.approx(sorted(row, reverse=True)[:3], rel=1e-4)
                assert [hit.text for hit in hits] == [DOCUMENTS[hit.index] for hit in hits]
            assert [hit.index for hit in await encoder.search(queries[0], DOCUMENTS, 1)] == [
                scores[0].argmax()
            ]
            assert await encoder.search([], DOCUMENTS) == [] and await encoder.search(DOCUMENTS[0], []) == []
            with pytest.raises(InputError, match="top_k=0"):
                await encoder.search(DOCUMENTS[0], DOCUMENTS, 0)
            if kind == "qwen3":
                asked, given = [await encoder.embed(texts) for texts in (queries, DOCUMENTS)]
                found = await encoder.similarity(asked, given)
                np.testing.assert_allclose(found, encoder.model.similarity(asked, given))
                with pytest.raises(InputError, match="must be of one kind"):
                    await encoder.similarity(asked, [])

    run(main())


def test_a_search_that_nobody_waits_for_ends(retrieval_bundle: Callable[[str], Path]) -> None:
    async def main() -> None:
        async with await AsyncTextEncoder.load(retrieval_bundle("splade")) as encoder:
            encoder.model.schedule(turn_tokens=1)
            task = asyncio.create_task(encoder.search(DOCUMENTS[0], DOCUMENTS * 100))
            await wait_until(lambda: sum(encoder.model.count_requests()) > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until(lambda: sum(encoder.model.count_requests()) == 0)

    run(main())
