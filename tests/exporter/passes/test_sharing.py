"""Several exports and builds at one place, in processes and containers that know nothing of each other."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import build
from planforge.exporter.bundle import locks
from planforge.exporter.bundle.locks import acquire, hold_lock
from planforge.exporter.bundle.writer import (
    hold_bundle_lock,
    install,
    install_change,
    locate_creation_lock,
    open_staging_folder,
    replace_manifest,
)
from planforge.exporter.errors import OutputError
from planforge.exporter.tensorrt import plans
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.patience import PATIENCE, wait_until
from ...helpers.staging import install_stage, stage, whole

STAGES = """
import pathlib, sys, time
from planforge.exporter.bundle.writer import open_staging_folder

with open_staging_folder(pathlib.Path(sys.argv[1])) as staging:
    (staging / "begun").write_text("")
    print(staging, flush=True)
    time.sleep(300)
"""


def test_two_exports_to_one_place_write_in_folders_of_their_own(tmp_path: Path) -> None:
    """One process has one number, as processes of two containers that share a volume may have."""
    output = tmp_path / "bundle"
    with open_staging_folder(output) as first:
        (first / "begun").write_text("by the first")
        with open_staging_folder(output) as second:
            assert second != first and not any(second.iterdir())
            assert (first / "begun").read_text() == "by the first"
        assert (first / "begun").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    command = [sys.executable, "-c", STAGES, str(output)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = []
        for child in children:
            assert child.stdout is not None
            folders.append(Path(child.stdout.readline().strip()))
        children[0].kill()
        children[0].wait()
        assert folders[0].exists()
        with open_staging_folder(output):
            pass
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {folders[1].name, f"{folders[1].name}.lock"}
        assert (folders[1] / "begun").exists()
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_bundle_that_came_meanwhile_is_not_replaced_without_force(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with open_staging_folder(output) as first, open_staging_folder(output) as second:
        install(second, stage(second, "second"), output, force=False)
        with pytest.raises(OutputError, match="exists; pass --force"):
            install(first, stage(first, "first"), output, force=False)
    assert whole(output) == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_change_of_a_bundle_that_was_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    opened = Bundle.open(output)
    install_stage(output, "new")
    with (
        pytest.raises(OutputError, match="was exported again, or pruned, meanwhile"),
        open_staging_folder(output) as staging,
    ):
        install_change(staging, opened, lambda manifest: manifest)
    assert whole(output) == "new"


def test_builds_at_the_same_time_lose_no_plan(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has read the manifest before another has written it."""
    before = Bundle.open(own_bundle).manifest.plans
    kernels = own_bundle / f"{before[0].file}.sm89.cache"  # of a plan that stays: TensorRT compiled them here
    kernels.write_bytes(b"kernels")
    architectures = ("sm75", "sm80", "sm86", "sm89")
    all_have_read = threading.Barrier(len(architectures))

    def quick_plan(
        bundle: Bundle, target: str, sms: tuple[str, ...], limits: Any, folder: Path, *_: Any
    ) -> Any:
        name = f"plans/{sms[0]}.plan"
        (folder / "plans").mkdir()
        (folder / name).write_bytes(sms[0].encode())
        all_have_read.wait(timeout=PATIENCE)
        return [dataclasses.replace(before[0], file=name, sms=sms, sources={})]

    monkeypatch.setattr(plans, "build_plans_for", quick_plan)
    with ThreadPoolExecutor(len(architectures)) as pool:
        list(pool.map(lambda sm: build(own_bundle, sms=(sm,)), architectures))
    after = Bundle.open(own_bundle)
    after.verify_files()
    assert kernels.exists()
    assert {plan.sms for plan in after.manifest.plans} == {before[0].sms, *((sm,) for sm in architectures)}
    assert {path.name for path in own_bundle.parent.iterdir()} == {"bundle"}


@pytest.mark.parametrize("who", ["another export", "whoever sees the bundle alone"])
def test_one_process_at_a_time_changes_a_bundle(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    events: list[str] = []
    has_to_wait = threading.Event()
    lock_file = locks.lock_file

    def lock_and_tell(descriptor: int, *, wait: bool) -> bool:
        if lock_file(descriptor, wait=False):
            return True
        if wait:
            has_to_wait.set()
        return wait and lock_file(descriptor, wait=True)

    monkeypatch.setattr(locks, "lock_file", lock_and_tell)

    def change(how: Callable[[], None]) -> None:
        with open_staging_folder(output) as staging:
            install(staging, stage(staging, "new"), output)
            how()

    with ThreadPoolExecutor(1) as pool:
        with hold_lock(locate_creation_lock(output)) if who == "another export" else hold_bundle_lock(output):
            future = pool.submit(change, lambda: events.append("changed"))
            wait_until(lambda: has_to_wait.is_set() or future.done())
            assert not future.done() and whole(output) == "old"
            events.append("freed")
        future.result(timeout=PATIENCE)
    assert events == ["freed", "changed"] and whole(output) == "new"


def test_a_change_of_a_bundle_needs_no_more_than_its_folder(tmp_path: Path) -> None:
    """A container that has only the bundle mounted may write nothing beside it."""
    output = tmp_path / "bundle"
    install_stage(output, "old")
    seen: list[str] = []

    def note(manifest: Any) -> Any:
        seen.extend(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.lock"))
        return dataclasses.replace(manifest, tools={"a": "1"})

    replace_manifest(output, note)
    assert Bundle.open(output).manifest.tools == {"a": "1"}
    assert seen == ["bundle/.lock"]
    assert list(tmp_path.rglob("*.lock")) == []
    assert whole(output) == "old"


def test_a_staging_folder_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / ".bundle.partial-0123456789ab.lock"
    theirs.write_text("")
    theirs.with_suffix("").mkdir()
    really_open = os.open

    def refusing(path: Any, *arguments: Any) -> int:
        if Path(path) == theirs:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", refusing)
    with open_staging_folder(tmp_path / "bundle") as staging:
        install(staging, stage(staging, "new"), tmp_path / "bundle")
    assert whole(tmp_path / "bundle") == "new"
    assert theirs.exists() and theirs.with_suffix("").is_dir()
    with pytest.raises(PermissionError):
        acquire(theirs, wait=True)
