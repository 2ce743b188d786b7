"""Distributed sampler whose position can be saved and restored exactly (PEC §3.2).

After a crash, the samples that were consumed before are skipped without being loaded. The position
counts the samples that training has consumed, and not those that a loader has only prefetched, so
it is exact with worker processes as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from holdfast_core.errors import InvalidJobError, LayoutMismatchError

_GOLDEN = 0x9E3779B97F4A7C15
"""Quotient of 2**64 and the golden ratio: keeps the orders of neighbouring seeds and epochs
apart."""


def order_of(samples: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """Return the indices of all `samples`, int64, in the order of an epoch; ascending without
    `shuffle`."""
    if not shuffle:
        return torch.arange(samples, device="cpu")
    # One number from two, chosen so that epochs of neighbouring seeds do not repeat.
    generator = torch.Generator().manual_seed((seed * _GOLDEN + epoch) % 2**63)
    return torch.randperm(samples, generator=generator, device="cpu")


def check_order(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise LayoutMismatchError if a value that determines the order differs from the snapshot's,
    so that the saved position would mean other samples."""
    differ = [name for name in here if saved.get(name) != here[name]]
    if differ:
        raise LayoutMismatchError(
            "; ".join(
                f"sampler {name} is {here[name]}, in the snapshot {saved.get(name)}"
                for name in differ
            )
        )


class RecoverableSampler(Sampler[int]):
    """The indices of one rank's samples, shuffled by seed and epoch. Every rank gets equally many.

    Call `advance` with the number of samples that training has consumed (a batch), before you save
    the step that consumed them. Without data-loader workers, `counting=True` advances the position
    during iteration instead. Do not use it with workers: they prefetch, so it would count samples
    that training has not seen yet.

    The position describes all ranks together, so it can be restored in a world of another size,
    which splits the rest of the epoch over its own ranks. A process that stays for such a world
    calls `split` after the restore.

    An epoch ends when the iterator is exhausted or when `advance` reaches its end. The next `iter`
    then begins the following epoch.

    Args:
        data: anything whose length is the number of samples.
        rank: this data-parallel rank.
        replicas: number of data-parallel ranks.
        seed: seed of the shuffle; equal on all ranks.
        shuffle: False keeps the order of the data set.
        drop_last: True drops the last samples if they are too few for all ranks. False repeats
            indices from the start of the epoch until all ranks have equally many.
        counting: whether iteration advances the position.

    Raises:
        InvalidJobError: `rank` is not one of `replicas`, or a rank would get no samples.
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
        self._total = len(data)
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._counting = counting
        self._epoch = self._begin = self._position = 0
        self.split(rank=rank, replicas=replicas)
        self._split_over = replicas

    @property
    def epoch(self) -> int:
        """Number of completed passes over the data."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of samples of this epoch that this rank has consumed since the epoch was last
        split over the ranks."""
        return self._position

    def split(self, *, rank: int, replicas: int) -> None:
        """Split the rest of the epoch over `replicas` data-parallel ranks, of which this one is
        `rank`. The split takes effect with the next sample.

        Raises:
            InvalidJobError: `rank` is not one of `replicas`, or a rank would get no samples.
        """
        if not 0 <= rank < replicas:
            raise InvalidJobError(f"rank={rank} is not one of replicas={replicas}")
        if self._total < replicas and (self._drop_last or not self._total):
            raise InvalidJobError(
                f"{self._total} samples over {replicas} ranks leave a rank without any; use fewer "
                f"ranks or drop_last=False"
            )
        self._rank, self._replicas = rank, replicas

    def __len__(self) -> int:
        """Number of samples that this rank has yet to consume in the epoch."""
        self._apply_split()
        left = self._total - self._begin
        share = left // self._replicas if self._drop_last else -(-left // self._replicas)
        return share - self._position

    def __iter__(self) -> Iterator[int]:
        self._apply_split()
        indices = self._indices(self._epoch)[self._position :]
        for index in indices:
            if self._counting:
                # Advance before the yield: a sample that was handed out counts as consumed.
                self.advance(1)
            yield index

    def advance(self, samples: int) -> None:
        """Count `samples` more of this rank's samples as consumed by training.

        Raises:
            InvalidJobError: the epoch has fewer samples left.
        """
        if not 0 <= samples <= len(self):
            raise InvalidJobError(
                f"advance({samples}) with {len(self)} samples left in epoch {self._epoch}; advance "
                f"by what the epoch's batches held"
            )
        self._position += samples
        self._begin_next_if_over()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, and the values that determine the order."""
        return {
            "epoch": self._epoch,
            "begin": self._begin,
            "position": self._position,
            "replicas": self._split_over,
            "order": self._order(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position that any rank saved, in a world of any size.

        Raises:
            LayoutMismatchError: the size of the data set, the seed or the shuffle differs, so that
                the position would mean other samples.
        """
        saved = state_dict["order"]
        check_order(saved, self._order())
        self._epoch, self._begin = state_dict["epoch"], state_dict.get("begin", 0)
        self._position = state_dict["position"]
        # Older states have the number of ranks within the order, because it could not change then.
        self._split_over = state_dict.get("replicas", saved.get("replicas", self._replicas))

    def _apply_split(self) -> None:
        """From here on, count the position in shares of the present number of ranks."""
        if self._split_over != self._replicas:
            self._begin, self._position = self._begin + self._position * self._split_over, 0
            self._split_over = self._replicas
            self._begin_next_if_over()

    def _begin_next_if_over(self) -> None:
        """Begin the next epoch if nothing is left of this one."""
        if not len(self):
            self._epoch, self._begin, self._position = self._epoch + 1, 0, 0

    def _order(self) -> dict[str, Any]:
        return {
            "samples": self._total,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def _indices(self, epoch: int) -> list[int]:
        order = order_of(self._total, self._seed, epoch, shuffle=self._shuffle)
        wanted = self._begin + (self._position + len(self)) * self._replicas
        if wanted > self._total:
            order = order.repeat(-(-wanted // self._total))
        indices: list[int] = order[self._begin + self._rank : wanted : self._replicas].tolist()
        return indices
