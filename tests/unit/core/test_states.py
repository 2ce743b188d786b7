"""States keep their values on the wire, and words of other versions do no harm."""

from __future__ import annotations

import pytest

from holdfast_core.states import RankHealth, RestorePhase, RestoreProgress, RestoreSource


def test_an_unknown_word_reads_as_the_state_that_promises_nothing() -> None:
    assert RankHealth.of("DREAMING") is RankHealth.OFFLINE
    assert RestoreSource.of("tape") is RestoreSource.UNKNOWN
    assert RestorePhase.of("rewind") is RestorePhase.UNKNOWN


@pytest.mark.parametrize("kind", [RankHealth, RestoreSource, RestorePhase])
def test_each_state_is_found_by_its_value(
    kind: type[RankHealth | RestoreSource | RestorePhase],
) -> None:
    assert [kind.of(state.value) for state in kind] == list(kind)


def test_ranks_with_a_session_are_at_work() -> None:
    assert {state for state in RankHealth if state.at_work} == {"HEALTHY", "SNAPSHOTTING"}


def test_storage_is_waited_for_in_two_phases() -> None:
    assert {phase for phase in RestorePhase if phase.waits_for_storage} == {"storage", "load"}


def test_progress_reads_as_one_line() -> None:
    assert str(RestoreProgress(phase=RestorePhase.LOAD, done=3, total=9)) == "load 3/9"
    words = RestoreProgress(phase=RestorePhase.STORAGE, detail="waiting for s3://bucket")
    assert str(words) == "storage 0/0 waiting for s3://bucket"
