import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast_core.errors import RankInUseError, StorageError, UnknownSessionError
from holdfast_daemon.memory.arena_claims import ClaimRequest, claim_is_free, open_claim
from holdfast_daemon.trainers.descriptors import DescriptorServer

TIMEOUT_S = 10


class Sessions:
    """The tokens of one arena, and which claims have ended."""

    def __init__(self, arena: Path) -> None:
        self.arena = arena
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.asking: socket.socket | None = None
        """A trainer that dies once its token was read."""

    def resolve(self, token: str) -> ClaimRequest:
        if self.asking is not None:
            self.asking.close()
        if token.startswith("claim"):
            return ClaimRequest(path=self.arena, exclusive=True)
        if token.startswith("read"):
            return ClaimRequest(path=self.arena, exclusive=False)
        raise UnknownSessionError(f"no session has the token {token}\nopen a new one")


@pytest.fixture
def arena() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = Path(name) / "arena"
        path.write_bytes(b"arena bytes")
        yield path


@asynccontextmanager
async def serving(arena: Path, *, token_timeout_s: float = TIMEOUT_S) -> AsyncIterator[Sessions]:
    sessions = Sessions(arena)
    server = DescriptorServer(
        arena.with_name("arena.sock"),
        sessions.resolve,
        sessions.closed.put_nowait,
        token_timeout_s=token_timeout_s,
    )
    await server.start()
    try:
        yield sessions
    finally:
        await server.close()


def ask(arena: Path, line: bytes) -> tuple[socket.socket, bytes, list[int]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(arena.with_name("arena.sock")))
    connection.sendall(line)
    answer, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    return connection, answer, list(descriptors)


def is_ended(arena: Path, line: bytes) -> bool:
    """Whether the server ends a connection without an answer, maybe before it gets the line."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(arena.with_name("arena.sock")))
        try:
            connection.sendall(line)
            return connection.recv(4096) == b""
        except ConnectionError:
            return True


async def asked(arena: Path, line: bytes) -> tuple[socket.socket, bytes, list[int]]:
    return await asyncio.to_thread(ask, arena, line)


def test_a_claim_gets_a_writable_locked_descriptor_until_it_ends(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            connection, answer, (descriptor,) = await asked(arena, b"claim-1\n")
            assert answer == b"ok\n"
            os.pwrite(descriptor, b"ARENA", 0)
            assert arena.read_bytes() == b"ARENA bytes"
            assert not claim_is_free(arena)
            os.close(descriptor)
            assert claim_is_free(arena)
            connection.close()
            closed = await asyncio.wait_for(sessions.closed.get(), TIMEOUT_S)
            assert closed == "claim-1"

    asyncio.run(main())


def test_a_second_claim_is_refused_and_the_first_keeps_its_lock(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            first, _, (descriptor,) = await asked(arena, b"claim-1\n")
            second, answer, descriptors = await asked(arena, b"claim-2\n")
            assert answer.startswith(b"error rank_in_use another living process")
            assert answer.endswith(b"\n")
            assert descriptors == []
            assert not claim_is_free(arena)
            second.close()
            os.close(descriptor)
            third, answer, (descriptor,) = await asked(arena, b"claim-3\n")
            assert answer == b"ok\n"
            os.close(descriptor)
            first.close()
            third.close()
            ended = {await asyncio.wait_for(sessions.closed.get(), TIMEOUT_S) for _ in range(2)}
            assert ended == {"claim-1", "claim-3"}

    asyncio.run(main())


def test_the_claim_of_a_trainer_that_was_gone_before_the_answer_ends(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            sessions.asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sessions.asking.connect(str(arena.with_name("arena.sock")))
            sessions.asking.sendall(b"claim-1\n")
            assert await asyncio.wait_for(sessions.closed.get(), TIMEOUT_S) == "claim-1"
            assert claim_is_free(arena)

    asyncio.run(main())


def test_a_restore_reads_beside_a_claim_and_cannot_write(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            claim, _, (writable,) = await asked(arena, b"claim-1\n")
            read, answer, (readable,) = await asked(arena, b"read-1\n")
            assert answer == b"ok\n"
            assert os.pread(readable, 5, 0) == b"arena"
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(readable, b"x", 0)
            assert await asyncio.to_thread(read.recv, 1) == b""
            assert sessions.closed.empty()
            for descriptor in (writable, readable):
                os.close(descriptor)
            for connection in (claim, read):
                connection.close()

    asyncio.run(main())


def test_an_unknown_token_is_answered_in_one_line(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            connection, answer, descriptors = await asked(arena, b"what\n")
            expected = b"error unknown_session no session has the token what open a new one\n"
            assert (answer, descriptors) == (expected, [])
            connection.close()
            assert sessions.closed.empty()

    asyncio.run(main())


@pytest.mark.parametrize("line", [b"x" * 129 + b"\n", b"x" * 500, b"\xff\n", b"\n", b"a\nb\n"])
def test_a_malformed_token_is_refused(arena: Path, line: bytes) -> None:
    async def main() -> None:
        async with serving(arena):
            connection, answer, descriptors = await asked(arena, line)
            assert answer.startswith(b"error protocol ")
            assert descriptors == []
            connection.close()

    asyncio.run(main())


def test_a_client_that_sends_no_token_is_not_waited_for(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena, token_timeout_s=0.01):
            assert await asyncio.to_thread(is_ended, arena, b"claim-without-end")

    asyncio.run(main())


def test_an_arena_that_is_gone_is_a_storage_error(arena: Path) -> None:
    arena.unlink()

    async def main() -> None:
        async with serving(arena):
            connection, answer, _ = await asked(arena, b"claim-1\n")
            assert answer.startswith(b"error storage cannot open the arena")
            connection.close()

    asyncio.run(main())


def test_the_lock_outlives_the_server_and_a_new_one_takes_its_place(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            connection, _, (descriptor,) = await asked(arena, b"claim-1\n")
        assert await asyncio.to_thread(connection.recv, 1) == b""
        assert sessions.closed.empty()
        assert not claim_is_free(arena)
        # What a killed daemon leaves behind does not keep the next one from starting.
        stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stale.bind(str(arena.with_name("arena.sock")))
        stale.close()
        async with serving(arena):
            other, answer, _ = await asked(arena, b"claim-2\n")
            assert answer.startswith(b"error rank_in_use")
            other.close()
        connection.close()
        os.close(descriptor)
        assert claim_is_free(arena)

    asyncio.run(main())


CHILD = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(sys.argv[1])
connection.sendall(b"claim-child\\n")
answer, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
print(answer.decode().strip(), len(descriptors), flush=True)
sys.stdin.read()
"""


def test_a_killed_trainer_loses_its_claim_at_once(arena: Path) -> None:
    async def main() -> None:
        async with serving(arena) as sessions:
            child = await asyncio.to_thread(
                subprocess.Popen,
                [sys.executable, "-c", CHILD, str(arena.with_name("arena.sock"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert child.stdout is not None
            assert child.stdin is not None
            with child.stdin, child.stdout:
                printed = await asyncio.to_thread(child.stdout.readline)
                assert printed == b"ok 1\n"
                assert not claim_is_free(arena)
                child.send_signal(signal.SIGKILL)
                closed = await asyncio.wait_for(sessions.closed.get(), TIMEOUT_S)
                assert closed == "claim-child"
                child.wait(timeout=TIMEOUT_S)
            assert claim_is_free(arena)

    asyncio.run(main())


def test_a_path_that_is_too_long_for_a_socket_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        server = DescriptorServer(
            tmp_path / ("x" * 120),
            lambda _: ClaimRequest(path=tmp_path, exclusive=False),
            lambda _: None,
        )
        with pytest.raises(StorageError, match="at most 107"):
            await server.start()
        await server.close()

    asyncio.run(main())


def test_a_lock_of_another_process_counts_too(arena: Path) -> None:
    with arena.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not claim_is_free(arena)
        with pytest.raises(RankInUseError):
            open_claim(ClaimRequest(path=arena, exclusive=True))
    assert claim_is_free(arena)
    with pytest.raises(StorageError):
        claim_is_free(arena.with_name("missing"))
