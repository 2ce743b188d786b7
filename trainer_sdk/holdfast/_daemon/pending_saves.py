"""Committed saves that wait for their later stages: protected and persisted.

The saver adds them, and the thread that watches the daemon applies its events. Any thread may call
anything here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from holdfast._daemon.client import DaemonEvent, Stage
from holdfast._daemon.handles import SaveHandle
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.snapshots.generations import Generation

PENDING_MAX = 64
"""Largest number of waiting handles. An arena holds three snapshots, so the snapshots of older
handles no longer exist."""


class PendingSaves:
    """The handles of committed saves, by generation.

    Args:
        on_protected: called with each generation that is protected, before its handle is completed.
    """

    def __init__(self, on_protected: Callable[[Generation], None]) -> None:
        self._on_protected = on_protected
        self._handles: dict[Generation, SaveHandle] = {}
        # Durable storage may lag far behind, or there may be none. So keep only those handles to
        # which the caller still has a reference.
        self._unstored: weakref.WeakValueDictionary[Generation, SaveHandle] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def add(self, generation: Generation, handle: SaveHandle) -> None:
        """Add a generation that is about to be committed. Its events may arrive before the answer
        to the commit."""
        oldest: SaveHandle | None = None
        with self._lock:
            self._handles[generation] = self._unstored[generation] = handle
            if len(self._handles) > PENDING_MAX:
                oldest = self._handles.pop(next(iter(self._handles)))
        if oldest is not None:
            why = f"no outcome was reported while {PENDING_MAX} newer snapshots were committed"
            oldest._fail(SnapshotSkippedError(why))

    def drop(self, generation: Generation) -> None:
        """Remove a generation that was not committed."""
        with self._lock:
            self._handles.pop(generation, None)
            self._unstored.pop(generation, None)

    def apply(self, event: DaemonEvent) -> None:
        """Apply an event to the handles. If a generation is protected or complete, so are all older
        ones."""
        assert event.generation is not None
        if event.stage is Stage.PERSISTED:
            self._apply_persisted(event.generation)
            return
        with self._lock:
            reached = {
                generation: handle
                for generation, handle in self._handles.items()
                if generation == event.generation
                or (event.stage is not Stage.DEAD and generation < event.generation)
            }
            for generation in reached:
                del self._handles[generation]
        for generation, handle in reached.items():
            if event.stage is Stage.PROTECTED:
                self._on_protected(generation)
                handle._reach(handle.protected)
            elif event.stage is Stage.DEAD:
                why = f"generation {generation} will not be completed by all ranks"
                handle._fail(SnapshotSkippedError(why))
            else:
                handle._reach(handle.committed)  # The event may arrive before Commit's answer.
                why = f"generation {generation} is complete, but the job has no redundancy"
                handle._fail_protection(SnapshotSkippedError(why))

    def _apply_persisted(self, newest: Generation) -> None:
        with self._lock:
            reached = {g: handle for g, handle in self._unstored.items() if g <= newest}
            for generation in reached:
                del self._unstored[generation]
        for handle in reached.values():
            handle._persist()

    def close(self) -> None:
        """Fail the handles that still wait, because no further events will come."""
        with self._lock:
            handles = list(self._handles.values())
            unstored = list(self._unstored.values())
            self._handles.clear()
            self._unstored.clear()
        for handle in handles:
            handle._fail(SnapshotSkippedError("the session was closed before this was protected"))
        for handle in unstored:
            handle._fail(SnapshotSkippedError("the session was closed before this was persisted"))
