"""Restore of a generation that another world captured: one with other ranks, or in another order.

No snapshot of that world belongs to a rank of this one. All snapshots together are the state, and
each of them can be read by some rank. So every rank learns all layouts, finds the bytes of its own
tensors in all snapshots, and receives these bytes from the ranks that read them (`passing`).

Extras are not tensors and cannot be divided. A rank takes the extras of the first snapshot that it
reads, which is its own old one if the rank was in that world. A rank that reads none takes the
extras of an old rank with the same place, counted modulo their number. Buffers differ between
replicas; all ranks get those of the lowest old rank that had them.

If experts have seats, a line of the present world is read in the same way, because experts may have
changed ranks since.

Snapshots that leave experts out are read like any others. The experts of the line are those in its
snapshots, in the versions that the snapshots record (`_capture.taking_over`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from holdfast._capture.partial_state import PartialState
from holdfast._capture.taking_over import RankTokens, keep_shared, tokens_of
from holdfast._capture.window_records import WindowRecord, decode_record, encode_record
from holdfast._copying.engine import CopyEngine, plan_copy
from holdfast._copying.placed import Placed
from holdfast._daemon.client import DaemonClient, RestoreDecision
from holdfast._restoring.assembling import (
    PayloadRange,
    assemble,
    local_tensors,
    payload_ranges,
    wanted_of,
)
from holdfast._restoring.fit import make_room
from holdfast._restoring.other_windows import plan_frames
from holdfast._restoring.passing import FillTargets, Span, spans_of
from holdfast._restoring.reading import ReadSnapshot, read_snapshot
from holdfast._restoring.repeating import OptimizerReplay
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.collect import buffers_of, put_back_groups
from holdfast._state.extras import decode_extras
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    LayoutMismatchError,
    NoRecoveryLineError,
)
from holdfast_core.job.snapshots import Repeats
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    decode_layout,
    encode_layout,
    encode_manifest,
    layout_id,
    manifest_digest,
)
from holdfast_core.states import RestoreSource
from holdfast_core.topology import Topology

_NAMED_MAX = 8
"""Largest number of ranks that an error lists."""


class SnapshotOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that one rank can read on behalf of all."""

    rank: int
    """Rank of the old world that captured it."""
    manifest: int
    """Digest of its manifest."""
    layout: bytes
    extras: bytes
    window: bytes = b""
    """Record of a sparse window; empty for other snapshots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherWorld:
    """The world that captured the line, and its snapshots that this rank reads."""

    ranks: int
    """Number of ranks in that world."""
    generation: Generation
    source: RestoreSource
    snapshots: tuple[ReadSnapshot, ...]

    @property
    def versions(self) -> tuple[dict[str, str], ...]:
        """The versions of the experts in each snapshot, if its policy leaves experts out."""
        return tuple(
            _state_of(one).own_versions(one.layout, one.manifest.experts) for one in self.snapshots
        )

    def offers(self) -> tuple[SnapshotOffer, ...]:
        """Describe this rank's snapshots for the other ranks."""
        return tuple(
            SnapshotOffer(
                rank=one.manifest.rank,
                manifest=manifest_digest(encode_manifest(one.manifest)),
                layout=encode_layout(one.layout),
                extras=one.extras,
                window=b"" if one.window is None else encode_record(one.window),
            )
            for one in self.snapshots
        )

    def placed_by_rank(self) -> dict[int, Placed]:
        """Return the bytes of this rank's snapshots by the rank that captured them."""
        return {one.manifest.rank: one.placed for one in self.snapshots}

    def close_later(self) -> None:
        for one in self.snapshots:
            one.arena.close_later()


def open_world(
    decision: RestoreDecision,
    client: DaemonClient,
    engine: CopyEngine,
    timeout_s: float,
    ranks: int,
) -> OtherWorld:
    """Open the snapshots that this rank reads, and verify every byte of them.

    Args:
        ranks: number of ranks that captured the line.

    Raises:
        CorruptError: a snapshot does not belong to the line, or a piece does not match its
            checksum.
        LayoutMismatchError: the line is a sparse window that repeats training. Only the world that
            captured it can do so.
    """
    generation = decision.line.generation
    assert generation is not None
    snapshots: list[ReadSnapshot] = []
    world = OtherWorld(ranks=ranks, generation=generation, source=decision.source, snapshots=())
    try:
        for held in decision.snapshots:
            snapshots.append(read_snapshot(client, held, timeout_s))
            _check(snapshots[-1], world)
            snapshots[-1].restore(engine, plan_copy((), (), held.layout.piece_bytes))
    except HoldfastError:
        for one in snapshots:
            one.arena.close()
        raise
    return replace(world, snapshots=tuple(snapshots))


def _check(snapshot: ReadSnapshot, world: OtherWorld) -> None:
    manifest, layout = snapshot.manifest, snapshot.layout
    of = (manifest.generation, manifest.world_size, layout.world_size, layout.rank)
    if of != (world.generation, world.ranks, world.ranks, manifest.rank) or (
        manifest.rank >= world.ranks
    ):
        raise CorruptError(
            f"the daemon offers generation {manifest.generation} of rank {manifest.rank} of "
            f"{manifest.world_size} (by its layout {layout.rank} of {layout.world_size}) for the "
            f"line {world.generation} of {world.ranks} ranks"
        )
    fits = (manifest.extras_offset, manifest.piece_bytes, manifest.layout_id)
    if fits != (layout.extras_offset, layout.piece_bytes, layout_id(encode_layout(layout))):
        raise CorruptError(f"the manifest of rank {manifest.rank} does not fit its layout")
    if snapshot.window is not None and snapshot.window.repeats is Repeats.TRAINING:
        raise LayoutMismatchError(
            f"generation {world.generation} is a sparse window of {world.ranks} ranks, whose steps "
            f"only their world can repeat; give the job snapshot.policy.sparse.repeats Optimizer, "
            f"or another policy, and fewer minNodes than nodes once a snapshot of that is protected"
        )


def _state_of(snapshot: ReadSnapshot) -> PartialState:
    """Return the state of the policy, with all versions that the snapshot records."""
    manifest = snapshot.manifest
    return snapshot.experts.with_versions((*manifest.experts, *manifest.older))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldPlan:
    """This rank's part in the restore."""

    sources: Mapping[str, TensorSource]
    """Live tensors by name."""
    ranges: Mapping[int, tuple[PayloadRange, ...]]
    """All bytes of these tensors, by the rank that captured them."""
    extras: Mapping[str, Any]
    readers: Mapping[int, int]
    """Rank that captured a snapshot → present rank that reads it on behalf of all."""
    takes_over: frozenset[int]
    """Old ranks whose token counts this rank takes over."""
    policy: bytes
    """The part of the policy's state that all old ranks shared; empty unless this rank reads the
    first snapshot on behalf of all."""
    tokens: tuple[RankTokens, ...]
    """Token counts of the old ranks whose snapshots this rank reads on behalf of all."""
    repeats: OptimizerReplay | None = None
    """The optimizer steps of a sparse window, which complete its state."""

    def spans(self) -> tuple[Span, ...]:
        """Return the spans that this rank needs of each payload."""
        return spans_of(self.ranges)

    def filling(self) -> FillTargets:
        return FillTargets(self.ranges, self.sources)


def plan_world(
    world: OtherWorld,
    all_offers: Sequence[tuple[SnapshotOffer, ...]],
    live: LiveState,
    topology: Topology,
    rank: int,
    versions: Mapping[str, str],
    me: int,
) -> WorldPlan:
    """Make room in the live state, and find all bytes that it needs.

    Args:
        all_offers: the offers of each rank of this world.
        versions: version of each restored expert, if the policy leaves experts out.
        me: this rank's index in `all_offers`.

    Raises:
        NoRecoveryLineError: no rank can read some snapshot.
        CorruptError: two ranks offer different snapshots of one rank.
        LayoutMismatchError: the snapshots do not contain the live state.
    """
    # Choose who reads each snapshot.
    readers, offers = _readers(world, all_offers)
    layouts = {old: decode_layout(offer.layout) for old, offer in offers.items()}
    was = _topology_of(layouts, world.ranks, topology)
    # Choose the old rank whose extras this rank takes.
    at = topology.coordinates(rank)
    alike = [was.rank_at(dp=dp, tp=at.tp, pp=at.pp) for dp in range(was.dp)]
    read = [one.manifest.rank for one in world.snapshots if one.manifest.rank in alike]
    chosen = read[0] if read else alike[at.dp % was.dp]
    if was == topology:  # Every rank has an old self, wherever its snapshot is.
        chosen = rank
    extras = {old: decode_extras(offers[old].extras) for old in alike}
    put_back_groups(live, extras[chosen])
    # Find the live tensors in the snapshots, and the frames of a window.
    tensors = assemble(layouts, was, tp=at.tp, pp=at.pp)
    found = local_tensors(live, tensors)
    ranges = payload_ranges(found, layouts)
    frames = None
    if records := _windows_of(offers):
        merge = partial(_extras_of_step, chosen, live)
        frames = plan_frames(
            records, layouts, tuple(alike), was, live, topology, rank, ranges, merge
        )
        ranges = frames.beside(ranges)
    # Make room for them.
    own = with_all_values(extras[chosen], extras.values(), live)
    sources = make_room(live, wanted_of(found), own)
    states = {
        one.manifest.rank: _state_of(one)
        for one in world.snapshots
        if readers[one.manifest.rank] == me
    }
    if frames is not None:
        sources = {**sources, **frames.sources}
    return WorldPlan(
        sources=sources,
        ranges=ranges,
        repeats=None if frames is None else frames.repeats,
        extras=own,
        readers=readers,
        takes_over=frozenset(_old_ranks_of_place(was, topology, rank)),
        policy=keep_shared(states[0]).encode() if 0 in states else b"",
        tokens=tuple(tokens_of(state, old, versions) for old, state in states.items()),
    )


def _extras_of_step(
    chosen: int, live: LiveState, extras: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    return with_all_values(extras[chosen], extras.values(), live)


def _windows_of(offers: Mapping[int, SnapshotOffer]) -> dict[int, WindowRecord]:
    """The records of the window that the old ranks captured; empty if they captured none."""
    records = {old: decode_record(offer.window) for old, offer in offers.items() if offer.window}
    found = {old: record for old, record in records.items() if record is not None}
    if found and len(found) < len(offers):
        raise CorruptError(f"only ranks {sorted(found)} captured the generation as a window")
    return found


def _old_ranks_of_place(was: Topology, topology: Topology, rank: int) -> Iterator[int]:
    """Yield the old ranks with this rank's place, counted modulo the number of present ranks."""
    for old in range(was.world_size):
        at = was.coordinates(old)
        if topology.rank_at(dp=at.dp % topology.dp, tp=at.tp, pp=at.pp) == rank:
            yield old


def _readers(
    world: OtherWorld, all_offers: Sequence[tuple[SnapshotOffer, ...]]
) -> tuple[dict[int, int], dict[int, SnapshotOffer]]:
    """Find the lowest rank that can read each snapshot, and its offer."""
    readers: dict[int, int] = {}
    offers: dict[int, SnapshotOffer] = {}
    for reader, of_reader in enumerate(all_offers):
        for offer in of_reader:
            known = offers.setdefault(offer.rank, offer)
            if known.manifest != offer.manifest:
                raise CorruptError(
                    f"ranks {readers[offer.rank]} and {reader} offer different snapshots of rank "
                    f"{offer.rank} of {world.ranks} in generation {world.generation}"
                )
            readers.setdefault(offer.rank, reader)
    lacking = world.ranks - len(readers)
    if lacking:
        absent = (old for old in range(world.ranks) if old not in readers)
        named = [*islice(absent, _NAMED_MAX)]
        more = f" and {lacking - len(named)} more" if lacking > len(named) else ""
        raise NoRecoveryLineError(
            f"no rank can read the snapshots of ranks {named}{more} of the {world.ranks} that "
            f"captured generation {world.generation}"
        )
    return readers, offers


def _topology_of(layouts: Mapping[int, Layout], ranks: int, topology: Topology) -> Topology:
    """Return the topology of the old world. Raises LayoutMismatchError if this world cannot take
    over its state."""
    texts = sorted({layout.topology for layout in layouts.values()})
    was = Topology.parse(texts[0])
    if len(texts) > 1 or was.world_size != ranks:
        raise LayoutMismatchError(
            f"{ranks} ranks captured the generation with topologies {', '.join(texts)}"
        )
    if (was.tp, was.pp) != (topology.tp, topology.pp):
        raise LayoutMismatchError(
            f"the generation was captured with topology {was}, this session has {topology}; when "
            f"ranks leave or join, only dp and ep may change: restore with tp={was.tp} and "
            f"pp={was.pp}, or load a stored copy with torch.distributed.checkpoint"
        )
    return was


def with_all_values(
    chosen: Mapping[str, Any], everything: Iterable[Mapping[str, Any]], live: LiveState
) -> dict[str, Any]:
    """Complete the `chosen` extras with the values that other extras have for this rank's
    parameters: plain values of optimizer states, their devices, and forms of buffers. Values of
    parameters that this rank lacks are left out, since it may have other experts than the rank that
    saved them."""
    others = [chosen, *everything]
    buffers: dict[str, Any] = {}
    for one in reversed(others):
        buffers |= buffers_of(one)
    optimizers = []
    for index, saved in enumerate(chosen["optimizers"]):
        of_all = [extras["optimizers"][index] for extras in others]
        devices: dict[str, str] = {}
        for one in of_all:
            devices = {**one["devices"], **devices}
        state = {**saved, **_of_parameters(of_all, live), "devices": devices}
        if "within" in state:
            state["within"] = [
                {
                    **inner,
                    **_of_parameters(beside := [one["within"][at] for one in of_all], live),
                    "keys": sorted({key for one in beside for key in one["keys"]}),
                }
                for at, inner in enumerate(state["within"])
            ]
        optimizers.append(state)
    return {**chosen, "optimizers": optimizers, "buffers": buffers}


def _of_parameters(
    states: Sequence[Mapping[str, Any]], live: LiveState
) -> dict[str, dict[str, Any]]:
    """Collect what the extras of several ranks have for this rank's parameters: plain values, and
    forms of states."""
    found: dict[str, dict[str, Any]] = {"scalars": {}, "forms": {}}
    for state in states:
        for kind, of_kind in found.items():
            for name, values in state.get(kind, {}).items():
                if name in live.anchors:
                    of_kind.setdefault(name, values)
    return found
