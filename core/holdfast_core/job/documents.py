"""Conversion of plain mappings to msgspec Structs, with every problem reported at once.

msgspec stops at the first problem and does not suggest a fix; people who write a document by hand
want all of them, each with the path, the value, what is wrong and what to do. Reading YAML or JSON
is left to the caller, and so is what the values mean together.
"""

from __future__ import annotations

import difflib
import enum
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from holdfast_core.errors import InvalidJobError

DEPTH_MAX = 64
"""Most levels of nested lists and mappings. A pod's template has about ten."""

VALUES_MAX = 20_000
"""Most values of a document, counted wherever they appear: one that appears a thousand times counts
a thousand times. A job of thousands of nodes has a few hundred."""

INTEGERS = range(-(2**63), 2**64)
"""Integers that a document may hold."""

PROBLEMS_MAX = 50
"""Problems that are reported; of more, the number is."""


def check_plain(document: object) -> None:
    """Refuse a document with values that no field can have.

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
                f"the document has more than {VALUES_MAX} values; a job needs far fewer: look "
                f"for aliases that repeat each other"
            )
        if depth > DEPTH_MAX:
            raise InvalidJobError(
                f"{path[:80]}… is nested more than {DEPTH_MAX} levels deep; a job never needs that"
            )
        if wrong := _wrong(value):
            raise InvalidJobError(f"{path[:200] or 'the document'} {wrong}")
        waiting.extend((at, depth + 1, part) for at, part in _parts(path, value))


def _wrong(value: object) -> str:
    if isinstance(value, int) and value not in INTEGERS:
        return f"is a number of {value.bit_length()} bits; use at most 64"
    if isinstance(value, float) and math.isnan(value):
        return "is NaN; give a number"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "holds half a character (a lone surrogate); save the file as UTF-8"
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


YEAR_S = 365 * 86400
"""Longest time that a document may ask for: a year."""

_SHOWN_CHARACTERS = 60
_StructT = TypeVar("_StructT", bound=msgspec.Struct)


class Document(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Base of all parts of a document. Parts repeat `frozen` and `kw_only` for type checkers.

    The `Meta` of a field describes it (`description`, which completes "give …", and the first of
    `examples`) and limits its values. For the reference and the schema, its `extra` may add
    `title`, a sentence in place of the description, and `more`, sentences after it. With `setting`,
    trainers get the value as well (`holdfast_core.job.settings`).
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a document."""

    path: str
    """Path to the value: `spec.failurePolicy.rules[0].values`."""
    value: object
    """Value that was found; `MISSING` when there is none."""
    wrong: str
    fix: str

    def __str__(self) -> str:
        if self.value is MISSING:
            return f"{self.path}: {self.wrong}; {self.fix}"
        return f"{self.path} = {_show(self.value)}: {self.wrong}; {self.fix}"


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING = _Missing.MISSING


def convert(
    kind: type[_StructT], value: object, path: str, problems: list[Problem]
) -> _StructT | None:
    """`value` as a `kind`, or None when it has problems, which are added to `problems`.

    Fields that are Structs, optional Structs or tuples of Structs are converted in the same way.
    Other fields are left to msgspec; the fix that a problem suggests comes from the `Meta` of their
    type: its `description`, and the first of its `examples`.
    """
    if not isinstance(value, Mapping):
        problems.append(
            Problem(
                path=path,
                value=value,
                wrong=f"expected a mapping, got {_type_name(value)}",
                fix="give the fields " + ", ".join(kind.__struct_encode_fields__),
            )
        )
        return None
    before = len(problems)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    problems.extend(
        unknown_field(key, value[key], path, list(fields)) for key in value if key not in fields
    )
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        at = f"{path}.{name}" if path else name
        if name in value:
            arguments[field.name] = _convert_field(field.type, value[name], at, problems)
        elif field.required:
            problems.append(
                Problem(path=at, value=MISSING, wrong="is required", fix=suggest(field.type))
            )
    return kind(**arguments) if len(problems) == before else None


def at(document: object, *path: str) -> object:
    """The value at `path` in nested mappings, or MISSING."""
    for key in path:
        if not isinstance(document, Mapping) or key not in document:
            return MISSING
        document = document[key]
    return document


def without_nulls(value: Any) -> Any:
    """A plain value without the fields that are null, as an API server stores it."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(part) for part in value]
    return value


def refuse(verdict: str, problems: list[Problem]) -> None:
    """Raise one error with a line for each problem after `verdict`, such as "job a is not valid".

    Raises:
        InvalidJobError: when there are problems.
    """
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems[:PROBLEMS_MAX])
        if len(problems) > PROBLEMS_MAX:
            lines += f"\n  … and {len(problems) - PROBLEMS_MAX} more"
        raise InvalidJobError(f"{verdict}, {count}:\n{lines}")


def _convert_field(kind: Any, value: object, path: str, problems: list[Problem]) -> Any:
    bare = bare_type(kind)
    struct, many = struct_in(bare)
    if struct is not None and many:
        if not isinstance(value, list | tuple):
            wrong = f"expected a list, got {_type_name(value)}"
            problems.append(Problem(path=path, value=value, wrong=wrong, fix=suggest(kind)))
            return None
        limit = min((m.max_length for m in metas(kind) if m.max_length is not None), default=None)
        if limit is not None and len(value) > limit:
            wrong, fix = f"{len(value)} entries", f"use at most {limit}"
            problems.append(Problem(path=path, value=MISSING, wrong=wrong, fix=fix))
            return None
        return tuple(convert(struct, one, f"{path}[{i}]", problems) for i, one in enumerate(value))
    if struct is not None and not many:
        optional = types.NoneType in typing.get_args(bare)
        return None if value is None and optional else convert(struct, value, path, problems)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problems.append(Problem(path=path, value=value, wrong=reword(error), fix=suggest(kind)))
        return None


def bare_type(kind: Any) -> Any:
    """The type of a field without its annotations."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def struct_in(kind: Any) -> tuple[type[msgspec.Struct] | None, bool]:
    """The Struct type in `S`, `S | None` or `tuple[S, ...]`, and whether it is in a tuple."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind, False
    arguments = typing.get_args(kind)
    structs = [a for a in arguments if isinstance(a, type) and issubclass(a, msgspec.Struct)]
    return (structs[0] if structs else None), typing.get_origin(kind) is tuple


def unknown_field(key: object, value: object, path: str, known: list[str]) -> Problem:
    """Problem of a field `key` of the mapping at `path`, which has only the fields `known`."""
    near = difflib.get_close_matches(str(key)[:_SHOWN_CHARACTERS], known, n=1)
    lower = {name.lower(): name for name in known}
    guess = lower.get(str(key).lower()) or (near[0] if near else None)
    return Problem(
        path=f"{path}.{key}" if path else str(key),
        value=value,
        wrong="unknown field",
        fix=f"did you mean {guess}?" if guess else f"the fields here are {', '.join(known)}",
    )


def reword(error: msgspec.ValidationError) -> str:
    """What is wrong, in the words of a `Problem`."""
    text = str(error).replace("`", "").replace(" - at $", " at ")
    return text[0].lower() + text[1:]


def metas(kind: Any) -> list[msgspec.Meta]:
    """The `Meta` of a field: on its type, or on the part of a union that has it."""
    metadata = getattr(kind, "__metadata__", None)
    if metadata is None and typing.get_origin(kind) in (typing.Union, types.UnionType):
        metadata = [meta for part in typing.get_args(kind) for meta in metas(part)]
    return [meta for meta in metadata or () if isinstance(meta, msgspec.Meta)]


def suggest(kind: Any) -> str:
    """What to give in place of a value that is not of a field's type."""
    described = metas(kind)
    bare = bare_type(kind)
    what = next((m.description for m in described if m.description), None)
    examples = next((m.examples for m in described if m.examples), None)
    if isinstance(bare, type) and issubclass(bare, enum.Enum):
        return "use one of " + ", ".join(str(member.value) for member in bare)
    struct, many = struct_in(bare)
    if what is None and struct is not None:
        what = ("a list of mappings" if many else "a mapping") + " with "
        what += ", ".join(struct.__struct_encode_fields__)
    text = f"give {what or 'a value'}"
    return f"{text}, for example {_show(examples[0])}" if examples else text


def _show(value: object) -> str:
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity and no NaN
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
