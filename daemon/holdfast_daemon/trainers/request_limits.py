"""Bounds the texts and numbers that a trainer can make the daemon keep or repeat.

They go into every heartbeat and report, beside the texts and numbers of other jobs: a text that is
too long, or a sum that does not fit its field, would keep the others from arriving.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from holdfast_core.errors import InvalidJobError, ProtocolError
from holdfast_core.snapshots.manifests import ExpertVersion
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_protos import persisting, values_pb2

FAILURE_CHARACTERS_MAX = 2000
"""Characters kept of a trainer's account of why a save failed; the rest is cut off."""

COUNT_MAX = 2**48
"""Largest count taken from a trainer: the sum over the ranks of a node still fits 64 bits."""

ADDRESS_CHARACTERS_MAX = 300
"""Characters of `host:port`: a host's name has at most 253."""

KEY_CHARACTERS_MAX = 64
"""Characters of the key of a training world's store."""

NAN_UNITS_MAX = 65_536
"""Units of a snapshot that held a NaN: its manifest names them."""

EXPERTS_MAX = 65_536
"""Experts of a job: a manifest has the version of each."""

UNIT_CHARACTERS_MAX = 64
"""Characters of a unit's name, such as `layer3/expert5`."""


def shortened(failure: str) -> str:
    """The beginning of a trainer's account of why a save failed."""
    return failure[:FAILURE_CHARACTERS_MAX]


def counted(count: int) -> int:
    """A trainer's count, at most COUNT_MAX."""
    return min(count, COUNT_MAX)


def duration_s(seconds: float) -> float:
    """A trainer's duration; 0 for a number that is no duration, since gauges show the longest."""
    return seconds if 0 <= seconds < inf else 0.0


def check_address(address: str) -> None:
    """Refuse a text that cannot be the address of a training world's store.

    Raises:
        ProtocolError: the address is too long, or not printable.
    """
    if len(address) > ADDRESS_CHARACTERS_MAX or not address.isprintable():
        raise ProtocolError(
            f"{address[:80]!r}, of {len(address)} characters, is not an address host:port"
        )


def check_store_key(key: str) -> None:
    """Refuse a text that cannot be the key of a training world's store.

    Raises:
        ProtocolError: it is too long, or not of letters and digits.
    """
    if len(key) > KEY_CHARACTERS_MAX or not (key.isascii() and (key.isalnum() or not key)):
        raise ProtocolError(
            f"a text of {len(key)} characters is not the key of a training world's store: use up "
            f"to {KEY_CHARACTERS_MAX} letters and digits"
        )


def check_units(names: Collection[str]) -> tuple[str, ...]:
    """The names of units, unchanged.

    Raises:
        ProtocolError: there are more of them, or longer ones, than a model has.
    """
    longest = max(map(len, names), default=0)
    if len(names) > NAN_UNITS_MAX or longest > UNIT_CHARACTERS_MAX:
        raise ProtocolError(
            f"a commit names {len(names)} units with a NaN, whose longest name has {longest} "
            f"characters; name at most {NAN_UNITS_MAX} units, each with at most "
            f"{UNIT_CHARACTERS_MAX} characters"
        )
    return tuple(names)


def check_experts(versions: Collection[values_pb2.ExpertVersion]) -> tuple[ExpertVersion, ...]:
    """The versions of experts, decoded.

    Raises:
        ProtocolError: there are more of them than a model has, or a unit is no expert, or is named
            twice.
    """
    if len(versions) > EXPERTS_MAX:
        raise ProtocolError(f"a commit names {len(versions)} experts; name at most {EXPERTS_MAX}")
    experts = tuple(map(persisting.expert_from_proto, versions))
    try:
        kinds = {UnitKey.parse(version.unit).kind for version in experts}
    except InvalidJobError as error:
        raise ProtocolError(str(error)) from error
    if kinds - {UnitKind.EXPERT} or len({version.unit for version in experts}) != len(experts):
        raise ProtocolError("a commit names a unit that is not an expert, or one expert twice")
    return experts
