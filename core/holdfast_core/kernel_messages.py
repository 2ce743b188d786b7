"""What the kernel writes about the end of a process: a lack of memory, and faults of hardware.

To its parent, a process that the kernel has killed looks as if anyone had sent SIGKILL, and one
whose GPU has failed as if its script had an error. The kernel's log tells them apart. Its lines
are evidence only where they are certain: a killed process is named by its id, and an error of a
GPU (an Xid) that a script can cause by itself is shown, but is no fault of the node. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast_core.states import EndReason

TEXT_CHARACTERS_MAX = 240
"""Characters that are kept of a message."""
MICROSECOND_DIGITS_MAX = 18
"""Digits that are read of the time of a record: more than any kernel runs."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of GPUs that a program causes, or that follow from its end: those which NVIDIA's device
plugin for Kubernetes does not count against a device."""

HARMLESS_XIDS = frozenset({63, 92})
"""Errors of a GPU's memory that the GPU has corrected, or that it has remapped."""

UNUSABLE_XIDS = frozenset({62, 64, 79, 95, 119, 120, 140, 143})
"""Errors after which a GPU computes nothing, or wrongly, until it is reset or its driver is loaded
again: its controller has halted, its bad memory cannot be set aside or is in use, or it does not
answer on its bus, or its firmware does not."""

_KILLED = re.compile(
    r"(?:Memory cgroup o|O)ut of memory(?: \([a-z_]*\))?: Kill(?:ed)? process (\d+)\b"
)
_XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): "
    r"(\d{1,4})\b(?:, pid='?(\d{1,10})\b)?"
)
_RECOVERED = re.compile(r"GPU recovery action changed from .* to 0x0 \(None\)")
_BAD_MEMORY = re.compile(
    r"(?:Memory failure: |MCE )0x[0-9a-f]+: (?:Sending SIGBUS to|Killing) .*:(\d{1,10}) "
    r"due to hardware memory corruption"
)
_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}"
_UUID = "GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DEVICE = re.compile(f"{_UUID}|{_PCI}")
_NAMED_DEVICE = re.compile(rf"\b({_UUID})\b|\(PCI:({_PCI})", re.IGNORECASE)
_DRIVER_LOADED = re.compile(r"NVRM: loading NVIDIA UNIX ")
_RECORD = re.compile(r"[0-7],\d+,(\d+),[^;]*;(.*)")
"""Records of the kernel itself, whose facility is 0: users may write those of other facilities."""


class KernelMessageKind(StrEnum):
    """What a message is evidence of."""

    OUT_OF_MEMORY = "out of memory"
    """The kernel killed a process for lack of memory."""
    HARDWARE = "hardware"
    """A GPU is at fault."""
    BAD_MEMORY = "bad memory"
    """The kernel ended a process because the node's memory that it used is corrupt."""
    GPU_PROGRAM = "GPU program"
    """A GPU ended what a program did there."""
    GPU_NOTICE = "GPU notice"
    """A message about a GPU that people should see, and from which nothing follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMessage:
    """A line of the kernel's log about the end of a process."""

    kind: KernelMessageKind
    text: str
    """The line as the kernel wrote it; printable ASCII."""
    pid: int | None = None
    """Process that it names, as the kernel numbers processes; None for none."""
    gpu: str = ""
    """The GPU that it is about, as `gpu_id` has it; empty for none."""
    unusable: bool = False
    """Whether the GPU cannot be used until it is reset."""
    at_s: float | None = None
    """Seconds since the start of the kernel; None if they are not known."""


def messages_in(records: str) -> Iterator[KernelMessage]:
    """The messages about ends of processes in records of /dev/kmsg. All others, lines that
    continue a record, and what is no record at all, are left out."""
    for at_s, text in _lines_in(records):
        if (message := message_of(text)) is not None:
            yield replace(message, at_s=at_s)


def standing_faults(records: Iterable[str], gpus: Collection[str]) -> list[KernelMessage]:
    """The faults of hardware of `gpus` that nothing has ended: since then, the driver has neither
    been loaded nor said that the GPU has recovered. The newest of each GPU, and one after which it
    is unusable rather than any other.

    Args:
        records: all of the log, oldest first.
        gpus: as `gpu_id` has them.
    """
    found: dict[str, KernelMessage] = {}
    for at_s, text in (line for part in records for line in _lines_in(part)):
        if _DRIVER_LOADED.match(text):
            found.clear()
        message = message_of(text)
        if message is None or message.gpu not in gpus:
            continue
        if _RECOVERED.search(message.text):
            found.pop(message.gpu, None)
        elif message.kind is KernelMessageKind.HARDWARE:
            known = found.get(message.gpu)
            if known is None or message.unusable or not known.unusable:
                found[message.gpu] = replace(message, at_s=at_s)
    return [found[gpu] for gpu in sorted(found)]


def _lines_in(records: str) -> Iterator[tuple[float, str]]:
    """(seconds since the start of the kernel, text) of each record of the kernel itself."""
    for line in records.splitlines():
        if (record := _RECORD.fullmatch(line)) is not None:
            yield int(record[1][:MICROSECOND_DIGITS_MAX]) / 1e6, record[2]


def message_of(text: str) -> KernelMessage | None:
    """The message in one line of the kernel; None if it is about something else.

    The kernel prints names that users choose, of processes and of files, so only what a line begins
    with says what it is."""
    text = "".join(c if " " <= c <= "~" else "?" for c in text[:TEXT_CHARACTERS_MAX])
    if found := _XID.match(text):
        kind, pid = _kind_of_xid(int(found[2]), text), int(found[3]) if found[3] else None
        unusable = int(found[2]) in UNUSABLE_XIDS
        return KernelMessage(kind=kind, text=text, pid=pid, gpu=gpu_id(found[1]), unusable=unusable)
    for pattern, kind in (
        (_BAD_MEMORY, KernelMessageKind.BAD_MEMORY),
        (_KILLED, KernelMessageKind.OUT_OF_MEMORY),
    ):
        if found := pattern.match(text):
            return KernelMessage(kind=kind, text=text, pid=int(found[1]))
    return None


def _kind_of_xid(number: int, text: str) -> KernelMessageKind:
    if number in APPLICATION_XIDS:
        return KernelMessageKind.GPU_PROGRAM
    if number in HARMLESS_XIDS or _RECOVERED.search(text):
        return KernelMessageKind.GPU_NOTICE
    return KernelMessageKind.HARDWARE


def gpu_id(pci: str) -> str:
    """The one form of a GPU's PCI address, which different tools write with and without its
    function, and with domains of four or eight digits."""
    domain, _, place = pci.lower().partition(":")
    return f"{domain.lstrip('0').zfill(4)}:{place.partition('.')[0]}"


def is_device(name: str) -> bool:
    """Whether this is the UUID of a GPU, or its PCI address as `gpu_id` has it."""
    return _DEVICE.fullmatch(name) is not None


def device_in(text: str) -> str:
    """The first GPU that a text names, by its UUID as the driver writes it, or by the PCI address
    of an Xid; empty without one."""
    found = _NAMED_DEVICE.search(text)
    if found is None:
        return ""
    return f"GPU-{found[1][4:].lower()}" if found[1] else gpu_id(found[2])


def device_at_fault(lines: str) -> str:
    """The GPU of the newest of these lines of the kernel that reports a fault of hardware; empty
    without one."""
    for line in reversed(lines.splitlines()):
        message = message_of(line)
        if message is not None and message.kind is KernelMessageKind.HARDWARE:
            return message.gpu
    return ""


def explaining(
    messages: Iterable[KernelMessage], pid: int, memory_was_short: bool
) -> tuple[EndReason, list[str]]:
    """Why the process `pid` failed, and the texts of those recent messages that tell it.

    A fault of a GPU explains the end of any process, so it must be a GPU of the job. Any other
    message does only if it names this process, or where a process beside it was killed for lack of
    memory.

    Args:
        messages: without the numbers of processes where the kernel counts them differently, as for
            a container.
        pid: of the process that failed, as its parent sees it.
        memory_was_short: whether the kernel has just killed a process of the same control group.
    """
    kinds, texts = set(), []
    of_any_process = {KernelMessageKind.HARDWARE, KernelMessageKind.GPU_NOTICE}
    for message in messages:
        starved = message.kind is KernelMessageKind.OUT_OF_MEMORY and memory_was_short
        starved = starved and message.pid is not None  # else it may be another container's
        if message.kind in of_any_process or starved or message.pid == pid:
            kinds.add(message.kind)
            texts.append(message.text)
    if memory_was_short or KernelMessageKind.OUT_OF_MEMORY in kinds:
        return EndReason.OOM_KILLED, texts
    if kinds & {KernelMessageKind.HARDWARE, KernelMessageKind.BAD_MEMORY}:
        return EndReason.HARDWARE_FAULT, texts
    return EndReason.UNKNOWN, texts
