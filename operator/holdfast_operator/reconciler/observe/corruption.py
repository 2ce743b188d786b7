"""Look up what ranks have concluded about replicas that differ, with members and nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as with_fields

from holdfast_core.corruption import Divergence, Proof
from holdfast_core.job.parsing import MoETrainingJob, OnCorruption
from holdfast_core.node_failures import WEIGHTS, FailureKind, Rating
from holdfast_core.quantities import format_count
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.last_failure import LastCorruption
from holdfast_operator.reconciler.observe.lookups import just_saved, ranks_in
from holdfast_operator.reconciler.observe.text import listed, ranks_in_words
from holdfast_operator.reconciler.observe.views import ClusterView, ControlState

PAUSE_S = 86400.0
"""Least time from one return to a generation because replicas differed to the next. Replicas of
training that is not deterministic differ again and again, and no node is the cause."""

CORRUPT = Rating(WEIGHTS[FailureKind.CORRUPTION], "wrong bytes in this job")
"""Rating of a node in a job that has had wrong bytes there."""


def reported(observed: ClusterView, membership: Membership) -> Divergence | None:
    """What most ranks of the epoch conclude, in world ranks; None where they conclude nothing."""
    reports = {
        rank.rank: rank.divergence
        for rank in ranks_in(observed, membership)
        if rank.divergence is not None and _is_of_world(rank.divergence, membership)
    }
    found, count = next(iter(Counter(reports.values()).most_common(1)), (None, 0))
    if found is None or 2 * count <= membership.world_size:
        return None
    # The digests of a rank that has not reported yet would be lost with this epoch.
    needed = found.ranks if found.proof is Proof.NONE else ()
    known = all(reports.get(membership.world.rank_of(rank)) == found for rank in needed)
    return found if known else None


def _is_of_world(divergence: Divergence, membership: Membership) -> bool:
    return max((*divergence.ranks, *divergence.wrong)) < membership.world_size


def last_corruption(membership: Membership, found: Divergence) -> LastCorruption:
    """What there is to remember of `found`."""
    wrong = [membership.world.rank_of(rank) for rank in found.wrong]
    ranks = wrong or [membership.world.rank_of(rank) for rank in found.ranks]
    members = {membership.member_of(rank) for rank in wrong}
    member = min(members) if len(members) == 1 else None
    return LastCorruption(
        epoch=membership.epoch,
        step=found.step,
        proof=found.proof,
        equal_step=found.equal_step,
        unit=found.unit,
        ranks=tuple(sorted(ranks)),
        member=member,
        node="" if member is None else membership.member(member).node,
        compared_all=found.compared_all,
        text=_in_words(membership, found, ranks, known=bool(wrong)),
    )


def _in_words(
    membership: Membership, found: Divergence, ranks: Sequence[int], *, known: bool
) -> str:
    """`rank 2 of member 1 on n1 has wrong bytes of layer0/gate since step 41: …`."""
    unit = found.unit
    if found.units > 1:
        unit += f" and {format_count(found.units - 1, 'more unit')}"
    who = listed(_place(membership, rank) for rank in sorted(ranks))
    last, steps = "they are not known to have been equal in this epoch", ""
    if found.equal_step is not None:
        steps = format_count(found.step - found.equal_step, "step")
        last = f"they were equal after step {found.equal_step}, {steps} before"
    subject = who if known else f"one of {who}"
    if found.proof.is_of_executions:
        last = "no check in this epoch found nothing before"
        if found.equal_step is not None:
            last = (
                f"the last check that found nothing was in step {found.equal_step}, {steps} before"
            )
    if found.proof is Proof.ELSEWHERE:
        same = "for the same sample of work, one operation or an optimizer's step of one parameter"
        if known:
            return (
                f"{who} computes wrongly: in step {found.step} it got other bytes than two ranks "
                f"of the same kind {same}, and the same each time; {last}"
            )
        return (
            f"{subject} computes wrongly: in step {found.step} they got different bytes {same}, "
            f"and the same each time, and no third rank of their kind could decide; {last}"
        )
    if found.proof is Proof.REEXECUTED:
        what = (
            f"gradients of {unit} in step {found.step}: all ranks computed them three times, two "
            f"of which were equal on every rank, and in the third the difference began there"
        )
        if known:
            return f"{who} computed wrong {what}; {last}"
        return (
            f"{who} had wrong {what}, or in a sum that other ranks had added up, or it was "
            f"received in a way that is not recorded; {last}"
        )
    if found.proof is Proof.CHANGED:
        return (
            f"{subject} has wrong bytes of {unit}: they changed in step {found.step} before its "
            f"optimizer, which they had not done in steps that were checked earlier; wrong "
            f"gradients have reached all ranks; {last}"
        )
    if found.proof is Proof.UNREPEATABLE:
        return (
            f"no step is executed again in this epoch: training is not deterministic, or the "
            f"script changes parameters before its optimizer. When step {found.step} was executed "
            f"again, {who} differed in {unit}"
        )
    verb = "have" if known and len(ranks) > 1 else "has"
    why = f"{_WHY[found.proof]}; {last}"
    return f"{subject} {verb} wrong bytes of {unit} after step {found.step}: {why}"


_WHY = {
    Proof.MAJORITY: "most of its replicas have others, which are the same",
    Proof.REPEATED: "the steps were executed twice, and these bytes were not the same both times, "
    "as those of its replicas were",
    Proof.NONE: "as many of its replicas have these as have others, so this alone does not show "
    "which are wrong",
    Proof.UNDECIDED: "the steps were repeated, which did not show which are wrong: training is "
    "not deterministic or not the same on all ranks, a device is wrong in the same way each time, "
    "wrong values had reached all replicas before they were compared, or a rank did not compare "
    "the step both times",
}


def _place(membership: Membership, rank: int) -> str:
    member = membership.member(membership.member_of(rank))
    return f"{ranks_in_words([rank])} of member {member.index} on {member.node}"


def to_undo(
    job: MoETrainingJob,
    membership: Membership,
    observed: ClusterView,
    state: ControlState,
    now: float,
) -> LastCorruption | None:
    """The corruption because of which all ranks should go back to the newest generation now, and
    its member, if that is known, to another node.

    It counts only while ranks report it, and nothing was saved after it: replicas that are equal
    again have nothing to undo. The ranks go back once, because wrong values have reached other
    ranks with the gradients. Once more they do if the steps that they repeat show which of two is
    wrong. Nothing else follows for a day, so that training whose replicas always drift apart goes
    on, and loses no more nodes."""
    last = state.corruption
    if job.spec.failure_policy.on_corruption is not OnCorruption.REPLACE:
        return None
    if last is None or not last.compared_all or not _is_reported(last, membership, observed):
        return None
    undone_at = state.corruption_undone_at
    # What a control loop decided but died before it could publish is begun again, not a second one.
    is_begun = state.corruption_undone_epoch == membership.epoch
    is_paused = undone_at is not None and not is_begun and now - undone_at < PAUSE_S
    if last.proof is Proof.REPEATED:
        may_move = state.repeats_corruption or not is_paused
        return last if may_move and last.member is not None else None
    # What was executed again in place left nothing wrong behind. A device that is wrong each time
    # may have been so when the newest generation was captured.
    nothing = last.proof is Proof.UNDECIDED or last.proof.may_name
    if nothing or is_paused or is_over(last, state):
        return None
    return last


def may_leave(job: MoETrainingJob, state: ControlState, now: float) -> bool:
    """Whether a member whose rank computed wrongly may leave its node: one does in a day. This
    keeps no ranks from going back if wrong bytes are found that stay."""
    times = (state.corruption_undone_at, state.corruption_left_at)
    replaces = job.spec.failure_policy.on_corruption is OnCorruption.REPLACE
    return replaces and all(at is None or now - at >= PAUSE_S for at in times)


def members_to_move(
    job: MoETrainingJob, membership: Membership, state: ControlState, now: float
) -> list[int]:
    """The members that are still where a rank had wrong bytes, because they could not move when all
    ranks went back: their parity groups were incomplete, or there was no spare. They move right
    after a generation was protected."""
    if job.spec.failure_policy.on_corruption is not OnCorruption.REPLACE:
        return []
    if not state.corrupt_nodes or not just_saved(state, membership, now):
        return []
    return [each.index for each in membership.members if each.node in state.corrupt_nodes]


def with_corrupt_nodes(observed: ClusterView, state: ControlState) -> ClusterView:
    """`observed`, in which the nodes count as ones to avoid where this job has had wrong bytes. The
    record of all nodes excuses them where several of one job have had some."""
    nodes = observed.nodes
    rated = {name: nodes[name] for name in state.corrupt_nodes if name in nodes}
    if not rated:
        return observed
    for name, node in rated.items():
        if node.rating.score < CORRUPT.score:
            rated[name] = with_fields(node, rating=CORRUPT)
    return replace(observed, nodes={**nodes, **rated})


def is_over(last: LastCorruption, state: ControlState) -> bool:
    """Whether replicas were equal again later in the epoch: else nothing would have been saved."""
    saved = state.saved
    return saved is not None and saved.epoch == last.epoch and saved.step >= last.step


def _is_reported(last: LastCorruption, membership: Membership, observed: ClusterView) -> bool:
    """Whether a rank of this epoch reports `last` now; most of them did when it was noted."""
    return last.epoch == membership.epoch and any(
        rank.divergence is not None
        and (rank.divergence.step, rank.divergence.proof) == (last.step, last.proof)
        for rank in ranks_in(observed, membership)
    )
