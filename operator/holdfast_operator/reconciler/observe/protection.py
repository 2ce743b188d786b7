"""Which members could be rebuilt from their parity groups if they were lost now. Pure.

A parity group bears the loss of as many members as its redundancy allows. While that many are away,
or their new memory is not filled yet, another loss would cost the generation to which the job could
go back. During that time no member may be given up whose memory may still be there. Generations
from before members left or joined are protected by the parity groups of that time, without the
members that have left.
"""

from __future__ import annotations

from functools import cached_property

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.protection.codes import code_of
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_operator.reconciler.observe.lookups import (
    is_anything_saved,
    is_reachable,
    node_of,
)
from holdfast_operator.reconciler.observe.views import ClusterView, ControlState, JobView


class ParityGroups:
    """Parity groups of a membership, as they are in one turn."""

    def __init__(
        self,
        job: MoETrainingJob,
        membership: Membership,
        observed: ClusterView,
        state: ControlState,
        now: float,
    ) -> None:
        self._job, self._membership, self._observed = job, membership, observed
        self._state, self._now = state, now

    def bear_loss_of(self, member: int) -> bool:
        """Whether losing the memory of `member` would lose nothing."""
        if member not in self._group_of:
            return True
        if not is_anything_saved(self._job, self._observed, self._state):
            return True
        group = self._group_of[member]
        code = code_of(self._membership, group)
        weak = sum(other in self._weak for other in group if other != member)
        return code is not None and weak < code.rows

    def give_up(self, member: int) -> None:
        """Count `member` as one whose memory is new from now on."""
        self._weak.add(member)

    @property
    def weak(self) -> frozenset[int]:
        """Members whose memory is away or not filled."""
        return frozenset(self._weak.intersection(self._membership.world.members))

    @cached_property
    def _world(self) -> MemberWorld:
        """World whose parity protects what could be lost."""
        saved = self._state.saved
        world = self._membership.world_of(saved) if saved is not None else None
        return world or self._membership.world

    @cached_property
    def _group_of(self) -> dict[int, tuple[int, ...]]:
        return {member: group for group in self._world.groups for member in group}

    @cached_property
    def _weak(self) -> set[int]:
        """Members whose memory is away or not filled. Computed on demand: most turns do not need
        it."""
        views = self._observed.views(self._membership)
        left = set(self._world.members).difference(self._membership.world.members)
        return left | {
            member.index
            for member, view in zip(self._membership.members, views, strict=True)
            if member.index in self._state.renewed
            or not is_reachable(self._job, node_of(self._observed, member), self._state, self._now)
            or _refills(self._observed, member, view)
        }


def _refills(observed: ClusterView, member: Member, view: JobView | None) -> bool:
    memory_id = node_of(observed, member).memory_id
    return memory_id != member.memory_id or (view is not None and view.rebuilding)
