"""Ways to damage bytes that were valid: what a fuzzer does to a seed, as data that can be shrunk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"255",
    b"2147483648",
    b"4294967295",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"1e999",
    b"NaN",
    b"Infinity",
    b"9" * 30,
    b"9" * 5000,
    b"0.1",
)
"""Put in the place of a number in text."""
WORDS = (
    b"../../../etc/passwd",
    b"null",
    b"[" * 300,
    b'{"a":' * 2000,
    b"[" * 20_000,
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    "\u202e\u0660\uff11\u200b".encode(),
    b"\\ud800",
    b"%2e%2e%2f",
    b"\n",
    b'"',
    b"true",
    b"&a [*a, *a]",
    b"!!python/object/apply:os.system ['true']",
    b"2001-13-41",
    b"0x" + b"f" * 4000,
    b"<<: *a",
    b"A" * 5000,
)
"""Put anywhere."""
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")
_STRING = re.compile(rb'"[^"\n]{0,200}"')


class Kind(Enum):
    """What an edit does at its place."""

    FLIP = 0
    CUT = 1
    REMOVE = 2
    REPEAT = 3
    SPLICE = 4
    LENGTH = 5
    NUMBER = 6
    WORD = 7
    STRING = 8
    BYTES = 9


KINDS = tuple(Kind)
BYTES_MAX = 1 << 18
"""Longer results are cut: what is looked for is not slowness by length alone."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: `at` is a place, in any unit, `argument` chooses what comes there."""

    kind: Kind
    at: int
    argument: int


def mutated(seeds: Sequence[bytes], chosen: int, edits: Sequence[Edit]) -> bytes:
    """The seed number `chosen` after all `edits`."""
    data = seeds[chosen % len(seeds)]
    for edit in edits:
        other = seeds[edit.argument % len(seeds)]
        data = _apply(data, other, edit)[:BYTES_MAX]
    return data


def _apply(data: bytes, other: bytes, edit: Edit) -> bytes:
    at = edit.at % (len(data) + 1)
    argument = edit.argument
    match edit.kind:
        case Kind.FLIP:
            if at == len(data):
                return data
            return data[:at] + bytes([data[at] ^ (1 << argument % 8)]) + data[at + 1 :]
        case Kind.CUT:
            return data[:at]
        case Kind.REMOVE:
            return data[:at] + data[at + 1 + argument % 64 :]
        case Kind.REPEAT:
            part = data[at : at + 1 + argument % 64]
            return data[:at] + part * (1 + argument % 200) + data[at:]
        case Kind.SPLICE:
            return data[:at] + other[edit.at % (len(other) + 1) :]
        case Kind.LENGTH:
            size = (1, 2, 4, 8)[argument % 4]
            value = (b"\xff" * size, b"\x00" * size, b"\xff" * (size - 1) + b"\x7f")
            return data[:at] + value[argument // 4 % 3] + data[at + size :]
        case Kind.NUMBER:
            return _replaced(_NUMBER, data, edit.at, NUMBERS[argument % len(NUMBERS)])
        case Kind.STRING:
            word = b'"' + WORDS[argument % len(WORDS)].replace(b'"', b"'") + b'"'
            return _replaced(_STRING, data, edit.at, word)
        case Kind.WORD:
            return data[:at] + WORDS[argument % len(WORDS)] + data[at:]
        case Kind.BYTES:
            return data[:at] + argument.to_bytes(8, "little") + data[at + argument % 9 :]


def _replaced(pattern: re.Pattern[bytes], data: bytes, which: int, new: bytes) -> bytes:
    """`data` with one of the matches of `pattern` replaced."""
    found = list(pattern.finditer(data))
    if not found:
        return data
    match = found[which % len(found)]
    return data[: match.start()] + new + data[match.end() :]
