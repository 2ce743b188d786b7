"""What the kernel writes about the end of a process: a lack of memory, and faults of hardware.

To its parent, a process that the kernel has killed looks as if anyone had sent SIGKILL, and one
whose GPU has failed as if its script had an error. The kernel's log tells them apart. Its lines
are evidence only where they are certain: a killed process is named by its id, and an error of a
GPU (an Xid) that a script can cause by itself is shown, but is no fault of the node. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.states import EndReason

TEXT_CHARACTERS_MAX = 240
"""Characters that are kept of a message."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of GPUs that a program causes, or that follow from its end: those which NVIDIA's device
plugin for Kubernetes does not count against a device."""

_KILLED = re.compile(r"[Oo]ut of memory(?: \([^)]*\))?: Kill(?:ed)? process (\d+)\b")
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)\b(?:, pid='?(\d+))?")
_BAD_MEMORY = re.compile(r"due to hardware memory corruption")
_RECORD = re.compile(r"\d+,\d+,\d+,[^;]*;(.*)")


class KernelMessageKind(StrEnum):
    """What a message is evidence of."""

    OUT_OF_MEMORY = "out of memory"
    """The kernel killed a process for lack of memory."""
    HARDWARE = "hardware"
    """A device, or the memory, of the node is at fault."""
    GPU_PROGRAM = "GPU program"
    """A GPU ended what a program did there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMessage:
    """A line of the kernel's log about the end of a process."""

    kind: KernelMessageKind
    text: str
    """The line as the kernel wrote it; printable ASCII."""
    pid: int | None = None
    """Process that it names, as the kernel numbers processes; None for none."""


def messages_in(records: str) -> Iterator[KernelMessage]:
    """The messages about ends of processes in records of /dev/kmsg. All others, lines that
    continue a record, and what is no record at all, are left out."""
    for line in records.splitlines():
        record = _RECORD.fullmatch(line)
        message = None if record is None else message_of(record[1])
        if message is not None:
            yield message


def message_of(text: str) -> KernelMessage | None:
    """The message in one line of the kernel; None if it is about something else."""
    text = "".join(c if " " <= c <= "~" else "?" for c in text[:TEXT_CHARACTERS_MAX])
    if found := _XID.search(text):
        ours = int(found[1]) in APPLICATION_XIDS
        kind = KernelMessageKind.GPU_PROGRAM if ours else KernelMessageKind.HARDWARE
        return KernelMessage(kind=kind, text=text, pid=int(found[2]) if found[2] else None)
    if _BAD_MEMORY.search(text):
        return KernelMessage(kind=KernelMessageKind.HARDWARE, text=text)
    if found := _KILLED.search(text):
        return KernelMessage(kind=KernelMessageKind.OUT_OF_MEMORY, text=text, pid=int(found[1]))
    return None


def explaining(
    messages: Iterable[KernelMessage], pid: int, memory_was_short: bool
) -> tuple[EndReason, list[str]]:
    """Why the process `pid` failed, and the texts of those recent messages that tell it.

    A fault of hardware explains the end of any process of its node. Any other message does only if
    it names this process, or where a process beside it was killed for lack of memory.

    Args:
        pid: of the process that failed, as its parent sees it. In a container, the kernel's number
            is another one, and no message matches it.
        memory_was_short: whether the kernel has just killed a process of the same control group.
    """
    kinds, texts = set(), []
    for message in messages:
        starved = message.kind is KernelMessageKind.OUT_OF_MEMORY and memory_was_short
        if message.kind is KernelMessageKind.HARDWARE or starved or message.pid == pid:
            kinds.add(message.kind)
            texts.append(message.text)
    if memory_was_short or KernelMessageKind.OUT_OF_MEMORY in kinds:
        return EndReason.OOM_KILLED, texts
    if KernelMessageKind.HARDWARE in kinds:
        return EndReason.HARDWARE_FAULT, texts
    return EndReason.UNKNOWN, texts
