"""What a verifier of golden data, without PyTorch, replays node by node."""

from __future__ import annotations

from pathlib import Path

import pytest

from planforge.exporter.tasks.verifier import Verifier, open_golden_verifier
from planforge.runtime.apps.check.case import Location
from planforge.runtime.apps.check.files import find_golden, read_golden
from planforge.runtime.bundle.bundle import Bundle


@pytest.fixture(params=["demo_bundle", "dates_bundle"])
def verifier(request: pytest.FixtureRequest) -> Verifier:
    bundle = Bundle.open(Path(request.getfixturevalue(request.param)))
    file = find_golden(bundle)
    assert file is not None
    return open_golden_verifier(bundle, read_golden(file)[0])


def test_a_replay_is_a_padded_batch_and_a_step_on_a_past(verifier: Verifier) -> None:
    for artifact in verifier.bundle.manifest.artifacts:
        for whole in (False, True):
            replay = verifier.make_replay(artifact, whole)
            first, *others = replay.steps
            assert len(replay.read) > 1 and None not in replay.read
            assert first.name.startswith("prefill" if artifact.keeps_cache else "run")
            assert [step.name.split(",")[0].split()[0] for step in others] == [
                "decode"
            ] * artifact.keeps_cache
            assert whole or (first.positions < 0).any()


def test_a_location_is_replayed_in_its_own_case(verifier: Verifier) -> None:
    """Also that of one of the few cases that run node by node, which stand beside the others."""
    expected = verifier.expected
    assert expected.few
    for artifact in verifier.bundle.manifest.artifacts:
        cases = [case for case in (*expected.few, *expected.cases[:20]) if case.graph == artifact.graph]
        for case in cases:
            row = len(case.rows) - 1
            replay = verifier.make_location_replay(
                artifact, Location(case, len(case.rows[row].ends) - 1, row)
            )
            assert len(replay.read) == len(case.rows)
            assert [number for number, read in enumerate(replay.read) if read is not None] == [row]


def test_cases_are_marked_as_padded_where_their_names_say_so(verifier: Verifier) -> None:
    expected = verifier.expected
    marked = [case.is_padded for case in (*expected.cases, *expected.few)]
    assert marked == ["padded" in case.name for case in (*expected.cases, *expected.few)]
    assert any(marked) and not all(marked)
