"""Reports of a daemon to its leader and its parity group."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.reports import MemberReport
from holdfast_core.snapshots.stored import FailedLoad
from holdfast_daemon.engine import loading, persisting
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.state import JobMemory


class ReportContent(NamedTuple):
    """Content of a report without its sender and number, so that it can be compared with the last
    one."""

    epoch: int
    verified: bool
    inventory: Inventory
    line: Line | None
    retained: Generation | None
    persisted: persisting.Reported
    unloadable: tuple[FailedLoad, ...]

    def for_group(self) -> tuple[object, ...]:
        """Part that the parity group acts on. Only the leader needs the rest, such as which saves
        have begun."""
        held = self.inventory
        return self.epoch, self.verified, held.snapshots, held.parities


def report_content(memory: JobMemory, epoch: Epoch) -> ReportContent:
    """Content of a report at this moment."""
    return ReportContent(
        epoch=epoch.number,
        verified=memory.verified,
        inventory=memory.inventory(),
        line=epoch.line,
        retained=epoch.retained,
        persisted=persisting.reported(memory, epoch),
        unloadable=loading.unloadable(memory),
    )


def report(memory: JobMemory, member: int, content: ReportContent) -> MemberReport:
    """The next report of `member`, which is this daemon."""
    memory.sequence += 1
    return MemberReport(
        job=memory.job,
        epoch=content.epoch,
        member=member,
        incarnation=memory.incarnation,
        sequence=memory.sequence,
        verified=content.verified,
        inventory=content.inventory,
        line=content.line,
        retained=content.retained,
        **content.persisted,
        unloadable=content.unloadable,
    )
