"""Ways to damage bytes that were valid."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


BYTES_MAX = 1 << 18
"""Longer results are cut: what is looked for is not slowness by length alone."""
EDITS_MAX = 6


def damaged(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the seeds after some edits, or bytes that were never valid."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    data = rng.choice(seeds)
    for _ in range(rng.randint(1, EDITS_MAX)):
        data = rng.choice(_EDITS)(data, rng, seeds)[:BYTES_MAX]
    return data


def _flip(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    return data[: rng.randint(0, len(data))] if rng.random() < 0.3 else data


def _remove(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + data[at + rng.randint(1, 64) :]


def _repeat(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    part = data[at : at + rng.randint(1, 64)]
    return data[:at] + part * rng.choice((2, 3, 200)) + data[at:]


def _splice(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    other = rng.choice(seeds)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _length(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A binary number of 1 to 8 bytes becomes extreme, such as a length."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randint(0, len(data))
    value = rng.choice((b"\xff" * size, b"\0" * size, b"\xff" * (size - 1) + b"\x7f"))
    return data[:at] + value + data[at + size :]


def _varint(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A number of a protobuf message becomes as large as it can be."""
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice((b"\xff" * 9 + b"\x01", b"\xff" * 4 + b"\x0f")) + data[at + 1 :]


def _double(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A fixed number of eight bytes becomes NaN, infinite or huge."""
    at = rng.randint(0, len(data))
    value = rng.choice((math.nan, math.inf, -math.inf, 1e308, -1.0))
    return data[:at] + struct.pack("<d", value) + data[at + 8 :]


def _number(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    return _replaced(_NUMBER, data, rng, rng.choice(NUMBERS))


def _string(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    return _replaced(_STRING, data, rng, b'"' + rng.choice(WORDS).replace(b'"', b"'") + b'"')


def _word(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(WORDS) + data[at:]


def _noise(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    at, size = rng.randint(0, len(data)), rng.randint(1, 9)
    return data[:at] + rng.randbytes(size) + data[at + size :]


def _replaced(pattern: re.Pattern[bytes], data: bytes, rng: random.Random, new: bytes) -> bytes:
    """`data` with one of the matches of `pattern` replaced."""
    found = list(pattern.finditer(data))
    if not found:
        return data
    match = rng.choice(found)
    return data[: match.start()] + new + data[match.end() :]


_EDITS: tuple[Callable[[bytes, random.Random, Sequence[bytes]], bytes], ...] = (
    _flip,
    _cut,
    _remove,
    _repeat,
    _splice,
    _length,
    _varint,
    _double,
    _number,
    _number,
    _string,
    _word,
    _noise,
)


UNITS = (
    *(b"a", b"1", b"\0", b"\xff", b"a.", b"[", b"{", b" ", b"\n", b"-", b"/", b"1:", b"- a\n"),
    *(b"\x08\x01", b"\x0a\x00", b"\x12\x00", b"\x1a\x00", b"\x22\x00", b"\x3a\x00", b"\x4a\x00"),
    *(b"-eyJaaaaaaaa", b"-----BEGIN A", b"-----BEGIN CERTIFICATE-----\n"),
)
"""Repeated to any length, before and behind what is valid. Those of two bytes are fields of a
protobuf message: empty messages, of which a list may hold many."""


def grown(seeds: Sequence[bytes], size: int) -> Iterator[bytes]:
    """The seeds, made about `size` bytes long in each way that may cost more than its length: the
    same ways in the same order for each size."""
    for seed in seeds:
        yield seed * max(1, size // max(1, len(seed)))  # protobuf adds up what lists hold
        for unit in UNITS:
            yield seed + unit * (size // len(unit))
            yield unit * (size // len(unit)) + seed
        try:
            document = json.loads(seed)
        except ValueError:
            continue
        for each in _grown_values(document, size):
            yield json.dumps(each, ensure_ascii=False).encode()


def _grown_values(value: Any, size: int) -> Iterator[Any]:
    """`value` with one of its lists, mappings, texts or numbers made large."""
    times = max(1, size // max(2, len(json.dumps(value))))
    if isinstance(value, list):
        yield value * times
        yield [_counted(each, i) for i in range(times) for each in value]
        for i, each in enumerate(value):
            yield from ([*value[:i], one, *value[i + 1 :]] for one in _grown_values(each, size))
    elif isinstance(value, dict):
        yield {**value, **{f"{key}{i}": each for i in range(times) for key, each in value.items()}}
        yield {**value, **{str(i): each for i in range(times) for each in value.values()}}
        for key, each in value.items():
            yield from ({**value, key: one} for one in _grown_values(each, size))
    elif isinstance(value, str):
        yield from (value + unit * (size // len(unit)) for unit in ("a", "1", "a-", "a/", "."))
    elif isinstance(value, int):
        yield 10 ** min(size, 4000)


def _counted(value: Any, by: int) -> Any:
    """`value` with every number in it raised, so that no two of a list are alike."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value + by
    if isinstance(value, list):
        return [_counted(each, by) for each in value]
    if isinstance(value, dict):
        return {key: _counted(each, by) for key, each in value.items()}
    return value
