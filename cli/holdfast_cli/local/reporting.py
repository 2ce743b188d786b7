"""Builds the status that users see from what the control loop observed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_cli.local.directory import NodeRecord, RunDirectory, RunRecord
from holdfast_cli.local.status import (
    FINISHED,
    LocalMemberStatus,
    NodeStatus,
    RankStatus,
    Status,
    TimedEvent,
)
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.membership.joining import joining_state
from holdfast_operator.reconciler.membership.shrinking import strength
from holdfast_operator.reconciler.membership.staying import recovery_mode
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.lookups import agent_at, node_of
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    ClusterView,
    Decision,
    JobView,
    NodeView,
    RankView,
    StandbyView,
)
from holdfast_operator.reconciler.report.conditions import (
    newest_complete,
    newest_protected,
    newest_step,
    phase,
)
from holdfast_operator.reconciler.report.recoveries import Recovery


def status_of(
    observed: ClusterView,
    decision: Decision,
    job: MoETrainingJob,
    run: RunRecord,
    *,
    directory: RunDirectory,
    time: float,
    pid: int,
    events: Sequence[TimedEvent],
    recoveries: Sequence[Recovery],
    counters: Mapping[str, Any],
) -> Status:
    """The status after one look; `time` is seconds since the Unix epoch."""
    state, membership = decision.state, decision.state.membership
    views = () if membership is None else observed.views(membership)
    lines = [view.line for view in views if view is not None and view.line is not None]
    complete = newest_complete(observed, membership) if membership is not None else None
    return Status(
        job=run.job,
        time=time,
        pid=pid,
        directory=str(directory.path),
        security="insecure" if run.insecure else "mutual TLS",
        phase=phase(decision.conditions),
        reason=state.outcome_reason or decision.reason,
        epoch=0 if membership is None else membership.epoch,
        revision=0 if membership is None else membership.revision,
        world_size=0 if membership is None else membership.world_size,
        step=0 if membership is None else newest_step(observed, membership),
        line=_text(lines[0].generation) if lines else "",
        line_reason=lines[0].reason if lines else "",
        complete=_text(complete),
        protected=_text(newest_protected(observed)),
        restarts=state.recoveries,
        strength=strength(job, membership, len(state.joining)),
        recovery_mode=recovery_mode(observed, membership),
        failure=state.failure,
        token_loss=state.losses,
        experts=state.plan,
        conditions=decision.conditions,
        members=(
            ()
            if membership is None
            else _members(observed, membership, complete=state.outcome is Outcome.COMPLETE)
        ),
        nodes=tuple(
            _node(observed, record, membership, directory, state.joining)
            for record in run.nodes.values()
        ),
        events=tuple(events),
        recoveries=tuple(recoveries),
        counters=dict(counters),
    )


def _members(
    observed: ClusterView, membership: Membership, *, complete: bool
) -> tuple[LocalMemberStatus, ...]:
    members = []
    for member, found in zip(membership.members, observed.views(membership), strict=True):
        view = found if found is not None and node_of(observed, member).connected else JobView()
        agent = agent_at(observed, member)
        members.append(
            LocalMemberStatus(
                index=member.index,
                node=member.node,
                agent="absent" if agent is None else agent.state.value,
                exit_code=None if agent is None else agent.exit_code,
                epoch=view.epoch,
                ranks=tuple(_rank(rank, complete or _has_finished(agent)) for rank in view.ranks),
                complete=_text(view.complete),
                arena_bytes=view.arena_bytes,
                parity_bytes=view.parity_bytes,
                protection_bytes_s=view.protection_bytes_s,
                slots=view.slots,
                skipped=view.skipped,
                failed=view.failed,
                rebuilding=view.rebuilding,
                problem=view.problem,
            )
        )
    return tuple(members)


def _has_finished(agent: AgentView | None) -> bool:
    """Whether a member's ranks have finished: their daemon only reports that they are gone."""
    return agent is not None and agent.state is AgentState.EXITED and agent.exit_code == 0


def _rank(rank: RankView, finished: bool) -> RankStatus:
    return RankStatus(
        rank=rank.rank,
        state=FINISHED if finished else rank.state,
        step=rank.step,
        idle_s=rank.idle_s,
        pid=rank.pid,
        lost=rank.lost,
        restored=_text(rank.restored),
        restored_from=rank.restored_from,
        repeated_after=rank.repeated_after,
    )


def _node(
    observed: ClusterView,
    record: NodeRecord,
    membership: Membership | None,
    directory: RunDirectory,
    joining: Sequence[tuple[int, str]],
) -> NodeStatus:
    view = observed.nodes.get(record.name) or NodeView(name=record.name)
    member = membership.member_on(record.name) if membership is not None else None
    missing = {node: index for index, node in joining}.get(record.name)
    standby = next((each for each in observed.standbys if each.node == record.name), None)
    return NodeStatus(
        name=record.name,
        role=_role(observed, view, member, missing),
        member=member,
        connected=view.connected,
        host=record.host,
        root=record.root,
        socket=str(directory.socket(record.name)),
        daemon_pid=record.daemon.process.pid if record.daemon is not None else 0,
        incarnation=view.incarnation,
        memory_used_bytes=view.memory_used_bytes,
        memory_budget_bytes=view.memory_budget_bytes,
        standby="" if standby is None else _standby(standby),
    )


def _role(observed: ClusterView, view: NodeView, member: int | None, joining: int | None) -> str:
    """Role of a node in words; `joining`: the missing member that will join there."""
    if view.gone:
        return "lost"
    if member is not None:
        return f"member {member}"
    if joining is None:
        return "spare"
    return f"joining as member {joining}: {joining_state(observed, joining, view.name)}"


def _standby(standby: StandbyView) -> str:
    if standby.state is not AgentState.RUNNING:
        return ""
    return "ready" if standby.ready else "starting"


def _text(generation: Generation | None) -> str:
    return "" if generation is None else str(generation)
