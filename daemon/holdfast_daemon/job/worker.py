"""Carries out the engine's effects on bytes: storage at once, the rest in the background.

One `EffectWorker` per job. It decides nothing: the effect determines what is done, this module how.
A background effect runs on a thread of the job's executor and ends in exactly one completion event,
even if it fails (`failed` of the effect); the caller passes that event back to the engine.

Work of an epoch that has ended gives up at its next stride: its peers would refuse it anyway.
Checks and allocations do not belong to an epoch and run to their end, because a check that gave up
would look like damage. A slot or block belongs to its effect until the completion event: the engine
must not use it for anything else before that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from functools import cache, partial

from holdfast_core.errors import CorruptError, HoldfastError, StorageError
from holdfast_core.snapshots.layouts import decode_manifest
from holdfast_core.snapshots.manifests import Manifest, ParityEntry
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.durable.loader import Loader
from holdfast_daemon.durable.persister import Persister
from holdfast_daemon.engine.effects import (
    AllocateArena,
    ArenaReady,
    AtOnce,
    Background,
    BuildParity,
    CommitSet,
    Completion,
    FetchManifest,
    FindStored,
    ForgetPeers,
    FreeParity,
    FreeSlot,
    Loading,
    LoadStored,
    ManifestFetched,
    OpenStored,
    ParityBuilt,
    ParityVerified,
    PersistRank,
    Rebuild,
    Rebuilt,
    RemoveArena,
    SaveEpoch,
    Seal,
    SnapshotVerified,
    StopPersisting,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.memory.arenas import SealedSlot
from holdfast_daemon.memory.job_bytes import JobBytes
from holdfast_daemon.memory.parity_blocks import ParityRecord
from holdfast_daemon.parity.build import (
    build_from_chunks,
    common_piece_bytes,
    rebuild,
    verify,
    verify_in_place,
)
from holdfast_daemon.parity.combining import Effort
from holdfast_daemon.parity.group import BulkOpener, Group, PeerClient
from holdfast_daemon.parity.mirrored import MirroredFetch
from holdfast_daemon.parity.recomputing import forwards
from holdfast_daemon.parity.traffic import JobTraffic, NodeTraffic
from holdfast_daemon.parity.update import build_from_changes

_log = logging.getLogger(__name__)


class EffectWorker:
    """Carries out the effects of one job's engine. `apply` is for one thread, the daemon's loop."""

    def __init__(
        self,
        storage: JobBytes,
        *,
        bulk: BulkOpener,
        peers: PeerClient,
        executor: Executor,
        persister: Persister,
        membership: Membership | None = None,
        effort: Effort | None = None,
        loader: Loader | None = None,
        parity_traffic: JobTraffic | None = None,
    ) -> None:
        """
        Args:
            storage: The job's memory, already adopted.
            executor: Threads of the job that background effects run on.
            persister: Writes to the durable tier, on threads of its own.
            membership: The adopted one, so that work can begin before the next `SaveEpoch`.
            effort: Threads and memory of one build, rebuild or check.
            loader: Reads the durable tier; None: the daemon has no access to it.
            parity_traffic: Counts and limits what is fetched for parity; by default, no limit.
        """
        self._storage = storage
        self._group = Group(storage=storage, bulk=bulk, peers=peers)
        self._executor, self.persister = executor, persister
        self._effort = effort or Effort()
        self._scope = EpochScope(membership=membership)
        self.loader = loader
        self.parity_traffic = parity_traffic or NodeTraffic().of_job()

    def apply(self, effect: AtOnce) -> None:
        """Carry out an effect that is finished before the next one begins.

        Raises:
            StorageError: the file system failed; the job's storage is unchanged.
        """
        storage = self._storage
        match effect:
            case SaveEpoch():
                # Entered first: the engine is in the new epoch even if it cannot be saved.
                self._enter(effect.membership)
                storage.save_epoch(effect.membership, effect.line, effect.retained)
            case Seal():
                sealed = SealedSlot(
                    manifest=effect.manifest, encoded=effect.encoded, places=effect.places
                )
                storage.seal(effect.rank, effect.layout_id, effect.slot, sealed)
            case FreeSlot():
                storage.free_slot(effect.rank, effect.layout_id, effect.slot)
            case RemoveArena():
                storage.remove_arena(effect.rank, effect.layout_id)
            case FreeParity():
                storage.free_parity(effect.lane, effect.slot)
            case ForgetPeers():
                storage.forget(effect.keep)
            case StopPersisting():
                self.persister.stop()

    def submit(self, effect: Background) -> Future[Completion]:
        """Carry out a background effect; the future always ends in its completion event."""
        if isinstance(effect, PersistRank | CommitSet):
            scope = self.persister.scope(self._scope.membership)
            return self.persister.executor.submit(self._run, effect, scope)
        return self._executor.submit(self._run, effect, self._scope)

    def abandon(self) -> None:
        """Let running transfers give up: the job was dropped, or the daemon stops."""
        self._scope.ended.set()
        self.persister.stop()

    def _enter(self, membership: Membership) -> None:
        before = self._scope
        same = before.membership is not None and before.membership.epoch == membership.epoch
        self._scope = (
            EpochScope(membership=membership, ended=before.ended)
            if same
            else EpochScope(membership=membership)
        )
        if not same:
            before.ended.set()
            self.persister.stop()

    def _run(self, effect: Background, scope: EpochScope) -> Completion:
        try:
            return self._carry_out(effect, scope)
        except HoldfastError as error:
            return effect.failed(error)
        except OSError as error:
            return effect.failed(StorageError(f"{type(effect).__name__} failed: {error}"))
        except Exception as error:
            # A defect of ours. The engine waits for this effect: without its event, the job would
            # never be protected again, which is worse than one failure that is counted.
            _log.exception("%s failed unexpectedly", type(effect).__name__)
            return effect.failed(HoldfastError(f"{type(effect).__name__} failed: {error!r}"))

    def _carry_out(self, effect: Background, scope: EpochScope) -> Completion:
        match effect:
            case AllocateArena():
                return self._allocate(effect)
            case BuildParity():
                return self._build(effect, scope)
            case FetchManifest():
                return self._fetch_manifest(effect, scope)
            case Rebuild():
                return self._rebuild(effect, scope)
            case FindStored() | OpenStored() | LoadStored():
                return self._load(effect, scope)
            case VerifySnapshot():
                return self._verify_snapshot(effect)
            case VerifyParity():
                return self._verify_parity(effect)
            case PersistRank():
                return self.persister.write(effect, scope)
            case CommitSet():
                return self.persister.commit(effect, scope)

    def _allocate(self, effect: AllocateArena) -> ArenaReady:
        arena = self._storage.allocate(
            effect.rank,
            effect.layout,
            slots=effect.slots,
            ranks=effect.ranks,
            parity_lanes=effect.parity_lanes,
            parity_bytes=effect.parity_bytes,
        )
        return ArenaReady(rank=effect.rank, layout_id=effect.layout_id, slots=arena.slots)

    def _build(self, effect: BuildParity, scope: EpochScope) -> ParityBuilt:
        scope.check()
        with self._storage.block_to_build(effect.lane, effect.slot) as block:
            return self._build_in(block, effect, scope)

    def _build_in(self, block: memoryview, effect: BuildParity, scope: EpochScope) -> ParityBuilt:
        # The sources' manifests and layouts, kept here or fetched.
        described = self._group.describe(effect.sources, effect.generation, scope)
        manifests = {position: decode_manifest(m) for position, (m, _) in described.items()}
        group = self._group.fetch_from(effect.sources, scope, effect.generation)
        paced = self.parity_traffic.paced(group, effect.generation, scope)
        count = self.parity_traffic.count_mirrored
        mirrored = MirroredFetch(paced, manifests, self._storage.mirrors(), count)
        layouts = {position: layout for position, (_, layout) in described.items()}
        # Fill the block: from the changes since the lane's other block, or from whole chunks.
        made = self._from_changes(effect, block, manifests, layouts, mirrored, scope)
        nbytes, digests = made or build_from_chunks(
            block,
            code=effect.code,
            which=effect.block,
            sources=manifests,
            fetch=mirrored,
            check=scope.check,
            effort=self._effort,
        )
        entry = ParityEntry(
            lane=effect.lane,
            generation=effect.generation,
            group=effect.group,
            sources=tuple(sorted((s.rank, s.manifest_digest) for s in effect.sources)),
        )
        # The manifests first: a peer that learns of the block may need them next.
        for source in effect.sources:
            self._storage.keep(source.rank, *described[source.position])
        scope.check()
        record = ParityRecord(
            entry=entry,
            nbytes=nbytes,
            piece_bytes=common_piece_bytes(manifests),
            digests=digests,
            payload_bytes=tuple(
                sorted((s.rank, manifests[s.position].payload_bytes) for s in effect.sources)
            ),
        )
        self._storage.seal_parity(effect.slot, record)
        return ParityBuilt(
            lane=effect.lane, slot=effect.slot, generation=effect.generation, entry=entry
        )

    def _from_changes(
        self,
        effect: BuildParity,
        block: memoryview,
        manifests: Mapping[int, Manifest],
        layouts: Mapping[int, bytes],
        fetch: MirroredFetch,
        scope: EpochScope,
    ) -> tuple[int, bytes] | None:
        """Make the block from the lane's other block and the changes since then.

        Returns:
            The bytes in use and their digests; None when the block must be built from whole chunks:
            there is no other block of this group, whole chunks are better
            (`MirroredFetch.chunks_are_better`), or the update failed.
        """
        older = self._storage.older_parity(effect.lane, effect.slot)
        if older is None or older.record.entry.group != effect.group:
            return None
        positions = {source.rank: source.position for source in effect.sources}
        if older.manifests.keys() != positions.keys():
            return None
        before = {positions[rank]: manifest for rank, manifest in older.manifests.items()}
        recomputed = self.parity_traffic.recomputed
        forward = forwards(effect.code, layouts, before, manifests, recomputed)
        if not forward and fetch.chunks_are_better(effect.code, effect.block, before):
            return None
        try:
            return build_from_changes(
                block,
                older.view,
                older.record.digests,
                code=effect.code,
                which=effect.block,
                before=before,
                after=manifests,
                fetch=fetch.peers,
                check=scope.check,
                effort=self._effort,
                forward=forward,
            )
        except HoldfastError as error:
            scope.check()
            _log.info("parity will be built from whole chunks: %s", error)
            return None

    def _fetch_manifest(self, effect: FetchManifest, scope: EpochScope) -> ManifestFetched:
        manifest, layout = self._group.find(
            effect.peers, effect.rank, effect.generation, effect.manifest_digest, scope
        )
        return ManifestFetched(
            rank=effect.rank, generation=effect.generation, manifest=manifest, layout=layout
        )

    def _rebuild(self, effect: Rebuild, scope: EpochScope) -> Rebuilt:
        manifest = effect.manifest
        self._storage.free_slot(effect.rank, manifest.layout_id, effect.slot)
        arena = self._storage.arena(effect.rank, manifest.layout_id)
        piece_map = PieceMap(slot=effect.slot, places=effect.places)
        sources = {source.position: source for source in effect.sources}

        @cache
        def manifest_of(position: int) -> Manifest:
            described = self._group.describe([sources[position]], manifest.generation, scope)
            return decode_manifest(described[position][0])

        rebuild(
            partial(arena.write, piece_map),
            code=effect.code,
            lost=effect.own_position,
            manifest=manifest,
            payloads={position: each.payload_bytes for position, each in sources.items()},
            manifest_of=manifest_of,
            blocks=effect.blocks,
            fetch=self._group.fetch_from(
                effect.sources,
                scope,
                manifest.generation,
                lane=scope.current().lane_of(effect.rank),
                owners=effect.owners,
                rows=effect.code.rows,
            ),
            check=scope.check,
            effort=self._effort,
        )
        scope.check()
        sealed = SealedSlot(manifest=manifest, encoded=effect.encoded, places=effect.places)
        self._storage.seal(effect.rank, manifest.layout_id, effect.slot, sealed)
        return Rebuilt(rank=effect.rank, slot=effect.slot, generation=manifest.generation)

    def _load(self, effect: Loading, scope: EpochScope) -> Completion:
        if self.loader is None:
            raise StorageError("this daemon was started without access to storage")
        match effect:
            case FindStored():
                return self.loader.find(effect)
            case OpenStored():
                return self.loader.open(effect, scope)
            case LoadStored():
                return self.loader.load(effect, scope)

    def _verify_snapshot(self, effect: VerifySnapshot) -> SnapshotVerified:
        manifest = effect.manifest
        arena = self._storage.arena(effect.rank, manifest.layout_id)
        self._storage.check_manifest_file(effect.rank, manifest.layout_id, effect.slot)
        piece_map = PieceMap(slot=effect.slot, places=effect.places)
        bad = verify(
            partial(arena.read_into, piece_map),
            manifest.payload_bytes,
            manifest.digests,
            manifest.piece_bytes,
            threads=self._effort.threads,
        )
        if bad is not None:
            raise CorruptError(
                f"piece {bad} of rank {effect.rank} generation {manifest.generation} does not "
                f"match its manifest"
            )
        return SnapshotVerified(
            rank=effect.rank, slot=effect.slot, generation=manifest.generation, ok=True
        )

    def _verify_parity(self, effect: VerifyParity) -> ParityVerified:
        record = self._storage.parity_record(effect.lane, effect.slot)
        if record.entry.generation != effect.generation:
            raise StorageError(
                f"parity block {effect.slot} of lane {effect.lane} holds generation "
                f"{record.entry.generation}, not {effect.generation}"
            )
        self._storage.check_entry_file(effect.lane, effect.slot)
        bad = verify_in_place(
            self._storage.block_view(effect.lane, effect.slot)[: record.nbytes],
            record.digests,
            record.piece_bytes,
            threads=self._effort.threads,
        )
        if bad is not None:
            raise CorruptError(
                f"piece {bad} of parity block {effect.slot} of lane {effect.lane} does not match "
                f"its entry"
            )
        return ParityVerified(
            lane=effect.lane, slot=effect.slot, generation=effect.generation, ok=True
        )
