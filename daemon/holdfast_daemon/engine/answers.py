"""Answers to the requests of trainers and agents, read from the engine's memory.

Adapters ask again after each change, so a lost event never leaves a request hanging. These
functions change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.corruption import Divergence
from holdfast_core.errors import NoRecoveryLineError
from holdfast_core.protection import recovery
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Redundancy
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_core.states import RestorePhase, RestoreSource
from holdfast_daemon.engine import loading, rebuilding
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import ArenaView, Slot, SlotState
from holdfast_daemon.engine.state import JobMemory, TrainerSession


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedSession:
    """A session whose arena is allocated."""

    session: TrainerSession
    arena: ArenaView
    earlier: Divergence | None
    """What the rank reported in an earlier epoch of a divergence in which no rank was named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    """A slot granted to a trainer, and the places for the pieces of its snapshot."""

    slot: int
    places: bytes
    """One byte per piece: the slot that it is written into, at its own offset; empty when all
    pieces go into `slot`."""
    carried: bool
    """Whether the pieces that the trainer declared unchanged are carried over; otherwise it must
    write every piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreState:
    """Progress of a restore. Once `ready`, it has a slot, or none for a fresh start."""

    phase: RestorePhase
    detail: str
    done: int = 0
    total: int = 0
    line: Line | None = None
    arena: ArenaView | None = None
    slot: Slot | None = None
    source: RestoreSource = RestoreSource.NONE
    captured_by: int = 0
    """Number of ranks of the world that captured the line, if that is an earlier one; else 0. Then
    there is no slot of this rank's own."""
    read_for_all: tuple[tuple[ArenaView, Slot], ...] = ()
    """Snapshots of that earlier world which this rank reads for all ranks, its own first."""

    @property
    def ready(self) -> bool:
        return self.phase is RestorePhase.READY


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldState:
    """The training world of the current epoch, as a member's agent sees it."""

    epoch: int
    node_rank: int
    nodes: int
    store_address: str
    store_key: str
    serves_store: bool
    lanes: int
    """Number of ranks of this node."""
    kept: frozenset[int]
    """Lanes whose workers can be kept in this epoch: they follow their worlds, and neither their
    rank nor the member is to be restarted."""
    arrived_lanes: frozenset[int]
    """Lanes whose workers have joined this epoch's world."""

    @property
    def keep(self) -> bool:
        """Whether all workers of this node can be kept."""
        return len(self.kept) == self.lanes

    @property
    def arrived(self) -> bool:
        """Whether the workers of all ranks of this node have joined this epoch's world."""
        return len(self.arrived_lanes) == self.lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochProgress:
    """Progress of the snapshots in a session's epoch."""

    epoch_ended: int = 0
    """Number of the newer epoch that has begun; 0 while the session's own is current."""
    ends_process: bool = False
    """Whether the worker is then to end its process."""
    redundant: bool = False
    """Whether the job has redundancy. Without it, a generation gets no further than committed by
    all ranks."""
    newest: Generation | None = None
    """The newest generation that is protected, or committed where there is no redundancy."""
    dead: tuple[Generation, ...] = ()
    """Generations that some rank will never complete."""
    persisted: Generation | None = None
    """The newest generation of which the durable tier has a complete set."""
    whole_after: Generation | None = None
    """See `Directive.whole_after`."""


def restore_state(memory: JobMemory, epoch: Epoch, rank: int) -> RestoreState:
    """Where `rank` starts in this epoch, or how far the decision has come.

    Raises:
        NoRecoveryLineError: training has continued without this rank's restore, or the rank's
            snapshot was lost after the line was decided.
    """
    line, retained = epoch.line, epoch.retained
    if line is None:
        return _before_the_line(memory, epoch, rank)
    if retained is not None and (line.generation is None or retained > line.generation):
        began = "fresh" if line.generation is None else f"from {line.generation}"
        raise NoRecoveryLineError(
            f"rank {rank} restores too late: epoch {epoch.number} started {began}, and training "
            f"has reached {retained} since; restore once, before the first save"
        )
    if line.generation is None:
        return RestoreState(phase=RestorePhase.READY, detail=line.reason, line=line)
    world = epoch.membership.world_of(line.generation)
    if world is not None and not epoch.membership.is_present(line.generation):
        return _of_earlier_world(memory, epoch, rank, line, world)
    snapshot = memory.sealed(rank, line.generation)
    if snapshot is None and _is_lost(memory, epoch, rank, line.generation):
        raise _lost(epoch, rank, line.generation)
    if (snapshot is None or not snapshot[1].verified) and loading.may_load(epoch, line.generation):
        return _loading(memory, epoch, rank, line.generation, line)
    if snapshot is None or not snapshot[1].verified:
        return RestoreState(
            phase=RestorePhase.REBUILD,
            detail=f"generation {line.generation} from parity",
            line=line,
        )
    arena, slot = snapshot
    return RestoreState(
        phase=RestorePhase.READY,
        detail=line.reason,
        line=line,
        arena=arena,
        slot=slot,
        source=_source(epoch, slot),
    )


def _of_earlier_world(
    memory: JobMemory, epoch: Epoch, rank: int, line: Line, world: MemberWorld
) -> RestoreState:
    """Progress of a restore of a line that another world captured: this rank reads the snapshots of
    its lane that lie on this node, once the missing ones have been rebuilt."""
    generation, lane_of = line.generation, epoch.membership.lane_of
    assert generation is not None
    lane = lane_of(rank)
    mine = [r for r in rebuilding.ranks_to_hold(memory, epoch, generation) if lane_of(r) == lane]
    here = [
        (arena, slot)
        for arena, slot in memory.slots()
        if slot.state is SlotState.SEALED
        and slot.generation == generation
        and lane_of(arena.rank) == lane
    ]
    # A daemon that has just started again may not know that nobody else holds what it holds.
    unverified = {arena.rank for arena, slot in here if not slot.verified}
    readable = {arena.rank for arena, _ in here} - unverified
    missing = sorted(unverified.union(mine) - readable)
    for each in missing:
        if memory.sealed(each, generation) is None and _is_lost(memory, epoch, each, generation):
            raise _lost(epoch, each, generation)
    if missing:
        return RestoreState(
            phase=RestorePhase.REBUILD,
            detail=f"generation {generation} of ranks {missing} from parity",
            done=len(readable),
            total=len(readable) + len(missing),
            line=line,
        )
    sources = {_source(epoch, slot) for _, slot in here}
    return RestoreState(
        phase=RestorePhase.READY,
        detail=line.reason,
        line=line,
        source=RestoreSource.PARITY if RestoreSource.PARITY in sources else RestoreSource.LOCAL,
        captured_by=world.size,
        read_for_all=tuple(sorted(here, key=lambda held: (held[0].rank != rank, held[0].rank))),
    )


def _source(epoch: Epoch, slot: Slot) -> RestoreSource:
    """Source from which this daemon got a snapshot in this epoch."""
    if slot.loaded_in == epoch.number:
        return RestoreSource.STORAGE
    return RestoreSource.PARITY if slot.rebuilt_in == epoch.number else RestoreSource.LOCAL


def _lost(epoch: Epoch, rank: int, generation: Generation) -> NoRecoveryLineError:
    return NoRecoveryLineError(
        f"the snapshot of rank {rank} of the line {generation} was lost after epoch {epoch.number} "
        f"began, and its parity group cannot rebuild it; the next epoch will choose another line"
    )


def watched(memory: JobMemory, session: TrainerSession) -> EpochProgress:
    """Progress to report to a session now."""
    epoch = memory.current
    if epoch is None or epoch.number > session.epoch:
        membership = memory.membership
        return EpochProgress(
            epoch_ended=memory.epoch if memory.epoch > session.epoch else 0,
            ends_process=membership is not None and membership.external,
        )
    redundant = epoch.membership.redundancy is not Redundancy.NONE
    directive = epoch.directive
    return EpochProgress(
        redundant=redundant,
        newest=directive.protected if redundant else directive.retained,
        dead=directive.dead,
        persisted=directive.persisted,
        whole_after=directive.whole_after,
    )


def _before_the_line(memory: JobMemory, epoch: Epoch, rank: int) -> RestoreState:
    membership, wanted = epoch.membership, loading.wanted(epoch)
    if wanted is not None:
        return _loading(memory, epoch, rank, wanted, None)
    verified = sum(report.verified for report in memory.reports.values())
    if membership.tier is not None and memory.verified:
        return RestoreState(
            phase=RestorePhase.STORAGE,
            detail=memory.loading.problem
            or f"waiting for all daemons, and for {membership.tier.uri} if memory holds no line",
        )
    return RestoreState(
        phase=RestorePhase.INVENTORIES,
        detail="waiting for every daemon to verify what it holds",
        done=verified,
        total=len(membership.members),
    )


def _loading(
    memory: JobMemory, epoch: Epoch, rank: int, generation: Generation, line: Line | None
) -> RestoreState:
    assert epoch.membership.tier is not None
    job = memory.rebuilds.get(rank)
    manifest = job.manifest if job is not None else None
    problem = f" ({memory.loading.problem})" if memory.loading.problem else ""
    return RestoreState(
        phase=RestorePhase.LOAD,
        detail=f"generation {generation} from {epoch.membership.tier.uri}{problem}",
        total=manifest.payload_bytes if manifest is not None else 0,
        line=line,
    )


def _is_lost(memory: JobMemory, epoch: Epoch, rank: int, generation: Generation) -> bool:
    """Whether neither storage nor the parity group can restore the rank's snapshot, judged only
    once all members of the group have verified what they hold."""
    if rank in memory.rebuilds:
        return False
    if loading.may_load(epoch, generation) and not loading.is_failed(memory, rank, generation):
        return False
    membership = epoch.membership
    group = recovery.group_of(membership, membership.member_of(rank), generation)
    reports = [memory.reports.get(member) for member in group if membership.has(member)]
    if any(report is None or not report.verified for report in reports):
        return False
    return not recovery.rebuildable(membership, memory.holdings(membership), rank, generation)


def world_state(memory: JobMemory, after_epoch: int) -> WorldState | None:
    """The world of an epoch newer than `after_epoch`, or None while there is none."""
    epoch = memory.current
    if epoch is None or epoch.number <= after_epoch or memory.fenced:
        return None
    position, store_address = epoch.membership.position(epoch.me), epoch.directive.rendezvous
    records = [memory.rank(rank) for rank in epoch.ranks]
    return WorldState(
        epoch=epoch.number,
        node_rank=position,
        nodes=len(epoch.membership.members),
        store_address=store_address,
        store_key=epoch.directive.store_key,
        serves_store=position == 0 and not store_address,
        lanes=len(records),
        kept=_kept_lanes(memory, epoch),
        arrived_lanes=frozenset(
            lane for lane, record in enumerate(records) if record.arrived_in == epoch.number
        ),
    )


def _kept_lanes(memory: JobMemory, epoch: Epoch) -> frozenset[int]:
    """The lanes of this node whose workers can be kept in `epoch`."""
    membership = epoch.membership
    if epoch.me in membership.restarting:
        return frozenset()
    return frozenset(
        lane
        for lane, rank in enumerate(epoch.ranks)
        if rank not in membership.restarting_ranks
        and memory.rank(rank).can_stay(
            membership.world_size,
            protected=memory.protects,
            members_changed=epoch.members_changed,
        )
    )
