"""Progress of restores, from daemons of this and of other versions."""

from __future__ import annotations

from holdfast_core.states import RestorePhase, RestoreProgress
from holdfast_protos import trainer_pb2
from holdfast_protos.loading import progress_from_proto


def test_progress_comes_back_from_its_message() -> None:
    message = trainer_pb2.RestoreProgress(phase="load", done=4, total=8, detail="from storage")
    assert progress_from_proto(message) == RestoreProgress(
        phase=RestorePhase.LOAD, done=4, total=8, detail="from storage"
    )


def test_a_phase_of_a_newer_daemon_keeps_its_detail() -> None:
    found = progress_from_proto(trainer_pb2.RestoreProgress(phase="rewind", detail="in words"))
    assert (found.phase, found.detail) == (RestorePhase.UNKNOWN, "in words")
