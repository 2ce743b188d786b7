"""What daemons have reported of the newest inspection of a job that hangs. Pure; asks for none."""

from __future__ import annotations

from holdfast_core.inspections import InspectedProcess
from holdfast_core.job.hang_story import RANKS_MAX, hung_rank
from holdfast_core.job.status import HangStatus
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.culprits import Diagnosis, diagnose
from holdfast_operator.reconciler.observe.views import (
    AskedInspection,
    ClusterView,
    ControlState,
    InspectionView,
)


def asked_in(state: ControlState, membership: Membership) -> AskedInspection | None:
    """The inspection of the epoch that this control loop has asked for, or taken over."""
    asked = state.inspection
    return asked if asked is not None and asked.epoch == membership.epoch else None


def reported(observed: ClusterView, membership: Membership) -> dict[int, InspectionView]:
    """The newest inspection in the epoch, by members whose daemons have been asked for one."""
    pairs = zip(membership.members, observed.views(membership), strict=True)
    return {
        member.index: view.inspection
        for member, view in pairs
        if view is not None and view.inspection is not None
    }


def members_answered(
    observed: ClusterView, membership: Membership, asked: AskedInspection
) -> dict[int, tuple[InspectedProcess, ...]]:
    """The processes of each member whose launcher has answered."""
    return {
        index: made.processes
        for index, made in reported(observed, membership).items()
        if made.number >= asked.number and made.processes is not None
    }


def diagnosis_of(
    observed: ClusterView, membership: Membership, state: ControlState
) -> Diagnosis | None:
    """What the answers so far show; None if no inspection was asked for in this epoch."""
    asked = asked_in(state, membership)
    if asked is None:
        return None
    answers = _answers(observed, membership, asked)
    ranks = [r for member in membership.members for r in membership.ranks_of(member.index)]
    return diagnose(ranks, answers)


def hang_status(
    observed: ClusterView, membership: Membership, asked: AskedInspection, diagnosis: Diagnosis
) -> HangStatus:
    """The hang, with the innermost calls of some of the ranks that show why, as the job's status
    has it; without the time."""
    answers = _answers(observed, membership, asked)
    nodes = {
        rank: member for member in membership.members for rank in membership.ranks_of(member.index)
    }
    shown = [each for rank in diagnosis.examples if (each := answers.get(rank)) is not None]
    return HangStatus(
        text=diagnosis.text,
        kind=diagnosis.kind,
        epoch=membership.epoch,
        ranks=tuple(
            hung_rank(each, nodes[each.rank].index, nodes[each.rank].node)
            for each in shown[:RANKS_MAX]
        ),
    )


def _answers(
    observed: ClusterView, membership: Membership, asked: AskedInspection
) -> dict[int, InspectedProcess | None]:
    """The process of each rank whose launcher has answered; None for a rank that has none."""
    answers: dict[int, InspectedProcess | None] = {}
    for index, processes in members_answered(observed, membership, asked).items():
        by_rank = {process.rank: process for process in processes}
        answers |= {rank: by_rank.get(rank) for rank in membership.ranks_of(index)}
    return answers
