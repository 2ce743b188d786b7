"""Comparison of the live state of a rank with its snapshot of the recovery line.

A rank that keeps its state while others restore the line has to have the state of the line: one
difference would stay in the model for good. That both are of one step does not prove it, because a
script may change a weight between two steps. Nothing here changes the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast._copying.engine import CopyEngine
from holdfast._restoring.reading import ReadSnapshot
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.casts import pair_of
from holdfast._state.collect import Stateful, collect
from holdfast._state.extras import dtype_name, encode_extras
from holdfast_core.snapshots.layouts import Entry

COMPARED_EXTRAS = ("optimizers", "modules", "stateful")
"""Extras that have to be equal. Random generators may have drawn numbers since the save, and each
rank has its own."""


def difference(
    snapshot: ReadSnapshot,
    entries: Sequence[Entry],
    extras: Mapping[str, Any],
    live: LiveState,
    stateful: Mapping[str, Stateful],
    sources: Mapping[str, TensorSource],
    engine: CopyEngine,
) -> str:
    """Compare all that this rank captured with its live state, byte by byte.

    Args:
        entries: entries that a restore of the snapshot would read, or round from masters.
        extras: decoded extras of the snapshot.
        sources: the live tensors by name, packed.

    Returns:
        What differs; empty if nothing does.
    """
    assert snapshot.window is None, "no plan compares a rank with a window"
    # Compare names and forms.
    for entry in entries:
        source = sources.get(entry.tensor)
        if source is None or (dtype_name(source.tensor.dtype), source.shape) != (
            entry.dtype,
            entry.shape,
        ):
            return f"{entry.tensor} has another form than in the line"
    held = {entry.tensor for entry in entries}
    private = (source.name for source in sources.values() if source.private and source.nbytes)
    lacks = next((name for name in private if name not in held), None)
    if lacks is not None:
        return f"the line lacks {lacks}"
    # Compare bytes. The snapshot lacks weights that follow from their masters.
    whole = [entry for entry in entries if not entry.cast_of]
    ranges = [
        (entry.offset, sources[entry.tensor].part(entry.start, entry.nbytes)) for entry in whole
    ]
    if differing := engine.differing(ranges, snapshot.placed):
        return f"{whole[differing[0]].tensor} is not as in the line"
    for entry in entries:
        if entry.cast_of and not _follows(entry, sources):
            return f"{entry.tensor} is not as in the line"
    # Compare everything else.
    try:
        now = collect(live, stateful, snapshot.manifest.generation.step)
    except Exception as error:  # raised by the user's state_dict
        return f"its state cannot be collected: {type(error).__name__}: {error}"
    for name in COMPARED_EXTRAS:
        if encode_extras({name: now[name]}) != encode_extras({name: extras[name]}):
            return f"the state of its {name} is not as in the line"
    return ""


def _follows(entry: Entry, sources: Mapping[str, TensorSource]) -> bool:
    """Whether the weights of `entry` are their rounded master."""
    master = sources.get(entry.cast_of)
    if master is None:
        return False
    pair = pair_of(sources[entry.tensor], master, entry.start, entry.nbytes)
    return all(piece.holds() for piece in pair.pieces())
