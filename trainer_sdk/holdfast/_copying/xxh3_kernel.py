"""The xxh3-64 of pieces, computed on the device that holds them, as one Triton kernel.

A CPU reads the memory at the rate of its threads, and waits for the copy. A device reads its own
memory many times as fast, before the copy. XXH3 allows that: within a block of 1,024 bytes the
sixteen stripes of 64 bytes are only added to eight accumulators, so they are computed side by side.
The accumulators of successive blocks depend on each other, so one program hashes one piece; a
snapshot has thousands of pieces.

The arithmetic is that of the published specification of XXH3 (64 bits, seed 0, default secret), for
inputs of more than 240 bytes, and here of whole blocks. Only `device_hashes` imports this module,
and only for tensors on a device: importing Triton takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from holdfast._copying.device_hashes import BLOCK_BYTES, SegmentTable

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (
    _PRIME32_3,
    _PRIME64_1,
    _PRIME64_2,
    _PRIME64_3,
    _PRIME64_4,
    _PRIME32_2,
    _PRIME64_5,
    _PRIME32_1,
)
_WARPS = 1
"""Warps of a program. One holds four words of each thread; more of them would wait for each other
after each block."""


def _hash_pieces(rows, firsts, begins, bases, keys, digests, blocks):  # type: ignore[no-untyped-def]
    """Hash one piece. The bytes of its stripe number s are at `base + 64 · s`, where `base` is that
    of the last of its segments whose first stripe is at most s.

    Args:
        rows: int64 [programs]: row of the table for each program.
        firsts: int64 [rows + 1]: number of the first segment of each row.
        begins: int64 [segments]: first stripe of each segment.
        bases: int64 [segments].
        keys: int64 [161]: see `_keys`.
        digests: int64 [programs], written.
        blocks: number of blocks of 1,024 bytes in each piece.
    """
    row = tl.load(rows + tl.program_id(0))
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    stripe, word, lane = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :], tl.arange(0, 8)
    key = tl.load(keys + stripe * 8 + word).to(tl.uint64, bitcast=True)
    scramble = tl.load(keys + 128 + lane).to(tl.uint64, bitcast=True)
    acc = tl.load(keys + 144 + lane).to(tl.uint64, bitcast=True)
    base_of_first = tl.load(bases + first)
    for block in range(blocks):
        # Find the address of each stripe; most pieces have one segment.
        at = block * 16 + stripe
        base = base_of_first + tl.zeros_like(at).to(tl.int64)
        for segment in range(first + 1, end):
            base = tl.where(at >= tl.load(begins + segment), tl.load(bases + segment), base)
        address = base + at * 64
        value = tl.load((address + word * 8).to(tl.pointer_type(tl.uint64)))
        other = tl.load((address + (word ^ 1) * 8).to(tl.pointer_type(tl.uint64)))
        # Add all stripes. The last stripe of the piece has another key, and follows the loop.
        mixed = value ^ key
        product = (mixed & 0xFFFFFFFF) * (mixed >> 32) + other
        acc += tl.sum(tl.where(at < blocks * 16 - 1, product, 0), axis=0)
        scrambled = (acc ^ (acc >> 47) ^ scramble) * 0x9E3779B1
        acc = tl.where(block < blocks - 1, scrambled, acc)
    # Add the last stripe.
    address = tl.load(bases + end - 1) + (blocks * 16 - 1) * 64
    value = tl.load((address + lane * 8).to(tl.pointer_type(tl.uint64)))
    other = tl.load((address + (lane ^ 1) * 8).to(tl.pointer_type(tl.uint64)))
    mixed = value ^ tl.load(keys + 136 + lane).to(tl.uint64, bitcast=True)
    acc += (mixed & 0xFFFFFFFF) * (mixed >> 32) + other
    # Merge the accumulators: fold the products of 128 bits of each pair.
    acc ^= tl.load(keys + 152 + lane).to(tl.uint64, bitcast=True)
    low, high = tl.split(tl.reshape(acc, (4, 2)))
    digest = tl.sum((low * high) ^ tl.umulhi(low, high), axis=0)
    digest += tl.load(keys + 160).to(tl.uint64, bitcast=True)
    digest ^= digest >> 37
    digest *= 0x165667919E3779F9
    digest ^= digest >> 32
    tl.store(digests + tl.program_id(0), digest.to(tl.int64, bitcast=True))


# Nothing is specialised, so that no capture waits for the compiler.
_hash_pieces_kernel: Any = triton.jit(
    _hash_pieces,
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["rows", "firsts", "begins", "bases", "keys", "digests"],
)


class PieceKernel:
    """The kernel and its tables, for one device and one size of pieces.

    Args:
        piece_bytes: a multiple of 1,024.
    """

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        assert piece_bytes % BLOCK_BYTES == 0, piece_bytes
        self._device, self._blocks = device, piece_bytes // BLOCK_BYTES
        self._keys = _keys(device, piece_bytes)

    def __call__(self, table: SegmentTable, rows: torch.Tensor) -> torch.Tensor:
        """Queue the digests of the pieces in `rows` of the table on the current stream.

        Args:
            rows: int64 [pieces], on the device.

        Returns:
            int64 [pieces], on the device: the bits of the digests.
        """
        digests = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        _hash_pieces_kernel[(len(rows),)](
            rows,
            table.firsts,
            table.begins,
            table.bases,
            self._keys,
            digests,
            self._blocks,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # it computes with integers; otherwise Triton warns
        )
        return digests


def _keys(device: torch.device, piece_bytes: int) -> torch.Tensor:
    """Return int64 [161]: [16, 8] keys of the stripes of a block, [8] of the scramble, [8] of the
    last stripe, [8] accumulators at the start, [8] of the merge, and what the length adds."""

    def word(at: int) -> int:
        return int.from_bytes(_SECRET[at : at + 8], "little")

    lanes = range(8)
    words = [word(8 * stripe + 8 * lane) for stripe in range(16) for lane in lanes]
    words += [word(128 + 8 * lane) for lane in lanes]
    words += [word(192 - 64 - 7 + 8 * lane) for lane in lanes]
    words += _START
    words += [word(11 + 8 * lane) for lane in lanes]
    words.append(piece_bytes * _PRIME64_1 % 2**64)
    signed = [value - (1 << 64) if value >> 63 else value for value in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)
