"""Real daemons, a small real control server and trainers that speak the raw protocol.

What tests of `tests/local` start: every daemon is a process of its own on a loopback address and a
tmpfs directory of its own, and is killed with SIGKILL. The trainers need no torch, so that hundreds
of kills fit into a test run.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from holdfast_core import layouts
from holdfast_core.errors import HoldfastError
from holdfast_core.layouts import Layout
from holdfast_core.values import Generation, MemberPlace, Membership, Redundancy
from holdfast_protos import (
    codec,
    control_pb2,
    control_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

JOB = "tests.job"
WAIT_S = 30.0
_addresses = itertools.count(random.SystemRandom().randrange(1, 200))


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 0.0) -> Any:
    """The first true value of `condition`; polls, because what it looks at is in other processes."""
    until = time.monotonic() + (timeout_s or WAIT_S)
    tick = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"waited {timeout_s} s in vain for {what}")
        tick.wait(0.01)


class ControlServer(control_pb2_grpc.ControlServicer):
    """Remembers heartbeats, and sends down what a test says."""

    def __init__(self) -> None:
        self.beats: dict[str, control_pb2.Heartbeat] = {}
        self._outboxes: dict[str, queue.Queue[control_pb2.ControlMessage]] = {}
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(32))
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Connect(
        self, request_iterator: Iterator[control_pb2.Heartbeat], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.ControlMessage]:
        first = next(request_iterator)
        mine: queue.Queue[control_pb2.ControlMessage] = queue.Queue()
        with self._lock:
            self.beats[first.node] = first
            self._outboxes[first.node] = mine

        def listen() -> None:
            try:
                for beat in request_iterator:
                    with self._lock:
                        self.beats[beat.node] = beat
            except Exception:
                return
            finally:
                mine.put(control_pb2.ControlMessage())

        threading.Thread(target=listen, daemon=True).start()
        yield control_pb2.ControlMessage(welcome=control_pb2.Welcome(heartbeat_s=0.5))
        while context.is_active():
            message = mine.get()
            if message.WhichOneof("message") is None:
                return
            yield message

    def send(self, node: str, message: control_pb2.ControlMessage) -> None:
        with self._lock:
            box = self._outboxes.get(node)
        if box is not None:
            box.put(message)

    def forget(self, node: str) -> None:
        with self._lock:
            self.beats.pop(node, None)

    def state(self, node: str) -> control_pb2.JobState | None:
        beat = self.beats.get(node)
        return next((j for j in beat.jobs if j.job == JOB), None) if beat else None

    def stop(self) -> None:
        for box in self._outboxes.values():
            box.put(control_pb2.ControlMessage())
        self._server.stop(0).wait()


@dataclass(slots=True)
class DaemonProcess:
    """One node: an address, a tmpfs directory, and the daemon process on them."""

    node: str
    control_port: int
    root: Path
    host: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    channel: grpc.Channel | None = None

    def start(self) -> None:
        log = (self.root.parent / f"{self.node}.log").open("ab")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "holdfast_daemon",
                *("--root", str(self.root)),
                *("--node", self.node),
                *("--host", self.host),
                *("--control", f"127.0.0.1:{self.control_port}"),
                *("--budget", str(256 << 20)),
                *("--log-level", "debug"),
                *self.arguments,
            ],
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon alone; its memory stays."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(WAIT_S)
        self._close()

    def lose(self) -> None:
        """The node is gone, with its memory."""
        self.kill()
        shutil.rmtree(self.root)

    def stub(self) -> trainer_pb2_grpc.TrainerStub:
        if self.channel is None:
            self.channel = grpc.insecure_channel(f"unix:{self.root}/daemon.sock")
        return trainer_pb2_grpc.TrainerStub(self.channel)

    def status(self) -> dict[str, Any]:
        reply = self.stub().Status(trainer_pb2.StatusRequest(), timeout=5)
        return dict(json.loads(reply.json))

    def job(self) -> dict[str, Any]:
        return dict(self.status()["jobs"].get(JOB, {}))

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(WAIT_S)
        self._close()

    def _close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class RawTrainer:
    """A trainer without torch: claims, writes and commits as the SDK does, in this process."""

    def __init__(
        self, daemon: DaemonProcess, rank: int, world_size: int, nbytes: int, largest_bytes: int
    ) -> None:
        self.daemon, self.rank = daemon, rank
        self.largest_slot_bytes = layouts.round_up(largest_bytes + 4096, layouts.PAGE_BYTES)
        self.nbytes = nbytes
        self.layout = layouts.encode_layout(
            Layout(
                rank=rank,
                world_size=world_size,
                topology="raw",
                entries=(),
                extras_offset=nbytes,
                extras_capacity=4096,
                piece_bytes=4096,
            )
        )
        self.epoch = 0
        self.session = ""
        self._claim: socket.socket | None = None
        self._descriptor = -1
        self._arena: mmap.mmap | None = None
        self._slot_bytes = 0

    def hello(self) -> trainer_pb2.HelloReply:
        def ask() -> trainer_pb2.HelloReply | None:
            try:
                return self.daemon.stub().Hello(
                    trainer_pb2.HelloRequest(
                        protocol_version=codec.PROTOCOL_VERSION, job=JOB, rank=self.rank
                    ),
                    timeout=5,
                )
            except grpc.RpcError:
                return None

        reply: trainer_pb2.HelloReply = wait_for(f"rank {self.rank} to be welcome", ask)
        self.epoch = reply.epoch
        return reply

    def restore(self) -> tuple[Generation | None, bytes, str]:
        """(generation, payload, source); verifies the payload as the SDK does."""
        hello = self.hello()
        request = trainer_pb2.RestoreRequest(job=JOB, rank=self.rank, epoch=self.epoch)
        decision = None
        for progress in self.daemon.stub().Restore(request, timeout=WAIT_S):
            if progress.HasField("decision"):
                decision = progress.decision
        assert decision is not None
        if not decision.line.HasField("generation"):
            return None, b"", decision.source
        manifest = layouts.decode_manifest(decision.manifest)
        connection, descriptor = receive_descriptor(hello.arena_socket, decision.token)
        try:
            slot_bytes = layouts.decode_layout(decision.layout).slot_bytes
            payload = os.pread(descriptor, manifest.payload_bytes, decision.slot * slot_bytes)
        finally:
            os.close(descriptor)
            connection.close()
        assert layouts.piece_digests(payload, manifest.piece_bytes) == manifest.digests
        return manifest.generation, payload, decision.source

    def open(self) -> None:
        hello = self.hello()
        reply = self.daemon.stub().Open(
            trainer_pb2.OpenRequest(
                job=JOB,
                rank=self.rank,
                epoch=self.epoch,
                layout=self.layout,
                largest_slot_bytes=self.largest_slot_bytes,
                pid=os.getpid(),
            ),
            timeout=WAIT_S,
        )
        self.session, self._slot_bytes = reply.session, reply.slot_bytes
        self._claim, self._descriptor = receive_descriptor(hello.arena_socket, reply.token)
        self._arena = mmap.mmap(self._descriptor, reply.arena_bytes)

    def content(self, step: int) -> bytes:
        """What this rank captures at `step` of its epoch: two timelines differ."""
        return random.Random(f"{self.rank} {step} {self.epoch}").randbytes(self.nbytes + 64)

    def save(self, step: int) -> bool:
        """Grant, copy, commit; False when the daemon skips."""
        slot = self.grant(step)
        if slot is None:
            return False
        self.copy(slot, step)
        self.commit(slot, step)
        return True

    def grant(self, step: int) -> int | None:
        reply = self.daemon.stub().Grant(
            trainer_pb2.GrantRequest(session=self.session, epoch=self.epoch, step=step),
            timeout=WAIT_S,
        )
        return reply.slot if reply.WhichOneof("outcome") == "slot" else None

    def copy(self, slot: int, step: int) -> None:
        assert self._arena is not None
        data = self.content(step)
        start = slot * self._slot_bytes
        self._arena[start : start + len(data)] = data

    def commit(self, slot: int, step: int) -> None:
        data = self.content(step)
        self.daemon.stub().Commit(
            trainer_pb2.CommitRequest(
                session=self.session,
                epoch=self.epoch,
                step=step,
                slot=slot,
                payload_bytes=len(data),
                extras_bytes=64,
                digests=layouts.piece_digests(data, 4096),
            ),
            timeout=WAIT_S,
        )

    def die(self) -> None:
        """What the kernel does to a killed trainer: its mapping, descriptor and socket vanish."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def receive_descriptor(path: str, token: str) -> tuple[socket.socket, int]:
    """(connection, descriptor) from the arena socket; raises HoldfastError on refusal."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(WAIT_S)
    connection.connect(path)
    connection.sendall(f"{token}\n".encode())
    data, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    if not descriptors:
        connection.close()
        raise HoldfastError(data.decode().strip())
    return connection, descriptors[0]


@dataclass(slots=True)
class RawCluster:
    """Daemons, spares and raw trainers of one job, and the control loop that a test plays."""

    members: int = 4
    spares: int = 1
    nbytes: int = 300_000
    group_size: int = 0
    arguments: tuple[str, ...] = ()
    directory: Path = field(default_factory=lambda: Path("/dev/shm") / f"hft-{uuid.uuid4().hex[:8]}")
    control: ControlServer = field(default_factory=ControlServer)
    daemons: dict[str, DaemonProcess] = field(default_factory=dict)
    trainers: list[RawTrainer] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    epoch: int = 0

    def __enter__(self) -> RawCluster:
        self.directory.mkdir(parents=True)
        subnet = next(_addresses) % 250
        for index in range(self.members + self.spares):
            name = f"n{index}"
            daemon = DaemonProcess(
                node=name,
                control_port=self.control.port,
                root=self.directory / name,
                host=f"127.78.{subnet}.{index + 1}",
                arguments=list(self.arguments),
            )
            daemon.start()
            self.daemons[name] = daemon
        wait_for("all daemons", lambda: len(self.control.beats) == len(self.daemons))
        self.nodes = [f"n{i}" for i in range(self.members)]
        return self

    def __exit__(self, *exception: object) -> None:
        for trainer in self.trainers:
            trainer.die()
        for daemon in self.daemons.values():
            daemon.end()
        self.control.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def membership(self, revision: int = 0) -> Membership:
        size = self.group_size or self.members
        return Membership(
            job=JOB,
            epoch=self.epoch,
            revision=revision,
            members=tuple(self._place(i, node) for i, node in enumerate(self.nodes)),
            nproc_per_node=1,
            groups=tuple(
                tuple(range(i, i + size)) for i in range(0, self.members, size)
            ),
            redundancy=Redundancy.RAIM5 if self.members > 1 else Redundancy.NONE,
        )

    def _place(self, index: int, node: str) -> MemberPlace:
        beat = wait_for(f"a heartbeat of {node}", lambda: self.control.beats.get(node))
        return MemberPlace(
            index=index,
            node=node,
            memory_id=beat.memory_id,
            peer_address=beat.peer_address,
            bulk_address=beat.bulk_address,
        )

    def form(self, revision: int = 0) -> None:
        """Publish the membership; a new epoch unless only addresses changed."""
        if not revision:
            self.epoch += 1
        message = control_pb2.ControlMessage(
            membership=codec.membership_to_proto(self.membership(revision))
        )
        for node in self.nodes:
            self.control.send(node, message)

    def start_trainers(self) -> list[tuple[Generation | None, bytes, str]]:
        """New trainers on all members, restored and open; what each restored."""
        for trainer in self.trainers:
            trainer.die()
        self.trainers = [
            RawTrainer(
                self.daemons[node],
                rank,
                self.members,
                self.nbytes + 5000 * rank,
                self.nbytes + 5000 * self.members,
            )
            for rank, node in enumerate(self.nodes)
        ]
        with futures.ThreadPoolExecutor(self.members) as pool:
            for trainer in self.trainers:
                wait_for(
                    "the new epoch", lambda t=trainer: t.hello().epoch == self.epoch  # type: ignore[misc]
                )
            restored = list(pool.map(lambda t: t.restore(), self.trainers))
            list(pool.map(lambda t: t.open(), self.trainers))
        return restored

    def save(self, step: int) -> None:
        """Every rank saves `step`."""
        for trainer in self.trainers:
            wait_for(f"a slot for step {step}", lambda t=trainer: t.save(step))  # type: ignore[misc]

    def protected(self, generation: Generation) -> bool:
        """Whether every daemon has heard that `generation` is protected."""
        return all(
            self.daemons[node].job().get("protected") == str(generation) for node in self.nodes
        )

    def wait_protected(self, step: int) -> None:
        generation = Generation(self.epoch, step)
        wait_for(f"{generation} to be protected", lambda: self.protected(generation))
