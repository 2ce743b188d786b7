"""Gathering small tensors on a device, so that one copy moves many of them.

Each copy from or to a device takes some microseconds, however few bytes it moves: 20,000 copies
take longer than a gigabyte. So small tensors that are neighbours in the slot are collected in one
tensor on their device, by a few kernels, and are copied in runs. A restore does the reverse.

A run also covers the gaps between its tensors: alignment, and small tensors in host memory, such as
Adam's step counters. So tensors in a gap must be copied after the run has arrived, in the same
capture: a save of a window, whose other saves fill the slot as well, allows only gaps that align
the next tensor (`ALIGNING_GAP_MAX`), in which nothing lies. A run may span any number of pieces:
whoever leaves out pieces, or finds them in several slots, cuts its moves there.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from holdfast._copying.devices import DeviceMove
from holdfast_core.snapshots.layouts import TENSOR_ALIGNMENT, round_up

GATHERED_BYTES_MAX = 128 * 1024
"""Size of the largest tensors to gather. `python -m benchmarks.gpu.saving` measured it: on an H200,
gathering reduces the time of a snapshot to 0.6 for tensors of 64 KiB and to 0.8 for tensors of 128
KiB, and changes nothing for tensors of 256 KiB."""

GAP_BYTES_MAX = 1024
"""Largest gap between two tensors of one run."""

ALIGNING_GAP_MAX = TENSOR_ALIGNMENT - 1
"""Largest gap between two tensors in which no third one can lie."""

ROOM_BYTES_MAX = 256 * 1024 * 1024
"""Largest memory of the device for gathered tensors. Further tensors are copied one by one."""

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Gather:
    """Small tensors of one device, and their ranges of a common tensor on that device."""

    tensors: tuple[torch.Tensor, ...] = ()
    """Bytes of each small tensor: uint8 [bytes]."""
    ranges: tuple[torch.Tensor, ...] = ()
    """Range of each small tensor in the common one: uint8 [bytes]."""

    def collect(self) -> None:
        """Queue the copies of all tensors into their ranges."""
        if self.tensors:
            torch._foreach_copy_(self.ranges, self.tensors)

    def distribute(self) -> None:
        """Queue the copies of all ranges into their tensors."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self.ranges)


def gather(
    moves: Sequence[DeviceMove], small_bytes: int, gap_bytes: int
) -> tuple[list[DeviceMove], Gather]:
    """Replace the moves of tensors of at most `small_bytes` by moves of runs with several tensors.

    Args:
        moves: moves of whole tensors, in the order of the slot.
        gap_bytes: largest gap between two tensors of one run, which overwrites it with zeros.

    Returns:
        The moves to make once the tensors are collected, in the order of the slot, and the Gather
        that collects them.
    """
    # Give each run with several tensors a place in the common tensor, as far as they fit.
    placed_runs: list[tuple[int | None, Sequence[DeviceMove]]] = []
    taken = 0
    for run in _runs(moves, small_bytes, gap_bytes):
        fitting = bisect_right(run, run[0].start + ROOM_BYTES_MAX - taken, key=_end)
        together, others = (run[:fitting], run[fitting:]) if fitting > 1 else ([], run)
        if together:
            placed_runs.append((taken, together))
            taken += round_up(_end(together[-1]) - run[0].start, TENSOR_ALIGNMENT)
        placed_runs.append((None, others))
    if not taken:
        return list(moves), Gather()
    device = moves[0].flat.device
    try:
        room = torch.zeros(taken, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        _report_full(device)
        return list(moves), Gather()
    if device.type == "cuda":
        # Kernels queued on this stream may still use that memory, and it is set to zero behind
        # them. A capture waits for neither.
        torch.cuda.current_stream(device).synchronize()
    cut: list[DeviceMove] = []
    tensors: list[torch.Tensor] = []
    ranges: list[torch.Tensor] = []
    # Move each such run at once, and all other tensors one by one.
    for at, placed in placed_runs:
        if at is None:
            cut += placed
            continue
        first, nbytes = placed[0].start, _end(placed[-1]) - placed[0].start
        cut.append(DeviceMove(first, nbytes, room[at : at + nbytes]))
        tensors += [move.flat for move in placed]
        ranges += [room[at + m.start - first : at + _end(m) - first] for m in placed]
    return cut, Gather(tuple(tensors), tuple(ranges))


def _runs(moves: Sequence[DeviceMove], small_bytes: int, gap_bytes: int) -> list[list[DeviceMove]]:
    """Divide `moves` into runs. A tensor that is not small, or that is on another device than the
    first tensor, is a run by itself."""
    runs: list[list[DeviceMove]] = []
    last: DeviceMove | None = None
    """The previous move, if the next one may join its run."""
    for move in moves:
        small = move.nbytes <= small_bytes and move.flat.device == moves[0].flat.device
        if small and last is not None and move.start - _end(last) <= gap_bytes:
            runs[-1].append(move)
        else:
            runs.append([move])
        last = move if small else None
    return runs


def _end(move: DeviceMove) -> int:
    return move.start + move.nbytes


@lru_cache(maxsize=64)
def _report_full(device: torch.device) -> None:
    """Log once that `device` has no room to gather tensors."""
    _log.warning(
        "%s has no memory left to gather small tensors; they are copied one by one, which takes "
        "longer",
        device,
    )
