"""Builds the status of a local run from what the control loop observed. Pure.

The job's part comes from the code that writes `.status` in a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast_cli.local.directory import NodeRecord, RunDirectory, RunRecord
from holdfast_cli.local.status import (
    FINISHED,
    LocalMemberStatus,
    LocalStatus,
    NodeStatus,
    RankStatus,
    Status,
    TimedEvent,
)
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.job import status as job_status
from holdfast_operator.reconciler.membership.joining import joining_state
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.lookups import agent_at, node_of
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    Decision,
    JobView,
    NodeView,
    Observed,
    RankView,
    StandbyView,
)
from holdfast_operator.reconciler.report.conditions import newest_complete
from holdfast_operator.reconciler.report.recoveries import Recovery

OF_CLUSTERS_ONLY = ("selector", "keptUntil", "observedGeneration")
"""Fields of `.status` that a local run does not have: it has no pods, it frees the snapshots of a
job that has failed, and no API server counts the versions of its document."""


def status_of(
    observed: Observed,
    decision: Decision,
    job: MoETrainingJob,
    run: RunRecord,
    *,
    directory: RunDirectory,
    clocks: ClockPair,
    now: float,
    pid: int,
    events: Sequence[TimedEvent],
    recoveries: Sequence[Recovery],
    previous: dict[str, Any],
) -> Status:
    """The status after one observation.

    Args:
        now: a monotonic time.
        recoveries: oldest first, with wall-clock times.
        previous: the job's part of the status before; empty without one.
    """
    # The fields that a job has in a cluster, too.
    document = job_status.status_of(
        job,
        observed,
        decision,
        previous=previous,
        pods={},
        recoveries=recoveries,
        clocks=clocks,
        now=now,
    )
    for name in OF_CLUSTERS_ONLY:
        document.pop(name, None)
    # What only a local run has.
    state, membership = decision.state, decision.state.membership
    views = () if membership is None else observed.views(membership)
    lines = [view.line for view in views if view is not None and view.line is not None]
    complete = newest_complete(observed, membership) if membership is not None else None
    local = LocalStatus(
        job=run.job,
        time=clocks.at_wall(now),
        pid=pid,
        directory=str(directory.path),
        security="insecure" if run.insecure else "mutual TLS",
        reason=state.outcome_reason or decision.reason,
        revision=0 if membership is None else membership.revision,
        world_size=0 if membership is None else membership.world_size,
        line=_text(lines[0].generation) if lines else "",
        line_reason=lines[0].reason if lines else "",
        complete=_text(complete),
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
    )
    return msgspec.convert({**document, "local": local}, Status)


def _members(
    observed: Observed, membership: Membership, *, complete: bool
) -> tuple[LocalMemberStatus, ...]:
    members = []
    for member, reported in zip(membership.members, observed.views(membership), strict=True):
        view = (
            reported if reported is not None and node_of(observed, member).connected else JobView()
        )
        agent = agent_at(observed, member)
        members.append(
            LocalMemberStatus(
                index=member.index,
                node=member.node,
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
    """Whether a member's ranks have finished. Their daemon can only report that they are gone."""
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
    observed: Observed,
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


def _role(observed: Observed, view: NodeView, member: int | None, joining: int | None) -> str:
    """Role of a node in words. `joining` is the missing member that will join there."""
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
