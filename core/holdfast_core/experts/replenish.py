"""More capacity for recovered experts until their lost tokens are replenished.

MoEtion §6: after a recovery, experts that went back to an older version process 10 % more tokens
until they have made up for what they lost. The paper leaves open which tokens are additional.
Here it is one in eleven of the tokens that such an expert processes: exactly the additional 10 %
while its capacity is full; and experts that never fill their capacity return to normal, too.

A tracker is part of the training state, like the ledger. Each rank may have its own, for the tokens
that it lost and processes itself, as in the SDK; or all ranks have an equal one, for the tokens of
all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.ledger import check_format
from holdfast_core.snapshots.units import UnitKey

CAPACITY_BOOST = 1.1
"""MoEtion §6: "these recovering experts process 10% more tokens"."""

_PROCESSED_PER_LOST = 11
"""A boosted expert processes 11 tokens for 10 that it would have processed."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Replenishing:
    """Tracker of the experts that have tokens to make up for."""

    owed: Mapping[UnitKey, int]
    """For each expert, the tokens that it still has to process with more capacity."""

    @classmethod
    def start(cls) -> Replenishing:
        """A tracker without owed tokens."""
        return cls({})

    def after_recovery(self, lost: Mapping[UnitKey, int]) -> Replenishing:
        """The tracker after a recovery that lost these tokens (`ExpertLedger.recovered`). They are
        added to those owed before.

        Raises:
            InvalidJobError: when a loss is below 0.
        """
        owed = dict(self.owed)
        for unit, tokens in lost.items():
            if tokens < 0:
                raise InvalidJobError(f"unit {unit} lost {tokens} tokens; a loss is at least 0")
            if tokens:
                owed[unit] = owed.get(unit, 0) + _PROCESSED_PER_LOST * tokens
        return Replenishing(owed)

    def after_step(self, counts: Mapping[UnitKey, int]) -> Replenishing:
        """The tracker after a step in which experts processed these tokens."""
        left = {unit: tokens - counts.get(unit, 0) for unit, tokens in self.owed.items()}
        return Replenishing({unit: tokens for unit, tokens in left.items() if tokens > 0})

    def capacity_factor(self, unit: UnitKey) -> float:
        """Factor of the expert's capacity: 1.1 while it owes tokens, otherwise 1."""
        return CAPACITY_BOOST if unit in self.owed else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for extras and JSON."""
        return {"format": _FORMAT, "owed": {str(unit): n for unit, n in self.owed.items()}}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Replenishing:
        """The tracker that `to_dict` wrote.

        Raises:
            CorruptError: when it did not, or a different version of Holdfast did.
        """
        check_format("replenishing tracker", document, _FORMAT)
        try:
            return cls({UnitKey.parse(unit): int(n) for unit, n in document["owed"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, InvalidJobError) as error:
            raise CorruptError(f"the replenishing tracker cannot be read: {error!r}") from error
