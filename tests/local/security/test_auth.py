"""Trainers prove whose they are: daemons with `--auth token-review` before an API server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from api_server import ApiServer
from harness import RawCluster, RawJob
from raw_trainer import receive_descriptor
from waiting import WAIT_S, error_of, wait_for

from holdfast._daemon.client import GrpcClient
from holdfast._launch.rendezvous import GrpcDaemon
from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    ProtocolError,
    UnauthenticatedError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.snapshots.membership import Redundancy
from holdfast_protos import codec, trainer_pb2

MINE, OTHER = "team.moe", "team.other"


class World:
    """One node with two jobs on it, each of one rank, and the API server that knows their pods."""

    def __init__(self, cluster: RawCluster, api: ApiServer) -> None:
        self.cluster, self.api = cluster, api
        self.mine, self.others = api.admit("team", "moe-0-0"), api.admit("team", "other-0-0")
        nodes = cluster.start_nodes(1)
        self.daemon = cluster.daemons[nodes[0]]
        self.jobs = {
            name: RawJob(cluster, nodes, name=name, redundancy=Redundancy.NONE)
            for name in (MINE, OTHER)
        }
        for name, token in ((MINE, self.mine), (OTHER, self.others)):
            self.jobs[name].form()
            self.daemon.token = token
            wait_for(f"{name} on the node", lambda name=name: self.daemon.job(name))  # type: ignore[misc]
        self.daemon.token = self.mine


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        yield running


@pytest.fixture
def world(api: ApiServer) -> Iterator[World]:
    arguments = [
        *("--auth", "token-review"),
        *("--api-server", api.address),
        *("--service-account", str(api.directory)),
        *("--metrics-port", "0"),
    ]
    with RawCluster(arguments=tuple(arguments)) as cluster:
        yield World(cluster, api)


def refusal(call: Callable[..., Any], *arguments: Any) -> HoldfastError:
    with pytest.raises(grpc.RpcError) as failed:
        result = call(*arguments, timeout=WAIT_S)
        for _ in result if hasattr(result, "__next__") else ():
            pass
    return error_of(failed.value)


def methods() -> list[str]:
    return [method.name for method in trainer_pb2.DESCRIPTOR.services_by_name["Trainer"].methods]


def request_of(method: str, **fields: object) -> Any:
    """A request of `method`, with those of `fields` that it has."""
    service = trainer_pb2.DESCRIPTOR.services_by_name["Trainer"]
    message = service.methods_by_name[method].input_type
    known = {name: value for name, value in fields.items() if name in message.fields_by_name}
    return getattr(trainer_pb2, message.name)(**known)


@pytest.mark.parametrize("method", methods())
def test_no_call_is_open_to_strangers(world: World, method: str) -> None:
    """Also none that is added one day: the list comes from the protocol."""
    named = {"protocol_version": codec.PROTOCOL_VERSION, "job": OTHER, "session": f"{OTHER}/1/1"}
    request = request_of(method, **named)
    world.daemon.token = ""
    error = refusal(getattr(world.daemon.stub(), method), request)
    of_session = "session" in request.DESCRIPTOR.fields_by_name
    assert type(error) is (UnknownSessionError if of_session else UnauthenticatedError)
    world.daemon.token = world.mine
    if method == "Status":
        reply = world.daemon.stub().Status(request, timeout=WAIT_S)
        assert list(json.loads(reply.json)["jobs"]) == [MINE]
        return
    error = refusal(getattr(world.daemon.stub(), method), request)
    assert type(error) is (UnknownSessionError if of_session else AccessDeniedError)


def test_a_denial_names_the_remedy_and_is_counted_and_never_shows_a_token(
    world: World,
) -> None:
    world.daemon.token = world.others
    error = refusal(world.daemon.stub().Hello, _hello(MINE))
    assert "pod other-0-0 of namespace team may not act for job team.moe" in str(error)
    world.daemon.token = unknown = "no.such.token"
    assert "for audience holdfast.dev/daemon" in str(
        refusal(world.daemon.stub().Hello, _hello(MINE))
    )
    assert world.daemon.metric('holdfast_auth_denials_total{cause="access_denied"}') == 1
    assert world.daemon.metric('holdfast_auth_denials_total{cause="unauthenticated"}') == 1
    log = world.daemon.log.read_text()
    assert "call_denied" in log
    assert not [token for token in (world.mine, world.others, unknown) if token in log]


def test_a_job_trains_and_another_cannot_get_at_its_arena_or_session(world: World) -> None:
    job = world.jobs[MINE]
    trainer = job.make_trainer(0)
    trainer.join(job.epoch)
    opened = trainer.open()
    world.daemon.token = world.others
    stub = world.daemon.stub()
    # It may not ask for the arena, it cannot use the token that was used, and it can guess none.
    request = trainer_pb2.OpenRequest(job=MINE, rank=0, epoch=job.epoch, layout=trainer.layout)
    assert isinstance(refusal(stub.Open, request), AccessDeniedError)
    restore = trainer_pb2.RestoreRequest(job=MINE, rank=0, epoch=job.epoch)
    assert isinstance(refusal(stub.Restore, restore), AccessDeniedError)
    for token in (opened.token, "0" * 48, opened.session):
        with pytest.raises(ProtocolError, match="not known"):
            receive_descriptor(trainer.arena_socket, token)
    # Session ids count up; what makes them whole is not to be guessed.
    guess = opened.session.rpartition("/")[0]
    close = trainer_pb2.CloseRequest(session=guess)
    assert isinstance(refusal(stub.Close, close), UnknownSessionError)
    world.daemon.token = world.mine
    assert trainer.save(1)
    trainer.die()


def test_training_goes_on_while_the_api_server_is_away(world: World) -> None:
    job = world.jobs[MINE]
    job.start_trainers()
    world.api.stop()
    # A call of the session asks no reviewer, whatever token it carries.
    world.daemon.token = "renewed-and-unknown"
    job.save(1)
    # A call that names the job goes on with a token that was seen before …
    world.daemon.token = world.mine
    assert world.daemon.stub().Hello(_hello(MINE), timeout=WAIT_S).epoch == job.epoch
    # … and is to be repeated, not denied, with one that no reviewer can judge now.
    world.daemon.token = world.api.admit("team", "moe-0-1")
    error = refusal(world.daemon.stub().Hello, _hello(MINE))
    assert isinstance(error, UnreachableError)
    assert "API server cannot review" in str(error)
    world.api.start()
    assert world.daemon.stub().Hello(_hello(MINE), timeout=WAIT_S).epoch == job.epoch
    assert world.daemon.metric('holdfast_token_reviews_total{outcome="failed"}') >= 1


def test_the_sdk_and_the_launcher_carry_the_token_of_their_file(
    world: World, tmp_path: Path
) -> None:
    socket, file = world.daemon.root / "daemon.sock", tmp_path / "trainer-token"
    file.write_text("not-yet-good\n")
    client = GrpcClient(socket, MINE, 0, "", WAIT_S, file)
    agent = GrpcDaemon(socket, MINE, file)
    try:
        with pytest.raises(UnauthenticatedError):
            client.hello()
        with pytest.raises(UnauthenticatedError):
            agent.join_world(0, 0.0, peek=True)
        # As kubelet renews it: another file is put in its place.
        renewed = tmp_path / "renewed"
        renewed.write_text(f"{world.mine}\n")
        renewed.rename(file)
        epoch = world.jobs[MINE].epoch
        assert client.hello().epoch == epoch
        assert agent.join_world(0, 0.0, peek=True).epoch == epoch
        file.unlink()
        with pytest.raises(UnauthenticatedError, match="HOLDFAST_TOKEN_FILE"):
            client.hello()
    finally:
        client.close()
        agent.close()


def test_a_daemon_without_an_api_server_does_not_start(world: World) -> None:
    lonely = world.cluster.make_node("--api-server", "", "--service-account", "/nowhere")
    lonely.plain = True
    lonely.start()
    assert lonely.process is not None
    assert lonely.process.wait(WAIT_S * 3) == 2
    assert "--auth token-review needs" in lonely.log.read_text()


def test_the_sockets_are_open_to_all_and_what_the_daemon_keeps_to_none(world: World) -> None:
    world.jobs[MINE].start_trainers()
    root = world.daemon.root
    for name in ("daemon.sock", "arena.sock"):
        assert (root / name).stat().st_mode & 0o777 == 0o666
    kept = [path for path in root.rglob("*") if not path.is_socket()]
    assert any(path.name == "arena" for path in kept)
    assert not [path for path in kept if path.stat().st_mode & 0o077], "others may open these"


def _hello(job: str) -> trainer_pb2.HelloRequest:
    return trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job=job, rank=0)
