"""Replicas of one world copy what others capture: real sessions, whose arenas are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import holdfast
from holdfast._daemon.client import ParityGroup
from holdfast.testing import FakeDaemon
from holdfast_core.protection.codes import Code
from holdfast_core.protection.mirrors import mirror_places, needed_pieces
from holdfast_core.snapshots.layouts import SLOTS_MAX, Layout, decode_layout, piece_digests
from holdfast_core.snapshots.manifests import Manifest

RANKS = 3
WIDTH = 768
GROUP = ParityGroup(ranks=(2, 0, 1), code=Code(RANKS, RANKS - 1, 1))
TOPOLOGY = holdfast.Topology(dp=RANKS)


class Experts(nn.Module):
    """A stack of experts, of which expert-parallel ranks have different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.ones(2, WIDTH, WIDTH // 2))


class Model(nn.Module):
    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Parameter(torch.ones(frozen), requires_grad=False)
        self.moe = Experts()


class Notes:
    """State beside the model whose size a test gives."""

    def __init__(self, nbytes: int) -> None:
        self._text = "x" * nbytes

    def state_dict(self) -> dict[str, str]:
        return {"text": self._text}

    def load_state_dict(self, state: dict[str, str]) -> None: ...


def save_twice(
    rank: int,
    home: Path,
    topology: holdfast.Topology,
    restored: int | None = None,
    notes: int = 0,
    frozen: int = 1000,
) -> None:
    """Save two steps in a new process, which restores step `restored`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{home}/store-{restored}", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model = Model(frozen)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    daemon = FakeDaemon(home, rank=rank, world_size=RANKS)
    daemon.parity_group = GROUP
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        topology=topology,
        stateful={"notes": Notes(notes)},
        daemon=daemon,
        settings=holdfast.Settings(mirror_replicas=True, start_wait_s=60),
    )
    assert session.restore() == restored
    session.prepare()
    for step in ((restored or 0) + 1, (restored or 0) + 2):
        handle = session.save(step)
        handle.committed.result(60)  # training has not asked for its tensors: the mirror is whole
        optimizer.step()
    session.close()
    dist.destroy_process_group()


def arenas(home: Path) -> Iterator[tuple[Layout, bytes, Manifest]]:
    """Layout, mirror and newest manifest of each rank."""
    for rank in range(RANKS):
        daemon = FakeDaemon(home, rank=rank)
        newest = daemon.sealed()[max(daemon.sealed())]
        layout = decode_layout((newest.home / "layout.json").read_bytes())
        memory = (newest.home / "arena").read_bytes()
        assert len(memory) == layout.arena_bytes(SLOTS_MAX)
        yield layout, memory[SLOTS_MAX * layout.slot_bytes :], newest.manifest


def run(home: Path, topology: holdfast.Topology) -> list[tuple[Layout, bytes, Manifest]]:
    run_ranks(save_twice, (home, topology), RANKS)
    return list(arenas(home))


def proved(ranks: list[tuple[Layout, bytes, Manifest]]) -> list[tuple[int, int, int]]:
    """For each rank, how many pieces its node's block needs, how many of them it mirrors, and how
    many of these have the digests of their owners' manifests."""
    found = []
    for rank, (layout, memory, _) in enumerate(ranks):
        payloads = {i: ranks[owner][2].payload_bytes for i, owner in enumerate(GROUP.ranks)}
        position, size = GROUP.ranks.index(rank), layout.piece_bytes
        needed = needed_pieces(GROUP.code, position, payloads, size)
        right = 0
        for owner in range(RANKS):
            for piece, before in mirror_places(layout.mirror, owner).items():
                copied = memory[before * size : (before + 1) * size]
                digest = ranks[owner][2].digests[8 * piece : 8 * piece + 8]
                right += piece_digests(copied, size) == digest
        mirrored = sum(run.count for run in layout.mirror)
        found.append((sum(map(len, needed.values())), mirrored, right))
    return found


def test_replicas_mirror_what_parity_needs_and_the_owners_manifests_prove_it(
    tmp_path: Path,
) -> None:
    for needed, mirrored, right in proved(run(tmp_path, TOPOLOGY)):
        assert right == mirrored
        # All but the pieces in which extras begin, at the end of the others' payloads.
        assert needed - (RANKS - 1) <= mirrored <= needed


def test_a_rank_that_saves_more_beside_its_tensors_keeps_its_arena(tmp_path: Path) -> None:
    """As far as the arena has room for it: a second one may exceed the job's memory."""
    frozen = 192_000  # The tensors of the first rank end 18 KB before the end of a piece.
    run_ranks(save_twice, (tmp_path, TOPOLOGY, None, 0, frozen), RANKS)
    first = [layout for layout, _, _ in arenas(tmp_path)]
    run_ranks(save_twice, (tmp_path, TOPOLOGY, 2, 14_000, frozen), RANKS)
    for rank, (layout, mirror, newest) in enumerate(arenas(tmp_path)):
        assert newest.generation.step == 4
        assert newest.extras_bytes > 14_000
        assert layout == first[rank]
        homes = {one.home for one in FakeDaemon(tmp_path, rank=rank).sealed().values()}
        assert len(homes) == 1
        assert any(mirror)


@pytest.mark.exhaustive
def test_where_experts_differ_only_the_shared_state_is_mirrored(tmp_path: Path) -> None:
    topology = holdfast.Topology(dp=RANKS, ep=RANKS)
    for needed, mirrored, right in proved(run(tmp_path, topology)):
        assert right == mirrored
        assert 0 < mirrored < needed
