"""What a daemon says of a job: to the control loop, to the catalogue, to people."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import MemoryBudgetError
from holdfast_core.loss_reports import LossReport, merged
from holdfast_core.states import RankHealth
from holdfast_core.values import Generation, Redundancy
from holdfast_daemon.engine.slots import SlotState
from holdfast_daemon.engine.state import JobMemory, RankRecord
from holdfast_daemon.host import JobHost
from holdfast_protos import codec, control_pb2
from holdfast_protos.losses import loss_to_proto


def newest_complete(memory: JobMemory) -> Generation | None:
    """The newest generation that all ranks of this member have committed."""
    held = [
        {
            slot.generation
            for arena, slot in memory.slots()
            if arena.rank == rank and slot.state is SlotState.SEALED and slot.generation
        }
        for rank in memory.my_ranks()
    ]
    return max(set.intersection(*held), default=None) if held else None


def rank_state(memory: JobMemory, rank: int, record: RankRecord) -> RankHealth:
    """What the rank does now."""
    if record.lost_in == memory.epoch:
        return RankHealth.OFFLINE
    session = record.session
    if session is None or session.epoch != memory.epoch or memory.fenced:
        return RankHealth.UNHEALTHY
    writing = any(
        arena.rank == rank and slot.state in (SlotState.GRANTED, SlotState.SEALING)
        for arena, slot in memory.slots()
    )
    return RankHealth.SNAPSHOTTING if writing else RankHealth.HEALTHY


def exit_code(memory: JobMemory, record: RankRecord) -> int:
    """What the rank's worker failed with in this epoch, 0 when it has not."""
    epoch, code = record.exited
    return code if epoch == memory.epoch else 0


def last_lines(memory: JobMemory, record: RankRecord) -> str:
    """What that worker wrote to stderr last; empty when none has failed in this epoch."""
    return record.last_lines if exit_code(memory, record) else ""


def problem(memory: JobMemory) -> str:
    """Why nothing is protected, in words; empty when all is well."""
    if memory.membership is None or memory.me is None:
        return "this node is no member of the job"
    if memory.fenced:
        return f"fenced: epoch {memory.epoch_seen} has begun without this daemon"
    directive = memory.directive
    if memory.loading.problem:
        return memory.loading.problem
    for rank, record in memory.ranks.items():
        epoch, why = record.refused
        if why and epoch == memory.epoch:
            return f"rank {rank} {MemoryBudgetError.words}: {why}"
    if directive is None or directive.line is None:
        return "the recovery line of this epoch is not decided yet"
    failures = [r.failure for r in memory.ranks.values() if r.failure]
    if failures:
        return failures[0]
    if memory.parity_failure:
        return f"the newest snapshots have no parity: {memory.parity_failure}"
    if memory.membership.redundancy is Redundancy.NONE:
        return "the job has no redundancy: a lost node loses its snapshots"
    if directive.protected is None:
        return "no generation is protected yet"
    return ""


def loss_report(memory: JobMemory) -> LossReport | None:
    """What the ranks here say of lost tokens; None where snapshots hold all experts."""
    records = (memory.ranks.get(rank) for rank in memory.my_ranks())
    return merged(record.loss for record in records if record and record.loss)


def current_loss(memory: JobMemory) -> LossReport | None:
    """Likewise of ranks at work in this epoch, without recoveries but the newest: the control loop
    adds up those of all daemons, and older words would not fit newer ones."""
    records = (memory.ranks.get(rank) for rank in memory.my_ranks())
    found = merged(
        record.loss
        for record in records
        if record and record.loss and record.session and record.session.epoch == memory.epoch
    )
    return replace(found, recoveries=found.recoveries[-1:]) if found else None


def job_state(host: JobHost) -> control_pb2.JobState:
    """The heartbeat's word on one job."""
    memory = host.engine.memory
    directive = memory.directive
    line = memory.line
    loss = current_loss(memory)
    return control_pb2.JobState(
        job=memory.job,
        epoch=memory.epoch,
        membership=codec.membership_to_proto(memory.membership) if memory.membership else None,
        verified=memory.verified,
        line=codec.optional_line_to_proto(line),
        has_line=line is not None,
        protected=codec.optional_generation_to_proto(directive.protected if directive else None),
        complete=codec.optional_generation_to_proto(newest_complete(memory)),
        ranks=[_rank(host, rank) for rank in memory.my_ranks()],
        agent_waiting=memory.agent_waiting,
        rebuilding=bool(memory.rebuilds),
        problem=problem(memory),
        skipped=sum(record.skipped for record in memory.ranks.values()),
        failed=sum(record.failed for record in memory.ranks.values()),
        arena_bytes=host.storage.arena_bytes,
        parity_bytes=host.storage.parity_bytes,
        loss=None if loss is None else loss_to_proto(loss),
        persist=persist_state(host),
        loading=any(job.stored for job in memory.rebuilds.values()),
        storage_problem=memory.loading.problem,
        stored_epoch=memory.loading.beyond,
        protection_bytes_s=host.worker.parity_traffic.bytes_s,
    )


def evidence(memory: JobMemory) -> tuple[object, ...]:
    """What the control loop may act upon, and is told at once: `holdfast_operator.heartbeats`
    calls it the same. Steps and generations grow all the time, and are told with the next heartbeat
    that is due: one for each save would be most of an operator's work."""
    directive, line = memory.directive, memory.line
    start = line.generation.step if line and line.generation else 0
    return (
        *(memory.epoch, memory.membership, memory.verified, memory.line),
        *(memory.agent_waiting, bool(memory.rebuilds), problem(memory)),
        directive is not None and directive.protected is not None,
        *(any(job.stored for job in memory.rebuilds.values()), memory.loading.beyond),
        *(memory.loading.problem, memory.persist.stored, memory.persist.last_failure),
        *(
            (
                record.session.id if record.session else "",
                record.lost_in == memory.epoch,
                record.restored,
                exit_code(memory, record),
                record.last_step > start,
            )
            for record in map(memory.rank, memory.my_ranks())
        ),
    )


def persist_state(host: JobHost) -> control_pb2.PersistState | None:
    """How persisting fares, as this daemon sees it; None where the job has no durable tier."""
    memory = host.engine.memory
    if memory.membership is None or memory.membership.tier is None:
        return None
    done, total = host.worker.persister.progress
    return control_pb2.PersistState(
        persisted=codec.optional_generation_to_proto(memory.persist.stored),
        persisting=codec.optional_generation_to_proto(memory.persisting),
        done_bytes=done,
        total_bytes=total,
        failure=memory.persist.last_failure,
        age_s=persist_age_s(memory, host.now),
    )


def persist_age_s(memory: JobMemory, now: float) -> float:
    """Since the newest set in storage was complete, or since this daemon serves the job."""
    since = max(memory.persist.stored_at, memory.persist.watched_since)
    return max(0.0, now - since) if since > float("-inf") else 0.0


def _persist_json(host: JobHost) -> dict[str, object] | None:
    memory, state = host.engine.memory, persist_state(host)
    if state is None:
        return None
    return {
        "persisted": str(memory.persist.stored) if memory.persist.stored else None,
        "persisting": str(memory.persisting) if memory.persisting else None,
        "done_bytes": state.done_bytes,
        "total_bytes": state.total_bytes,
        "failure": state.failure,
        "age_s": round(state.age_s, 1),
    }


def _rank(host: JobHost, rank: int) -> control_pb2.RankState:
    memory = host.engine.memory
    record = memory.rank(rank)
    restored, source = record.restored or (None, "")
    return control_pb2.RankState(
        rank=rank,
        state=rank_state(memory, rank, record),
        step=record.last_step,
        idle_s=max(0.0, host.now - record.last_sign),
        pid=record.session.pid if record.session else 0,
        lost=record.lost_in == memory.epoch,
        restored=codec.optional_generation_to_proto(restored),
        restored_from=source,
        exit_code=exit_code(memory, record),
        last_lines=last_lines(memory, record),
    )


def as_json(host: JobHost) -> dict[str, object]:
    """Everything known of one job, for `status` and the catalogue, as JSON values."""
    memory = host.engine.memory
    loss = loss_report(memory)
    directive = memory.directive
    line = memory.line
    return {
        "job": memory.job,
        "epoch": memory.epoch,
        "member": memory.me,
        "leads": memory.leads,
        "fenced": memory.fenced,
        "verified": memory.verified,
        "line": str(line.generation) if line and line.generation else None,
        "line_reason": line.reason if line else None,
        "line_stored": line.stored if line else False,
        "load": str(directive.load) if directive and directive.load else None,
        "protected": str(directive.protected) if directive and directive.protected else None,
        "problem": problem(memory),
        "persist": _persist_json(host),
        "rebuilding": sorted(memory.rebuilds),
        "arena_bytes": host.storage.arena_bytes,
        "parity_bytes": host.storage.parity_bytes,
        "protection_bytes_s": round(host.worker.parity_traffic.bytes_s),
        "ranks": [
            {
                "rank": rank,
                "state": rank_state(memory, rank, memory.rank(rank)),
                "step": memory.rank(rank).last_step,
                "skipped": memory.rank(rank).skipped,
                "failed": memory.rank(rank).failed,
                "loss": _loss(memory.rank(rank).loss),
            }
            for rank in memory.my_ranks()
        ],
        "losses": _recoveries(memory, loss),
        "stages": _stages(memory),
        "slots": [
            {
                "rank": arena.rank,
                "slot": slot.index,
                "state": slot.state.value,
                "generation": str(slot.generation) if slot.generation else None,
                "verified": slot.verified,
            }
            for arena, slot in memory.slots()
        ],
        "parity": [
            {
                "lane": parity.lane,
                "slot": parity.index,
                "state": parity.state.value,
                "generation": str(parity.generation) if parity.generation else None,
            }
            for parity in memory.parities.values()
        ],
    }


def _loss(found: LossReport | None) -> dict[str, object] | None:
    if found is None:
        return None
    risk = found.risk
    return {"experts_per_layer": found.k, "at_risk": risk.plt, "at_risk_mlt": risk.mlt}


def _recoveries(memory: JobMemory, found: LossReport | None) -> list[dict[str, object]]:
    """For the catalogue, which forgets none: of epochs that there were, so that they are bounded
    whatever a trainer says."""
    recoveries = found.recoveries if found else ()
    return [each.to_dict() for each in recoveries if each.epoch <= memory.epoch]


def _stages(memory: JobMemory) -> dict[str, dict[str, str]]:
    """Rank → stage → newest generation that reached it."""
    protected = memory.directive.protected if memory.directive else None
    stages: dict[str, dict[str, str]] = {}
    for rank in memory.my_ranks():
        committed = max(
            (
                slot.generation
                for arena, slot in memory.slots()
                if arena.rank == rank and slot.state is SlotState.SEALED and slot.generation
            ),
            default=None,
        )
        reached = {"committed": committed, "protected": protected}
        stages[str(rank)] = {name: str(g) for name, g in reached.items() if g is not None}
    return stages
