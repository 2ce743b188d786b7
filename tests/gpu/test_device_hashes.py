"""Devices compute the digests that threads would, of the bytes that are copied, and verify with
them what they copy out of an arena."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import Machine, Part, random_bytes, room_for, slot_range
from torch import nn

import holdfast
from holdfast._copying.arena import MappedArena
from holdfast._copying.device_hashes import DeviceHasher
from holdfast._copying.engine import BadPieceError, CopyEngine
from holdfast._copying.placed import Placed
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


@contextmanager
def reading(target: Placed, file: Path) -> Iterator[Placed]:
    """Map the arena of `target` from a file anew, only to be read, as each restore does."""
    file.write_bytes(target.arena)
    arena = MappedArena(os.open(file, os.O_RDONLY), len(target.arena), writable=False)
    try:
        yield replace(target, arena=arena.view(0, arena.nbytes), address=arena.address)
    finally:
        arena.close()


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


def test_a_restore_is_verified_where_it_arrives(
    machine: Machine, engine: CopyEngine, arenas: Path
) -> None:
    half = PIECE_BYTES // 2
    lengths = (40 * PIECE_BYTES, half, half, PIECE_BYTES + 64, 192, half, half - 256, half + 7)
    parts: list[Part] = []
    at = 0
    for length in lengths:
        parts.append((at, 0, random_bytes(machine, length, seed=at + 1)))
        at += length
    plan, target = machine.plan(parts), room_for(at)
    captured = engine.capture(plan, target, engine._device.fence())
    digests = engine.finish(target, b"", captured)
    wanted = [flat.clone() for _, _, flat in parts]
    for _, _, flat in parts:
        machine.later(flat.zero_)  # the restore comes after it
    with reading(target, arenas / "arena") as source:
        engine.restore(plan, source, at, digests)
        view = torch.frombuffer(source.arena.obj, dtype=torch.uint8)
        assert not view[source.layout.slot_bytes :][:PIECE_BYTES].is_pinned()
    assert engine.verified_on_device_bytes == at // PIECE_BYTES * PIECE_BYTES
    assert all(torch.equal(flat, was) for (_, _, flat), was in zip(parts, wanted, strict=True))


@pytest.mark.parametrize("piece", [0, 33, 40])
def test_a_damaged_piece_of_an_arena_is_named(
    machine: Machine, engine: CopyEngine, arenas: Path, piece: int
) -> None:
    half = 40 * PIECE_BYTES + PIECE_BYTES // 2
    flats = [random_bytes(machine, half), random_bytes(machine, PIECE_BYTES // 2)]
    plan, target = machine.plan([(0, 0, flats[0]), (half, 0, flats[1])]), room_for(41 * PIECE_BYTES)
    captured = engine.capture(plan, target, engine._device.fence())
    digests = engine.finish(target, b"", captured)
    target.view(piece * PIECE_BYTES + 5, 1)[0] ^= 1
    with reading(target, arenas / "arena") as source, pytest.raises(BadPieceError) as caught:
        engine.restore(plan, source, 41 * PIECE_BYTES, digests)
    assert caught.value.piece == piece
    target.view(piece * PIECE_BYTES + 5, 1)[0] ^= 1
    with reading(target, arenas / "arena") as source:
        engine.restore(plan, source, 41 * PIECE_BYTES, digests)
    assert engine.verified_on_device_bytes == 41 * PIECE_BYTES
    assert b"".join(bytes(flat.cpu().numpy()) for flat in flats) == target.read(0, 41 * PIECE_BYTES)


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
