"""The kernel's log, read from a file in the form of /dev/kmsg, and the real one where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._launch import kernel_log
from holdfast._launch.kernel_log import KernelLog
from holdfast_core.kernel_messages import KernelMessageKind

XID = "4,{},1,-;NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>'\n"


def test_only_what_was_written_since_then_is_known(tmp_path: Path) -> None:
    file = tmp_path / "kmsg"
    file.write_text(XID.format(1, 79))
    log = KernelLog(file)
    assert log.recent() == []
    with file.open("a") as written:
        written.write(XID.format(2, 48))
    log.look()
    assert [message.kind for message in log.recent()] == [KernelMessageKind.HARDWARE]
    assert ": 48," in log.recent()[0].text


def test_old_messages_explain_nothing_and_few_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kmsg"
    file.touch()
    log = KernelLog(file)
    with file.open("a") as written:
        written.writelines(XID.format(n, 100 + n) for n in range(50))
    assert ": 149," in log.recent()[-1].text and len(log.recent()) == kernel_log.KEPT
    monkeypatch.setattr(kernel_log, "RECENT_S", 0.0)
    assert log.recent() == []


def test_a_fault_of_hardware_explains_a_hang_that_is_noticed_minutes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kmsg"
    file.touch()
    log = KernelLog(file)
    assert log.hardware_fault() == ""
    with file.open("a") as written:
        written.writelines(XID.format(n, xid) for n, xid in enumerate((48, 79, 45)))
    assert ": 79," in log.hardware_fault()  # 45 is no fault of hardware
    monkeypatch.setattr(kernel_log, "HUNG_S", 0.0)
    assert log.hardware_fault() == ""


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
