"""Reading a snapshot in the memory of this rank's node.

Opening a snapshot verifies its extras; restoring it verifies everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast._capture.partial_state import PartialState
from holdfast._capture.window_records import WindowRecord, decode_record
from holdfast._copying.arena import MappedArena
from holdfast._copying.engine import BadPieceError, CopyEngine, CopyPlan
from holdfast._copying.placed import Placed
from holdfast._daemon.client import DaemonClient, HeldSnapshot
from holdfast._state.extras import split_extras
from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.snapshots.layouts import Layout, first_bad_piece
from holdfast_core.snapshots.manifests import Manifest


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """An opened snapshot; `arena` must be closed."""

    manifest: Manifest
    layout: Layout
    arena: MappedArena
    placed: Placed
    extras: bytes
    """Encoded extras."""
    experts: PartialState
    """State of the policy that captured it."""
    window: WindowRecord | None = None
    """Record of a sparse window; `extras` are then those of one of its steps. None otherwise."""

    def restore(self, engine: CopyEngine, plan: CopyPlan) -> None:
        """Copy bytes into live tensors by `plan`, and verify the whole payload.

        Raises:
            CorruptError: a piece does not match its checksum; the message names its units. Or a
                device does not hold what was copied to it. Tensors are then partly written.
        """
        manifest = self.manifest
        try:
            engine.restore(plan, self.placed, manifest.payload_bytes, manifest.digests)
        except BadPieceError as error:
            raise _corrupt(self.layout, manifest, error.piece) from error


def read_snapshot(client: DaemonClient, held: HeldSnapshot, timeout_s: float) -> ReadSnapshot:
    """Open a snapshot and verify its extras.

    Raises:
        CorruptError: the snapshot does not fit its layout or its arena, or a piece of the extras
            does not match its checksum.
    """
    # Check the sizes before anything is read by them.
    manifest, layout = held.manifest, held.layout
    end = manifest.extras_offset + manifest.extras_bytes
    if end != manifest.payload_bytes or end > layout.slot_bytes:
        raise CorruptError(f"the manifest of rank {manifest.rank} does not fit its layout")
    arena = client.reader(held.token, held.arena_bytes, timeout_s)
    try:
        placed = Placed(
            arena=arena.view(0, arena.nbytes),
            address=arena.address,
            layout=layout,
            slot=held.slot,
            places=held.places,
            descriptor=arena.descriptor,
        )
        # Verify the pieces that contain the extras.
        first = manifest.extras_offset // manifest.piece_bytes
        low = first * manifest.piece_bytes
        tail = memoryview(placed.read(low, end - low))
        bad = first_bad_piece(tail, manifest.digests, manifest.piece_bytes, first_piece=first)
        if bad is not None:
            raise _corrupt(layout, manifest, bad)
        # Decode the extras, or the record of a window.
        data = bytes(tail[manifest.extras_offset - low :])
        window = decode_record(data)
        extras, of_experts = split_extras(data if window is None else window.restored_extras)
        experts = PartialState.decode(of_experts)
        if window is not None and window.last != manifest.generation.step:
            raise CorruptError(
                f"rank {manifest.rank}, generation {manifest.generation}: its window ends with "
                f"step {window.last}"
            )
    except HoldfastError:
        arena.close()
        raise
    return ReadSnapshot(manifest, layout, arena, placed, extras, experts, window)


def _corrupt(layout: Layout, manifest: Manifest, piece: int) -> CorruptError:
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
        f"rank {manifest.rank}, generation {manifest.generation}: piece {piece} does not match its "
        f"checksum; it holds {', '.join(units)}"
    )
