"""Text on ranks that recovered alone while the others kept their state, from the ranks' daemons'
reports. Pure; for people only."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.reconciler.observe.text import ranks_in_words
from holdfast_operator.reconciler.observe.views import RankView


def replay_in_words(ranks: Sequence[RankView]) -> str:
    """Which ranks restored the line and repeated which steps alone in this epoch, or why none did;
    empty where none was to."""
    repeated: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        if rank.repeated_after is not None and rank.restored is not None:
            steps = (rank.repeated_after + 1, rank.restored.step)
            repeated.setdefault(steps, []).append(rank.rank)
    parts = [
        f"{ranks_in_words(found)} "
        + (f"repeated steps {first} to {last}" if first <= last else f"restored step {last}")
        for (first, last), found in sorted(repeated.items())
    ]
    if parts:
        return f"{', '.join(parts)} alone; the others kept their state"
    why = next((rank.no_replay for rank in ranks if rank.no_replay), "")
    return f"all ranks restored the line, since the lost ones could not alone: {why}" if why else ""
