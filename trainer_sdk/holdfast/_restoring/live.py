"""The hand-over of live state: new ranks get their state from the surviving ranks.

The surviving ranks do not change. A new rank allocates the optimizer states that they have, and
receives each tensor whole from one rank that holds it. It takes its extras from the rank that gives
it the tensors that do not belong to experts. Experts in seats are not handed over here: they have
moved before (`holdfast._moe.reseating`).

If the random generators of all surviving ranks have the same state, the new rank gets that state.
Otherwise its generators are seeded from the epoch, the step and the rank, because a script with one
state for each rank does not want two ranks to draw the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import xxhash

from holdfast._agree.exchange import Exchange
from holdfast._capture.partial_state import PartialState
from holdfast._capture.taking_over import keep_shared
from holdfast._copying.strided import fill_strided
from holdfast._restoring.fit import Offer, Wanted, check_cover, make_room, wanted_of_offers
from holdfast._restoring.other_world import with_all_values
from holdfast._restoring.scatter import scatter
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.collect import (
    Stateful,
    collect,
    generators_of,
    put_back,
    put_back_groups,
    seed_generators,
)
from holdfast._state.extras import decode_extras, dtype_name, encode_extras
from holdfast_core.protection.standing import StandingVerdict
from holdfast_core.snapshots.units import UnitKind

_log = logging.getLogger("holdfast")


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """The statement of one rank."""

    problem: str = ""
    """Why this rank cannot take part; empty if it can."""
    offers: tuple[Offer, ...] = ()
    """The tensors that it gives to new ranks."""
    extras: bytes = b""
    """Its extras, if it gives any tensors."""
    generators: int = 0
    """Digest of the states of its random generators."""
    saves: int = 0
    """Number of saves that its loop has called."""
    owes: bool = False
    """Whether it has lost tokens to make up for."""
    policy: bytes = b""
    """The part of the policy's state that all ranks share; only from the lowest surviving rank."""


_GIVEN = msgspec.msgpack.Decoder(_Given)


@torch.no_grad()
def packed_tensors(live: LiveState) -> dict[str, TensorSource]:
    """Return the tensors of a rank that keeps its state, by name, and pack those that are not
    contiguous."""
    sources = {source.name: source for source in live.sources()}
    for source in sources.values():
        if source.staging is not None:
            source.staging.copy_(source.tensor)
    return sources


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """The state of the policy with which a rank continues."""

    state: PartialState
    replenishing: bool
    """Whether any rank has lost tokens to make up for. Equal on all ranks."""


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """One rank's part in a hand-over.

    Args:
        rank: this rank in the new world.
        verdict: names the new ranks, and the ranks from which they get their state.
        experts: state of the policy in this rank's previous session.
        apart: ranks that neither give nor get a state here, because they restore the recovery line.
    """

    live: LiveState
    stateful: Mapping[str, Stateful]
    rank: int
    exchange: Exchange
    verdict: StandingVerdict
    experts: PartialState
    apart: Collection[int] = ()

    def run(self, epoch: int, problem: str) -> KeptExperts | None:
        """Run the hand-over. Return None if any rank failed. Collective.

        Args:
            problem: why this rank cannot take part; empty if it can.

        Raises:
            UnreachableError: a rank does not take part.
        """
        # First agreement: every rank can take part, and says what it gives.
        new, own = self.rank in self.verdict.sources, _Given(problem=problem)
        if not problem and self._keeps(self.rank):
            own = self._try(self._give)
        given = self._agree(own)
        if given is None:
            return None
        if not self.verdict.sources:
            return self._kept_experts(given)
        # Second agreement: new ranks have made room for the tensors, and the others have packed
        # theirs.
        extras: dict[str, Any] = {}
        sources: dict[str, TensorSource] = {}

        def prepare() -> _Given:
            nonlocal extras
            if new:
                extras = self._extras(given)
                sources.update(self._make_room(given, extras))
            else:
                sources.update(packed_tensors(self.live))
            return _Given()

        if self._agree(self._try(prepare)) is None:
            return None
        # Send the tensors. Third agreement: new ranks have loaded everything else.
        scatter(self.exchange, [one.offers for one in given], sources, self.rank)

        def finish() -> _Given:
            if new:
                self._finish(epoch, given, extras, sources)
            return _Given()

        return None if self._agree(self._try(finish)) is None else self._kept_experts(given)

    # --- inside -----------------------------------------------------------------------------------

    def _keeps(self, rank: int) -> bool:
        """Whether `rank` has the state that new ranks get."""
        return rank not in self.verdict.sources and rank not in self.apart

    @staticmethod
    def _try(work: Callable[[], _Given]) -> _Given:
        try:
            return work()
        except Exception as error:  # The user's load_state_dict or torch may raise anything.
            return _Given(problem=f"{type(error).__name__}: {error}")

    def _agree(self, own: _Given) -> list[_Given] | None:
        """Exchange statements. Return None if any rank has a problem. Collective."""
        texts = self.exchange.gather(msgspec.msgpack.encode(own))
        given = [_GIVEN.decode(text) for text in texts]
        for rank, one in enumerate(given):
            if one.problem:
                _log.warning("training does not go on live: rank %d: %s", rank, one.problem)
                return None
        return given

    def _give(self) -> _Given:
        """Make the statement of a surviving rank: what it gives to new ranks."""
        # Offer the tensors that the verdict assigns to this rank.
        offers = []
        sources = self.verdict.sources
        dense = {new for new, (one, _) in sources.items() if one == self.rank}
        experts = {new for new, (_, one) in sources.items() if one == self.rank}
        for source in self.live.sources():
            if source.seats is not None:  # Experts in seats have already moved.
                continue
            of_experts = source.of_stack or source.unit.kind is UnitKind.EXPERT
            to = experts if of_experts else dense
            if to:
                offers.append(
                    Offer(
                        tensor=source.name,
                        dtype=dtype_name(source.tensor.dtype),
                        shape=source.shape,
                        start=source.start,
                        nbytes=source.nbytes,
                        replicas=tuple(sorted({self.rank, *to})),
                    )
                )
        # Add the extras, and the state of the policy that all ranks share.
        extras = b""
        if dense or experts:
            extras = encode_extras(collect(self.live, self.stateful, self.verdict.step))
        generators = xxhash.xxh3_64_intdigest(generators_of(self.live))
        first = next(rank for rank in range(self.rank + 1) if self._keeps(rank))
        return _Given(
            offers=tuple(offers),
            extras=extras,
            generators=generators,
            saves=self.experts.ledger.snapshots,
            owes=bool(self.experts.replenishing.owed),
            policy=keep_shared(self.experts).encode() if self.rank == first else b"",
        )

    def _kept_experts(self, given: Sequence[_Given]) -> KeptExperts:
        """Return the policy's state of this rank. A new rank has the state that all ranks share,
        and has counted nothing. If some ranks called one save more than others before their world
        ended, all continue with the highest number."""
        state = self.experts
        if self.rank in self.verdict.sources:
            first = next(one for rank, one in enumerate(given) if self._keeps(rank))
            state = PartialState.decode(first.policy)
        ledger = replace(state.ledger, snapshots=max(one.saves for one in given))
        return KeptExperts(replace(state, ledger=ledger), any(one.owes for one in given))

    def _extras(self, given: Sequence[_Given]) -> dict[str, Any]:
        """Return the extras for this new rank."""
        dense, experts = (decode_extras(given[one].extras) for one in self._sources)
        return with_all_values(dense, [experts], self.live)

    @property
    def _sources(self) -> tuple[int, int]:
        return self.verdict.sources[self.rank]

    def _make_room(
        self, given: Sequence[_Given], extras: Mapping[str, Any]
    ) -> dict[str, TensorSource]:
        """Allocate and drop tensors of this new rank, so that it has those of the others."""
        put_back_groups(self.live, extras)
        wanted = wanted_of_offers(self.rank, [given[one].offers for one in set(self._sources)])
        check_cover(wanted, self.live)
        for source in self.live.sources():
            if source.seats is not None:
                dtype, shape = dtype_name(source.tensor.dtype), tuple(source.tensor.shape)
                wanted[source.name] = Wanted(
                    tensor=source.name, dtype=dtype, shape=shape, ranges=[]
                )
        return make_room(self.live, wanted, extras)

    def _finish(
        self,
        epoch: int,
        given: Sequence[_Given],
        extras: Mapping[str, Any],
        sources: Mapping[str, TensorSource],
    ) -> None:
        """Load the received state of this new rank."""
        for source in sources.values():
            if source.staging is not None:
                fill_strided(source.tensor, source.staging)
        put_back(self.live, self.stateful, extras)
        others = [one for rank, one in enumerate(given) if self._keeps(rank)]
        if len({one.generators for one in others}) > 1:
            seed_generators(epoch, self.verdict.step, self.rank)
