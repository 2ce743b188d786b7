"""Checks of nodes on which no job is: what their daemons report, and what counts.

A spare is used when another node has failed, so what is wrong with it should be known before. Its
daemon checks what needs no device, now and then, for as long as no job is there. A check that has
failed and has not passed since stands, and choices among nodes avoid the node while it stands. It
is also a failure in the node's record (`node_failures`), once, if it has failed in two rounds, and
fades there. A daemon that reports nothing proves nothing. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from holdfast_core.last_lines import last_lines

TEXT_CHARACTERS_MAX = 200
"""Characters that are kept of what a check has found."""


class IdleCheck(StrEnum):
    """A check that a daemon makes, in order."""

    PROCESSORS = "processors"
    MEMORY = "memory"
    SHARED_MEMORY = "shared memory"
    """The memory of snapshots."""
    DISK = "disk"
    CLOCK = "clock"


class FailedCheck(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A check that has failed, and has not passed since."""

    check: IdleCheck
    text: str
    """What it found the last time, in words, in one line."""
    failing_s: float
    """Seconds since it failed for the first time."""
    confirmed: bool = False
    """Whether it has failed in two rounds or more."""


def failed_check(check: str, text: str, failing_s: float, *, confirmed: bool) -> FailedCheck | None:
    """A failed check as somebody reports it; None if it is not possible."""
    if check not in set(IdleCheck) or not (math.isfinite(failing_s) and failing_s >= 0):
        return None
    line = " ".join(last_lines(text).split())[:TEXT_CHARACTERS_MAX]
    return FailedCheck(check=IdleCheck(check), text=line, failing_s=failing_s, confirmed=confirmed)


def each_once(failed: Iterable[FailedCheck]) -> tuple[FailedCheck, ...]:
    """The first report of each check, in the order of checks."""
    found: dict[IdleCheck, FailedCheck] = {}
    for each in failed:
        found.setdefault(each.check, each)
    return tuple(found[check] for check in IdleCheck if check in found)


def nodes_to_avoid(
    reports: Mapping[str, tuple[FailedCheck, ...]],
) -> dict[str, tuple[FailedCheck, ...]]:
    """Those of `reports` that have failed checks, without the checks that most nodes fail: what
    they have in common is no node, but a release, say."""
    count = Counter(each.check for failed in reports.values() for each in failed)
    common = {check for check, nodes in count.items() if nodes > 1 and 2 * nodes > len(reports)}
    counted = {
        node: tuple(each for each in failed if each.check not in common)
        for node, failed in sorted(reports.items())
    }
    return {node: failed for node, failed in counted.items() if failed}


def in_words(failed: Iterable[FailedCheck]) -> str:
    """`failed check of disk: …` for each of `failed`; empty for none."""
    return "; ".join(f"failed check of {each.check}: {each.text}" for each in failed)
