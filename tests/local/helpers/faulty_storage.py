"""A durable tier that fails, stalls or kills the daemon as a test decides, from inside the daemon.

A directory fails in the steps of its file system; object storage is opened as it is, because the
proxy in front of it (`fault_proxy`) fails instead.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.durable.persister import Persister
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_daemon.memory.job_bytes import JobBytes
from holdfast_storage.local import FileSteps, LocalRoot
from holdfast_storage.opening import open_root
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import TierRoot
from holdfast_storage.sets import SetStore

QUICK = Retry(attempts=5, first_s=0.05, longest_s=0.4)
"""Tests wait for what is sent again."""

_FILE = "file://"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Faults of a directory for all daemons, until they are changed or removed."""

    errnos: tuple[int, ...] = ()
    """What steps fail with, one of them each."""
    portion: float = 1.0
    """Of the steps that fail."""
    slow_s: float = 0.0
    """How long each step takes."""

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """How daemons reach the storage."""

    options: dict[str, Any] = field(default_factory=dict)
    """For fsspec's file system."""
    trouble: Path = Path("/nonexistent")
    """File of a `Trouble`; none there means none."""
    retry: Retry = QUICK


class FaultyFiles(FileSteps):
    """Steps of a file system, with a possible trap and trouble before each."""

    def __init__(self, pass_by: Callable[[str], None], trouble: Path) -> None:
        self._pass_by, self._trouble = pass_by, trouble

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._pass_by(name)
            self._suffer(name)
        return object.__getattribute__(self, name)

    def _suffer(self, name: str) -> None:
        try:
            trouble = Trouble(**json.loads(self._trouble.read_text()))
        except FileNotFoundError:
            return
        time.sleep(trouble.slow_s)
        if name != "close" and trouble.errnos and random.random() < trouble.portion:
            number = random.choice(trouble.errnos)
            raise OSError(number, os.strerror(number))


class FaultyTier(DurableTier):
    """The durable tier that a daemon's jobs share, reached through `access`."""

    def __init__(self, threads: int, pass_by: Callable[[str], None], access: Access | None) -> None:
        """Set up the tier; `pass_by` is called with each step of a file system before the step."""
        super().__init__(threads, TierAccess(None))
        self._pass_by, self._access = pass_by, access

    def persister(self, job: str, storage: JobBytes) -> Persister:
        return Persister(
            storage,
            open_store=lambda uri: SetStore(uri, job, root=self.open(uri)),
            executor=self._threads.of(job),
        )

    def open(self, uri: str) -> TierRoot:
        """Raises HoldfastError, as opening a real one does."""
        access = self._access
        if uri.startswith(_FILE):
            trouble = Access().trouble if access is None else access.trouble
            return LocalRoot(Path(uri.removeprefix(_FILE)), FaultyFiles(self._pass_by, trouble))
        if access is None:
            return open_root(uri, {}, Retry())
        return open_root(uri, access.options, access.retry)
