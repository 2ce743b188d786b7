from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast._digests import BLOCK_BYTES, BLOCK_WORDS, block_sums, digest_of

LENGTHS = (0, 1, 7, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 9, 11 * BLOCK_BYTES + 3)


def some_bytes(length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), dtype=torch.uint8, generator=generator)


def plainly(flat: torch.Tensor) -> list[int]:
    """The sums as their definition has them, one word after the other."""
    mask, state, weights = (1 << 64) - 1, 0, []
    for _ in range(BLOCK_WORDS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        weights.append((z ^ (z >> 31)) | 1)
    data = bytes(flat.tolist())
    data += bytes(-len(data) % BLOCK_BYTES)
    sums = []
    for block in range(0, len(data), BLOCK_BYTES):
        total = 0
        for index, weight in enumerate(weights):
            at = block + 8 * index
            word = int.from_bytes(data[at : at + 8], "little")
            total += (word ^ (word >> 32)) * weight
        total &= mask
        sums.append(total - (1 << 64) if total >> 63 else total)
    return sums


@pytest.mark.parametrize("length", LENGTHS)
def test_the_sums_are_those_of_their_definition(length: int) -> None:
    flat = some_bytes(length)
    assert block_sums(flat).tolist() == plainly(flat)


def test_bytes_that_begin_anywhere_in_memory_have_the_same_sums() -> None:
    flat = some_bytes(2 * BLOCK_BYTES + 100)
    for offset in (1, 4, 8):
        room = torch.cat([torch.zeros(offset, dtype=torch.uint8), flat])
        assert torch.equal(block_sums(room[offset:]), block_sums(flat)), offset


def test_what_is_summed_in_parts_has_the_same_sums() -> None:
    flat = some_bytes(7 * BLOCK_BYTES + 5)
    assert torch.equal(block_sums(flat, at_once=3), block_sums(flat))


def sums_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(block_sums(tensor.reshape(-1).view(torch.uint8)).tolist())


def digest_alone(tensor: torch.Tensor) -> int:
    return digest_of([tensor])


ways = pytest.mark.parametrize("look", [sums_of, digest_alone])


@ways
@pytest.mark.parametrize("length", [n for n in LENGTHS if n])
def test_every_changed_bit_shows(look: Callable[[torch.Tensor], object], length: int) -> None:
    flat = some_bytes(length)
    before = look(flat)
    for at in {0, length // 2, length - 1}:
        for bit in range(8):
            flat[at] ^= 1 << bit
            assert look(flat) != before, (at, bit)
            flat[at] ^= 1 << bit
    assert look(flat) == before


@ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_values_that_changed_places_show(
    look: Callable[[torch.Tensor], object], dtype: torch.dtype
) -> None:
    """Powers of two, which differ in few bits, near and far from each other."""
    places = [0, 1, 2, 4, 16, 256, 1024, BLOCK_WORDS, 2 * BLOCK_WORDS, 5 * BLOCK_WORDS - 1]
    found = set()
    for place in places:
        values = torch.ones(5 * BLOCK_WORDS).to(dtype)
        values[place] = 2
        found.add(look(values))
    assert len(found) == len(places)


@ways
def test_blocks_that_changed_places_show(look: Callable[[torch.Tensor], object]) -> None:
    one, other = some_bytes(BLOCK_BYTES, 1), some_bytes(BLOCK_BYTES, 2)
    assert look(torch.cat([one, other])) != look(torch.cat([other, one]))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.tensor([], dtype=torch.float32),
        torch.arange(9, dtype=torch.int16).view(3, 3),
        torch.ones(3, dtype=torch.complex64),
    ],
    ids=["bool", "empty", "int16", "complex"],
)
def test_a_tensor_of_any_dtype_and_shape_has_a_digest(tensor: torch.Tensor) -> None:
    assert digest_of([tensor]) == digest_of([tensor.clone()])
    assert sums_of(tensor) == sums_of(tensor.clone())
