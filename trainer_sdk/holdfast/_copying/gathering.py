"""Gathering small tensors on a device, so that one copy moves many of them.

Each copy from or to a device takes some microseconds, however few bytes it moves: 20,000 copies
take longer than a gigabyte. So small tensors that are neighbours in the slot are collected in one
tensor on their device, by a few kernels, and are copied in runs. A restore does the reverse.

A run also covers the gaps between its tensors: alignment, and small tensors in host memory, such as
Adam's step counters. So tensors in a gap must be copied after the run has arrived, in the same
capture: a save of a window, whose other saves fill the slot as well, allows only gaps that align
the next tensor (`ALIGNING_GAP_MAX`), in which nothing lies. If a tensor of a run ends in one piece
and the next tensor begins in another piece, the next one does not join the run, because experts
that a snapshot may leave out begin on pieces of their own.
"""

from __future__ import annotations

import logging
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
    moves: Sequence[DeviceMove], piece_bytes: int, small_bytes: int, gap_bytes: int
) -> tuple[list[DeviceMove], Gather]:
    """Replace the moves of tensors of at most `small_bytes` by moves of runs with several tensors.

    Args:
        moves: moves of whole tensors, in the order of the slot.
        gap_bytes: largest gap between two tensors of one run, which overwrites it with zeros.

    Returns:
        The moves to make once the tensors are collected, in the order of the slot, and the Gather
        that collects them.
    """
    # Give each run with several tensors a place in the common tensor.
    placed_runs, taken = [], 0
    for run in _runs(moves, piece_bytes, small_bytes, gap_bytes):
        nbytes = _end(run[-1]) - run[0].start
        fits = len(run) > 1 and taken + nbytes <= ROOM_BYTES_MAX
        placed_runs.append((taken if fits else None, run))
        taken += round_up(nbytes, TENSOR_ALIGNMENT) if fits else 0
    if not taken:
        return list(moves), Gather()
    device = moves[0].flat.device
    try:
        room = torch.zeros(taken, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        _report_full(device)
        return list(moves), Gather()
    gathered: list[DeviceMove] = []
    tensors: list[torch.Tensor] = []
    ranges: list[torch.Tensor] = []
    # Move each such run at once, and all other tensors one by one.
    for at, run in placed_runs:
        if at is None:
            gathered += run
            continue
        first, nbytes = run[0].start, _end(run[-1]) - run[0].start
        gathered.append(DeviceMove(first, nbytes, room[at : at + nbytes]))
        tensors += [move.flat for move in run]
        ranges += [room[at + m.start - first : at + _end(m) - first] for m in run]
    return gathered, Gather(tuple(tensors), tuple(ranges))


def _runs(
    moves: Sequence[DeviceMove], piece_bytes: int, small_bytes: int, gap_bytes: int
) -> list[list[DeviceMove]]:
    """Divide `moves` into runs. A tensor that is not small, or that is on another device than the
    first tensor, is a run by itself."""
    runs: list[list[DeviceMove]] = []
    last: DeviceMove | None = None
    """The previous move, if the next one may join its run."""
    for move in moves:
        small = move.nbytes <= small_bytes and move.flat.device == moves[0].flat.device
        if (
            small
            and last is not None
            and move.start - _end(last) <= gap_bytes
            and move.start // piece_bytes == (_end(last) - 1) // piece_bytes
        ):
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
