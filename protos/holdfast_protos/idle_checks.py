"""Encode and decode what checks of idle nodes have found, bounded: it comes from other nodes."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.idle_checks import FailedCheck, IdleCheck, each_once, failed_check
from holdfast_protos import control_pb2


def idle_checks_to_proto(failed: Iterable[FailedCheck]) -> control_pb2.IdleChecks:
    """Encode the failed checks of a node; none of them is a report as well."""
    return control_pb2.IdleChecks(
        failed=[
            control_pb2.FailedCheck(
                check=each.check,
                text=each.text,
                failing_s=each.failing_s,
                confirmed=each.confirmed,
            )
            for each in failed
        ]
    )


def idle_checks_from_proto(message: control_pb2.IdleChecks) -> tuple[FailedCheck, ...]:
    """Decode the failed checks of a node. What a daemon of another release calls otherwise, or
    cannot be, is left out."""
    found = (
        failed_check(each.check, each.text, each.failing_s, confirmed=each.confirmed)
        for each in message.failed[: len(IdleCheck)]
    )
    return each_once(each for each in found if each is not None)
