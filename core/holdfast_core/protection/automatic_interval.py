"""Choice of the saves to take when a job's interval follows from measurements (REFT appendix A).

All ranks must take the same saves, or no generation is complete; but their measurements differ. So
they agree on the interval, and on the call from which it applies, without waiting for each other:

- All ranks state what they measured at the same call of `save`, which follows from what they
  agreed on before, and each computes the same interval from all statements.
- The interval applies a fixed number of calls later, whether or not a rank has received the
  statements by then. A rank that has not takes no save until it has. It then goes through the calls
  that it let pass, so that it counts as many as the others: a save that it missed is skipped, like
  a save that finds no slot.

So no rank ever takes a save that is not due on the others. Snapshots are due where the number of
steps passes a multiple of the interval, so that nothing depends on when a rank received it.

The optimum is flat: half the best interval costs a quarter more, and an interval that is a tenth
too short costs half a percent more. So an interval that is nearly right is kept, and each time it
is, twice as many snapshots pass before ranks state their costs again. Where saves would find no
slot the cost is no longer flat: with two slots, an interval that is a little too short loses every
second save. So an interval that is too short for protection is never kept.

This module neither communicates nor measures; the trainer SDK does both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast_core.errors import ProtocolError
from holdfast_core.protection.intervals import STEPS_MAX, interval_steps, least_interval_s

DAY_S = 86400.0

MEASURED = 8
"""Snapshots that are measured for one statement."""
WARMING_UP = 2
"""Additional snapshots before the first statement: one opens the session, one is not over by
then."""
LEAD_CALLS = 4
"""Calls of `save` from a statement to the first call that it decides."""
MEASURED_MAX = 1024
"""Most snapshots from one interval to the next statement."""
KEPT_WITHIN = 0.2
"""Relative difference from the best interval below which the current one is kept."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs that one rank states: averages over its newest snapshots; 0 where it has not
    measured."""

    call: int
    """Number of the call of `save`, from 0, at which the rank states this."""
    step: int
    """Training step of that call."""
    step_s: float
    """Duration of a step, less what it waited for a snapshot."""
    blocked_s: float
    """Time that training waited for one snapshot, in `save` and before the next change of tensors:
    O_save of REFT appendix A, eq. 8, measured instead of derived."""
    copy_s: float
    """Time from the call of a save until its copy had ended."""
    protect_s: float
    """Time from there until the snapshot was protected."""
    slots: int
    """Slots of the rank's arena."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalDecision:
    """An interval, and the reason for it."""

    steps: int
    reason: str


def decide_interval(
    statements: Sequence[Costs], *, recoveries_per_day: float, current: int
) -> IntervalDecision:
    """The interval that loses the least time (REFT appendix A, eq. 9); `current` where that is
    nearly as good and skips no saves, or where a rank has measured nothing.

    All ranks wait for the slowest: the longest times count, and the fewest slots. A rank that waits
    for a slower one measures a longer step than it needs itself: the shortest step counts.

    Args:
        statements: the statements of all ranks, in any order.

    Raises:
        ProtocolError: when the statements are of different calls.
    """
    calls = sorted({(one.call, one.step) for one in statements})
    if len(calls) != 1:
        raise ProtocolError(
            f"the ranks' costs of snapshots are from the calls and steps {calls}, not all from "
            f"one; make the same calls of restore and save on all ranks"
        )
    step_s = min(one.step_s for one in statements)
    if step_s <= 0:
        return IntervalDecision(steps=current, reason="no snapshot was measured on all ranks")
    blocked_s = max(one.blocked_s for one in statements)
    copy_s = max(one.copy_s for one in statements)
    protect_s = max(one.protect_s for one in statements)
    slots = min(one.slots for one in statements)
    least_s = least_interval_s(copy_s=copy_s, protect_s=protect_s, slots=slots)
    best = interval_steps(
        overhead_s=blocked_s,
        least_s=least_s,
        step_s=step_s,
        rate_per_s=recoveries_per_day / DAY_S,
    )
    best = min(best, STEPS_MAX)
    reason = (
        f"a step takes {step_s:.3g} s, a snapshot delays it by {blocked_s:.3g} s, is copied within "
        f"{copy_s:.3g} s and protected {protect_s:.3g} s later, ranks have {slots} slots, and "
        f"{recoveries_per_day:.3g} recoveries a day are expected: {best} (REFT eq. 9)"
    )
    kept = abs(current - best) < KEPT_WITHIN * best and current * step_s >= least_s
    return IntervalDecision(steps=current if kept else best, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """Outcome of a call of `save`."""

    due: bool = False
    """Whether this call's snapshot is to be taken."""
    undecided: bool = False
    """Whether it is not known yet if the snapshot is due; then it is not taken."""
    missed: tuple[int, ...] = ()
    """Steps of earlier, then undecided calls whose snapshots turn out to have been due."""
    states: tuple[int, int] | None = None
    """(call, step) for which this rank must state its costs now; None for no statement."""


class IntervalSchedule:
    """One rank's schedule: which calls of `save` are due. All ranks have the same, as far as they
    have received the others' statements."""

    def __init__(self) -> None:
        self.steps = 1
        """Interval in force; at first every call, to measure."""
        self._calls = 0
        self._passed: int | None = None
        """Step of the newest call that was decided."""
        self._undecided: deque[tuple[int, int]] = deque()
        """(call, step) of the calls that are still undecided."""
        self._stated: int | None = None
        """Call of the newest statement, until its outcome is received."""
        self._next: tuple[int, int] | None = None
        """(call, steps): the interval that begins there."""
        self._until_statement = WARMING_UP + MEASURED
        """Snapshots that are due before the next statement."""
        self._pause = MEASURED
        self._failed = False

    def called(self, step: int) -> Called:
        """Record a call of `save`."""
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

    def decided(self, decision: IntervalDecision) -> None:
        """Record the decision that followed from all ranks' newest statements."""
        assert self._stated is not None
        kept = decision.steps == self.steps
        self._pause = min(2 * self._pause, MEASURED_MAX) if kept else MEASURED
        self._next = (self._stated + LEAD_CALLS, decision.steps)
        self._stated = None

    def failed(self) -> None:
        """Record that ranks can no longer exchange statements: every call is due from where the
        next interval would have begun, as on the other ranks, which cannot exchange them either."""
        assert self._stated is not None
        self._next = (self._stated + LEAD_CALLS, 1)
        self._stated, self._failed = None, True

    def _known(self, call: int) -> bool:
        """Whether the interval in force at `call` is known."""
        return self._stated is None or call < self._stated + LEAD_CALLS

    def _is_due(self, call: int, step: int) -> bool:
        if self._next is not None and call >= self._next[0]:
            self.steps, self._next = self._next[1], None
            self._until_statement = self._pause
        before, self._passed = self._passed, step
        return before is None or step // self.steps > before // self.steps
