"""A job on virtual nodes of this machine: the reconciler over processes.

```python
async with LocalCluster(job, LocalSettings(directory=directory)) as cluster:
    await cluster.wait_for(lambda status: status.step >= 10, timeout_s=60)
    await cluster.kill_node("n2")
    outcome = await cluster.finished(timeout_s=600)
```

`LocalCluster` only carries out what `reconcile` decides. Leaving the `with` block stops all
processes and frees the nodes' memory; a control loop that dies instead leaves daemons and agents
running, and the next one on the same directory adopts them.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from holdfast_cli.local import faults
from holdfast_cli.local.commands import Commands
from holdfast_cli.local.control_loop import ControlLoop, Journal
from holdfast_cli.local.directory import (
    RunDirectory,
    default_directory,
    new_record,
    node_names,
)
from holdfast_cli.local.processes import kill_marked
from holdfast_cli.local.status import Status, TimedEvent
from holdfast_cli.local.supervisor import Supervisor
from holdfast_core.errors import InvalidJobError, StorageError, UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, check_local
from holdfast_core.protection.budget import fits
from holdfast_operator.control.certificates import Certificates, write_private
from holdfast_operator.control.server import ControlServer
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_protos.connections.identity import Identity, Role

LOOK_S = 0.2
"""Seconds between looks when nothing wakes the loop."""
SOON_S = 0.01
"""Seconds until the loop looks at what its last actions have changed."""
RENEW_AGAIN_S = 60.0
"""Seconds until certificates that could not be renewed are tried again."""
INSECURE = (
    "identity is off: anyone who reaches the loopback ports of this run can read and change its "
    "training state; leave out --insecure (or HOLDFAST_INSECURE) to turn it on"
)
USABLE_FRACTION = 0.8
"""Fraction of the free shared memory that all daemons may use when the job sets no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings:
    """Settings of a local run."""

    directory: Path | None = None
    """Run directory; one below the temporary directory, named after the job, when None."""
    memory: Path | None = None
    """Directory on a tmpfs for the nodes' memory; below /dev/shm when None."""
    redis_url: str = ""
    """URL of the daemons' catalogue; when empty, they keep it in their own memory."""
    insecure: bool = False
    """Whether daemons and the control loop do without certificates, and trainers without tokens."""
    standbys: int = 1
    """Number of spares on which an agent waits, so that a lost node is replaced sooner; 0 for
    none."""
    commands: Commands = field(default_factory=Commands)
    """Command lines of the run's processes."""


class LocalCluster:
    """One job on this machine.

    Raises (on construction):
        InvalidJobError: the job must not run without Kubernetes, or belongs to another controller.
    """

    def __init__(
        self,
        job: MoETrainingJob,
        settings: LocalSettings | None = None,
        *,
        on_event: Callable[[TimedEvent], None] | None = None,
    ) -> None:
        check_local(job)
        settings = settings or LocalSettings()
        self.job = job
        path = settings.directory or default_directory(job.key)
        self.directory = RunDirectory(path, job.key, settings.memory)
        self._settings, self._journal = settings, Journal(on_event)
        self._certificates = Certificates(self.directory.tls)
        self._renew_at = math.inf
        self._wake, self._news = asyncio.Event(), asyncio.Condition()
        self._control: ControlLoop | None = None
        self._status: Status | None = None
        self._loop: asyncio.Task[None] | None = None
        self._server: ControlServer | None = None
        self._supervisor: Supervisor | None = None

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the run in the directory, or take over the run that is there.

        Raises:
            StorageError: the directory or the shared memory cannot be used.
            MemoryBudgetError: the machine has less memory than the job's nodes may take.
            InvalidJobError: the directory holds a run of another shape.
        """
        self.directory.open()
        self.directory.note_catalogue(self._settings.redis_url)
        try:
            await self._start()
        except BaseException:
            if not self.directory.nodes_file.exists():
                self.directory.clear()
            await self._close()
            raise

    async def _start(self) -> None:
        names = node_names(self.job)
        run = self.directory.read_record()
        adopted = run is not None
        # Take over the run that is recorded here, or clean up and begin a new one.
        if run is None:
            kill_marked(self.directory.mark())
            self.directory.clear()
            self.directory.make()
            self.directory.node_failures_file.unlink(missing_ok=True)  # of other nodes
            run = new_record(self.directory, names)
        elif run.job != self.job.key or list(run.nodes) != names:
            raise InvalidJobError(
                f"{self.directory.path} holds a run of {run.job} on {len(run.nodes)} nodes, and "
                f"this is {self.job.key} on {len(names)}; end that run, or use another --dir"
            )
        # Make the parts. Running daemons dial the port with which they were started.
        other_security = run.insecure != self._settings.insecure
        run.insecure = self._settings.insecure
        identity = self._make_identity(run.insecure)
        detection = self.job.spec.failure_policy.detection
        self._server = ControlServer(
            heartbeat_s=detection.heartbeat_seconds,
            clock=time.monotonic,
            on_evidence=lambda jobs: self._wake.set(),
            identity=identity,
        )
        budget_bytes = self._budget_bytes(len(names))
        self._supervisor = Supervisor(
            directory=self.directory,
            run=run,
            job=self.job,
            commands=replace(
                self._settings.commands,
                redis_url=self._settings.redis_url,
                budget_bytes=budget_bytes,
            ),
            on_change=self._wake.set,
            post=self._journal.post,
        )
        moved = await self._listen(run.control_host, run.control_port)
        run.control_port = moved or run.control_port
        self._control = ControlLoop(
            self.job,
            self.directory,
            self._server,
            self._supervisor,
            self._journal,
            self._settings.standbys,
        )
        # An earlier control loop's counters must be loaded before the first decision.
        if adopted:
            self._control.remember()
        if run.insecure:
            self._journal.post("Insecure", INSECURE, True)
        self._supervisor.start()
        if moved or (adopted and other_security):
            await self._supervisor.restart_daemons()
        self._loop = asyncio.get_running_loop().create_task(
            self._look_again_and_again(self._control)
        )

    def _make_identity(self, insecure: bool) -> Identity | None:
        """Make certificates for all processes, and the token of the job."""
        if not self.directory.token_file.exists():
            write_private(self.directory.token_file, secrets.token_hex(32).encode())
        if insecure:
            return None
        self._renew_at = self._certificates.make(time.time())
        return Identity(self._certificates.directory(Role.OPERATOR))

    def _renew(self) -> None:
        """Make new certificates in time; all processes read them at each new connection."""
        if time.time() < self._renew_at:
            return
        try:
            self._renew_at = self._certificates.make(time.time())
        except StorageError as error:
            self._renew_at = time.time() + RENEW_AGAIN_S
            self._journal.post("CertificatesNotRenewed", str(error), True)

    async def _listen(self, host: str, port: int) -> int:
        """Listen on the port that daemons already dial, if possible; returns the port if it is a
        new one, else 0."""
        assert self._server is not None
        try:
            bound = await self._server.start(host, port)
        except UnreachableError:
            if not port:
                raise
            return await self._server.start(host)
        return bound if bound != port else 0

    def _budget_bytes(self, nodes: int) -> int:
        """Bytes for each node's daemon: the job's limit, or a share of what is free."""
        free = shutil.disk_usage(self.directory.memory).free + held_bytes(self.directory.memory)
        wanted = self.job.memory_per_node_bytes
        if wanted is None:
            return max(1, int(free * USABLE_FRACTION) // nodes)
        what = f"spec.snapshot.memoryPerNode on {nodes} virtual nodes of this machine"
        fits(wanted * nodes, free, what=what)
        return wanted

    async def stop(self) -> None:
        """Stop all processes and free the nodes' memory. Logs and the last status remain."""
        await self._end_loop()
        if self._supervisor is not None:
            await self._supervisor.stop()
            self._supervisor = None
            self.directory.clear()
        await self._close()

    async def detach(self) -> None:
        """Release the directory and leave daemons and agents running, for the next control loop."""
        await self._end_loop()
        if self._supervisor is not None:
            await self._supervisor.detach()
            self._supervisor = None
        await self._close()

    async def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None
        self.directory.close()

    # --- for callers --------------------------------------------------------------------------

    @property
    def events(self) -> list[TimedEvent]:
        """Events of the run, oldest first."""
        return self._journal.events

    @property
    def status(self) -> Status:
        """The newest status.

        Raises:
            StorageError: before the first look.
        """
        if self._status is None:
            raise StorageError(f"the run in {self.directory.path} has not been started")
        return self._status

    async def wait_for(
        self, predicate: Callable[[Status], bool], *, timeout_s: float, what: str = ""
    ) -> Status:
        """Wait until `predicate` holds for the status; returns the status.

        Raises:
            UnreachableError: when it does not hold in time, or the job ends before it holds. The
                message includes where the job stands.
        """
        try:
            async with asyncio.timeout(timeout_s), self._news:
                while self._status is None or not predicate(self._status):
                    if self._loop is None or self._loop.done():
                        raise UnreachableError(f"the control loop ended: {self._describe_state()}")
                    if self._status is not None and self._status.ended:
                        raise UnreachableError(
                            f"the job ended before {what or 'what was waited for'}: "
                            f"{self._describe_state()}"
                        )
                    await self._news.wait()
                return self._status
        except TimeoutError:
            raise UnreachableError(
                f"waited {timeout_s:g} s for {what or 'the job'}: {self._describe_state()}"
            ) from None

    def _describe_state(self) -> str:
        status, logs = self._status, self.directory.path / "logs"
        if status is None:
            return f"no status yet; logs: {logs}"
        return f"{status.phase} at step {status.step}: {status.local.reason}; logs: {logs}"

    async def finished(self, *, timeout_s: float | None = None) -> Outcome:
        """Wait for the end of the job; returns its outcome.

        Raises:
            UnreachableError: when it did not end in time.
        """
        forever_s = 10 * 365 * 86400.0
        status = await self.wait_for(
            lambda status: status.ended, timeout_s=timeout_s or forever_s, what="the end of the job"
        )
        return Outcome(status.phase)

    async def kill_rank(self, rank: int) -> str:
        """SIGKILL a rank's process. Every injected fault is recorded as an event; returns a
        description of it."""
        return self._record_fault(
            faults.signal_rank(self.directory, self.status, rank, signal.SIGKILL)
        )

    async def kill_daemon(self, node: str) -> str:
        """SIGKILL a node's daemon; the run starts it again."""
        return self._record_fault(faults.kill_daemon(self.directory, node))

    async def kill_node(self, node: str) -> str:
        """Lose a node: all its processes and its memory."""
        return self._record_fault(await asyncio.to_thread(faults.kill_node, self.directory, node))

    async def start_node(self, node: str) -> str:
        """Bring a lost node back, with empty memory."""
        return self._record_fault(faults.start_node(self.directory, node))

    async def corrupt(self, rank: int, *, parity: bool = False) -> str:
        """Flip a byte of a rank's newest snapshot, or of a parity block on its node."""
        return self._record_fault(faults.corrupt(self.directory, self.status, rank, parity=parity))

    def _record_fault(self, what: str) -> str:
        self._journal.post("Injected", what, True)
        return what

    # --- the loop -----------------------------------------------------------------------------

    async def _look_again_and_again(self, control: ControlLoop) -> None:
        try:
            await self._look_until_cancelled(control)
        finally:
            async with self._news:  # wake the waiters: nothing more will come
                self._news.notify_all()

    async def _look_until_cancelled(self, control: ControlLoop) -> None:
        while True:
            self._wake.clear()
            self._renew()
            acted = control.look()
            self._status = control.status
            async with self._news:
                self._news.notify_all()
            try:
                async with asyncio.timeout(SOON_S if acted else LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue


def held_bytes(path: Path) -> int:
    """Bytes that the nodes of an earlier run hold below `path`. Their daemons may still be
    writing."""
    nbytes = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                nbytes += Path(directory, name).lstat().st_blocks * 512
    return nbytes
