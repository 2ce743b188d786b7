"""Which members could be rebuilt from their parity groups if they were lost now. Pure.

A parity group bears the loss of one member. While one of its members is away, or its new memory is
not filled yet, the loss of a second one would lose the generation that the job could go back to. So
nobody may be given up in that time whose memory may still be there.
"""

from __future__ import annotations

from holdfast_core.jobs import MoETrainingJob
from holdfast_core.values import MemberPlace, Membership
from holdfast_operator.lookups import is_reachable, node_of, view_of
from holdfast_operator.views import ControlState, Observed


class Groups:
    """The parity groups of a membership, as they stand at one look."""

    def __init__(
        self,
        job: MoETrainingJob,
        membership: Membership,
        observed: Observed,
        state: ControlState,
        now: float,
    ) -> None:
        self._nothing_to_lose = state.saved is None
        self._group_of = {member: group for group in membership.groups for member in group}
        self._weak = {
            place.index
            for place in membership.members
            if place.index in state.renewed
            or not is_reachable(job, node_of(observed, place), state, now)
            or _refills(observed, membership, place)
        }

    def bear_loss_of(self, member: int) -> bool:
        """Whether nothing would be lost with the memory of `member`."""
        if self._nothing_to_lose:
            return True
        others = [other for other in self._group_of[member] if other != member]
        return bool(others) and not any(other in self._weak for other in others)

    def give_up(self, member: int) -> None:
        """From now on `member` counts as one whose memory is new."""
        self._weak.add(member)


def _refills(observed: Observed, membership: Membership, place: MemberPlace) -> bool:
    node = node_of(observed, place)
    view = view_of(observed, place, membership.epoch)
    return node.memory_id != place.memory_id or (view is not None and view.rebuilding)
