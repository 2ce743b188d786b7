"""A daemon that knows nothing but worlds: one node, whose epochs the test begins."""

from __future__ import annotations

import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from holdfast_core.errors import HoldfastError
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc


class FakeDaemon(trainer_pb2_grpc.TrainerServicer):
    """Serves what agents call at `socket` until `stop`."""

    def __init__(self, socket: Path) -> None:
        self.changed = threading.Condition()
        self.epoch, self.finished = 0, False
        self.denial: HoldfastError | None = None
        """What a call for a world is refused with."""
        self.bearers: list[str] = []
        """What calls for a world carried as authorization."""
        self.keeps: set[int] = set()
        """Epochs for which workers can be kept."""
        self.arrived: set[int] = set()
        """Epochs in which the kept ones are."""
        self.stores: dict[int, str] = {}
        self.watched: list[int] = []
        """Epochs whose end was asked for while workers ran in them."""
        self.left: list[int] = []
        self.exits: list[tuple[int, int]] = []
        """(epoch, exit code) of workers that failed."""
        self.last_lines: list[str] = []
        self.reasons: list[str] = []
        self.work: list[tuple[int, ...]] = []
        """Epoch and ranks of each report of work."""
        """What these wrote last."""
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def begin(self, epoch: int) -> None:
        with self.changed:
            self.epoch = epoch
            self.changed.notify_all()

    def finish(self) -> None:
        with self.changed:
            self.finished = True
            self.changed.notify_all()

    def wait(self, condition: Any, timeout_s: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)

    def stop(self) -> None:
        self.finish()
        self._server.stop(0).wait()

    def JoinWorld(self, request: trainer_pb2.JoinWorldRequest, context: Any) -> trainer_pb2.World:
        carried = dict(context.invocation_metadata())
        self.bearers.append(str(carried.get("authorization", "")))
        if self.denial is not None:
            context.set_trailing_metadata(codec.error_to_metadata(self.denial))
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(self.denial))
        with self.changed:
            (self.watched if request.peek else self.left).append(request.after_epoch)
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.finished or self.epoch > request.after_epoch, request.wait_s
            )
            ready = self.epoch > request.after_epoch
            return trainer_pb2.World(
                ready=ready,
                epoch=self.epoch,
                nodes=1,
                serves_store=True,
                node_host="127.0.0.1",
                finished=self.finished,
                keep=ready and self.epoch in self.keeps,
                arrived=ready and self.epoch in self.arrived,
            )

    def PublishStore(
        self, request: trainer_pb2.PublishStoreRequest, context: Any
    ) -> trainer_pb2.PublishStoreReply:
        with self.changed:
            self.stores[request.epoch] = request.store_address
            self.changed.notify_all()
        return trainer_pb2.PublishStoreReply()

    def WorkerExited(
        self, request: trainer_pb2.WorkerExitedRequest, context: Any
    ) -> trainer_pb2.WorkerExitedReply:
        with self.changed:
            self.exits.append((request.epoch, request.exit_code))
            self.last_lines.append(request.last_lines)
            self.reasons.append(request.reason)
            self.changed.notify_all()
        return trainer_pb2.WorkerExitedReply()

    def Worked(self, request: trainer_pb2.WorkedRequest, context: Any) -> trainer_pb2.WorkedReply:
        with self.changed:
            self.work.append((request.epoch, *request.ranks))
            self.changed.notify_all()
        return trainer_pb2.WorkedReply()
