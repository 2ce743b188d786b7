"""Counts that all ranks share: the sum of one vector from each rank.

Policies that choose by tokens need equal numbers on all ranks. A rank states absolute facts only:
the tokens that it routed to each expert, the last capture of each expert that it captures itself,
and what it measured. The sum of all statements, element by element, has every fact of every rank,
because experts have one rank that captures them and each rank has its own place for measures. So:

- ranks that have the sum make the same choice: nothing else goes into it;
- a save that a rank skipped needs no message: the rank's next statement shows how old its experts
  are;
- a missed sum does no harm: the next one holds all of it again.

An expert that is spread over several ranks (FSDP2, tensor parallelism, ZeRO) is captured by all of
them, so each states its own mark. Whether the marks are equal follows from two sums: h numbers are
equal exactly when h · Σx² = (Σx)². Where they are not, the ranks hold parts of different versions;
then the expert counts as never captured, and every policy captures all of its parts.

Nothing here communicates: the collective is in the trainer SDK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from holdfast_core.errors import ProtocolError
from holdfast_core.snapshots.units import UnitKey

NONE_SPREAD: Mapping[UnitKey, int] = MappingProxyType({})
"""The spread of a model in which each expert is captured by one rank."""

_PER_EXPERT = 3
_PER_RANK = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """An expert's newest capture."""

    number: int
    """Number of the snapshot, from 0."""
    tokens: int
    """Tokens of all ranks for the expert, in the sum that chose the snapshot's experts."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Measurements of a rank; 0 is unknown."""

    host_bytes_s: int = 0
    """Bandwidth of copies into host memory while all ranks copy."""
    network_bytes_s: int = 0
    """Bandwidth of protection on other nodes."""
    step_us: int = 0
    """Microseconds of a step, without its wait for a snapshot."""


UNKNOWN = Measures()


@dataclass(frozen=True, kw_only=True, slots=True)
class CountStatement:
    """The facts that one rank states after save `number` was called."""

    number: int
    """Number of the save; -1 before the first of a job."""
    tokens: Mapping[UnitKey, int]
    """Tokens that this rank routed in the job's life, to experts of any rank."""
    marks: Mapping[UnitKey, Mark]
    """Newest captures of the experts that this rank captures; experts without any are missing."""
    measures: Measures = UNKNOWN

    def to_vector(
        self,
        units: Sequence[UnitKey],
        rank: int,
        ranks: int,
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> list[int]:
        """The statement as numbers that may be added to those of the other ranks. For an expert
        that is spread over h ranks, squares of save numbers are added: h · number² < 2^63.

        Args:
            units: all experts, in an order that all ranks share.
            spread: for each expert whose parts more than one rank captures, the number of ranks.
        """
        numbers = [self.tokens.get(unit, 0) for unit in units]
        for unit in units:
            mark = self.marks.get(unit)
            numbers += (0, 0) if mark is None else (mark.number + 1, mark.tokens)
        for unit in (unit for unit in units if unit in spread):
            mark = self.marks.get(unit)
            numbers.append(0 if mark is None else (mark.number + 1) ** 2)
        slots = [0] * (_PER_RANK * ranks)
        known = self.measures
        slots[_PER_RANK * rank : _PER_RANK * (rank + 1)] = (
            self.number + 1,
            known.host_bytes_s,
            known.network_bytes_s,
            known.step_us,
        )
        return numbers + slots


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedCounts:
    """The sum of all ranks' statements: equal on every rank that has it."""

    number: int
    """Number of the save after which the statements were made; they decide the next one."""
    tokens: Mapping[UnitKey, int]
    marks: Mapping[UnitKey, Mark]
    measures: Measures
    """The lowest value of each measure that any rank stated."""

    @classmethod
    def from_vector(
        cls,
        vector: Sequence[int],
        units: Sequence[UnitKey],
        ranks: int,
        number: int,
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> AgreedCounts:
        """The counts that a sum of vectors holds; see `CountStatement.to_vector` for the arguments.

        Raises:
            ProtocolError: when it is not the sum of the statements of all `ranks` after save
                `number`.
        """
        experts = len(units)
        of_experts = _PER_EXPERT * experts + len(spread)
        slots = [vector[i : i + _PER_RANK] for i in range(of_experts, len(vector), _PER_RANK)]
        numbers = [slot[0] - 1 for slot in slots]
        if len(vector) != of_experts + _PER_RANK * ranks or set(numbers) != {number}:
            raise ProtocolError(
                f"the ranks' counts of tokens are from the saves {sorted(set(numbers))}, not all "
                f"from save {number}; make the same calls of restore and save on all ranks"
            )
        squares = dict(
            zip((u for u in units if u in spread), vector[_PER_EXPERT * experts :], strict=False)
        )
        marks = {}
        for index, unit in enumerate(units):
            total, tokens = vector[experts + 2 * index : experts + 2 * index + 2]
            parts = spread.get(unit, 1)
            alike = unit not in spread or parts * squares[unit] == total**2
            if total and alike:
                marks[unit] = Mark(total // parts - 1, tokens // parts)
        least = [min((slot[i] for slot in slots if slot[i] > 0), default=0) for i in (1, 2, 3)]
        return cls(
            number=number,
            tokens=dict(zip(units, vector[:experts], strict=True)),
            marks=marks,
            measures=Measures(*least),
        )

    # --- the questions of selection: `experts.ledger.TokenHistory` --------------------------------

    def unsaved(self, unit: UnitKey) -> int:
        """Tokens since the expert's newest capture. Both are as of the save before, so the tokens
        cover as many steps as the expert is old."""
        mark = self.marks.get(unit)
        return max(0, self.tokens[unit] - (mark.tokens if mark else 0))

    def age(self, unit: UnitKey) -> int:
        """Saves since the one that captured the expert, for the next save: 0 right after it."""
        mark = self.marks.get(unit)
        return self.number + 1 - (mark.number + 1 if mark else 0)

    @property
    def uncaptured(self) -> frozenset[UnitKey]:
        """Experts that were never captured, or whose parts on different ranks are of different
        versions."""
        return frozenset(self.tokens).difference(self.marks)


NO_COUNTS = AgreedCounts(number=-1, tokens={}, marks={}, measures=UNKNOWN)
"""The counts before any statement, and of experts that are chosen without any."""
