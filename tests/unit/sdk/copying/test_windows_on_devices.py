"""Saves of a window from a device: each leaves the bytes of the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernel import HERE, HostDevice, HostKernel

import holdfast._init
from holdfast._capture import windows
from holdfast._copying.device_hashes import DeviceHasher
from holdfast._copying.devices import Device, DeviceMove
from holdfast._copying.engine import CopyPlan, plan_copy, with_device_moves
from holdfast._copying.gathering import GATHERED_BYTES_MAX
from holdfast._restoring import restore
from holdfast._session import protected
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.layouts import PIECE_BYTES

pytestmark = pytest.mark.usefixtures("deterministic")

WAIT_S = 20
COUNTER_BYTES = 8
"""Larger tensors are played as if they were on a device; step counters are in host memory."""


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plays a device on host memory; returns the number of gathered tensors of each plan."""
    counts: list[int] = []

    def plan_as_on_device(
        ranges: Sequence[tuple[int, int, torch.Tensor]], staged: Any, size: int, **gaps: int
    ) -> CopyPlan:
        here = [one for one in ranges if one[2].numel() <= COUNTER_BYTES]
        there = sorted((start, flat) for start, _, flat in ranges if flat.numel() > COUNTER_BYTES)
        moves = [DeviceMove(start, flat.numel(), flat) for start, flat in there]
        plan = with_device_moves(plan_copy(here, staged, size), moves, GATHERED_BYTES_MAX, **gaps)
        counts.append(len(plan.gather.tensors))
        return plan

    def device_of(tensors: Iterable[torch.Tensor]) -> Device:
        list(tensors)
        return HostDevice()

    hasher = DeviceHasher(HostKernel)
    hasher.prepare([HERE], PIECE_BYTES)
    monkeypatch.setattr(windows, "plan_copy", plan_as_on_device)
    monkeypatch.setattr(restore, "plan_copy", plan_as_on_device)
    monkeypatch.setattr(holdfast._init, "device_of", device_of)
    monkeypatch.setattr(protected, "hasher_of_process", lambda: hasher)
    return counts


@pytest.mark.parametrize("repeats", list(Repeats))
def test_a_window_whose_small_tensors_are_gathered_is_restored(
    repeats: Repeats,
    gathered: list[int],
    make_trainer: Any,
    open_session: Any,
    tmp_path: Path,
    same: Callable[[dict[str, Any], dict[str, Any]], None],
) -> None:
    policy, trainer = SparseWindows(window=3, repeats=repeats), make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), policy=policy, start_wait_s=WAIT_S)
    states = [trainer.state()]
    for step in range(1, 8):  # everything, and two windows
        trainer.train()
        states.append(trainer.state())
        session.save(step).staged.result(WAIT_S)
    session.close()
    assert all(count > 1 for count in gathered)
    other = make_trainer(seed=99)
    session = open_session(other, FakeDaemon(tmp_path, epoch=2), policy=policy)
    done = session.restore()
    assert done == (7 if repeats is Repeats.OPTIMIZER else 5)
    for step in range(done + 1, 8):
        other.train()
        session.save(step)
    same(other.state(), states[7])
