"""Conversion between messages and values of reports about expert plans; see `codec`."""

from __future__ import annotations

from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.errors import InvalidJobError, ProtocolError
from holdfast_protos import values_pb2


def plan_to_proto(value: PlanReport) -> values_pb2.ExpertPlanReport:
    """`value` as a message."""
    return values_pb2.ExpertPlanReport(
        epoch=value.epoch,
        step=value.step,
        cause=value.cause,
        ranks=value.ranks,
        rank_seats=value.rank_seats,
        layers=value.layers,
        experts=value.experts,
        least_nodes=value.least_nodes,
        busiest_node=value.busiest_node,
    )


def plan_from_proto(message: values_pb2.ExpertPlanReport) -> PlanReport:
    """The report in `message`.

    Raises:
        ProtocolError: when it has no known cause, or numbers of no plan.
    """
    try:
        return PlanReport(
            epoch=message.epoch,
            step=message.step,
            cause=PlanCause(message.cause),
            ranks=message.ranks,
            rank_seats=message.rank_seats,
            layers=message.layers,
            experts=message.experts,
            least_nodes=message.least_nodes,
            busiest_node=message.busiest_node,
        )
    except (InvalidJobError, ValueError) as error:
        raise ProtocolError(f"the report of an expert plan cannot be read: {error}") from error
