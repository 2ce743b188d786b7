"""State of a policy that leaves experts out, taken over from the ranks of another world.

Ledgers count the tokens of one rank. When another world goes on, each of its ranks takes over the
counts of old ranks, each old rank's going to one rank, so that sums over all ranks stay what they
were. What all ranks know alike (K, the account, recoveries) comes from any of them.

No snapshot of the old world can be carried over into one of the new world. So no expert counts as
captured, and the first snapshot of each rank has all of its experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from holdfast._capture.partial_state import START, PartialState, layers_of, units_of
from holdfast_core.experts.counts import UNKNOWN
from holdfast_core.experts.ledger import ExpertLedger, merge_counts
from holdfast_core.experts.replenish import Replenishing


class RankTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one rank had counted, as of the restored state; numbers of 0 are left out."""

    rank: int
    """Rank of the old world."""
    tokens: dict[str, int]
    """Expert → tokens whose updates the restored expert holds."""
    lost: dict[str, int]
    """Expert → tokens that it lost."""
    owed: dict[str, int]
    """Expert → tokens that it has to process with more capacity."""
    assigned: dict[str, int]
    """Layer → tokens, times the experts that each was sent to."""


def tokens_of(state: PartialState, rank: int, versions: Mapping[str, str]) -> RankTokens:
    """Count what `rank` had in the state of its snapshot, when experts return to `versions`.

    Raises:
        InvalidJobError: when a version cannot be read.
    """
    returned, lost = state.return_experts(versions)
    return RankTokens(
        rank=rank,
        tokens={str(unit): n for unit, n in returned.ledger.tokens.items() if n},
        lost=lost,
        owed={str(unit): n for unit, n in returned.replenishing.owed.items()},
        assigned={str(layer): n for layer, n in returned.ledger.assignments.items() if n},
    )


def keep_shared(state: PartialState) -> PartialState:
    """Keep of a rank's state only what all ranks know alike."""
    if state == START:
        return START
    old = state.ledger
    ledger = replace(ExpertLedger.start(old.tokens), snapshots=old.snapshots)
    return replace(
        state,
        ledger=ledger,
        marks={},
        measures=UNKNOWN,
        replenishing=Replenishing.start(),
        routed=replace(state.routed, own=0),
    )


def take_over(shared: PartialState, found: Iterable[RankTokens]) -> PartialState:
    """Make a new rank's state from what all old ranks knew, and the counts of those that it takes
    over."""
    if shared == START:
        return START
    found = list(found)
    ledger = shared.ledger.routed(
        merge_counts(*(units_of(one.tokens) for one in found)),
        layers_of(one.assigned for one in found),
    )
    owed = merge_counts(*(units_of(one.owed) for one in found))
    return replace(shared, ledger=ledger, replenishing=Replenishing(owed))
