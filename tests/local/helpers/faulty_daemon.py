"""A daemon that dies exactly where a test decides.

It is the real daemon, started by its real `main`, whose parts are subclassed so that each effect,
file step and transfer first checks for a trap. A trap that is sprung ends the process with SIGKILL,
at once and without cleaning up. The daemon that is started next meets the next trap.
"""

from __future__ import annotations

import ctypes
import fnmatch
import gc
import importlib
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from faulty_storage import Access, FaultyTier

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_daemon.__main__ import main
from holdfast_daemon.durable.loader import Loader
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.effects import Background, Completion, Effect, SendDirective, SendReport
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.memory.files import RealFiles
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.node import Node
from holdfast_daemon.parity.combining import Stream
from holdfast_daemon.parity.group import BulkOpener
from holdfast_daemon.settings import DaemonSettings
from holdfast_daemon.transport.protocol import Located, Request
from holdfast_daemon.transport.server import BulkServer

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trap:
    """A place where a daemon dies."""

    at: str
    """An effect's name, possibly with a detail (`SendReport:parity`), a file step (`write`,
    `rename`, `unlink`), a step of the durable tier's file system (`tier`), or `locate`,
    `send`."""
    when: str = "before"
    """`before`, `during` (half of the bytes are there) or `after`."""
    count: int = 1
    """At which time that the place is passed."""
    match: str = "*"
    """Name of the file, for file steps; of the step, for those of the tier."""
    signal: int = signal.SIGKILL
    """SIGSTOP freezes the daemon there instead."""


def write_traps(path: Path, traps: Sequence[Trap]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps([asdict(trap) for trap in traps]))
    temporary.rename(path)


class Traps:
    """The traps of one node, in a file that outlives its daemons. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._passed: dict[Trap, int] = {}

    def pass_by(self, at: str, when: str, name: str = "") -> None:
        """Die, or freeze, if the next trap lies here."""
        if (trap := self.sprung(at, when, name)) is not None:
            # Sent to the process, it may stop another thread first, while this one goes on.
            signal.pthread_kill(threading.get_ident(), trap.signal)

    def sprung(self, at: str, when: str, name: str = "") -> Trap | None:
        """Remove and return the trap that lies here; None without one."""
        if not os.access(self._path, os.F_OK):  # as at nearly all points, of which there are many
            return None
        with self._lock:
            try:
                traps = [Trap(**fields) for fields in json.loads(self._path.read_text())]
            except FileNotFoundError:
                return None
            trap = traps[0]
            if (trap.at, trap.when) != (at, when) or not fnmatch.fnmatch(name, trap.match):
                return None
            self._passed[trap] = self._passed.get(trap, 0) + 1
            if self._passed[trap] < trap.count:
                return None
            if traps[1:]:
                write_traps(self._path, traps[1:])
            else:
                self._path.unlink()
            return trap


class TrappedFiles(RealFiles):
    """File steps with traps; `during` a write leaves a torn file."""

    def __init__(self, traps: Traps) -> None:
        self._traps = traps

    def write(self, path: Path, data: bytes) -> None:
        self._traps.pass_by("write", "before", path.name)
        if self._traps.sprung("write", "during", path.name):
            super().write(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(path, data)
        self._traps.pass_by("write", "after", path.name)

    def rename(self, source: Path, target: Path) -> None:
        self._traps.pass_by("rename", "before", target.name)
        super().rename(source, target)
        self._traps.pass_by("rename", "after", target.name)

    def unlink(self, path: Path) -> None:
        self._traps.pass_by("unlink", "before", path.name)
        super().unlink(path)
        self._traps.pass_by("unlink", "after", path.name)


class TrappedStream:
    """A stream of a build or rebuild; `during` means that some bytes have arrived."""

    def __init__(self, stream: Stream, traps: Traps, doing: str) -> None:
        self._stream, self._traps, self._doing = stream, traps, doing

    def read_into(self, view: memoryview) -> None:
        self._stream.read_into(view)
        self._traps.pass_by(self._doing, "during")

    def close(self) -> None:
        self._stream.close()


class TrappedOpener:
    """Opens streams with traps; in these tests only one effect at a time moves bytes."""

    def __init__(self, opener: BulkOpener, traps: Traps) -> None:
        self._opener, self._traps = opener, traps
        self.doing = ""

    def open(self, address: str, request: Request) -> Stream:
        return TrappedStream(self._opener.open(address, request), self._traps, self.doing)


class TrappedWorker(EffectWorker):
    """A worker with traps before and after background effects."""

    traps: Traps
    opener: TrappedOpener

    def _carry_out(self, effect: Background, scope: EpochScope) -> Completion:
        name = type(effect).__name__
        self.traps.pass_by(name, "before")
        if name in ("BuildParity", "Rebuild"):
            self.opener.doing = name
        completion = super()._carry_out(effect, scope)
        self.traps.pass_by(name, "after")
        return completion


class TrappedHost(JobHost):
    """A host with traps before and after immediate effects and messages to other daemons."""

    traps: Traps
    _reported: tuple[int, Generation | None, Generation | None] = (0, None, None)

    def _one(self, effect: Effect) -> None:
        name = self._name(effect)
        background = type(effect).__name__ in BACKGROUND
        if not background:
            self.traps.pass_by(name, "before")
        super()._one(effect)
        if not background:
            self.traps.pass_by(name, "after")

    def _name(self, effect: Effect) -> str:
        match effect:
            case SendReport():
                return f"SendReport:{self._news(effect)}"
            case SendDirective():
                directive = effect.directive
                fresh = directive.protected is None or (directive.protected.epoch < directive.epoch)
                return "SendDirective:line" if fresh else "SendDirective:protected"
            case _:
                return type(effect).__name__

    def _news(self, effect: SendReport) -> str:
        inventory = effect.report.inventory
        known = self._reported
        parity = max((e.generation for e in inventory.parities), default=None)
        snapshot = max((e.generation for e in inventory.snapshots), default=None)
        self._reported = (effect.report.epoch, snapshot, parity)
        if effect.report.epoch != known[0]:
            return "epoch"
        if parity != known[2]:
            return "parity"
        return "snapshot" if snapshot != known[1] else "other"


BACKGROUND = frozenset(kind.__name__ for kind in Background.__args__)


class TrappedBulkServer(BulkServer):
    """A server with traps; `during` a send, half of the bytes have left."""

    traps: Traps

    def _send(self, connection, descriptor, offset, nbytes):  # type: ignore[no-untyped-def]
        if self.traps.sprung("send", "during"):
            super()._send(connection, descriptor, offset, nbytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        super()._send(connection, descriptor, offset, nbytes)
        self.traps.pass_by("send", "after")


class TrappedNode(Node):
    """The daemon, with a possible trap wherever it acts."""

    def __init__(
        self, settings: DaemonSettings, traps: Traps, access: Access | None = None
    ) -> None:
        super().__init__(settings)
        self._traps = traps
        self._durable.close()
        self._tier = self._durable = FaultyTier(
            settings.threads, lambda step: traps.pass_by("tier", "before", step), access
        )
        self.storage.files = replace(self.storage.files, files=TrappedFiles(traps))
        self._bulk.close()
        self._bulk = TrappedBulkServer(settings.host, settings.bulk_port, self, self._wiring)
        self._bulk.traps = traps

    def locate(self, request: Request) -> Located:
        self._traps.pass_by("locate", "before")
        located = super().locate(request)
        self._traps.pass_by("locate", "after")
        return located

    def change(self, request: Request) -> Iterator[bytes]:
        self._traps.pass_by("locate", "before")
        parts = super().change(request)
        self._traps.pass_by("locate", "after")
        return self._sent(parts)

    def _sent(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            if self._traps.sprung("send", "during"):
                yield part[: len(part) // 2]
                os.kill(os.getpid(), signal.SIGKILL)
            yield part
        self._traps.pass_by("send", "after")

    def _make_host(
        self, engine: JobEngine, storage: JobStorage, membership: Membership | None
    ) -> JobHost:
        opener = TrappedOpener(self._bulk_client, self._traps)
        worker = TrappedWorker(
            storage,
            bulk=opener,
            peers=self._fetcher,
            executor=self._threads.of(storage.job),
            persister=self._durable.persister(engine.job, storage),
            membership=membership,
            parity_traffic=self._traffic.parity.of_job(),
            loader=Loader(storage, storage.job, self._open_sets),
        )
        worker.traps, worker.opener = self._traps, opener
        host = TrappedHost(
            engine=engine,
            storage=storage,
            worker=worker,
            outbox=self._outbox,
            observer=self._observer,
            on_change=self._job_changed,
        )
        host.traps = self._traps
        return host

    def _open_sets(self, uri: str, job: str) -> TierSets:
        return TierSets(uri, job, root=self._tier.open(uri))


_LATE = ("grpc._channel", "encodings.idna")
"""What is imported at its first use, when another user may not read the code any more."""


def become(uid: int) -> None:
    """Become another user, without any capability."""
    for name in _LATE:
        importlib.import_module(name)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def run(arguments: list[str], log: str, trap: str, uid: int | None, access: Access | None) -> None:
    """Run a forked daemon; it ends with the process that runs the tests."""
    gc.freeze()  # what was imported before the fork is shared; a collection would copy it
    if uid is not None:
        become(uid)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    traps = Traps(Path(trap))
    sys.exit(main(arguments, lambda settings: TrappedNode(settings, traps, access)))


def read_metric(url: str, sample: str) -> float:
    """The value of one sample of an exposition; 0 when it is missing."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        for line in reply.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
    return 0.0
