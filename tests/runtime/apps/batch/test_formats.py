"""Stretches of a file, read one by one, are its rows, as an independent reader of the whole file has them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.apps.batch import formats
from planforge.runtime.apps.batch.formats import open_table
from planforge.runtime.apps.batch.storage import Storage
from planforge.runtime.apps.batch.table_file import Row, RowRange
from planforge.runtime.apps.batch.values import Unreadable
from planforge.runtime.errors import InputError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=20)
FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\t"), max_size=20)
ROWS = st.integers(1, 7)


def read_all(path: Path, columns: Sequence[str], rows: int) -> list[Row]:
    """Every row, by row ranges of so many, each read from a file that was opened anew."""
    storage = Storage.of(path.parent)
    row_ranges = [RowRange(path.name, *place) for place in open_table(storage, str(path)).cut(rows)]
    assert all(row_range.rows == rows for row_range in row_ranges[:-1])
    found: list[Row] = []
    for row_range in row_ranges:
        read = list(open_table(storage, str(path)).read(row_range, columns))
        assert len(read) == row_range.rows
        found += read
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(LINES, max_size=12), rows=ROWS, end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
def test_lines_of_text(folder: Path, lines: list[str], rows: int, end: str, last: bool) -> None:
    path = folder / "a.txt"
    path.write_bytes((end.join(lines) + (end if last else "")).encode())
    read = read_all(path, ["text"], rows)
    wanted = [(number, line) for number, line in enumerate(lines) if line.encode().strip()]
    assert [(row.number, row.values[0].decode()) for row in read] == wanted


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.one_of(TEXTS, st.none(), st.integers()), max_size=12), rows=ROWS)
def test_json_lines(folder: Path, values: list[Any], rows: int) -> None:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"k": n, "text": value}) + "\n" for n, value in enumerate(values)))
    read = read_all(path, ["text", "k"], rows)
    assert [row.values for row in read] == [(value, number) for number, value in enumerate(values)]


@settings(max_examples=150, deadline=None)
@given(records=st.lists(st.tuples(TEXTS, TEXTS), max_size=10), rows=ROWS, end=st.sampled_from(["\n", "\r\n"]))
def test_csv(folder: Path, records: list[tuple[str, str]], rows: int, end: str) -> None:
    """Fields have commas, quotes and line breaks; the csv module reads the whole file."""
    path = folder / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL)
        writer.writerow(["text", "other"])
        writer.writerows(records)
    read = read_all(path, ["other", "text"], rows)
    with path.open(newline="", encoding="utf-8") as file:
        wanted = [(record["other"], record["text"]) for record in csv.DictReader(file)]
    assert [tuple(value.decode() for value in row.values) for row in read] == wanted
    assert [row.number for row in read] == list(range(len(records)))


@settings(max_examples=300, deadline=None)
@given(body=st.text(st.sampled_from('a5",\r\n \u00e9'), max_size=40), rows=ROWS)
def test_csv_of_any_quotes_and_line_ends(folder: Path, body: str, rows: int) -> None:
    """Quotes within fields, open quotes, lone carriage returns: as the csv module reads them."""
    path = folder / "b.csv"
    path.write_bytes(("text\n" + body).encode())
    with path.open(newline="", encoding="utf-8") as file:
        _, *wanted = [fields for fields in csv.reader(file) if fields]
    read = read_all(path, ["text"], rows)
    assert len(read) == len(wanted)
    for row, fields in zip(read, wanted, strict=True):
        if len(fields) == 1:
            assert row.values == (fields[0].encode(),)
        else:
            assert str(row.error).startswith(f"the record has {len(fields)} fields")


def test_csv_as_pandas_writes_it(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"k": range(50), "text": [f'he said "{n}",\nand left' for n in range(50)]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    read = read_all(tmp_path / "a.csv", ["text"], 7)
    assert [row.values[0].decode() for row in read] == frame["text"].tolist()


@settings(max_examples=100, deadline=None)
@given(
    records=st.lists(st.tuples(FIELDS, FIELDS), max_size=10), rows=ROWS, end=st.sampled_from(["\n", "\r\n"])
)
def test_tsv(folder: Path, records: list[tuple[str, str]], rows: int, end: str) -> None:
    """Nothing is quoted, as in the media type text/tab-separated-values; the csv module reads it so."""
    path = folder / "a.tsv"
    lines = ["\t".join(fields) for fields in [("text", "other"), *records]]
    path.write_bytes(end.join(lines).encode())
    reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    wanted = [
        (record["other"], record["text"]) for record in reader if "".join(record.values()).encode().strip()
    ]
    read = read_all(path, ["other", "text"], rows)
    assert [tuple(value.decode() for value in row.values) for row in read] == wanted


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_a_mark_of_utf_8_belongs_to_no_column_and_no_text(tmp_path: Path, rows: int) -> None:
    """Excel writes one into CSV; pandas reads what pandas wrote."""
    frame = pandas.DataFrame({"text": ['a "b",\u00e9', "c", "\ufeffd"], "k": ["1", "2", "3"]})
    frame.to_csv(tmp_path / "a.csv", index=False, quoting=csv.QUOTE_ALL, encoding="utf-8-sig")
    frame.to_csv(tmp_path / "a.tsv", index=False, sep="\t", quoting=csv.QUOTE_NONE, encoding="utf-8-sig")
    lines = frame.to_json(orient="records", lines=True)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("\n".join(frame["text"]), encoding="utf-8-sig")
    for name in ("a.csv", "a.tsv", "a.jsonl", "a.txt"):
        path = tmp_path / name
        columns = ["text"] if name == "a.txt" else ["text", "k"]
        open_table(Storage.of(tmp_path), str(path)).check(columns)
        read = [row.values for row in read_all(path, columns, rows)]
        texts = [tuple(v.decode() if isinstance(v, bytes) else v for v in values) for values in read]
        assert texts == list(frame[columns].itertuples(index=False, name=None)), name


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "ndjson", "csv", "tsv"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes("\ufefftext\n1\n".encode(encoding))
    named = encoding[:6].upper()
    with pytest.raises(InputError, match=f"{path} is {named}, not UTF-8; .* iconv -f {named} "):
        open_table(Storage.of(tmp_path), str(path)).check(["text"])


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.one_of(TEXTS, st.none()), max_size=20), rows=ROWS, group=st.integers(1, 9))
def test_parquet(folder: Path, values: list[str | None], rows: int, group: int) -> None:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(values, pa.string())}), path, row_group_size=group)
    read = read_all(path, ["text"], rows)
    wanted = [(number, None if value is None else value.encode()) for number, value in enumerate(values)]
    assert [(row.number, row.values[0]) for row in read] == wanted


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()])
def test_other_texts_of_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"text": pa.array(["é", "b", "é"]).cast(kind)}), tmp_path / "a.parquet")
    assert [row.values[0] for row in read_all(tmp_path / "a.parquet", ["text"], 2)] == [
        "é".encode(),
        b"b",
        "é".encode(),
    ]


def test_numbers_of_parquet_stay_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1.5, 2.5]}), tmp_path / "a.parquet")
    assert [row.values for row in read_all(tmp_path / "a.parquet", ["text"], 2)] == [(1.5,), (2.5,)]


BAD_LINES = {
    b"\xff\xfe": "the line is not UTF-8: byte 1 is 0xff",
    b"{": "the line is not JSON",
    b'["text"]': "the line is not a JSON object",
    b'{"a":' * 100_000: "the line is not JSON",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_line_that_is_no_row_says_why(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    read = read_all(tmp_path / "a.jsonl", ["text"], 2)
    assert [row.error is None for row in read] == [True, False, True]
    assert message in str(read[1].error)


def test_a_record_of_another_length_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('k,text\n1,a\n2\n3,b,c\n4,"open\n')
    read = read_all(tmp_path / "a.csv", ["text"], 2)
    assert [row.error for row in read] == [
        None,
        "the record has 1 fields, the file's columns are 2",
        "the record has 3 fields, the file's columns are 2",
        None,
    ]


def test_a_line_that_is_too_long_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "RECORD_BYTES", 1000)
    monkeypatch.setattr(formats, "READ_BYTES", 64)
    (tmp_path / "a.txt").write_text("a\n" + "b" * 5001 + "\nc\n" + "d" * 1001)
    read = read_all(tmp_path / "a.txt", ["text"], 2)
    assert [row.values for row in read] == [(b"a",), (), (b"c",), ()]
    assert read[1].error == "the line has 5,002 bytes; at most 1,000 are allowed"
    (tmp_path / "a.csv").write_text('text\n"' + "b\n" * 600)
    with pytest.raises(InputError, match="record 0 has over 1,000 bytes; is a closing quote missing"):
        read_all(tmp_path / "a.csv", ["text"], 2)


def test_a_stretch_of_long_lines_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "ROW_RANGE_BYTES", 100)
    (tmp_path / "a.txt").write_text("\n".join(["b" * 39] * 7))
    sizes = [place[1] for place in open_table(Storage.of(tmp_path), str(tmp_path / "a.txt")).cut(50)]
    assert sizes == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n", "has no columns 'text'; it has: a, b"),
        ("a.csv", b"text,text\n1,2\n", "has 2 columns 'text'"),
        ("a.csv", b"", "is empty; its first line must name the columns"),
        ("a.parquet", b"PAR1", "is not a readable Parquet file"),
    ],
)
def test_a_file_without_the_column_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_table(Storage.of(tmp_path), str(tmp_path / name)).check(["text"])


def test_parquet_keeps_the_row_group_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group that many row ranges need is read once; it may be a million rows."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100}), path, row_group_size=50)
    reads = []
    whole = pq.ParquetFile.read_row_group

    def count(self: pq.ParquetFile, number: int, **options: Any) -> pa.Table:
        reads.append(number)
        return whole(self, number, **options)

    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        count,
    )
    table = open_table(Storage.of(tmp_path), str(path))
    for place in table.cut(10):
        list(table.read(RowRange(path.name, *place), ["text"]))
    assert reads == [0, 1]


def test_csv_reads_a_field_of_a_megabyte(tmp_path: Path) -> None:
    """Others in the process keep the csv module's limit."""
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("text\n" + "x" * 1_000_000 + "\n")
    (row,) = read_all(tmp_path / "a.csv", ["text"], 2)
    assert row.error is None and len(row.values[0]) == 1_000_000
    assert csv.field_size_limit() == limit < 1_000_000


def test_lines_are_read_from_any_stream() -> None:
    lines = formats.TextFile(Storage.of("."), "a.txt").iterate_lines(io.BytesIO(b"a\nb"), 0)
    assert list(lines) == [(b"a\n", 2), (b"b", 1)]


def test_values_that_python_cannot_have_say_why(tmp_path: Path) -> None:
    """A text of a list that is no UTF-8, a time beyond the year 9999: the other rows are read."""
    broken = pa.Array.from_buffers(
        pa.string(),
        2,
        [None, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0])), pa.py_buffer(b"ab\xff")],
    )
    lists = pa.ListArray.from_arrays([0, 1, 2], broken)
    times = pa.array([0, 2**62 // 1000], pa.timestamp("ms"))
    pq.write_table(pa.table({"lists": lists, "times": times}), tmp_path / "a.parquet")
    good, bad = read_all(tmp_path / "a.parquet", ["lists", "times"], 2)
    assert good.values[0] == ["a"]
    assert isinstance(bad.values[0], Unreadable) and "utf-8" in bad.values[0].reason
    assert isinstance(bad.values[1], Unreadable)
