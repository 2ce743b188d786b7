"""A raw trainer in a process of its own, which a test can kill at any step of a save."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from daemons import DaemonProcess
from raw_trainer import RawTrainer
from waiting import WAIT_S, error_of

from holdfast_core.errors import HoldfastError
from holdfast_core.job.snapshots import PolicyType

_PR_SET_PDEATHSIG = 1
_forking = multiprocessing.get_context("forkserver")


class TrainerProcess:
    """A `RawTrainer` in another process; open from construction on."""

    def __init__(self, like: RawTrainer, epoch: int) -> None:
        here, there = _forking.Pipe()
        self._connection: Connection[Any, Any] = here
        self._process = _forking.Process(
            target=_serve,
            args=(
                there,
                str(like.daemon.root),
                (like.job, like.rank, like.world_size, like.nbytes, like.largest_bytes),
                epoch,
            ),
            daemon=True,
        )
        self._process.start()
        there.close()
        self.do("open")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def do(self, step: str, *arguments: object) -> Any:
        """Call the method `step` of the `RawTrainer`; returns its result if that is a number."""
        self._connection.send((step, *arguments))
        assert self._connection.poll(WAIT_S), f"the trainer process did not {step}"
        result = self._connection.recv()
        if isinstance(result, str):
            raise HoldfastError(result)
        return result

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until the kernel has released its resources."""
        self._process.kill()
        self._process.join(WAIT_S)
        self._connection.close()


def _serve(
    connection: Connection[Any, Any], root: str, rank: tuple[str, int, int, int, int], epoch: int
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    daemon = DaemonProcess(node="", control_port=0, root=Path(root), host="")
    trainer = RawTrainer(daemon, *rank)
    trainer.policy = PolicyType.FULL  # nothing here would know what it captured
    trainer.join(epoch)
    while True:
        step, *arguments = connection.recv()
        try:
            result = getattr(trainer, step)(*arguments)
            connection.send(result if isinstance(result, int) else None)
        except grpc.RpcError as error:
            connection.send(str(error_of(error)))
        except HoldfastError as error:
            connection.send(str(error))
