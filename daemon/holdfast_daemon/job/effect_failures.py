"""Turns the failure of an effect into the completion event that the engine gets."""

from __future__ import annotations

from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_daemon.engine.effects import (
    AllocateArena,
    ArenaReady,
    Background,
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
    RankPersisted,
    Rebuild,
    Rebuilt,
    SetCommitted,
    SnapshotVerified,
    StoredFound,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.parity.combining import ParityCorruptError, SourceCorruptError


def failed(effect: Background, error: HoldfastError) -> Completion:
    """The completion event for the failure of `effect`, with its reason."""
    match effect:
        case AllocateArena():
            return ArenaReady(rank=effect.rank, layout_id=effect.layout_id, error=error)
        case BuildParity() | VerifyParity():
            return _parity_failed(effect, error)
        case VerifySnapshot():
            return SnapshotVerified(
                rank=effect.rank,
                slot=effect.slot,
                generation=effect.manifest.generation,
                ok=False,
                detail=str(error),
            )
        case PersistRank() | CommitSet():
            return _persisting_failed(effect, error)
        case _:
            return _recovery_failed(effect, error)


def _parity_failed(effect: BuildParity | VerifyParity, error: HoldfastError) -> Completion:
    lane, slot, generation, why = effect.lane, effect.slot, effect.generation, str(error)
    if isinstance(effect, VerifyParity):
        return ParityVerified(lane=lane, slot=slot, generation=generation, ok=False, detail=why)
    suspect = None
    if isinstance(error, SourceCorruptError):
        suspect = next(s.rank for s in effect.sources if s.position == error.position)
    return ParityBuilt(
        lane=lane, slot=slot, generation=generation, entry=None, error=why, suspect=suspect
    )


def _recovery_failed(
    effect: FindStored | FetchManifest | OpenStored | Rebuild | LoadStored, error: HoldfastError
) -> Completion:
    corrupt, why = isinstance(error, CorruptError), str(error)
    match effect:
        case FindStored():
            return StoredFound(epoch=effect.epoch, found=None, error=why)
        case FetchManifest() | OpenStored():
            return ManifestFetched(
                rank=effect.rank,
                generation=effect.generation,
                manifest=b"",
                layout=b"",
                error=why,
                corrupt=corrupt,
            )
        case Rebuild() | LoadStored():
            # One of several blocks is damaged, and it is not known which.
            owners = error.owners if isinstance(error, ParityCorruptError) else ()
            return Rebuilt(
                rank=effect.rank,
                slot=effect.slot,
                generation=effect.manifest.generation,
                error=why,
                corrupt=corrupt,
                damaged=owners[0] if len(owners) == 1 else None,
            )


def _persisting_failed(effect: PersistRank | CommitSet, error: HoldfastError) -> Completion:
    if isinstance(effect, CommitSet):
        return SetCommitted(
            epoch=effect.epoch,
            number=effect.number,
            generation=effect.generation,
            error=str(error),
        )
    return RankPersisted(
        epoch=effect.epoch,
        number=effect.number,
        rank=effect.rank,
        layout_id=effect.manifest.layout_id,
        slot=effect.slot,
        generation=effect.manifest.generation,
        file=None,
        error=str(error),
        corrupt=isinstance(error, CorruptError),
    )
