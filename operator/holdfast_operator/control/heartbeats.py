"""Translate heartbeats of daemons into views of nodes and jobs; decide nothing."""

from __future__ import annotations

from functools import lru_cache
from math import inf

from holdfast_core.corruption import Divergence
from holdfast_core.errors import known_code
from holdfast_core.inspections import FRAMES_SENT_MAX
from holdfast_core.last_lines import last_lines
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import EndReason, RankHealth, RestoreSource
from holdfast_operator.reconciler.observe.views import (
    InspectionView,
    JobView,
    NodeView,
    RankView,
)
from holdfast_protos import codec, control_pb2, values_pb2
from holdfast_protos.divergences import divergence_from_proto
from holdfast_protos.expert_plans import plan_from_proto
from holdfast_protos.idle_checks import idle_checks_from_proto
from holdfast_protos.inspections import processes_from_proto
from holdfast_protos.links import links_from_proto
from holdfast_protos.losses import loss_from_proto
from holdfast_protos.step_times import times_from_proto


def node_view(
    heartbeat: control_pb2.Heartbeat, heartbeat_at: float, first_heard_at: float
) -> NodeView:
    """View of the node that sent `heartbeat`, without its jobs."""
    return NodeView(
        name=heartbeat.node,
        connected=True,
        heartbeat_at=heartbeat_at,
        first_heard_at=first_heard_at,
        memory_id=heartbeat.memory_id,
        incarnation=heartbeat.incarnation,
        peer_address=heartbeat.peer_address,
        bulk_address=heartbeat.bulk_address,
        trainer_socket=heartbeat.trainer_socket,
        memory_budget_bytes=heartbeat.memory_budget_bytes,
        memory_used_bytes=heartbeat.memory_used_bytes,
        failed_checks=(
            idle_checks_from_proto(heartbeat.idle_checks)
            if heartbeat.HasField("idle_checks")
            else None
        ),
    )


def job_view(state: control_pb2.JobState) -> JobView:
    """View of one job as a daemon reports it.

    Raises:
        ProtocolError: when its membership or a report of its ranks is malformed.
    """
    return JobView(
        uid=state.uid,
        epoch=state.epoch,
        membership=(
            _membership(state.membership.SerializeToString(deterministic=True))
            if state.HasField("membership")
            else None
        ),
        revision=state.revision if state.HasField("revision") else None,
        verified=state.verified,
        line=codec.line_from_proto(state.line) if state.has_line else None,
        protected=(
            codec.generation_from_proto(state.protected) if state.HasField("protected") else None
        ),
        complete=(
            codec.generation_from_proto(state.complete) if state.HasField("complete") else None
        ),
        ranks=tuple(_rank_view(rank) for rank in state.ranks),
        agent_waiting=state.agent_waiting,
        rebuilding=state.rebuilding,
        problem=state.problem,
        problem_code=known_code(state.problem_code),
        loading=state.loading,
        storage_problem=state.storage_problem,
        stored_epoch=state.stored_epoch,
        persisted=(
            codec.generation_from_proto(state.persist.persisted)
            if state.persist.HasField("persisted")
            else None
        ),
        persist_failure=state.persist.failure,
        skipped=state.skipped,
        failed=state.failed,
        arena_bytes=state.arena_bytes,
        parity_bytes=state.parity_bytes,
        protection_bytes_s=_rate(state.protection_bytes_s),
        slots=state.slots,
        interval_steps=state.interval_steps,
        window_steps=state.window_steps,
        loss=loss_from_proto(state.loss) if state.HasField("loss") else None,
        plan=plan_from_proto(state.plan) if state.HasField("plan") else None,
        inspection=_inspection(state.inspection) if state.HasField("inspection") else None,
        links=links_from_proto(state.links),
    )


def _inspection(state: control_pb2.InspectionState) -> InspectionView:
    return InspectionView(
        number=state.number,
        age_s=state.age_s if 0 <= state.age_s < inf else 0.0,
        processes=processes_from_proto(state.processes, FRAMES_SENT_MAX)
        if state.answered
        else None,
    )


def _rate(bytes_s: float) -> float:
    """Replace an invalid rate by 0: people are shown sums of rates."""
    return bytes_s if 0 <= bytes_s < inf else 0.0


@lru_cache(maxsize=256)
def _membership(encoded: bytes) -> Membership:
    """Decode equal memberships to one object: they are long, and daemons often repeat them."""
    return codec.membership_from_proto(values_pb2.Membership.FromString(encoded))


def _rank_view(state: control_pb2.RankState) -> RankView:
    return RankView(
        rank=state.rank,
        state=RankHealth.of(state.state),
        step=state.step,
        idle_s=state.idle_s,
        pid=state.pid,
        lost=state.lost,
        restored=(
            codec.generation_from_proto(state.restored) if state.HasField("restored") else None
        ),
        restored_from=RestoreSource.of(state.restored_from),
        exit_code=state.exit_code or None,
        last_lines=last_lines(state.last_lines),
        follows=state.follows,
        repeated_after=state.repeated_after if state.HasField("repeated_after") else None,
        no_replay=last_lines(state.no_replay),
        since_work_s=state.since_work_s if state.HasField("since_work_s") else None,
        work_reported=state.work_reported,
        unprotected=state.unprotected,
        exit_reason=EndReason.of(state.exit_reason),
        kernel_messages=last_lines(state.kernel_messages),
        oom_killed_in=state.oom_killed_in,
        hardware_fault_in=state.hardware_fault_in,
        times=times_from_proto(state.times) if state.HasField("times") else None,
        divergence=_divergence(state),
    )


def _divergence(state: control_pb2.RankState) -> Divergence | None:
    if not state.HasField("divergence"):
        return None
    found = divergence_from_proto(state.divergence)
    return None if found is None else found.essence


def identity_of(view: NodeView) -> tuple[object, ...]:
    """Fields that change when a daemon starts again, loses its memory or moves."""
    return (view.memory_id, view.incarnation, view.peer_address, view.bulk_address)


def evidence_of(view: JobView) -> object:
    """Fields whose change may call for a decision at once; mere counts and times are left out."""
    return (
        *(view.epoch, view.membership, view.verified, view.line),
        *(view.agent_waiting, view.rebuilding, view.problem, view.problem_code),
        view.inspection and (view.inspection.number, view.inspection.processes),
        *(
            (
                *(each.rank, each.pid, each.lost, each.restored, each.restored_from),
                *(each.exit_code, each.exit_reason, each.oom_killed_in, each.unprotected),
                *(each.hardware_fault_in, each.divergence),
            )
            for each in view.ranks
        ),
    )
