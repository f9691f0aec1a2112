"""What a job refuses: it says why, and leaves everything as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSelector

from planforge.runtime.apps.batch import process_engine, run_batch
from planforge.runtime.apps.batch.plan import Part, Source
from planforge.runtime.apps.batch.storage import Storage
from planforge.runtime.errors import BatchError, BundleNotFoundError, InputError

from ....helpers.cli import planforge
from ....helpers.patience import PATIENCE
from .texts import TEXTS


def read(output: Path) -> pa.Table:
    return pq.read_table(output)


@pytest.fixture(scope="module")
def finished(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the input and the output of a job that is done."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "in.txt").write_text("\n".join(TEXTS[:20]))
    run_batch(bundle, "embed", folder / "in.txt", folder / "out", rows_per_part=8, workers=1)
    return folder


@pytest.fixture
def source_of(finished: Path, tmp_path: Path) -> Path:
    """The input of a job whose output is `out` of the test's own folder."""
    shutil.copytree(finished / "out", tmp_path / "out")
    return finished / "in.txt"


def test_a_worker_that_cannot_load_says_why_once(bundle: Path, source: Path, tmp_path: Path) -> None:
    command: list[str | Path] = ["batch", bundle, "--task", "embed"]
    command += ["--input", source, "-o", tmp_path / "out"]
    done = planforge(*command, "--option=pooling=middle")
    assert done.returncode == 1
    assert done.stderr.count("pooling='middle' is not one of") == 1
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("part-*"))
    assert "rows are kept" not in done.stderr
    # What computed nothing does not stand in the way.
    assert run_batch(bundle, "embed", source, tmp_path / "out", workers=1).computed == 63


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "embedd"}, "did you mean 'embed'"),
    "missing column": ({"columns": {"text": "body"}}, "has no columns 'body'; it has: text"),
    "input": ({"input": "nowhere"}, "nowhere does not exist"),
    "workers": ({"workers": 0}, "workers=0"),
    "rows": ({"rows_per_part": 0}, "rows_per_part=0"),
    "address": ({"input": "ftpx://a/b"}, "is not a valid path or address"),
    "gpus": ({"gpus": -1}, "gpus=-1 must be a number of GPUs"),
    "gpus here": ({"gpus": 1}, "gpus=1 is only for a Ray cluster"),
    "workers there": ({"workers": 2, "address": "local"}, "workers=2 is for processes on this machine"),
    "device": ({"input": "/dev/null"}, "is neither a file nor a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_leaves_nothing(bundle: Path, source: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    arguments: dict[str, Any] = {"task": "embed", "input": source, "output": tmp_path / "out", **changes}
    with pytest.raises(InputError, match=message):
        run_batch(bundle, **arguments)
    assert not (tmp_path / "out").exists()


def test_inputs_without_rows_are_refused(bundle: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for content, message in (
        ({}, "no file of a supported type: .txt"),
        ({"a.md": "x"}, "no file of a supported type: .txt"),
        ({"a.txt": "\n\n"}, "has no rows"),
        ({"a.jsonl.gz": "x"}, "is compressed; decompress it first"),
    ):
        for name, text in content.items():
            (empty / name).write_text(text)
        with pytest.raises(InputError, match=message):
            run_batch(bundle, "embed", empty, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(BundleNotFoundError):
        run_batch(tmp_path / "none", "embed", empty, tmp_path / "out")


def test_another_job_is_not_mixed_in(bundle: Path, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run_batch(bundle, "embed", source, output, workers=1)
    before = read(output)
    for changes, message in (
        ({"options": {"pooling": "cls"}}, r"another --option: \{\}, not \{'pooling': 'cls'\}"),
        ({"rows_per_part": 5}, "another --rows-per-part: 1000, not 5"),
        ({"id_column": "text"}, "another --id: None, not 'text'"),
    ):
        with pytest.raises(InputError, match=message):
            run_batch(bundle, "embed", source, output, **changes)
    with (source / "a.txt").open("a") as file:
        file.write("one more\n")
    with pytest.raises(InputError, match=r"the input \(names, sizes or times of its files\) has changed"):
        run_batch(bundle, "embed", source, output)
    assert read(output).equals(before)


def test_a_folder_of_something_else_is_refused(bundle: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"mine is not empty, and is not a job's folder: it has letter\.txt"):
        run_batch(bundle, "embed", source, tmp_path / "mine")
    with pytest.raises(InputError, match=r"letter\.txt is not a folder"):
        run_batch(bundle, "embed", source, tmp_path / "mine" / "letter.txt")
    for place in (source, source / "out", source / "below" / "out", tmp_path):
        with pytest.raises(InputError, match="must not be inside the input folder"):
            run_batch(bundle, "embed", source, place)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    assert not list(source.rglob("_job"))


def test_a_bundle_that_does_not_do_the_task_says_what_it_does(
    bundle: Path, source: Path, tmp_path: Path
) -> None:
    done = planforge("batch", bundle, "--task", "generate", "--input", source, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "does not support the task 'generate'; supported tasks: embed, embed_sparse," in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_of_the_users_stays(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "in.txt").write_text("\n")
    with pytest.raises(InputError, match="has no rows"):
        run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    """A loop would multiply the rows; a link to a file is that file."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    (folder / "loop").symlink_to(".")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    source = Source.of(folder)
    assert [source.name(file.path) for file in source.list_files()] == ["a.txt", "b.txt"]


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    """It is refused where the file would be read, and passed over where it would not."""
    (tmp_path / "a.txt").write_text("a\n")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.md")).write_text("x")
    assert len(Source.of(tmp_path).list_files()) == 1
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("x")
    with pytest.raises(InputError, match="has a name that is not UTF-8; rename it"):
        Source.of(tmp_path).list_files()


def test_an_input_that_changes_meanwhile_is_told(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the same length, of which some answers may be of the old and some of the new."""
    path = tmp_path / "in.txt"
    path.write_text("wings\n" * 20)
    start = process_engine.ProcessEngine.start

    def change_and_start(self: process_engine.ProcessEngine, part: Part) -> None:
        path.write_text("bread\n" * 20)
        start(self, part)

    monkeypatch.setattr(process_engine.ProcessEngine, "start", change_and_start)
    with pytest.raises(InputError, match=r"the input \(.*\) has changed since"):
        run_batch(bundle, "embed", path, tmp_path / "out", workers=1)


def test_a_plan_that_was_changed_is_refused(bundle: Path, source_of: Path, tmp_path: Path) -> None:
    """One that lost a line, and one that names a file elsewhere."""
    plan = tmp_path / "out" / "_job" / "plan.jsonl"
    whole = plan.read_text()
    (tmp_path / "secret.txt").write_text("secret\n")
    for text in (whole.rpartition("[")[0], whole + '[99, ["../secret.txt", 0, 1, 0, 7]]\n', ""):
        plan.write_text(text)
        with pytest.raises(
            BatchError, match=r"plan.jsonl is damaged; delete the folder, and run the job again"
        ):
            run_batch(bundle, "embed", source_of, tmp_path / "out", workers=1)
    assert "secret" not in str(read(tmp_path / "out")["file"].to_pylist())


def test_a_password_in_an_address_is_not_shown() -> None:
    storage = Storage.of("s3://KEY:SECRET@bucket/folder?endpoint_override=here")
    assert str(storage) == "s3://bucket/folder"
    assert str(Storage.of("/some/../folder/")) == "/folder"


def test_a_file_of_an_object_store_is_there_when_it_is_whole() -> None:
    """In a file system that is no folder of this machine: Arrow's own stand-in."""
    storage = Storage.of("mock:///folder")
    storage.files.create_dir("folder/_job")
    storage.write("a", b"old")
    with pytest.raises(KeyboardInterrupt), storage.write_parts("a") as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert storage.read("a") == b"old"
    storage.write("a", b"new")
    assert storage.read("a") == b"new"
    with pytest.raises(FileNotFoundError), storage.write_parts("b"):
        storage.remove_temporary()  # as a job does that took this one's writer for dead
    assert [entry.base_name for entry in storage.files.get_file_info(FileSelector("folder/_job"))] == []


def test_workers_that_never_begin_end_the_job(tmp_path: Path, bundle: Path) -> None:
    """As of a program that calls run_batch without a guard, which each process would run again."""
    (tmp_path / "in.txt").write_text("a\n" * 10)
    program = tmp_path / "program.py"
    program.write_text(
        "from planforge.runtime.apps.batch import run_batch\n"
        f"run_batch({str(bundle)!r}, 'embed', {str(tmp_path / 'in.txt')!r}, {str(tmp_path / 'out')!r})\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "the workers died 3 times before computing anything" in done.stderr
    assert "below `if __name__ == '__main__':`" in done.stderr


def test_a_part_that_fails_is_named(bundle: Path, tmp_path: Path) -> None:
    """A page of Parquet that is damaged: its footer is read, and the rows before it are not blamed."""
    path = tmp_path / "in.parquet"
    pq.write_table(
        pa.table({"text": TEXTS}), path, row_group_size=20, compression="none", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    offset = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[offset : offset + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(
        BatchError, match=r"part-000001.parquet, which begins at row 20 of in.parquet, failed: "
    ):
        run_batch(bundle, "embed", path, tmp_path / "out", rows_per_part=20, workers=1)


def test_where_every_row_fails_the_command_does_too(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"txt": "a"}\n' * 3)
    done = planforge(
        "batch", bundle, "--task", "embed", "--input", tmp_path / "in.jsonl", "-o", tmp_path / "out"
    )
    assert done.returncode == 1
    assert "every row has an error; the column 'error' in" in done.stderr
    assert "errors        3" in done.stdout


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 2, "job": {}, "plan": {}}', b"[1]"])
def test_a_description_that_is_damaged_says_so(
    bundle: Path, source_of: Path, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "out" / "_job" / "job.json").write_bytes(content)
    with pytest.raises(BatchError, match="delete the output folder, and run the job again"):
        run_batch(bundle, "embed", source_of, tmp_path / "out", workers=1)


def test_a_part_that_is_damaged_is_named(bundle: Path, source_of: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "part-000000.parquet").write_bytes(b"")
    with pytest.raises(BatchError, match=r"part-000000.parquet cannot be read; delete it"):
        run_batch(bundle, "embed", source_of, tmp_path / "out", workers=1)


def test_an_address_names_a_folder(bundle: Path, source: Path, tmp_path: Path) -> None:
    """As s3://bucket/folder does; file:// is the one that is here."""
    result = run_batch(bundle, "embed", source.as_uri(), (tmp_path / "out").as_uri(), workers=1)
    assert result.rows == 63
    assert len(read(tmp_path / "out")) == 63


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    storage = Storage.of(tmp_path)
    with pytest.raises(RuntimeError), storage.write_parts("a") as stream:
        stream.write(b"half")
        raise RuntimeError
    assert not list(tmp_path.glob("[!_]*")) and not list((tmp_path / "_job").iterdir())


def test_the_command_says_what_it_did(bundle: Path, source: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        "batch",
        bundle,
        "--task",
        "embed",
        "--input",
        source,
        "-o",
        tmp_path / "out",
    ]
    done = planforge(*arguments, "--workers", "1", "--column", "text", "--option", "pooling=cls")
    assert done.returncode == 0, done.stderr
    assert "rows          63" in done.stdout
    assert "errors        3" in done.stdout
    assert "one of them   text " in done.stdout or "one of them   the line" in done.stdout
    assert "looking at the input" in done.stderr
    again = json.loads(planforge(*arguments, "--json", "--option", "pooling=cls").stdout)
    assert (again["rows"], again["computed"], again["errors"], again["workers"]) == (63, 0, 3, {})
    bad = planforge(*arguments, "--option", "pooling")
    assert bad.returncode == 2 and "must be NAME=VALUE" in bad.stderr
    pair = planforge(
        "batch", bundle, "--task", "rank", "--input", source, "-o", tmp_path / "o", "--column", "text"
    )
    assert pair.returncode == 2 and "--column query=... --column text=..." in pair.stderr
