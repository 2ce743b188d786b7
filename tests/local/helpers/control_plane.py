"""A small real control server that keeps heartbeats, and sends what a test gives it.

It can be killed and started again on its port, as the operator may be at any time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
from waiting import wait_for

from holdfast_protos import control_pb2, control_pb2_grpc, values_pb2
from holdfast_protos.connections.identity import AUTHORITY, CERTIFICATE, KEY

Outbox = queue.SimpleQueue[control_pb2.ControlMessage | None]


class ControlServer(control_pb2_grpc.ControlServicer):
    """Serves from construction; `stop` and `start` play an operator that fails and returns."""

    def __init__(self, tls: Path | None = None, heartbeat_s: float = 0.1) -> None:
        """Start serving.

        Args:
            tls: directory of the server's certificate; plain connections without one.
            heartbeat_s: interval that daemons receive; short, so that tests wait little.
        """
        self._tls = tls
        self._heartbeat_s = heartbeat_s
        self.beats: dict[str, control_pb2.Heartbeat] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._known: dict[str, dict[str, values_pb2.Membership]] = {}
        """By node and job, the membership that passed last, either way: heartbeats leave it out."""
        self._lock = threading.Lock()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen, on the previous port if there was one, without earlier heartbeats."""
        self.beats.clear()
        # A stopped server's port is free only once its listener is gone.
        server = wait_for("the control port", self._bound)
        assert server is not None
        self._server = server
        self._server.start()

    def stop(self) -> None:
        with self._lock:
            boxes, self._outboxes = self._outboxes, {}
        for box in boxes.values():
            box.put(None)
        self._server.stop(0).wait()

    def _bound(self) -> grpc.Server | None:
        server = grpc.server(futures.ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
        control_pb2_grpc.add_ControlServicer_to_server(self, server)
        try:
            address = f"127.0.0.1:{self.port}"
            self.port = (
                server.add_insecure_port(address)
                if self._tls is None
                else server.add_secure_port(address, _credentials(self._tls))
            )
        except RuntimeError:
            return None
        return server

    def Connect(
        self,
        request_iterator: Iterator[control_pb2.Heartbeat],
        context: grpc.ServicerContext,
    ) -> Iterator[control_pb2.ControlMessage]:
        first = next(request_iterator)
        mine: Outbox = queue.SimpleQueue()
        with self._lock:
            self._outboxes[first.node], self._known[first.node] = mine, {}
            self._remember(first)

        def listen() -> None:
            try:
                for beat in request_iterator:
                    with self._lock:
                        if self._outboxes.get(beat.node) is mine:
                            self._remember(beat)
            except grpc.RpcError:
                return
            finally:
                mine.put(None)

        threading.Thread(target=listen, daemon=True).start()
        welcome = control_pb2.Welcome(heartbeat_s=self._heartbeat_s)
        yield control_pb2.ControlMessage(welcome=welcome)
        while (message := mine.get()) is not None:
            yield message

    def send(self, node: str, message: control_pb2.ControlMessage) -> None:
        with self._lock:
            box = self._outboxes.get(node)
            if box is not None and message.HasField("membership"):
                self._known[node][message.membership.job] = message.membership
        if box is not None:
            box.put(message)

    def _remember(self, beat: control_pb2.Heartbeat) -> None:
        known = self._known[beat.node]
        for state in beat.jobs:
            if state.HasField("membership"):
                known[state.job] = state.membership
                continue
            held = known.get(state.job)
            if held and (held.epoch, held.revision) == (state.epoch, state.revision):
                state.membership.CopyFrom(held)
        self.beats[beat.node] = beat

    def forget(self, node: str) -> None:
        """Forget the node's heartbeat, so that only those after its return count."""
        with self._lock:
            self.beats.pop(node, None)
            self._outboxes.pop(node, None)

    def state(self, node: str, job: str) -> control_pb2.JobState | None:
        """The job's state in the node's newest heartbeat."""
        beat = self.beats.get(node)
        return next((j for j in beat.jobs if j.job == job), None) if beat else None


def _credentials(tls: Path) -> grpc.ServerCredentials:
    key, certificate, authority = (
        (tls / name).read_bytes() for name in (KEY, CERTIFICATE, AUTHORITY)
    )
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authority, require_client_auth=True
    )
