"""Inspection of a job that hangs: what the kernel, and the interpreter, show of its processes.

The text comes from trainers and may hold anything, so every field is made printable and cut to its
size where it is received. Pure.
"""

from __future__ import annotations

from msgspec import Struct

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
STOPPED = ("T", "t")
"""States of a process that a signal, or a debugger, has stopped."""
UNINTERRUPTIBLE = "D"
"""State of a process that waits in the kernel, and that no signal reaches: for storage or a
driver."""


class Frame(Struct, frozen=True, gc=False):
    """A call on a stack."""

    file: str
    line: int
    function: str


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

    @property
    def in_words(self) -> str:
        """All of this in one line, for logs and histories."""
        stack = " < ".join(f"{f.function} ({f.file}:{f.line})" for f in self.frames)
        parts = (f"state {self.state or '?'}", self.kernel, self.call, self.helper)
        why = (self.no_stack, self.hardware_fault)
        return "; ".join(filter(None, (*parts, *why, stack)))


def bounded_process(process: InspectedProcess, frames_max: int = FRAMES_MAX) -> InspectedProcess:
    """`process` with printable texts of bounded size, and at most `frames_max` frames."""
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
    )
