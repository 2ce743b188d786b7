"""Units: the smallest parts of the training state that can be captured separately.

A unit is one expert of one layer, one gate, one layer's non-expert part, the embeddings, the head,
or whatever else the model holds. Its name appears in messages and in layouts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, total_ordering

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TensorRole

KEYS_REMEMBERED = 1 << 14
"""Parsed keys that are cached: each snapshot names the same experts again."""

NUMBER_DIGITS_MAX = 9
"""Most digits of the number of a layer or an expert."""

_TEXT = re.compile(r"layer([0-9]{1,9})/(?:expert([0-9]{1,9})|gate|dense)|embedding|head|other")


class UnitKind(StrEnum):
    """Kind of a unit in the model."""

    EXPERT = "expert"
    GATE = "gate"
    DENSE = "dense"
    EMBEDDING = "embedding"
    HEAD = "head"
    OTHER = "other"


_IN_LAYER = (UnitKind.DENSE, UnitKind.GATE, UnitKind.EXPERT)
_ORDER = (UnitKind.EMBEDDING, *_IN_LAYER, UnitKind.HEAD, UnitKind.OTHER)


@total_ordering
@dataclass(frozen=True, slots=True)
class UnitKey:
    """The identity of a unit, the same on every rank that holds it.

    Order follows the model: the embeddings, the layers (each: dense part, gate, experts), the head,
    the rest.

    Raises:
        InvalidJobError: when the fields do not fit the kind.
    """

    layer: int | None
    """Index of the layer in the whole model; None outside the layers."""
    kind: UnitKind
    expert: int | None = None
    """Index of the expert among all experts of the layer, not among those of one rank."""

    def __post_init__(self) -> None:
        if (
            (self.layer is not None) != (self.kind in _IN_LAYER)
            or (self.expert is not None) != (self.kind is UnitKind.EXPERT)
            or (self.layer or 0) < 0
            or (self.expert or 0) < 0
        ):
            raise InvalidJobError(
                f"unit of kind {self.kind.value!r} with layer={self.layer} and "
                f"expert={self.expert}: give a layer for experts, gates and dense parts only, and "
                f"an expert for experts only; both count from 0"
            )

    def __str__(self) -> str:
        if self.layer is None:
            return self.kind.value
        return f"layer{self.layer}/{self.kind.value}{'' if self.expert is None else self.expert}"

    @classmethod
    @lru_cache(maxsize=KEYS_REMEMBERED)
    def parse(cls, text: str) -> UnitKey:
        """The key that `str()` wrote: `layer3/expert5`, `layer3/gate`, `embedding` and so on.

        Raises:
            InvalidJobError: when `text` is not one.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidJobError(
                f"unit {text!r} cannot be read; write it like 'layer3/expert5', 'layer3/gate', "
                f"'layer3/dense', 'embedding', 'head' or 'other'"
            )
        layer, expert = (None if number is None else int(number) for number in match.groups())
        if layer is None:
            return cls(None, UnitKind(text))
        if expert is None:
            return cls(layer, UnitKind(text.partition("/")[2]))
        return cls(layer, UnitKind.EXPERT, expert)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, UnitKey):
            return NotImplemented
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, int, int]:
        place = _ORDER.index(self.kind)
        group = 1 if self.kind in _IN_LAYER else place
        return (group, self.layer or 0, place, self.expert or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSize:
    """One tensor of a unit as a rank holds it, as far as planning needs it."""

    unit: UnitKey
    tensor: str
    """Name that is unique in the whole model; see `snapshots.layouts.Entry.tensor`."""
    role: TensorRole
    dtype: str
    """Name of the dtype without torch's prefix: `bfloat16`, `float32`."""
    shape: tuple[int, ...]
    """Shape of the whole local tensor (the expert's slice for stacked expert weights)."""
    nbytes: int
    """Bytes that the rank holds: all of the tensor, or a range of a private one."""
    start: int = 0
    """First byte of that range within the tensor's contiguous bytes."""
    private: bool = False
    """True when no other rank holds these bytes (a local shard of FSDP2 or of a sharded
    optimizer): the rank captures all of it, whatever its replicas do."""
    trained: bool = field(default=True, compare=False)
    """False for a parameter that no optimizer of this rank holds: its windows have no gradient of
    it."""

    @property
    def is_expert(self) -> bool:
        """Whether the tensor is replicated over the expert replicas only."""
        return self.unit.kind is UnitKind.EXPERT
