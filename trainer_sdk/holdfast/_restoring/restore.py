"""Restore of a rank: its own bytes from the arena, shared bytes from the ranks that captured them.

All ranks agree three times, so that every rank restores the same generation or every rank raises:
once each has found its snapshot, once its own bytes are verified and copied, and at the end. A rank
that fails takes part in the next agreement before it raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from holdfast._copying.arena import MappedArena
from holdfast._copying.collector import without_collector
from holdfast._copying.engine import BadPieceError, CopyEngine, plan_copy
from holdfast._copying.placed import Placed
from holdfast._copying.strided import fill_strided
from holdfast._daemon.client import DaemonClient, Hello, RestoreDecision
from holdfast._exchange import Exchange
from holdfast._experts.partial_state import START, PartialState
from holdfast._experts.policy import CapturePolicy
from holdfast._restoring.fit import (
    Offer,
    cast_pairs,
    check_cover,
    make_room,
    own_offers,
    wanted_by,
)
from holdfast._restoring.scatter import scatter
from holdfast._settings import Settings
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.casts import Pair, fill
from holdfast._state.collect import Stateful, devices_of, put_back, put_back_groups
from holdfast._state.extras import decode_extras, split_extras
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    InvalidJobError,
    LayoutMismatchError,
    NoRecoveryLineError,
    UnreachableError,
    by_code,
)
from holdfast_core.experts.recompute import state_entries
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, first_bad_piece
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.states import RestorePhase, RestoreProgress, RestoreSource
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")
_RETRY_S = 0.2
_T = TypeVar("_T")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of one rank in an agreement."""

    code: str = ""
    """Code of the error; empty when all is well."""
    message: str = ""
    generation: str = ""
    """Generation to restore, as `epoch.step`; empty for a fresh start."""
    offers: tuple[Offer, ...] = ()
    versions: dict[str, str] = {}
    """Expert in this rank's snapshot → the generation in which it was captured."""
    lost: dict[str, int] = {}
    """Expert → tokens of this rank that it lost."""
    assigned: dict[str, int] = {}
    """Layer → tokens of this rank, times the experts that each was sent to."""
    replenishes: bool = False
    """Whether this rank has lost tokens to make up for."""


_STANDING = msgspec.json.Decoder(Standing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Result of a restore."""

    epoch: int
    step: int | None
    source: RestoreSource
    generation: Generation | None = None
    layout: Layout | None = None
    experts: PartialState = START
    """State of the policy."""
    replenishing: bool = False
    """Whether any rank has lost tokens to make up for: equal on all ranks."""


@dataclass(slots=True)
class _Found:
    """Snapshot that this rank is to restore."""

    manifest: Manifest
    layout: Layout
    arena: MappedArena
    placed: Placed
    extras: dict[str, Any]
    source: RestoreSource
    experts: PartialState


@dataclass(frozen=True, slots=True)
class _Copied:
    """State of a restore once this rank's own bytes are in its tensors."""

    sources: Mapping[str, TensorSource]
    """By name."""
    casts: tuple[Pair, ...]
    """Weights that are still to be rounded from their masters."""


@dataclass(frozen=True, kw_only=True)
class Restore:
    """One rank's part in restores."""

    client: DaemonClient
    live: LiveState
    stateful: Mapping[str, Stateful]
    topology: Topology
    rank: int
    exchange: Exchange
    engine: CopyEngine
    settings: Settings
    policy: CapturePolicy

    def run(self) -> Restored:
        """Run the restore; see `Session.restore`."""
        self.live.begin()
        with without_collector():
            return self._run()

    def _run(self) -> Restored:
        found: _Found | None = None
        epoch = 0
        offers: tuple[Offer, ...] = ()
        error: HoldfastError | None = None
        try:
            hello = self._hello()
            epoch = hello.epoch
            found = self._find(epoch)
            if found is not None and self.exchange.together:
                offers = own_offers(found.layout, self.live, self.topology, self.rank)
        except HoldfastError as raised:
            error = raised
        try:
            return self._together(epoch, found, offers, error)
        finally:
            if found is not None:
                found.arena.close_later()

    def _together(
        self,
        epoch: int,
        found: _Found | None,
        offers: tuple[Offer, ...],
        error: HoldfastError | None,
    ) -> Restored:
        generation = "" if found is None else str(found.manifest.generation)
        state, versions = START, dict[str, str]()
        if found is not None:
            manifest = found.manifest
            state = found.experts.with_versions((*manifest.experts, *manifest.older))
            versions = state.own_versions(found.layout, manifest.experts)
        own = Standing(generation=generation, offers=offers, versions=versions)
        standings = self._agree(error, own)
        known = versions_of(standings)  # raises on every rank or on none
        if found is None:
            _log.info("epoch %d starts fresh", epoch)
            return Restored(epoch=epoch, step=None, source=RestoreSource.NONE)
        all_offers = [standing.offers for standing in standings]
        chosen = found
        copied, error = _attempt(lambda: self._copy_own(chosen, all_offers))
        state, lost = state.returned(known)
        own = Standing(
            generation=generation,
            lost=lost,
            assigned={str(k): n for k, n in state.ledger.assignments.items()},
            replenishes=bool(state.replenishing.owed),
        )
        standings = self._agree(error, own)
        assert copied is not None
        scatter(self.exchange, all_offers, copied.sources, self.rank)
        _, error = _attempt(lambda: self._finish(chosen, copied))
        self._agree(error, Standing(generation=generation))
        line = found.manifest.generation
        losses, seen = [one.lost for one in standings], [one.assigned for one in standings]
        state = self.policy.recovered(state, losses, seen, epoch=epoch, line=line)
        step = line.step
        _log.info("epoch %d starts after step %d (%s)", epoch, step, found.source)
        return Restored(
            epoch=epoch,
            step=step,
            source=found.source,
            generation=line,
            layout=found.layout,
            experts=state,
            replenishing=self.policy.leaves_out and any(one.replenishes for one in standings),
        )

    # --- what to restore --------------------------------------------------------------------------

    def _hello(self) -> Hello:
        """Wait for the daemon. Raises UnreachableError when it does not answer in
        `restore_timeout_s`."""
        deadline = time.monotonic() + self.settings.restore_timeout_s
        while True:
            try:
                hello = self.client.hello()
                break
            except UnreachableError as error:
                if time.monotonic() >= deadline:
                    raise
                _log.info("waiting for the daemon: %s", error)
                time.sleep(_RETRY_S)
        if hello.world_size and hello.world_size != self.topology.world_size:
            raise InvalidJobError(
                f"the daemon's training world has {hello.world_size} ranks, but {self.topology} "
                f"describes {self.topology.world_size}"
            )
        return hello

    def _find(self, epoch: int) -> _Found | None:
        """Get this rank's snapshot of the recovery line; None for a fresh start.

        There is no deadline while the daemon reports that it waits for storage: giving up would
        only use up restarts of the job.
        """
        phase = RestorePhase.UNKNOWN

        def follow(progress: RestoreProgress) -> None:
            nonlocal phase
            phase = progress.phase
            _log.info("restore: %s", progress)

        deadline = time.monotonic() + self.settings.restore_timeout_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.1)
                decision = self.client.restore(epoch, left_s, follow)
                break
            except UnreachableError as error:  # the daemon restarts
                if phase.waits_for_storage:
                    deadline = time.monotonic() + self.settings.restore_timeout_s
                    phase = RestorePhase.UNKNOWN
                if time.monotonic() >= deadline:
                    raise
                _log.info("asking the daemon again where to start: %s", error)
                time.sleep(_RETRY_S)
        _log.info("recovery line: %s", decision.line.reason)
        manifest, layout = decision.manifest, decision.layout
        if decision.line.generation is None or manifest is None or layout is None:
            return None
        if manifest.generation != decision.line.generation or manifest.rank != self.rank:
            raise CorruptError(
                f"the daemon offers generation {manifest.generation} of rank {manifest.rank} to "
                f"rank {self.rank} for the line {decision.line.generation}"
            )
        if layout.topology != str(self.topology):
            raise LayoutMismatchError(
                f"the snapshot was taken with topology {layout.topology}, this session has "
                f"{self.topology}; restore with the same parallelism, or load a stored copy with "
                f"torch.distributed.checkpoint"
            )
        return self._read(decision, manifest, layout)

    def _read(self, decision: RestoreDecision, manifest: Manifest, layout: Layout) -> _Found:
        end = manifest.extras_offset + manifest.extras_bytes
        if end != manifest.payload_bytes or end > layout.slot_bytes:
            raise CorruptError(f"the manifest of rank {self.rank} does not fit its layout")
        arena = self.client.reader(
            decision.token, decision.arena_bytes, self.settings.rpc_timeout_s
        )
        try:
            placed = Placed(
                arena=arena.view(0, arena.nbytes),
                address=arena.address,
                layout=layout,
                slot=decision.slot,
                places=decision.places,
            )
            first = manifest.extras_offset // manifest.piece_bytes
            low = first * manifest.piece_bytes
            tail = memoryview(placed.read(low, end - low))
            bad = first_bad_piece(tail, manifest.digests, manifest.piece_bytes, first_piece=first)
            if bad is not None:
                raise self._corrupt(layout, manifest, bad)
            raw, of_experts = split_extras(bytes(tail[manifest.extras_offset - low :]))
            extras = decode_extras(raw)
            state = PartialState.decode(of_experts)
        except HoldfastError:
            arena.close()
            raise
        return _Found(manifest, layout, arena, placed, extras, decision.source, state)

    # --- bytes ------------------------------------------------------------------------------------

    def _copy_own(self, found: _Found, all_offers: Sequence[tuple[Offer, ...]]) -> _Copied:
        """Make room, verify this rank's payload and copy it out."""
        wanted = wanted_by(self.rank, found.layout, all_offers)
        check_cover(wanted)
        put_back_groups(self.live, found.extras)
        sources = make_room(self.live, wanted, devices_of(found.extras))
        casts = cast_pairs(wanted, sources)
        ranges = [
            (entry.offset, entry.start, _part(sources[entry.tensor], entry.start, entry.nbytes))
            for entry in state_entries(found.layout)
        ]
        manifest = found.manifest
        plan = plan_copy(ranges, (), manifest.piece_bytes)
        try:
            self.engine.restore(plan, found.placed, manifest.payload_bytes, manifest.digests)
        except BadPieceError as error:
            raise self._corrupt(found.layout, manifest, error.piece) from error
        return _Copied(sources, casts)

    def _finish(self, found: _Found, copied: _Copied) -> None:
        for pair in copied.casts:
            fill(pair)
        for source in copied.sources.values():
            if source.staging is not None:
                fill_strided(source.tensor, source.staging)
        put_back(self.live, self.stateful, found.extras)

    def _corrupt(self, layout: Layout, manifest: Manifest, piece: int) -> CorruptError:
        low = piece * manifest.piece_bytes
        high = low + manifest.piece_bytes
        units = dict.fromkeys(
            entry.unit
            for entry in layout.entries
            if entry.offset < high and entry.offset + entry.nbytes > low
        )
        if high > manifest.extras_offset:
            units["extras"] = None
        return CorruptError(
            f"rank {self.rank}, generation {manifest.generation}: piece {piece} does not match its "
            f"checksum; it holds {', '.join(units)}"
        )

    # --- agreement --------------------------------------------------------------------------------

    def _agree(self, error: HoldfastError | None, own: Standing) -> list[Standing]:
        """Exchange statements. Collective: raises on every rank when one failed, or when the ranks'
        daemons named different recovery lines."""
        if error is not None:
            own = msgspec.structs.replace(own, code=error.code, message=str(error))
        texts = self.exchange.gather(msgspec.json.encode(own))
        standings = [_STANDING.decode(text) for text in texts]
        failed = {r: one for r, one in enumerate(standings) if one.code}
        if failed:
            if len(standings) == 1 and error is not None:
                raise error
            first = failed[min(failed)]
            raise by_code(
                first.code,
                f"restore failed on ranks {sorted(failed)} of {len(standings)}: rank "
                f"{min(failed)}: {first.message}",
            ) from error
        if len({one.generation for one in standings}) > 1:
            lines = {r: one.generation or "a fresh start" for r, one in enumerate(standings)}
            raise NoRecoveryLineError(f"ranks received different recovery lines: {lines}")
        return standings


def versions_of(standings: Sequence[Standing]) -> dict[str, str]:
    """Find the version of each expert that is restored.

    Raises:
        CorruptError: when ranks hold parts of an expert in different versions.
    """
    found: dict[str, str] = {}
    for one in standings:
        for unit, version in one.versions.items():
            if found.setdefault(unit, version) != version:
                raise CorruptError(
                    f"ranks hold parts of {unit} of different generations, {found[unit]} and "
                    f"{version}; restore another generation"
                )
    return found


def _part(source: TensorSource, start: int, nbytes: int) -> Any:
    return source.flat()[start : start + nbytes]


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, HoldfastError | None]:
    """Return the result or the error, so that this rank can report an error to the other ranks
    before it raises."""
    try:
        return work(), None
    except HoldfastError as error:
        return None, error
    except Exception as error:  # raised by the user's load_state_dict, or by torch
        failure = LayoutMismatchError(
            f"the state cannot be loaded: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return None, failure
