"""How long a job that trains may be silent before it counts as hung, learned from its own steps.

A fixed limit has to be longer than the longest pause of any job: an evaluation, a checkpoint. Most
jobs never pause for a minute, and lose ten of them to each hang. So the pauses between steps are
watched. Two things keep the limit from being too short:

- It is several times the longest pause that was seen, and shrinks only slowly as long as nothing is
  seen: what has not happened in an hour may still come every two. A pause that was taken for a hang
  may have been none, and as long as any. So after one, the limit is the fixed one for good: it is
  wrong once at most. Who stores that tells it in each look.
- It is a limit for *quiet*: no step, and no process that works. Evaluations compute and checkpoints
  write, so for these the limit is the fixed one.

Pure. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math

import msgspec

HANGING_S = 600.0
"""Silence of a job that counts as a hang whatever was learned, unless the job sets another."""
QUIET_S_MIN = 60.0
"""Least limit that is learned."""
PAUSES = 5.0
"""Multiple of the longest pause that was seen."""
WATCHED_S = 1800.0
"""Time of watching after which the limit begins to shrink: in twice that time to its half."""
PROGRESSES_MIN = 20
"""Times that progress must have been seen in an epoch: after a restart steps may take longer."""
STEP_S = 10.0
"""Unit of limits: people see them."""


class StepPauses(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The pauses between steps of one job, as one control loop has seen them."""

    epoch: int = 0
    step: int = 0
    """Newest step at the newest look."""
    idle_s: float = 0.0
    """Time since the newest sign of progress then: a pause that may not be over."""
    progressed_at: float = 0.0
    """Time of the newest look that showed progress, or of the first in this epoch."""
    longest_s: float = 0.0
    """The longest pause that is over; `HANGING_S` after one that was taken for a hang."""
    watched_s: float = 0.0
    """Time in which the job was watched and made progress, in all epochs."""
    progresses: int = 0
    """Looks of this epoch that showed progress since the look before."""

    def follow(
        self, epoch: int, step: int, idle_s: float, now: float, hung: bool = False
    ) -> StepPauses:
        """Add a look at a job that trains.

        Args:
            step: newest step that any rank has reported.
            idle_s: time since any rank last showed progress.
            hung: whether a pause was ever taken for a hang because of a limit that was learned.
        """
        over_s = HANGING_S if hung else self.idle_s
        if epoch != self.epoch:
            return msgspec.structs.replace(
                self,
                epoch=epoch,
                step=step,
                idle_s=idle_s,
                progressed_at=now,
                longest_s=max(self.longest_s, over_s),
                progresses=0,
            )
        if step == self.step and idle_s >= self.idle_s:
            return msgspec.structs.replace(self, idle_s=idle_s)
        return msgspec.structs.replace(
            self,
            step=step,
            idle_s=idle_s,
            progressed_at=now,
            longest_s=max(self.longest_s, over_s),
            watched_s=self.watched_s + min(max(0.0, now - self.progressed_at), HANGING_S),
            progresses=self.progresses + 1,
        )

    @property
    def quiet_limit_s(self) -> float:
        """Time without a step or work that counts as a hang: a multiple of `STEP_S`, at most
        `HANGING_S`."""
        if self.progresses < PROGRESSES_MIN or self.watched_s <= WATCHED_S:
            return HANGING_S
        unseen_s = HANGING_S * WATCHED_S / self.watched_s
        limit_s = max(QUIET_S_MIN, unseen_s, PAUSES * self.longest_s)
        return min(HANGING_S, STEP_S * math.ceil(limit_s / STEP_S))
