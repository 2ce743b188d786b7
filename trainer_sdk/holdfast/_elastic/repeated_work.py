"""Let other ranks repeat samples of this rank's work, to find a device that is wrong each time.

In a checked step each rank keeps the input of a few operations, and of an optimizer's step of a few
parameters (`samples`). It performs these samples on copies, and so does another rank of its kind.
What both get is compared, and a third rank decides where they differ
(`holdfast_core.repeated_work`). The live state is only read. One sample is sent at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast._agree.exchange import Exchange
from holdfast._elastic.kinds import kind_of_rank
from holdfast._elastic.work_samples import (
    BYTES_MAX,
    KEPT_BYTES_MAX,
    OPERATIONS,
    STEPS,
    Operations,
    WorkSample,
    left_out,
    perform,
    steps_of_optimizers,
)
from holdfast_core.repeated_work import Dispute, Verdict, disputes, judge, seconds

_log = logging.getLogger("holdfast")
_SAMPLE_BYTES_MAX = BYTES_MAX + (1 << 20)
"""Most bytes of a sample, with what it has besides tensors."""


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank states before any sample is sent."""

    kind: int | None
    sizes: list[int]
    """Bytes of each of its samples."""
    digests: list[int]
    """Their digests, so that all ranks perform the same bytes."""

    @property
    def is_bounded(self) -> bool:
        most = len(self.sizes) == len(self.digests) <= OPERATIONS + STEPS
        return most and all(0 < size <= _SAMPLE_BYTES_MAX for size in self.sizes)


class _Results(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank got for each of its own samples, and for those that it repeated."""

    own: list[int | None]
    repeated: list[int | None]


class _Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank adds to each dispute."""

    digests: list[int | None]
    """What it gets for it, if it is the third rank."""
    texts: list[str]
    """What it is, if it is its owner."""
    units: list[str]
    cost_s: float
    """Time that all of this has taken."""


_OFFER = msgspec.json.Decoder(_Offer)
_RESULTS = msgspec.json.Decoder(_Results)
_OPINION = msgspec.json.Decoder(_Opinion)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What repeating samples of work has shown. Equal on all ranks."""

    verdict: Verdict
    text: str
    """First sample that is disputed."""
    unit: str
    """First unit of a disputed sample; empty if none belongs to one."""
    samples: tuple[int, ...]
    """For each rank, number of its samples that were compared."""
    cost_s: float
    """Time that it took on rank 0."""


class RepeatedWork:
    """The samples of one process, in the checked steps since a recovery."""

    def __init__(self) -> None:
        self._turn = 0
        """Number of checks, equal on all ranks."""
        self._listed: Mapping[object, int] = {}
        """The operations of the newest execution."""
        self._names: Collection[str] = frozenset()
        """Operations that this rank has executed, which it repeats for others."""
        self._kept: list[WorkSample] = []

    def begin(self, *, keeps: bool) -> Operations:
        """Begin to note the operations of an execution.

        Args:
            keeps: whether to keep the input of some. That of an earlier execution is dropped.
        """
        self.drop()
        return Operations(self._listed if keeps else {})

    def end(self, operations: Operations) -> None:
        """End what `begin` began."""
        operations.end()
        self._listed, self._kept, operations.kept = operations.listed, operations.kept, []
        self._names = {*self._names, *operations.names}

    def drop(self) -> None:
        """Drop the input that was kept."""
        self._kept = []

    def compare(
        self,
        exchange: Exchange,
        rank: int,
        optimizers: Sequence[Any],
        units: Callable[[torch.Tensor], str],
    ) -> Comparison:
        """Repeat samples of the ranks on other ranks, when all gradients are complete and no
        optimizer has stepped. Collective.

        Args:
            rank: of this process in the present world.
            units: returns the unit of a parameter, or an empty text.

        Raises:
            UnreachableError: a rank does not take part.
        """
        began_s = time.monotonic()
        turn, self._turn = self._turn, self._turn + 1
        # State what there is. Each rank finds the same pairs.
        kind, samples = self._prepare(optimizers, units)
        sizes = [len(each.data) for each in samples]
        own_offer = _Offer(kind=kind, sizes=sizes, digests=[each.digest for each in samples])
        stated = msgspec.json.encode(own_offer)
        offers = [_OFFER.decode(text) for text in exchange.gather(stated)]
        kinds = [each.kind if each.is_bounded else None for each in offers]
        pairs = seconds(kinds, turn)
        repeated = self._repeat(exchange, rank, pairs, offers, samples, optimizers)
        own = [
            None
            if pairs[rank] is None
            else perform(each.data, each.digest, self._names, optimizers)
            for each in samples
        ]
        stated = msgspec.json.encode(_Results(own=own, repeated=repeated))
        results = [_RESULTS.decode(text) for text in exchange.gather(stated)]
        owns, repeats = [each.own for each in results], [each.repeated for each in results]
        # Let a third rank repeat what two have got differently.
        disputed = disputes(kinds, turn, owns, repeats)
        digests = self._decide(exchange, rank, disputed, offers, samples, optimizers)
        opinion = _Opinion(
            digests=digests,
            texts=[samples[one.sample].text if rank == one.owner else "" for one in disputed],
            units=[samples[one.sample].unit if rank == one.owner else "" for one in disputed],
            cost_s=time.monotonic() - began_s,
        )
        opinions = [_OPINION.decode(text) for text in exchange.gather(msgspec.json.encode(opinion))]
        thirds = [
            None if one.third is None else opinions[one.third].digests[number]
            for number, one in enumerate(disputed)
        ]
        of_owners = [(opinions[one.owner], number) for number, one in enumerate(disputed)]
        compared = tuple(
            0
            if to is None
            else sum(None not in pair for pair in zip(owns[owner], repeats[to], strict=False))
            for owner, to in enumerate(pairs)
        )
        return Comparison(
            verdict=judge(disputed, owns, repeats, thirds),
            text=next((each.texts[number] for each, number in of_owners), ""),
            unit=next((u for each, number in of_owners if (u := each.units[number])), ""),
            samples=compared,
            cost_s=opinions[0].cost_s,
        )

    def _repeat(
        self,
        exchange: Exchange,
        rank: int,
        pairs: Sequence[int | None],
        offers: Sequence[_Offer],
        samples: Sequence[WorkSample],
        optimizers: Sequence[Any],
    ) -> list[int | None]:
        """Send one sample after the other to the second rank, and repeat those of another rank.
        Return what this rank gets for them. Collective.

        Args:
            pairs: for each rank, the one that repeats its samples.
        """
        source = pairs.index(rank) if rank in pairs else None
        counts = [len(o.sizes) for o, to in zip(offers, pairs, strict=True) if to is not None]
        repeated = list[int | None]()
        for at in range(max(counts, default=0)):
            given, taken = b"", 0
            if pairs[rank] is not None and at < len(samples):
                given = samples[at].data
            if source is not None and at < len(offers[source].sizes):
                taken = offers[source].sizes[at]
            data = _send(exchange, len(offers), given, pairs[rank], source, taken)
            if source is not None and taken:
                digest = offers[source].digests[at]
                repeated.append(perform(data, digest, self._names, optimizers))
        return repeated

    def _decide(
        self,
        exchange: Exchange,
        rank: int,
        disputed: Sequence[Dispute],
        offers: Sequence[_Offer],
        samples: Sequence[WorkSample],
        optimizers: Sequence[Any],
    ) -> list[int | None]:
        """Send each disputed sample to its third rank. Return what this rank gets for those of
        which it is the third one. Collective."""
        digests: list[int | None] = [None] * len(disputed)
        for number, one in enumerate(disputed):
            if one.third is None:
                continue
            given = samples[one.sample].data if rank == one.owner else b""
            taken = offers[one.owner].sizes[one.sample] if rank == one.third else 0
            to, source = (one.third if given else None), (one.owner if taken else None)
            data = _send(exchange, len(offers), given, to, source, taken)
            if taken:
                digest = offers[one.owner].digests[one.sample]
                digests[number] = perform(data, digest, self._names, optimizers)
        return digests

    def _prepare(
        self, optimizers: Sequence[Any], units: Callable[[torch.Tensor], str]
    ) -> tuple[int | None, list[WorkSample]]:
        """The kind of this rank, and its samples. With None, and no samples, it takes no part."""
        kept, self._kept = self._kept, []
        try:
            if self._turn == 1 and (names := left_out(optimizers)):
                _log.warning(
                    "the steps of %s are not repeated on other ranks: only those of classes of "
                    "torch.optim are",
                    ", ".join(names),
                )
            room = KEPT_BYTES_MAX - sum(len(sample.data) for sample in kept)
            samples = [*kept, *steps_of_optimizers(optimizers, units, room)]
            return kind_of_rank(), [p for p in samples if len(p.data) <= _SAMPLE_BYTES_MAX]
        except Exception:  # torch, or a user's optimizer, may raise anything
            _log.warning("this rank's work is not repeated in this step", exc_info=True)
            return None, []


def _send(
    exchange: Exchange, ranks: int, given: bytes, to: int | None, source: int | None, taken: int
) -> bytes:
    """Send `given` to a rank, and return the `taken` bytes from another one. Collective."""
    given_bytes, taken_bytes = [0] * ranks, [0] * ranks
    if to is not None:
        given_bytes[to] = len(given)
    if source is not None:
        taken_bytes[source] = taken
    own = torch.empty(0, dtype=torch.uint8, device="cpu")
    if to is not None and given:
        own = torch.frombuffer(bytearray(given), dtype=torch.uint8)
    room = torch.empty(taken, dtype=torch.uint8, device="cpu")
    exchange.deal(own, given_bytes, room, taken_bytes)
    return room.numpy().tobytes()
