"""Small tensors of a device, gathered there so that one copy moves many of them.

A copy from or to a device takes some microseconds, however few its bytes: 20,000 of them take
longer than a gigabyte. So small tensors that are neighbours in the slot are collected in one tensor
of their device, by a few kernels, and cross over in runs. A restore goes the other way.

A run covers the gaps between its tensors as well: alignment, and small tensors in host memory, such
as Adam's counts of steps. So what lies in a gap has to be copied after the run has arrived. A run
never leaves the piece in which one of its tensors ends for a tensor that begins in another piece:
experts that a snapshot may leave out begin on pieces of their own.
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
"""Size of the largest tensors that are gathered. `python -m benchmarks.gpu.saving` decides: on an
H100 a snapshot takes 0.6 of the time with tensors of 64 KiB gathered, 0.8 with those of 128 KiB,
and as long as without with those of 256 KiB."""

GAP_BYTES_MAX = 1024
"""Largest gap between two tensors of one run."""

ROOM_BYTES_MAX = 256 * 1024 * 1024
"""Memory of the device that is taken for gathered tensors; further ones are copied one by one."""

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Gather:
    """Tensors of one device, and the ranges of another tensor there through which they pass."""

    tensors: tuple[torch.Tensor, ...] = ()
    """Bytes of each tensor: uint8 [bytes]."""
    ranges: tuple[torch.Tensor, ...] = ()
    """Range of each of them: uint8 [bytes]."""

    def collect(self) -> None:
        """Queue the copies of all tensors into their ranges."""
        if self.tensors:
            torch._foreach_copy_(self.ranges, self.tensors)

    def distribute(self) -> None:
        """Queue the copies of all ranges into their tensors."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self.ranges)


def gather(
    moves: Sequence[DeviceMove], piece_bytes: int, small_bytes: int
) -> tuple[list[DeviceMove], Gather]:
    """Replace the moves of tensors of at most `small_bytes` by moves of runs, where a run has
    several tensors.

    Args:
        moves: moves of whole tensors, in the order of the slot.

    Returns:
        The moves to make once the tensors are collected, in the order of the slot, and what
        collects them.
    """
    found, taken = [], 0
    for run in _runs(moves, piece_bytes, small_bytes):
        nbytes = _end(run[-1]) - run[0].start
        fits = len(run) > 1 and taken + nbytes <= ROOM_BYTES_MAX
        found.append((taken if fits else None, run))
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
    for at, run in found:
        if at is None:
            gathered += run
            continue
        first, nbytes = run[0].start, _end(run[-1]) - run[0].start
        gathered.append(DeviceMove(first, nbytes, room[at : at + nbytes]))
        tensors += [move.flat for move in run]
        ranges += [room[at + m.start - first : at + _end(m) - first] for m in run]
    return gathered, Gather(tuple(tensors), tuple(ranges))


def _runs(
    moves: Sequence[DeviceMove], piece_bytes: int, small_bytes: int
) -> list[list[DeviceMove]]:
    """Divide `moves` into runs; a tensor that is not small is a run of its own, and so is one that
    is on another device than the first."""
    runs: list[list[DeviceMove]] = []
    last: DeviceMove | None = None
    """The move before, if another one may join it."""
    for move in moves:
        small = move.nbytes <= small_bytes and move.flat.device == moves[0].flat.device
        if (
            small
            and last is not None
            and move.start - _end(last) <= GAP_BYTES_MAX
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
