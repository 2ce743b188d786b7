"""values.schema.json, generated from values.yaml, so that each setting is described once.

The description of a setting is the comment above it that begins with `--`, and its type is that of
its default. A line `@schema {...}` of JSON in the same comment adds what a default cannot express.
A map with entries allows these and no others, unless such a line allows more.

Pure: files are the business of `chart_files`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_]+):")
_COMMENT = re.compile(r"^ *# ?(?P<text>.*)$")
_STEP = 2
"""Number of spaces per level of values.yaml."""


def schema(text: str, values: Mapping[str, Any]) -> Json:
    """The schema of `values`, the parsed form of `text`.

    Raises:
        ValueError: naming a setting without a description or without a recognisable type.
    """
    root = _object(values, (), _comments(text))
    # Helm passes this to charts that are part of another one.
    root["properties"]["global"] = {"type": "object", "description": "Shared with other charts."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of the chart holdfast",
        **root,
    }


def _comments(text: str) -> dict[tuple[str, ...], list[str]]:
    """Lines of the comment right above each setting, by the setting's path."""
    found: dict[tuple[str, ...], list[str]] = {}
    path: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        if comment := _COMMENT.match(line):
            lines.append(comment["text"])
        elif key := _KEY.match(line):
            path = [*path[: len(key["indent"]) // _STEP], key["key"]]
            found.setdefault(tuple(path), lines)
            lines = []
        else:
            lines = []
    return found


def _object(
    values: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], list[str]]
) -> Json:
    properties = {
        key: _setting(value, (*path, key), comments) for key, value in sorted(values.items())
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _setting(
    value: object, path: tuple[str, ...], comments: Mapping[tuple[str, ...], list[str]]
) -> Json:
    name, lines = ".".join(path), comments.get(path, [])
    given = _given(lines)
    description = _description(lines)
    if isinstance(value, dict) and value and "additionalProperties" not in given:
        return {
            **({"description": description} if description else {}),
            **_object(value, path, comments),
        }
    if not description:
        raise ValueError(f"values.yaml: {name} has no comment that begins with --")
    return {"description": description, **_type(value, name, given), **given}


def _type(value: object, name: str, given: Json) -> Json:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case str():
            return {"type": "string"}
        case list() if "items" in given:
            return {"type": "array"}
        case dict() if "additionalProperties" in given:
            return {"type": "object"}
    raise ValueError(f'values.yaml: {name} needs "# @schema" to define what it may hold')


def _given(lines: list[str]) -> Json:
    found: Json = {}
    for line in lines:
        if line.startswith("@schema "):
            found |= json.loads(line.removeprefix("@schema "))
    return found


def _description(lines: list[str]) -> str:
    """Text from the line that begins with -- on."""
    words = [line for line in lines if not line.startswith("@schema ")]
    begins = [index for index, line in enumerate(words) if line.startswith("-- ")]
    if not begins:
        return ""
    return " ".join(words[begins[-1] :]).removeprefix("-- ").strip()
