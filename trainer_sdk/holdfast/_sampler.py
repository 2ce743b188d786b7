"""Distributed sampler whose position can be saved and restored exactly (PEC §3.2).

Samples consumed before a crash are skipped without being loaded. The position counts the samples
that training has consumed, not those that a loader has prefetched, so it is exact with worker
processes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from holdfast_core.errors import InvalidJobError, LayoutMismatchError

_GOLDEN = 0x9E3779B97F4A7C15
"""Quotient of 2**64 and the golden ratio: keeps the orders of neighbouring seeds and epochs
apart."""


class RecoverableSampler(Sampler[int]):
    """Indices of a data set for one rank: shuffled by seed and epoch, the same number on each rank.

    Call `advance` with the number of samples that training has consumed (a batch) before the step
    that consumed them is saved. Without data-loader workers, `counting=True` lets iteration advance
    the position instead; a loader with workers prefetches, so iteration would count samples that
    training has not seen yet.

    At the end of an epoch (an exhausted iterator, or `advance` to its end) the next `iter` begins
    the following epoch.

    Args:
        data: anything with a length, in samples.
        rank: this data-parallel rank.
        replicas: number of data-parallel ranks.
        seed: seed of the shuffle; equal on all ranks.
        shuffle: False for the order of the data set.
        drop_last: drop the tail that does not fill all ranks; otherwise repeat indices from the
            epoch's beginning until it does.
        counting: whether iteration advances the position.

    Raises:
        InvalidJobError: when `rank` is not one of `replicas`, or a rank would get nothing.
    """

    def __init__(
        self,
        data: Sized,
        *,
        rank: int = 0,
        replicas: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        counting: bool = False,
    ) -> None:
        if not 0 <= rank < replicas:
            raise InvalidJobError(f"rank={rank} is not one of replicas={replicas}")
        self._total = len(data)
        self._rank = rank
        self._replicas = replicas
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._counting = counting
        self._length = self._total // replicas if drop_last else -(-self._total // replicas)
        if not self._length:
            raise InvalidJobError(
                f"{self._total} samples over {replicas} ranks leave a rank without any; use fewer "
                f"ranks or drop_last=False"
            )
        self._epoch = 0
        self._position = 0

    @property
    def epoch(self) -> int:
        """Number of completed passes over the data."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of this epoch's samples that this rank has consumed."""
        return self._position

    def __len__(self) -> int:
        """Number of this rank's samples that are left in the epoch."""
        return self._length - self._position

    def __iter__(self) -> Iterator[int]:
        indices = self._indices(self._epoch)[self._position :]
        for index in indices:
            if self._counting:
                # Before the yield: once a sample is handed out, it counts as consumed.
                self.advance(1)
            yield index

    def advance(self, samples: int) -> None:
        """Count `samples` more of this rank's samples as consumed by training.

        Raises:
            InvalidJobError: when the epoch has fewer left.
        """
        if not 0 <= samples <= len(self):
            raise InvalidJobError(
                f"advance({samples}) with {len(self)} samples left in epoch {self._epoch}; advance "
                f"by what the epoch's batches held"
            )
        self._position += samples
        if self._position == self._length:
            self._epoch, self._position = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Position of training, and the values that the order depends on."""
        return {"epoch": self._epoch, "position": self._position, "order": self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of `state_dict()`.

        Raises:
            LayoutMismatchError: when the size of the data set, its split over ranks, the seed or
                the shuffle differ, so that the position would mean other samples.
        """
        saved, here = state_dict["order"], self._order()
        differ = [name for name in here if saved.get(name) != here[name]]
        if differ:
            raise LayoutMismatchError(
                "; ".join(
                    f"sampler {name} is {here[name]}, in the snapshot {saved.get(name)}"
                    for name in differ
                )
            )
        self._epoch, self._position = state_dict["epoch"], state_dict["position"]

    def _order(self) -> dict[str, Any]:
        return {
            "samples": self._total,
            "rank": self._rank,
            "replicas": self._replicas,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def _indices(self, epoch: int) -> list[int]:
        if self._shuffle:
            # One number from two, chosen so that epochs of neighbouring seeds do not repeat.
            generator = torch.Generator().manual_seed((self._seed * _GOLDEN + epoch) % 2**63)
            order = torch.randperm(self._total, generator=generator)
        else:
            order = torch.arange(self._total)
        wanted = self._length * self._replicas
        if wanted > self._total:
            order = order.repeat(-(-wanted // self._total))
        indices: list[int] = order[self._rank : wanted : self._replicas].tolist()
        return indices
