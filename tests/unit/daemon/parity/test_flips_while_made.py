"""A bit that flips in a parity block while it is made is never among what its digests are of."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from two_generations import NEW, OLD, PIECE, Members, changed

from holdfast_core.errors import CorruptError
from holdfast_core.protection.codes import BlockId
from holdfast_core.snapshots.layouts import piece_digests
from holdfast_daemon.parity.build import build_from_chunks
from holdfast_daemon.parity.combining import Effort, Stream
from holdfast_daemon.parity.update import build_from_changes

OWNER = 1
SIZES = [700, 640, 1000, 1024]


@dataclass
class Striking:
    """Passes bytes on, and flips a bit of the block before the n-th bytes arrive."""

    inner: Stream
    world: World

    def read_into(self, view: memoryview) -> None:
        self.world.reads += 1
        if self.world.reads == self.world.strike_at:
            self.world.room[self.world.byte] ^= 0x20
        self.inner.read_into(view)

    def close(self) -> None:
        self.inner.close()


@dataclass
class World(Members):
    room: memoryview = field(default_factory=lambda: memoryview(bytearray(4096)))
    """What is struck."""
    strike_at: int = 0
    byte: int = 0
    reads: int = 0

    def open(self, *asked, **named):  # type: ignore[no-untyped-def]
        return Striking(super().open(*asked, **named), self)

    def open_change(self, *asked, **named):  # type: ignore[no-untyped-def]
        return Striking(super().open_change(*asked, **named), self)


def world_of(seed: int) -> World:
    rng = random.Random(seed)
    old = [rng.randbytes(size) for size in SIZES]
    return World(old=old, new=[changed(p, {0, 2, 5, len(p) // PIECE - 1}, rng) for p in old])


def right(world: World) -> tuple[bytes, bytes]:
    """The newer block and its digests, made in peace."""
    return Members(old=world.old, new=world.new).block(NEW, OWNER)


@pytest.mark.parametrize("seed", range(40))
def test_digests_of_a_built_block_are_of_what_it_should_hold(seed: int) -> None:
    world = world_of(seed)
    expected, digests = right(world)
    rng = random.Random(seed)
    world.source, world.strike_at = world.new, rng.randint(1, 20)
    world.byte = rng.randrange(len(expected))
    used, made = build_from_chunks(
        world.room,
        code=world.code,
        which=BlockId(OWNER),
        sources=world.manifests(NEW, OWNER),
        fetch=world,
        effort=Effort(threads=1, stride_bytes=2 * PIECE),
    )
    assert (used, made) == (len(expected), digests)


def test_digests_of_an_updated_block_are_of_what_it_should_hold() -> None:
    found = 0
    for seed in range(200):
        world = world_of(seed)
        expected, digests = right(world)
        older, older_digests = Members(old=world.old, new=world.new).block(OLD, OWNER)
        rng = random.Random(seed)
        world.strike_at, world.byte = rng.randint(1, 12), rng.randrange(len(expected))
        try:
            used, made = build_from_changes(
                world.room,
                memoryview(older),
                older_digests,
                code=world.code,
                which=BlockId(OWNER),
                before=world.manifests(OLD, OWNER),
                after=world.manifests(NEW, OWNER),
                fetch=world,
                effort=Effort(threads=1, stride_bytes=PIECE),
            )
        except CorruptError:
            found += 1
            continue
        assert made == digests
        found += piece_digests(world.room[:used], PIECE) != digests
    assert found > 100, "too few flips struck the block"
