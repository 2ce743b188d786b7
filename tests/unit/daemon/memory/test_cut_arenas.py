"""A process with an arena's descriptor can cut the file: that costs its own job, and no daemon."""

from __future__ import annotations

import os

import pytest
from tests.unit.daemon import test_worker as workers

from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.layouts import layout_id
from holdfast_daemon.engine.effects import SnapshotVerified, VerifySnapshot
from holdfast_daemon.parity.changes import change_of
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Request

JOB, GENERATION, PIECE, SIZES = workers.JOB, workers.GENERATION, workers.PIECE, workers.SIZES
cluster = workers.cluster
"""The fixture."""


def cut(cluster: workers.Cluster, index: int, *, nbytes: int = 0) -> None:
    """As a trainer can, at any time, with the descriptor that it was given."""
    layout = layout_id(workers.layout_of(index))
    os.truncate(cluster.daemons[index].storage.arena(index, layout).path, nbytes)


def test_a_check_of_a_cut_arena_finds_that_it_was_cut(cluster: workers.Cluster) -> None:
    check = VerifySnapshot(rank=2, slot=1, manifest=workers.manifest_at(cluster, 2))
    before = cluster.run(2, check)
    assert isinstance(before, SnapshotVerified) and before.ok
    cut(cluster, 2, nbytes=workers.CAPACITY + 3 * PIECE)
    after = cluster.run(2, check)
    assert isinstance(after, SnapshotVerified) and not after.ok
    assert "was cut" in after.detail


def test_a_change_from_a_cut_arena_is_refused(cluster: workers.Cluster) -> None:
    request = Request(
        job=JOB,
        epoch=3,
        kind=Kind.CHANGE,
        index=1,
        generation=GENERATION,
        offset=0,
        nbytes=2 * PIECE,
        base=GENERATION,
        piece_bytes=PIECE,
    )
    changes = change_of(cluster.daemons[1].storage, request)
    assert next(changes)[:PIECE] == bytes(PIECE)
    cut(cluster, 1)
    with pytest.raises(CorruptError, match="was cut"):
        next(changes)


def test_parity_of_a_cut_arena_fails_and_its_daemon_serves_on(cluster: workers.Cluster) -> None:
    assert cluster.build(1).error == ""
    cut(cluster, 1)
    assert cluster.build(0).entry is None
    client = BulkClient(timeout_s=workers.TIMEOUT_S)
    buffer = memoryview(bytearray(PIECE))
    request = Request(
        job=JOB,
        epoch=3,
        kind=Kind.PARITY,
        index=0,
        generation=GENERATION,
        offset=0,
        nbytes=PIECE,
    )
    client.fetch_into(cluster.daemons[1].bulk_address, request, buffer)
    assert buffer == cluster.daemons[1].storage.block_view(0, 0)[:PIECE]
    client.close()


def test_an_arena_that_is_cut_while_it_is_rebuilt_comes_back_whole(
    cluster: workers.Cluster,
) -> None:
    for owner in range(3):
        assert cluster.build(owner).error == ""
    before = workers.lose(cluster, 0)
    cut(cluster, 0)
    assert workers.recover(cluster, 0).error == ""
    assert bytes(cluster.payload(0)) == before
