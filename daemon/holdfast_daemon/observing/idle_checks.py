"""Rounds of checks of this node for as long as no job is on it.

On a spare nothing runs that would notice a broken disk or wrong memory before the node is needed.
A round is a process (`holdfast_host.idle_checks`), which ends when a job comes. What it has found
goes to the control loop with the heartbeats, until then: what a job does to a node later is no
matter of these checks. What has failed and has not passed since is remembered meanwhile, so that it
is not taken for another failure after the job. Checks never end the daemon, and nothing waits for
them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from holdfast_core.idle_checks import FailedCheck, failed_check
from holdfast_daemon.logs import bind
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_host.processes import pause_s
from holdfast_host.results import Outcome, Result

TURN_S = 1.0
"""Pause between two looks whether a round is due or over, or has to end."""
IDLE_S = 60.0
"""Time for which no job has been on the node before a round begins: a job that is about to come
back, or to be adopted, has come by then."""

_log = bind(logging.getLogger(__name__))


class Round(Protocol):
    """A process that makes checks; `holdfast_host.processes.CheckProcess` is one."""

    def is_over(self) -> bool: ...

    def has_ended(self) -> bool: ...

    def results(self) -> list[Result]: ...

    def stop(self) -> None: ...


class _Failing(NamedTuple):
    """A check that has failed, and has not passed since."""

    since: float
    text: str
    """What it found last."""
    confirmed: bool
    """Whether it has failed in two rounds or more."""


class IdleChecks:
    """Checks of one node. `run` it as a task.

    Args:
        period_s: time from one round to the next, more or less (`pause_s`).
        is_idle: whether no job is on the node, and nobody waits there for one.
        start: starts a round.
    """

    def __init__(
        self,
        period_s: float,
        *,
        is_idle: Callable[[], bool],
        start: Callable[[], Round],
        metrics: DaemonMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._period_s, self._is_idle, self._start = period_s, is_idle, start
        self._metrics, self._clock = metrics, clock
        self._idle_since = inf
        self._due = clock() + period_s * random.uniform(0.0, 1.0)
        self._round: Round | None = None
        self._last: Round | None = None
        """The round before, whose process may be one that the kernel keeps."""
        self._failed: dict[str, _Failing] = {}
        """The checks that have failed and have not passed since, whatever jobs came."""
        self._is_known = False
        """Whether a check has proved something since no job has been on the node."""

    def report(self) -> tuple[FailedCheck, ...] | None:
        """The checks that have failed, and have not passed since; None while nothing is known."""
        if not self._is_known or not self._is_idle():
            return None
        now = self._clock()
        found = (
            failed_check(check, each.text, max(0.0, now - each.since), confirmed=each.confirmed)
            for check, each in self._failed.items()
        )
        return tuple(each for each in found if each is not None)

    async def run(self) -> None:
        """Check the node now and then, until cancelled."""
        try:
            while True:
                await asyncio.sleep(TURN_S)
                try:
                    await self.turn()
                except Exception:  # checks must not end the daemon
                    _log.exception("idle_checks_failed")
        finally:
            if self._round is not None:
                self._round.stop()

    async def turn(self) -> None:
        """Start a round that is due, judge one that is over, or end one beside which a job has
        come."""
        now, running = self._clock(), self._round
        if not self._is_idle():
            self._idle_since, self._round, self._is_known = inf, None, False
            if running is not None:
                self._last = running
                await asyncio.to_thread(running.stop)
            return
        self._idle_since = min(self._idle_since, now)
        if running is None:
            is_due = now >= max(self._due, self._idle_since + IDLE_S)
            if is_due and (self._last is None or self._last.has_ended()):
                self._round = self._start()
        elif running.is_over():
            self._last, self._round = running, None
            self._due = now + pause_s(self._period_s)
            results = await asyncio.to_thread(running.results)  # waits for one that is killed
            if self._is_idle():
                self._judge(results)

    def _judge(self, results: list[Result]) -> None:
        """Take in what a round has found. What was not checked is as it was before."""
        now, failed = self._clock(), self._failed
        for result in results:
            self._metrics.add("idle_checks", outcome=result.outcome.replace(" ", "_"))
            match result.outcome:
                case Outcome.FAILED:
                    known = failed.get(result.check)
                    since = now if known is None else known.since
                    failed[result.check] = _Failing(since, result.text, known is not None)
                    _log.error("node_check_failed", check=result.check, detail=result.text)
                case Outcome.NOTICED:
                    failed.pop(result.check, None)
                    _log.info("node_check_noticed", check=result.check, detail=result.text)
                case Outcome.PASSED:
                    failed.pop(result.check, None)
                case Outcome.NOT_CHECKED:
                    _log.info("node_not_checked", check=result.check, detail=result.text)
        # What is only noticed, such as a clock that nothing synchronises, speaks for no node.
        self._is_known |= any(
            result.outcome in (Outcome.PASSED, Outcome.FAILED) for result in results
        )
