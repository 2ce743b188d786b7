"""Simulation of all nodes' daemons in one process: the real protocol, with nothing behind it.

Reads commands, one per line: `begin JOB NODE` starts the job's ranks on the node, also after a
failure, and `lose JOB NODE` ends their sessions. Writes one JSON object per line: when a membership
is first seen, and when the last of its members has it.

Heartbeats are assembled from bytes, and a membership is read once for all daemons that get it: this
leaves the machine's cores to the operator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio

from holdfast_protos import codec, control_pb2, values_pb2
from holdfast_protos.changes import changed

METHOD = "/holdfast.v1.Control/Connect"
TICKS = 20
"""Number of ticks per heartbeat interval; each sends its share of the heartbeats."""
STEP_S = 0.5
REDIAL_S = 1.0
BUDGET_BYTES = 1 << 40

Version = tuple[int, int]
"""Version of a membership: (epoch, revision)."""


@dataclass(slots=True)
class Published:
    """A membership as sent to all of its members."""

    job: str
    version: Version
    payload: bytes
    ranks: dict[str, range]
    missing: set[str]
    """Nodes that have not received it yet."""


@dataclass(slots=True, eq=False)
class Player:
    """One simulated daemon."""

    node: str
    head: bytes
    """Encoded heartbeat without jobs."""
    jobs: dict[str, Published] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    """Jobs whose membership has not yet passed on this stream."""
    at_work: set[str] = field(default_factory=set)
    """Jobs with a pod on this node."""
    lost: dict[str, int] = field(default_factory=dict)
    """Epoch in which a job's ranks on this node were lost, by job."""
    call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that admits one write to the stream at a time."""

    def heartbeat(self, step: int) -> bytes:
        """The next heartbeat. A protobuf message may be assembled by joining its parts."""
        parts = [self.head]
        for job, published in self.jobs.items():
            part = self._job(published, step).SerializeToString()
            if job in self.untold:
                part += _field(3, published.payload)
            parts.append(_field(9, part))
        self.untold.clear()
        return b"".join(parts)

    def _job(self, published: Published, step: int) -> control_pb2.JobState:
        epoch = published.version[0]
        lost = self.lost.get(published.job) == epoch
        state = control_pb2.JobState(
            job=published.job, epoch=epoch, verified=True, has_line=True, arena_bytes=1 << 30
        )
        state.revision = published.version[1]
        if published.job in self.at_work:
            state.protected.epoch = state.complete.epoch = epoch
            state.protected.step = state.complete.step = step
        state.line.reason = "played"
        if epoch > 1:
            state.line.generation.epoch, state.line.generation.step = epoch - 1, 1
        if not lost and published.job not in self.at_work:
            return state
        for rank in published.ranks.get(self.node, ()):
            state.ranks.add(
                rank=rank,
                state="OFFLINE" if lost else "HEALTHY",
                step=step,
                pid=1,
                lost=lost,
                restored_from="local" if epoch > 1 else "none",
            )
        return state


class Players:
    """All simulated daemons, on a few connections."""

    def __init__(self, address: str, nodes: int, channels: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(channels)
        ]
        self._all = [_player(f"sim-{number}") for number in range(1, nodes + 1)]
        self._by_node = {player.node: player for player in self._all}
        self._newest: dict[str, Published] = {}
        self._heartbeat_s, self._ending = 1.0, False
        self._began = time.monotonic()
        self._urgent: asyncio.Queue[Player] = asyncio.Queue()

    async def run(self) -> None:
        """Run until stdin ends."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        lives = [self._live(each, at) for at, each in enumerate(self._all)]
        tasks = [asyncio.create_task(each) for each in (*lives, self._beat(), self._hurry())]
        while line := await reader.readline():
            word, job, node = line.decode().split()
            self._do(word, job, self._by_node[node])
        self._ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _do(self, word: str, job: str, player: Player) -> None:
        if word == "begin":
            player.at_work.add(job)
        else:
            player.at_work.discard(job)
            player.lost[job] = player.jobs[job].version[0]
        self._urgent.put_nowait(player)

    async def _beat(self) -> None:
        """Send every player's heartbeat once per interval, evenly spread."""
        while True:
            for tick in range(TICKS):
                due = time.monotonic() + self._heartbeat_s / TICKS
                for player in self._all[tick::TICKS]:
                    await self._send(player)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _hurry(self) -> None:
        while True:
            await self._send(await self._urgent.get())

    async def _send(self, player: Player) -> None:
        async with player.writing:
            call = player.call
            if call is None:
                return
            step = 1 + int((time.monotonic() - self._began) / STEP_S)
            try:
                await call.write(player.heartbeat(step))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                player.call = None
                call.cancel()  # its reader dials again

    async def _live(self, player: Player, number: int) -> None:
        # grpc's stubs lack calls without serializers and the end of a stream.
        channel: Any = self._channels[number % len(self._channels)]
        connect, end = channel.stream_stream(METHOD), cast(Any, grpc.aio).EOF
        while True:
            call = connect()
            player.untold.update(player.jobs)
            player.call = call
            self._urgent.put_nowait(player)
            try:
                while (message := await call.read()) is not end:
                    self._receive(player, message)
            except grpc.aio.AioRpcError:
                pass
            except asyncio.CancelledError:
                if self._ending or player.call is not None:
                    raise
            player.call = None
            await asyncio.sleep(REDIAL_S)

    def _receive(self, player: Player, message: bytes) -> None:
        if message[:1] == b"\x0a":  # field 1
            self._adopt(player, self._read(message))
            return
        control = control_pb2.ControlMessage.FromString(message)
        if control.HasField("change"):
            self._adopt(player, self._change(player.jobs[control.change.job], control.change))
        elif control.HasField("drop"):
            player.jobs.pop(control.drop.job, None)
            player.untold.discard(control.drop.job)
            player.at_work.discard(control.drop.job)
            player.lost.pop(control.drop.job, None)
            self._urgent.put_nowait(player)
        elif control.HasField("welcome"):
            self._heartbeat_s = control.welcome.heartbeat_s

    def _adopt(self, player: Player, published: Published) -> None:
        known = player.jobs.get(published.job)
        if known is not None and known.version >= published.version:
            return
        player.jobs[published.job] = published
        player.untold.discard(published.job)
        published.missing.discard(player.node)
        if not published.missing:
            _say("everywhere", published)
        self._urgent.put_nowait(player)

    def _read(self, message: bytes) -> Published:
        payload = payload_of(message)
        for known in self._newest.values():
            if known.payload == payload:
                return known
        return self._take(values_pb2.Membership.FromString(payload), payload)

    def _change(self, base: Published, change: control_pb2.MembershipChange) -> Published:
        known, version = self._newest[base.job], (change.epoch, change.revision)
        if known.version == version:
            return known
        membership = changed(values_pb2.Membership.FromString(base.payload), change)
        if membership is None:
            return base
        return self._take(membership, membership.SerializeToString())

    def _take(self, membership: values_pb2.Membership, payload: bytes) -> Published:
        per = membership.nproc_per_node
        nodes = [member.node for member in membership.members]
        published = Published(
            job=membership.job,
            version=(membership.epoch, membership.revision),
            payload=payload,
            ranks={node: range(at * per, at * per + per) for at, node in enumerate(nodes)},
            missing=set(nodes),
        )
        self._newest[membership.job] = published
        _say("published", published)
        return published


def _say(event: str, published: Published) -> None:
    epoch, revision = published.version
    line = {"event": event, "job": published.job, "epoch": epoch, "revision": revision}
    print(json.dumps(line | {"at": time.monotonic()}), flush=True)


def _player(node: str) -> Player:
    head = control_pb2.Heartbeat(
        protocol_version=codec.PROTOCOL_VERSION,
        node=node,
        memory_id=f"memory-of-{node}",
        incarnation=1,
        peer_address=f"{node}:7701",
        bulk_address=f"{node}:7702",
        memory_budget_bytes=BUDGET_BYTES,
    )
    return Player(node, head.SerializeToString())


def _field(number: int, payload: bytes) -> bytes:
    """Encoded field of a message: tag, length, bytes."""
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def payload_of(message: bytes) -> bytes:
    """Content of a message's only field."""
    start = 1
    while message[start] & 0x80:
        start += 1
    return message[start + 1 :]


def main() -> None:
    """Simulate the daemons until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("nodes", type=int)
    parser.add_argument("--channels", type=int, default=16)
    options = parser.parse_args()

    async def play() -> None:
        await Players(options.address, options.nodes, options.channels).run()

    asyncio.run(play())


if __name__ == "__main__":
    main()
