"""Conversion between messages and values for persisting; see `codec`."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from holdfast_core.errors import ProtocolError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import ExpertVersion
from holdfast_core.snapshots.stored import PersistOrder, RankFile, StoredUnit
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
    units = [
        values_pb2.StoredUnit(
            unit=unit.unit,
            version=values_pb2.Generation(epoch=unit.version.epoch, step=unit.version.step),
            held_in=values_pb2.Generation(epoch=unit.held_in.epoch, step=unit.held_in.step),
        )
        for unit in value.units
    ]
    return values_pb2.RankFile(**{**asdict(replace(value, units=())), "units": units})


def file_from_proto(message: values_pb2.RankFile) -> RankFile:
    """The description of a file in `message`; the daemon that commits the set checks it."""
    units = tuple(
        StoredUnit(
            unit=unit.unit,
            version=Generation(unit.version.epoch, unit.version.step),
            held_in=Generation(unit.held_in.epoch, unit.held_in.step),
        )
        for unit in message.units
    )
    plain = {k.name: getattr(message, k.name) for k in fields(RankFile) if k.name != "units"}
    return RankFile(**plain, units=units)


def expert_to_proto(value: ExpertVersion) -> values_pb2.ExpertVersion:
    """`value` as a message."""
    return values_pb2.ExpertVersion(
        unit=value.unit,
        generation=values_pb2.Generation(epoch=value.generation.epoch, step=value.generation.step),
        number=value.number,
        tokens=value.tokens,
    )


def expert_from_proto(message: values_pb2.ExpertVersion) -> ExpertVersion:
    """The version in `message`."""
    return ExpertVersion(
        unit=message.unit,
        generation=Generation(message.generation.epoch, message.generation.step),
        number=message.number,
        tokens=message.tokens,
    )
