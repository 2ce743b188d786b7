"""What a document may be made of before anybody looks at what it says.

A reader of YAML or JSON gives values that no field of ours can have, and on which code that formats
or compares them fails in its own way: numbers of thousands of digits, NaN, halves of characters,
lists in lists in lists, and lists that hold themselves. They are refused here, once. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from holdfast_core.errors import InvalidJobError

DEPTH_MAX = 64
"""Lists and mappings within each other. A pod's template has about ten levels."""
VALUES_MAX = 100_000
"""Values of a document, counted wherever they appear: one that appears a thousand times is a
thousand. A job of thousands of nodes has some hundred."""
_INTEGERS = range(-(2**63), 2**64)


def check_plain(document: object) -> None:
    """Refuse a document that holds what no field can be.

    Raises:
        InvalidJobError: for the first value that is found, with its path.
    """
    count = 0
    waiting: list[tuple[str, int, object]] = [("", 0, document)]
    while waiting:
        path, depth, value = waiting.pop()
        count += 1
        if count > VALUES_MAX:
            raise InvalidJobError(
                f"the document has more than {VALUES_MAX} values; a job has far fewer: look for "
                f"aliases that repeat each other"
            )
        if depth > DEPTH_MAX:
            raise InvalidJobError(
                f"{path[:80]}… is nested deeper than {DEPTH_MAX} levels; nothing in a job is"
            )
        if wrong := _wrong(value):
            raise InvalidJobError(f"{path[:200] or 'the document'} {wrong}")
        waiting.extend((at, depth + 1, part) for at, part in _parts(path, value))


def _wrong(value: object) -> str:
    if isinstance(value, int) and value not in _INTEGERS:
        return f"is a number of {value.bit_length()} bits; use at most 64"
    if isinstance(value, float) and math.isnan(value):
        return "is not a number, and neither more nor less than any limit; give a number"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "holds half of a character; save the file as UTF-8"
    return ""


def _parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if wrong := _wrong(key):
                raise InvalidJobError(f"a key of {path[:200] or 'the document'} {wrong}")
            yield f"{path}.{key}"[:300].lstrip("."), part
    elif isinstance(value, list | tuple | set | frozenset):
        for i, part in enumerate(value):
            yield f"{path}[{i}]"[:300], part
