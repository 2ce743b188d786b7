"""The recorder of a checked process: it lets the script run to a save, makes it take one more step,
and writes down what the state is then.

The script is the user's and is not changed. The recorder sees it through its session (`WATCH`) and
through the hooks that torch calls before each step of an optimizer. The first process goes on until
its save is protected; the second one until it has restored that save. From there on both make one
step: until the script saves again or, if it saves less often, until the optimizer that has stepped
is about to step again. There the state is recorded, and the process waits to be killed, as a
process in a real failure would not have expected it either. With no recorder, `WATCH` does nothing.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast._checking.digesting import digest_of_tensor, digest_of_value
from holdfast._checking.finding import find_beside
from holdfast._daemon.handles import SaveHandle
from holdfast._daemon.unsaved import OF_PROCESS, STEPS_SEEN
from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful, collect
from holdfast_core.errors import HoldfastError, SnapshotSkippedError
from holdfast_core.restart_check import (
    ORDER_FILE,
    Phase,
    Record,
    Stage,
    State,
    Tensor,
    decode_order,
    record_file,
)

_PROGRESS_S = 1.0
"""Shortest time between two records of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """The session that a recorder watches."""

    live: LiveState
    stateful: Mapping[str, Stateful]
    window: int
    """Most steps of a sparse window; 0 where snapshots are of one step."""


class Recorder:
    """The recorder of one process.

    Args:
        directory: where the order is read and the record is written.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._order = decode_order((directory / ORDER_FILE).read_bytes())
        self._file = directory / record_file(self._order.phase, rank)
        self._record = Record(rank=rank, phase=self._order.phase, stage=Stage.STARTED)
        self._saves = 0
        self._saving = False
        """Whether the script has called `save`."""
        self._steps: dict[int, int] = {}
        """Steps of each optimizer by its `id`."""
        self._written_s = -math.inf
        self._watched: Watched | None = None
        """The session from the moment when its state is that after the saved step; None before."""
        self._stepper: int | None = None
        """`id` of the optimizer that has stepped since."""
        self._batches: list[str] = []
        self._called: nn.Module | None = None
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Begin to watch the optimizers of this process."""
        self._write()
        register_optimizer_step_pre_hook(self.before_step)

    def on_error(self, error: BaseException) -> None:
        """Record an error that ends the script."""
        if self._record.stage is not Stage.FAILED:
            text = "".join(traceback.format_exception(error))
            self._fail(f"the script raised {type(error).__name__}: {error}", traceback=text)

    # --- called by the session --------------------------------------------------------------------

    def on_restored(self, watched: Watched, step: int | None) -> None:
        """Note what a session has restored."""
        if self._order.phase is Phase.SECOND:
            self._change(step=step)
            if step is None:
                self._fail(
                    "the second process restored nothing, although a save was protected: call "
                    "session.restore() in every process, with the same model, optimizer and names "
                    "in stateful="
                )
            elif step == self._order.step:
                self._make_ready(watched)

    def before_save(self, watched: Watched, step: int) -> None:
        """Note a call of `save`. If it comes one step after the saved one, this does not return."""
        self._saving = True
        if self._watched is not None:
            self._finish(sys._getframe(1))
        if self._order.phase is Phase.SECOND and self._record.step is None:
            self._fail(
                f"the second process called save({step}) without having restored: call "
                f"session.restore() before training, and continue after the step that it returns"
            )
        if watched.window:
            self._fail(
                "the script's settings choose sparse windows, whose restarts repeat several steps: "
                "check it with Full snapshots; tests of your own can use holdfast.testing"
            )

    def after_save(self, watched: Watched, handle: SaveHandle) -> None:
        """Wait until a save is protected, and note it. If it was refused, this ends the check."""
        if self._order.phase is not Phase.FIRST:
            return
        wait([handle.protected])
        # Without redundancy, `protected` ends when the snapshot is complete on all ranks.
        error = handle.committed.exception()
        if isinstance(error, SnapshotSkippedError):
            self._change(why=f"save({handle.step}) was skipped: {error}")
            return
        if error is not None:
            self._fail(f"save({handle.step}) failed: {error}")
            return
        self._saves += 1
        self._change(why="")
        if self._saves == self._order.save:
            self._change(step=handle.step)
            self._make_ready(watched)

    # --- called by torch --------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note that an optimizer is about to step. If it has stepped since the saved step, this
        does not return."""
        if torch.compiler.is_compiling():
            return
        if self._watched is not None:
            if self._stepper == id(optimizer):
                self._finish(sys._getframe(1))
            self._stepper = self._stepper or id(optimizer)
            return
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps > STEPS_SEEN and not OF_PROCESS.has_session:
            self._fail(OF_PROCESS.why)
        now_s = time.monotonic()
        if self._record.steps == 0 or now_s - self._written_s >= _PROGRESS_S:
            why = self._record.why if self._saving else OF_PROCESS.why
            self._change(steps=max(self._steps.values()), why=why)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Digest the inputs of the first module that is called, each time when it is called."""
        if torch.compiler.is_compiling():
            return
        self._called = self._called or module
        if module is self._called:
            self._batches.append(digest_of_value((args, kwargs)))

    # --- recording --------------------------------------------------------------------------------

    def _make_ready(self, watched: Watched) -> None:
        """Record the tensors after the saved step, and watch the step that follows."""
        self._change(stage=Stage.READY, ready=State(tensors=_tensors(watched.live)), why="")
        self._watched = watched
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            for module in watched.live.model.modules()
        ]

    def _finish(self, frame: Any) -> None:
        """Record the state after one more step, and wait to be killed."""
        watched = self._watched
        assert watched is not None
        for hook in self._hooks:
            hook.remove()
        try:
            state = State(
                tensors=_tensors(watched.live),
                extras=_extras(watched.live, watched.stateful),
                beside=find_beside(watched.live, watched.stateful, frame),
                batches=tuple(self._batches),
            )
        except HoldfastError as error:
            self._fail(f"the state after one more step could not be captured: {error}")
            return
        self._change(stage=Stage.STEPPED, stepped=state)
        _wait_for_the_end()

    def _fail(self, why: str, traceback: str = "") -> None:
        """Record why the process cannot be checked; wait to be killed, unless it ends itself."""
        self._change(stage=Stage.FAILED, why=why, traceback=traceback)
        if not traceback:
            _wait_for_the_end()

    def _change(self, **fields: Any) -> None:
        self._record = msgspec.structs.replace(self._record, **fields)
        self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        temporary = self._file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self._record))
        temporary.replace(self._file)


class Watch:
    """The recorder of this process, if it is checked."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def begin(self, directory: Path, rank: int) -> None:
        """Begin to record."""
        self.recorder = Recorder(directory, rank)
        self.recorder.begin()


WATCH = Watch()
"""That of this process."""


def _wait_for_the_end() -> None:
    """Wait until the process is killed."""
    threading.Event().wait()


def _tensors(live: LiveState) -> dict[str, Tensor]:
    """Digest all captured tensors of this rank."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    with torch.no_grad():
        return {
            source.name: Tensor(
                unit=str(source.unit),
                role=str(source.role),
                nbytes=source.nbytes,
                digest=digest_of_tensor(source.tensor),
            )
            for source in live.sources()
        }


def _extras(live: LiveState, stateful: Mapping[str, Stateful]) -> dict[str, str]:
    """Digest everything that is captured and is no tensor of a unit."""
    extras = collect(live, stateful, 0)
    parts = {f"stateful[{name!r}]": value for name, value in extras["stateful"].items()}
    parts |= {f"generator of {name}": value for name, value in extras["rng"].items()}
    parts |= {
        f"values of optimizer {index}": value for index, value in enumerate(extras["optimizers"])
    }
    parts |= {f"extra state of {name}": value for name, value in extras["modules"].items()}
    parts["modes and requires_grad"] = extras["model"]
    parts["forms of buffers"] = extras["buffers"]
    return {name: digest_of_value(value) for name, value in parts.items()}
