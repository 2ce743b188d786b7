"""Conversion between messages and values of reports about lost tokens; see `codec`."""

from __future__ import annotations

from holdfast_core.errors import InvalidJobError, ProtocolError
from holdfast_core.experts.loss_reports import RECOVERIES_KEPT, LossReport, RecoveryLoss
from holdfast_protos import values_pb2

NUMBER_MAX = 2**48
"""Upper limit of a reported number, above any real count; sums over the ranks of a node still fit
into a message."""

LAYERS_MAX = 4096


def loss_to_proto(value: LossReport) -> values_pb2.LossReport:
    """`value` as a message."""
    return values_pb2.LossReport(
        ranks=value.ranks,
        experts_per_layer=value.k,
        experts_max=value.experts_max,
        limit=value.limit,
        layers=value.layers,
        at_risk=value.at_risk,
        routed=value.routed,
        lost=value.lost,
        recoveries=[_recovery_to_proto(each) for each in value.recoveries],
    )


def loss_from_proto(message: values_pb2.LossReport) -> LossReport:
    """The report in `message`, with no more recoveries than are kept.

    Raises:
        ProtocolError: when its numbers do not fit together.
    """
    try:
        return LossReport(
            ranks=message.ranks,
            k=message.experts_per_layer,
            experts_max=message.experts_max,
            limit=message.limit,
            layers=tuple(message.layers),
            at_risk=tuple(message.at_risk),
            routed=tuple(message.routed),
            lost=tuple(message.lost),
            recoveries=tuple(
                _recovery_from_proto(each) for each in message.recoveries[-RECOVERIES_KEPT:]
            ),
        )
    except InvalidJobError as error:
        raise ProtocolError(str(error)) from error


def rank_loss_from_proto(message: values_pb2.LossReport) -> LossReport:
    """The report of one rank in `message`.

    Raises:
        ProtocolError: when its numbers do not fit together, or are so large that their sums would
            not fit into the heartbeat, which also carries other jobs.
    """
    largest = max((*message.at_risk, *message.routed, *message.lost), default=0)
    if message.ranks != 1 or len(message.layers) > LAYERS_MAX or largest > NUMBER_MAX:
        raise ProtocolError(
            f"a report of lost tokens of {message.ranks} ranks has {len(message.layers)} layers "
            f"and numbers up to {largest}; a trainer may report 1 rank, {LAYERS_MAX} layers and "
            f"numbers up to {NUMBER_MAX}"
        )
    return loss_from_proto(message)


def _recovery_to_proto(value: RecoveryLoss) -> values_pb2.RecoveryLoss:
    return values_pb2.RecoveryLoss(
        epoch=value.epoch,
        step=value.step,
        lost_tokens=value.lost_tokens,
        plt=value.plt,
        mlt=value.mlt,
        k_before=value.k_before,
        k_after=value.k_after,
        total_tokens=value.total_tokens,
        total_plt=value.total_plt,
        total_mlt=value.total_mlt,
    )


def _recovery_from_proto(message: values_pb2.RecoveryLoss) -> RecoveryLoss:
    return RecoveryLoss(
        epoch=message.epoch,
        step=message.step,
        lost_tokens=message.lost_tokens,
        plt=message.plt,
        mlt=message.mlt,
        k_before=message.k_before,
        k_after=message.k_after,
        total_tokens=message.total_tokens,
        total_plt=message.total_plt,
        total_mlt=message.total_mlt,
    )
