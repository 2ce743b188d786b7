"""Which failures count against a node, so that later choices prefer other nodes. Pure.

Most failures tell nothing about a node, and blaming one at random would only wear the record out.
Not blamed are:

- ends that somebody intended: of Holdfast, of the cluster (preemption, drains, nodes whose end was
  announced), of a script that asks for a restart, and those that a failure rule names by their
  exit code;
- a lack of memory, which is the job's, and what a GPU ends because of a program;
- ranks that end on several nodes at once, or most nodes of a job that are lost at once, or fail a
  check about as soon as each makes one: what they have in common is no node;
- a hang in which no member is known to hold up the others.

A fault of hardware that the kernel has reported is the node's, whatever ended with it. A script
that fails in the same way on one node after the other is found later, in the record of
all nodes (`holdfast_core.node_failures`): for this, what its failures have in common goes with
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from holdfast_core.exit_codes import RETRYABLE
from holdfast_core.job.failures import RECHECK_S
from holdfast_core.job.parsing import FailureRule, On
from holdfast_core.last_lines import essence_of
from holdfast_core.node_failures import FailureKind
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import EndReason
from holdfast_operator.reconciler.failures.failure_rules import is_permanent
from holdfast_operator.reconciler.observe.evidence import Cause
from holdfast_operator.reconciler.observe.lookups import ranks_in
from holdfast_operator.reconciler.observe.text import checked_device, failed_check
from holdfast_operator.reconciler.observe.views import BlamedNode, ControlState
from holdfast_operator.reconciler.rules import Observation, RuleResult

CHECKED_AGAIN = 1.5
"""Times `failurePolicy.recheckSeconds` within which every launcher that waits has checked its node
again."""


def blamed_nodes(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    causes: Sequence[Cause],
    rules: Sequence[FailureRule],
) -> tuple[BlamedNode, ...]:
    """Failures among `causes` that count against nodes, each node at most once. `rules` holds the
    failure rule of each cause."""
    lost = {cause.member for cause in causes if cause.on is On.NODE_LOST}
    faulty = {cause.member for cause in causes if cause.hardware_fault} - lost
    unfit = {cause.member for cause in causes if cause.failed_check} - lost - faulty
    together = recent_failed_checks(observation, state).keys() | unfit_nodes(membership, causes)
    devices = {each.member: each.device for each in causes if each.unfit_node and each.device}
    found: Iterable[BlamedNode]
    if lost or unfit or faulty:
        found = (
            *_each(membership, lost, FailureKind.LOST_NODE, {}, state.announced),
            *_each(membership, faulty, FailureKind.HARDWARE_FAULT, devices),
            *_each(
                *(membership, unfit, FailureKind.FAILED_CHECK, devices),
                excused=together if _most_of_job(together, membership) else frozenset(),
            ),
        )
    else:
        found = _of_ended(observation, state, membership, causes, rules)
    return tuple(found)


def unfit_nodes(membership: Membership, causes: Iterable[Cause]) -> frozenset[str]:
    """Nodes of members that failed a check."""
    failed = {cause.member for cause in causes if cause.failed_check}
    return frozenset(member.node for member in membership.members if member.index in failed)


def recent_failed_checks(observation: Observation, state: ControlState) -> dict[str, float]:
    """Node → when its newest check failed. Nodes that wait check again at different times, so what
    they have in common shows only after a while."""
    oldest = observation.now - CHECKED_AGAIN * recheck_s(observation)
    return {node: at for node, at in state.failed_checks.items() if at >= oldest}


def recheck_s(observation: Observation) -> float:
    """Time after which a node whose check failed is checked again; a long period means no rounds,
    and not that nobody checks it."""
    return min(observation.job.spec.failure_policy.recheck_seconds, RECHECK_S)


def with_failed_checks(
    observation: Observation, state: ControlState, nodes: Iterable[str]
) -> ControlState:
    """`state`, in which checks of `nodes` have failed now."""
    recent = recent_failed_checks(observation, state)
    failed = recent | dict.fromkeys(nodes, observation.now)
    return replace(state, failed_checks=failed)


def _most_of_job(nodes: Collection[str], membership: Membership | None) -> bool:
    return membership is not None and len(nodes) > 1 and 2 * len(nodes) > len(membership.members)


def blame_start(
    observation: Observation,
    result: RuleResult,
    node: str,
    code: int | None,
    last_lines: str,
    reason: str = "",
) -> RuleResult:
    """`result`, with what counts against `node` if an agent ended there before it took part, given
    its exit code, its last lines and the reason of Kubernetes."""
    state = result.state
    if not failed_check(observation.job, code, reason):
        return result.blame(BlamedNode(node=node, kind=FailureKind.FAILED_START, epoch=state.epoch))
    state = with_failed_checks(observation, state, [node])
    result = replace(result, state=state)
    if _most_of_job(state.failed_checks, state.membership):
        return result
    device, kind = checked_device(last_lines), FailureKind.FAILED_CHECK
    return result.blame(BlamedNode(node=node, kind=kind, epoch=state.epoch, device=device))


def _each(
    membership: Membership,
    members: Set[int | None],
    kind: FailureKind,
    devices: Mapping[int | None, str],
    excused: Set[str] = frozenset(),
) -> Iterator[BlamedNode]:
    """The nodes of `members` but those `excused`, with the device of each member; none if most of
    the job failed in this way."""
    if len(members) > 1 and 2 * len(members) > len(membership.members):
        return
    for member in membership.members:
        if member.index in members and member.node not in excused:
            device = devices.get(member.index, "")
            yield BlamedNode(node=member.node, kind=kind, epoch=membership.epoch, device=device)


def _of_ended(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    causes: Sequence[Cause],
    rules: Sequence[FailureRule],
) -> Iterator[BlamedNode]:
    """The node of the one member whose ranks or agent have ended, or hold all others up."""
    starved = {
        rank.rank
        for rank in ranks_in(observation.cluster, membership)
        if rank.exit_reason is EndReason.OOM_KILLED
    }
    crashes = [
        (cause, rule)
        for cause, rule in zip(causes, rules, strict=True)
        if _is_crash(cause) and starved.isdisjoint(cause.ranks)
    ]
    if len({cause.member for cause, _ in crashes}) != 1:
        return
    cause, rule = crashes[0]
    assert cause.member is not None
    if rule.on is On.EXIT_CODE:
        return
    essence = "" if state.stepped or not is_permanent(cause.exit_code) else cause.last_lines
    if essence and len(membership.members) == 1:
        return  # there is no other node to compare it with
    ran = state.resumed_epoch == membership.epoch
    ended = FailureKind.LOST_RANK if ran else FailureKind.FAILED_START
    yield BlamedNode(
        node=membership.member(cause.member).node,
        kind=FailureKind.HANG if cause.on is On.HANG else ended,
        epoch=membership.epoch,
        essence=essence_of(essence),
    )


def _is_crash(cause: Cause) -> bool:
    """Whether ranks or an agent have ended, or hang, and nobody has asked for it."""
    if cause.member is None or cause.voluntary or cause.counted or cause.ended_by_holdfast:
        return False
    if cause.on is On.EXIT_CODE:
        return cause.exit_code is not None and cause.exit_code not in RETRYABLE
    return cause.culprit or (cause.on is On.ANY and bool(cause.ranks))
