"""The part that each rank has in a step whose samples are the same in any world.

A job that continues with fewer nodes, and later with more, should not change what it learns:
neither the samples of a step, nor the weight of any of them. So the global batch is constant, and
each world divides it again. Two things easily go wrong there. Ranks that do not divide the batch
get parts of different sizes, and the mean of their means is not the mean of the batch. And larger
parts may not fit a rank's memory, so a rank computes them in several passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward pass of a rank: at least one."""

    start: int
    """Place of the first sample within the global batch."""
    end: int
    """Place behind the last sample."""
    summed_weight: float
    """Factor for the mean loss of these samples if gradients are summed over the ranks, and for the
    loss that a script sums over the ranks to report it."""
    averaged_weight: float
    """Factor for the mean loss of these samples if gradients are averaged over the ranks, as DDP
    and FSDP2 do."""
    last: bool
    """Whether it is the last of its step: gradients are reduced in its pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """One rank's part of a global batch.

    Parts follow each other in the order of the ranks, and their sizes differ by at most one. All
    ranks have the same number of passes, because a pass may contain collectives.
    """

    global_batch: int
    """Number of samples in a step, over all ranks."""
    ranks: int
    """Number of data-parallel ranks, which divide the batch among them."""
    rank: int
    """This one of them."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's passes, in order."""

    @property
    def start(self) -> int:
        """Place of this rank's first sample within the global batch."""
        return self.micro_batches[0].start

    @property
    def end(self) -> int:
        """Place behind this rank's last sample."""
        return self.micro_batches[-1].end

    @property
    def passes(self) -> int:
        """Number of forward and backward passes in a step, equal on all ranks."""
        return len(self.micro_batches)


def plan_batch(
    global_batch: int,
    *,
    rank: int,
    size: int,
    micro_batch: int | None = None,
    topology: Topology | None = None,
) -> BatchPlan:
    """Divide `global_batch` samples among the ranks of a world, and return the part of `rank`.

    Each rank computes its part in as few passes as `micro_batch` allows. A rank that has fewer
    samples than passes, which needs `micro_batch=1`, repeats its last sample with weight 0.

    Args:
        size: number of ranks of the world.
        micro_batch: largest number of samples that a rank computes in one pass; None: no limit.
        topology: degrees of tensor and pipeline parallelism; dp follows from `size`. Ranks that
            share a replica of the model have the same part. None: each rank has a replica.

    Raises:
        InvalidJobError: there are fewer samples than data-parallel ranks; `topology` does not fit
            `size`; there is no such rank; a number of samples is below 1.
    """
    for name, samples in (("global_batch", global_batch), ("micro_batch", micro_batch)):
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise InvalidJobError(f"{name}={samples!r} is no number of samples; give at least 1")
    present = (topology or Topology(dp=1)).resized(size)
    ranks, place = present.dp, present.coordinates(rank).dp
    if global_batch < ranks:
        raise InvalidJobError(
            f"a batch of {global_batch} samples over {ranks} ranks leaves some without any; give "
            f"at least one for each data-parallel rank that the job may have"
        )

    # This rank's part, and as many passes as the largest part needs. Parts differ by one sample at
    # most, so at most one pass is left without a sample.
    start, end = global_batch * place // ranks, global_batch * (place + 1) // ranks
    largest = -(-global_batch // ranks)
    passes = -(-largest // (largest if micro_batch is None else micro_batch))
    filled = min(passes, end - start)
    cuts = [start + (end - start) * at // filled for at in range(filled + 1)]
    parts = [(begin, stop, stop - begin) for begin, stop in pairwise(cuts)]
    if filled < passes:
        parts.append((end - 1, end, 0))
    return BatchPlan(
        global_batch=global_batch,
        ranks=ranks,
        rank=place,
        micro_batches=tuple(
            MicroBatch(
                start=begin,
                end=stop,
                summed_weight=counted / global_batch,
                averaged_weight=counted * ranks / global_batch,
                last=at == passes,
            )
            for at, (begin, stop, counted) in enumerate(parts, start=1)
        ),
    )
