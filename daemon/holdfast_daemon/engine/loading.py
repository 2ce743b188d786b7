"""Loads from storage when memory has no line: the leader chooses, every daemon loads its ranks.

The line comes last. While memory has none, the leader asks storage for its complete sets and names
one generation (`Directive.load`); every daemon loads its ranks' snapshots of it into slots. Once
all of them are in memory, that generation is the line, by the same rule as any other. So all ranks
start from one set or none does, and a set that turns out to be damaged on one rank is abandoned for
the next older one before any rank has used a byte of it.

While storage cannot be read, the job waits. Each failure in a row doubles the pause before the next
try, up to `PAUSE_S_MAX`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.durable.choice import choose_copy
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Tier
from holdfast_core.snapshots.stored import FailedLoad
from holdfast_daemon.engine.effects import (
    FindStored,
    HeldSlot,
    LoadStored,
    OpenStored,
    StoredFound,
)
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import ArenaView, RebuildJob, Slot, SlotState
from holdfast_daemon.engine.state import JobMemory

PAUSE_S, PAUSE_S_MAX = 0.5, 60.0
"""First and longest pause before a failed task is tried again; each failure in a row doubles it."""

FORGET_S, FORGET_S_MAX = 30.0, 600.0
"""First and longest pause before damaged bytes are read again: an operator may have repaired
them."""

_REASON_CHARS_MAX = 300
_LOOK = "look"


# --- the leader -----------------------------------------------------------------------------------


def consult(
    memory: JobMemory, epoch: Epoch, line: Line, load: Generation | None, now: float
) -> tuple[Line | None, Generation | None]:
    """Return the line that follows from `line`, which memory alone gives, and the generation to
    load before there can be one."""
    membership, state = epoch.membership, memory.loading
    tier = membership.tier
    if tier is None:
        return line, None
    if line.generation is not None:
        return (_as_stored(line, load, tier, state.why) if line.generation == load else line), load
    state.why = line.reason
    if state.found is None:
        _look(memory, tier, now)
        return None, load
    choice = choose_copy(
        state.found,
        tier,
        epoch=membership.epoch,
        world_size=lambda generation: (
            None if (world := membership.world_of(generation)) is None else world.size
        ),
        unusable=_unusable(memory),
        current=load,
    )
    state.beyond = choice.beyond
    if choice.fresh:
        state.problem = ""
        return Line(generation=None, reason=f"{choice.reason}; {line.reason}"), None
    if choice.reason != state.logged_reason:
        state.logged_reason = choice.reason
        memory.note(JobEvent.STORAGE_CHOICE, generation=choice.generation, detail=choice.reason)
    if choice.generation is not None:
        state.problem = ""
        return None, choice.generation
    state.problem = choice.reason
    if not choice.beyond:
        _look(memory, tier, now)
    return None, load


def _as_stored(line: Line, load: Generation | None, tier: Tier, why: str) -> Line:
    because = f" ({why})" if why else ""
    reason = f"generation {load} from {tier.uri}: memory holds no line{because}"
    return Line(generation=line.generation, reason=reason, stored=True)


def _look(memory: JobMemory, tier: Tier, now: float) -> None:
    state = memory.loading
    if state.looking or now < memory.retry_at.get(_LOOK, now):
        return
    state.looking = True
    memory.out.append(FindStored(epoch=memory.epoch, tier=tier))


def found(memory: JobMemory, event: StoredFound, now: float) -> None:
    """Take the result of a search of storage. A result from an earlier epoch is ignored."""
    state = memory.loading
    if event.epoch != memory.epoch:
        return
    state.looking = False
    pause_s = _pause_s(memory, _LOOK, PAUSE_S, PAUSE_S_MAX)
    memory.retry_at[_LOOK] = now + pause_s
    if event.found is not None:
        state.found = event.found
        return
    state.problem = (
        f"storage cannot be read: {event.error}; the job waits for it, because a fresh start would "
        f"lose what is there. Next try in {pause_s:g} s"
    )
    memory.note(JobEvent.STORAGE_UNREACHABLE, detail=state.problem)


def _unusable(memory: JobMemory) -> dict[Generation, str]:
    failures = [failed for report in memory.reports.values() for failed in report.unloadable]
    return {
        failed.generation: f"rank {failed.rank}: {failed.reason}"
        for failed in sorted(failures, key=lambda failed: failed.rank, reverse=True)
    }


# --- every daemon ---------------------------------------------------------------------------------


def may_load(epoch: Epoch, generation: Generation) -> bool:
    """Whether this epoch loads `generation` from storage."""
    if epoch.membership.tier is None:
        return False
    line = epoch.line
    if line is None:
        return epoch.directive.load == generation
    return line.stored and line.generation == generation


def wanted(epoch: Epoch) -> Generation | None:
    """The generation to load before there is a line."""
    return epoch.directive.load if epoch.line is None else None


def is_failed(memory: JobMemory, rank: int, generation: Generation) -> bool:
    """Whether the rank's snapshot in storage was recently found damaged."""
    return (rank, generation) in memory.loading.failed


def unloadable(memory: JobMemory) -> tuple[FailedLoad, ...]:
    """Failed loads, for the report to the leader."""
    return tuple(
        FailedLoad(rank=rank, generation=generation, reason=why)
        for (rank, generation), why in sorted(memory.loading.failed.items())
    )


def forget_failures(memory: JobMemory, now: float) -> None:
    """Forget failures after a while: the damage may have been repaired."""
    for rank, generation in list(memory.loading.failed):
        if now >= memory.retry_at.get(_failed_key(rank, generation), now):
            del memory.loading.failed[rank, generation]


def start(memory: JobMemory, epoch: Epoch, rank: int, generation: Generation) -> None:
    """Begin to load a rank's snapshot, unless it was recently found damaged."""
    if not may_load(epoch, generation) or is_failed(memory, rank, generation):
        return
    tier, world = epoch.membership.tier, epoch.membership.world_of(generation)
    assert tier is not None and world is not None
    sources_here = tuple(
        HeldSlot(slot=slot.index, manifest=slot.manifest, digest=slot.digest, places=slot.places)
        for arena, slot in memory.slots()
        if tier.experts
        and arena.rank == rank
        and slot.manifest is not None
        and _is_source(slot, generation)
    )
    memory.rebuilds[rank] = RebuildJob(
        generation=generation, digest=0, stored=True, held=sources_here
    )
    memory.note(JobEvent.LOAD_STARTED, rank=rank, generation=generation)
    memory.out.append(
        OpenStored(
            tier=tier,
            rank=rank,
            world_rank=world.world_rank(rank),
            generation=generation,
            held=sources_here,
        )
    )


def sources(memory: JobMemory, epoch: Epoch, generation: Generation) -> list[Slot]:
    """The slots from which experts are taken when `generation` is loaded: for each rank its oldest
    younger snapshot, which has most in common with `generation`. None if copies hold all experts,
    or if no other slot is left for `generation`: then everything is read from storage."""
    tier = epoch.membership.tier
    if tier is None or not tier.experts:
        return []
    by_rank: dict[int, Slot] = {}
    for arena, slot in memory.slots():
        job = memory.rebuilds.get(arena.rank)
        other = job is not None and job.manifest is not None and job.layout_id != arena.layout_id
        if other or not _is_source(slot, generation):
            continue
        if not any(s is not slot and _is_for_load(s, generation) for s in arena.slots):
            continue
        oldest = by_rank.get(arena.rank)
        if oldest is None or _age(slot) < _age(oldest):
            by_rank[arena.rank] = slot
    return list(by_rank.values())


def _is_source(slot: Slot, generation: Generation) -> bool:
    sealed = slot.state is SlotState.SEALED and slot.verified
    return sealed and slot.manifest is not None and _age(slot) > generation


def _is_for_load(slot: Slot, generation: Generation) -> bool:
    """Whether the slot, once freed, can be used for `generation`, or already is."""
    unused = slot.state is SlotState.FREE or slot.generation == generation
    return unused or (slot.state is SlotState.SEALED and slot.persisting is None)


def _age(slot: Slot) -> Generation:
    assert slot.manifest is not None
    return slot.manifest.generation


def _are_there(memory: JobMemory, rank: int, held: Iterable[HeldSlot]) -> bool:
    sealed = {
        (slot.index, slot.digest)
        for arena, slot in memory.slots()
        if arena.rank == rank and slot.state is SlotState.SEALED and slot.verified
    }
    return all((each.slot, each.digest) in sealed for each in held)


def load_into_slot(
    memory: JobMemory, epoch: Epoch, rank: int, job: RebuildJob, arena: ArenaView
) -> None:
    """Start the load into a free slot, given the manifest and the arena."""
    if not _are_there(memory, rank, job.held):
        del memory.rebuilds[rank]  # the next round begins anew, with what is there
        return
    slot = arena.free_slot()
    if slot is None or job.manifest is None or not may_load(epoch, job.generation):
        return
    assert epoch.membership.tier is not None
    arena.begin_recovery(slot, job, job.manifest)
    memory.out.append(
        LoadStored(
            tier=epoch.membership.tier,
            rank=rank,
            slot=slot.index,
            manifest=job.manifest,
            encoded=job.encoded,
            places=slot.places,
            held=job.held,
        )
    )


def failed(
    memory: JobMemory, rank: int, generation: Generation, why: str, *, corrupt: bool, now: float
) -> None:
    """Record that a rank's snapshot could not be loaded: it is damaged (`corrupt`), or unavailable
    now."""
    why = why[:_REASON_CHARS_MAX]
    memory.note(JobEvent.LOAD_FAILED, rank=rank, generation=generation, detail=why)
    epoch = memory.current
    for slot in sources(memory, epoch, generation) if epoch is not None else ():
        slot.verified = slot.verified and corrupt  # what was read of it may have been wrong
    if corrupt:
        key = _failed_key(rank, generation)
        memory.loading.failed[rank, generation] = why
        memory.retry_at[key] = now + _pause_s(memory, key, FORGET_S, FORGET_S_MAX)
        return
    key = f"rebuild{rank}"
    pause_s = _pause_s(memory, key, PAUSE_S, PAUSE_S_MAX)
    memory.retry_at[key] = now + pause_s
    memory.loading.problem = (
        f"rank {rank} cannot load generation {generation}: {why}. Next try in {pause_s:g} s"
    )


def loaded(memory: JobMemory, rank: int, generation: Generation) -> None:
    """Record that a rank's snapshot is in memory. Where copies leave experts out, it is not written
    to storage again: the bytes would differ, because experts came back in other versions."""
    tier = memory.membership.tier if memory.membership is not None else None
    if tier is not None and tier.experts:
        stored = memory.persist.stored
        memory.persist.stored = generation if stored is None else max(stored, generation)
    memory.loading.tries.pop(f"rebuild{rank}", None)
    memory.loading.problem = ""


def _failed_key(rank: int, generation: Generation) -> str:
    return f"unloadable{rank}/{generation}"


def _pause_s(memory: JobMemory, key: str, first_s: float, most_s: float) -> float:
    tries = memory.loading.tries.get(key, 0)
    memory.loading.tries[key] = tries + 1
    return min(first_s * 2.0 ** min(tries, 30), most_s)
