"""Ranks that find out together how far apart snapshots are to be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from meeting import WAIT_S, Meeting, Seat

import holdfast
from holdfast._agree.exchange import Alone
from holdfast._agree.interval import DueSaves, SaveInterval
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._capture.whole import WholeCapture
from holdfast._copying.devices import CpuDevice
from holdfast._daemon.client import Opened
from holdfast._daemon.handles import SaveHandle
from holdfast._environment import read_environment
from holdfast._session.protected import ProtectedSession
from holdfast._settings import Settings
from holdfast._state.capture import LiveState
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, SnapshotSkippedError
from holdfast_core.job.snapshots import Selective
from holdfast_core.protection.automatic_interval import LEAD_CALLS, MEASURED, WARMING_UP, Called
from holdfast_core.protection.intervals import STEPS_MAX
from holdfast_core.topology import Topology

A_DAY = 86400.0 / 20_000
"""One recovery in 20,000 s."""
NEVER = 1e-9
"""Recoveries a day: so few that one snapshot is enough."""


class Ranks:
    """Ranks that train beside each other on a virtual clock; each waits for its own snapshots."""

    def __init__(self, blocked_s: Sequence[float]) -> None:
        self.meeting = Meeting(len(blocked_s))
        self.blocked_s = list(blocked_s)
        self.pacings = [
            SaveInterval(Seat(self.meeting, rank), A_DAY) for rank in range(len(blocked_s))
        ]
        self.taken: list[list[int]] = [[] for _ in blocked_s]
        self.known: list[list[int]] = [[] for _ in blocked_s]
        """Steps whose snapshots were due, as far as the rank knows."""
        self.now_s, self.step = 0.0, 0

    def train(self) -> None:
        """A step of one second, and as long as the slowest rank waits."""
        self.step += 1
        waits_s = 0.0
        for rank, pacing in enumerate(self.pacings):
            handle = SaveHandle(self.step)
            called = pacing.on_save_called(handle, self.now_s)
            self.known[rank] += called.missed
            if called.due:
                self.taken[rank].append(self.step)
                self.known[rank].append(self.step)
                handle._reach(handle.protected)
                pacing.add_wait(self.blocked_s[rank])
                waits_s = max(waits_s, self.blocked_s[rank])
        self.now_s += 1.0 + waits_s

    def train_until(self, steps: int) -> None:
        """Until snapshots are `steps` apart on all ranks."""
        until = time.monotonic() + WAIT_S
        while {pacing.steps for pacing in self.pacings} != {steps}:
            self.train()
            assert time.monotonic() < until, [pacing.steps for pacing in self.pacings]

    def close(self) -> None:
        self.meeting.break_up()  # no rank waits for a statement that others will not make
        for pacing in self.pacings:
            pacing.close(WAIT_S)


def test_ranks_that_measure_differently_take_snapshots_at_the_same_steps() -> None:
    ranks = Ranks([0.0, 0.5, 0.02])
    ranks.train_until(141)  # (2 * 0.5 s * 20,000 s) ** 0.5
    for _ in range(1000):
        ranks.train()
    ranks.close()
    shortest = min(len(known) for known in ranks.known)
    for taken, known in zip(ranks.taken, ranks.known, strict=True):
        assert known[:shortest] == ranks.known[0][:shortest]
        assert set(taken) <= set(known)
        assert {b - a for a, b in pairwise(taken[-4:])} == {141}


def test_the_interval_follows_what_snapshots_cost_now() -> None:
    ranks = Ranks([0.5, 0.1])
    ranks.train_until(141)
    ranks.blocked_s = [0.02, 0.02]
    ranks.train_until(28)
    ranks.close()


def test_what_costs_nothing_is_taken_at_every_step() -> None:
    ranks = Ranks([0.0, 0.0])
    until = time.monotonic() + WAIT_S
    while min(len(known) for known in ranks.known) < 100:
        ranks.train()
        assert time.monotonic() < until
    ranks.close()
    assert [pacing.steps for pacing in ranks.pacings] == [1, 1]
    assert [known[:100] for known in ranks.known] == [list(range(1, 101))] * 2


def test_ranks_that_cannot_exchange_costs_take_every_save(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks([0.5, 0.5])
    ranks.train_until(141)
    ranks.meeting.break_up()
    ranks.train_until(1)
    ranks.close()
    logged = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(logged) == 2
    assert logged[0].startswith(
        "the ranks cannot agree on an interval; every save is taken from now on:"
    )


def test_a_snapshot_that_was_not_taken_is_not_measured() -> None:
    pacing = SaveInterval(Alone(), A_DAY)
    for step in range(1, WARMING_UP + MEASURED + LEAD_CALLS + 50):
        handle = SaveHandle(step)
        pacing.on_save_called(handle, float(step))
        handle._fail(SnapshotSkippedError("no slot"))
        pacing.add_wait(0.9)
    pacing.close(WAIT_S)
    assert pacing.steps == 1


@pytest.mark.parametrize("pacing", [DueSaves(), SaveInterval(Alone(), A_DAY)])
def test_the_first_save_is_due_whatever_the_choice(pacing: DueSaves) -> None:
    called = pacing.on_save_called(SaveHandle(1), 0.0)
    assert called == Called(due=True)
    pacing.add_wait(0.5)
    pacing.close(WAIT_S)


def test_every_save_is_due_where_nothing_is_measured() -> None:
    pacing = DueSaves()
    for step in (1, 2, 50, 1000):
        assert pacing.on_save_called(SaveHandle(step), float(step)) == Called(due=True)
        pacing.add_wait(0.9)
        assert pacing.steps == 0
    pacing.close(WAIT_S)


# --- in a session ---------------------------------------------------------------------------------


class TwoSlots(FakeDaemon):
    """Calls the arenas that it gives arenas of two slots."""

    def open(self, *request: Any) -> Opened:
        return replace(super().open(*request), slots=2)


@pytest.mark.parametrize(("kind", "slots"), [(FakeDaemon, 3), (TwoSlots, 2)])
def test_a_session_takes_the_saves_that_are_worth_it(
    make_trainer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: type[FakeDaemon],
    slots: int,
) -> None:
    caplog.set_level("INFO", "holdfast")
    trainer, daemon = make_trainer(), kind(tmp_path)
    session = trainer.open(daemon, recoveries_per_day=NEVER, report_interval_s=0.0)
    step, until = 0, time.monotonic() + WAIT_S
    while session.counters.interval_steps != STEPS_MAX:
        assert time.monotonic() < until
        step += 1
        trainer.train()
        session.save(step)
    decided = f"snapshots are {STEPS_MAX} steps apart from now on: a step takes"
    while decided not in caplog.text:  # logged once it counts
        assert time.monotonic() < until
    assert f"later, ranks have {slots} slots, and" in caplog.text
    skipped = session.counters.skipped
    trainer.train()
    handle = session.save(step + 1)
    with pytest.raises(SnapshotSkippedError, match="which are 1000000 apart"):
        handle.committed.result(0)
    while all(report.step <= step for report in daemon.reports):  # a rank that trains is no hang
        assert time.monotonic() < until
    session.close()
    assert session.counters.skipped == skipped  # it is none that could not be taken
    assert session.counters.committed + skipped >= WARMING_UP + MEASURED


class Counted(ReplicaCheck):
    """Compares nothing, and remembers the saves that were counted."""

    def __init__(self) -> None:
        super().__init__(Alone(), Topology(dp=2), 0)
        self.saves: list[tuple[int, int]] = []
        """(number, step)."""

    def on_save_called(self, number: int, step: int) -> None:
        self.saves.append((number, step))


def test_saves_are_numbered_alike_on_ranks_that_get_the_decision_late(tmp_path: Path) -> None:
    """Rank 0 is a session; rank 1 states its costs only after rank 0 has had to let saves pass."""
    pair, meeting, counted = Topology(dp=2), Meeting(2), Counted()
    model = torch.nn.Linear(8, 8)
    live = LiveState(model, [torch.optim.SGD(model.parameters())], pair, 0)
    session = ProtectedSession(
        live=live,
        stateful={},
        topology=pair,
        rank=0,
        client=FakeDaemon(tmp_path, rank=0, world_size=2),
        exchange=Alone(),
        device=CpuDevice(),
        settings=Settings(start_wait_s=WAIT_S),
        replica_check=counted,
        strategy=WholeCapture(),
        interval=SaveInterval(Seat(meeting, 0), A_DAY),
    )
    stated = WARMING_UP + MEASURED
    known = stated + LEAD_CALLS - 1
    for step in range(1, known + 4):
        error = session.save(step).committed.exception(WAIT_S)
        assert (error is None) == (step <= known), (step, error)
    assert "have not agreed on the interval" in str(error)
    other = SaveInterval(Seat(meeting, 1), A_DAY)  # takes nothing, so that the interval stays 1
    for late in range(1, step + 1):
        other.on_save_called(SaveHandle(late), float(late))
    until = time.monotonic() + WAIT_S
    while session.save(step := step + 1).committed.exception(WAIT_S) is not None:
        other.on_save_called(SaveHandle(step), float(step))
        assert time.monotonic() < until
    assert counted.saves == [(n, n + 1) for n in range(step)]
    meeting.break_up()
    other.close(WAIT_S)
    session.close()


def test_without_it_every_save_is_taken(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    session = trainer.open(FakeDaemon(tmp_path))
    for step in range(1, 40):
        trainer.train()
        session.save(step).committed.result(WAIT_S)
    assert session.counters.interval_steps == 0
    session.close()


def test_the_rate_of_recoveries_comes_from_the_job(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_environment({}).recoveries_per_day is None
    monkeypatch.setenv("HOLDFAST_RECOVERIES_PER_DAY", "0.25")
    monkeypatch.setenv("HOLDFAST_COMPARE_REPLICAS_EVERY", "3")
    found = read_environment()
    assert (found.recoveries_per_day, found.settings["compare_replicas_every"]) == (0.25, 3)
    trainer = make_trainer()
    session = trainer.open(FakeDaemon(tmp_path))
    session.save(1)
    assert session.counters.interval_steps == 1
    session.close()


@pytest.mark.parametrize("text", ["often", "0", "nan", "inf", "-1"])
def test_a_rate_that_is_none_is_refused(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HOLDFAST_RECOVERIES_PER_DAY", text)
    with pytest.raises(InvalidJobError, match="above 0"):
        make_trainer().open(FakeDaemon(tmp_path))


def test_gradients_of_one_step_cannot_make_up_for_many() -> None:
    with pytest.raises(InvalidJobError, match="a gradient makes up for one step"):
        holdfast.Settings(policy=Selective(recompute=True), recoveries_per_day=1.0)
