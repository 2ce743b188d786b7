"""Sparse windows whose length follows from measurement: all ranks have the same, and every one of
them can be restored."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meeting import WAIT_S, Meeting, Seat

from holdfast._agree.window_order import WindowDecisions
from holdfast._capture.measuring import Durations
from holdfast._capture.windows import WindowCapture
from holdfast._session.protected import ProtectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.experts.counts import UNKNOWN, Measures
from holdfast_core.experts.sparse_windows import Operator, cut
from holdfast_core.experts.window_lengths import WindowSpan, bytes_of_window, first_of, statement
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind

UNITS = [UnitKey(0, UnitKind.EXPERT, number) for number in range(6)]
OPERATORS = [Operator(unit=unit, compute_bytes=2, state_bytes=12) for unit in UNITS]
SCHEDULES = [cut(OPERATORS, steps) for steps in (1, 2, 3, 6)]
LENGTHS = [
    bytes_of_window(one, dict.fromkeys(UNITS, 12), dict.fromkeys(UNITS, 2)) for one in SCHEDULES
]
"""Saves of at most 72, 42, 32 and 22 bytes."""
ORIGIN = 10
AUTO = SparseWindows(window="auto")


def hiding(nbytes: int) -> Measures:
    """Measures of a step that just hides a save of so many bytes."""
    return Measures(host_bytes_s=nbytes, step_us=1_000_000)


class Rank:
    """A rank that has measured something, and knows of windows what it has been told."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.measures, self.lengths = UNKNOWN, LENGTHS
        self.known: dict[int, WindowSpan] = {}
        """Step → its window."""
        self.deciding = WindowDecisions(Seat(meeting, rank), AUTO)
        self.deciding.start(ORIGIN, SCHEDULES, first_of(SCHEDULES), [], self._state)

    def _state(self) -> list[int]:
        return statement(len(SCHEDULES), self.lengths, self.measures)

    def save(self, step: int) -> None:
        self.deciding.on_save_called(step)
        decision = self.deciding.at(step, WAIT_S)
        assert decision is not None
        assert len(decision.schedule.slots) == decision.span.steps
        self.known[step] = decision.span


class Ranks:
    """Ranks that train beside each other, each of which comes first at times."""

    def __init__(self, count: int) -> None:
        self.meeting, self.step = Meeting(count), ORIGIN
        self.ranks = [Rank(self.meeting, rank) for rank in range(count)]
        self._chance = random.Random(count)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            with ThreadPoolExecutor(len(self.ranks)) as pool:
                order = self._chance.sample(self.ranks, len(self.ranks))
                for done in [pool.submit(one.save, self.step) for one in order]:
                    done.result(WAIT_S)

    def measured(self, *measures: Measures) -> None:
        for one, of_rank in zip(self.ranks, measures, strict=True):
            one.measures = of_rank

    def close(self) -> None:
        self.meeting.break_up()
        for one in self.ranks:
            one.deciding.close(WAIT_S)


def test_all_ranks_have_the_same_windows_whatever_each_has_measured() -> None:
    """Windows are as long as the rank with the slowest copies needs them: 3 steps at first, then 6,
    then 2, each from the beginning of a window on."""
    ranks = Ranks(3)
    ranks.train(6)
    for slowest in (22, 53):
        ranks.measured(hiding(100), hiding(slowest), hiding(90))
        ranks.train(24)
    ranks.close()
    first, *others = (one.known for one in ranks.ranks)
    assert all(known == first for known in others)
    spans = sorted(set(first.values()), key=lambda span: span.first)
    assert spans[0].first == ORIGIN + 1
    for span, following in pairwise(spans):
        assert following.first == span.last + 1
    lengths = [span.steps for span in spans]
    changes = [lengths[0], *(b for a, b in pairwise(lengths) if a != b)]
    assert changes == [3, 6, 2]


def test_a_rank_without_the_others_statements_captures_no_windows_of_its_own() -> None:
    ranks = Ranks(2)
    alone = ranks.ranks[0]
    for step in range(ORIGIN + 1, ORIGIN + 8):
        alone.deciding.on_save_called(step)
        decision = alone.deciding.at(step, 0.0)
        assert (decision is None) == (step > ORIGIN + 6), "two windows of three steps are known"
    ranks.meeting.break_up()
    assert alone.deciding.at(ORIGIN + 7, WAIT_S) is None
    ranks.close()


def test_a_rank_that_has_no_session_keeps_the_windows_of_all_as_they_are() -> None:
    """It has measured what a step takes, and copies nothing yet."""
    ranks = Ranks(2)
    without = ranks.ranks[1]
    without.lengths = []
    ranks.measured(hiding(22), hiding(22))
    ranks.train(18)
    without.lengths = LENGTHS
    ranks.train(24)
    ranks.close()
    first, second = (one.known for one in ranks.ranks)
    assert first == second
    lengths = [first[step].steps for step in sorted(first)]
    assert set(lengths[:18]) == {3}
    assert lengths == sorted(lengths) and lengths[-1] == 6


def test_a_rank_states_as_much_before_it_has_a_session_as_afterwards() -> None:
    ranks = Ranks(1)
    deciding = ranks.ranks[0].deciding
    capture, told = WindowCapture(AUTO, deciding, WAIT_S), list[Callable[[], list[int]]]()
    deciding.start = lambda *given: told.append(given[-1])  # type: ignore[method-assign]
    capture.on_save_called(0, ORIGIN, 0.0)
    capture.on_agreed(SimpleNamespace(schedules=SCHEDULES, alike=()), ())  # type: ignore[arg-type]
    ranks.close()
    (state,) = told
    assert state() == statement(len(SCHEDULES), LENGTHS, UNKNOWN)


# --- in a session ---------------------------------------------------------------------------------


class Steered(Durations):
    """Measures that a test gives."""

    given = UNKNOWN

    @property
    def measures(self) -> Measures:
        return self.given


def steer(session: Any) -> Steered:
    assert isinstance(session, ProtectedSession)
    strategy, steered = session._saver.strategy, Steered()
    assert isinstance(strategy, WindowCapture)
    strategy._durations = steered
    return steered


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("repeats", list(Repeats))
def test_a_window_of_any_length_is_restored_by_a_session_that_begins_with_another(
    make_trainer: Any,
    open_session: Any,
    tmp_path: Path,
    same: Callable[[dict[str, Any], dict[str, Any]], None],
    repeats: Repeats,
) -> None:
    """Windows have 4 steps, then one, then 3; the second session begins with 4 again."""
    policy = SparseWindows(window="auto", repeats=repeats)
    trainer, daemon = make_trainer(), FakeDaemon(tmp_path / "last")
    session = open_session(trainer, daemon, policy=policy, start_wait_s=WAIT_S)
    steered, states, lengths = steer(session), [trainer.state()], [0]
    for step in range(1, 28):
        steered.given = hiding(10**9 if step < 14 else 6300)
        trainer.train()
        states.append(trainer.state())
        if step <= 25:
            handle = session.save(step)
            handle.staged.result(WAIT_S)
            lengths.append(session.counters.window_steps)
        if step == 13:
            assert handle.committed.result(WAIT_S)  # so that nothing in the folder changes
            shutil.copytree(tmp_path / "last", tmp_path / "earlier")
    session.close()
    assert lengths[2:14] == [4] * 8 + [1] * 4
    assert lengths[-3:] == [3] * 3
    for memory, length in (("earlier", 1), ("last", 3)):
        daemon, other = FakeDaemon(tmp_path / memory, epoch=2), make_trainer(seed=9)
        line = max(daemon.sealed()).step
        session = open_session(other, daemon, policy=policy, start_wait_s=WAIT_S)
        done = session.restore()
        assert done == line - (length - 1) * (repeats is Repeats.TRAINING)
        for step in range(done + 1, line + 3):
            other.train()
            session.save(step)
            if step >= line:
                same(other.state(), states[step])
        session.close()
        assert session.counters.window_steps == 4
