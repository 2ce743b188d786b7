"""Conversion between messages and values of reports about restores and loads from storage."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.errors import ProtocolError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.stored import FailedLoad
from holdfast_core.states import RestorePhase, RestoreProgress
from holdfast_protos import peer_pb2, trainer_pb2, values_pb2


def failed_loads_to_proto(values: Iterable[FailedLoad]) -> list[peer_pb2.FailedLoad]:
    """`values` as messages."""
    return [
        peer_pb2.FailedLoad(
            rank=value.rank,
            generation=values_pb2.Generation(
                epoch=value.generation.epoch, step=value.generation.step
            ),
            reason=value.reason,
        )
        for value in values
    ]


def failed_loads_from_proto(messages: Iterable[peer_pb2.FailedLoad]) -> tuple[FailedLoad, ...]:
    """The failures in `messages`.

    Raises:
        ProtocolError: when one names no generation.
    """
    failures = []
    for message in messages:
        if not message.HasField("generation"):
            raise ProtocolError(f"a failed load of rank {message.rank} names no generation")
        generation = Generation(message.generation.epoch, message.generation.step)
        failures.append(FailedLoad(rank=message.rank, generation=generation, reason=message.reason))
    return tuple(failures)


def progress_from_proto(message: trainer_pb2.RestoreProgress) -> RestoreProgress:
    """The progress of a restore in `message`, which a daemon of any version has sent."""
    return RestoreProgress(
        phase=RestorePhase.of(message.phase),
        done=message.done,
        total=message.total,
        detail=message.detail,
    )
