"""The same promises of every code, with the daemon's own path for bytes: blocks are built and
updated alike, and what a code is made for comes back byte for byte."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import two_generations as updating
from simulation.checking import expected_block, times
from tests.unit.daemon.parity import test_build as parity
from tests.unit.daemon.parity.test_build import PIECE

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.parity.build import build_from_chunks, put_into, rebuild
from holdfast_daemon.parity.combining import Effort, Stream
from holdfast_daemon.parity.multiplying import multiply_into
from holdfast_daemon.parity.update import build_from_changes
from holdfast_daemon.transport.protocol import Kind

CODES = [Code(3, 2, 1), Code(3, 1, 2), Code(4, 2, 2), Code(6, 4, 2), Code(4, 1, 2), Code(4, 1, 3)]
EFFORTS = [Effort(threads=1, stride_bytes=PIECE), Effort(threads=3, stride_bytes=2 * PIECE)]
SIZES = [11 * PIECE + 7, 0, 5 * PIECE - 1, 9 * PIECE, 3, 20 * PIECE + 33]


def blocks_of(code: Code) -> list[BlockId]:
    return [BlockId(owner, row) for owner in range(code.n) for row in range(code.rows)]


def group_of(code: Code, effort: Effort) -> parity.Members:
    members = parity.group_of(SIZES[: code.n], seed=code.n)
    for block in blocks_of(code):
        room = memoryview(bytearray(b"\xaa" * 4096))
        used, digests = build_from_chunks(
            room,
            code=code,
            which=block,
            sources=sources_of(members, code, block),
            fetch=members,
            effort=effort,
        )
        payloads = {i: members.payloads[i] for i in code.sources_of(block)}
        assert room[:used] == expected_block(code, block.row, payloads, used, PIECE)
        assert digests == piece_digests(bytes(room[:used]), PIECE)
        members.blocks[block.row * code.n + block.owner] = bytes(room[:used])
    return members


def sources_of(members: parity.Members, code: Code, block: BlockId) -> dict[int, Manifest]:
    return {i: parity.manifest_of(i, members.payloads[i]) for i in code.sources_of(block)}


def recover(
    members: parity.Members, code: Code, lost: int, gone: tuple[int, ...], effort: Effort
) -> bytes:
    target = bytearray(b"\x55" * len(members.payloads[lost]))
    rebuild(
        put_into(memoryview(target)),
        code=code,
        lost=lost,
        manifest=parity.manifest_of(lost, members.payloads[lost]),
        payloads={i: size for i, size in members.sizes(lost).items() if i not in gone},
        manifest_of=members.describe,
        blocks=frozenset(block for block in blocks_of(code) if block.owner not in gone),
        fetch=members,
        effort=effort,
    )
    return bytes(target)


@pytest.mark.parametrize("effort", EFFORTS, ids=["piece", "threads"])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_whatever_a_code_is_made_for_comes_back(code: Code, effort: Effort) -> None:
    members = group_of(code, effort)
    for losses in range(1, code.rows + 1):
        for gone in combinations(range(code.n), losses):
            members.unreachable = set(gone)
            for lost in gone:
                assert recover(members, code, lost, gone, effort) == members.payloads[lost]
    assert members.opened == members.closed


@pytest.mark.parametrize("code", [code for code in CODES if code.chunks + code.rows == code.n])
def test_one_loss_more_is_refused_with_a_reason(code: Code) -> None:
    members = group_of(code, EFFORTS[0])
    gone = tuple(range(code.rows + 1))
    with pytest.raises(CorruptError, match=r"is gone.*restore an older generation"):
        recover(members, code, 0, gone, EFFORTS[0])


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_damaged_block_is_blamed_and_never_used(code: Code) -> None:
    members = group_of(code, EFFORTS[0])
    gone = tuple(range(code.rows))
    for at, block in members.blocks.items():
        members.blocks[at] = bytes([block[0] ^ 1]) + block[1:] if block else block
    with pytest.raises(CorruptError, match=r"the parity block of position .* is damaged"):
        recover(members, code, 0, gone, EFFORTS[0])


class Changing(updating.Members):
    """A group of any code in two generations."""

    chosen: Code

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        return super().open(position, kind, offset, nbytes)

    @property
    def code(self) -> Code:
        return self.chosen

    def of(self, block: BlockId, generation: Generation) -> dict[int, Manifest]:
        wanted = self.code.sources_of(block)
        return {i: m for i, m in self.manifests(generation, -1).items() if i in wanted}


@pytest.mark.parametrize("code", CODES, ids=str)
def test_an_updated_block_is_the_one_that_would_have_been_built(code: Code) -> None:
    rng = random.Random(5)
    old = [rng.randbytes(size) for size in SIZES[: code.n]]
    new = [bytes(b ^ (at // PIECE % 3 == 0) for at, b in enumerate(data)) for data in old]
    new[0] = new[0][:-5]
    members = Changing(old, new)
    members.chosen = code
    for block in blocks_of(code):
        made = []
        for source, generation in ((old, updating.OLD), (new, updating.NEW)):
            members.source = source
            room = memoryview(bytearray(4096))
            manifests = members.of(block, generation)
            used, digests = build_from_chunks(
                room, code=code, which=block, sources=manifests, fetch=members
            )
            made.append((bytes(room[:used]), digests))
        room = memoryview(bytearray(b"\x77" * 4096))
        used, digests = build_from_changes(
            room,
            memoryview(made[0][0]),
            made[0][1],
            code=code,
            which=block,
            before=members.of(block, updating.OLD),
            after=members.of(block, updating.NEW),
            fetch=members,
            effort=EFFORTS[1],
        )
        assert (bytes(room[:used]), digests) == made[1]


@pytest.mark.parametrize("piece_bytes", [8, 24, 64, 4096])
def test_a_multiple_is_added_eighth_by_eighth(piece_bytes: int) -> None:
    rng = random.Random(piece_bytes)
    before, data = rng.randbytes(3 * piece_bytes), rng.randbytes(3 * piece_bytes)
    for factor in (1, 2, 3, 29, 142, 255):
        sum_ = bytearray(before)
        multiply_into(memoryview(sum_), memoryview(data), factor, piece_bytes)
        wanted = times(factor, data, piece_bytes)
        assert bytes(sum_) == bytes(a ^ b for a, b in zip(before, wanted, strict=True))


@pytest.mark.parametrize(("nbytes", "piece_bytes"), [(20, 20), (60, 64)])
def test_pieces_that_do_not_divide_into_eighths_cannot_be_multiplied(
    nbytes: int, piece_bytes: int
) -> None:
    data = memoryview(bytearray(nbytes))
    with pytest.raises(InvalidJobError, match="multiple of 8"):
        multiply_into(data, data, 2, piece_bytes)
