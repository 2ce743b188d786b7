"""What is read of a call before it is known who makes it, and whose calls wait for whose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from holdfast_core.errors import HoldfastError, UnauthenticatedError, UnknownSessionError
from holdfast_daemon.limits.refusals import refuse
from holdfast_daemon.net.serving import serve_trainers
from holdfast_daemon.trainers import receiving
from holdfast_daemon.trainers.receiving import SHARE_BYTES_MAX, SHARE_CALLS_MAX
from holdfast_protos import trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels

JOBS = ("team.moe", "team.other")


class Service(trainer_pb2_grpc.TrainerServicer):
    """Knows a caller by the job that the header names; keeps calls that begin with `wait`."""

    def __init__(self) -> None:
        self.answering: list[str] = []
        self.gate = asyncio.Event()

    async def share_of(self, headers: dict[str, str], of_session: bool) -> str:
        job = headers.get("authorization", "")
        if job not in JOBS:
            raise UnknownSessionError("no session") if of_session else UnauthenticatedError("no")
        return job

    async def refuse(self, request: Any, context: Any, error: HoldfastError) -> None:
        assert request is None
        await refuse(context, error)

    async def Hello(self, request: Any, context: Any) -> Any:
        self.answering.append(request.job[:8])
        if request.job.startswith("wait"):
            await self.gate.wait()
        return trainer_pb2.HelloReply(epoch=len(request.job))

    async def Close(self, request: Any, context: Any) -> Any:
        return trainer_pb2.CloseReply()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for epoch in (1, 2):
            yield trainer_pb2.WatchEvent(epoch_ended=epoch)


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Service, grpc.aio.Channel]]:
    service: Any = Service()  # type: ignore[abstract]
    server = await serve_trainers(service, path / "daemon.sock", 0o600)
    options = channels.channel_options()
    async with grpc.aio.insecure_channel(f"unix:{path}/daemon.sock", options=options) as channel:
        yield service, channel
        service.gate.set()
    await server.stop(0)


def as_job(job: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", job),)


def run(work: Callable[[Service, grpc.aio.Channel], Awaitable[None]], path: Path) -> None:
    async def main() -> None:
        async with served(path) as (service, channel):
            await asyncio.wait_for(work(service, channel), 30)

    asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def hello(channel: grpc.aio.Channel, job: str, words: str) -> Any:
    stub: Any = trainer_pb2_grpc.TrainerStub(channel)
    return stub.Hello(trainer_pb2.HelloRequest(job=words), metadata=as_job(job))


def test_a_call_without_a_token_is_refused_although_its_request_never_comes(tmp_path: Path) -> None:
    async def work(service: Service, channel: grpc.aio.Channel) -> None:
        for method, code in (
            ("Hello", grpc.StatusCode.UNAUTHENTICATED),
            ("Close", grpc.StatusCode.NOT_FOUND),
            ("Restore", grpc.StatusCode.UNAUTHENTICATED),
            ("Watch", grpc.StatusCode.NOT_FOUND),
        ):
            silent: Any = channel.stream_stream
            call = silent(f"/holdfast.v1.Trainer/{method}")()
            assert await call.code() is code, method

    run(work, tmp_path)


def test_requests_and_streams_of_callers_with_a_right_are_answered(tmp_path: Path) -> None:
    async def work(service: Service, channel: grpc.aio.Channel) -> None:
        assert (await hello(channel, JOBS[0], "words")).epoch == 5
        stub: Any = trainer_pb2_grpc.TrainerStub(channel)
        watch = stub.Watch(trainer_pb2.WatchRequest(), metadata=as_job(JOBS[0]))
        assert [event.epoch_ended async for event in watch] == [1, 2]

    run(work, tmp_path)


@pytest.mark.parametrize("message", [None, b"\xff\xff", b""])
def test_a_request_that_does_not_come_or_cannot_be_read_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: bytes | None
) -> None:
    if message is None:  # any other ends the call by itself
        monkeypatch.setattr(receiving, "RECEIVE_S", 0.2)

    async def work(service: Service, channel: grpc.aio.Channel) -> None:
        silent: Any = channel.stream_unary
        call = silent("/holdfast.v1.Trainer/Hello")(metadata=as_job(JOBS[0]))
        if message:
            await call.write(message)
        if message is not None:
            await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        monkeypatch.undo()
        assert (await hello(channel, JOBS[0], "words")).epoch == 5, "its share was given back"

    run(work, tmp_path)


def test_a_job_that_has_its_share_of_bytes_waits_and_others_do_not(tmp_path: Path) -> None:
    async def work(service: Service, channel: grpc.aio.Channel) -> None:
        large = "wait" + "x" * (SHARE_BYTES_MAX // 4 - 100)
        held = [hello(channel, JOBS[0], large) for _ in range(4)]
        tasks = [asyncio.ensure_future(call) for call in held]
        await _until(lambda: len(service.answering) == 4)
        late = asyncio.ensure_future(hello(channel, JOBS[0], "late"))
        assert (await hello(channel, JOBS[1], "words")).epoch == 5
        assert service.answering[4:] == ["words"]
        assert not late.done()
        held[0].cancel()
        assert (await late).epoch == 4
        service.gate.set()
        await asyncio.gather(*tasks[1:])

    run(work, tmp_path)


def test_a_job_that_has_its_share_of_calls_is_refused_and_others_are_not(tmp_path: Path) -> None:
    async def work(service: Service, channel: grpc.aio.Channel) -> None:
        async def connections(count: int) -> list[grpc.aio.Channel]:
            own = [("grpc.use_local_subchannel_pool", 1)]
            path = f"unix:{tmp_path}/daemon.sock"
            return [grpc.aio.insecure_channel(path, options=own) for _ in range(count)]

        several = await connections(SHARE_CALLS_MAX // channels.TRAINER_STREAMS_MAX)
        for one in several:  # in the first moment a client does not know how many it may make
            await hello(one, JOBS[0], "words")
        held = [
            asyncio.ensure_future(hello(several[number % len(several)], JOBS[0], "wait"))
            for number in range(SHARE_CALLS_MAX)
        ]
        await _until(lambda: service.answering.count("wait") == SHARE_CALLS_MAX)
        with pytest.raises(grpc.aio.AioRpcError, match=r"calls of team\.moe are in progress"):
            await hello(channel, JOBS[0], "words")
        assert (await hello(channel, JOBS[1], "words")).epoch == 5
        service.gate.set()
        await asyncio.gather(*held)
        assert (await hello(channel, JOBS[0], "words")).epoch == 5
        for one in several:
            await one.close(None)

    run(work, tmp_path)
