"""Lines of the kernel about ends of processes, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.kernel_messages import (
    TEXT_CHARACTERS_MAX,
    KernelMessageKind,
    device_at_fault,
    device_in,
    explaining,
    gpu_id,
    is_device,
    message_of,
    messages_in,
    standing_faults,
)
from holdfast_core.states import EndReason

KILLED = "Out of memory: Killed process 4242 (python3) total-vm:9kB, anon-rss:8kB, UID:0"
IN_GROUP = "Memory cgroup out of memory: Killed process 4242 (pt main thread) total-vm:9kB"
OFF_THE_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
CLEANUP = "NVRM: Xid (PCI:0000:3b:00): 45, pid=4242, name=python3, Ch 00000008"
RESET_REQUIRED = (
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x{} ({}) to 0x{} ({})"
)
REMAPPED = "NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: New row marked for remapping"
CORRUPT = "Memory failure: 0x1234: Sending SIGBUS to python3:7 due to hardware memory corruption"


@pytest.mark.parametrize(
    ("text", "kind", "pid"),
    [
        (KILLED, KernelMessageKind.OUT_OF_MEMORY, 4242),
        (IN_GROUP, KernelMessageKind.OUT_OF_MEMORY, 4242),
        ("Out of memory (oom_kill_allocating_task): Kill process 7 (a)", "out of memory", 7),
        (OFF_THE_BUS, KernelMessageKind.HARDWARE, None),
        ("NVRM: Xid (PCI:0000:0a:00): 48, pid='881', name=python3", "hardware", 881),
        (CLEANUP, KernelMessageKind.GPU_PROGRAM, 4242),
        ("NVRM: Xid (PCI:00000000:0A:00.0): 79, GPU has fallen off the bus", "hardware", None),
        (CORRUPT, KernelMessageKind.BAD_MEMORY, 7),
        (RESET_REQUIRED.format(1, "GPU Reset Required", 1, "Node Reboot"), "hardware", None),
        (RESET_REQUIRED.format(1, "GPU Reset Required", 0, "None"), "GPU notice", None),
        (REMAPPED, "GPU notice", None),
        ("NVRM: Xid (PCI:0000:3b:00): 92, High single-bit ECC error rate", "GPU notice", None),
    ],
)
def test_lines_about_ends_of_processes_are_recognised(
    text: str, kind: KernelMessageKind, pid: int | None
) -> None:
    [message] = messages_in(f"6,1,99,-;usb 1-1: new device\n3,2,100,-,caller=T1;{text}\n KEY=x\n")
    assert (message.kind, message.text, message.pid) == (kind, text, pid)


@pytest.mark.parametrize(
    "text",
    [
        "oom_reaper: reaped process 4242 (python3), now anon-rss:0kB",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        "mce: [Hardware Error]: Machine check events logged",  # of errors that were corrected
        # A user chooses names of processes and files, which the kernel prints.
        "a.out[77]: segfault at 0 ip 0 sp 0 error 6 in NVRM: Xid (PCI:0000:3b:00): 79[55+1000]",
        "NVRM: Xid (): 7[1234]: segfault at 0 ip 0 sp 0 error 6 in a.out[55+1000]",
        "a.out[77]: segfault at 0 error 6 in Memory failure: 0x1: Killing a:7 due to hardware "
        "memory corruption[55+1000]",
        "a.out[77]: segfault at 0 error 6 in Out of memory: Killed process 7[55+1000]",
        "",
    ],
)
def test_other_lines_are_not(text: str) -> None:
    assert message_of(text) is None


@pytest.mark.parametrize("prefix", [8, 12, 14, 30])
def test_what_users_write_into_the_log_of_the_kernel_is_left_out(prefix: int) -> None:
    assert list(messages_in(f"{prefix},5,6,-;{OFF_THE_BUS}")) == []
    assert len(list(messages_in(f"{prefix % 8},5,6,-;{OFF_THE_BUS}"))) == 1


def test_a_gpu_has_one_name_whatever_writes_its_address() -> None:
    names = {gpu_id(each) for each in ("0000:3B:00.0", "00000000:3b:00.0", "0000:3b:00")}
    assert names == {"0000:3b:00"}
    message = message_of(OFF_THE_BUS)
    assert message is not None and message.gpu == "0000:3b:00"


def test_what_a_process_wrote_into_its_name_is_made_printable_and_cut() -> None:
    message = message_of(f"{KILLED} \x1b[31m\u202e{'x' * 1000}")
    assert message is not None and message.text.isprintable() and message.text.isascii()
    assert len(message.text) == TEXT_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("texts", "pid", "short", "reason", "shown"),
    [
        ([KILLED], 4242, False, EndReason.OOM_KILLED, 1),
        ([KILLED], 1, False, EndReason.UNKNOWN, 0),  # of another job on the node
        ([KILLED], 1, True, EndReason.OOM_KILLED, 1),  # a worker of its data loader
        ([], 1, True, EndReason.OOM_KILLED, 0),  # in a pod, without the log
        ([OFF_THE_BUS], 1, False, EndReason.HARDWARE_FAULT, 1),
        ([CLEANUP], 4242, False, EndReason.UNKNOWN, 1),  # it follows from any kill
        ([CLEANUP], 1, False, EndReason.UNKNOWN, 0),
        ([CLEANUP, OFF_THE_BUS], 4242, False, EndReason.HARDWARE_FAULT, 2),
        ([OFF_THE_BUS, KILLED], 4242, False, EndReason.OOM_KILLED, 2),
        ([CORRUPT], 7, False, EndReason.HARDWARE_FAULT, 1),
        ([CORRUPT], 1, False, EndReason.UNKNOWN, 0),  # memory that another process used
        ([REMAPPED], 1, False, EndReason.UNKNOWN, 1),
        ([], 1, False, EndReason.UNKNOWN, 0),
    ],
)
def test_only_what_is_certain_explains_an_end(
    texts: list[str], pid: int, short: bool, reason: EndReason, shown: int
) -> None:
    messages = [message for text in texts if (message := message_of(text)) is not None]
    found, lines = explaining(messages, pid, short)
    assert (found, len(lines)) == (reason, shown)


def test_in_a_container_lines_about_processes_of_others_are_not_shown() -> None:
    message = message_of(KILLED)
    assert message is not None
    unknown = replace(message, pid=None)
    assert explaining([unknown], 4242, True) == (EndReason.OOM_KILLED, [])


@given(st.text())
def test_no_text_is_too_strange(records: str) -> None:
    assert all(message.text.isprintable() for message in messages_in(records))


# --- faults of the past ---------------------------------------------------------------------------

GPU, OTHER = "0000:3b:00", "0000:5e:00"


def at(second: int, text: str, gpu: str = GPU) -> str:
    return f"4,1,{second}000000,-;{text.format(gpu)}\n"


DIES, ECC, CRASH = (f"NVRM: Xid (PCI:{{}}): {xid}, pid='<unknown>'" for xid in (79, 48, 13))
RECOVERS = "NVRM: Xid (PCI:{}): 154, GPU recovery action changed from 0x1 (Reset) to 0x0 (None)"
LOADS = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.90.07"


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([at(1, CRASH)], []),
        ([at(1, DIES), at(2, ECC)], [(GPU, 1.0, True)]),
        ([at(1, ECC), at(2, DIES), at(3, DIES)], [(GPU, 3.0, True)]),
        ([at(1, ECC), at(2, ECC)], [(GPU, 2.0, False)]),
        ([at(1, DIES), at(2, RECOVERS)], []),
        ([at(1, DIES), at(2, RECOVERS, OTHER)], [(GPU, 1.0, True)]),
        ([at(1, DIES), at(2, LOADS)], []),
        ([at(1, DIES), at(2, LOADS), at(3, ECC)], [(GPU, 3.0, False)]),
        ([at(1, DIES, OTHER), at(2, DIES, "0000:99:00")], [(OTHER, 1.0, True)]),
        ([at(1, DIES).replace("4,", "12,", 1)], []),  # a user wrote it
    ],
)
def test_a_fault_stands_until_its_gpu_recovers_or_the_driver_is_loaded(
    records: list[str], expected: list[tuple[str, float, bool]]
) -> None:
    for parts in (records, ["".join(records)]):
        found = standing_faults(parts, {GPU, OTHER})
        assert [(each.gpu, each.at_s, each.unusable) for each in found] == expected


# --- which device ---------------------------------------------------------------------------------

UUID = "GPU-8f0b2c3d-0a1b-2c3d-4e5f-00112233aabb"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (f"rows of the memory of {UUID}, GPU-x cannot be remapped", UUID),
        (f"cuda:3 ({UUID.upper()}) multiplied matrices wrongly", UUID),
        ("2 hours ago, the kernel wrote: NVRM: Xid (PCI:00000000:3B:00.0): 79, x", GPU),
        ("the process on cuda:3 ended with 1", ""),
        (f"{UUID}0 and {UUID[:-1]}", ""),
        ("0000:3b:00", ""),  # this may be anything
        ("", ""),
    ],
)
def test_a_text_names_a_device_in_the_forms_of_the_driver_alone(text: str, device: str) -> None:
    assert device_in(text) == device
    assert is_device(device) == bool(device)


def test_the_device_at_fault_is_that_of_the_newest_fault() -> None:
    lines = [DIES.format(OTHER), ECC.format(GPU), CRASH.format(OTHER), "anything"]
    assert device_at_fault("\n".join(lines)) == GPU
    assert device_at_fault("\n".join(lines[2:])) == ""
