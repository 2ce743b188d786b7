"""Answers to what trainers and agents wait for, read off the engine's memory.

Adapters ask again after each change, so that a waiting request never hangs on an event that was
lost. Nothing here changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core import recovery
from holdfast_core.errors import NoRecoveryLineError
from holdfast_core.values import Generation, Line, Membership
from holdfast_daemon.engine import loading
from holdfast_daemon.engine.slots import ArenaView, Slot
from holdfast_daemon.engine.state import JobMemory, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A session whose arena is allocated."""

    session: Session
    arena: ArenaView


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    """Where a trainer may write a snapshot."""

    slot: int
    places: bytes
    """For each piece the slot at whose offset it goes; empty when all go into `slot`."""
    carried: bool
    """Whether the pieces that the trainer called unchanged are carried over; otherwise it has to
    write everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreState:
    """How far a restore is. `ready` with a slot, or ready with none for a fresh start."""

    phase: str
    detail: str
    done: int = 0
    total: int = 0
    line: Line | None = None
    arena: ArenaView | None = None
    slot: Slot | None = None
    source: str = "none"

    @property
    def ready(self) -> bool:
        return self.phase == "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldState:
    """The training world of the current epoch, as a member's agent sees it."""

    epoch: int
    node_rank: int
    nodes: int
    store_address: str
    serves_store: bool


def restore_state(memory: JobMemory, rank: int) -> RestoreState:
    """Where `rank` starts in this epoch, or how far finding out has come.

    Raises:
        NoRecoveryLineError: training has gone on without this rank's restore, or the rank's
            snapshot was lost after the line was decided.
    """
    membership, line = memory.membership, memory.line
    assert membership is not None
    if line is None:
        return _before_the_line(memory, membership, rank)
    retained = memory.retained
    if retained is not None and (line.generation is None or retained > line.generation):
        began = "fresh" if line.generation is None else f"from {line.generation}"
        raise NoRecoveryLineError(
            f"rank {rank} restores too late: epoch {memory.epoch} started {began}, and training "
            f"has gone on to {retained}; restore once, before the first save"
        )
    if line.generation is None:
        return RestoreState(phase="ready", detail=line.reason, line=line)
    held = memory.sealed(rank, line.generation)
    if held is None and _is_lost(memory, membership, rank, line.generation):
        raise NoRecoveryLineError(
            f"rank {rank} lost its snapshot of the line {line.generation} after epoch "
            f"{memory.epoch} began, and its parity group cannot rebuild it; the next epoch will "
            f"decide anew"
        )
    if (held is None or not held[1].verified) and loading.may_load(memory, line.generation):
        return _loading(memory, membership, rank, line.generation, line)
    if held is None or not held[1].verified:
        return RestoreState(
            phase="rebuild", detail=f"generation {line.generation} from parity", line=line
        )
    arena, slot = held
    source = "parity" if slot.rebuilt_in == memory.epoch else "local"
    if slot.loaded_in == memory.epoch:
        source = "storage"
    return RestoreState(
        phase="ready", detail=line.reason, line=line, arena=arena, slot=slot, source=source
    )


def _before_the_line(memory: JobMemory, membership: Membership, rank: int) -> RestoreState:
    wanted = loading.wanted(memory)
    if wanted is not None:
        return _loading(memory, membership, rank, wanted, None)
    verified = sum(report.verified for report in memory.reports.values())
    if membership.tier is not None and memory.verified:
        return RestoreState(
            phase="storage",
            detail=memory.loading.problem
            or f"waiting for all daemons, and for {membership.tier.uri} if memory holds no line",
        )
    return RestoreState(
        phase="inventories",
        detail="waiting for every daemon to verify what it holds",
        done=verified,
        total=len(membership.members),
    )


def _loading(
    memory: JobMemory, membership: Membership, rank: int, generation: Generation, line: Line | None
) -> RestoreState:
    assert membership.tier is not None
    job = memory.rebuilds.get(rank)
    manifest = job.manifest if job is not None else None
    problem = f" ({memory.loading.problem})" if memory.loading.problem else ""
    return RestoreState(
        phase="load",
        detail=f"generation {generation} from {membership.tier.uri}{problem}",
        total=manifest.payload_bytes if manifest is not None else 0,
        line=line,
    )


def _is_lost(memory: JobMemory, membership: Membership, rank: int, generation: Generation) -> bool:
    """Whether nobody can give the rank the snapshot back, as far as settled reports say."""
    if rank in memory.rebuilds or memory.me is None:
        return False
    if loading.may_load(memory, generation) and not loading.is_failed(memory, rank, generation):
        return False
    group = membership.group_of(memory.me)
    if any(m not in memory.reports or not memory.reports[m].verified for m in group):
        return False
    return not recovery.rebuildable(membership, memory.holdings(membership), rank, generation)


def world_state(memory: JobMemory, after_epoch: int) -> WorldState | None:
    """The world of an epoch newer than `after_epoch`, or None while there is none."""
    if memory.membership is None or memory.me is None or memory.epoch <= after_epoch:
        return None
    if memory.fenced or memory.directive is None:
        return None
    position = memory.membership.position(memory.me)
    return WorldState(
        epoch=memory.epoch,
        node_rank=position,
        nodes=len(memory.membership.members),
        store_address=memory.directive.rendezvous,
        serves_store=position == 0 and not memory.directive.rendezvous,
    )
