"""Devices compute the digests that threads would, of the bytes that are copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machines import Machine, Part, random_bytes, room_for, slot_range
from torch import nn

import holdfast
from holdfast._copying.device_hashes import DeviceHasher
from holdfast._copying.engine import CopyEngine
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES, piece_digests

WAIT_S = 60.0
NEW = 7


@pytest.fixture
def hasher(machine: Machine) -> DeviceHasher:
    return machine.hasher()


@pytest.fixture
def engine(machine: Machine, hasher: DeviceHasher) -> Iterator[CopyEngine]:
    made = CopyEngine(2, machine.copier(), hasher)
    made.prepare(PIECE_BYTES)
    assert hasher.state == ("cuda:0" if machine.is_cuda else "cpu")
    yield made
    machine.finish()
    made.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_digests_are_those_of_the_library(
    machine: Machine, engine: CopyEngine, pinned: bool
) -> None:
    half = PIECE_BYTES // 2
    lengths = (40 * PIECE_BYTES, half, half, PIECE_BYTES + 64, 192, half, half - 256, half + 7)
    parts: list[Part] = []
    at = 0
    for length in lengths:
        parts.append((at, 0, random_bytes(machine, length, seed=at + 1)))
        at += length
    target, device = room_for(at), engine._device
    if pinned:
        device.register(*slot_range(target))
    captured = engine.capture(machine.plan(parts), target, device.fence())
    device.unregister()
    digests = engine.finish(target, b"", captured)
    assert digests == piece_digests(target.read(0, at), PIECE_BYTES)
    assert engine.hashed_on_device_bytes == at // PIECE_BYTES * PIECE_BYTES


def test_what_was_queued_before_the_fence_is_hashed(machine: Machine, engine: CopyEngine) -> None:
    flat = torch.zeros(20 * PIECE_BYTES, dtype=torch.uint8, device=machine.kind)
    plan, target = machine.plan([(0, 0, flat)]), room_for(20 * PIECE_BYTES)
    engine.capture(plan, target, engine._device.fence())  # loads all kernels, which may wait
    machine.finish()
    machine.later(lambda: flat.fill_(NEW))
    captured = engine.capture(plan, target, engine._device.fence())
    digests = engine.finish(target, b"", captured)
    assert target.read(0, 20 * PIECE_BYTES) == bytes([NEW]) * 20 * PIECE_BYTES
    assert digests == piece_digests(target.read(0, 20 * PIECE_BYTES), PIECE_BYTES)
    assert engine.hashed_on_device_bytes == 20 * PIECE_BYTES


def test_digests_of_20_000_small_tensors_are_those_of_the_library(
    machine: Machine, engine: CopyEngine
) -> None:
    parts = [
        (at * 192, 0, random_bytes(machine, 130 + at % 60, seed=at)) for at in range(machine.small)
    ]
    target, end = room_for(192 * machine.small), 192 * machine.small
    captured = engine.capture(machine.plan(parts), target, engine._device.fence())
    found = engine.finish(target, b"", captured)
    assert found == piece_digests(target.read(0, end), PIECE_BYTES)
    if machine.is_cuda:  # gathered; every third piece ends with a gap
        assert engine.hashed_on_device_bytes >= end // 2


def test_a_manifest_is_the_same_wherever_its_digests_are_computed(
    machine: Machine, arenas: Path
) -> None:
    manifests = []
    for on_device in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(513, 700) for _ in range(3))).to(machine.kind)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        directory = arenas / str(on_device)
        directory.mkdir()
        daemon = FakeDaemon(directory)
        with holdfast.init(
            model=model,
            optimizer=optimizer,
            daemon=daemon,
            settings=holdfast.Settings(device_checksums=on_device),
        ) as session:
            session.prepare()
            session.save(1).committed.result(WAIT_S)
            counters = session.counters
        manifests.append(daemon.sealed()[Generation(1, 1)].manifest.digests)
        used = on_device and machine.is_cuda
        assert (counters.hashing, counters.hashed_on_device_bytes > 0) == (
            "cuda:0" if used else "",
            used,
        )
    assert manifests[0] == manifests[1]
