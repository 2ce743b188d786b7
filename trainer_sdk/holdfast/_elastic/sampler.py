"""Batches of a training whose number of ranks changes.

All epochs together are one endless sequence of samples, and a step takes the next ones of it,
whatever the number of ranks is. So the position is one number, equal on all ranks, and each sample
of an epoch is used once by any history of worlds: a batch that an epoch cannot fill takes the
beginning of the next one, and nothing is dropped or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import Sampler

from holdfast._sampler import check_order, order_of
from holdfast_core.errors import InvalidJobError


class Ranks(Protocol):
    """The ranks that train together now: `holdfast.elastic.World`."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""


class ElasticSampler(Sampler[list[int]]):
    """Batches of one rank, for `DataLoader(data, batch_sampler=…)`.

    Of a global batch of B samples, rank i of n takes those from B·i/n to B·(i+1)/n. Where n does
    not divide B, some ranks have one more: weigh the mean loss of this rank's samples by their
    number over `global_batch`, and the sum over ranks does not depend on how many they are.

    Iteration has no end. It begins at the position of training, in the present world: begin anew
    after a restore (`step.resumed`). Call `advance` in each step, before it is saved.

    Args:
        data: anything with a length, in samples.
        batch: samples of one step, over all ranks.
        world: the ranks that train together; it may change.
        per_rank: `batch` is that of each rank, so that a step has fewer samples with fewer ranks.
        seed: seed of the shuffle; equal on all ranks.
        shuffle: False for the order of the data set.

    Raises:
        InvalidJobError: when there are no samples, or `batch` is below 1.
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
        """Samples of one step, over all ranks of the present world."""
        return self._batch * self._world.size if self._per_rank else self._batch

    @property
    def position(self) -> int:
        """Number of samples that training has consumed, on all ranks and in all epochs."""
        return self._position

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of this rank, from the position of training.

        Raises:
            InvalidJobError: when there are more ranks than samples in a batch.
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
        """Position of training, and the values that the order depends on."""
        return {"position": self._position, "order": self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of `state_dict()` of any rank, in a world of any size.

        Raises:
            LayoutMismatchError: when the size of the data set, the seed or the shuffle differ.
        """
        check_order(state_dict["order"], self._order())
        self._position = state_dict["position"]

    def _order(self) -> dict[str, Any]:
        return {"samples": self._total, "seed": self._seed, "shuffle": self._shuffle}
