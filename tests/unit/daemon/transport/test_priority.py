"""Bytes that nothing waits for are marked, and not for ever."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.transport import priority
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.priority import PATIENCE_S, GivingWay, mark
from holdfast_daemon.transport.protocol import Kind, Located, Request
from holdfast_daemon.transport.server import BulkServer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(step: int, *, epoch: int = 5, of_epoch: int = 5, job: str = "job") -> Request:
    return Request(
        job=job,
        epoch=epoch,
        kind=Kind.SNAPSHOT,
        index=0,
        generation=Generation(of_epoch, step),
        offset=0,
        nbytes=1,
    )


def test_parity_of_the_running_epoch_gives_way_and_a_rebuild_after_a_loss_does_not() -> None:
    deciding = GivingWay(Clock())
    assert deciding.applies_to(asked(7))
    assert not deciding.applies_to(asked(7, epoch=6))


def test_a_generation_that_is_asked_for_too_long_is_sent_like_anything_else() -> None:
    clock = Clock()
    deciding = GivingWay(clock)
    assert deciding.applies_to(asked(7))
    clock.now += PATIENCE_S - 1
    assert deciding.applies_to(asked(7))
    clock.now += 1
    assert not deciding.applies_to(asked(7))
    assert not deciding.applies_to(asked(6)), "older ones wait for longer still"
    assert deciding.applies_to(asked(8))
    assert deciding.applies_to(asked(7, job="other")), "each job has its own patience"


def test_names_of_jobs_that_strangers_make_up_are_bounded() -> None:
    deciding = GivingWay(Clock())
    for number in range(2 * priority.JOBS_MAX):
        deciding.applies_to(asked(1, job=str(number)))
    assert len(deciding._asked) == priority.JOBS_MAX


class OneFile:
    """`transport.protocol.Resolver`: every request means the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"bytes")

    def locate(self, request: Request) -> Located:
        return Located(path=self._path, parts=((request.offset, request.nbytes),))

    def change(self, request: Request) -> Iterator[bytes]:
        raise NotImplementedError


def test_a_connection_is_marked_by_what_was_asked_for_last(tmp_path: Path) -> None:
    server, client = BulkServer("127.0.0.1", 0, OneFile(tmp_path / "arena")), BulkClient(5.0)
    server.start()
    try:
        found = []
        for of_epoch in (4, 5, 5, 4):
            request = asked(7, of_epoch=of_epoch)
            client.fetch_into(server.address, request, memoryview(bytearray(1)))
            (connection,) = server._connections
            found.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
        assert found == [0, 1, 1, 0]
    finally:
        client.close()
        server.close()


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as dialled,
        listener.accept()[0],
    ):
        yield dialled


def test_a_mark_is_put_and_taken_away(connection: socket.socket) -> None:
    def marks() -> tuple[int, int]:
        return (
            connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
        )

    mark(connection, gives_way=True)
    assert marks() == (0b000001_00, 1)
    mark(connection, gives_way=False)
    assert marks() == (0, 0)
