"""The state of a job: in protobuf for the control loop, in JSON for the catalogue and for people.

The job's condition comes from the engine (`engine.overview`), figures come from the storage and the
worker.
"""

from __future__ import annotations

from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.inspections import FRAMES_SENT_MAX
from holdfast_core.snapshots.generations import Generation
from holdfast_core.stragglers import StepTimes
from holdfast_daemon.engine import Inspection
from holdfast_daemon.engine.overview import JobOverview, PersistOverview, RankOverview
from holdfast_daemon.job.host import JobHost
from holdfast_protos import codec, control_pb2
from holdfast_protos.divergences import divergence_to_proto
from holdfast_protos.expert_plans import plan_to_proto
from holdfast_protos.inspections import processes_to_proto
from holdfast_protos.losses import loss_to_proto
from holdfast_protos.step_times import times_to_proto

WORK_REPORTED_S = 10.0
"""Age up to which a launcher's report of who works says so of now: reports come every two
seconds."""


def job_state(host: JobHost) -> control_pb2.JobState:
    """The state of one job as the heartbeat carries it."""
    job = host.engine.overview()
    return control_pb2.JobState(
        job=job.job,
        uid=job.membership.uid if job.membership else "",
        epoch=job.epoch,
        membership=codec.membership_to_proto(job.membership) if job.membership else None,
        verified=job.verified,
        line=codec.optional_line_to_proto(job.line),
        has_line=job.line is not None,
        protected=codec.optional_generation_to_proto(job.protected),
        complete=codec.optional_generation_to_proto(job.complete),
        ranks=[_rank(rank, host.now, job.work_reported_at) for rank in job.ranks],
        agent_waiting=job.agent_waiting,
        rebuilding=bool(job.rebuilding),
        problem=job.problem.text,
        problem_code=job.problem.code,
        skipped=job.skipped,
        failed=job.failed,
        arena_bytes=host.storage.arena_bytes,
        parity_bytes=host.storage.parity_bytes,
        loss=None if job.current_loss is None else loss_to_proto(job.current_loss),
        persist=_persist(host, job.persist),
        loading=job.loading,
        storage_problem=job.storage_problem,
        stored_epoch=job.stored_epoch,
        protection_bytes_s=host.worker.parity_traffic.bytes_s,
        slots=job.slots,
        interval_steps=job.interval_steps,
        window_steps=job.window_steps,
        plan=None if job.plan is None else plan_to_proto(job.plan),
        inspection=_inspection(job.inspection, host.now),
    )


def _persist(host: JobHost, persist: PersistOverview | None) -> control_pb2.PersistState | None:
    """The state of persisting, as this daemon sees it; None when the job has no durable tier."""
    if persist is None:
        return None
    done, total = host.worker.persister.progress
    return control_pb2.PersistState(
        persisted=codec.optional_generation_to_proto(persist.stored),
        persisting=codec.optional_generation_to_proto(persist.persisting),
        done_bytes=done,
        total_bytes=total,
        failure=persist.failure,
        age_s=persist.age_s(host.now),
    )


def _inspection(made: Inspection | None, now: float) -> control_pb2.InspectionState | None:
    if made is None:
        return None
    return control_pb2.InspectionState(
        number=made.number,
        age_s=max(0.0, now - made.asked_at),
        answered=made.processes is not None,
        processes=processes_to_proto(made.processes or (), FRAMES_SENT_MAX),
    )


def _persist_json(host: JobHost, persist: PersistOverview | None) -> dict[str, object] | None:
    if persist is None:
        return None
    done, total = host.worker.persister.progress
    return {
        "persisted": _text(persist.stored),
        "persisting": _text(persist.persisting),
        "done_bytes": done,
        "total_bytes": total,
        "failure": persist.failure,
        "age_s": round(persist.age_s(host.now), 1),
    }


def _rank(rank: RankOverview, now: float, work_reported_at: float) -> control_pb2.RankState:
    restored, source = rank.restored or (None, "")
    return control_pb2.RankState(
        rank=rank.rank,
        state=rank.health,
        step=rank.step,
        idle_s=max(0.0, now - rank.last_sign),
        pid=rank.pid,
        lost=rank.lost,
        restored=codec.optional_generation_to_proto(restored),
        restored_from=source,
        exit_code=rank.exit_code,
        last_lines=rank.last_lines,
        follows=rank.follows,
        repeated_after=rank.repeated_after,
        no_replay=rank.no_replay,
        since_work_s=None if rank.worked_at is None else max(0.0, now - rank.worked_at),
        work_reported=now - work_reported_at <= WORK_REPORTED_S,
        unprotected=rank.unprotected,
        exit_reason=rank.exit_reason,
        kernel_messages=rank.kernel_messages,
        oom_killed_in=rank.oom_killed_in,
        hardware_fault_in=rank.hardware_fault_in,
        times=None if rank.times is None else times_to_proto(rank.times),
        divergence=(
            None if rank.divergence is None else divergence_to_proto(rank.divergence.essence)
        ),
    )


def as_json(host: JobHost, job: JobOverview) -> dict[str, object]:
    """All that this daemon has to report of one job, for `status` and the catalogue, as JSON
    values. `job` is the overview of the host's engine now."""
    contents = host.engine.held()
    line, load = job.line, job.directive.load if job.directive is not None else None
    return {
        "job": job.job,
        "epoch": job.epoch,
        "member": job.member,
        "leads": job.leads,
        "fenced": job.fenced,
        "verified": job.verified,
        "line": _text(line.generation) if line else None,
        "line_reason": line.reason if line else None,
        "line_stored": line.stored if line else False,
        "load": _text(load),
        "protected": _text(job.protected),
        "problem": job.problem.text,
        "persist": _persist_json(host, job.persist),
        "rebuilding": list(job.rebuilding),
        "arena_bytes": host.storage.arena_bytes,
        "parity_bytes": host.storage.parity_bytes,
        "protection_bytes_s": round(host.worker.parity_traffic.bytes_s),
        "ranks": [
            {
                "rank": rank.rank,
                "state": rank.health.value,
                "step": rank.step,
                "skipped": rank.skipped,
                "failed": rank.failed,
                "follows": rank.follows,
                "unprotected": rank.unprotected,
                "times": _times(rank.times),
                "loss": _loss(rank.loss),
            }
            for rank in job.ranks
        ],
        "losses": _recoveries(job),
        "stages": _stages(job),
        "slots": [
            {
                "rank": slot.rank,
                "slot": slot.slot,
                "state": slot.state.value,
                "generation": _text(slot.generation),
                "verified": slot.verified,
            }
            for slot in contents.slots
        ],
        "parity": [
            {
                "lane": parity.lane,
                "slot": parity.slot,
                "state": parity.state.value,
                "generation": _text(parity.generation),
            }
            for parity in contents.parities
        ],
    }


def _text(generation: Generation | None) -> str | None:
    return str(generation) if generation is not None else None


def _times(found: StepTimes | None) -> dict[str, object] | None:
    """How a rank divides its steps, for people: without the number of the window."""
    if found is None:
        return None
    seconds = {"step_s": found.step_s, "own_s": found.own_s, "wait_s": found.wait_s}
    return {"steps": found.steps, **{name: round(each, 6) for name, each in seconds.items()}}


def _loss(found: LossReport | None) -> dict[str, object] | None:
    if found is None:
        return None
    risk = found.risk
    return {"experts_per_layer": found.k, "at_risk": risk.plt, "at_risk_mlt": risk.mlt}


def _recoveries(job: JobOverview) -> list[dict[str, object]]:
    """The recoveries for the catalogue, which keeps all of them. Only recoveries of epochs that
    existed are included, so that their number is bounded whatever a trainer sends."""
    recoveries = job.loss.recoveries if job.loss else ()
    return [each.to_dict() for each in recoveries if each.epoch <= job.epoch]


def _stages(job: JobOverview) -> dict[str, dict[str, str]]:
    """Rank → stage → newest generation that reached it."""
    stages: dict[str, dict[str, str]] = {}
    for rank in job.ranks:
        reached = {"committed": rank.committed, "protected": job.protected}
        stages[str(rank.rank)] = {name: str(g) for name, g in reached.items() if g is not None}
    return stages
