"""The operator's control server in a thread, with the interface of these tests'
`ControlServer`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from waiting import wait_for

from holdfast_core.errors import UnreachableError
from holdfast_operator.control.server import ControlServer
from holdfast_operator.reconciler.observe.views import JobView, NodeView
from holdfast_protos import codec, control_pb2
from holdfast_protos.connections.identity import Identity

HEARTBEAT_S = 0.2
STOPPED_WITHIN_S = 10.0


class OperatorControl(Mapping[str, NodeView]):
    """Serves from construction; `stop` and `start` play an operator that fails and returns.

    There is no control loop: a test decides what is published. The server itself finds the daemons
    concerned, and sends it to those that are behind. As a mapping, it has the nodes whose daemons
    are connected; a view has their addresses, as a heartbeat has.
    """

    def __init__(self, tls: Path | None = None) -> None:
        """Start serving; `tls` is the directory of a certificate; plain connections without one."""
        self._identity = None if tls is None else Identity(tls)
        self._forgotten: dict[str, int] = {}
        """Node → incarnation of the daemon that is not taken for the one that comes."""
        self.port = 0
        self.start()

    @property
    def beats(self) -> Mapping[str, NodeView]:
        return self

    def start(self) -> None:
        """Listen, on the previous port if there was one, without any earlier state."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        # A stopped server's port is free only once its listener is gone.
        wait_for("the control port", self._bound)

    def stop(self) -> None:
        self._do(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(self, node: str, message: control_pb2.ControlMessage) -> None:
        """Publish a membership to all daemons concerned, whichever `node` is given."""
        self._do(self._publish(message))

    def forget(self, node: str) -> None:
        """Ignore the daemon that was on the node, so that only its successor counts."""
        if (view := self._server.nodes().get(node)) is not None:
            self._forgotten[node] = view.incarnation

    def state(self, node: str, job: str) -> JobView | None:
        """The job's state in the node's newest heartbeat."""
        view = self._server.view(node, job)
        return None if view is None else view.job

    def __getitem__(self, node: str) -> NodeView:
        view = self._server.nodes()[node]
        if not view.connected or view.incarnation == self._forgotten.get(node):
            raise KeyError(node)
        return view

    def __iter__(self) -> Iterator[str]:
        return (node for node in list(self._server.nodes()) if node in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _bound(self) -> bool:
        self._server = ControlServer(
            heartbeat_s=HEARTBEAT_S,
            clock=time.monotonic,
            on_evidence=lambda jobs: None,
            identity=self._identity,
        )
        try:
            self.port = self._do(self._server.start("127.0.0.1", self.port))
        except UnreachableError:
            return False
        return True

    async def _publish(self, message: control_pb2.ControlMessage) -> None:
        self._server.publish(codec.membership_from_proto(message.membership))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STOPPED_WITHIN_S)
