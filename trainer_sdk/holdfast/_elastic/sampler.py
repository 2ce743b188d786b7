"""Batches for a training whose number of ranks changes.

All epochs together form one endless sequence of samples, and each step takes the next samples of
it, whatever the number of ranks. So the position is one number, equal on all ranks. Every sample of
an epoch is used exactly once, whatever worlds there were: if an epoch cannot fill a batch, the
batch continues with the start of the next epoch. Nothing is dropped or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import Sampler

from holdfast._sampler import check_order, order_of
from holdfast_core.errors import InvalidJobError


class Ranks(Protocol):
    """The ranks that train together at present: `holdfast.elastic.World`."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""


class ElasticSampler(Sampler[list[int]]):
    """The batches of one rank, for `DataLoader(data, batch_sampler=…)`.

    Of a global batch of B samples, rank i of n takes the samples from B·i/n to B·(i+1)/n. If n does
    not divide B, some ranks have one sample more. So multiply the mean loss of this rank's samples
    by their number over `global_batch`; then the sum over ranks does not depend on their number.

    Iteration never ends. It starts at the position of training and in the present world, so start a
    new iteration after a recovery (`step.resumed`). Call `advance` in each step, before its save.

    Args:
        data: anything whose length is the number of samples.
        batch: number of samples in one step, over all ranks.
        world: the ranks that train together, which may change.
        per_rank: True if `batch` is the number for each rank, so that a step has fewer samples with
            fewer ranks.
        seed: seed of the shuffle; equal on all ranks.
        shuffle: False keeps the order of the data set.

    Raises:
        InvalidJobError: there are no samples, or `batch` is below 1.
    """

    def __init__(
        self,
        data: Sized,
        batch: int,
        world: Ranks,
        *,
        per_rank: bool = False,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._total, self._batch, self._world = len(data), batch, world
        self._per_rank, self._seed, self._shuffle = per_rank, seed, shuffle
        if min(self._total, batch) < 1:
            raise InvalidJobError(
                f"batches of {batch} samples out of {self._total}: give at least 1 of each"
            )
        self._position = 0

    @property
    def global_batch(self) -> int:
        """Number of samples in one step, over all ranks of the present world."""
        return self._batch * self._world.size if self._per_rank else self._batch

    @property
    def position(self) -> int:
        """Number of samples that training has consumed, on all ranks and in all epochs."""
        return self._position

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank, from the position of training on.

        Raises:
            InvalidJobError: a batch has fewer samples than there are ranks.
        """
        rank, size, batch = self._world.rank, self._world.size, self.global_batch
        if batch < size:
            raise InvalidJobError(
                f"a batch of {batch} samples over {size} ranks leaves some without any; give at "
                f"least one for each rank that the job may have"
            )
        start, end = batch * rank // size, batch * (rank + 1) // size
        epoch, order = -1, list[int]()
        position = self._position
        while True:
            mine = []
            for at in range(position + start, position + end):
                if at // self._total != epoch:
                    epoch = at // self._total
                    order = order_of(self._total, self._seed, epoch, shuffle=self._shuffle).tolist()
                mine.append(order[at % self._total])
            yield mine
            position += batch

    def advance(self) -> None:
        """Count one more global batch as consumed by training."""
        self._position += self.global_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, and the values that determine the order."""
        return {"position": self._position, "order": self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position that any rank saved, in a world of any size.

        Raises:
            LayoutMismatchError: the size of the data set, the seed or the shuffle differs.
        """
        check_order(state_dict["order"], self._order())
        self._position = state_dict["position"]

    def _order(self) -> dict[str, Any]:
        return {"samples": self._total, "seed": self._seed, "shuffle": self._shuffle}
