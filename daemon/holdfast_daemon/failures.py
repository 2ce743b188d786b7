"""What the engine is told of an effect that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_core.errors import HoldfastError
from holdfast_daemon.combining import SourceCorruptError
from holdfast_daemon.effects import (
    AllocateArena,
    ArenaReady,
    BuildParity,
    CommitSet,
    Completion,
    FetchManifest,
    FindStored,
    LoadStored,
    ManifestFetched,
    OpenStored,
    ParityBuilt,
    ParityVerified,
    PersistRank,
    Rebuild,
    Rebuilt,
    SnapshotVerified,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.loader import load_failure
from holdfast_daemon.persister import commit_failed, write_failed

if TYPE_CHECKING:
    from holdfast_daemon.worker import Background


def failed(effect: Background, error: HoldfastError) -> Completion:
    """The completion event of `effect` that says that it failed, and why."""
    why = str(error)
    match effect:
        case AllocateArena():
            return ArenaReady(rank=effect.rank, layout_id=effect.layout_id, error=error)
        case BuildParity():
            suspect = error.rank if isinstance(error, SourceCorruptError) else None
            return ParityBuilt(
                lane=effect.lane,
                slot=effect.slot,
                generation=effect.generation,
                entry=None,
                error=why,
                suspect=suspect,
            )
        case FetchManifest():
            return ManifestFetched(
                rank=effect.rank,
                generation=effect.generation,
                manifest=b"",
                layout=b"",
                error=why,
            )
        case Rebuild():
            generation = effect.manifest.generation
            return Rebuilt(rank=effect.rank, slot=effect.slot, generation=generation, error=why)
        case FindStored() | OpenStored() | LoadStored():
            return load_failure(effect, error)
        case VerifySnapshot():
            generation = effect.manifest.generation
            return SnapshotVerified(
                rank=effect.rank, slot=effect.slot, generation=generation, ok=False, detail=why
            )
        case VerifyParity():
            return ParityVerified(
                lane=effect.lane,
                slot=effect.slot,
                generation=effect.generation,
                ok=False,
                detail=why,
            )
        case PersistRank():
            return write_failed(effect, error)
        case CommitSet():
            return commit_failed(effect, error)
