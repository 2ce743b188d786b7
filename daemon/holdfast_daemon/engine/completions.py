"""Applies the events that end effects to the engine's memory.

`JobEngine.on_completion` calls `apply`, and settles the memory afterwards. An event about a slot,
block or rebuild that has meanwhile been given up is ignored: each function first checks that the
memory still waits for it.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.errors import HoldfastError
from holdfast_core.protection import recovery
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    decode_layout,
    decode_manifest,
    layout_id,
    manifest_digest,
)
from holdfast_daemon.engine import loading, persist_leader, persisting, upkeep
from holdfast_daemon.engine.effects import (
    ArenaReady,
    Completion,
    ManifestFetched,
    ParityBuilt,
    ParityVerified,
    RankPersisted,
    Rebuilt,
    RemoveArena,
    SendSuspect,
    SetCommitted,
    SlotSealed,
    SnapshotVerified,
    StoredFound,
)
from holdfast_daemon.engine.slots import ArenaView, ParityState, RebuildJob, Slot, SlotState
from holdfast_daemon.engine.state import JobMemory

WRONG_REBUILDS = 3
"""Number of wrong rebuilds after which the parity is blamed: the first may be the fault of this
node."""


class Times(NamedTuple):
    """Time at which an effect ended, and the earliest time for another try should it have
    failed."""

    now: float
    retry_at: float


def apply(memory: JobMemory, event: Completion, at: Times) -> None:
    """Apply the result of an effect."""
    match event:
        case SlotSealed():
            _sealed(memory, event)
        case ArenaReady():
            _arena_ready(memory, event, at)
        case ParityBuilt():
            _parity_built(memory, event, at)
        case ManifestFetched():
            _manifest_fetched(memory, event, at)
        case StoredFound():
            loading.found(memory, event, at.now)
        case Rebuilt():
            _rebuilt(memory, event, at)
        case SnapshotVerified():
            _snapshot_verified(memory, event)
        case ParityVerified():
            _parity_verified(memory, event)
        case RankPersisted():
            persisting.rank_persisted(memory, event)
        case SetCommitted():
            persist_leader.set_committed(memory, event)
        case _:
            assert_never(event)


def _find(
    memory: JobMemory, event: SlotSealed | Rebuilt | SnapshotVerified
) -> tuple[ArenaView, Slot] | None:
    return next(
        (
            (arena, slot)
            for arena, slot in memory.slots()
            if arena.rank == event.rank
            and slot.index == event.slot
            and slot.generation == event.generation
        ),
        None,
    )


def _sealed(memory: JobMemory, event: SlotSealed) -> None:
    match = _find(memory, event)
    if match is None:
        return
    _, slot = match
    if event.error is None:
        slot.state, slot.verified = SlotState.SEALED, True
        memory.note(JobEvent.COMMITTED, rank=event.rank, generation=event.generation)
    else:
        memory.rank(event.rank).seal_error = str(event.error)
        memory.note(JobEvent.SEAL_FAILED, rank=event.rank, detail=str(event.error))
        slot.clear()


def _arena_ready(memory: JobMemory, event: ArenaReady, at: Times) -> None:
    key = (event.rank, event.layout_id)
    arena = memory.arenas.get(key)
    if arena is None:
        if event.error is None:  # It was removed while this allocation waited, and is there again.
            memory.out.append(RemoveArena(rank=event.rank, layout_id=event.layout_id))
        return
    session = memory.rank(event.rank).session
    mine = session is not None and session.layout_id == event.layout_id
    if event.error is None:
        arena.allocated(event.slots)
        if session is not None and mine:
            session.allocated = True
            memory.rank(event.rank).refused = (memory.epoch, "")
        return
    memory.note(JobEvent.ARENA_REFUSED, rank=event.rank, detail=str(event.error))
    if session is not None and mine:
        session.error = event.error
        memory.rank(event.rank).refused = (memory.epoch, str(event.error))
    job = memory.rebuilds.get(event.rank)
    if job is not None:
        _give_up(memory, event.rank, job, str(event.error), at)
    if not arena.ready:
        del memory.arenas[key]


def _parity_built(memory: JobMemory, event: ParityBuilt, at: Times) -> None:
    parity = memory.lane_slots(event.lane)[event.slot]
    if parity.state is not ParityState.BUILDING or parity.generation != event.generation:
        return
    if event.entry is not None:
        parity.state, parity.entry, parity.verified = ParityState.READY, event.entry, True
        memory.parity_failure = ""
        memory.note(JobEvent.PARITY_BUILT, generation=event.generation)
        return
    parity.clear()
    memory.retry_at[f"parity{event.lane}"] = at.retry_at
    memory.parity_failure = event.error
    memory.note(JobEvent.PARITY_FAILED, generation=event.generation, detail=event.error)
    if event.suspect is not None and memory.current is not None:
        member = memory.current.membership.member_of(event.suspect)
        _complain(memory, member, event.suspect, event.generation)


def _manifest_fetched(memory: JobMemory, event: ManifestFetched, at: Times) -> None:
    job = memory.rebuilds.get(event.rank)
    if job is None or job.generation != event.generation or job.manifest is not None:
        return
    try:
        _take_manifest(memory, event, job)
    except HoldfastError as error:
        corrupt = event.corrupt or not event.error
        why = event.error or str(error)
        _give_up(memory, event.rank, job, why, at, corrupt=corrupt)


def _give_up(
    memory: JobMemory,
    rank: int,
    job: RebuildJob,
    why: str,
    at: Times,
    *,
    corrupt: bool = False,
) -> None:
    """Abandon a rebuild that cannot continue; it is started again later."""
    del memory.rebuilds[rank]
    if job.stored:
        loading.failed(memory, rank, job.generation, why, corrupt=corrupt, now=at.now)
        return
    memory.retry_at[f"rebuild{rank}"] = at.retry_at
    memory.note(JobEvent.REBUILD_FAILED, rank=rank, detail=why)


def _take_manifest(memory: JobMemory, event: ManifestFetched, job: RebuildJob) -> None:
    if event.error:
        raise HoldfastError(event.error)
    manifest = decode_manifest(event.manifest)
    layout = decode_layout(event.layout)
    arena_id = layout_id(event.layout)
    if job.stored:
        job.digest = manifest_digest(event.manifest)
        of = (manifest.job, manifest.rank, manifest.generation)
        if of != (memory.job, _world_rank(memory, event.rank, event.generation), event.generation):
            raise HoldfastError(
                f"the stored manifest belongs to world rank {of[1]} of job {of[0]}, generation "
                f"{of[2]}"
            )
    if manifest_digest(event.manifest) != job.digest or manifest.layout_id != arena_id:
        raise HoldfastError(f"the manifest received for rank {event.rank} is another snapshot's")
    job.manifest, job.encoded, job.layout_id = manifest, event.manifest, arena_id
    if (event.rank, arena_id) not in memory.arenas:
        assert memory.current is not None
        arena = ArenaView(rank=event.rank, layout_id=arena_id, layout=layout, encoded=event.layout)
        present = memory.current.membership.is_present(event.generation)
        allocate = upkeep.allocate if present else upkeep.allocate_for_line
        allocate(memory, memory.current, arena)


def _world_rank(memory: JobMemory, rank: int, generation: Generation) -> int | None:
    """World rank of `rank` in the world that captured `generation`; None where that is unknown."""
    membership = memory.membership
    world = membership.world_of(generation) if membership is not None else None
    if world is None or world.member_of(rank) not in world.members:
        return None
    return world.world_rank(rank)


def _rebuilt(memory: JobMemory, event: Rebuilt, at: Times) -> None:
    found = _find(memory, event)
    job = memory.rebuilds.get(event.rank)
    if found is not None and event.error:
        found[1].clear()
        if job is not None:
            _give_up(memory, event.rank, job, event.error, at, corrupt=event.corrupt)
        if event.damaged is not None:
            _blame_parity(memory, event.rank, event.generation, event.damaged)
        return
    memory.rebuilds.pop(event.rank, None)
    if found is None:
        return
    _, slot = found
    stored = job is not None and job.stored
    slot.state, slot.verified = SlotState.SEALED, True
    if stored:
        slot.loaded_in = memory.epoch
        loading.loaded(memory, event.rank, event.generation)
    else:
        slot.rebuilt_in = memory.epoch
    record = memory.rank(event.rank)
    record.passed = max(record.passed or event.generation, event.generation)
    if job is not None:
        memory.note(
            JobEvent.LOADED if stored else JobEvent.REBUILT,
            rank=event.rank,
            generation=event.generation,
            detail=event.mixture,
        )


def _blame_parity(memory: JobMemory, rank: int, generation: Generation, position: int) -> None:
    """Notify the owner of a parity block that it is wrong, once this node is unlikely to be at
    fault."""
    memory.wrong_rebuilds[rank] = memory.wrong_rebuilds.get(rank, 0) + 1
    if memory.wrong_rebuilds[rank] >= WRONG_REBUILDS and memory.current is not None:
        membership = memory.current.membership
        group = recovery.group_of(membership, membership.member_of(rank), generation)
        _complain(memory, group[position], rank, generation)


def _complain(memory: JobMemory, member: int, rank: int, generation: Generation) -> None:
    """Notify `member`, if it is still in the world, that its bytes for the rank's snapshot are
    wrong."""
    membership = memory.membership
    if membership is not None and membership.has(member):
        suspect = SendSuspect(to=membership.member(member), rank=rank, generation=generation)
        memory.out.append(suspect)


def _snapshot_verified(memory: JobMemory, event: SnapshotVerified) -> None:
    found = _find(memory, event)
    if found is None or found[1].state is not SlotState.SEALED:
        return
    arena, slot = found
    slot.verifying = False
    if event.ok:
        slot.verified = True
        return
    memory.note(JobEvent.CORRUPT, rank=event.rank, generation=event.generation, detail=event.detail)
    # The damaged piece may be one that another snapshot shares with this one.
    others = [s for s in arena.slots if s is not slot and s.state is SlotState.SEALED]
    for other in others if arena.is_mixed else ():
        upkeep.verify_slot(memory, arena, other)
    upkeep.free_slot(memory, arena, slot)


def _parity_verified(memory: JobMemory, event: ParityVerified) -> None:
    parity = memory.lane_slots(event.lane)[event.slot]
    if parity.state is not ParityState.READY or parity.generation != event.generation:
        return
    parity.verifying = False
    if event.ok:
        parity.verified = True
        return
    memory.note(JobEvent.CORRUPT_PARITY, generation=event.generation, detail=event.detail)
    upkeep.free_parity(memory, parity)
