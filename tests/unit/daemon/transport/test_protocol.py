import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import (
    HoldfastError,
    ProtocolError,
    StaleEpochError,
    StorageError,
    UnreachableError,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.transport import protocol
from holdfast_daemon.transport.client import IDLE_S, BulkClient
from holdfast_daemon.transport.protocol import Kind, Located, Request
from holdfast_daemon.transport.server import BulkServer
from holdfast_daemon.transport.tls import Connection, ConnectionFactory, Protection

CONTENT = os.urandom(3_000_000)


class OneFile:
    """Every request means one file; a wrong epoch or lane is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = len(CONTENT)
        self.asked: list[Request] = []

    def locate(self, request: Request) -> Located:
        self.asked.append(request)
        if request.epoch != 5:
            raise StaleEpochError(f"epoch {request.epoch} has ended; this is 5")
        if request.kind is Kind.PARITY:
            raise StorageError(f"no parity of lane {request.index}")
        nbytes = min(request.nbytes, self.nbytes - request.offset)
        first = nbytes // 3
        return Located(
            path=self.path,
            parts=((request.offset, first), (request.offset + first, nbytes - first)),
        )

    def change(self, request: Request) -> Iterator[bytes]:
        """Zeros, so that what arrives is known."""
        self.asked.append(request)
        if request.base == Generation(9, 9):
            raise StorageError("no such snapshot")
        yield bytes(request.reply_bytes - 3)
        yield b"end"


def wanted(offset: int, nbytes: int, **changes: object) -> Request:
    fields: dict[str, object] = {
        "job": "team/job",
        "epoch": 5,
        "kind": Kind.SNAPSHOT,
        "index": 3,
        "generation": Generation(4, 17),
        "offset": offset,
        "nbytes": nbytes,
    }
    return Request(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def resolver(tmp_path: Path) -> OneFile:
    path = tmp_path / "arena"
    path.write_bytes(CONTENT)
    return OneFile(path)


@pytest.fixture
def server(resolver: OneFile) -> Iterator[BulkServer]:
    server = BulkServer("127.0.0.2", 0, resolver)
    server.start()
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[BulkClient]:
    client = BulkClient(timeout_s=5)
    yield client
    client.close()


@given(
    job=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60),
    numbers=st.tuples(*[st.integers(0, 2**64 - 1)] * 5),
    index=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(Kind),
    piece_bytes=st.integers(1, 2**32 - 1),
)
def test_a_request_comes_back_from_its_frame(
    job: str, numbers: tuple[int, ...], index: int, kind: Kind, piece_bytes: int
) -> None:
    epoch, generation_epoch, step, offset, nbytes = numbers
    if kind is Kind.CHANGE:
        offset, nbytes = offset - offset % piece_bytes, min(nbytes, protocol.CHANGE_BYTES_MAX)
    if kind is Kind.PROBE:
        offset, nbytes = 0, min(nbytes, protocol.PROBE_BYTES_MAX)
    request = Request(
        job=job,
        epoch=epoch,
        kind=kind,
        index=index,
        generation=Generation(generation_epoch, step),
        offset=offset,
        nbytes=nbytes,
        base=Generation(step, epoch),
        piece_bytes=piece_bytes,
    )
    frame = protocol.encode_request(request)
    head, name = frame[: protocol.REQUEST_BYTES], frame[protocol.REQUEST_BYTES :]
    assert protocol.job_name_bytes(head) == len(name)
    assert protocol.decode_request(head, name) == request


def test_a_job_name_that_does_not_fit_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError, match="257 bytes"):
        protocol.encode_request(wanted(0, 1, job="x" * 257))


def test_an_error_keeps_its_kind_across_the_wire() -> None:
    frame = protocol.encode_error(7, StaleEpochError("epoch 3 has ended"))
    head = protocol.decode_reply(frame[: protocol.REPLY_BYTES])
    assert not head.ok
    error = protocol.decode_error(frame[protocol.REPLY_BYTES :])
    assert isinstance(error, StaleEpochError)
    assert str(error) == "epoch 3 has ended"


def test_exactly_the_bytes_asked_for_arrive(
    server: BulkServer, client: BulkClient, resolver: OneFile
) -> None:
    target = bytearray(2_000_000)
    client.fetch_into(server.address, wanted(123_457, len(target)), memoryview(target))
    assert target == CONTENT[123_457 : 123_457 + len(target)]
    assert resolver.asked == [wanted(123_457, len(target))]
    assert client.received_bytes == len(target)


def test_a_change_arrives_with_the_digests_of_its_pieces(
    server: BulkServer, client: BulkClient
) -> None:
    change = {"kind": Kind.CHANGE, "piece_bytes": 64, "base": Generation(4, 16)}
    target = bytearray(1000 + 16 * 8)
    client.fetch_into(server.address, wanted(640, 1000, **change), memoryview(target))
    assert target == bytes(len(target) - 3) + b"end"
    with pytest.raises(StorageError, match="no such snapshot"):
        client.open(server.address, wanted(0, 64, **change | {"base": Generation(9, 9)}))
    with pytest.raises(UnreachableError):  # the server takes it for no request at all
        client.open(server.address, wanted(7, 64, **change))


def test_requests_follow_one_another_on_one_connection(
    server: BulkServer, client: BulkClient
) -> None:
    target = bytearray(1000)
    for offset in (0, 1000, 2000):
        client.fetch_into(server.address, wanted(offset, 1000), memoryview(target))
        assert target == CONTENT[offset : offset + 1000]
    with pytest.raises(StaleEpochError, match="epoch 4 has ended"):
        client.fetch_into(server.address, wanted(0, 1000, epoch=4), memoryview(target))
    with pytest.raises(StorageError, match="no parity of lane 3"):
        client.fetch_into(server.address, wanted(0, 1000, kind=Kind.PARITY), memoryview(target))
    client.fetch_into(server.address, wanted(5, 0), memoryview(b""))
    assert server.accepted == 1


def test_streams_read_in_turn_do_not_mix(server: BulkServer, client: BulkClient) -> None:
    with ExitStack() as stack:
        streams = [
            stack.enter_context(client.open(server.address, wanted(offset, 1_000_000)))
            for offset in (0, 1_000_000, 2_000_000)
        ]
        got = [bytearray(1_000_000) for _ in streams]
        for at in range(0, 1_000_000, 250_000):
            for stream, target in zip(streams, got, strict=True):
                stream.read_into(memoryview(target)[at : at + 250_000])
    assert b"".join(got) == CONTENT


def test_a_stream_that_was_not_read_to_its_end_is_not_used_again(
    server: BulkServer, client: BulkClient
) -> None:
    with client.open(server.address, wanted(0, 2_000_000)) as stream:
        stream.read_into(memoryview(bytearray(10)))
    target = bytearray(100)
    client.fetch_into(server.address, wanted(500, 100), memoryview(target))
    assert target == CONTENT[500:600]


def test_more_than_there_is_is_refused(server: BulkServer, client: BulkClient) -> None:
    with pytest.raises(StorageError, match="3000000 are there"):
        client.fetch_into(server.address, wanted(0, 3_000_001), memoryview(bytearray(3_000_001)))


def test_a_file_that_vanished_is_a_storage_error(
    server: BulkServer, client: BulkClient, resolver: OneFile
) -> None:
    resolver.path.unlink()
    with pytest.raises(StorageError, match="no longer there"):
        client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))


def test_a_file_that_is_too_short_ends_the_stream_and_not_the_server(
    server: BulkServer, client: BulkClient, resolver: OneFile
) -> None:
    os.truncate(resolver.path, 1000)
    with pytest.raises(UnreachableError, match="the connection ended"):
        client.fetch_into(server.address, wanted(0, 2000), memoryview(bytearray(2000)))
    client.fetch_into(server.address, wanted(0, 1000), memoryview(bytearray(1000)))


def malformed() -> dict[str, bytes]:
    good = protocol.encode_request(wanted(0, 10))
    size = protocol.REQUEST_BYTES
    return {
        "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(size, b"\n"),
        "another version": good[:4] + b"\x09" + good[5:],
        "unknown kind": good[:5] + b"\x07" + good[6:],
        "no job": good[:6] + struct.pack("<H", 0) + good[8:],
        "enormous job": good[:6] + struct.pack("<H", 65535) + good[8:],
        "job is not UTF-8": good[:size] + b"\xff" * (len(good) - size),
    }


@pytest.mark.parametrize("name", malformed())
def test_a_malformed_frame_costs_the_connection_and_is_counted(
    server: BulkServer, resolver: OneFile, name: str
) -> None:
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(malformed()[name])
        assert ended(connection)
    server.close()
    assert server.malformed == 1
    assert resolver.asked == []


def ended(connection: socket.socket) -> bool:
    """Whether the other side closes it (a reset is one way to do so)."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


class Busy(OneFile):
    """Takes as long to find bytes as the test wants."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def locate(self, request: Request) -> Located:
        self.begun.set()
        assert self.may_end.wait(10)
        return super().locate(request)


class Dialling(ConnectionFactory):
    """Plain connections, of which the sockets are known."""

    def __init__(self) -> None:
        super().__init__(None, Protection.AUTHENTICATED)
        self.dialled_to: list[socket.socket] = []

    def dialled(self, connection: socket.socket, timeout_s: float) -> Connection:
        self.dialled_to.append(connection)
        return super().dialled(connection, timeout_s)


def test_a_connection_beyond_those_at_work_is_closed_and_counted(resolver: OneFile) -> None:
    busy = Busy(resolver.path)
    server = BulkServer("127.0.0.2", 0, busy, connections_max=1)
    server.start()
    client = BulkClient(timeout_s=5)
    view = memoryview(bytearray(10))
    first = threading.Thread(target=client.fetch_into, args=(server.address, wanted(0, 10), view))
    first.start()
    assert busy.begun.wait(5)
    with pytest.raises(UnreachableError):
        client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
    busy.may_end.set()
    first.join()
    client.close()
    server.close()
    assert (bytes(view), server.refused, server.shed) == (CONTENT[:10], 1, 0)


def test_connections_that_ask_for_nothing_give_way_to_one_that_does(resolver: OneFile) -> None:
    server = BulkServer("127.0.0.2", 0, resolver, connections_max=3)
    server.start()
    client = BulkClient(timeout_s=5)
    client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
    silent = [socket.create_connection((server.host, server.port)) for _ in range(50)]
    late = BulkClient(timeout_s=5)
    late.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
    late.close()
    assert silent[0].recv(1) == b"", "the first that was silent is closed"
    client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
    client.close()
    server.close()
    for connection in silent:
        connection.close()
    assert (server.shed >= 48, server.accepted) == (True, 52), "the used one is used again"


def test_the_address_with_most_connections_gives_way_first(resolver: OneFile) -> None:
    server = BulkServer("127.0.0.2", 0, resolver, connections_max=4)
    server.start()
    where = (server.host, server.port)
    peer = socket.create_connection(where, source_address=("127.0.0.9", 0))
    crowd = [socket.create_connection(where, source_address=("127.0.0.8", 0)) for _ in range(40)]
    late = BulkClient(timeout_s=5)
    late.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
    assert crowd[0].recv(1) == b""
    peer.sendall(protocol.encode_request(wanted(0, 10)))
    head = protocol.decode_reply(peer.recv(protocol.REPLY_BYTES, socket.MSG_WAITALL))
    assert head.ok, "the one that was silent longest, but not in a crowd"
    late.close()
    server.close()
    for each in (peer, *crowd):
        each.close()


def test_connections_to_addresses_that_peers_have_left_are_closed(resolver: OneFile) -> None:
    now, wiring = 0.0, Dialling()
    client = BulkClient(5, wiring, lambda: now)
    for _ in range(3):
        server = BulkServer("127.0.0.2", 0, resolver)
        server.start()
        client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
        server.close()
        now += IDLE_S + 1
    assert [each.fileno() >= 0 for each in wiring.dialled_to] == [False, False, True]
    client.close()


def test_a_client_survives_the_restart_of_a_peer(resolver: OneFile) -> None:
    client = BulkClient(timeout_s=5)
    server = BulkServer("127.0.0.2", 0, resolver)
    port = server.port
    for _ in range(3):
        server.start()
        client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
        server.close()
        server = BulkServer("127.0.0.2", port, resolver)
    server.start()
    server.close()
    with pytest.raises(UnreachableError, match=str(port)):
        client.fetch_into(server.address, wanted(0, 10), memoryview(bytearray(10)))
    client.close()


def test_closing_the_server_ends_transfers_that_no_client_reads(
    server: BulkServer, client: BulkClient, resolver: OneFile
) -> None:
    # More than the buffers of both sockets could hold.
    os.truncate(resolver.path, 1 << 30)
    resolver.nbytes = 1 << 30
    target = memoryview(bytearray(1 << 20))
    with client.open(server.address, wanted(0, 1 << 30)) as stream:
        server.close()
        with pytest.raises(UnreachableError):
            for _ in range(1 << 10):
                stream.read_into(target)


def test_a_peer_that_is_silent_is_unreachable_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.2", 0)) as silent:
        client = BulkClient(timeout_s=0.05)
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="no bytes arrived in time"):
            client.fetch_into(address, wanted(0, 10), memoryview(bytearray(10)))
        client.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64), "not a bulk reply"),
        (protocol.encode_ok(wanted(0, 11)), "a request other than"),
    ],
)
def test_a_wrong_answer_is_a_protocol_error(answer: bytes, message: str) -> None:
    with scripted_peer(answer) as address:
        client = BulkClient(timeout_s=5)
        with pytest.raises(ProtocolError, match=message):
            client.fetch_into(address, wanted(0, 10), memoryview(bytearray(10)))
        client.close()


@contextmanager
def scripted_peer(answer: bytes) -> Iterator[str]:
    """The address of a peer that reads one request and answers it so."""

    def run(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(protocol.REQUEST_BYTES + protocol.JOB_NAME_BYTES_MAX)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.2", 0)) as listener:
        thread = threading.Thread(target=run, args=(listener,))
        thread.start()
        yield f"127.0.0.2:{listener.getsockname()[1]}"
        thread.join(timeout=5)


def test_an_address_that_is_none_is_unreachable(client: BulkClient) -> None:
    for address in ("nowhere", "127.0.0.2:port", "127.0.0.2:1"):
        with pytest.raises(HoldfastError, match="bulk service at"):
            client.open(address, wanted(0, 1))


def test_a_port_in_use_is_an_error(server: BulkServer, resolver: OneFile) -> None:
    with pytest.raises(UnreachableError, match="cannot listen"):
        BulkServer("127.0.0.2", server.port, resolver)
