"""Inspection of a job that hangs: what the kernel, and the interpreter, show of its processes.

The text comes from trainers and may hold anything, so every field is made printable and cut to its
size where it is received. Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast_core.last_lines import printable

FRAMES_MAX = 64
"""Frames of one stack, from the innermost."""
FRAMES_SENT_MAX = 24
"""Frames of one stack that go to the control loop: the innermost ones show what a process waits
for."""
FILE_CHARACTERS_MAX = 160
"""Characters of a file's path, from its end."""
NAME_CHARACTERS_MAX = 80
"""Characters of the name of a function, or of a place in the kernel."""
GROUPS_MAX = 16
"""Process groups of one rank whose collectives are reported."""
MEMBERS_MAX = 128
"""Ranks of a group that are listed one by one."""
STOPPED = ("T", "t")
"""States of a process that a signal, or a debugger, has stopped."""
UNINTERRUPTIBLE = "D"
"""State of a process that waits in the kernel, and that no signal reaches: for storage or a
driver."""

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Rank = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Frame(Struct, frozen=True, gc=False):
    """A call on a stack."""

    file: str
    line: int
    function: str


class GroupCollectives(Struct, frozen=True, kw_only=True, gc=False):
    """How far one rank has come in the collectives of a process group, as torch has recorded it."""

    group: str
    """Name of the group and its backend, such as `0 gloo`: equal on all of its ranks."""
    entered: _Number = 0
    """Number of the newest collective that the rank has entered, from 1; 0 before the first."""
    pending: _Number = 0
    """Number of the oldest collective that has not completed on the rank; 0 if there is none."""
    operation: str = ""
    """What has not completed, such as `all_reduce`. A message between two ranks has no number."""
    size: _Rank = 0
    """Number of ranks in the group."""
    members: tuple[_Rank, ...] = ()
    """Ranks of the group if something is pending and they are at most `MEMBERS_MAX`; else empty.
    World ranks until the daemon has received them, as the rank of the process."""


class SessionActivity(Struct, frozen=True, kw_only=True, gc=False):
    """What the session of one rank was doing, as it has noted itself."""

    epoch: int
    """Epoch in which its session has restored; 0 before that."""
    ranks: int
    """Number of ranks in its world."""
    step: int
    """Step that it has completed last."""
    training: str = ""
    """Call of the session in which its training thread is, such as `save`; empty in none."""
    saving: str = ""
    """What its saver does for a save, such as `waits for a slot`; empty for nothing."""

    @property
    def in_words(self) -> str:
        """The call in which training is, and what a save does meanwhile; empty outside of calls."""
        if not self.training:
            return ""
        save = f", while a save {self.saving}" if self.saving else ""
        return f"in {self.training} of its session after step {self.step}{save}"


class InspectedProcess(Struct, frozen=True, kw_only=True, gc=False):
    """The process of one rank, as its launcher saw it."""

    rank: int
    state: str = ""
    """Its main thread's state, as in /proc/PID/stat; empty where that could not be read."""
    kernel: str = ""
    """Where it waits in the kernel, such as `nfs_wait_bit_killable`; empty if unknown."""
    call: str = ""
    """The system call on a file that it waits in, such as `read of /data/0.bin`; empty if in
    none."""
    helper: str = ""
    """A child process that is stopped or waits for a file, such as `its child 17 is stopped`; empty
    without one."""
    frames: tuple[Frame, ...] = ()
    """Stack of the main thread, the innermost call first."""
    no_stack: str = ""
    """Why `frames` is empty."""
    hardware_fault: str = ""
    """What the kernel wrote lately about a fault of its node's hardware; empty if it wrote nothing,
    or could not be asked."""
    collectives: tuple[GroupCollectives, ...] = ()
    """Its collectives, those that have not completed first; empty if its process gave no answer."""
    session: SessionActivity | None = None
    """None if its process has noted nothing."""

    @property
    def in_words(self) -> str:
        """All of this in one line, for logs and histories."""
        stack = " < ".join(f"{f.function} ({f.file}:{f.line})" for f in self.frames)
        parts = (f"state {self.state or '?'}", self.kernel, self.call, self.helper)
        why = (self.no_stack, self.hardware_fault)
        pending = [
            f"pending {each.operation} {each.pending or ''} of group {each.group}"
            for each in self.collectives
            if each.operation
        ]
        session = ""
        if (noted := self.session) is not None:
            session = f"after step {noted.step} in epoch {noted.epoch} of {noted.ranks} ranks"
            session = " ".join(filter(None, (session, noted.in_words)))
        return "; ".join(filter(None, (*parts, *why, session, *pending, stack)))


def bounded_process(process: InspectedProcess, frames_max: int = FRAMES_MAX) -> InspectedProcess:
    """`process` with printable texts of bounded size, and at most `frames_max` frames."""
    session = process.session
    return InspectedProcess(
        rank=process.rank,
        state=printable(process.state[:1]),
        kernel=printable(process.kernel[:NAME_CHARACTERS_MAX]),
        call=printable(process.call[:FILE_CHARACTERS_MAX]),
        helper=printable(process.helper[:FILE_CHARACTERS_MAX]),
        frames=tuple(
            Frame(
                printable(frame.file[-FILE_CHARACTERS_MAX:]),
                frame.line,
                printable(frame.function[:NAME_CHARACTERS_MAX]),
            )
            for frame in process.frames[:frames_max]
        ),
        no_stack=printable(process.no_stack[:NAME_CHARACTERS_MAX]),
        hardware_fault=printable(process.hardware_fault[:FILE_CHARACTERS_MAX]),
        collectives=tuple(
            GroupCollectives(
                group=printable(each.group[:NAME_CHARACTERS_MAX]),
                entered=each.entered,
                pending=each.pending,
                operation=printable(each.operation[:NAME_CHARACTERS_MAX]),
                size=each.size,
                members=each.members if len(each.members) <= MEMBERS_MAX else (),
            )
            for each in process.collectives[:GROUPS_MAX]
        ),
        session=session
        and SessionActivity(
            epoch=session.epoch,
            ranks=session.ranks,
            step=session.step,
            training=printable(session.training[:NAME_CHARACTERS_MAX]),
            saving=printable(session.saving[:NAME_CHARACTERS_MAX]),
        ),
    )
