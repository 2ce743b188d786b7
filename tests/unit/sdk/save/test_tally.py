"""What a session's tally reports to the daemon of a save that was not taken."""

from __future__ import annotations

from holdfast._save.tally import Tally
from holdfast_core.errors import ReplicasDivergedError, SnapshotSkippedError, StaleEpochError


def test_the_newest_cause_is_reported_with_its_kind_until_a_save_succeeds() -> None:
    tally = Tally()
    tally.refuse(1, SnapshotSkippedError("no slot"))
    tally.refuse(2, ReplicasDivergedError("ranks 0 and 1 differ"))
    report = tally.report("s", None)
    assert (report.failure, report.failure_code) == ("ranks 0 and 1 differ", "replicas_diverged")
    assert (report.skipped, report.failed) == (1, 1)
    tally.commit()
    report = tally.report("s", None)
    assert (report.failure, report.failure_code) == ("", "")


def test_what_ends_all_saves_is_reported_before_the_newest_cause() -> None:
    tally = Tally()
    tally.refuse(1, SnapshotSkippedError("no slot"))
    report = tally.report("s", StaleEpochError("epoch 2 has begun"))
    assert (report.failure, report.failure_code) == ("epoch 2 has begun", "stale_epoch")
