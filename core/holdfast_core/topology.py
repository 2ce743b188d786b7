"""The parallel topology of a training world: which ranks hold the same state.

Replicas are what snapshots are sharded over (REFT §4.1, PEC §3.2): ranks that hold the same
non-expert units share the work of capturing them, and so do ranks that hold the same experts. The
topology is declared by the user and is part of a layout's identity; whether the declared replicas
really hold equal bytes is checked elsewhere, at the first snapshot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from holdfast_core.errors import InvalidJobError

_CANONICAL = re.compile(r"dp([0-9]{1,6})·ep([0-9]{1,6})·tp([0-9]{1,6})·pp([0-9]{1,6})")
"""Degrees of at most six digits: other ranks and files may state anything."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's position in each dimension of parallelism."""

    dp: int
    tp: int
    pp: int
    ep: int
    """Index of the share of the experts that the rank holds: dp % degree of expert parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Degrees of data, expert, tensor and pipeline parallelism.

    tp varies fastest over the ranks, then dp, then pp: rank = (pp_i · dp + dp_i) · tp + tp_i.
    Expert parallelism reuses data-parallel ranks: `ep` consecutive dp indices hold all experts of
    a layer between them, so `ep` divides `dp`.

    Raises:
        InvalidJobError: when a degree is below 1 or `ep` does not divide `dp`.
    """

    dp: int
    ep: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "ep", "tp", "pp"):
            degree = getattr(self, name)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise InvalidJobError(
                    f"topology: {name}={degree!r} is not a degree of parallelism; "
                    f"give an integer of at least 1"
                )
        if self.dp % self.ep:
            raise InvalidJobError(
                f"topology: ep={self.ep} does not divide dp={self.dp}; choose one of "
                f"{[ep for ep in range(1, self.dp + 1) if self.dp % ep == 0]} for ep"
            )

    def __str__(self) -> str:
        return f"dp{self.dp}·ep{self.ep}·tp{self.tp}·pp{self.pp}"

    @classmethod
    def parse(cls, text: str) -> Topology:
        """The topology that `str()` wrote, e.g. `dp4·ep4·tp1·pp1`.

        Raises:
            InvalidJobError: when `text` is not one.
        """
        match = _CANONICAL.fullmatch(text)
        if match is None:
            raise InvalidJobError(
                f"topology {text!r} cannot be read; write it like 'dp4·ep4·tp1·pp1'"
            )
        dp, ep, tp, pp = (int(degree) for degree in match.groups())
        return cls(dp=dp, ep=ep, tp=tp, pp=pp)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def check_world(self, world_size: int) -> None:
        """Refuse a training world whose size is not the topology's.

        Raises:
            InvalidJobError: when `world_size` is not dp · tp · pp.
        """
        if world_size != self.world_size:
            raise InvalidJobError(
                f"topology {self}: dp·tp·pp = {self.dp}·{self.tp}·{self.pp} = {self.world_size} "
                f"ranks, but the training world has {world_size}; change the topology or the "
                f"number of processes until both are equal"
            )

    def resized(self, world_size: int) -> Topology:
        """This topology for another number of ranks: dp follows from it, ep, tp and pp stay.

        Raises:
            InvalidJobError: when tp · pp does not divide `world_size`, or ep the dp that follows.
        """
        dp, left = divmod(world_size, self.tp * self.pp)
        if left or not dp or dp % self.ep:
            raise InvalidJobError(
                f"topology {self} does not fit a training world of {world_size} ranks: of those, "
                f"tp·pp·ep = {self.tp}·{self.pp}·{self.ep} must be a divisor; choose degrees that "
                f"fit every number of ranks from minNodes to nodes, as Topology.fitted does"
            )
        return replace(self, dp=dp)

    def fitted(self, world_size: int, *, experts: int) -> Topology:
        """This topology for another number of ranks, none of which needs to be a multiple of `ep`.

        Scripts whose experts lie across nodes call it in each world: dp follows from the number of
        ranks, tp and pp stay, and ep becomes the greatest degree, at most this one's, with which
        every rank holds the same number of experts. With fewer ranks, a rank holds more experts.

        Args:
            experts: number of experts of a layer, over all ranks.

        Raises:
            InvalidJobError: when tp · pp does not divide `world_size`, or `experts` is below 1.
        """
        if experts < 1:
            raise InvalidJobError(f"{experts} is no number of experts; give at least 1")
        dp = replace(self, ep=1).resized(world_size).dp
        shared = (ep for ep in range(min(self.ep, dp), 0, -1) if not dp % ep and not experts % ep)
        return replace(self, dp=dp, ep=next(shared))

    def coordinates(self, rank: int) -> Coordinates:
        """Position of `rank` in each dimension of parallelism.

        Raises:
            InvalidJobError: when there is no such rank in the topology.
        """
        if not 0 <= rank < self.world_size:
            raise InvalidJobError(
                f"topology {self} has no rank {rank}; its ranks are 0 to {self.world_size - 1}"
            )
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(dp, tp, pp, dp % self.ep)

    def rank_at(self, *, dp: int, tp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    def dense_replicas(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same non-expert units as `rank`, itself included, ascending."""
        at = self.coordinates(rank)
        return tuple(self.rank_at(dp=dp, tp=at.tp, pp=at.pp) for dp in range(self.dp))

    def expert_replicas(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same experts as `rank`, itself included, ascending."""
        at = self.coordinates(rank)
        return tuple(
            self.rank_at(dp=dp, tp=at.tp, pp=at.pp) for dp in range(at.ep, self.dp, self.ep)
        )
