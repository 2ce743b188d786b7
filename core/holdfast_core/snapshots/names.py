"""Names of tensors: one text for each tensor, which cannot be mistaken for another's.

A tensor of the training state is a parameter or a buffer of the model, the float32 master of a
parameter, a parameter that only an optimizer has, one expert's slice of any of these, or a state
that an optimizer keeps for one. `TensorName` has these parts as fields. Its text stands in layouts
and persisted files, and is a key wherever tensors are looked up:

    blocks.3.attn.qkv.weight                parameter
    blocks.3.attn.qkv.weight:exp_avg        optimizer state of it
    blocks.3.moe.experts.w1[5]:exp_avg      the same of expert 5 in a stack
    blocks.3.attn.qkv.weight/master         master that is an optimizer's own parameter
    optimizer/0/parameter3                  parameter that only optimizer 0 has
    blocks.3.attn.mask(buffer)              buffer

Users name modules as they like, with colons, brackets and slashes. Characters that could be
mistaken for one of the marks above are written as `%` and their code. No other module takes such a
text apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from holdfast_core.snapshots.layouts import TensorRole

_REMEMBERED = 1 << 16
"""Parsed names that are cached: a model's names are looked up again with every plan."""

_SPECIAL = re.compile("%(?=3A|25|28|2F|5B|uD[89A-F][0-9A-F]{2})|:|[\ud800-\udfff]")
"""What is written as a code anywhere: a colon, half of a surrogate pair, which JSON cannot hold,
and what would read as a code."""
_SPECIAL_IN_KEY = re.compile("%(?=3A|25|28|2F|5B|uD[89A-F][0-9A-F]{2})|[\ud800-\udfff]")
_CODE = re.compile(r"%(?:u(D[89A-F][0-9A-F]{2})|(3A|25|28|2F|5B))")
_LAST_MARK = re.compile(r"(.*)([(]buffer[)]|/master|\[[0-9]+\])", re.DOTALL)
_TEXT = re.compile(r"(.*?)([(]buffer[)])?(/master)?(?:\[([0-9]{1,9})\])?", re.DOTALL)
_ORPHAN = "optimizer/"
_WITHOUT_KEY = frozenset({TensorRole.COMPUTE, TensorRole.BUFFER})


class NameKind(StrEnum):
    """Kind of the tensor, or of what it belongs to."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    MASTER = "master"
    """float32 master of a parameter, which is a parameter of its optimizer."""
    ORPHAN = "orphan"
    """Parameter that only an optimizer has."""


@dataclass(frozen=True, slots=True)
class TensorName:
    """Identity of a tensor in the whole model, the same on every rank that holds it.

    `str()` gives its text: different names have different texts, and `parse` reads each back.
    """

    path: str
    """Path of the parameter or buffer in the model, as the program wrote it."""
    kind: NameKind = NameKind.PARAMETER
    expert: int | None = None
    """Number of the expert, counted over all ranks, whose slice of a stack it is."""
    key: str | None = None
    """Key of the state that an optimizer keeps for what the other fields name."""

    def __str__(self) -> str:
        text = self.path if self.kind is NameKind.ORPHAN else _escaped(self.path)
        if self.kind is NameKind.BUFFER:
            text += "(buffer)"
        elif self.kind is NameKind.MASTER:
            text += "/master"
        if self.expert is not None:
            text += f"[{self.expert}]"
        return text if self.key is None else f"{text}:{_SPECIAL_IN_KEY.sub(_code, self.key)}"

    @classmethod
    def orphan(cls, optimizer: int, number: int) -> TensorName:
        """Name of a parameter that only an optimizer has; both numbers count from 0."""
        return cls(f"{_ORPHAN}{optimizer}/parameter{number}", NameKind.ORPHAN)

    @classmethod
    @lru_cache(maxsize=_REMEMBERED)
    def parse(cls, text: str) -> TensorName:
        """Read a name back from its text. Any text is some name."""
        base, colon, key = text.partition(":")
        return cls._of(base, _CODE.sub(_character, key) if colon else None)

    @classmethod
    def of_entry(cls, text: str, role: TensorRole) -> TensorName:
        """Read the name of an entry of a layout. Versions before these names wrote colons of a path
        as they are: in a parameter or a buffer, which has no key, they are taken for that."""
        return cls._of(text, None) if role in _WITHOUT_KEY else cls.parse(text)

    @classmethod
    def _of(cls, base: str, key: str | None) -> TensorName:
        match = _TEXT.fullmatch(base)
        assert match is not None, "the pattern matches any text"
        path, buffer, master, expert = match.groups()
        kind = NameKind.BUFFER if buffer else NameKind.MASTER if master else NameKind.PARAMETER
        if path.startswith(_ORPHAN):
            kind = NameKind.ORPHAN
        if kind is not NameKind.ORPHAN:
            path = _CODE.sub(_character, path)
        return cls(path, kind, None if expert is None else int(expert), key)

    @property
    def base(self) -> TensorName:
        """Name of the tensor whose state this is; the name itself if it is not an optimizer's
        state."""
        return self if self.key is None else replace(self, key=None)

    @property
    def whole(self) -> TensorName:
        """The stack of which it is a slice; the name itself where it is none."""
        return self if self.expert is None else replace(self, expert=None)

    @property
    def is_state(self) -> bool:
        """Whether an optimizer keeps it for a parameter."""
        return self.key is not None

    def state(self, key: str) -> TensorName:
        """Name of the state `key` that an optimizer keeps for this tensor."""
        return replace(self, key=key)

    def slice(self, expert: int) -> TensorName:
        """Name of an expert's slice of this tensor."""
        return replace(self, expert=expert)


def _escaped(path: str) -> str:
    text = _SPECIAL.sub(_code, path)
    if text.startswith(_ORPHAN):
        text = text.replace("/", "%2F", 1)
    if mark := _LAST_MARK.fullmatch(text):
        text = f"{mark[1]}%{ord(mark[2][0]):02X}{mark[2][1:]}"
    return text


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"%{number:02X}" if number < 256 else f"%u{number:04X}"


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1] or found[2], 16))
