"""The work that a daemon does on its own, level-triggered: verify, free, protect.

Each function looks at the whole state and starts what is missing; calling it again changes nothing.
So it does not matter which event woke the engine, or which message was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.protection import recovery
from holdfast_core.protection.budget import SLOTS_AUTO, parity_block_bytes
from holdfast_core.protection.codes import BlockId, code_of
from holdfast_core.protection.recovery import Holdings
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.engine import loading
from holdfast_daemon.engine.effects import (
    AllocateArena,
    BuildParity,
    ForgetPeers,
    FreeParity,
    FreeSlot,
    PeerSnapshot,
    RemoveArena,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import ArenaView, ParitySlot, ParityState, Slot, SlotState
from holdfast_daemon.engine.state import JobMemory


def verify(memory: JobMemory) -> None:
    """Start the verification of everything that was not verified in this epoch, newest first."""
    waiting = [
        (slot.generation, arena, slot)
        for arena, slot in memory.slots()
        if slot.state is SlotState.SEALED and not slot.verified and not slot.verifying
        if slot.generation is not None
    ]
    for _, arena, slot in sorted(waiting, key=lambda item: item[0], reverse=True):
        verify_slot(memory, arena, slot)
    for parity in memory.parities.values():
        if parity.state is ParityState.READY and not parity.verified and not parity.verifying:
            verify_parity(memory, parity)


def verify_slot(memory: JobMemory, arena: ArenaView, slot: Slot) -> None:
    if slot.manifest is None or slot.verifying:
        return
    slot.verifying = True
    memory.out.append(
        VerifySnapshot(rank=arena.rank, slot=slot.index, manifest=slot.manifest, places=slot.places)
    )


def verify_parity(memory: JobMemory, parity: ParitySlot) -> None:
    if parity.generation is None or parity.verifying:
        return
    parity.verifying = True
    memory.out.append(
        VerifyParity(lane=parity.lane, slot=parity.index, generation=parity.generation)
    )


def free_slot(memory: JobMemory, arena: ArenaView, slot: Slot) -> None:
    """Forget a sealed snapshot: its manifest is unlinked before the slot is reused."""
    memory.out.append(FreeSlot(rank=arena.rank, layout_id=arena.layout_id, slot=slot.index))
    slot.clear()


def free_parity(memory: JobMemory, parity: ParitySlot) -> None:
    memory.out.append(FreeParity(lane=parity.lane, slot=parity.index))
    parity.clear()


def give_up_parity_of(memory: JobMemory, rank: int, generation: Generation) -> None:
    """Free the blocks that were made from the rank's snapshot: a rebuild from them gave wrong
    bytes."""
    for parity in memory.parities.values():
        made = parity.entry is not None and rank in dict(parity.entry.sources)
        if parity.state is ParityState.READY and parity.generation == generation and made:
            why = f"rank {rank} rebuilt from it is wrong, although its other sources are right"
            memory.note(JobEvent.CORRUPT_PARITY, generation=generation, detail=why)
            free_parity(memory, parity)


def release(memory: JobMemory, epoch: Epoch) -> None:
    """Free what the directive allows, and nothing else (invariant 2)."""
    if epoch.line is None:
        _make_room_to_load(memory, epoch)
        return
    mine, membership = epoch.ranks, epoch.membership
    for arena, slot in memory.slots():
        if slot.state is not SlotState.SEALED or slot.generation is None:
            continue
        of_others = arena.rank not in mine and membership.is_present(slot.generation)
        if of_others or not (
            _is_kept(epoch, slot.generation)
            or _is_awaited(memory, epoch, arena.rank, slot)
            or _is_spare(memory, epoch, slot)
        ):
            free_slot(memory, arena, slot)
    holdings = memory.holdings(membership)
    for parity in memory.parities.values():
        ready = parity.state is ParityState.READY and parity.generation is not None
        if ready and (not _is_kept(epoch, parity.generation) or _is_outdated(parity, holdings)):
            free_parity(memory, parity)
    _remove_idle_arenas(memory, mine)
    generations = frozenset(
        p.generation for p in memory.parities.values() if p.generation is not None
    )
    if generations != memory.peers_kept:
        memory.peers_kept = generations
        memory.out.append(ForgetPeers(keep=generations))


def _make_room_to_load(memory: JobMemory, epoch: Epoch) -> None:
    """Free what the load does not need: all members have verified, and memory has no line."""
    wanted = loading.wanted(epoch)
    if wanted is None:
        return
    kept = loading.sources(memory, epoch, wanted)
    for arena, slot in list(memory.slots()):
        serves = slot.generation == wanted or any(slot is each for each in kept)
        if slot.state is SlotState.SEALED and not serves:
            free_slot(memory, arena, slot)
    for parity in memory.parities.values():
        if parity.state is ParityState.READY and parity.generation != wanted:
            free_parity(memory, parity)
    _remove_idle_arenas(memory, epoch.ranks)


def _is_kept(epoch: Epoch, generation: Generation | None) -> bool:
    if generation is None:
        return False
    directive = epoch.directive
    assert directive.line is not None
    retained = directive.retained
    if retained is not None and generation < retained:
        return False
    if generation in directive.dead:
        return False
    if generation.epoch < directive.epoch:
        return generation in (directive.line.generation, retained, directive.protected)
    return True


def _is_outdated(parity: ParitySlot, holdings: Holdings) -> bool:
    """Whether a rank now holds other bytes of the block's generation than went into the block: it
    has loaded older experts from storage. Such a block protects nothing, and a newer one that was
    made from it and from the rank's changes would be wrong. Every report that lists the rank's next
    snapshot also lists what it loaded, so the block is gone before that."""
    if parity.entry is None:
        return False
    held = (
        (digest, holdings.snapshots.get((rank, parity.entry.generation)))
        for rank, digest in parity.entry.sources
    )
    return any(entry is not None and entry.manifest_digest != digest for digest, entry in held)


def _is_awaited(memory: JobMemory, epoch: Epoch, rank: int, slot: Slot) -> bool:
    """Whether the snapshot is being persisted, or is about to be."""
    if slot.persisting is not None:
        return True
    persist = memory.persist
    return slot.generation == epoch.persisting and rank not in persist.files and not persist.failure


def _is_spare(memory: JobMemory, epoch: Epoch, slot: Slot) -> bool:
    """Whether copies leave experts out and the snapshot is the newest in storage: memory has all
    its experts, storage older versions of some (PEC §3.2). It stays until its slot is needed."""
    tier = epoch.membership.tier
    return tier is not None and bool(tier.experts) and slot.generation == memory.persist.stored


def slot_to_write(memory: JobMemory, epoch: Epoch, arena: ArenaView) -> Slot | None:
    """A slot for a trainer; None when there is none, or when the last one is needed to rebuild a
    snapshot of the rank: a snapshot that must be held comes before a new one."""
    slot = slot_to_fill(memory, epoch, arena)
    begun = any(s.state is SlotState.REBUILDING for s in arena.slots)
    if arena.rank in memory.rebuilds and not begun:
        free = [s for s in arena.slots if s.state is SlotState.FREE]
        return slot if len(free) > 1 else None
    return slot


def slot_to_fill(memory: JobMemory, epoch: Epoch, arena: ArenaView) -> Slot | None:
    """A slot for a snapshot that is written or rebuilt: a free slot, or else a spare slot, which is
    freed first; None when there is neither."""
    if arena.free_slot() is None and not arena.has_unknown_writer and epoch.line is not None:
        for slot in arena.slots:
            sealed = slot.state is SlotState.SEALED and slot.persisting is None
            if sealed and not _is_kept(epoch, slot.generation) and _is_spare(memory, epoch, slot):
                free_slot(memory, arena, slot)
    return arena.free_slot()


def _remove_idle_arenas(memory: JobMemory, mine: range) -> None:
    """Delete empty arenas of a layout that the rank no longer uses."""
    idle = [(key, arena) for key, arena in memory.arenas.items() if arena.ready and arena.idle]
    if not idle:
        return
    in_use = {(s.rank, s.layout_id) for s in memory.sessions.values()}
    in_use |= {(rank, job.layout_id) for rank, job in memory.rebuilds.items()}
    replaced = {rank for rank, _ in in_use}
    for key, arena in idle:
        if key in in_use:
            continue
        if arena.rank in replaced or arena.rank not in mine:
            memory.out.append(RemoveArena(rank=arena.rank, layout_id=arena.layout_id))
            del memory.arenas[key]


def protect(memory: JobMemory, epoch: Epoch, now: float) -> None:
    """Start building this member's parity blocks for the oldest generation that its group has
    sealed and that it has no block for.

    Taking the oldest leads all owners to the same one: if each took the newest that it saw, they
    could fill their two blocks with different generations, none of them ever complete. A member
    that was away makes room by giving up a younger block that was not promised.
    """
    if memory.fenced or epoch.line is None:
        return
    membership, group = epoch.membership, epoch.group
    code = code_of(membership, group)
    if code is None:
        return
    for parity_lane in range(code.rows * membership.nproc_per_node):
        lane, row = membership.lane_and_row(parity_lane)
        block = BlockId(group.index(epoch.me), row)
        slots = memory.lane_slots(parity_lane)
        # One build at a time in each lane, and a pause after a failure.
        if any(p.state is ParityState.BUILDING for p in slots):
            continue
        if now < memory.retry_at.get(f"parity{parity_lane}", now):
            continue
        have = {p.generation for p in slots if p.state is ParityState.READY}
        generation = _oldest_unprotected(memory, epoch, lane, have)
        if generation is None:
            continue
        # A free block, made free if necessary, and all sources of it; otherwise a later call tries.
        free = next((p for p in slots if p.state is ParityState.FREE), None)
        free = free or _make_room(memory, epoch, slots, generation)
        if free is None:
            continue
        sources = sources_of(memory, epoch, group, lane, generation, code.sources_of(block))
        if sources is None:
            continue
        free.state, free.generation = ParityState.BUILDING, generation
        memory.out.append(
            BuildParity(
                lane=parity_lane,
                slot=free.index,
                generation=generation,
                group=group,
                code=code,
                block=block,
                sources=sources,
            )
        )


def _make_room(
    memory: JobMemory, epoch: Epoch, slots: list[ParitySlot], wanted: Generation
) -> ParitySlot | None:
    """Free a block that was not promised, and return it; None when there is none. Its generation is
    younger than `wanted`, can no longer be restored, or was captured by an earlier world and need
    not be rebuilt, so that its parity will not be completed."""
    for parity in slots:
        generation = parity.generation
        if generation is None or generation == epoch.retained:
            continue
        lane, _ = epoch.membership.lane_and_row(parity.lane)
        unfinished = not epoch.membership.is_present(generation) and _is_whole(
            memory, epoch, lane, generation
        )
        if generation > wanted or not _is_of_use(memory, epoch, lane, generation) or unfinished:
            free_parity(memory, parity)
            return parity
    return None


def _is_of_use(memory: JobMemory, epoch: Epoch, lane: int, generation: Generation) -> bool:
    """Whether the group holds the generation in this lane, or can rebuild the lost snapshots of it.
    Otherwise the generation stays lost: new blocks are made from all snapshots, and lost snapshots
    from blocks."""
    membership, holdings = epoch.membership, memory.holdings(epoch.membership)
    group = recovery.group_of(membership, epoch.me, generation)
    return all(
        (rank, generation) in holdings.snapshots
        or recovery.rebuildable(membership, holdings, rank, generation)
        for rank in (membership.rank_at(member, lane) for member in group)
    )


def _is_whole(memory: JobMemory, epoch: Epoch, lane: int, generation: Generation) -> bool:
    """Whether the snapshots of the generation that the group captured in this lane are all held."""
    membership, snapshots = epoch.membership, memory.holdings(epoch.membership).snapshots
    group = recovery.group_of(membership, epoch.me, generation)
    return all((membership.rank_at(member, lane), generation) in snapshots for member in group)


def _oldest_unprotected(
    memory: JobMemory, epoch: Epoch, lane: int, have: set[Generation | None]
) -> Generation | None:
    """The oldest generation of the present world that every member of the group has sealed in this
    lane and that is not in `have`; None while a member has not verified all that it holds: what it
    does not list yet is not lost."""
    wanted = _generations_of(memory, epoch, epoch.me, lane) - have
    for member in epoch.group if wanted else ():
        wanted &= _generations_of(memory, epoch, member, lane)
    present = epoch.membership.is_present
    return min((g for g in wanted if present(g) and _is_kept(epoch, g)), default=None)


def _generations_of(memory: JobMemory, epoch: Epoch, member: int, lane: int) -> set[Generation]:
    report = memory.reports.get(member)
    if report is None or not report.verified:
        return set()
    rank = epoch.membership.rank_at(member, lane)
    return {entry.generation for entry in report.inventory.snapshots if entry.rank == rank}


def sources_of(
    memory: JobMemory,
    epoch: Epoch,
    group: Sequence[int],
    lane: int,
    generation: Generation,
    positions: Iterable[int],
) -> tuple[PeerSnapshot, ...] | None:
    """The snapshots of the members at `positions` of `group` as the newest reports list them; None
    when one is missing."""
    membership, holdings = epoch.membership, memory.holdings(epoch.membership)
    sources = []
    for position in sorted(positions):
        rank = membership.rank_at(group[position], lane)
        entry = holdings.snapshots.get((rank, generation))
        if entry is None:
            return None
        sources.append(
            PeerSnapshot(
                rank=rank,
                position=position,
                member=membership.member(holdings.holders[rank, generation]),
                manifest_digest=entry.manifest_digest,
                payload_bytes=entry.payload_bytes,
            )
        )
    return tuple(sources)


def anchor(epoch: Epoch) -> Generation | None:
    """The generation that this member must hold: the line, or what has been protected since."""
    directive = epoch.directive
    if directive.line is None:
        return None
    generations = [g for g in (directive.line.generation, directive.protected) if g is not None]
    return max(generations, default=None)


def allocate(memory: JobMemory, epoch: Epoch, arena: ArenaView) -> None:
    """Ask for an arena, and for the parity blocks of its lane beside it."""
    membership = epoch.membership
    code = code_of(membership, epoch.group)
    lane = membership.lane_of(arena.rank)
    largest = max(arena.layout.largest_slot_bytes, arena.layout.slot_bytes)
    memory.arenas[(arena.rank, arena.layout_id)] = arena
    memory.out.append(
        AllocateArena(
            rank=arena.rank,
            layout=arena.encoded,
            layout_id=arena.layout_id,
            parity_lanes=tuple(
                membership.parity_lane(lane, row) for row in range(code.rows if code else 0)
            ),
            parity_bytes=parity_block_bytes(largest, code, arena.layout.piece_bytes),
            slots=(membership.slots,) if membership.slots else SLOTS_AUTO,
            ranks=membership.nproc_per_node,
        )
    )


def allocate_for_line(memory: JobMemory, epoch: Epoch, arena: ArenaView) -> None:
    """Ask for an arena for a rank that does not live here. It has to hold only the rank's snapshot
    of the line, which an earlier world captured."""
    memory.arenas[(arena.rank, arena.layout_id)] = arena
    memory.out.append(
        AllocateArena(
            rank=arena.rank,
            layout=arena.encoded,
            layout_id=arena.layout_id,
            slots=(1,),
            ranks=epoch.membership.nproc_per_node,
        )
    )
