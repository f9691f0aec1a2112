"""Layers that see a window, whose cache keeps a text's newest tokens alone: `ort` beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.calibration.calibration import Calibration
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.artifact import RECENT
from planforge.runtime.decoding.cache_shapes import SPARE, count_cache_bytes, count_recent_slots
from planforge.runtime.decoding.static_cache import GroupQueryCache

from ..helpers.llamas import NEW, WINDOW, Reference, shallow_llama, write_dialects
from ..helpers.plans import only

LIMIT = 1e-4  # on logits
CONTEXT = 1024
SLOTS = count_recent_slots(WINDOW)
RANDOM = np.random.default_rng(0).integers(1, 2000, CONTEXT).tolist()
LONG = tuple(RANDOM[:900])  # of which the slots hold a third
# All layers with windows, some, two rotations, and layers with windows alone that are turned.
KINDS = ("mistral", "gemma 2", "gemma 3", "exaone 4")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recent")
    shallow_llama(folder / "checkpoint", request.param, max_position_embeddings=CONTEXT)
    write_dialects(folder / "checkpoint", folder / "bundle", ["ort"])
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder / "checkpoint")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[TextGenerator]:
    with TextGenerator.load(only(folder / "bundle", folder / "only", "decoder.ort.fp32")) as model:
        assert model.artifact.window == WINDOW
        yield model


def test_the_slots_are_as_many_as_a_window_a_step_and_what_may_be_forgotten(model: TextGenerator) -> None:
    pasts = [spec for spec in model.artifact.inputs if spec.role.startswith("past.")]
    recent = [spec for spec in pasts if RECENT in spec.axis_names()]
    assert recent
    run = model.decoder.start(2, CONTEXT)
    assert isinstance(run.cache, GroupQueryCache)
    assert {buffer.shape[2] for buffer in run.cache.recent} == {SLOTS}
    head_bytes = 2 * 2 * 4 * int(run.cache.recent[0].shape[3])  # two rows, two heads, fp32
    slots = len(recent) * SLOTS + (len(pasts) - len(recent)) * CONTEXT
    assert count_cache_bytes(model.artifact, 2, CONTEXT) == slots * head_bytes


def test_logits_in_steps_are_those_of_one_pass(model: TextGenerator, reference: Reference) -> None:
    run = model.decoder.start(1, CONTEXT)
    found = [run.prefill([LONG[:700]]), *run.extend(LONG[700:800])]
    found += [run.decode([token]) for token in LONG[800:]]  # the slots move in the middle of these
    assert isinstance(run.cache, GroupQueryCache)
    assert run.cache.starts[0] > 0
    want = reference.compute_logits(LONG)[699:]
    assert want.std() > 0.1
    np.testing.assert_allclose(np.concatenate(found), want, rtol=0, atol=LIMIT)


def test_rows_of_a_batch_move_by_themselves(model: TextGenerator, reference: Reference) -> None:
    prompts = [LONG[:650], LONG[20:60], LONG[100:425]]
    answers = model.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.continue_greedily(prompt)


def test_few_tokens_are_forgotten_and_many_are_read_again(model: TextGenerator, reference: Reference) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "reuse_prompt": True}
    model.generate(LONG, **options)
    for kept, reused in ((880, 880), (300, 0), (280, 280)):
        turn = (*LONG[:kept], 7, 8, 9)
        answer = model.generate(turn, **options)
        assert answer.prompt_tokens_reused == reused
        assert answer.token_ids == reference.continue_greedily(turn)


@pytest.mark.parametrize("forgotten", [SPARE, SPARE + 1])
def test_as_many_are_forgotten_as_are_spare(
    model: TextGenerator, reference: Reference, forgotten: int
) -> None:
    run = model.decoder.start(1, CONTEXT)
    run.prefill([LONG[:768]])  # the slots have moved before the last step
    assert isinstance(run.cache, GroupQueryCache)
    least = int(run.cache.starts[0]) + WINDOW - 1  # tokens that may be kept
    assert run.truncate(least) == least
    kept = run.truncate(least - 1) if forgotten > SPARE else least
    assert kept == (0 if forgotten > SPARE else least)
    logits = run.prefill([LONG[kept:800]])
    np.testing.assert_allclose(logits[0], reference.compute_logits(LONG[:800])[-1], rtol=0, atol=LIMIT)


def test_drafts_and_beams(model: TextGenerator, reference: Reference) -> None:
    prompt = (*LONG[:330], *LONG[300:330], *LONG[300:310])  # what lookups find something in
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    drafted = model.generate(prompt, speculative="prompt-lookup", **options)
    assert drafted.token_ids == reference.continue_greedily(prompt)
    answer = model.generate(prompt, num_beams=3, n_best=3, **options)
    wanted = reference.search_beams(prompt)
    assert [candidate.token_ids for candidate in answer.candidates] == [tokens for tokens, _ in wanted]


def test_an_export_is_verified(tmp_path: Path) -> None:
    shallow_llama(tmp_path / "checkpoint", "gemma 3", max_position_embeddings=CONTEXT)
    result = export(tmp_path / "checkpoint", tmp_path / "bundle", target="cpu", precision="fp32")
    assert result.report is not None and result.report.passed and result.report.with_pytorch
    assert [artifact.window for artifact in result.manifest.artifacts] == [WINDOW]


def test_slots_in_int8_move_too(tmp_path: Path) -> None:
    shallow_llama(tmp_path / "checkpoint", "gemma 3", max_position_embeddings=CONTEXT)
    names = [f"cache.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    coarse = Calibration(cache_scales={name: np.full(2 * 32, 0.05, np.float32) for name in names})
    held = {}
    for precision in ("fp32", "fp32-kv8"):
        bundle = tmp_path / precision
        write_dialects(tmp_path / "checkpoint", bundle, ["ort"], precision, coarse)
        with TextGenerator.load(bundle) as model:
            run = model.decoder.start(1, CONTEXT)
            run.prefill([LONG[:790]])
            for token in LONG[790:]:
                run.decode([token])
            assert isinstance(run.cache, GroupQueryCache)
            count = len(LONG) - int(run.cache.starts[0])
            assert WINDOW <= count < len(LONG)
            held[precision] = [buffer.numpy()[:, :, :count] for buffer in run.cache.recent]
    for exact, rounded in zip(held["fp32"], held["fp32-kv8"], strict=True):  # those of the first layer
        steps = exact / 0.05
        near = np.abs(steps - np.floor(steps) - 0.5) < 1e-3  # between two steps: it may become either
        assert rounded.dtype == np.int8 and len(np.unique(rounded)) > 60
        np.testing.assert_array_equal(rounded[~near], np.clip(np.rint(steps), -128, 127)[~near])


def test_slots_that_would_save_nothing_are_all_there(tmp_path: Path) -> None:
    shallow_llama(tmp_path / "checkpoint", "mistral", max_position_embeddings=SLOTS)
    write_dialects(tmp_path / "checkpoint", tmp_path / "bundle", ["ort"])
    with TextGenerator.load(tmp_path / "bundle") as model:
        assert model.artifact.dialect == "ort" and model.artifact.window is None
