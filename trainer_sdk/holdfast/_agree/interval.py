"""The choice of which saves to take: all of them, or those that are worth their cost.

The cost of a snapshot is measured on the training thread: the duration of `save`, and the time that
the next change of tensors waited. Ranks exchange their costs while the step runs, on a thread and a
process group of their own. `holdfast_core.protection.automatic_interval` decides when they exchange
them, and which interval follows.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec

from holdfast._agree.exchange import Exchange
from holdfast._agree.rounds import Round, Rounds
from holdfast._daemon.handles import SaveHandle
from holdfast_core.protection.automatic_interval import (
    MEASURED,
    Called,
    Costs,
    IntervalSchedule,
    decide_interval,
)
from holdfast_core.snapshots.layouts import SLOTS_MAX

_log = logging.getLogger("holdfast")
_COSTS = msgspec.json.Decoder(Costs)


class DueSaves:
    """The choice of which saves to take: all that the loop calls."""

    @property
    def steps(self) -> int:
        """The present interval in steps; 0 if there is none."""
        return 0

    def on_save_called(self, handle: SaveHandle, now_s: float) -> Called:
        """Note a call of `save`, and decide whether to take its snapshot. The training thread calls
        it."""
        del handle, now_s
        return Called(due=True)

    def add_wait(self, seconds: float) -> None:
        """Add time that training waited for a snapshot, in `save` or for its end."""

    def close(self, timeout_s: float) -> None:
        """End within about `timeout_s`."""


class SaveInterval(DueSaves):
    """One rank's part in a measured choice. The thread runs from the first statement to `close`.

    Args:
        exchange: exchange between all ranks that is used for nothing else.
        recoveries_per_day: expected number of recoveries in a day; above 0.
    """

    def __init__(self, exchange: Exchange, recoveries_per_day: float) -> None:
        self._exchange, self._recoveries_per_day = exchange, recoveries_per_day
        self._schedule = IntervalSchedule()
        self._steps_s: deque[float] = deque(maxlen=MEASURED)
        self._blocked_s: deque[float] = deque(maxlen=MEASURED)
        self._copy_s: deque[float] = deque(maxlen=MEASURED)
        self._protect_s: deque[float] = deque(maxlen=MEASURED)
        self._slots = SLOTS_MAX
        self._last: tuple[int, float] | None = None
        """Step and time of the newest call of `save`."""
        self._handle: SaveHandle | None = None
        """Handle of that call, if its snapshot was due."""
        self._waited_s = 0.0
        """Time that training has waited since that call began."""
        self._rounds = Rounds("holdfast-pacing", self._next, self._on_failure)
        self._statement: Costs | None = None

    @property
    def steps(self) -> int:
        return self._schedule.steps

    def on_save_called(self, handle: SaveHandle, now_s: float) -> Called:
        with self._rounds.change():
            self._measure(handle.step, now_s)
            outcome = self._schedule.called(handle.step)
            self._handle = handle if outcome.due else None
            if outcome.states is not None:
                self._statement = self._costs(*outcome.states)
                if not self._rounds.has_started:
                    self._rounds.start()
        if outcome.due:
            _ProtectionTimer(handle, self._on_protected)
        return outcome

    def add_wait(self, seconds: float) -> None:
        with self._rounds.changed:
            self._waited_s += seconds

    def close(self, timeout_s: float) -> None:
        """End the exchanges within about `timeout_s`. A statement for which other ranks wait is
        still made."""
        self._rounds.close(timeout_s)

    def _measure(self, step: int, now_s: float) -> None:
        """Record the cost of the previous call, when the next one begins."""
        if self._last is not None and step > self._last[0]:
            taken_s = now_s - self._last[1] - self._waited_s
            self._steps_s.append(max(taken_s, 0.0) / (step - self._last[0]))
        if self._handle is not None and _has_reached(self._handle.staged):
            self._blocked_s.append(self._waited_s)
        self._last, self._waited_s = (step, now_s), 0.0

    def _costs(self, call: int, step: int) -> Costs:
        """Return the costs that this rank has measured; zeros until it has staged a snapshot."""
        measured = bool(self._blocked_s and self._steps_s)
        return Costs(
            call=call,
            step=step,
            step_s=statistics.median(self._steps_s) if measured else 0.0,
            blocked_s=statistics.fmean(self._blocked_s) if measured else 0.0,
            copy_s=statistics.fmean(self._copy_s) if self._copy_s else 0.0,
            protect_s=statistics.fmean(self._protect_s) if self._protect_s else 0.0,
            slots=self._slots,
        )

    def _on_protected(self, copy_s: float, protect_s: float, slots: int) -> None:
        with self._rounds.changed:
            self._copy_s.append(copy_s)
            self._protect_s.append(protect_s)
            self._slots = slots or SLOTS_MAX

    def _next(self) -> Round | None:
        statement, self._statement = self._statement, None
        return partial(self._agree, statement) if statement is not None else None

    def _agree(self, statement: Costs) -> None:
        texts = self._exchange.gather(msgspec.json.encode(statement))
        decision = decide_interval(
            [_COSTS.decode(text) for text in texts],
            recoveries_per_day=self._recoveries_per_day,
            current=self.steps,
        )
        with self._rounds.change():
            changes = decision.steps != self.steps
            self._schedule.decided(decision)
        _log.log(
            logging.INFO if changes else logging.DEBUG,
            "snapshots are %d steps apart from now on: %s",
            decision.steps,
            decision.reason,
        )

    def _on_failure(self, error: Exception) -> None:
        self._schedule.failed()
        if not self._rounds.closing:
            _log.warning(
                "the ranks cannot agree on an interval; every save is taken from now on: %s", error
            )


class _ProtectionTimer:
    """Measures how long a snapshot is copied, and how long it then takes to be protected."""

    def __init__(self, handle: SaveHandle, record: Callable[[float, float, int], None]) -> None:
        self._handle, self._record = handle, record
        self._called_s, self._staged_s = time.monotonic(), 0.0
        handle.staged.add_done_callback(self._on_staged)
        handle.protected.add_done_callback(self._on_protected)

    def _on_staged(self, stage: Future[int]) -> None:
        self._staged_s = time.monotonic()

    def _on_protected(self, stage: Future[int]) -> None:
        if _has_reached(stage):
            copy_s, protect_s = self._staged_s - self._called_s, time.monotonic() - self._staged_s
            self._record(copy_s, protect_s, self._handle._slots)


def _has_reached(stage: Future[int]) -> bool:
    return stage.done() and stage.exception() is None
