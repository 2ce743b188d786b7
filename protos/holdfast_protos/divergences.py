"""Encode and decode divergences of replicas, bounded: trainers state them."""

from __future__ import annotations

from holdfast_core.corruption import Compared, Divergence, Proof, bounded_divergence
from holdfast_protos import values_pb2


def divergence_to_proto(value: Divergence) -> values_pb2.Divergence:
    """Encode a divergence."""
    return values_pb2.Divergence(
        step=value.step,
        equal_step=value.equal_step,
        unit=value.unit,
        units=value.units,
        ranks=value.ranks,
        wrong=value.wrong,
        proof=value.proof,
        compared_all=value.compared_all,
        history=[
            values_pb2.ComparedStep(step=each.step, dense=each.dense, experts=each.experts)
            for each in value.history
        ],
    )


def divergence_from_proto(message: values_pb2.Divergence) -> Divergence | None:
    """Decode a divergence; None if it cannot be what a comparison showed."""
    if message.proof not in frozenset(Proof):
        return None
    return bounded_divergence(
        Divergence(
            step=message.step,
            equal_step=message.equal_step if message.HasField("equal_step") else None,
            unit=message.unit,
            units=message.units,
            ranks=tuple(message.ranks),
            wrong=tuple(message.wrong),
            proof=Proof(message.proof),
            compared_all=message.compared_all,
            history=tuple(
                Compared(step=each.step, dense=each.dense, experts=each.experts)
                for each in message.history
            ),
        )
    )
