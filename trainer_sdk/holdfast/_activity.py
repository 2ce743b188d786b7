"""What the session of this process is doing, in memory that its launcher can read at any time.

Whoever looks at a job that hangs wants to know whether a rank is restoring, or in a save, and what
that save waits for. A process that hangs cannot be asked, so it notes this beforehand, in a small
file that exists in memory only and is mapped: a note is a copy of some bytes, and waits for no disk
that is full or slow. Without a launcher nothing is noted.

The training thread and the saver's thread write different parts. A reader may see a note that is
half written; it is only ever shown.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_core.inspections import SessionActivity

_WORLD = struct.Struct("<QI")
"""Epoch, and number of ranks."""
_STEP = struct.Struct("<Q")
_TEXT_BYTES = 48
_STEP_AT = _WORLD.size
_TRAINING_AT = _STEP_AT + _STEP.size
_SAVING_AT = _TRAINING_AT + _TEXT_BYTES
FILE_BYTES = _SAVING_AT + _TEXT_BYTES


class Activity:
    """The notes of this process."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._calls: list[str] = []
        """Calls of the session that have not ended, the innermost last."""

    def keep(self) -> None:
        """Keep all further notes, so that the launcher can read them. Raises OSError."""
        file = os.memfd_create(_name(os.getpid()))  # Stays open, for the launcher.
        os.write(file, bytes(FILE_BYTES))
        self._memory = mmap.mmap(file, FILE_BYTES)

    def begin_world(self, epoch: int, ranks: int, step: int) -> None:
        """Note the world in which training continues after `step`."""
        if self._memory is not None:
            _WORLD.pack_into(self._memory, 0, epoch, ranks)
            self.complete(step)

    def complete(self, step: int) -> None:
        """Note that training has completed `step`."""
        if self._memory is not None:
            _STEP.pack_into(self._memory, _STEP_AT, step)

    @contextmanager
    def training_in(self, call: str) -> Iterator[None]:
        """Note that the training thread is in a call of the session, such as `save`, until the
        block ends. Calls may be nested, and those of several threads may overlap."""
        self._calls.append(call)
        self._write(_TRAINING_AT, call)
        try:
            yield
        finally:
            self._calls.remove(call)
            # Others may end meanwhile, so the list is read once.
            self._write(_TRAINING_AT, "".join(self._calls[-1:]))

    def save_by(self, stage: str) -> None:
        """Note what the saver's thread does for a save, such as `waits for a slot`; empty for
        nothing."""
        self._write(_SAVING_AT, stage)

    def _write(self, at: int, text: str) -> None:
        if self._memory is not None:
            encoded = text.encode()[:_TEXT_BYTES]
            self._memory[at : at + _TEXT_BYTES] = encoded.ljust(_TEXT_BYTES, b"\0")


ACTIVITY = Activity()
"""The notes of this process; kept once `_stacks.offer_stack` has found a launcher."""


def _name(pid: int) -> str:
    """The name of a process's file: its children inherit it, and may keep notes of their own."""
    return f"holdfast-activity-{pid}"


def activity_file(pid: int) -> Path | None:
    """Return the file in which a process keeps its notes; None if it keeps none. Raises OSError if
    its files cannot be seen."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # It may have been closed meanwhile.
            if str(file.readlink()).startswith(f"/memfd:{_name(pid)} "):
                return file
    return None


def activity_in(content: bytes) -> SessionActivity | None:
    """Return the notes in the content of a file; None if it is not complete, or nothing was noted
    yet."""
    if len(content) != FILE_BYTES or not any(content):
        return None
    (epoch, ranks), (step,) = _WORLD.unpack_from(content), _STEP.unpack_from(content, _STEP_AT)
    training, saving = (
        content[at : at + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
        for at in (_TRAINING_AT, _SAVING_AT)
    )
    return SessionActivity(epoch=epoch, ranks=ranks, step=step, training=training, saving=saving)
