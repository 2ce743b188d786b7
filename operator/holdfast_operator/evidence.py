"""From observations to causes: what has failed, in the words that events and conditions repeat.

Level-triggered: a cause is read from the present state, never remembered. Publishing a new epoch
makes evidence from the old one void, so that a cause leads to one recovery. This module must not
decide what is done about a cause: that is for `reconcile`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_core.jobs import MoETrainingJob, On
from holdfast_core.values import MemberPlace, Membership
from holdfast_operator.views import (
    AT_WORK,
    AgentState,
    AgentView,
    ControlState,
    JobView,
    NodeView,
    Observed,
    RankView,
)

SUSPECT_AFTER_HEARTBEATS = 2.5
"""A daemon that is this late is waited for: nothing that needs it is begun."""

STARTING_S = 600.0
"""Ranks that have not finished a first step in their epoch may load, compile and warm up for this
long before their silence is a hang, however small `hangSeconds` is."""

RETURN_S = 30.0
"""How long a daemon that was seen starting on a living node may take: moving its member would cost
more than waiting for the memory that is still there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One failure, for one failure rule."""

    on: On
    """What rules call it. `Any` for failures that have no name there, such as a lost rank."""
    text: str
    member: int | None = None
    exit_code: int | None = None
    node_lost: bool = False
    """The member cannot go on where it lives now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What speaks for a recovery, and who must be heard first."""

    causes: tuple[Cause, ...]
    suspects: tuple[str, ...]
    """Members' nodes that are silent, but not for long enough to be lost."""


def node_of(observed: Observed, place: MemberPlace) -> NodeView:
    """The node that a member lives on; one that was never seen is not connected."""
    return observed.nodes.get(place.node) or NodeView(name=place.node)


def silent_s(node: NodeView, state: ControlState, now: float) -> float:
    """How long the node's daemon was not heard while the loop was listening."""
    return now - max(node.heard_at, state.attentive_since)


def is_reachable(job: MoETrainingJob, node: NodeView, state: ControlState, now: float) -> bool:
    """Whether the node's daemon is there to work with."""
    late_s = SUSPECT_AFTER_HEARTBEATS * job.spec.failure_policy.detection.heartbeat_seconds
    return node.connected and silent_s(node, state, now) < late_s


def view_of(observed: Observed, place: MemberPlace, epoch: int) -> JobView | None:
    """What the member's daemon says of the job in `epoch`; None while it is in another one."""
    view = node_of(observed, place).job
    return view if view is not None and view.epoch == epoch else None


def ranks_in(observed: Observed, membership: Membership) -> list[RankView]:
    """The ranks that the members' daemons know in the membership's epoch, ascending."""
    views = (view_of(observed, place, membership.epoch) for place in membership.members)
    return sorted((r for view in views if view for r in view.ranks), key=lambda r: r.rank)


def agent_at(observed: Observed, place: MemberPlace) -> AgentView | None:
    """The member's agent where it belongs."""
    return next(
        (a for a in observed.agents if a.member == place.index and a.node == place.node), None
    )


def gather(
    job: MoETrainingJob,
    membership: Membership,
    observed: Observed,
    state: ControlState,
    now: float,
) -> Evidence:
    """Everything that is wrong with the training world of `membership` now."""
    causes: list[Cause] = []
    suspects: list[str] = []
    for place in membership.members:
        node = node_of(observed, place)
        loss = _node_loss(job, place, node, silent_s(node, state, now))
        if loss is not None:
            causes.append(loss)
        elif not is_reachable(job, node, state, now):
            suspects.append(place.node)
        else:
            causes.extend(_member_causes(observed, membership, place))
    if not causes and not suspects:
        causes.extend(_hang(job, membership, observed, state))
    return Evidence(causes=tuple(causes), suspects=tuple(suspects))


def _node_loss(
    job: MoETrainingJob, place: MemberPlace, node: NodeView, silence_s: float
) -> Cause | None:
    detection = job.spec.failure_policy.detection
    patience_s = detection.heartbeat_seconds * detection.missed_heartbeats
    if not node.gone:
        patience_s += max(detection.replace_seconds, RETURN_S if node.returning else 0.0)
    if silence_s >= patience_s:
        text = (
            f"member {place.index} lost with node {place.node} (no heartbeat for {silence_s:.1f} s)"
        )
    elif node.connected and node.memory_id != place.memory_id:
        text = f"member {place.index} lost its memory: node {place.node} came back with another"
    else:
        return None
    return Cause(on=On.NODE_LOST, text=text, member=place.index, node_lost=True)


def _member_causes(
    observed: Observed, membership: Membership, place: MemberPlace
) -> Iterator[Cause]:
    view = view_of(observed, place, membership.epoch)
    if view is not None:
        if view.membership is not None and _contradict(view.membership, membership):
            text = f"node {place.node} holds another membership of epoch {membership.epoch}"
            yield Cause(on=On.ANY, text=text, member=place.index)
        lost = [r.rank for r in view.ranks if r.lost]
        if lost:
            yield Cause(on=On.ANY, text=f"{_ranks(lost)} lost", member=place.index)
        elif view.agent_waiting:
            text = f"the agent of member {place.index} waits for a new epoch"
            yield Cause(on=On.ANY, text=text, member=place.index)
    agent = agent_at(observed, place)
    if agent is not None and agent.state is AgentState.EXITED and agent.exit_code != 0:
        yield Cause(
            on=On.EXIT_CODE,
            text=f"the agent of member {place.index} exited with code {agent.exit_code}",
            member=place.index,
            exit_code=agent.exit_code,
        )


def _contradict(theirs: Membership, ours: Membership) -> bool:
    """Whether two memberships of one epoch differ in more than addresses."""

    def identity(of: Membership) -> list[tuple[int, str, str]]:
        return [(place.index, place.node, place.memory_id) for place in of.members]

    return identity(theirs) != identity(ours)


def _hang(
    job: MoETrainingJob, membership: Membership, observed: Observed, state: ControlState
) -> Iterator[Cause]:
    """No rank has made progress for too long. Ranks wait for each other in collectives, so one
    that hangs stops all; those that are a step behind, or idle for longest, are named."""
    ranks = [r for r in ranks_in(observed, membership) if r.state in AT_WORK]
    if not ranks:
        return
    idle_s = min(r.idle_s for r in ranks)
    started = any(r.step > (state.started_from or 0) for r in ranks)
    hang_s = job.spec.failure_policy.detection.hang_seconds
    if idle_s < (hang_s if started else max(hang_s, STARTING_S)):
        return
    behind_step = min(r.step for r in ranks)
    behind = [r for r in ranks if r.step == behind_step]
    longest_s = max(r.idle_s for r in behind)
    named = [r.rank for r in behind if r.idle_s == longest_s] if len(behind) > 1 else []
    named = named or [r.rank for r in behind]
    text = (
        f"no progress of any rank for {idle_s:.1f} s; {_ranks(named)} idle for {longest_s:.1f} s "
        f"at step {behind_step}"
    )
    yield Cause(on=On.HANG, text=text, member=membership.member_of(named[0]))


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}"
