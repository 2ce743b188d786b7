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
from holdfast_core.batches import BatchPlan, plan_batch
from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology


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

    A step takes one batch for each of `plan.micro_batches`, and multiplies the mean loss of its
    samples by the weight there. Then gradients do not depend on the number of ranks.

    Iteration never ends. It starts at the position of training and in the present world, so start a
    new iteration after a recovery (`step.resumed`). Call `advance` in each step, before its save.

    Args:
        data: anything whose length is the number of samples.
        batch: number of samples in one step, over all ranks.
        world: the ranks that train together, which may change.
        per_rank: True if `batch` is the number for each data-parallel rank, so that a step has
            fewer samples with fewer ranks.
        micro_batch: largest number of samples in one batch of a rank; None: one batch a step.
        topology: as for `holdfast.init`, if tp or pp is above 1.
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
        micro_batch: int | None = None,
        topology: Topology | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._total, self._batch, self._world = len(data), batch, world
        self._per_rank, self._micro_batch = per_rank, micro_batch
        self._topology = topology or Topology(dp=1)
        self._seed, self._shuffle = seed, shuffle
        if min(self._total, batch) < 1:
            raise InvalidJobError(
                f"batches of {batch} samples out of {self._total}: give at least 1 of each"
            )
        self._position = 0

    @property
    def global_batch(self) -> int:
        """Number of samples in one step, over all ranks of the present world."""
        if not self._per_rank:
            return self._batch
        return self._batch * self._topology.resized(self._world.size).dp

    @property
    def plan(self) -> BatchPlan:
        """This rank's part of a step in the present world.

        Raises:
            InvalidJobError: a batch has fewer samples than there are data-parallel ranks, or the
                topology does not fit this world.
        """
        return plan_batch(
            self.global_batch,
            rank=self._world.rank,
            size=self._world.size,
            micro_batch=self._micro_batch,
            topology=self._topology,
        )

    @property
    def samples(self) -> int:
        """Number of samples of the data set."""
        return self._total

    @property
    def position(self) -> int:
        """Number of samples that training has consumed, on all ranks and in all epochs."""
        return self._position

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank, from the position of training on.

        Raises:
            InvalidJobError: as `plan`.
        """
        plan, position = self.plan, self._position
        epoch, order = -1, list[int]()
        while True:
            for part in plan.micro_batches:
                batch = []
                for at in range(position + part.start, position + part.end):
                    if at // self._total != epoch:
                        epoch = at // self._total
                        shuffled = order_of(self._total, self._seed, epoch, shuffle=self._shuffle)
                        order = shuffled.tolist()
                    batch.append(order[at % self._total])
                yield batch
            position += plan.global_batch

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
