"""Reports of idle nodes over the wire."""

from __future__ import annotations

from holdfast_core.idle_checks import FailedCheck, IdleCheck
from holdfast_protos import control_pb2
from holdfast_protos.idle_checks import idle_checks_from_proto, idle_checks_to_proto


def test_a_report_arrives_as_it_was_sent() -> None:
    failed = (
        FailedCheck(check=IdleCheck.MEMORY, text="byte 7 is wrong", failing_s=3.5, confirmed=True),
        FailedCheck(check=IdleCheck.DISK, text="/tmp: Input/output error", failing_s=0.0),
    )
    for each in (failed, ()):
        message = control_pb2.Heartbeat(idle_checks=idle_checks_to_proto(each))
        read = control_pb2.Heartbeat.FromString(message.SerializeToString())
        assert read.HasField("idle_checks")
        assert idle_checks_from_proto(read.idle_checks) == each


def test_what_is_not_understood_is_left_out_and_the_rest_is_bounded() -> None:
    report = control_pb2.IdleChecks()
    for check in ("", "fan", "disk", "disk", "clock", "memory"):
        report.failed.add(check=check, text=check, failing_s=1.0)
    assert [each.check for each in idle_checks_from_proto(report)] == ["disk", "clock"]
    report = control_pb2.IdleChecks()
    report.failed.add(check="disk", failing_s=float("nan"))
    assert idle_checks_from_proto(report) == ()
