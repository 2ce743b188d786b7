"""Between messages and values, of what daemons tell each other about persisting."""

from __future__ import annotations

from dataclasses import asdict, fields

from holdfast_core.errors import ProtocolError
from holdfast_core.persisted import RankFile
from holdfast_core.values import Generation, PersistOrder
from holdfast_protos import values_pb2


def optional_order_to_proto(value: PersistOrder | None) -> values_pb2.PersistOrder | None:
    """`value` for a message's constructor, where None leaves the field absent."""
    if value is None:
        return None
    generation = values_pb2.Generation(epoch=value.generation.epoch, step=value.generation.step)
    return values_pb2.PersistOrder(number=value.number, ended=value.ended, generation=generation)


def order_from_proto(message: values_pb2.PersistOrder) -> PersistOrder:
    """The order in `message`; test `HasField` first where it may be absent.

    Raises:
        ProtocolError: it names no generation.
    """
    if not message.HasField("generation"):
        raise ProtocolError(f"order {message.number} to persist names no generation")
    generation = Generation(message.generation.epoch, message.generation.step)
    return PersistOrder(number=message.number, ended=message.ended, generation=generation)


def file_to_proto(value: RankFile) -> values_pb2.RankFile:
    """`value` as a message."""
    return values_pb2.RankFile(**asdict(value))


def file_from_proto(message: values_pb2.RankFile) -> RankFile:
    """The description of a file in `message`; whoever commits a set checks that it is true."""
    return RankFile(**{known.name: getattr(message, known.name) for known in fields(RankFile)})
