"""Decisions of a job's leader: the line, the protected generation, and what may be freed.

The directive is a pure function of the reports and of the previous directive. Within an epoch its
fields only advance: the leader never takes back an announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast_core.protection import recovery
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_core.snapshots.reports import Directive, MemberReport

Consult = Callable[[Line, Generation | None], tuple[Line | None, Generation | None]]
"""Function from the line that memory gives and the generation being loaded to the line, if there is
one now, and the generation to load; see `loading.consult`."""


def lead(
    membership: Membership,
    reports: Mapping[int, MemberReport],
    previous: Directive,
    consult: Consult = lambda line, load: (line, load),
) -> Directive:
    """The directive that follows from the reports of this epoch, never behind `previous`."""
    previous = _remember(membership, reports, previous)
    inventories = {member: report.inventory for member, report in reports.items()}
    holdings = recovery.Holdings.of(membership, inventories)
    # The line is decided once in an epoch; storage is consulted where memory has none.
    line = previous.line
    if line is None:
        line = _line(membership, reports)
        if line is None:
            return previous
        line, load = consult(line, previous.load)
        previous = replace(previous, load=load)
    if line is None:
        return previous
    # A new line: announce with it what was protected or survivable up to it.
    if previous.line is None:
        until = line.generation or Generation(0, 0)
        previous = replace(
            previous,
            line=line,
            protected=recovery.newest_protected(membership, holdings, not_after=until),
            # The line may lack parity where an older generation, degraded by now, has it.
            retained=recovery.newest_survivable(membership, holdings, not_after=until)
            or recovery.most_survivable(membership, holdings, not_after=until),
        )
    # Advance: newer generations of this epoch may have become protected.
    current = {
        generation
        for generation in holdings.generations()
        if generation.epoch == membership.epoch or generation == line.generation
    }
    already = previous.protected or Generation(0, 0)
    protected = _newest(
        [g for g in current if g > already and recovery.is_protected(membership, holdings, g)],
        previous.protected,
    )
    retained = _newest([], protected, previous.retained)
    if membership.redundancy is Redundancy.NONE:
        retained = _newest(
            [g for g in current if recovery.is_complete(membership, holdings, g)],
            previous.retained,
        )
    # A daemon that restarted lists only what it has verified so far: what it does not list yet is
    # not lost.
    settled = {member: r.inventory for member, r in reports.items() if r.verified}
    # What was protected once may be missing on a member (a corrupt slot) and still be the line:
    # only newer generations can be given up.
    floor = max((g for g in (retained, line.generation) if g is not None), default=None)
    dead = {
        g
        for g in (*previous.dead, *recovery.dead_generations(membership, settled))
        if floor is None or g > floor
    }
    return replace(previous, protected=protected, retained=retained, dead=tuple(sorted(dead)))


def merge(known: Directive, received: Directive) -> Directive:
    """Merge two directives of one epoch: each field takes its most advanced value."""
    return replace(
        known,
        line=known.line or received.line,
        protected=_newest([], known.protected, received.protected),
        retained=_newest([], known.retained, received.retained),
        dead=tuple(sorted({*known.dead, *received.dead})),
        rendezvous=received.rendezvous or known.rendezvous,
        store_key=received.store_key if received.rendezvous else known.store_key,
        persist=max((o for o in (known.persist, received.persist) if o is not None), default=None),
        persisted=_newest([], known.persisted, received.persisted),
        whole_after=_newest([], known.whole_after, received.whole_after),
        load=received.load or known.load,
    )


def with_announced(
    membership: Membership, directive: Directive, line: Line, retained: Generation | None
) -> Directive:
    """`directive` with the line and the retained generation announced earlier in this epoch."""
    # A generation kept from an older epoch need not be protected; inventories show which is.
    current = retained is not None and retained.epoch == membership.epoch
    protected = retained if current and membership.redundancy is not Redundancy.NONE else None
    protected = _newest([], directive.protected, protected)
    retained = _newest([], directive.retained, retained)
    if directive.line is not None and (directive.protected, directive.retained) == (
        protected,
        retained,
    ):
        return directive
    return replace(directive, line=directive.line or line, protected=protected, retained=retained)


def _remember(
    membership: Membership, reports: Mapping[int, MemberReport], previous: Directive
) -> Directive:
    """Recover from the reports the announcements that this leader made before it restarted."""
    for report in reports.values():
        if report.line is not None:
            previous = with_announced(membership, previous, report.line, report.retained)
    return previous


def _line(membership: Membership, reports: Mapping[int, MemberReport]) -> Line | None:
    members = [member.index for member in membership.members]
    if any(m not in reports or not reports[m].verified for m in members):
        return None
    return recovery.recovery_line(membership, {m: reports[m].inventory for m in members})


def _newest(found: list[Generation], *known: Generation | None) -> Generation | None:
    return max([*found, *(g for g in known if g is not None)], default=None)
