"""A worker that stays hears of its worlds from a real daemon, over its socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from daemons import DaemonProcess
from harness import RawCluster, RawJob
from waiting import WAIT_S, wait_for

from holdfast_protos import codec, trainer_pb2

CHILD = """
import sys, grpc
from holdfast_protos import trainer_pb2, trainer_pb2_grpc
stub = trainer_pb2_grpc.TrainerStub(grpc.insecure_channel(sys.argv[1]))
for world in stub.Follow(trainer_pb2.FollowRequest(protocol_version=1, job=sys.argv[2])):
    print(world.epoch, flush=True)
"""


def follow(
    daemon: DaemonProcess, job: str, rank: int = 0, version: int = codec.PROTOCOL_VERSION
) -> Any:
    """A stream of worlds, which ends when the test has waited too long."""
    request = trainer_pb2.FollowRequest(
        protocol_version=version, job=job, rank=rank, pid=os.getpid()
    )
    return daemon.stub().Follow(request, timeout=WAIT_S)


def publish(job: RawJob, address: str, key: str = "") -> None:
    job.daemon(0).stub().PublishStore(
        trainer_pb2.PublishStoreRequest(
            job=job.name, epoch=job.epoch, store_address=address, store_key=key
        ),
        timeout=WAIT_S,
    )


def join(job: RawJob, member: int = 0) -> trainer_pb2.World:
    """What the member's agent sees of the present world."""
    return (
        job.daemon(member)
        .stub()
        .JoinWorld(
            trainer_pb2.JoinWorldRequest(
                protocol_version=codec.PROTOCOL_VERSION, job=job.name, peek=True
            ),
            timeout=WAIT_S,
        )
    )


def refused(stream: Iterator[trainer_pb2.World]) -> tuple[grpc.StatusCode, str]:
    """Status and text with which the stream ends."""
    with pytest.raises(grpc.RpcError) as ended:
        for _ in stream:
            pass
    assert isinstance(ended.value, grpc.Call)
    return ended.value.code(), ended.value.details() or ""


def formed(cluster: RawCluster) -> RawJob:
    """A job of two nodes whose daemons know of its first epoch."""
    job = RawJob(cluster, cluster.start_nodes(2))
    job.form()
    for rank in range(2):
        job.make_trainer(rank).join(job.epoch)
    return job


def test_a_stream_has_each_epoch_when_it_begins_and_when_its_store_is_there(
    cluster: RawCluster,
) -> None:
    job = formed(cluster)
    worlds = follow(job.daemon(1), job.name, rank=1)

    def seen() -> tuple[int, bool, str, int]:
        world = next(worlds)
        assert (world.nodes, world.finished) == (2, False)
        return world.epoch, world.ready, world.store_address, world.node_rank

    assert seen() == (1, False, "", 1)
    publish(job, "127.0.0.1:1")
    assert seen() == (1, True, "127.0.0.1:1", 1)
    job.form()
    assert seen() == (2, False, "", 1)
    wait_for("the epoch of member 0", lambda: join(job).epoch == 2)
    publish(job, "127.0.0.1:2")
    assert seen() == (2, True, "127.0.0.1:2", 1)
    job.drop()
    assert next(worlds).finished
    assert next(worlds, None) is None, "the stream has ended"


def test_the_key_of_a_store_reaches_the_ranks_of_other_nodes_and_nothing_that_people_read(
    cluster: RawCluster,
) -> None:
    job, key = formed(cluster), "0123456789abcdef0123456789abcdef"
    worlds = follow(job.daemon(1), job.name, rank=1)
    assert next(worlds).store_key == ""
    publish(job, "127.0.0.1:1", key)
    world = next(worlds)
    assert (world.store_address, world.store_key) == ("127.0.0.1:1", key)
    assert [join(job, member).store_key for member in range(2)] == [key, key]
    for member in range(2):
        daemon = job.daemon(member)
        assert key not in str(daemon.status()) and key not in daemon.log.read_text()
    with pytest.raises(grpc.RpcError, match="a text of 301 characters"):
        publish(job, "127.0.0.1:1", "k" * 301)


def test_an_agent_and_the_control_loop_see_who_follows_until_the_process_dies(
    cluster: RawCluster,
) -> None:
    job = formed(cluster)
    node = job.nodes[0]

    def reported() -> bool | None:
        state = cluster.control.state(node, job.name)
        return state is not None and len(state.ranks) == 1 and state.ranks[0].follows

    assert not join(job).keep and not reported()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"unix:{job.daemon(0).root}/daemon.sock", job.name],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"1\n"
        assert join(job).keep
        wait_for("a heartbeat", reported)
        job.form()
        assert child.stdout.readline() == b"2\n"
        assert join(job).keep and not join(job).arrived
        job.make_trainer(0).join(2)
        assert join(job).arrived
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    wait_for("the end of the stream", lambda: not join(job).keep)
    wait_for("a heartbeat", lambda: reported() is False)


def test_a_newer_stream_of_a_rank_ends_the_older_one(cluster: RawCluster) -> None:
    job = formed(cluster)
    streams = []
    for _ in range(20):
        streams.append(follow(job.daemon(0), job.name))
        assert next(streams[-1]).epoch == 1
    for older in streams[:-1]:
        code, text = refused(older)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"process {os.getpid()} follows the worlds of rank 0" in text
    assert join(job).keep
    job.form()
    assert next(streams[-1]).epoch == 2
    streams[-1].cancel()
    wait_for("the end of the stream", lambda: not join(job).keep)


def test_a_stream_ends_when_its_node_leaves_the_job(cluster: RawCluster) -> None:
    nodes = cluster.start_nodes(3)
    job = RawJob(cluster, nodes[:2])
    job.form()
    job.make_trainer(1).join(job.epoch)
    left = job.daemon(1)
    worlds = follow(left, job.name, rank=1)
    assert next(worlds).epoch == 1
    job.nodes = [nodes[0], nodes[2]]
    job.form()
    job.publish_to(nodes[1])
    assert next(worlds, None) is None, "the job goes on elsewhere, so it has not finished"
    code, text = refused(follow(left, job.name, rank=1))
    assert code is grpc.StatusCode.UNAVAILABLE and "is not on this node" in text


@pytest.mark.parametrize(
    ("job", "rank", "version", "code", "text"),
    [
        ("elsewhere", 0, codec.PROTOCOL_VERSION, "UNAVAILABLE", "is not on this node"),
        ("", 1, codec.PROTOCOL_VERSION, "INVALID_ARGUMENT", "rank 1 is not on node"),
        ("", 0, codec.PROTOCOL_VERSION + 1, "INVALID_ARGUMENT", "speaks protocol version"),
    ],
)
def test_a_stream_that_cannot_be_followed_is_refused(
    cluster: RawCluster, job: str, rank: int, version: int, code: str, text: str
) -> None:
    known = formed(cluster)
    status, details = refused(follow(known.daemon(0), job or known.name, rank, version))
    assert (status.name, text in details) == (code, True)
    assert not join(known).keep


def test_an_agent_whose_node_has_no_part_in_a_world_waits_and_is_reported(
    cluster: RawCluster,
) -> None:
    """Also when a job of its name has ended there: only agents of that one are sent home."""
    job = formed(cluster)
    (spare,) = cluster.start_nodes(1)
    asked = {
        node: ask_for_world(cluster.daemons[node], job.name, after_epoch=0)
        for node in (spare, job.nodes[0])
    }
    wait_for("the report of the agent", lambda: awaited(cluster, spare) == [job.name])
    assert awaited(cluster, job.nodes[0]) == []  # it waits for the store of a world that it is in
    for call in asked.values():
        call.cancel()
    wait_for("the end of the agent", lambda: awaited(cluster, spare) == [])
    job.drop()
    ended = ask_for_world(job.daemon(0), job.name, after_epoch=1)
    assert ended.result().finished
    again = ask_for_world(job.daemon(0), job.name, after_epoch=0)
    wait_for("its next agent", lambda: awaited(cluster, job.nodes[0]) == [job.name])
    again.cancel()


def ask_for_world(daemon: DaemonProcess, job: str, *, after_epoch: int) -> Any:
    """A call of an agent that waits for a world, under way."""
    request = trainer_pb2.JoinWorldRequest(
        protocol_version=codec.PROTOCOL_VERSION, job=job, after_epoch=after_epoch, wait_s=WAIT_S
    )
    return daemon.stub().JoinWorld.future(request, timeout=2 * WAIT_S)


def awaited(cluster: RawCluster, node: str) -> list[str]:
    """Jobs for whose world an agent waits on the node, as its newest heartbeat says."""
    return list(cluster.wait_beat(node).awaited)
