"""Look up a member, node or rank in an observation. Pure; judges nothing."""

from __future__ import annotations

from operator import attrgetter

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.views import (
    AgentView,
    ClusterView,
    ControlState,
    NodeView,
    RankView,
    Suspension,
)

SUSPECT_AFTER_HEARTBEATS = 2.5
"""Heartbeats of silence after which a daemon is suspect: it is waited for, and nothing that needs
it is begun."""

BY_USER = Suspension(reason="SuspendedByUser", message="spec.suspend is true")

_rank_number = attrgetter("rank")


def suspension_of(job: MoETrainingJob, observed: ClusterView) -> Suspension | None:
    """Why the job shall have no agents now; None when it shall run."""
    return BY_USER if job.spec.suspend else observed.suspension


def node_of(observed: ClusterView, member: Member) -> NodeView:
    """Node that a member lives on. A node that was never seen is not connected."""
    return observed.nodes.get(member.node) or NodeView(name=member.node)


def silent_s(node: NodeView, state: ControlState, now: float) -> float:
    """Seconds without a heartbeat of the node's daemon while the loop was listening."""
    return now - max(node.heartbeat_at, state.attentive_since)


def is_reachable(job: MoETrainingJob, node: NodeView, state: ControlState, now: float) -> bool:
    """Whether the node's daemon is connected, and not late."""
    late_s = SUSPECT_AFTER_HEARTBEATS * job.spec.failure_policy.detection.heartbeat_seconds
    return node.connected and silent_s(node, state, now) < late_s


def detection_s(job: MoETrainingJob) -> float:
    """Seconds that a daemon may be silent before its node counts as lost."""
    detection = job.spec.failure_policy.detection
    return detection.heartbeat_seconds * detection.missed_heartbeats


def ranks_in(observed: ClusterView, membership: Membership) -> list[RankView]:
    """Ranks that the members' daemons report in the membership's epoch, ascending."""
    views = observed.views(membership)
    return sorted((r for view in views if view for r in view.ranks), key=_rank_number)


def live_step(observed: ClusterView, membership: Membership) -> int | None:
    """Step after which ranks of this epoch go on live; None when they restore a generation."""
    for rank in ranks_in(observed, membership):
        is_live = rank.restored_from is RestoreSource.LIVE or rank.repeated_after is not None
        if is_live and rank.restored is not None:
            return rank.restored.step
    return None


def fewest_slots(observed: ClusterView, membership: Membership | None) -> int:
    """Slots of the job's ranks, on the node where they have fewest; 0 while no arena is known."""
    views = observed.views(membership) if membership is not None else ()
    return min((view.slots for view in views if view and view.slots), default=0)


def is_anything_saved(job: MoETrainingJob, observed: ClusterView, state: ControlState) -> bool:
    """Whether there may be a generation that a recovery could go back to: one that the state
    remembers, or that a daemon reports. One daemon is enough: the others may not have reported yet,
    and nothing remembers what became safe while there was no control loop."""
    if state.saved is not None:
        return True
    views = [view for node in observed.nodes.values() if (view := node.job) is not None]
    if job.spec.redundancy.type is Redundancy.NONE:
        return any(view.complete is not None for view in views)
    return any(view.protected is not None for view in views)


def just_saved(state: ControlState, membership: Membership, now: float) -> bool:
    """Whether a generation of this epoch became safe in this turn: the best moment for a recovery
    that is not urgent."""
    saved = state.saved
    return saved is not None and saved.epoch == membership.epoch and state.saved_at == now


def agent_at(observed: ClusterView, member: Member) -> AgentView | None:
    """Agent of the member on the member's node; None when there is none."""
    return observed.agent(member.index, member.node)
