"""How the daemons of a job write a generation to the durable tier together, level-triggered.

The leader orders it (`persist_leader`), each daemon writes its own ranks straight from their slots
and reports the files, and the leader makes the set complete once all files are reported. An order
that cannot be carried out is *ended* and counted. A later one, with the next number, tries again
with the newest generation of that time, and writes every file from scratch. Nothing waits for
storage: while a slot is being written, snapshots merely have one slot less.

Why no two leaders can spoil a set. A set is named by its generation, and so are its files. Each
rank has only one snapshot of a generation: its trainer asks for each step once, and a snapshot
rebuilt elsewhere is verified against the same manifest. So every daemon that writes a file of that
name writes the same bytes, verified against that manifest, or fails. A leader that was replaced
without noticing can therefore only complete a set that is whole: at worst it repeats the work of
another. It stops as soon as it learns of the next epoch. Cleaning up spares the files that a
complete set's manifest names; should it remove files of a set that another leader is about to
complete, that leader finds them missing, and its order ends like any other failure.

What a restart forgets. A daemon that restarts no longer remembers what it wrote, and writes again
what the order still waits for. A leader that restarts learns the order and the files from the
reports. A new epoch starts over, except for what is in storage.
"""

from __future__ import annotations

from typing import TypedDict

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.durable.sparse_files import may_build_on
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership, Tier
from holdfast_core.snapshots.reports import Directive
from holdfast_core.snapshots.stored import PersistOrder, RankFile
from holdfast_daemon.engine import upkeep
from holdfast_daemon.engine.effects import PersistRank, RankPersisted, StopPersisting
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.persist_memory import NEVER
from holdfast_daemon.engine.slots import SlotState
from holdfast_daemon.engine.state import JobMemory


class Reported(TypedDict):
    """The fields of a report that are about persisting."""

    persist: PersistOrder | None
    persisted: tuple[RankFile, ...]
    persist_failure: str
    stored: Generation | None
    wanted: Generation | None


def request(memory: JobMemory) -> None:
    """Request that the newest generation, or a later one, be persisted.

    Raises:
        InvalidJobError: the job has no durable tier.
    """
    epoch, membership = memory.current, memory.membership
    if membership is None or membership.tier is None:
        raise InvalidJobError(
            f"job {memory.job} has no durable tier: its generations are in memory only"
        )
    newest = (epoch.directive.protected or epoch.retained) if epoch is not None else None
    memory.persist.wanted = newest or Generation(memory.epoch, 0)


def reported(memory: JobMemory, epoch: Epoch) -> Reported:
    """Fields about persisting in this daemon's report to the leader."""
    persist, order = memory.persist, epoch.directive.persist
    # Files written for the previous order do not count for one that has only just arrived.
    current = order is not None and order.number == persist.number
    return Reported(
        persist=order,
        persisted=tuple(file for _, file in sorted(persist.files.items())) if current else (),
        persist_failure=persist.failure if current else "",
        stored=persist.stored,
        wanted=persist.wanted,
    )


def write(memory: JobMemory, epoch: Epoch, now: float) -> None:
    """Start writing what the order asks of this node, and stop what it no longer asks for."""
    persist, directive = memory.persist, epoch.directive
    if persist.watched_since == NEVER:
        persist.watched_since = now
    _learn(memory, directive.persisted, now)
    order, tier = directive.persist, epoch.membership.tier
    if order is None:
        return
    if order.number != persist.number:
        _stop(memory)
        persist.number, persist.files, persist.failure = order.number, {}, ""
    if order.ended:
        _stop(memory)
    elif tier is not None and directive.line is not None and not memory.fenced:
        for rank in epoch.ranks:
            if rank not in persist.files and not persist.failure:
                _write_rank(memory, epoch, order, tier, rank)


def _write_rank(
    memory: JobMemory, epoch: Epoch, order: PersistOrder, tier: Tier, rank: int
) -> None:
    if any(slot.persisting for arena, slot in memory.slots() if arena.rank == rank):
        return  # an earlier writer has not ended yet
    snapshot = memory.sealed(rank, order.generation)
    if snapshot is None:
        if rank not in memory.rebuilds and upkeep.anchor(epoch) != order.generation:
            memory.persist.failure = f"rank {rank} no longer holds {order.generation}"
            memory.note(JobEvent.PERSIST_FAILED, rank=rank, detail=memory.persist.failure)
        return
    arena, slot = snapshot
    if not slot.verified or slot.manifest is None:
        return
    if slot.manifest.first_step:
        memory.persist.failure = f"rank {rank} holds {order.generation} as a sparse window"
        return
    slot.persisting = order.generation
    memory.out.append(
        PersistRank(
            epoch=epoch.number,
            number=order.number,
            rank=rank,
            slot=slot.index,
            manifest=slot.manifest,
            encoded=slot.encoded,
            layout=arena.encoded,
            places=slot.places,
            tier=tier,
            base=_base_of(memory, epoch, order.generation),
        )
    )


def _base_of(memory: JobMemory, epoch: Epoch, generation: Generation) -> Generation | None:
    """The set whose experts a set of `generation` may name. It must be of the same world, because a
    rank of another world has other experts, and counts other ranks' tokens."""
    base, world_of = memory.persist.stored, epoch.membership.world_of
    if base is None or not may_build_on(base, generation, epoch.line):
        return None
    return base if world_of(base) == world_of(generation) else None


def _stop(memory: JobMemory) -> None:
    """Ask the writers to stop, once for each order: on slow storage they may take long to end."""
    persist = memory.persist
    if persist.stopped != persist.number:
        persist.stopped = persist.number
        if any(slot.persisting for _, slot in memory.slots()):
            memory.out.append(StopPersisting())


def _learn(memory: JobMemory, stored: Generation | None, now: float) -> None:
    persist = memory.persist
    if stored is not None and (persist.stored is None or stored > persist.stored):
        persist.stored, persist.stored_at, persist.last_failure = stored, now, ""
    if persist.wanted and persist.stored and persist.stored >= persist.wanted:
        persist.wanted = None


def rank_persisted(memory: JobMemory, event: RankPersisted) -> None:
    """Record the end of a writer; its result counts only while its order stands."""
    arena = memory.arenas.get((event.rank, event.layout_id))
    if arena is not None:
        slot = arena.slots[event.slot]
        slot.persisted()
        if slot.generation == event.generation:
            slot.older = event.older
        if event.corrupt and slot.state is SlotState.SEALED:
            upkeep.verify_slot(memory, arena, slot)
    persist = memory.persist
    epoch = memory.current
    if epoch is None or not epoch.persisting:
        return
    if (event.epoch, event.number) != (epoch.number, persist.number):
        return
    if event.file is not None:
        persist.files[event.rank] = event.file
    else:
        persist.failure = f"rank {event.rank}: {event.error}"
        memory.note(
            JobEvent.PERSIST_FAILED,
            rank=event.rank,
            generation=event.generation,
            detail=event.error,
        )


def note_changes(memory: JobMemory, known: Directive, directive: Directive) -> None:
    """Note what changed about persisting from `known`, the previous directive, to `directive`."""
    if directive.persisted is not None and directive.persisted != known.persisted:
        memory.note(JobEvent.PERSISTED, generation=directive.persisted)
    order = directive.persist
    if order is None or order == known.persist or not order.ended:
        return
    if directive.persisted is None or directive.persisted < order.generation:
        why = memory.persist.last_failure or memory.persist.failure
        memory.note(JobEvent.PERSIST_GIVEN_UP, generation=order.generation, detail=why)


def moved(before: Membership | None, after: Membership) -> int:
    """Number of members that are on another memory than before."""
    places = {member.index: member.memory_id for member in before.members} if before else {}
    return sum(
        places.get(member.index, member.memory_id) != member.memory_id for member in after.members
    )
