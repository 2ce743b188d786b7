"""Settles a job's memory after an input, and sends the other daemons what is new.

Every input of the engine ends in `Convergence.settle`, which runs the level-triggered upkeep until
nothing changes and sends what is new to the leader and the parity group. `Convergence` remembers
only what it has sent and concluded; everything else is in the job's memory.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.stored import FailedLoad
from holdfast_daemon.engine import (
    leader,
    loading,
    persist_leader,
    persisting,
    rebuilding,
    upkeep,
)
from holdfast_daemon.engine.effects import Effect, SaveEpoch, SendDirective, SendReport
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.slots import ParityState, SlotState
from holdfast_daemon.engine.state import JobMemory

_ROUNDS_MAX = 4
"""Maximum number of rounds for one input: each acts on the decisions of the previous round."""


class _ReportContent(NamedTuple):
    """Content of a report without its sender and number, so that two reports can be compared."""

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
        inventory = self.inventory
        return self.epoch, self.verified, inventory.snapshots, inventory.parities


class Convergence:
    """Settles the memory of one job.

    Args:
        memory: changed in place.
    """

    def __init__(self, memory: JobMemory) -> None:
        self._memory = memory
        self._sent_directive: Directive | None = None
        self._repeated_at = self._latest = float("-inf")
        self._reported: _ReportContent | None = None
        """Content of the newest report; None when it must be sent again."""
        self._led: tuple[Membership, Directive, list[MemberReport]] | None = None
        """Inputs from which the leader last concluded nothing new."""

    def settle(self, now: float) -> list[Effect]:
        """Start whatever is due; return its effects after those of the input itself."""
        self.settle_into(now)
        effects, self._memory.out = self._memory.out, []
        return effects

    def settle_into(self, now: float) -> None:
        """Settle for an input that is about to fail: the effects wait for the next input."""
        memory, epoch = self._memory, self._memory.current
        if now < self._latest:  # a clock that jumped back must not stretch a pause
            memory.retry_at.clear()
            memory.persist.clock_went_back(now)
            self._repeated_at = float("-inf")
        self._latest = now
        if epoch is None:
            if memory.left is not None:
                self._leave()
            return
        for _ in range(_ROUNDS_MAX):
            upkeep.verify(memory)
            loading.forget_failures(memory, now)
            self._report(epoch)
            before = (epoch.directive, len(memory.out))  # a report is no progress
            if epoch.leads:
                epoch = self._lead(epoch, now)
                epoch = self.direct(epoch, persist_leader.lead(memory, epoch, now))
            persisting.write(memory, epoch, now)
            upkeep.release(memory, epoch)
            rebuilding.rebuild(memory, epoch, now)
            upkeep.protect(memory, epoch, now)
            if before == (epoch.directive, len(memory.out)):
                break
        self._send_directive(epoch)

    def direct(self, epoch: Epoch, directive: Directive) -> Epoch:
        """Adopt `directive` as the leader's decision, and save it before acting on it.

        Returns:
            The current epoch, with that directive.
        """
        memory, previous = self._memory, epoch.directive
        if directive == previous:
            return epoch
        epoch = memory.direct(directive)
        if (previous.line, previous.retained) != (directive.line, directive.retained):
            memory.out.append(
                SaveEpoch(
                    membership=epoch.membership,
                    line=directive.line,
                    retained=directive.retained,
                )
            )
        if directive.line is not None and previous.line is None:
            memory.note(
                JobEvent.LINE, generation=directive.line.generation, detail=directive.line.reason
            )
        if directive.protected is not None and previous.protected != directive.protected:
            memory.note(JobEvent.PROTECTED, generation=directive.protected)
        for generation in set(directive.dead) - set(previous.dead):
            memory.note(JobEvent.DEAD, generation=generation)
        persisting.note_changes(memory, previous, directive)
        return epoch

    def resend(self) -> None:
        """Send the report and the directive again with the next `settle`, even if unchanged."""
        self._reported = self._sent_directive = None

    def repeat_after(self, pause_s: float, now: float) -> None:
        """Call `resend` once every `pause_s`, whatever else was sent to some of the members
        meanwhile."""
        if now - self._repeated_at >= pause_s:
            self.resend()
            self._repeated_at = now

    # --- inside -----------------------------------------------------------------------------------

    def _lead(self, epoch: Epoch, now: float) -> Epoch:
        """Decide what follows from the reports; unchanged reports are not considered again."""
        memory = self._memory
        inputs = (epoch.membership, epoch.directive, list(memory.reports.values()))
        if epoch.line is not None and inputs == self._led:
            return epoch
        look = partial(loading.consult, memory, epoch, now=now)
        after = self.direct(
            epoch, leader.lead(epoch.membership, memory.reports, epoch.directive, look)
        )
        self._led = inputs if after is epoch else None
        return after

    def _leave(self) -> None:
        """Free everything: this node is no longer a member, so nobody needs what it holds."""
        memory = self._memory
        for arena, slot in memory.slots():
            if slot.state is SlotState.SEALED:
                upkeep.free_slot(memory, arena, slot)
        for parity in memory.parities.values():
            if parity.state is ParityState.READY:
                upkeep.free_parity(memory, parity)

    def _report(self, epoch: Epoch) -> None:
        """Send a changed report to the leader, and to the parity group if it acts on what
        changed."""
        memory, membership, me = self._memory, epoch.membership, epoch.me
        content, previous = _report_content(memory, epoch), self._reported
        if content == previous:
            return
        report = _next_report(memory, me, content)
        self._reported = content
        memory.reports[me] = report
        members = {membership.leader}
        if previous is None or content.for_group() != previous.for_group():
            members |= _audience(epoch)
        for member in sorted(members - {me}):
            memory.out.append(SendReport(to=membership.member(member), report=report))

    def _send_directive(self, epoch: Epoch) -> None:
        directive = epoch.directive
        if not epoch.leads or directive == self._sent_directive:
            return
        if directive.line is None and not directive.rendezvous and directive.load is None:
            return
        self._sent_directive = directive
        for member in epoch.membership.members:
            if member.index != epoch.me:
                self._memory.out.append(SendDirective(to=member, directive=directive))


def _audience(epoch: Epoch) -> set[int]:
    """The members that act on this member's report: its parity group and, until a generation of the
    present world is safe, the remaining members of its groups in earlier worlds."""
    membership, retained = epoch.membership, epoch.retained
    audience = set(epoch.group)
    if retained is None or not membership.is_present(retained):
        for world in membership.past:
            if epoch.me in world.members:
                audience.update(filter(membership.has, world.group_of(epoch.me)))
    return audience


def _report_content(memory: JobMemory, epoch: Epoch) -> _ReportContent:
    """Content of a report at this moment."""
    return _ReportContent(
        epoch=epoch.number,
        verified=memory.verified,
        inventory=memory.inventory(),
        line=epoch.line,
        retained=epoch.retained,
        persisted=persisting.reported(memory, epoch),
        unloadable=loading.unloadable(memory),
    )


def _next_report(memory: JobMemory, member: int, content: _ReportContent) -> MemberReport:
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
