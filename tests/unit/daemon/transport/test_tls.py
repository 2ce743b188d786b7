"""The bulk service and its handshake: who is answered, and that bytes are the same in every way."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from certificate_makers import expired, made

from holdfast_core.errors import StaleEpochError, UnauthenticatedError, UnreachableError
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.transport import tls as connections
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Located, Request
from holdfast_daemon.transport.server import BulkServer
from holdfast_daemon.transport.tls import ConnectionFactory, Protection
from holdfast_protos.connections.identity import Identity, Role

CONTENT = os.urandom(1_500_000)
AUTHENTICATED, ENCRYPTED = Protection.AUTHENTICATED, Protection.ENCRYPTED

Start = Callable[..., BulkServer]
Dial = Callable[..., BulkClient]


class OneFile:
    def __init__(self, path: Path) -> None:
        self.path, self.asked = path, 0

    def locate(self, request: Request) -> Located:
        self.asked += 1
        if request.epoch != 5:
            raise StaleEpochError(f"epoch {request.epoch} has ended; this is 5")
        return Located(path=self.path, parts=((request.offset, request.nbytes),))

    def change(self, request: Request) -> Iterator[bytes]:
        yield bytes(request.reply_bytes)


@pytest.fixture
def resolver(tmp_path: Path) -> OneFile:
    path = tmp_path / "arena"
    path.write_bytes(CONTENT)
    return OneFile(path)


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    return made(tmp_path / "tls", Role.DAEMON)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(resolver: OneFile, ends: ExitStack) -> Start:
    def start(directory: Path | None, protection: Protection = AUTHENTICATED) -> BulkServer:
        identity = None if directory is None else Identity(directory)
        server = BulkServer("127.0.0.2", 0, resolver, ConnectionFactory(identity, protection))
        server.start()
        ends.callback(server.close)
        return server

    return start


@pytest.fixture
def dial(ends: ExitStack) -> Dial:
    def dial(directory: Path | None, protection: Protection = AUTHENTICATED) -> BulkClient:
        identity = None if directory is None else Identity(directory)
        client = BulkClient(5, ConnectionFactory(identity, protection))
        ends.callback(client.close)
        return client

    return dial


def request(epoch: int = 5, nbytes: int = len(CONTENT)) -> Request:
    return Request(
        job="team.job",
        epoch=epoch,
        kind=Kind.SNAPSHOT,
        index=3,
        generation=Generation(4, 17),
        offset=0,
        nbytes=nbytes,
    )


def fetched(client: BulkClient, server: BulkServer) -> bytes:
    found = bytearray(len(CONTENT))
    client.fetch_into(server.address, request(), memoryview(found))
    return bytes(found)


@pytest.mark.parametrize("ours", Protection)
@pytest.mark.parametrize("theirs", Protection)
def test_bytes_arrive_whatever_the_two_ends_want(
    tls: Path, start: Start, dial: Dial, ours: Protection, theirs: Protection
) -> None:
    server, client = start(tls, theirs), dial(tls, ours)
    assert fetched(client, server) == CONTENT
    assert fetched(client, server) == CONTENT
    assert server.accepted == 1, "one handshake serves many requests"
    with pytest.raises(StaleEpochError):
        client.fetch_into(server.address, request(epoch=4), memoryview(bytearray(len(CONTENT))))
    assert fetched(client, server) == CONTENT


@pytest.mark.parametrize("ours", Protection)
@pytest.mark.parametrize("theirs", Protection)
def test_one_end_that_wants_encryption_gets_it(
    tls: Path, ours: Protection, theirs: Protection
) -> None:
    sides = [ConnectionFactory(Identity(tls), ours), ConnectionFactory(Identity(tls), theirs)]
    found: list[connections.Connection] = []
    with socket.create_server(("127.0.0.2", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    thread = threading.Thread(target=lambda: found.append(sides[1].accepted(accepted, 5)))
    thread.start()
    found.append(sides[0].dialled(dialled, 5))
    thread.join()
    for end in (dialled, accepted):
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "short messages go at once"
    encrypted = ENCRYPTED in (ours, theirs)
    assert [isinstance(wire, connections.EncryptedConnection) for wire in found] == [
        encrypted,
        encrypted,
    ]
    for wire in found:
        wire.close()


@pytest.mark.parametrize("dialling", [True, False])
@pytest.mark.parametrize("protection", Protection)
def test_a_daemon_that_agrees_to_no_way_is_refused_rather_than_sent_plain_bytes(
    tls: Path, protection: Protection, dialling: bool
) -> None:
    """The other end shows a daemon's certificate, and offers no ALPN."""
    wiring, other = ConnectionFactory(Identity(tls), protection), Identity(tls)
    with socket.create_server(("127.0.0.2", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    far.settimeout(5)

    def shake() -> None:
        loaded, name = other.current(), other.name(Role.DAEMON)
        with (
            suppress(OSError),
            loaded.server.wrap_socket(far, server_side=True)
            if dialling
            else loaded.client.wrap_socket(far, server_hostname=name) as shaken,
        ):
            shaken.recv(1)

    thread = threading.Thread(target=shake)
    thread.start()
    with near, pytest.raises(UnauthenticatedError, match=r"agreed to none of .*encrypted"):
        (wiring.dialled if dialling else wiring.accepted)(near, 5)
    thread.join()
    far.close()


@pytest.mark.parametrize("protection", Protection)
def test_what_crosses_the_wire_is_readable_only_without_encryption(
    tls: Path, start: Start, dial: Dial, protection: Protection
) -> None:
    server, seen = start(tls, protection), bytearray()
    with socket.create_server(("127.0.0.2", 0)) as listener:
        threading.Thread(target=overhear, args=(listener, server.port, seen)).start()
        found = bytearray(len(CONTENT))
        address = f"127.0.0.2:{listener.getsockname()[1]}"
        client = dial(tls, protection)
        client.fetch_into(address, request(), memoryview(found))
        client.close()
    assert found == CONTENT
    assert (CONTENT[:4096] in seen) is (protection is AUTHENTICATED)


def overhear(listener: socket.socket, port: int, seen: bytearray) -> None:
    """Pass one connection on, keeping what the server says."""
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.2", port))

    def up() -> None:
        while data := near.recv(1 << 16):
            far.sendall(data)
        far.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=up)
    thread.start()
    try:
        while data := far.recv(1 << 16):
            seen += data
            near.sendall(data)
    except OSError:
        pass
    thread.join()
    near.close()
    far.close()


def test_strangers_learn_nothing(
    tmp_path: Path, tls: Path, resolver: OneFile, start: Start, dial: Dial
) -> None:
    """Another CA, an expired certificate, the operator's, and none at all."""
    server = start(tls)
    strangers = [
        made(tmp_path / "other", Role.DAEMON),
        expired(tmp_path / "tls", Role.DAEMON),
        made(tmp_path / "tls", Role.OPERATOR),
        None,
    ]
    for directory in strangers:
        client = dial(directory)
        with pytest.raises(UnreachableError):
            client.fetch_into(server.address, request(), memoryview(bytearray(len(CONTENT))))
        client.close()
    server.close()
    assert resolver.asked == 0
    assert server.sent_bytes == 0
    assert server.strangers == len(strangers)


def test_a_server_of_another_ca_is_refused(tmp_path: Path, start: Start, dial: Dial) -> None:
    server = start(made(tmp_path / "other", Role.DAEMON))
    client = dial(made(tmp_path / "tls", Role.DAEMON))
    with pytest.raises(UnreachableError, match="did not prove that it is a daemon"):
        fetched(client, server)


def test_a_server_without_identity_is_refused(tls: Path, start: Start, dial: Dial) -> None:
    server = start(None)
    with pytest.raises(UnreachableError):
        fetched(dial(tls), server)
    server.close()
    assert server.malformed == 1


def test_a_new_certificate_is_shown_at_the_next_connection(
    tmp_path: Path, start: Start, dial: Dial
) -> None:
    directory = made(tmp_path / "tls", Role.DAEMON)
    server, kept = start(directory), dial(directory)
    assert fetched(kept, server) == CONTENT
    old = dial(made(tmp_path / "copy", Role.DAEMON, authority=tmp_path / "tls"))
    for name in ("ca.crt", "ca.key"):
        (tmp_path / "tls" / name).unlink()
    made(tmp_path / "tls", Role.DAEMON)
    assert fetched(kept, server) == CONTENT
    assert fetched(dial(directory), server) == CONTENT
    with pytest.raises(UnreachableError):
        fetched(old, server)


def test_a_silent_stranger_is_disconnected(
    tls: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.05)
    server = start(tls)
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("protection", Protection)
def test_closing_the_server_ends_connections_that_wait(
    tls: Path, start: Start, dial: Dial, protection: Protection
) -> None:
    server, client = start(tls, protection), dial(tls, protection)
    assert fetched(client, server) == CONTENT
    server.close()
    with pytest.raises(UnreachableError):
        fetched(client, server)


@pytest.mark.parametrize("protection", Protection)
def test_a_peer_that_falls_silent_is_given_up(tls: Path, protection: Protection) -> None:
    listener = socket.create_server(("127.0.0.2", 0))
    wiring = ConnectionFactory(Identity(tls), protection)
    done = threading.Event()

    def shake() -> None:
        accepted, _ = listener.accept()
        wire = ConnectionFactory(Identity(tls), protection).accepted(accepted, 5)
        done.wait(5)
        wire.close()
        accepted.close()

    thread = threading.Thread(target=shake)
    thread.start()
    connection = socket.create_connection(listener.getsockname())
    wire = wiring.dialled(connection, 0.05)
    with pytest.raises(TimeoutError):
        wire.receive(memoryview(bytearray(1)))
    done.set()
    thread.join()
    wire.close()
    listener.close()
