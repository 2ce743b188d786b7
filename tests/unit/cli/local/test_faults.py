"""Flipping bytes: exactly one, in what is sealed, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_cli.local.directory import RunDirectory, new_record
from holdfast_cli.local.faults import corrupt, notice
from holdfast_cli.local.status import LocalMemberStatus, LocalStatus, NodeStatus, RankStatus, Status
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.status import Phase
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, encode_layout, encode_manifest, piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.states import RestoreSource

SLOT_BYTES = 8192


def status_of(root: Path) -> Status:
    rank = RankStatus(
        rank=0,
        state="HEALTHY",
        step=5,
        idle_s=0.0,
        pid=1,
        lost=False,
        restored="",
        restored_from=RestoreSource.UNKNOWN,
    )
    member = LocalMemberStatus(
        index=0,
        node="n0",
        exit_code=None,
        epoch=1,
        ranks=(rank,),
        complete="",
        arena_bytes=0,
        parity_bytes=0,
        skipped=0,
        failed=0,
        rebuilding=False,
        problem="",
    )
    node = NodeStatus(
        name="n0",
        role="member 0",
        connected=True,
        host="h",
        root=str(root),
        socket="",
        daemon_pid=1,
        incarnation=1,
        memory_used_bytes=0,
        memory_budget_bytes=0,
    )
    local = LocalStatus(
        job="default.job", time=0.0, pid=1, directory="", reason="", revision=0, world_size=1,
        line="", line_reason="", complete="", members=(member,), nodes=(node,),
    )  # fmt: skip
    return Status(phase=Phase.RUNNING, epoch=1, step=5, local=local)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node's memory with one arena whose slots 0 and 2 are sealed."""
    arena = tmp_path / "jobs" / "default.job" / "arenas" / "0-abc"
    arena.mkdir(parents=True)
    (arena / "arena").write_bytes(bytes(3 * SLOT_BYTES))
    layout = Layout(
        rank=0, world_size=1, topology="", entries=(), extras_offset=SLOT_BYTES, extras_capacity=0
    )
    (arena / "layout.json").write_bytes(encode_layout(layout))
    for slot, step in ((0, 5), (2, 4)):
        payload = bytes(1000)
        manifest = Manifest(
            job="default.job",
            rank=0,
            world_size=1,
            generation=Generation(1, step),
            layout_id="abc",
            payload_bytes=len(payload),
            extras_offset=len(payload),
            extras_bytes=0,
            piece_bytes=512,
            digests=piece_digests(payload, 512),
        )
        (arena / f"slot-{slot}.manifest").write_bytes(encode_manifest(manifest))
    return tmp_path


def test_one_byte_of_the_newest_sealed_snapshot_is_flipped(root: Path) -> None:
    arena = root / "jobs" / "default.job" / "arenas" / "0-abc" / "arena"
    text = corrupt(RunDirectory(root, "default.job"), status_of(root), 0)
    assert "rank 0, generation 1.5, slot 0" in text
    changed = [index for index, byte in enumerate(arena.read_bytes()) if byte]
    assert changed == [500]


def test_a_parity_block_on_the_ranks_node_can_be_flipped(root: Path) -> None:
    parity = root / "jobs" / "default.job" / "parity"
    parity.mkdir()
    (parity / "0-1.block").write_bytes(bytes(100))
    with pytest.raises(InvalidJobError, match="no finished parity block"):
        corrupt(RunDirectory(root, "default.job"), status_of(root), 0, parity=True)
    (parity / "0-1.entry").write_bytes(b"sealed")
    assert "0-1.block" in corrupt(
        RunDirectory(root, "default.job"), status_of(root), 0, parity=True
    )
    assert sum((parity / "0-1.block").read_bytes()) == 1


def test_a_rank_that_does_not_exist_is_refused_with_those_that_do(root: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"no rank 7 .* there are ranks \[0\]"):
        corrupt(RunDirectory(root, "default.job"), status_of(root), 7)


def test_a_notice_is_given_for_a_node_that_is_there(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", "default.job", tmp_path / "memory")
    directory.make()
    directory.write_record(new_record(directory, ["n0", "n1"]))
    assert "node n1 will be taken away" in notice(directory, "n1")
    assert (directory.notice("n0"), bool(directory.notice("n1"))) == ("", True)
    with pytest.raises(InvalidJobError, match=r"no node 'n7' .* n0, n1"):
        notice(directory, "n7")
    directory.mark_dead("n0")
    with pytest.raises(InvalidJobError, match="n0 is lost already"):
        notice(directory, "n0")
    directory.clear()
    assert directory.notice("n1") == ""
