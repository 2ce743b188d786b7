"""State of a job on this daemon at one moment: for heartbeats, metrics, the catalogue and
operators.

`overview` and `held` copy it from the engine's memory into frozen values, so that no code outside
the engine depends on how the memory is laid out. `evidence` is the part that the control loop acts
upon; it is read after every change, and is therefore a tuple of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import MemoryBudgetError, refuses_saves
from holdfast_core.experts.loss_reports import LossReport, merged
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_core.snapshots.reports import Directive
from holdfast_core.states import EndReason, RankHealth, RestoreSource
from holdfast_core.stragglers import StepTimes
from holdfast_daemon.engine.slots import ParityState, SlotState
from holdfast_daemon.engine.state import Inspection, JobMemory, RankRecord, SavePace


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOverview:
    """A rank of this node."""

    rank: int
    health: RankHealth
    step: int
    last_sign: float
    """Monotonic time in seconds at which the rank was last seen to progress."""
    pid: int
    """Process id of the rank's trainer; 0 without a session."""
    lost: bool
    """Whether its session broke off in this epoch."""
    follows: bool
    """Whether its worker stays in its process when its world changes."""
    restored: tuple[Generation | None, RestoreSource] | None
    repeated_after: int | None
    no_replay: str
    exit_code: int
    """Exit code with which its worker failed in this epoch; 0 when it has not."""
    last_lines: str
    """End of what that worker wrote to stderr."""
    exit_reason: EndReason
    """Why that worker failed, where that is known."""
    kernel_messages: str
    """Lines that the kernel wrote about that failure."""
    oom_killed_in: int
    """Newest epoch in which its worker was killed for lack of memory; 0 when in none."""
    hardware_fault_in: int
    """Newest epoch in which its worker ended after a fault of hardware; 0 when in none."""
    worked_at: float | None
    """Monotonic time in seconds at which its agent last saw it work in this epoch; None when it has
    not."""
    unprotected: bool
    """Whether it trains without a session in this epoch."""
    skipped: int
    failed: int
    pace: SavePace
    loss: LossReport | None
    times: StepTimes | None
    """How its newest steps in this epoch were divided; None without a session."""
    divergence: Divergence | None
    """Newest divergence of replicas in this epoch; None while they are equal."""
    committed: Generation | None
    """The newest snapshot of the rank that is sealed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotOverview:
    """A slot of an arena."""

    rank: int
    slot: int
    state: SlotState
    generation: Generation | None
    verified: bool
    payload_bytes: int
    """Bytes of the snapshot's payload; 0 when the slot holds none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityOverview:
    """A parity block."""

    lane: int
    slot: int
    state: ParityState
    generation: Generation | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOverview:
    """Contents of the slots and parity blocks of a job on this node."""

    job: str
    slots: tuple[SlotOverview, ...]
    parities: tuple[ParityOverview, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistOverview:
    """State of the durable tier, as far as this daemon knows."""

    stored: Generation | None
    """The newest complete set."""
    persisting: Generation | None
    """The generation that is being written now."""
    failure: str
    since: float
    """Monotonic time in seconds at which the newest set was complete, or this daemon began to serve
    the job, whichever is later; -inf before."""

    def age_s(self, now: float) -> float:
        """Seconds since `since`; 0 while that is -inf."""
        return max(0.0, now - self.since) if self.since > float("-inf") else 0.0


@dataclass(frozen=True, slots=True)
class ProtectionProblem:
    """Why nothing is protected; empty when all is well."""

    text: str = ""
    """The reason, for people."""
    code: str = ""
    """`HoldfastError.code` of its cause; empty when no error is."""


ALL_IS_WELL = ProtectionProblem()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOverview:
    """A job on this node."""

    job: str
    epoch: int
    membership: Membership | None
    """The newest membership, whether it has a member on this node or not."""
    member: int | None
    """The member on this node."""
    leads: bool
    fenced: bool
    verified: bool
    directive: Directive | None
    """Decisions of the leader; None while this node takes no part."""
    complete: Generation | None
    """The newest generation that all ranks of this node have committed."""
    ranks: tuple[RankOverview, ...]
    sessions: int
    agent_waiting: bool
    rebuilding: tuple[int, ...]
    """Ranks whose snapshots are being rebuilt or loaded."""
    loading: bool
    """Whether a snapshot is being loaded from storage."""
    problem: ProtectionProblem
    storage_problem: str
    slots: int
    """Fewest slots of an arena of the ranks here; 0 while none is allocated."""
    interval_steps: int
    """Steps from snapshot to snapshot, as measured by the ranks that are at work in this epoch; 0
    where none reports it."""
    window_steps: int
    """Steps of the newest sparse window of these ranks; 0 where none reports one."""
    state_bytes: tuple[int, int]
    """Training state that the ranks here capture: of experts, and of everything else."""
    stored_epoch: int
    """Epoch of an earlier run in storage, which this epoch must pass first; 0: none."""
    skipped: int
    failed: int
    loss: LossReport | None
    """Lost tokens of all ranks here; None where snapshots hold all experts."""
    current_loss: LossReport | None
    """Lost tokens of the ranks here that are at work in this epoch, with only the newest
    recovery."""
    plan: PlanReport | None
    """Newest expert plan of the ranks here that are at work in this epoch; None without uneven
    copies."""
    persist: PersistOverview | None
    """State of the durable tier; None where the job has none."""
    work_reported_at: float
    """See `JobMemory.work_reported_at`."""
    inspection: Inspection | None
    """The newest inspection of this epoch; None without any."""

    @property
    def line(self) -> Line | None:
        return self.directive.line if self.directive is not None else None

    @property
    def protected(self) -> Generation | None:
        return self.directive.protected if self.directive is not None else None


def overview(memory: JobMemory) -> JobOverview:
    """The state of the job now."""
    committed = _committed(memory)
    return JobOverview(
        job=memory.job,
        epoch=memory.epoch,
        membership=memory.membership,
        member=memory.me,
        leads=memory.leads,
        fenced=memory.fenced,
        verified=memory.verified,
        directive=memory.directive,
        complete=max(set.intersection(*committed.values()), default=None) if committed else None,
        ranks=tuple(_rank(memory, rank, generations) for rank, generations in committed.items()),
        sessions=len(memory.sessions),
        agent_waiting=memory.agent_waiting,
        rebuilding=tuple(sorted(memory.rebuilds)),
        loading=any(job.stored for job in memory.rebuilds.values()),
        problem=problem(memory),
        storage_problem=memory.loading.problem,
        slots=_fewest_slots(memory),
        interval_steps=max((each.pace.interval_steps for each in _at_work(memory)), default=0),
        window_steps=max((each.pace.window_steps for each in _at_work(memory)), default=0),
        state_bytes=_state_bytes(memory),
        stored_epoch=memory.loading.beyond,
        skipped=sum(record.skipped for record in memory.ranks.values()),
        failed=sum(record.failed for record in memory.ranks.values()),
        loss=loss_report(memory),
        current_loss=current_loss(memory),
        plan=current_plan(memory),
        persist=_persist(memory),
        work_reported_at=memory.work_reported_at,
        inspection=memory.inspection,
    )


def held(memory: JobMemory) -> HeldOverview:
    """The contents of slots and parity blocks now."""
    return HeldOverview(
        job=memory.job,
        slots=tuple(
            SlotOverview(
                rank=arena.rank,
                slot=slot.index,
                state=slot.state,
                generation=slot.generation,
                verified=slot.verified,
                payload_bytes=slot.manifest.payload_bytes if slot.manifest is not None else 0,
            )
            for arena, slot in memory.slots()
        ),
        parities=tuple(
            ParityOverview(
                lane=parity.lane,
                slot=parity.index,
                state=parity.state,
                generation=parity.generation,
            )
            for parity in memory.parities.values()
        ),
    )


def evidence(memory: JobMemory) -> tuple[object, ...]:
    """The state that the control loop may act upon, reported at once when it changes; see
    `evidence_of` in `holdfast_operator.control.heartbeats`. Steps and generations grow all the time
    and wait for the next heartbeat that is due: one for each save would be most of an operator's
    work."""
    epoch, number = memory.current, memory.epoch
    line = epoch.directive.line if epoch is not None else None
    start = line.generation.step if line and line.generation else 0
    return (
        *(number, memory.membership, memory.verified, line),
        *(memory.agent_waiting, bool(memory.rebuilds), problem(memory)),
        epoch is not None and epoch.directive.protected is not None,
        *(any(job.stored for job in memory.rebuilds.values()), memory.loading.beyond),
        *(memory.loading.problem, memory.persist.stored, memory.persist.last_failure),
        memory.inspection,
        *(
            (
                record.session.id if record.session else "",
                record.lost_in == number,
                record.restored,
                exit_code(memory, record),
                record.last_step > start,
                is_unprotected(memory, record),
                record.oom_killed_in,
                record.hardware_fault_in,
                record.divergence,
            )
            for record in map(memory.rank, memory.my_ranks())
        ),
    )


def rank_health(memory: JobMemory, rank: int, record: RankRecord) -> RankHealth:
    """Health of the rank (REFT §4.2)."""
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
    """Exit code with which the rank's worker failed in this epoch; 0 when it has not."""
    epoch, code = record.exited
    return code if epoch == memory.epoch else 0


def last_lines(memory: JobMemory, record: RankRecord) -> str:
    """Last lines that the failed worker wrote to stderr; empty when none has failed in this
    epoch."""
    return record.last_lines if exit_code(memory, record) else ""


def kernel_messages(memory: JobMemory, record: RankRecord) -> str:
    """What the kernel wrote about the failure of the worker in this epoch, or about a fault of
    hardware with which it ended in the last; empty without either."""
    late = record.hardware_fault_in == memory.epoch - 1 != 0
    return record.kernel_messages if late or exit_code(memory, record) else ""


def is_unprotected(memory: JobMemory, record: RankRecord) -> bool:
    """Whether the rank trains without a session in this epoch."""
    return record.unprotected_in == memory.epoch != 0


def problem(memory: JobMemory) -> ProtectionProblem:
    """Why nothing is protected; empty when all is well."""
    epoch = memory.current
    if epoch is None:
        return ProtectionProblem("this node is not a member of the job")
    if memory.fenced:
        return ProtectionProblem(f"fenced: epoch {memory.epoch_seen} has begun without this daemon")
    if memory.loading.problem:
        return ProtectionProblem(memory.loading.problem)
    for rank, record in memory.ranks.items():
        refused_in, why = record.refused
        if why and refused_in == epoch.number:
            return ProtectionProblem(
                f"rank {rank} trains unprotected, without memory for snapshots: {why}",
                MemoryBudgetError.code,
            )
    if epoch.line is None:
        return ProtectionProblem("the recovery line of this epoch is not decided yet")
    failed = [record for record in memory.ranks.values() if record.failure]
    if failed:
        # What somebody has to change comes before saves that are only skipped.
        worst = next((each for each in failed if refuses_saves(each.failure_code)), failed[0])
        return ProtectionProblem(worst.failure, worst.failure_code)
    if memory.parity_failure:
        return ProtectionProblem(f"the newest snapshots have no parity: {memory.parity_failure}")
    if epoch.membership.redundancy is Redundancy.NONE:
        return ProtectionProblem("the job has no redundancy: a lost node loses its snapshots")
    if epoch.directive.protected is None:
        return ProtectionProblem("no generation is protected yet")
    return ALL_IS_WELL


def loss_report(memory: JobMemory) -> LossReport | None:
    """Lost tokens of all ranks here; None where snapshots hold all experts."""
    records = (memory.ranks.get(rank) for rank in memory.my_ranks())
    return merged(record.loss for record in records if record and record.loss)


def current_loss(memory: JobMemory) -> LossReport | None:
    """Lost tokens of the ranks here that are at work in this epoch, with only the newest recovery:
    the control loop adds up the reports of all daemons, and older recoveries would not match newer
    ones."""
    total = merged(record.loss for record in _at_work(memory) if record.loss)
    return replace(total, recoveries=total.recoveries[-1:]) if total else None


def current_plan(memory: JobMemory) -> PlanReport | None:
    """Newest expert plan of the ranks here that are at work in this epoch."""
    plans = [record.plan for record in _at_work(memory) if record.plan]
    return max(plans, key=lambda plan: (plan.epoch, plan.step), default=None)


def _at_work(memory: JobMemory) -> Iterator[RankRecord]:
    """Records of the ranks here that have a session in this epoch."""
    for rank in memory.my_ranks():
        record = memory.ranks.get(rank)
        if record and record.session and record.session.epoch == memory.epoch:
            yield record


def _rank(memory: JobMemory, rank: int, committed: set[Generation]) -> RankOverview:
    record = memory.rank(rank)
    return RankOverview(
        rank=rank,
        health=rank_health(memory, rank, record),
        step=record.last_step,
        last_sign=record.last_sign,
        pid=record.session.pid if record.session else 0,
        lost=record.lost_in == memory.epoch,
        follows=record.follower is not None
        and record.can_stay(
            record.follower.size,
            protected=memory.protects,
            members_changed=memory.current is not None and memory.current.members_changed,
        ),
        restored=record.restored,
        repeated_after=record.repeated_after,
        no_replay=record.no_replay,
        exit_code=exit_code(memory, record),
        last_lines=last_lines(memory, record),
        exit_reason=record.exit_reason if exit_code(memory, record) else EndReason.UNKNOWN,
        kernel_messages=kernel_messages(memory, record),
        oom_killed_in=record.oom_killed_in,
        hardware_fault_in=record.hardware_fault_in,
        worked_at=record.worked[1] if record.worked[0] == memory.epoch != 0 else None,
        unprotected=is_unprotected(memory, record),
        skipped=record.skipped,
        failed=record.failed,
        pace=record.pace,
        loss=record.loss,
        times=record.times[1] if record.session and record.times[0] == memory.epoch else None,
        divergence=record.divergence[1] if record.divergence[0] == memory.epoch else None,
        committed=max(committed, default=None),
    )


def _fewest_slots(memory: JobMemory) -> int:
    ranks = memory.my_ranks()
    arenas = (each for each in memory.arenas.values() if each.ready and each.rank in ranks)
    return min((len(arena.slots) for arena in arenas), default=0)


def _state_bytes(memory: JobMemory) -> tuple[int, int]:
    sessions = ((record.rank, record.layout_id) for record in memory.sessions.values())
    arenas = (memory.arenas.get(key) for key in sessions)
    captured = [arena.state_bytes for arena in arenas if arena is not None]
    return sum(experts for experts, _ in captured), sum(others for _, others in captured)


def _committed(memory: JobMemory) -> dict[int, set[Generation]]:
    """The generations of each rank of this node that are sealed here."""
    generations: dict[int, set[Generation]] = {rank: set() for rank in memory.my_ranks()}
    for arena, slot in memory.slots():
        if slot.state is SlotState.SEALED and slot.generation and arena.rank in generations:
            generations[arena.rank].add(slot.generation)
    return generations


def _persist(memory: JobMemory) -> PersistOverview | None:
    if memory.membership is None or memory.membership.tier is None:
        return None
    return PersistOverview(
        stored=memory.persist.stored,
        persisting=memory.current.persisting if memory.current is not None else None,
        failure=memory.persist.last_failure,
        since=max(memory.persist.stored_at, memory.persist.watched_since),
    )
