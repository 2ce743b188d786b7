"""What a session's tally reports to the daemon of a save that was not taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast._copying.bubbles import Bubbles
from holdfast._daemon.client import CommitRequest
from holdfast._daemon.handles import SaveHandle
from holdfast._save.tally import Tally
from holdfast.testing import FakeDaemon
from holdfast_core.errors import ReplicasDivergedError, SnapshotSkippedError, StaleEpochError
from holdfast_core.snapshots.generations import Generation

WAIT_S = 20


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


def test_waits_for_other_stages_are_reported_as_they_are_by_then() -> None:
    clock = iter((0.0, 1.0, 3.0, 4.0, 4.5))
    bubbles = Bubbles(2, lambda: next(clock))
    tally = Tally(bubbles)
    for total_s in (2.0, 2.5):
        with bubbles.bubble():
            bubbles.copied_bytes += 7
        report = tally.report("s", None)
        assert report.bubble_s == tally.counters.bubble_s == total_s
        assert report.bubble_bytes == tally.counters.bubble_bytes == bubbles.copied_bytes


class EagerDaemon(FakeDaemon):
    """Daemon that answers a commit only when its event has reached the trainer."""

    handle: SaveHandle

    def commit(self, request: CommitRequest) -> None:
        super().commit(request)
        self.announce("protected", Generation(1, self.handle.step))
        self.handle.protected.result(WAIT_S)


@pytest.mark.parametrize("kind", [FakeDaemon, EagerDaemon])
def test_whoever_sees_that_a_save_is_committed_finds_it_counted(
    kind: type[FakeDaemon], trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    daemon, seen = kind(tmp_path), list[int]()
    session = open_session(trainer, daemon, start_wait_s=WAIT_S)
    for step in range(1, 4):
        trainer.train()
        gate = daemon.hold("commit")
        handle = session.save(step)
        if isinstance(daemon, EagerDaemon):
            daemon.handle = handle
        handle.committed.add_done_callback(lambda _: seen.append(session.counters.committed))
        gate.set()
        handle.committed.result(WAIT_S)
    session.close()
    assert seen == [1, 2, 3] and session.counters.committed == 3
