"""Records of CSV, compared with the csv module's."""

from __future__ import annotations

import csv

from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.apps.batch.csv_records import read_records


@settings(max_examples=1000)
@given(text=st.text(st.sampled_from('a",\r\n \u2028'), max_size=60))
def test_records_are_those_of_the_csv_module(text: str) -> None:
    lines = [line.decode() for line in text.encode().splitlines(keepends=True)]
    assert list(read_records(lines)) == list(csv.reader(lines))


@given(text=st.text(st.sampled_from('a",\n'), max_size=40))
def test_a_record_takes_its_own_lines_only(text: str) -> None:
    """The caller tells by them where in the file the record lies."""
    lines = text.splitlines(keepends=True)
    ours = iter(lines)
    theirs = iter(lines)
    for _ in zip(read_records(ours), csv.reader(theirs), strict=True):
        assert ours.__length_hint__() == theirs.__length_hint__()  # type: ignore[attr-defined]


def test_many_lines_and_quotes_in_one_field_take_little_time() -> None:
    """Nothing is read twice: a million of each."""
    lines = ['"', *['""\n'] * 1_000_000, '"\n']
    ((field,),) = read_records(lines)
    assert len(field) == 2_000_000
