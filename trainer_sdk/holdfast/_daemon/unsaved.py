"""The steps of a process that does not save, whether it has a session or not.

A script may never call `holdfast.init`, may catch its refusal, or may make a session and never call
`save`: a framework does not call a callback that was registered in the wrong place. Then nothing of
Holdfast runs, and training continues to its end unprotected. So every worker that a launcher of
Holdfast forks counts the steps of torch's optimizers until it calls `save` for the first time. Soon
after the first steps it reports them to the daemon, with what to change.

It does not see the steps of optimizers that are not torch's, nor those in code that torch compiles.
Training never waits for it. It raises into training only if the job requires protection, and a
script that has made a session is given the benefit of the doubt: its first save may come late.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast._daemon.client import DaemonClient, GrpcClient, TrainedRequest
from holdfast._environment import Environment
from holdfast_core.errors import (
    HoldfastError,
    ProtectionRequiredError,
    StaleEpochError,
    UnsavedError,
)

_log = logging.getLogger("holdfast")

STEPS_SEEN = 3
"""Steps of one optimizer after which a process trains: the first save comes before the third."""
REPORT_S = 1.0
"""Shortest time between two reports."""
_TIMEOUT_S = 10.0

_NO_SESSION = (
    "holdfast.init was not called: call it before the training loop, and session.save(step) after "
    "each step, or pass the callback of holdfast.integrations to the framework's trainer"
)
_NO_SAVE = (
    "there is a session, but session.save was not called since training began: call "
    "session.save(step) after each step, or check that the framework calls Holdfast's callback"
)


class UnsavedSteps:
    """Counts the steps of this process until its first save, and reports them from a thread."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._steps = self._restored = 0
        self._required = False
        self._why = _NO_SESSION
        self._refusal: HoldfastError | None = None
        self._has_session = False
        self._connect: Callable[[], DaemonClient] | None = None
        self._saves = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def why(self) -> str:
        """Why nothing is saved as long as `save` is not called, and what to do."""
        return self._why

    @property
    def has_session(self) -> bool:
        """Whether this process has made a session."""
        return self._has_session

    def watch(self, environment: Environment) -> None:
        """Count the steps of all optimizers from now on, if a launcher of Holdfast has started this
        process."""
        socket = environment.socket
        if socket is None or environment.run_id != environment.job:
            return

        def connect() -> DaemonClient:
            return GrpcClient(
                socket,
                environment.job,
                environment.rank,
                environment.store_address,
                _TIMEOUT_S,
                environment.token_file,
            )

        self.begin(connect, required=bool(environment.settings["require_protection"]))
        register_optimizer_step_post_hook(self.on_step)

    def begin(self, connect: Callable[[], DaemonClient], *, required: bool) -> None:
        """Begin to count.

        Args:
            connect: makes the client for reports, in their thread.
            required: whether training must not continue without a session.
        """
        self._connect, self._required = connect, required

    @contextmanager
    def making_session(self) -> Iterator[None]:
        """Note whether the block makes a session. If it refuses to, the script may go on without
        one."""
        try:
            yield
        except HoldfastError as error:
            self._refusal, self._why = error, f"holdfast.init refused to make a session: {error}"
            raise
        self._has_session, self._refusal, self._why = True, None, _NO_SAVE

    def on_restored(self, step: int | None) -> None:
        """Note the step from which training continues; None for the beginning."""
        self._restored = step or 0

    def on_save(self) -> None:
        """Note that `save` was called, or will be after the steps that are repeated now: the
        session reports the steps."""
        self._saves.set()

    def on_step(self, optimizer: Optimizer, *_: object) -> None:
        """Count a step of an optimizer; torch calls it after each one.

        Raises:
            ProtectionRequiredError: protection is required, and there is no session.
        """
        if self._saves.is_set() or torch.compiler.is_compiling() or self._connect is None:
            return
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._steps = max(self._steps, count)
        if self._steps < STEPS_SEEN:
            return
        if self._required and not self._has_session:
            raise ProtectionRequiredError(
                f"{self._why} (the job has snapshot.requireProtection)"
            ) from self._refusal
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._report, args=(self._connect,), name="holdfast-unsaved", daemon=True
            )
            self._thread.start()

    def _report(self, connect: Callable[[], DaemonClient]) -> None:
        """Report the steps until the first save, or until the epoch of this process has ended."""
        _log.warning("nothing is saved: %s", self._why)
        client, epoch, reported = connect(), 0, 0
        try:
            while not self._saves.is_set():
                try:
                    epoch = epoch or client.hello().epoch
                    if (steps := self._steps) > reported:
                        client.report_without_session(self._request(steps, epoch))
                        reported = steps
                except StaleEpochError:
                    return
                except HoldfastError as error:
                    _log.debug("the steps could not be reported: %s", error)
                self._saves.wait(REPORT_S)
        finally:
            client.close()

    def _request(self, steps: int, epoch: int) -> TrainedRequest:
        return TrainedRequest(
            step=self._restored + steps,
            skipped=0,
            failed=0,
            failure=self._why,
            failure_code=UnsavedError.code,
            epoch=epoch,
        )


OF_PROCESS = UnsavedSteps()
"""Those of this process."""
