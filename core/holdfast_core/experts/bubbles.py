"""Copies in the idle time of a pipeline: how much of a snapshot fits there.

MoEtion §5.3, algorithm 4. Pipeline schedules leave each stage idle for a while (bubbles); copies
that run then compete with nothing. What does not fit runs beside the computation.

The SDK measures bubbles, and counts on those that all recent steps had (`common_windows`); until it
has measured some, it plans none. The paper estimates them from the schedule instead. Without
pipeline parallelism there are no bubbles, and everything runs beside the computation, as it would
without this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class CopySchedule:
    """Where the bytes of one stage's snapshot are copied, in order of its payload."""

    window_bytes: tuple[int, ...]
    """Bytes for each bubble: multiples of 64, except for the last of the payload."""
    compute_bytes: int
    """Bytes copied beside the computation: W* of the paper."""
    reason: str

    @property
    def bubble_bytes(self) -> int:
        """Bytes copied in bubbles: W^bubble of the paper."""
        return sum(self.window_bytes)


def copy_s(nbytes: int, bandwidth_bytes_s: float) -> float:
    """Seconds that copying a stage's snapshot takes: EstimateCheckpointTime of the paper.

    Raises:
        InvalidJobError: when the bandwidth is not above 0 or the size below 0.
    """
    if nbytes < 0 or not bandwidth_bytes_s > 0:
        raise InvalidJobError(
            f"{nbytes} bytes at {bandwidth_bytes_s} bytes/s: give a size of at least 0 and a "
            f"bandwidth above 0"
        )
    return nbytes / bandwidth_bytes_s


def common_windows(steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The bubbles to count on, in seconds, from those measured in recent steps.

    The i-th is the shortest i-th bubble of all steps, and there are as many as every step had: what
    is planned into them would have fitted into each of the steps. Without measurements there are
    none.
    """
    if not steps:
        return ()
    return tuple(min(of_step) for of_step in zip(*steps, strict=False))


def schedule_copies(
    nbytes: int, bandwidth_bytes_s: float, windows_s: Sequence[float], *, stages: int
) -> CopySchedule:
    """Divide a stage's copies between its bubbles and its computation (MoEtion algorithm 4).

    When the copy takes longer than all bubbles, the first ⌊n · t_bubble / t_ss⌋ bytes go into them
    and the rest runs beside the computation; otherwise all goes into them. Bubbles are filled in
    order.

    Args:
        nbytes: length of the stage's snapshot on one rank.
        bandwidth_bytes_s: bandwidth of the copy.
        windows_s: the stage's bubbles in one step: `common_windows`.
        stages: number of pipeline stages; with 1, `windows_s` does not matter.

    Raises:
        InvalidJobError: as `copy_s`, and when a bubble is shorter than 0.
    """
    snapshot_s = copy_s(nbytes, bandwidth_bytes_s)
    if any(not window >= 0 for window in windows_s):
        raise InvalidJobError(f"windows_s={list(windows_s)}: a bubble lasts at least 0 seconds")
    if stages <= 1:
        return CopySchedule(
            window_bytes=(),
            compute_bytes=nbytes,
            reason="no pipeline parallelism, so no bubbles: all is copied beside the computation",
        )
    left, filled = nbytes, []
    for window_s in windows_s:
        fits = int(bandwidth_bytes_s * window_s)
        took = left if fits >= left else fits - fits % TENSOR_ALIGNMENT
        filled.append(took)
        left -= took
    return CopySchedule(
        window_bytes=tuple(filled),
        compute_bytes=left,
        reason=f"the copy takes {snapshot_s:.3f} s, {len(filled)} bubbles last "
        f"{sum(windows_s):.3f} s: {nbytes - left} of {nbytes} bytes go into them",
    )
