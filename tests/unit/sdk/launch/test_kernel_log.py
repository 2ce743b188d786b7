"""The kernel's log, read from a file in the form of /dev/kmsg, and the real one where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast._launch import kernel_log
from holdfast._launch.kernel_log import KernelLog
from holdfast_core.kernel_messages import KernelMessageKind

PCI = "0000:3b:00.0"
XID = "4,{},1,-;NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>'\n"


KILLED = "3,1,1,-;Out of memory: Killed process 7 (a)\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A log, beside the folder of the only GPU of this container."""
    (tmp_path / "gpus" / PCI).mkdir(parents=True)
    file = tmp_path / "kmsg"
    file.touch()
    return file


def opened(file: Path) -> KernelLog:
    return KernelLog(file, file.with_name("gpus"))


def write(file: Path, *lines: str) -> None:
    with file.open("a") as written:
        written.writelines(lines)


def test_only_what_was_written_since_then_is_known(file: Path) -> None:
    write(file, XID.format(1, 79))
    log = opened(file)
    assert log.recent() == []
    write(file, XID.format(2, 48))
    log.look()
    assert [message.kind for message in log.recent()] == [KernelMessageKind.HARDWARE]
    assert ": 48," in log.recent()[0].text


def test_old_messages_explain_nothing_and_few_are_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(file)
    write(file, *(XID.format(n, 100 + n) for n in range(50)))
    assert ": 149," in log.recent()[-1].text and len(log.recent()) == kernel_log.KEPT
    monkeypatch.setattr(kernel_log, "RECENT_S", 0.0)
    assert log.recent() == []


def test_a_fault_of_hardware_explains_a_hang_that_is_noticed_minutes_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(file)
    assert log.hardware_fault() == ""
    write(file, *(XID.format(n, xid) for n, xid in enumerate((48, 79, 45))))
    assert ": 79," in log.hardware_fault()  # 45 is no fault of hardware
    monkeypatch.setattr(kernel_log, "HUNG_S", 0.0)
    assert log.hardware_fault() == ""


def test_gpus_of_other_containers_are_not_known(file: Path) -> None:
    log = opened(file)
    write(file, XID.replace("3b", "3c").format(1, 79))
    assert (log.recent(), log.hardware_fault()) == ([], "")
    write(file, XID.format(2, 79))
    [message] = log.recent()
    assert message.text == log.hardware_fault() and "3b" in message.text


def test_where_no_driver_tells_the_gpus_faults_are_shown_and_are_no_evidence(file: Path) -> None:
    log = KernelLog(file, file.with_name("missing"))
    write(file, XID.format(1, 79))
    assert [message.kind for message in log.recent()] == [KernelMessageKind.GPU_NOTICE]
    assert log.hardware_fault() == ""


def test_what_has_explained_an_end_does_not_explain_the_next(file: Path) -> None:
    log = opened(file)
    write(file, XID.format(1, 79))
    assert log.recent() and log.hardware_fault()
    write(file, XID.format(2, 48))
    log.forget()
    assert (log.recent(), log.hardware_fault()) == ([], "")


def test_numbers_of_processes_are_those_of_the_kernel_or_unknown(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = file.with_name("pids")
    pids.touch()
    in_container = KernelLog(file, pids=pids)
    monkeypatch.setattr(kernel_log, "OUTERMOST_PIDS", pids.stat().st_ino)
    outside = KernelLog(file, pids=pids)
    write(file, KILLED)
    assert [message.pid for log in (in_container, outside) for message in log.recent()] == [None, 7]


def test_a_terminal_in_place_of_the_log_is_left_alone() -> None:
    ours, theirs = os.openpty()
    log = KernelLog(Path(os.ttyname(theirs)))
    os.write(ours, XID.format(1, 79).encode())
    assert log.recent() == []
    assert os.read(theirs, 1000).decode() == XID.format(1, 79)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("name", ["missing", "."])
def test_where_the_log_cannot_be_read_nothing_is_known(tmp_path: Path, name: str) -> None:
    log = KernelLog(tmp_path / name)
    assert log.recent() == []
    log.close()
    assert log.recent() == []


def test_the_log_of_this_kernel_never_blocks() -> None:
    log = KernelLog()
    log.look()
    assert isinstance(log.recent(), list)
    log.close()


def test_faults_of_the_past_are_read_from_the_beginning(file: Path) -> None:
    other = XID.replace("3b", "3c").format(3, 79)
    write(file, XID.format(1, 79), XID.format(2, 48), other)
    faults = opened(file).past_faults()
    assert faults is not None
    assert [(each.gpu, each.unusable) for each in faults] == [("0000:3b:00", True)]
    assert KernelLog(file, file.with_name("missing")).past_faults() is None  # whose GPUs are they?
    assert KernelLog(file.with_name("none"), file.with_name("gpus")).past_faults() is None
