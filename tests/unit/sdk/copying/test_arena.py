from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast._copying.arena import MappedArena, claim_arena, read_arena
from holdfast_core.errors import (
    ProtocolError,
    RankInUseError,
    StorageError,
    UnreachableError,
)

NBYTES = 8192
WAIT_S = 10
Serve = Callable[[Callable[[socket.socket, bytes], None]], Path]


@pytest.fixture
def arena_file(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(bytes(NBYTES))
    return path


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts an arena socket that handles one connection."""
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []

    def start(handle: Callable[[socket.socket, bytes], None]) -> Path:
        path = tmp_path / "arena.sock"
        listener = socket.socket(socket.AF_UNIX)
        ends.append(listener)
        listener.bind(str(path))
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            ends.append(connection)
            handle(connection, connection.recv(128))

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return path

    yield start
    for thread in threads:
        thread.join(WAIT_S)
    for end in ends:
        end.close()


def pass_file(path: Path, flags: int) -> Callable[[socket.socket, bytes], None]:
    def handle(connection: socket.socket, token: bytes) -> None:
        assert token == b"token\n"
        descriptor = os.open(path, flags)
        socket.send_fds(connection, [b"ok\n"], [descriptor])
        os.close(descriptor)

    return handle


def test_a_claimed_arena_is_shared_memory(serve: Serve, arena_file: Path) -> None:
    path = serve(pass_file(arena_file, os.O_RDWR))
    arena = claim_arena(path, "token", NBYTES, timeout_s=WAIT_S)
    arena.view(100, 5)[:] = b"hello"
    assert arena_file.read_bytes()[100:105] == b"hello"
    arena.close()
    arena.close()


def test_the_end_of_the_connection_means_that_the_trainer_is_gone(
    serve: Serve, arena_file: Path
) -> None:
    ended = threading.Event()

    def handle(connection: socket.socket, token: bytes) -> None:
        pass_file(arena_file, os.O_RDWR)(connection, token)
        if connection.recv(1) == b"":
            ended.set()

    arena = claim_arena(serve(handle), "token", NBYTES, timeout_s=WAIT_S)
    assert not ended.is_set()
    arena.close()
    assert ended.wait(WAIT_S)


def _is_open(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def test_a_forked_child_holds_neither_claim_nor_mapping(serve: Serve, arena_file: Path) -> None:
    passed, ended = threading.Event(), threading.Event()

    def handle(connection: socket.socket, token: bytes) -> None:
        pass_file(arena_file, os.O_RDWR)(connection, token)
        passed.set()
        if connection.recv(1) == b"":
            ended.set()

    arena = claim_arena(serve(handle), "token", NBYTES, timeout_s=WAIT_S)
    assert passed.wait(WAIT_S)  # the server runs here too: the child must not inherit its copy
    stay, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(stay, 1)
        held = [fd for fd in range(3, 256) if _is_open(fd, arena_file)]
        mapped = Path("/proc/self/maps").read_text()
        os._exit(2 * bool(held) + 4 * (str(arena_file) in mapped))
    arena.close()
    assert ended.wait(WAIT_S)  # although the child lives
    os.close(go)
    os.close(stay)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_read_arena_is_mapped_read_only(serve: Serve, arena_file: Path) -> None:
    arena_file.write_bytes(bytes(range(256)) * 32)
    path = serve(pass_file(arena_file, os.O_RDONLY))
    arena = read_arena(path, "token", 8192, timeout_s=WAIT_S)
    view = arena.view(250, 10)
    assert bytes(view) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
    assert view.readonly
    arena.close()


def test_an_arena_to_read_that_is_too_short_is_refused(serve: Serve, arena_file: Path) -> None:
    path = serve(pass_file(arena_file, os.O_RDONLY))
    with pytest.raises(StorageError, match="instead of"):
        read_arena(path, "token", NBYTES + 1, timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (b"error rank_in_use another process holds it\n", RankInUseError, "another process"),
        (b"what?\n", ProtocolError, "answered"),
        (b"ok\n", ProtocolError, "answered"),
    ],
)
def test_a_refusal_comes_back_as_its_kind(
    serve: Serve, answer: bytes, error: type[Exception], match: str
) -> None:
    path = serve(lambda connection, token: connection.sendall(answer))
    with pytest.raises(error, match=match):
        claim_arena(path, "token", NBYTES, timeout_s=WAIT_S)


def test_a_missing_socket_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="does not answer"):
        read_arena(tmp_path / "none.sock", "token", NBYTES, timeout_s=1)


def test_an_arena_shorter_than_its_layout_is_refused(arena_file: Path) -> None:
    with pytest.raises(StorageError, match="instead of"):
        MappedArena(os.open(arena_file, os.O_RDWR), NBYTES + 1)


def test_an_arena_to_read_can_be_closed_twice(arena_file: Path) -> None:
    reader = MappedArena(os.open(arena_file, os.O_RDONLY), NBYTES, writable=False)
    reader.close()
    reader.close()
