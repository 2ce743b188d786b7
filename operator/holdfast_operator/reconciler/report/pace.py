"""How often a job takes snapshots where it leaves that to its ranks (`auto`). Pure.

The ranks agree, so every daemon reports the same as soon as its ranks have reported: those that
have not yet say 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.snapshots import SparseWindows
from holdfast_core.quantities import format_count
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.views import ClusterView


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPace:
    """Steps between snapshots, as the ranks have agreed on them."""

    interval_steps: int = 0
    """Steps from snapshot to snapshot; 0 where the job states them."""
    window_steps: int = 0
    """Steps of a sparse window; 0 where the job states them."""
    window_max: int = 0
    """Most steps of a window that the job allows."""

    @property
    def text(self) -> str:
        """The pace in one sentence."""
        if self.window_steps:
            steps = format_count(self.window_steps, "step")
            return f"windows have {steps} now (auto, at most {self.window_max})"
        if self.interval_steps == 1:
            return "a snapshot is taken after every step now (auto)"
        return f"a snapshot is taken every {self.interval_steps} steps now (auto)"


def measured_pace(
    job: MoETrainingJob, observed: ClusterView, membership: Membership | None
) -> MeasuredPace | None:
    """The pace of a job; None where the job states it itself, and until a daemon reports it."""
    views = [view for view in observed.views(membership) if view] if membership else []
    policy, interval = job.spec.snapshot.policy.chosen, job.spec.snapshot.interval
    if isinstance(policy, SparseWindows) and policy.adapts:
        steps = max((view.window_steps for view in views), default=0)
        return MeasuredPace(window_steps=steps, window_max=policy.window_steps) if steps else None
    if interval.auto:
        steps = max((view.interval_steps for view in views), default=0)
        return MeasuredPace(interval_steps=steps) if steps else None
    return None
