"""Uneven copies of experts: the plan that trainers report, as a condition and events. Pure.

All ranks of a world have the same plan, so the newest report counts, whichever daemon sends it.
Trainers, not this module, decide where experts lie.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.views import (
    Condition,
    ConditionType,
    ControlState,
    EventReason,
)
from holdfast_operator.reconciler.rules import Observation, RuleResult


def note_plan(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Remember the newest plan, and emit an event when it is another one."""
    reports = [
        view.plan
        for view in observation.cluster.views(membership)
        if view is not None and view.plan is not None
    ]
    found = max(reports, key=_age, default=None)
    known = state.plan
    if found is None or (known is not None and _age(found) <= _age(known)):
        return RuleResult(state)
    result = RuleResult(replace(state, plan=found))
    warning = found.least_nodes < 2 and (known is None or known.least_nodes > 1)
    return result.post(EventReason.EXPERTS_SEATED, plan_text(found), warning=warning)


def plan_condition(job: MoETrainingJob, state: ControlState) -> Condition | None:
    """Whether every expert outlives the loss of any node; None for a job without uneven copies."""
    kind, plan = ConditionType.EXPERTS_REPLICATED, state.plan
    if plan is None:
        if job.spec.elastic is None:
            return None
        message = "no rank has reported an expert plan yet; a model gets one with holdfast.moe"
        return Condition(type=kind, status=None, reason="NotReported", message=message)
    if plan.least_nodes > 1:
        return Condition(type=kind, status=True, reason="Replicated", message=plan_text(plan))
    message = (
        f"{plan_text(plan)}. The loss of that node leads back to the newest snapshot; more seats "
        f"(spec.elastic.seatsPerRank) or more nodes give every expert a second copy"
    )
    return Condition(type=kind, status=False, reason="SingleCopy", message=message)


def plan_text(plan: PlanReport) -> str:
    """The plan in one line."""
    least = (
        f"every expert is on at least {plan.least_nodes} nodes"
        if plan.least_nodes > 1
        else "some expert is on one node only"
    )
    return (
        f"{least}: {plan.layers} layers of {plan.experts} experts in {plan.rank_seats} seats of "
        f"{plan.ranks} ranks, the busiest node with {plan.busiest_node:.3f} × the mean; since "
        f"epoch {plan.epoch}, step {plan.step}, when {plan.cause.text}"
    )


def _age(plan: PlanReport) -> tuple[int, int]:
    return plan.epoch, plan.step
