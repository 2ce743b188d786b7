"""The limits of gRPC's servers and channels, tried on a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from holdfast_core.errors import HoldfastError
from holdfast_daemon.limits.refusals import refuse
from holdfast_daemon.net.serving import serve_trainers
from holdfast_protos import trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels


class Greeter(trainer_pb2_grpc.TrainerServicer):
    """Answers every Hello with what it was sent."""

    async def share_of(self, headers: dict[str, str], of_session: bool) -> str:
        return ""

    async def refuse(self, request: Any, context: Any, error: HoldfastError) -> None:
        await refuse(context, error)

    async def Hello(self, request: Any, context: Any) -> Any:
        return trainer_pb2.HelloReply(epoch=len(request.job))


def _run(work: Any, path: Path) -> None:
    async def main() -> None:
        service: Any = Greeter()  # type: ignore[abstract]
        server = await serve_trainers(service, path / "daemon.sock", 0o600)
        target = f"unix:{path}/daemon.sock"
        options = [*channels.channel_options(), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            await work(trainer_pb2_grpc.TrainerStub(channel))
        await server.stop(0)

    asyncio.run(main())


def test_a_message_of_16_mib_passes_and_one_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    async def work(stub: Any) -> None:
        reply = await stub.Hello(trainer_pb2.HelloRequest(job="x" * (16 << 20)))
        assert reply.epoch == 16 << 20
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Hello(trainer_pb2.HelloRequest(job="x" * (channels.MESSAGE_BYTES_MAX + 1)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    _run(work, tmp_path)


def test_headers_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async def work(stub: Any) -> None:
        long = (("authorization", "x" * (channels.METADATA_BYTES_MAX + 1)),)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Hello(trainer_pb2.HelloRequest(), metadata=long)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    _run(work, tmp_path)


def test_every_server_and_channel_has_the_limits() -> None:
    servers = (
        channels.TRAINER_STREAMS_MAX,
        channels.PEER_STREAMS_MAX,
        channels.CONTROL_STREAMS_MAX,
    )
    for streams in servers:
        options = dict(channels.server_options(streams))
        assert options["grpc.max_concurrent_streams"] == streams
        assert options["grpc.max_receive_message_length"] == channels.MESSAGE_BYTES_MAX
    bare = []
    for root in ("daemon", "operator", "trainer_sdk", "cli"):
        for path in (Path(__file__).parents[3] / root).rglob("*.py"):
            text = path.read_text()
            made = text.count("insecure_channel(") + text.count("grpc.aio.server(")
            limited = text.count("channels.channel_options(") + text.count(
                "channels.server_options("
            )
            if made > limited:
                bare.append(path.name)
    assert bare == []
