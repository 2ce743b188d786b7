"""Decisions of a job's leader about the durable tier: which generation is written, when, and when
the set of its files is complete or given up. Why that is safe: see `persisting`.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.durable import schedule
from holdfast_core.protection import recovery
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership, Redundancy, Tier
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.snapshots.stored import PersistOrder
from holdfast_daemon.engine.effects import CommitSet, SetCommitted
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.persist_memory import CommitOutcome
from holdfast_daemon.engine.state import JobMemory

SOON = 0.5
"""Fraction of an interval: a generation that is due after this much of it is worth the last moments
of a daemon."""


def lead(memory: JobMemory, epoch: Epoch, now: float) -> Directive:
    """The directive, updated with what follows for persisting from the reports and from `now`."""
    directive, tier = epoch.directive, epoch.membership.tier
    if tier is None or directive.line is None or memory.fenced:
        return directive
    reports = memory.reports.values()
    orders = [r.persist for r in reports if r.persist is not None]
    stored = [g for g in (memory.persist.committed, *(r.stored for r in reports)) if g is not None]
    directive = replace(
        directive,
        persist=max([*orders, *([directive.persist] if directive.persist else [])], default=None),
        persisted=max(
            [*stored, *([directive.persisted] if directive.persisted else [])], default=None
        ),
    )
    order = directive.persist
    if order is None or order.ended:
        return _begin(memory, epoch, tier, directive, now)
    return _continue_order(memory, epoch.membership, tier, directive, order, now)


def _begin(
    memory: JobMemory, epoch: Epoch, tier: Tier, directive: Directive, now: float
) -> Directive:
    """Order a set, when one is due."""
    persist = memory.persist
    if now < persist.retry_at:
        return directive
    found = _candidate(memory, epoch.membership, directive)
    if found is None:
        return directive
    candidate, lost = found
    facts = facts_of(memory, epoch, candidate, now)
    wants = [r.wanted for r in memory.reports.values() if r.wanted is not None]
    persisted = directive.persisted
    facts = replace(
        facts, redundancy_lost=lost, wanted=any(persisted is None or w > persisted for w in wants)
    )
    why = schedule.why_due(tier, facts)
    if not why:
        return directive
    if memory.holdings(epoch.membership).has_window(candidate):
        return replace(directive, whole_after=max(candidate, directive.whole_after or candidate))
    number = 1 + (directive.persist.number if directive.persist else 0)
    memory.note(JobEvent.PERSIST_ORDERED, generation=candidate, detail=why)
    _lead_order(memory, number, now)
    persist.began_at = now
    return replace(
        directive, persist=PersistOrder(number=number, ended=False, generation=candidate)
    )


def facts_of(memory: JobMemory, epoch: Epoch, candidate: Generation, now: float) -> schedule.Facts:
    """Facts for `holdfast_core.durable.schedule.why_due`, as this daemon knows them."""
    persist, membership, directive = memory.persist, epoch.membership, epoch.directive
    assert directive.line is not None
    since = max(persist.stored_at, persist.watched_since)
    return schedule.Facts(
        candidate=candidate,
        base_step=schedule.base_step(candidate, directive.line, directive.persisted),
        elapsed_s=now - since,
        cost_s=persist.cost_s if persist.cost_s is not None or not persist.stored else 0.0,
        loss_rate_per_s=schedule.loss_rate_per_s(
            membership.groups,
            membership.redundancy,
            replicas=membership.replicas,
            lost_nodes=persist.lost_nodes,
            watched_s=now - persist.watched_since,
        ),
    )


def is_due_soon(memory: JobMemory, now: float) -> bool:
    """Whether the protected generation should be persisted soon, as far as this daemon knows."""
    epoch = memory.current
    if epoch is None or epoch.membership.tier is None or memory.fenced:
        return False
    directive = epoch.directive
    newest = directive.protected or directive.retained
    if directive.line is None or newest is None:
        return False
    if directive.persisted is not None and directive.persisted >= newest:
        return False
    if memory.holdings(epoch.membership).has_window(newest):
        return False
    facts = facts_of(memory, epoch, newest, now)
    return bool(schedule.why_due(epoch.membership.tier, facts, portion=SOON))


def _candidate(
    memory: JobMemory, membership: Membership, directive: Directive
) -> tuple[Generation, bool] | None:
    """The newest generation to persist, and whether its redundancy is lost; None when storage has
    it, or when there is none. Left out are generations that a member may have freed, and
    generations of another world, since the files of a set are numbered by world rank."""
    assert directive.line is not None
    holdings = memory.holdings(membership)
    candidates = [
        g
        for g in holdings.generations()  # newest first
        if membership.is_present(g)
        and (g.epoch == membership.epoch or g == directive.line.generation)
        and (directive.retained is None or g >= directive.retained)
        and g not in directive.dead
    ]
    redundant = membership.redundancy is not Redundancy.NONE
    is_whole = recovery.is_protected if redundant else recovery.is_complete
    newest = next((g for g in candidates if is_whole(membership, holdings, g)), None)
    lost = newest is None and redundant and _was_protected(memory, membership, directive)
    if lost:
        newest = next(
            (g for g in candidates if recovery.is_complete(membership, holdings, g)), None
        )
    if newest is None or (directive.persisted is not None and newest <= directive.persisted):
        return None
    return newest, lost


def _was_protected(memory: JobMemory, membership: Membership, directive: Directive) -> bool:
    """Whether there is something to lose, and every member has reported what it holds. The line is
    not at risk once storage has it: most often it came from there."""
    members = [memory.reports.get(member.index) for member in membership.members]
    line, stored = directive.line and directive.line.generation, directive.persisted
    promised = directive.protected or (line if line != stored else None)
    return promised is not None and all(r is not None and r.verified for r in members)


def _lead_order(memory: JobMemory, number: int, now: float) -> None:
    """Begin to gather the files of this order."""
    persist = memory.persist
    persist.leading, persist.moved_at = number, now
    persist.gathered, persist.committing, persist.outcome = {}, False, None


def _continue_order(
    memory: JobMemory,
    membership: Membership,
    tier: Tier,
    directive: Directive,
    order: PersistOrder,
    now: float,
) -> Directive:
    """Gather files; commit the set when all are there, or give it up when that is impossible."""
    persist = memory.persist
    if persist.leading != order.number:  # this leader has restarted, or follows another
        _lead_order(memory, order.number, now)
        persist.began_at = max(persist.began_at, now)
    if persist.outcome is not None:
        return _ended(memory, directive, order, persist.outcome.error, now)
    before = len(persist.gathered)
    answers = [r for r in memory.reports.values() if r.persist == order]
    for report in answers:
        persist.gathered |= {file.rank: file for file in report.persisted}
    if len(persist.gathered) > before:
        persist.moved_at = now
    numbers = range(membership.world_size)
    missing = [
        membership.world.rank_of(number) for number in numbers if number not in persist.gathered
    ]
    failure = _failure_of(membership, answers, missing)
    if not missing and not persist.committing:
        persist.committing = True
        memory.out.append(
            CommitSet(
                epoch=memory.epoch,
                number=order.number,
                generation=order.generation,
                files=tuple(persist.gathered[number] for number in numbers),
                tier=tier,
            )
        )
    elif missing and failure:
        return _ended(memory, directive, order, failure, now)
    elif now - persist.moved_at > schedule.patience_s(tier, _member_bytes(memory)):
        waiting = f"ranks {missing}" if missing else "the set's manifest"
        return _ended(memory, directive, order, f"{waiting} did not arrive in time", now)
    return directive


def _failure_of(membership: Membership, answers: list[MemberReport], missing: list[int]) -> str:
    """Why one of the missing ranks will stay missing; empty while all may still come."""
    lacking = {membership.member_of(rank) for rank in missing}
    return next(
        (
            f"member {report.member}: {report.persist_failure}"
            for report in sorted(answers, key=lambda r: r.member)
            if report.persist_failure and report.member in lacking
        ),
        "",
    )


def _member_bytes(memory: JobMemory) -> int:
    """Upper bound on the bytes that one member writes."""
    return max(
        (
            sum(entry.payload_bytes for entry in report.inventory.snapshots)
            for report in memory.reports.values()
        ),
        default=0,
    )


def set_committed(memory: JobMemory, event: SetCommitted) -> None:
    """Record the end of a commit: a complete set counts whether its order still stands or not."""
    persist = memory.persist
    if not event.error:
        persist.committed = max(event.generation, persist.committed or event.generation)
    if event.left:
        memory.note(JobEvent.PERSIST_CLEANUP_FAILED, generation=event.generation, detail=event.left)
    if (event.epoch, event.number) == (memory.epoch, persist.leading):
        persist.outcome = CommitOutcome(event.error)


def _ended(
    memory: JobMemory, directive: Directive, order: PersistOrder, error: str, now: float
) -> Directive:
    """End the order: its set is complete, or given up."""
    persist = memory.persist
    persist.outcome, persist.committing = None, False
    directive = replace(directive, persist=replace(order, ended=True))
    if error:
        persist.failures += 1
        persist.retry_at = now + schedule.backoff_s(persist.failures)
        persist.last_failure = f"generation {order.generation}: {error}"
        return directive
    persist.failures, persist.last_failure = 0, ""
    persist.cost_s = max(now - persist.began_at, 0.0)
    return replace(
        directive, persisted=max(order.generation, directive.persisted or order.generation)
    )
