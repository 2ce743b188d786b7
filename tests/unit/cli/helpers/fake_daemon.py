"""A miniature daemon as a process: it speaks Control, and reports what fake agents write in files.

`<root>/world.json` is the membership that it received; `<root>/ranks/<rank>.json` is the state that
a fake rank reports. Snapshots do not exist: every completed step counts as complete and protected.
`<root>/agent` names the agent and its job. `<root>/persist` has a line for each request for a copy.
SIGTERM closes its stream; with a file `<root>/lingers` its process ends only when that is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc.aio

from holdfast_core.snapshots.membership import Membership
from holdfast_protos import codec, control_pb2, control_pb2_grpc, values_pb2
from holdfast_protos.connections.identity import Role, aio_channel, choose

BEAT_S = 0.05


class FakeDaemon:
    def __init__(self, options: argparse.Namespace) -> None:
        self.root, self.node, self.host = Path(options.root), options.node, options.host
        self.control, self.budget = options.control, options.budget
        self.identity = choose(options.tls, "", insecure=options.insecure)
        (self.root / "ranks").mkdir(parents=True, exist_ok=True)
        identity = self.root / "memory-id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex)
        self.memory_id = identity.read_text()
        count = self.root / "incarnation"
        self.incarnation = 1 + int(count.read_text() if count.exists() else 0)
        count.write_text(str(self.incarnation))

    async def run(self) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        talks = asyncio.create_task(self.talk())
        await stop.wait()
        talks.cancel()
        await asyncio.wait([talks])
        while (self.root / "lingers").exists():
            await asyncio.sleep(BEAT_S)

    async def talk(self) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                async with aio_channel(self.control, self.identity, Role.OPERATOR) as channel:
                    stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(channel)
                    async for message in stub.Connect(self.heartbeats()):
                        self.receive(message)
            await asyncio.sleep(BEAT_S)

    async def heartbeats(self) -> AsyncIterator[control_pb2.Heartbeat]:
        while True:
            yield self.heartbeat()
            await asyncio.sleep(BEAT_S)

    def receive(self, message: control_pb2.ControlMessage) -> None:
        world = self.root / "world.json"
        if message.HasField("membership"):
            known = self.membership()
            new = message.membership
            if known is None or (known.epoch, known.revision) < (new.epoch, new.revision):
                temporary = world.with_suffix(".tmp")
                temporary.write_bytes(new.SerializeToString())
                temporary.replace(world)
        elif message.HasField("drop"):
            world.unlink(missing_ok=True)
        elif message.HasField("persist"):
            with (self.root / "persist").open("a") as file:
                file.write(f"{message.persist.job}\n")

    def membership(self) -> Membership | None:
        with suppress(FileNotFoundError):
            data = (self.root / "world.json").read_bytes()
            return codec.membership_from_proto(values_pb2.Membership.FromString(data))
        return None

    def heartbeat(self) -> control_pb2.Heartbeat:
        membership = self.membership()
        return control_pb2.Heartbeat(
            protocol_version=codec.PROTOCOL_VERSION,
            node=self.node,
            memory_id=self.memory_id,
            incarnation=self.incarnation,
            peer_address=f"{self.host}:{os.getpid() % 60000 + 1}",
            bulk_address=f"{self.host}:{os.getpid() % 60000 + 2}",
            memory_budget_bytes=self.budget,
            jobs=[] if membership is None else [self.job_state(membership)],
            awaited=self.awaited(membership),
        )

    def awaited(self, membership: Membership | None) -> list[str]:
        """The job of the agent on this node, which has no part in its world."""
        if membership is not None and membership.member_on(self.node) is not None:
            return []
        with suppress(FileNotFoundError, json.JSONDecodeError):
            agent = json.loads((self.root / "agent").read_text())
            return [agent["job"]] if is_running(agent["pid"]) else []
        return []

    def job_state(self, membership: Membership) -> control_pb2.JobState:
        member = membership.member_on(self.node)
        ranks = [] if member is None else list(membership.ranks_of(member))
        states = [self.rank_state(rank, membership.epoch) for rank in ranks]
        done = [state.step for state in states if state.step]
        newest = None
        if done and len(done) == len(states):
            newest = values_pb2.Generation(epoch=membership.epoch, step=min(done))
        line = values_pb2.Line(reason="as the agents say")
        if membership.epoch > 1:
            line.generation.CopyFrom(values_pb2.Generation(epoch=membership.epoch - 1, step=1))
        return control_pb2.JobState(
            job=membership.job,
            epoch=membership.epoch,
            membership=codec.membership_to_proto(membership),
            verified=True,
            line=line,
            has_line=True,
            protected=newest,
            complete=newest,
            ranks=states,
            agent_waiting=(self.root / f"waiting-{membership.epoch}").exists(),
        )

    def rank_state(self, rank: int, epoch: int) -> control_pb2.RankState:
        try:
            progress = json.loads((self.root / "ranks" / f"{rank}.json").read_text())
        except FileNotFoundError:
            progress = {"epoch": 0}
        if progress["epoch"] != epoch:
            return control_pb2.RankState(rank=rank, state="UNHEALTHY")
        lost = not is_running(progress["pid"]) and not progress["closed"]
        return control_pb2.RankState(
            rank=rank,
            state="OFFLINE" if lost else "HEALTHY",
            step=progress["step"],
            pid=progress["pid"],
            lost=lost,
            restored_from="local" if epoch > 1 else "none",
        )


def is_running(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--root", "--node", "--host", "--control", "--metrics-port", "--log-file"):
        parser.add_argument(name, required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--storage-anywhere", action="store_true", required=True)
    parser.add_argument("--insecure", action="store_true")
    for name in ("--tls", "--auth", "--tokens"):
        parser.add_argument(name, default="")
    asyncio.run(FakeDaemon(parser.parse_args()).run())


if __name__ == "__main__":
    main()
