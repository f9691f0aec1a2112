"""A generator that reads neighbours: PyTorch's logits, whatever way its tokens are read, and its errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from planforge.models import Retro
from planforge.runtime import InputError, TextGenerator, load
from planforge.runtime.apps.batch.job import check_bundle
from planforge.runtime.apps.check.retrieval import SampledNeighbour
from planforge.runtime.apps.explain.tasks import explain
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.bundle.retrieval_defaults import RetrievalDefaults
from planforge.runtime.decoding import retrieval
from planforge.runtime.decoding.retrieval import RetrievalDecoder, pad_neighbours
from planforge.runtime.errors import BackendError, BundleNotFoundError, ManifestError
from planforge.runtime.generate.retrieval_generator import RetrievalGenerator
from planforge.runtime.search.neighbour_index import NeighbourIndex

from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.retro import PROMPT, TEXTS, TINY, make_retro, write_index

M = TINY["chunk_length"]
LIMIT = 1e-5  # of log-probabilities
HALF = 0.05  # the same, in fp16


@pytest.fixture(scope="module")
def index(retro_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_index(retro_bundle, tmp_path_factory.mktemp("index") / "index")


@pytest.fixture(scope="module")
def model(retro_bundle: Path, index: Path) -> Iterator[RetrievalGenerator]:
    with TextGenerator.load(retro_bundle, index=index, precision="fp32") as opened:
        assert isinstance(opened, RetrievalGenerator)
        yield opened


@pytest.fixture(scope="module")
def reference() -> Retro:
    return make_retro()


def compute_logprobs(model: RetrievalGenerator, reference: Retro, ids: Sequence[int]) -> Tensor:
    """Return PyTorch's log-probabilities (T, V) of a text, read at once beside the index's neighbours."""
    assert model.index is not None and model.bundle.manifest.retrieval is not None
    defaults = model.bundle.manifest.retrieval
    chunks = [ids[begin : begin + M] for begin in range(0, len(ids) - M + 1, M)]
    found, mask = pad_neighbours(model.index.find(chunks, defaults.neighbours), defaults)
    shape = (1, len(chunks), defaults.neighbours, defaults.neighbour_length)
    logits = reference(
        torch.tensor([list(ids)]), torch.from_numpy(found).view(shape), torch.from_numpy(mask).view(shape)
    )
    logprobs: Tensor = logits[0].log_softmax(-1)
    return logprobs


def find_last(model: RetrievalGenerator, prompt: str, tokens: Sequence[int], reference: Retro) -> list[float]:
    """Return PyTorch's log-probabilities of tokens behind a prompt."""
    ids = [*model.encode_prompt(prompt), *tokens]
    logprobs = compute_logprobs(model, reference, ids)
    begin = len(ids) - len(tokens)
    return [float(logprobs[begin + i - 1, token]) for i, token in enumerate(tokens)]


@pytest.mark.parametrize("length", [1, M - 1, M, M + 1, 2 * M, len(PROMPT)])
def test_answers_are_pytorchs(model: RetrievalGenerator, reference: Retro, length: int) -> None:
    """Prompts that end before, at and behind a chunk's end, and answers of some chunks."""
    prompt = PROMPT[:length]
    answer = model.generate(prompt, max_new_tokens=3 * M, ignore_eos=True)
    wanted = find_last(model, prompt, answer.token_ids, reference)
    np.testing.assert_allclose(answer.logprobs, wanted, rtol=0, atol=LIMIT)
    ids = [*model.encode_prompt(prompt), *answer.token_ids]
    likeliest = compute_logprobs(model, reference, ids).argmax(-1).tolist()
    assert likeliest[length - 1 : -1] == list(answer.token_ids)
    assert len(answer.neighbours) == (len(ids) - 1) // M
    assert [[one.token_ids for one in chunk] for chunk in answer.neighbours] == [
        [one.token_ids for one in chunk]
        for chunk in model.index.find([ids[i : i + M] for i in range(0, len(ids) - M, M)], 2)  # type: ignore[union-attr]
    ]


def test_scores_are_pytorchs(model: RetrievalGenerator, reference: Retro) -> None:
    text = TEXTS["stones"][:80]
    score = model.score(text)
    logprobs = compute_logprobs(model, reference, score.token_ids)
    wanted = [float(logprobs[i, token]) for i, token in enumerate(score.token_ids[1:])]
    np.testing.assert_allclose(score.logprobs, wanted, rtol=0, atol=LIMIT)


def test_a_text_that_is_in_the_index_is_told(
    model: RetrievalGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "planforge"):
        model.score("zebras quietly gallop over dusty plains, far from every coast and town")
        assert not caplog.records
        model.score(TEXTS["stones"])
    assert "the index has 100 % of the text's chunks almost word by word" in caplog.text


@pytest.mark.parametrize(
    ("share", "words"), [(0.004, "has 0.4 % of"), (0.01, "has 1 %"), (0.126, "has 13 %")]
)
def test_a_small_share_is_told_too(
    share: float,
    words: str,
    model: RetrievalGenerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model.index, "measure_overlap", lambda tokens: share)
    with caplog.at_level(logging.WARNING, "planforge"):
        model.score(PROMPT)
    assert words in caplog.text


def test_the_answer_is_the_same_however_it_is_asked_for(model: RetrievalGenerator) -> None:
    options = {"max_new_tokens": 2 * M, "ignore_eos": True}
    wanted = model.generate(PROMPT, **options)
    assert "".join(map(str, model.stream(PROMPT, **options))) == wanted.text
    submitted = model.submit(PROMPT, **options).result()
    assert submitted.token_ids == wanted.token_ids and submitted.neighbours == wanted.neighbours
    begun = model.generate(PROMPT, max_new_tokens=M // 2, ignore_eos=True, reuse_prompt=True)
    ended = model.generate(
        PROMPT + begun.text, max_new_tokens=2 * M - M // 2, ignore_eos=True, reuse_prompt=True
    )
    assert begun.token_ids + ended.token_ids == wanted.token_ids
    assert ended.prompt_tokens_reused >= len(PROMPT)


def test_prompts_run_together_where_they_are_of_one_length(
    model: RetrievalGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, PROMPT.replace("heron", "swift"), "the sea", PROMPT[::-1]]
    alone = [model.generate(prompt, max_new_tokens=M + 3) for prompt in prompts]
    rows = []
    start = model.decoder.start

    def watch(batch: int, *arguments: Any, **options: Any) -> Any:
        rows.append(batch)
        return start(batch, *arguments, **options)

    monkeypatch.setattr(model.decoder, "start", watch)
    together = model.generate(prompts, max_new_tokens=M + 3)
    assert rows == [2, 1, 1]
    iterated = list(model.iterate(prompts, max_new_tokens=M + 3))
    for found in (together, iterated):
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        assert [one.neighbours for one in found] == [one.neighbours for one in alone]


def test_a_failed_search_ends_its_own_request_alone(
    model: RetrievalGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request that shares the engine is answered as alone, and an error says what failed."""
    options = {"max_new_tokens": 2 * M, "ignore_eos": True}
    other = "chalk is soft and grey, and"
    wanted = model.generate(other, **options)
    assert isinstance(model.decoder, RetrievalDecoder)
    find = model.decoder.find

    def fail_of_herons(chunks: Any) -> Any:
        if any("heron" in model.tokenizer.decode(chunk) for chunk in chunks):
            raise OSError("the disk is gone")
        return find(chunks)

    monkeypatch.setattr(model.decoder, "find", fail_of_herons)
    prompt = PROMPT.replace("heron", "xxxxx")[:M] + "a heron"
    failing = model.submit(prompt, **options)
    sound = model.submit(other, **options)
    with pytest.raises(OSError, match="the disk is gone"):
        failing.result()
    assert sound.result().token_ids == wanted.token_ids


def test_neighbours_are_padded_each_to_its_length() -> None:
    """One that is short, one that is too long, one that is missing, and one too many."""
    defaults = RetrievalDefaults(chunk_length=2, neighbours=2, neighbour_length=3)
    one, two, three = (SampledNeighbour(ids) for ids in ((5,), (6, 7, 8, 9), (4, 4, 4)))
    ids, mask = pad_neighbours([[one, two], [two], [], [two, one, three]], defaults)
    assert ids.tolist() == [[5, 0, 0, 6, 7, 8], [6, 7, 8, 0, 0, 0], [0] * 6, [6, 7, 8, 5, 0, 0]]
    assert mask.tolist() == [[1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6, [1, 1, 1, 1, 0, 0]]


def test_beams_are_scored_as_pytorch_scores_them(model: RetrievalGenerator, reference: Retro) -> None:
    found = model.generate(PROMPT[: M - 2], max_new_tokens=2 * M, num_beams=3, n_best=3, ignore_eos=True)
    for candidate in found.candidates:
        wanted = find_last(model, PROMPT[: M - 2], candidate.token_ids, reference)
        assert candidate.score == pytest.approx(sum(wanted) / len(wanted), abs=LIMIT)
    assert len({candidate.token_ids for candidate in found.candidates}) == 3


def test_another_index_changes_what_the_model_knows(
    retro_bundle: Path, model: RetrievalGenerator, tmp_path: Path
) -> None:
    other = write_index(retro_bundle, tmp_path / "other", ["ships"])
    with load(retro_bundle, index=other, precision="fp32") as opened:
        assert isinstance(opened, RetrievalGenerator)
        assert {one.document for chunk in opened.generate(PROMPT).neighbours for one in chunk} == {"ships"}
        assert opened.score(PROMPT).total != model.score(PROMPT).total


def test_without_an_index_no_neighbours_are_read(
    retro_bundle: Path, reference: Retro, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "planforge"), load(retro_bundle, precision="fp32") as opened:
        assert isinstance(opened, RetrievalGenerator)
        ids = opened.encode_prompt(PROMPT)
        logprobs = reference(torch.tensor([ids]))[0].log_softmax(-1)
        wanted = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
        np.testing.assert_allclose(opened.score(PROMPT).logprobs, wanted, rtol=0, atol=LIMIT)
        assert opened.generate(PROMPT, max_new_tokens=2).neighbours == ()
    assert caplog.text.count("without an index the model reads no neighbours") == 1


def test_int8_reads_neighbours_too(retro_bundle: Path, index: Path, model: RetrievalGenerator) -> None:
    with TextGenerator.load(retro_bundle, index=index, precision="int8") as opened:
        answer = opened.generate(PROMPT, max_new_tokens=1)
        assert answer.neighbours == model.generate(PROMPT, max_new_tokens=1).neighbours
        wanted = model.score(TEXTS["birds"]).total
        assert opened.score(TEXTS["birds"]).total == pytest.approx(wanted, rel=0.02)


def test_plans_answer_as_pytorch_does(
    retro_bundle: Path, index: Path, model: RetrievalGenerator, reference: Retro
) -> None:
    """Both plans, which TensorRT-RTX built, on an emulated GPU; within what fp16 rounds."""
    pytest.importorskip("tensorrt_rtx")
    with (
        emulated_gpu(retro_bundle),
        TextGenerator.load(retro_bundle, index=index, backend="tensorrt-rtx", precision="fp16") as opened,
    ):
        for length in (5, M, len(PROMPT)):
            answer = opened.generate(PROMPT[:length], max_new_tokens=2 * M, ignore_eos=True)
            wanted = find_last(model, PROMPT[:length], answer.token_ids, reference)
            np.testing.assert_allclose(answer.logprobs, wanted, rtol=0, atol=HALF)
            assert len(answer.neighbours) == (length + 2 * M - 1) // M


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "prompt-lookup"}, "is not for models that read neighbours"),
        ({"num_beams": 9}, "num_beams=9 is more than the 4 rows"),
    ],
)
def test_options_that_are_refused(model: RetrievalGenerator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.generate(PROMPT, **options)


def test_an_index_is_for_models_that_read_neighbours(demo_bundle: Path, index: Path) -> None:
    with pytest.raises(InputError, match="index is for a model that reads neighbours of its text"):
        TextGenerator.load(demo_bundle, index=index)
    with pytest.raises(InputError, match="index_keys is for an index; give index too"):
        TextGenerator.load(demo_bundle, index_keys=index)


def test_an_index_is_a_folder(retro_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="index=3 is not a str or Path, of a folder"):
        TextGenerator.load(retro_bundle, index=3)  # type: ignore[arg-type]
    with pytest.raises(BundleNotFoundError, match=r"there is no folder .*nowhere; give the index"):
        TextGenerator.load(retro_bundle, index=tmp_path / "nowhere")


def test_what_is_not_for_such_models(model: RetrievalGenerator, retro_bundle: Path) -> None:
    with pytest.raises(InputError, match=r"explain is for .*, and this model is for retrieval-generation"):
        explain(model, PROMPT)
    with pytest.raises(InputError, match="batch does not run bundles for retrieval-generation"):
        check_bundle(retro_bundle, "generate")


def test_the_index_runs_where_the_model_does(
    retro_bundle: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    open_it = NeighbourIndex.open

    def open_index(*arguments: Any, **options: Any) -> NeighbourIndex:
        given.update(options)
        return open_it(*arguments, **options)

    monkeypatch.setattr(NeighbourIndex, "open", open_index)
    with TextGenerator.load(retro_bundle, index=index, backend="ort-cpu", precision="fp32", threads=1):
        assert given == {"keys": None, "backend": "ort-cpu", "device": 0, "threads": 1}


@pytest.mark.parametrize("part", ["a graph", "a pair"])
def test_nothing_stays_open_where_something_fails(
    part: str, retro_bundle: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a graph cannot be opened after the index was, and where the two do not belong together."""
    opened: list[Any] = []
    closed: list[Any] = []
    open_graph = OrtCpuBackend.open
    close_graph = OrtProgram.close
    close_index = NeighbourIndex.close

    def open_it(self: OrtCpuBackend, bundle: Bundle, artifact: Artifact) -> Any:
        if part == "a graph" and artifact.graph == "encoder":
            raise BackendError("no memory")
        opened.append(open_graph(self, bundle, artifact))
        return opened[-1]

    def refuse(*artifacts: Any) -> Any:
        raise ManifestError("they do not belong together")

    monkeypatch.setattr(OrtCpuBackend, "open", open_it)

    def close_it(self: OrtProgram) -> None:
        closed.append(self)
        close_graph(self)

    def close_own(self: NeighbourIndex) -> None:
        closed.append(self)
        close_index(self)

    monkeypatch.setattr(OrtProgram, "close", close_it)
    monkeypatch.setattr(NeighbourIndex, "close", close_own)
    if part == "a pair":
        monkeypatch.setattr(retrieval, "pair_cross_tensors", refuse)
    with pytest.raises((BackendError, ManifestError)):
        TextGenerator.load(retro_bundle, index=index, backend="ort-cpu", precision="fp32")
    assert opened and all(program in closed for program in opened)
    assert [type(one) for one in closed].count(NeighbourIndex) == 1
