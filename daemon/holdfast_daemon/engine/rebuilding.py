"""Recovers the snapshots that this member must hold and lacks: from parity, or from storage.

Level-triggered, as `upkeep` is: each call looks at the whole state and starts what is missing.
"""

from __future__ import annotations

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.protection import recovery
from holdfast_core.protection.codes import code_of
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.engine import loading, upkeep
from holdfast_daemon.engine.effects import FetchManifest, Rebuild
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import RebuildJob, SlotState
from holdfast_daemon.engine.state import JobMemory


def rebuild(memory: JobMemory, epoch: Epoch, now: float) -> None:
    """Take the next step in the recovery of each snapshot that this member must hold and lacks."""
    target = upkeep.anchor(epoch) or loading.wanted(epoch)
    if memory.fenced or target is None:
        return
    wanted = ranks_to_hold(memory, epoch, target)
    for rank in set(memory.rebuilds).difference(wanted):
        if not _is_rebuilding(memory, rank):  # somebody else turned out to hold it
            del memory.rebuilds[rank]
    for rank in wanted:
        job = memory.rebuilds.get(rank)
        left = job is not None and job.stored and not loading.may_load(epoch, target)
        other = job is not None and (job.generation != target or left)
        if other and not _is_rebuilding(memory, rank):
            del memory.rebuilds[rank]
            job = None
        if job is None and memory.sealed(rank, target) is None:
            _start_rebuild(memory, epoch, rank, target, now)
        elif job is not None and job.manifest is not None:
            _continue_rebuild(memory, epoch, rank, job)


def ranks_to_hold(memory: JobMemory, epoch: Epoch, generation: Generation) -> list[int]:
    """The ranks whose snapshots of `generation` this member must hold: its own ranks and, where
    another world captured it, ranks of members that have left, if nobody else holds them."""
    membership = epoch.membership
    world = membership.world_of(generation)
    if membership.is_present(generation) or world is None:
        return list(epoch.ranks)
    holders = memory.holdings(membership).holders
    return [
        rank
        for rank in world.ranks
        if holders.get((rank, generation), epoch.me) == epoch.me
        and recovery.heir(membership, rank, generation) == epoch.me
    ]


def _start_rebuild(
    memory: JobMemory, epoch: Epoch, rank: int, target: Generation, now: float
) -> None:
    if now < memory.retry_at.get(f"rebuild{rank}", now):
        return
    membership = epoch.membership
    means = recovery.rebuild_sources(membership, memory.holdings(membership), rank, target)
    if means is None:
        loading.start(memory, epoch, rank, target)
        return
    group = recovery.group_of(membership, membership.member_of(rank), target)
    others = [m for m in group if m != epoch.me and membership.has(m)]
    digest = means.manifest_digest
    memory.rebuilds[rank] = RebuildJob(generation=target, digest=digest)
    memory.note(JobEvent.REBUILD_STARTED, rank=rank, generation=target)
    memory.out.append(
        FetchManifest(
            rank=rank,
            generation=target,
            manifest_digest=digest,
            peers=tuple(membership.member(m) for m in others),
        )
    )


def _continue_rebuild(memory: JobMemory, epoch: Epoch, rank: int, job: RebuildJob) -> None:
    """Continue, given the manifest, with the arena, then a free slot, then the bytes."""
    assert job.manifest is not None
    if _is_rebuilding(memory, rank):
        return
    arena = memory.arenas[(rank, job.layout_id)]
    # From storage the bytes come by another way.
    if job.stored and arena.ready:
        loading.load_into_slot(memory, epoch, rank, job, arena)
        return
    # From parity: a slot, and then every source and block that the code needs; each may come later.
    slot = upkeep.slot_to_fill(memory, epoch, arena) if arena.ready else None
    if slot is None:
        return
    membership, member = epoch.membership, epoch.membership.member_of(rank)
    group = recovery.group_of(membership, member, job.generation)
    code = code_of(membership, group)
    means = recovery.rebuild_sources(membership, memory.holdings(membership), rank, job.generation)
    if code is None or means is None or means.manifest_digest != job.digest:
        return
    lane = membership.lane_of(rank)
    sources = upkeep.sources_of(memory, epoch, group, lane, job.generation, means.positions)
    if sources is None:
        return
    arena.begin_recovery(slot, job, job.manifest)
    memory.out.append(
        Rebuild(
            rank=rank,
            slot=slot.index,
            manifest=job.manifest,
            encoded=job.encoded,
            places=slot.places,
            own_position=group.index(member),
            code=code,
            sources=sources,
            blocks=means.blocks,
            owners={
                position: membership.member(owner)
                for position, owner in enumerate(group)
                if membership.has(owner)
            },
        )
    )


def _is_rebuilding(memory: JobMemory, rank: int) -> bool:
    return any(
        arena.rank == rank and slot.state is SlotState.REBUILDING for arena, slot in memory.slots()
    )
