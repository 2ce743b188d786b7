"""Notes replicas that have diverged, which rank is wrong, and the node that it counts against.

The ranks compare their replicas and conclude the same from the same digests (decision 0130); what
most of them report counts. `failurePolicy.onCorruption` says what follows, which `evidence` finds.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.corruption import Proof
from holdfast_core.job.parsing import OnCorruption
from holdfast_core.node_failures import FailureKind
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.corruption import (
    is_over,
    last_corruption,
    may_leave,
    reported,
    to_undo,
)
from holdfast_operator.reconciler.observe.views import BlamedNode, ControlState, EventReason
from holdfast_operator.reconciler.rules import Observation, RuleResult


def note_corruption(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Remember a divergence of replicas that the ranks of this epoch report, once; emit an event,
    and blame the node of the member that is wrong."""
    if state.steps_not_repeated_epoch != membership.epoch:
        state = replace(state, steps_not_repeated="", steps_not_repeated_epoch=0)
    found, before = reported(observation.cluster, membership), state.corruption
    if found is None:
        return RuleResult(state)
    last = last_corruption(membership, found)
    if found.proof is Proof.UNREPEATABLE:
        if state.steps_not_repeated == last.text:
            return RuleResult(state)
        epoch = membership.epoch
        state = replace(state, steps_not_repeated=last.text, steps_not_repeated_epoch=epoch)
        return RuleResult(state).post(EventReason.STEPS_NOT_REPEATED, last.text, warning=True)
    # Ranks report what they found in a step again where replicas that differed later are equal.
    is_known = before is not None and (
        (last.epoch, last.step, last.proof) == (before.epoch, before.step, before.proof)
        or (last.proof.is_of_executions and last.epoch == before.epoch and last.step < before.step)
    )
    if is_known:
        return RuleResult(state)
    is_new = found.proof not in (Proof.REPEATED, Proof.UNDECIDED)
    state = replace(
        state,
        corruption=last,
        corruptions=state.corruptions + is_new,
        repeats_corruption=state.repeats_corruption and not is_new,
    )
    leaves = found.proof.may_name and bool(last.node)
    if leaves and may_leave(observation.job, state, observation.now):
        nodes = state.corrupt_nodes | {last.node}
        state = replace(state, corrupt_nodes=nodes, corruption_left_at=observation.now)
    text = f"{last.text}; {_what_follows(observation, state, membership)}"
    result = RuleResult(state).post(EventReason.CORRUPTION, text, warning=True)
    if last.member is None:
        return result
    # Replicas that differ on one node after the other differ because of the training.
    essence = "replicas differ"
    blamed = BlamedNode(
        node=last.node, kind=FailureKind.CORRUPTION, epoch=membership.epoch, essence=essence
    )
    return result.blame(blamed)


def _what_follows(observation: Observation, state: ControlState, membership: Membership) -> str:
    """What Holdfast does about the newest divergence, in words."""
    last = state.corruption
    assert last is not None
    cluster, now = observation.cluster, observation.now
    if to_undo(observation.job, membership, cluster, state, now) is not None:
        if last.proof is Proof.NONE:
            return "all ranks go back to the newest generation and repeat the steps, which may show"
        if last.proof is Proof.REPEATED:
            return "all ranks go back to the newest generation"
        return "all ranks go back to the newest generation, which is from before that"
    if last.proof.may_name:
        goes_on = "training goes on with what two executions agree on"
        if last.proof is Proof.ELSEWHERE:
            goes_on = "training goes on, and keeps what was computed wrongly since then"
        if last.node in state.corrupt_nodes:
            return f"{goes_on}, and the member moves once a generation is protected"
        return goes_on
    if last.proof in (Proof.REPEATED, Proof.UNDECIDED):
        return "nothing else follows"
    if is_over(last, state):
        return "the replicas are equal again, so training goes on"
    if observation.job.spec.failure_policy.on_corruption is OnCorruption.REPORT:
        return "failurePolicy.onCorruption is Report, so training goes on and nothing is saved"
    if not last.compared_all:
        return (
            "training goes on and nothing is saved: the newest generation may be wrong, too, "
            "because the script does not compare every save"
        )
    return (
        "training goes on and nothing is saved: all ranks went back for that within the last day, "
        "and do so again after it if these replicas still differ then"
    )
