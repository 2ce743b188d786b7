"""Which saves are taken when a job leaves its interval to what is measured (REFT appendix A).

All ranks have to take the same saves, or no generation is whole; and what they measure differs. So
they agree on the interval, and on when it begins, without waiting for each other:

- They state what they measured at the same call of `save`, which follows from what they agreed on
  before, and each computes the same interval from all statements.
- It begins so many calls later, whether or not a rank has heard of it by then. A rank that has not
  takes no save until it has. It then looks at the calls that it let pass, so that it has counted as
  many as the others: what it missed is skipped, as a save is that found no slot.

So no rank ever takes a save that the others do not. Snapshots are due where the number of steps
passes a multiple of the interval, so that nothing depends on when a rank heard of it.

The optimum is flat: half the best interval costs a quarter more, and a tenth less costs half a
percent. So an interval that is nearly right is kept, and each time it is, twice as many snapshots
pass until ranks state again.

Nothing here talks or measures; the trainer SDK does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast_core.errors import ProtocolError
from holdfast_core.protection.intervals import STEPS_MAX, interval_steps

DAY_S = 86400.0

MEASURED = 8
"""Snapshots that are measured for a statement."""
WARMING_UP = 2
"""Snapshots more before the first statement: one opens the session, one is not over by then."""
LEAD_CALLS = 4
"""Calls of `save` from a statement to the first one that it decides."""
MEASURED_MAX = 1024
"""The most snapshots from one interval to the next statement."""
KEPT_WITHIN = 0.2
"""An interval is kept that differs from the best by less than so much of it."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank states: means of its newest snapshots; 0 where it has not measured."""

    call: int
    """Of `save`, from 0, at which it states this."""
    step: int
    """Of that call."""
    step_s: float
    """A step, less what it waited for a snapshot."""
    blocked_s: float
    """What training waited for one snapshot, in `save` and before the next change of tensors:
    O_save of REFT appendix A, eq. 8, measured instead of derived."""
    protect_s: float
    """From the end of a snapshot's copy until it was protected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalDecision:
    """An interval, and why."""

    steps: int
    reason: str


def decide_interval(
    said: Sequence[Costs], *, recoveries_per_day: float, current: int
) -> IntervalDecision:
    """The interval that loses the least time (REFT appendix A, eq. 9); `current` where that is
    nearly as good, or a rank has measured nothing.

    What the slowest rank waits for, all wait for: the longest waits count. A rank that waits for a
    slower one has a longer step than it needs itself: the shortest step counts.

    Args:
        said: of all ranks, in any order.

    Raises:
        ProtocolError: when ranks speak of different calls.
    """
    calls = sorted({(one.call, one.step) for one in said})
    if len(calls) != 1:
        raise ProtocolError(
            f"the ranks' costs of snapshots are of the calls and steps {calls}, not all of one; "
            f"call restore and save alike on all ranks"
        )
    step_s = min(one.step_s for one in said)
    if step_s <= 0:
        return IntervalDecision(steps=current, reason="no snapshot was measured on all ranks")
    blocked_s, protect_s = max(one.blocked_s for one in said), max(one.protect_s for one in said)
    best = interval_steps(
        overhead_s=blocked_s,
        protect_s=protect_s,
        step_s=step_s,
        rate_per_s=recoveries_per_day / DAY_S,
    )
    best = min(best, STEPS_MAX)
    reason = (
        f"a step takes {step_s:.3g} s, a snapshot makes it wait {blocked_s:.3g} s and is protected "
        f"after {protect_s:.3g} s, and {recoveries_per_day:.3g} recoveries a day are expected: "
        f"{best} (REFT eq. 9)"
    )
    kept = abs(current - best) < KEPT_WITHIN * best
    return IntervalDecision(steps=current if kept else best, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """What a call of `save` means."""

    due: bool = False
    """Whether this call's snapshot is to be taken."""
    undecided: bool = False
    """Not known yet, so that it is not taken."""
    missed: tuple[int, ...] = ()
    """Steps of earlier calls, undecided then, whose snapshots turn out to have been due."""
    states: tuple[int, int] | None = None
    """(call, step) for which this rank is to state its costs now; None for no statement."""


class IntervalSchedule:
    """One rank's part: which calls of `save` are due. Equal on all ranks, as far as they know."""

    def __init__(self) -> None:
        self.steps = 1
        """The interval in force: at first every call, to measure."""
        self._calls = 0
        self._passed: int | None = None
        """Step of the newest call that was decided."""
        self._undecided: deque[tuple[int, int]] = deque()
        """(call, step) of those that were not."""
        self._stated: int | None = None
        """The call of the newest statement, while nothing was heard of it."""
        self._next: tuple[int, int] | None = None
        """(call, steps): the interval that begins there."""
        self._until_statement = WARMING_UP + MEASURED
        """Snapshots that are due before the next statement."""
        self._pause = MEASURED
        self._failed = False

    def called(self, step: int) -> Called:
        """`save` was called."""
        self._undecided.append((self._calls, step))
        self._calls += 1
        newest, missed, due, states = self._calls - 1, [], False, None
        while self._undecided and self._known(self._undecided[0][0]):
            call, at = self._undecided.popleft()
            if not self._is_due(call, at):
                continue
            if call == newest:
                due = True
            else:
                missed.append(at)
            self._until_statement -= 1
            if self._until_statement == 0 and not self._failed:
                self._stated, states = call, (call, at)
        return Called(due=due, undecided=bool(self._undecided), missed=tuple(missed), states=states)

    def heard(self, decision: IntervalDecision) -> None:
        """All ranks' newest statements led to this."""
        assert self._stated is not None
        kept = decision.steps == self.steps
        self._pause = min(2 * self._pause, MEASURED_MAX) if kept else MEASURED
        self._next = (self._stated + LEAD_CALLS, decision.steps)
        self._stated = None

    def failed(self) -> None:
        """Ranks cannot hear of each other any more: every call is due from where the next interval
        would have begun, as on the other ranks, which cannot hear of each other either."""
        assert self._stated is not None
        self._next = (self._stated + LEAD_CALLS, 1)
        self._stated, self._failed = None, True

    def _known(self, call: int) -> bool:
        """Whether the interval in force at `call` is."""
        return self._stated is None or call < self._stated + LEAD_CALLS

    def _is_due(self, call: int, step: int) -> bool:
        if self._next is not None and call >= self._next[0]:
            self.steps, self._next = self._next[1], None
            self._until_statement = self._pause
        before, self._passed = self._passed, step
        return before is None or step // self.steps > before // self.steps
