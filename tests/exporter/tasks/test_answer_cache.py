"""What PyTorch answered is kept for the next run, and never taken for the answer to something else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planforge.exporter import export, verify
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.levels import FULL, QUICK, STANDARD
from planforge.exporter.passes.int8_rows import RowRule, round_product
from planforge.exporter.passes.weights import LazyMapping
from planforge.exporter.tasks import answer_cache
from planforge.exporter.tasks.answer_cache import (
    KEPT,
    SETTING,
    compute_gaps_key,
    compute_key,
    describe,
    keep_answers,
    read_answers,
    read_limit,
)
from planforge.exporter.tasks.fitted_head import LinearHead
from planforge.exporter.tasks.rounding import Rounding
from planforge.exporter.tasks.verifier import Verifier, open_verifier
from planforge.exporter.verification import module_check
from planforge.exporter.verification.report import VerificationReport
from planforge.exporter.verification.verify import find_recorded_source, load_model_to_compare
from planforge.runtime.apps.check.case_arrays import to_arrays
from planforge.runtime.apps.check.files import Arrays, find_golden, read_golden
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.faults import perturbed
from ...helpers.graphs import replace_graph
from ...helpers.models import tiny_bert, write_wordpiece

TEXTS = ["And it came to pass in those days.", "He said unto them, Go ye into the city."]
KEYS = tuple(digit * 64 for digit in "abcdef")
ARRAYS: Arrays = {
    "whole": np.arange(5000),
    "none": np.empty((0, 3), np.float32),
    "names": np.array(["a", "bc"]),
}


@pytest.fixture(scope="module")
def classifier(head_bundle: Callable[[str], Path]) -> Path:
    """A bundle whose export has kept no answers: it is made before a test names the folder for them."""
    return head_bundle("classifier")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where answers are kept in a test."""
    monkeypatch.setenv("PLANFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SETTING, raising=False)
    return tmp_path / "cache" / "answers"


@contextmanager
def count_calls() -> Iterator[list[str]]:
    """Yield a list that gets the class of every PyTorch module that is called inside the block."""
    called: list[str] = []

    def note(module: nn.Module, _: Any) -> None:
        called.append(type(module).__name__)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


@dataclasses.dataclass
class Asked:
    """A bundle and its checkpoint's model, which is asked as `verify` asks it."""

    bundle: Bundle
    source: Source

    def __post_init__(self) -> None:
        self.model = load_model_to_compare(self.bundle, self.source)
        self.hash = self.source.compute_sha256()

    def ask(self, **changes: Any) -> Verifier:
        usual: dict[str, Any] = {"texts": TEXTS, "seed": 0, "level": QUICK, "checkpoint": self.hash}
        with count_calls() as called:
            verifier = open_verifier(self.bundle, self.model, **usual | changes)
        assert bool(called) != verifier.answers_kept
        return verifier


def open_asked(folder: Path) -> Asked:
    bundle = Bundle.open(folder)
    source = find_recorded_source(bundle)
    assert source is not None
    return Asked(bundle, source)


def assert_equal(got: Arrays, want: Arrays) -> None:
    """Compare arrays bit for bit, with their types."""
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, strict=True, err_msg=name)


@pytest.mark.parametrize("task", ["decoder", "encoder", "translator"])
def test_the_next_run_asks_nothing_and_knows_the_same(
    task: str, demo_bundle: Path, classifier: Path, dates_bundle: Path
) -> None:
    bundles = {"decoder": demo_bundle, "encoder": classifier, "translator": dates_bundle}
    asked = open_asked(bundles[task])
    first = asked.ask(level=STANDARD)
    second = asked.ask(level=STANDARD)
    assert not first.answers_kept and second.answers_kept
    assert_equal(second.collect_golden(), first.collect_golden())
    whole = to_arrays(first.expected)
    assert len(whole) > 20
    assert_equal(to_arrays(second.expected), whole)
    assert second.expected.calibration == first.expected.calibration
    assert second.expected.left_out == first.expected.left_out


ROUNDINGS = {
    "fp16": Rounding(torch.float16),
    "fp64": Rounding(exact=True),
    "blocks": Rounding(activation_block=32),
    "other blocks": Rounding(activation_block=64),
    "cache": Rounding(cache_scales={"cache.0.key": np.ones(8, np.float32)}),
    "another cache": Rounding(cache_scales={"cache.0.key": np.full(8, 2, np.float32)}),
}


@pytest.mark.parametrize("task", ["decoder", "encoder", "translator"])
def test_what_rounding_does_is_measured_once(
    task: str, demo_bundle: Path, classifier: Path, dates_bundle: Path
) -> None:
    asked = open_asked({"decoder": demo_bundle, "encoder": classifier, "translator": dates_bundle}[task])
    first, second = asked.ask(), asked.ask()
    unkept = open_verifier(asked.bundle, asked.model, TEXTS, level=QUICK)
    for rounding in (ROUNDINGS["fp16"], ROUNDINGS["fp64"]):
        measured = first.measure_gaps(asked.model, rounding)
        assert measured == unkept.measure_gaps(asked.model, rounding)
        with count_calls() as called:
            assert second.measure_gaps(asked.model, rounding) == measured
        assert measured and not called
        with count_calls() as called:
            unkept.measure_gaps(asked.model, rounding)
        assert called


def test_another_rounding_is_measured_anew() -> None:
    product = round_product(np.eye(4, dtype=np.float32), None, RowRule(128, 0.0, absolute=True))
    weights = LazyMapping({"a": 3}, lambda size: np.ones(size, np.float32))
    roundings = [*ROUNDINGS.values(), Rounding(products={("a", "b"): product}), Rounding(weights=weights)]
    keys = [compute_gaps_key(answers, rounding) for answers in KEYS[:2] for rounding in roundings]
    assert len(set(keys)) == len(keys)


def test_how_a_product_was_chosen_changes_no_rounding() -> None:
    product = round_product(np.eye(4, dtype=np.float32), None, RowRule(128, 0.0, absolute=True))
    both = Rounding(products={("a",): product, ("b",): replace(product, error=0.1)})
    other = Rounding(products={("b",): product, ("a",): replace(product, error=0.2)})
    keys = [compute_gaps_key(KEYS[0], rounding) for rounding in (both, other)]
    assert keys[0] == keys[1]


def test_whatever_differs_is_asked_anew(classifier: Path, folder: Path) -> None:
    asked = open_asked(classifier)
    assert not asked.ask(level=FULL).answers_kept
    assert not asked.ask(checkpoint="").answers_kept
    assert not folder.exists()
    asked.ask()
    assert asked.ask().answers_kept
    for changes in ({"texts": TEXTS[:1]}, {"level": STANDARD}, {"level": STANDARD, "seed": 1}):
        assert not asked.ask(**changes).answers_kept
        assert asked.ask(**changes).answers_kept
    assert not asked.ask(level=FULL).answers_kept
    assert not asked.ask(checkpoint="0" * 64).answers_kept  # another config.json
    _, weight = next(asked.model.named_parameters())
    with torch.no_grad():
        weight.view(-1)[7] += 1e-3
    assert not asked.ask().answers_kept
    with torch.no_grad():
        weight.view(-1)[7] -= 2e-3
    assert not asked.ask().answers_kept


def test_another_version_is_asked_anew(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = open_asked(classifier)
    keys = [compute_key(asked.hash, asked.model, range(3))]
    keys.append(compute_key(asked.hash, asked.model, range(4)))
    for scale in (1.0, 2.0):  # heads that were fitted to the same model
        head = LinearHead("embedding", np.full((2, 4), scale), np.zeros(2), normalize=True)
        keys.append(compute_key(asked.hash, asked.model, range(3), head))
    monkeypatch.setattr(answer_cache, "find_version", lambda package: "99")
    keys.append(compute_key(asked.hash, asked.model, range(3)))
    monkeypatch.setattr(answer_cache, "hash_code", lambda: "other code")
    keys.append(compute_key(asked.hash, asked.model, range(3)))
    assert len(set(keys)) == len(keys)
    with pytest.raises(TypeError, match="object in what PyTorch is asked"):
        describe(object())


def test_export_and_verify_share_answers_and_still_catch_a_fault(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    tiny_bert(checkpoint, num_hidden_layers=1)
    write_wordpiece(checkpoint)
    output = tmp_path / "bundle"

    def write() -> tuple[VerificationReport, Arrays]:
        result = export(checkpoint, output, target=["cpu"], precision=["fp32"], force=True)
        golden = find_golden(Bundle.open(output))
        assert golden is not None and result.report is not None
        return result.report, read_golden(golden)[0]

    first, golden = write()
    lines: list[str] = []
    with count_calls() as called, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_check, "check_modules", lambda *_: ([], {}))  # which runs modules on purpose
        assert verify(output, progress=lines.append).passed
    assert not called and f"reading PyTorch's answers, {KEPT}" in lines
    second = verify(output)
    assert not first.answers_kept and second.answers_kept
    assert second.passed and second.comparisons[-len(first.comparisons) :] == first.comparisons
    assert second.describe_level().endswith(f" PyTorch's answers were {KEPT}.")
    assert second.to_json()["answers"] == KEPT and "answers" not in first.to_json()
    manifest = (output / "manifest.json").read_bytes()
    again, golden_again = write()
    assert again.answers_kept
    assert (output / "manifest.json").read_bytes() == manifest  # which has the hashes of all files
    assert_equal(golden_again, golden)
    full = verify(output, level="full")
    assert full.passed and not full.answers_kept

    artifact = Bundle.open(output).manifest.artifacts[0].id
    replace_graph(output, artifact, perturbed("layers.0.intermediate"))
    faulty = verify(output)
    assert faulty.answers_kept and not faulty.passed and len(faulty.mismatches) == 1


@pytest.mark.parametrize("damage", ["cut", "emptied", "begin", "middle", "end", "longer", "foreign", "older"])
def test_a_damaged_file_is_no_answer(damage: str, folder: Path) -> None:
    key, other = KEYS[:2]
    keep_answers(key, ARRAYS)
    keep_answers(other, {"whole": np.arange(3)})
    found = read_answers(key)
    assert found is not None
    assert_equal(found, ARRAYS)
    path = folder / key
    content = bytearray(path.read_bytes())
    if damage in ("begin", "middle", "end"):
        content[{"begin": 3, "middle": len(content) // 2, "end": -1}[damage]] ^= 1
    changed: dict[str, bytes | bytearray] = {
        "cut": content[: len(content) // 2],
        "emptied": b"",
        "longer": content + b"more",
        "foreign": (folder / other).read_bytes(),
        "older": content[answer_cache.DIGEST_BYTES :],
    }
    path.write_bytes(changed.get(damage, content))
    assert read_answers(key) is None
    assert not path.exists()
    keep_answers(key, ARRAYS)
    assert read_answers(key) is not None


def test_nothing_is_unpickled(folder: Path) -> None:
    keep_answers(KEYS[0], {"object": np.array([{"a": 1}], dtype=object)})
    assert (folder / KEYS[0]).exists()
    assert read_answers(KEYS[0]) is None


def test_those_used_longest_ago_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"some": np.zeros(25_000)}  # 0.2 MB
    monkeypatch.setenv(SETTING, "0.75")
    for key in KEYS[:3]:
        keep_answers(key, arrays)
    assert read_answers(KEYS[0]) is not None
    (folder / "a user's own").write_bytes(bytes(10**6))
    left = folder / f".{KEYS[0]}.{'0' * 12}"
    left.touch()
    os.utime(left, (0, 0))
    keep_answers(KEYS[3], arrays)
    assert {path.name for path in folder.iterdir()} == {KEYS[0], KEYS[2], KEYS[3], "a user's own"}
    keep_answers(KEYS[4], {"much": np.zeros(100_000)})
    assert read_answers(KEYS[4]) is None and read_answers(KEYS[2]) is not None


def test_where_nothing_can_be_kept_a_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, classifier: Path
) -> None:
    monkeypatch.setenv(SETTING, "0")
    asked = open_asked(classifier)
    asked.ask()
    assert not asked.ask().answers_kept and not folder.parent.exists()
    monkeypatch.delenv(SETTING)
    folder.parent.write_text("a file in the place of the folder")
    asked.ask()
    assert not asked.ask().answers_kept
    folder.parent.unlink()

    def refuse(file: Any, **arrays: Any) -> None:
        file.write(b"some")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(np, "savez", refuse)
        keep_answers(KEYS[0], ARRAYS)
    assert read_answers(KEYS[0]) is None and list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["-1", "much", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(InputError, match=f"{SETTING}='{text}' must be a number of megabytes, 0 or more"):
        read_limit()


def test_writers_and_readers_at_once(folder: Path) -> None:
    """Each writer's arrays are all alike: a reader sees those of one writer, or none."""

    def work(writer: int) -> list[bool]:
        whole = []
        for _ in range(30):
            keep_answers(KEYS[0], {"first": np.full(20_000, writer), "second": np.full(20_000, writer)})
            found = read_answers(KEYS[0])
            whole.append(found is not None and len({*found["first"], *found["second"]}) == 1)
        return whole

    with ThreadPoolExecutor(4) as pool:
        results = [result for results in pool.map(work, range(4)) for result in results]
    assert len(results) == 120 and all(results)
    assert [path.name for path in folder.iterdir()] == [KEYS[0]]
