"""Real daemons with certificates and tokens: what works, is refused, and is never shown."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificate_makers import made
from control_plane import ControlServer
from harness import JOB, RawCluster, RawJob
from raw_trainer import RawTrainer
from waiting import WAIT_S, error_of, wait_for

from holdfast_core.errors import (
    AccessDeniedError,
    CorruptError,
    HoldfastError,
    InvalidJobError,
    StaleEpochError,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Member
from holdfast_daemon.net.peers import PeerReader
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Request
from holdfast_daemon.transport.tls import ConnectionFactory, Protection
from holdfast_operator.control import server as control_server
from holdfast_protos import (
    codec,
    control_pb2,
    control_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    trainer_pb2,
)
from holdfast_protos.connections.channels import MESSAGE_BYTES_MAX
from holdfast_protos.connections.identity import KEY, Identity, Role, aio_channel, channel

TOKEN, OTHERS = "a0f3" * 16, "b7c9" * 16
MEMBERS = 3


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    made(tmp_path / "tls", Role.DAEMON)
    return tmp_path / "tls"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / JOB).write_text(TOKEN)
    (folder / "tests.other").write_text(OTHERS)
    return folder


@pytest.fixture
def cluster(tls: Path, tokens: Path) -> Iterator[RawCluster]:
    arguments = [
        *("--auth", "token-files", "--tokens", str(tokens)),
        *("--bulk", "encrypted", "--metrics-port", "0"),
    ]
    control = ControlServer(tls / Role.OPERATOR)
    with RawCluster(tuple(arguments), tls=tls / Role.DAEMON, control=control) as running:
        yield running
        print(running.report())


@pytest.fixture
def job(cluster: RawCluster) -> RawJob:
    job = RawJob(cluster, start(cluster, MEMBERS))
    job.form()
    job.start_trainers()
    job.train()
    return job


def start(cluster: RawCluster, count: int) -> list[str]:
    nodes = cluster.start_nodes(count)
    for node in nodes:
        cluster.daemons[node].token = TOKEN
    return nodes


def all_output(cluster: RawCluster) -> str:
    """Logs, metrics, status and heartbeats of all daemons."""
    output = []
    for daemon in cluster.daemons.values():
        output.append(daemon.log.read_text())
        if daemon.alive:
            port = daemon.logged("daemon_started")[-1]["metrics_port"]
            with urllib.request.urlopen(f"http://{daemon.host}:{port}/metrics") as page:
                output.append(page.read().decode())
            output.append(str(daemon.status()))
    return "\n".join([*output, *map(str, cluster.control.beats.values())])


def test_a_job_survives_a_node_over_encrypted_connections_and_no_secret_leaks(
    cluster: RawCluster, job: RawJob, tls: Path
) -> None:
    """With everything logged that can be, and calls that are denied."""
    protected = job.generation
    stranger = RawTrainer(job.daemon(0), "tests.other", 0, 1, 1000, 1000)
    with pytest.raises(grpc.RpcError) as caught:
        stranger.hello()
    assert isinstance(error_of(caught.value), AccessDeniedError)
    cluster.daemons[job.nodes[2]].lose()
    (job.nodes[2],) = start(cluster, 1)
    job.form()
    job.check_restored(job.start_trainers(), protected)
    fresh = cluster.daemons[job.nodes[2]]
    wait_for("bytes of peers", lambda: fresh.metric("holdfast_received_bytes_total") > 0)
    assert fresh.status()["security"] == "encrypted"
    output = all_output(cluster)
    assert "holdfast_auth_denials_total" in output, "metrics are among it"
    keys = [path.read_text().splitlines()[1] for path in tls.rglob(KEY)]
    assert len(keys) == 2
    for secret in (TOKEN, OTHERS, *keys, *(trainer.session for trainer in job.trainers)):
        assert secret
        assert secret not in output


def test_daemons_go_on_when_all_certificates_and_the_ca_are_replaced(
    job: RawJob, tls: Path
) -> None:
    for name in ("ca.crt", "ca.key"):
        (tls / name).unlink()
    made(tls, Role.DAEMON)
    job.train(2)


def test_a_daemons_certificate_does_not_make_a_caller_the_operator(tls: Path) -> None:
    impostor = ControlServer(tls / Role.DAEMON)
    with RawCluster(tls=tls / Role.DAEMON, control=impostor) as cluster:
        daemon = cluster.make_node()
        daemon.start()
        wait_for("the daemon to complain", lambda: daemon.log.exists() and _unreachable(daemon))
        assert not impostor.beats


def _unreachable(daemon: Any) -> bool:
    return bool(daemon.logged("control_unreachable"))


@pytest.mark.parametrize("role", Role)
def test_the_control_loop_accepts_daemons_only(tls: Path, role: Role) -> None:
    async def beats() -> AsyncIterator[control_pb2.Heartbeat]:
        yield control_pb2.Heartbeat(
            protocol_version=codec.PROTOCOL_VERSION, node="n", memory_id="m"
        )
        await asyncio.Event().wait()

    async def refused(stub: control_pb2_grpc.ControlAsyncStub) -> grpc.StatusCode:
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.Connect(beats())))
            # gRPC's own, where the refusal comes while the heartbeat is being written.
            if caught.value.code() is not grpc.StatusCode.INTERNAL:
                return caught.value.code()

    async def test() -> None:
        server = control_server.ControlServer(
            heartbeat_s=1.0,
            clock=lambda: 0.0,
            on_evidence=lambda jobs: received.set(),
            identity=Identity(tls / Role.OPERATOR),
        )
        address = f"127.0.0.1:{await server.start('127.0.0.1')}"
        try:
            async with aio_channel(address, Identity(tls / role), Role.OPERATOR) as opened:
                stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(opened)
                if role is Role.DAEMON:
                    call = stub.Connect(beats())
                    async with asyncio.timeout(WAIT_S):
                        await received.wait()
                    assert list(server.nodes()) == ["n"]
                    call.cancel()
                else:
                    assert await refused(stub) is grpc.StatusCode.PERMISSION_DENIED
                    assert not server.nodes()
        finally:
            await server.stop()

    received = asyncio.Event()
    asyncio.run(test())


# --- what even a daemon's certificate does not open -----------------------------------------------


def test_messages_of_an_ended_epoch_are_refused_on_every_way(
    cluster: RawCluster, job: RawJob, tls: Path
) -> None:
    """Replayed later, with a certificate that is good."""
    before = codec.membership_to_proto(job.membership())
    ended, line = job.epoch, job.generation
    member: Member = job.membership().members[0]
    job.form()
    job.start_trainers()
    job.train()
    identity = Identity(tls / Role.DAEMON)
    fetcher = PeerReader(identity)
    with pytest.raises(StaleEpochError):
        fetcher.fetch_manifest(member, job.name, ended, 0, line)
    fetcher.close()
    client = BulkClient(
        WAIT_S, ConnectionFactory(Identity(tls / Role.DAEMON), Protection.AUTHENTICATED)
    )
    with pytest.raises(StaleEpochError):
        client.fetch_into(member.bulk_address, _asked(job, ended, line), memoryview(bytearray(10)))
    client.close()
    held = job.daemon(0).job(job.name)
    with channel(member.peer_address, identity, Role.DAEMON) as opened:
        stub = peer_pb2_grpc.PeerStub(opened)
        word = peer_pb2.SuspectMessage(
            job=job.name, epoch=ended, rank=0, generation=codec.generation_to_proto(line)
        )
        assert stub.Suspect(word, timeout=WAIT_S).epoch == job.epoch
    cluster.control.send(job.nodes[0], control_pb2.ControlMessage(membership=before))
    job.train()
    assert job.daemon(0).job(job.name)["epoch"] == job.epoch == held["epoch"]


def _asked(job: RawJob, epoch: int, generation: Generation) -> Request:
    return Request(
        job=job.name,
        epoch=epoch,
        kind=Kind.SNAPSHOT,
        index=0,
        generation=generation,
        offset=0,
        nbytes=10,
    )


def test_names_that_are_paths_and_messages_that_are_too_large_get_nothing(
    job: RawJob, tls: Path
) -> None:
    member = job.membership().members[0]
    client = BulkClient(
        WAIT_S, ConnectionFactory(Identity(tls / Role.DAEMON), Protection.AUTHENTICATED)
    )
    for name in ("../" + job.name, f"{job.name}/../{job.name}", "/etc", ".", "\0"):
        request = _asked(job, job.epoch, job.generation)
        named = Request(**{f: getattr(request, f) for f in request.__slots__} | {"job": name})
        with pytest.raises(HoldfastError, match="is not on node"):
            client.fetch_into(member.bulk_address, named, memoryview(bytearray(10)))
    client.close()
    with channel(member.peer_address, Identity(tls / Role.DAEMON), Role.DAEMON) as opened:
        stub = peer_pb2_grpc.PeerStub(opened)
        reply = stub.FetchManifest(
            peer_pb2.FetchManifestRequest(job="../x", epoch=1), timeout=WAIT_S
        )
        assert not reply.manifest
        with pytest.raises(grpc.RpcError) as caught:
            stub.FetchManifest(
                peer_pb2.FetchManifestRequest(job="x" * MESSAGE_BYTES_MAX), timeout=WAIT_S
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    job.train()


# --- a trainer that lies --------------------------------------------------------------------------


def test_a_payload_larger_than_its_slot_is_refused(job: RawJob) -> None:
    trainer = job.trainers[0]
    job.step += 1
    slot = trainer.grant(job.step)
    assert slot is not None
    large = trainer.largest_slot_bytes * 2
    pieces = -(-large // (256 << 10))
    for payload, digests in (
        (large, pieces * 8),
        (trainer.nbytes, 8 * pieces),
        (trainer.nbytes, 7),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            trainer.daemon.stub().Commit(
                trainer_pb2.CommitRequest(
                    session=trainer.session,
                    epoch=trainer.epoch,
                    step=job.step,
                    slot=slot,
                    payload_bytes=payload,
                    digests=bytes(digests),
                ),
                timeout=WAIT_S,
            )
        assert isinstance(error_of(caught.value), CorruptError | InvalidJobError)
    trainer.copy(slot, job.step)
    trainer.commit(slot, job.step)


def test_digests_that_do_not_fit_the_bytes_are_never_protected_nor_restored(job: RawJob) -> None:
    true = job.generation
    job.carry(False)
    liar, job.step = job.trainers[1], job.step + 1
    for trainer in job.trainers:
        slot = trainer.grant(job.step)
        assert slot is not None
        if trainer is not liar:
            trainer.copy(slot, job.step)
        trainer.commit(slot, job.step)  # the liar's slot holds what was there before
    found = itertools.chain.from_iterable
    wait_for(
        "some daemon to find out",
        lambda: list(found(d.logged("suspect") for d in job.cluster.daemons.values())),
    )
    assert job.protected(0) == true
    job.form()
    assert job.check_restored(job.start_trainers(), true) == true
