"""Copies that are spread over a step. Host memory plays the device, and numbers play the time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernel import HERE, HostDevice, HostKernel

import holdfast._init
from holdfast._copying.device_hashes import DeviceHasher
from holdfast._copying.devices import (
    GROUPS_AHEAD,
    DeviceMove,
    Download,
    Fence,
    GroupCopy,
    MoveGroup,
    PacedDownload,
)
from holdfast._copying.engine import (
    BLOCK_PIECES,
    GROUP_BLOCKS,
    CopyEngine,
    CopyPlan,
    plan_copy,
    with_device_moves,
)
from holdfast._copying.pacing import SPREAD, STEPS_KEPT, Pace
from holdfast._copying.placed import Placed
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.layouts import Layout, piece_digests

PIECE = 1024
GROUPS = 8
GROUP_BYTES = PIECE * BLOCK_PIECES * GROUP_BLOCKS
LEFT_S = 160.0
WAIT_S = 20.0


class Clock:
    """A clock that each look at it advances by a second."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Arrived:
    def wait(self) -> None: ...

    def is_over(self) -> bool:
        return True


class Watched(HostDevice):
    """Notes the time at which each group begins."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begun_s: list[float] = []

    def download(
        self, groups: Sequence[MoveGroup], slot: memoryview, fence: Fence
    ) -> Download | None:
        def begin(number: int) -> GroupCopy:
            self.fetch(groups[number].moves, slot, fence)
            self.begun_s.append(self._clock.now_s)
            return Arrived()

        return PacedDownload(len(groups), begin)


@pytest.fixture
def flat() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (GROUPS * GROUP_BYTES,), dtype=torch.uint8, generator=generator)


@pytest.fixture
def plan(flat: torch.Tensor) -> CopyPlan:
    move = DeviceMove(0, flat.numel(), flat)
    return with_device_moves(plan_copy((), (), PIECE), [move], 0)


@pytest.fixture
def target(flat: torch.Tensor) -> Placed:
    layout = Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=flat.numel(),
        extras_capacity=PIECE,
        piece_bytes=PIECE,
    )
    raw = (ctypes.c_ubyte * layout.arena_bytes(3))()
    arena = memoryview(raw).cast("B")
    return Placed(arena=arena, address=ctypes.addressof(raw), layout=layout, slot=1)


def hasher_of() -> DeviceHasher:
    hasher = DeviceHasher(HostKernel)
    hasher.prepare([HERE], PIECE)
    return hasher


def paced(clock: Clock, *left_s: float) -> Pace:
    pace = Pace(clock)
    for seconds in left_s:
        pace.note(seconds)
    return pace


def never() -> bool:
    return False


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_are_spread_over_a_part_of_the_time_that_training_leaves(
    flat: torch.Tensor, plan: CopyPlan, target: Placed, threads: int
) -> None:
    clock = Clock()
    device = Watched(clock)
    engine, pace = CopyEngine(threads, device, hasher_of()), paced(clock, LEFT_S)
    digests = engine.capture(plan, target, None, hurry=never, pace=pace)
    engine.close()
    assert digests.tobytes() == piece_digests(bytes(flat.numpy()), PIECE)
    group_s = SPREAD * LEFT_S / GROUPS
    first_s, behind = device.begun_s[0], 1 + GROUPS_AHEAD
    for number, begun_s in enumerate(device.begun_s[behind:], behind):
        assert begun_s - first_s >= (number - GROUPS_AHEAD) * group_s
    assert device.begun_s[-1] - first_s < SPREAD * LEFT_S + 10 * threads


def test_the_rest_is_copied_at_once_when_training_waits(plan: CopyPlan, target: Placed) -> None:
    clock = Clock()
    device = Watched(clock)
    waits_s = SPREAD * LEFT_S / 4
    pace, copied = paced(clock, LEFT_S), list[tuple[int, float]]()
    CopyEngine(1, device, hasher_of()).capture(
        plan,
        target,
        None,
        hurry=lambda: clock.now_s >= waits_s,
        pace=pace,
        copied=lambda: copied.append((len(device.begun_s), clock.now_s)),
    )
    ((groups, copied_s),) = copied
    assert groups == GROUPS
    assert waits_s <= copied_s < waits_s + 10
    assert sum(begun_s < waits_s for begun_s in device.begun_s) <= GROUPS // 2


def test_copies_that_threads_hash_are_held_back_by_nothing_else(
    plan: CopyPlan, target: Placed
) -> None:
    clock = Clock()
    pace = paced(clock, LEFT_S)
    CopyEngine(1, Watched(clock)).capture(plan, target, None, hurry=never, pace=pace)
    assert clock.now_s == 0


def test_nothing_is_held_back_before_a_step_has_been_measured(
    plan: CopyPlan, target: Placed
) -> None:
    clock = Clock()
    CopyEngine(1, Watched(clock), hasher_of()).capture(
        plan, target, None, hurry=never, pace=Pace(clock)
    )
    assert clock.now_s <= 2 * GROUPS * GROUP_BLOCKS  # no look more than one for each block


def test_the_shortest_of_the_recent_steps_counts() -> None:
    clock = Clock()
    turns = paced(clock, 1.0, *[LEFT_S, 2 * LEFT_S, 3 * LEFT_S, 4 * LEFT_S][:STEPS_KEPT]).turns(10)
    turns.begin()
    began_s = clock.now_s
    assert turns.left_s(10) == began_s + SPREAD * LEFT_S - clock.now_s


class Timed(HostDevice):
    """A device whose fences are numbers.

    Args:
        waited: whether it copies a save only once training waits for it, which takes a second fence
            after that of the save.
    """

    def __init__(self, *, waited: bool) -> None:
        self.asked: list[tuple[Fence, Fence]] = []
        self._waited, self._fences, self._saves = waited, 0, 0
        self._changed = threading.Condition()

    def fence(self) -> Fence:
        with self._changed:
            self._fences += 1
            self._changed.notify_all()
            return self._fences

    def between_s(self, first: Fence, second: Fence) -> float:
        self.asked.append((first, second))
        return LEFT_S

    def download(
        self, groups: Sequence[MoveGroup], slot: memoryview, fence: Fence
    ) -> Download | None:
        self._saves += 1
        with self._changed:
            if self._waited:
                assert self._changed.wait_for(lambda: self._fences >= 2 * self._saves, WAIT_S)
        return super().download(groups, slot, fence)


@pytest.mark.parametrize("waited", [False, True])
def test_a_session_measures_how_long_training_leaves_its_tensors(
    make_trainer: Any,
    open_session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    waited: bool,
) -> None:
    device = Timed(waited=waited)
    monkeypatch.setattr(holdfast._init, "device_of", lambda tensors: device)
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path), start_wait_s=WAIT_S)
    for step in range(1, 4):
        handle = session.save(step)
        if not waited:
            handle.staged.result(WAIT_S)
        trainer.train()
        handle.staged.result(WAIT_S)
    session.close()
    assert device.asked == ([(1, 2), (3, 4)] if waited else [])
    noted = session._saver.pipeline._pace._left_s
    assert len(noted) == 2
    assert list(noted) == [LEFT_S] * 2 if waited else all(0 < left_s < WAIT_S for left_s in noted)
