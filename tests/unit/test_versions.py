"""What versions beside each other rely on may only grow: messages, calls, and the resource.

`versions.json` holds what the last release had. During an upgrade operator, daemons and trainers of
two versions talk to each other, and a rollback reads what a newer version has stored; so a field
keeps its number and type, a call its messages, and no field becomes required. Only a number of the
resource may become a number or a word: no job that is stored has a word there. A release renews the
file:

    .venv/bin/python tests/unit/test_versions.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from holdfast_protos import control_pb2, peer_pb2, trainer_pb2, values_pb2

ROOT = Path(__file__).resolve().parents[2]
RELEASED = Path(__file__).with_name("versions.json")
FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (control_pb2, peer_pb2, trainer_pb2, values_pb2)
)


def present() -> dict[str, dict[str, str]]:
    """Every message's field, call and field of the resource, each with what must stay as it is."""
    fields: dict[str, str] = {}
    calls: dict[str, str] = {}
    for file in FILES:
        for message in file.message_types_by_name.values():
            _note_message(message, fields)
        for service in file.services_by_name.values():
            for method in service.methods:
                calls[method.full_name] = f"{_type(method.input_type)} {_type(method.output_type)}"
    path = ROOT / "crds" / "holdfast.dev_moetrainingjobs.yaml"
    resource = yaml.safe_load(path.read_text(encoding="utf-8"))
    (version,) = resource["spec"]["versions"]
    properties: dict[str, str] = {}
    _note_properties(version["schema"]["openAPIV3Schema"], version["name"], properties)
    return {"fields": fields, "calls": calls, "resource": properties}


def _type(message: Descriptor) -> str:
    return str(message.full_name)


def _note_message(message: Descriptor, found: dict[str, str]) -> None:
    for field in message.fields:
        kind = _KINDS[field.type]
        of = (field.message_type or field.enum_type or field).full_name
        found[f"{message.full_name} {field.number}"] = f"{field.name} {kind} {_label(field)} {of}"
    for nested in message.nested_types:
        _note_message(nested, found)


_KINDS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


_WIDER = {"integer": "integer or string"}


def _label(field: FieldDescriptor) -> str:
    # Old versions of protobuf have `label`, new ones `is_repeated`.
    repeated = getattr(field, "is_repeated", None)
    if repeated is None:
        repeated = getattr(field, "label", None) == FieldDescriptor.LABEL_REPEATED
    return "repeated" if repeated else "one"


def _note_properties(schema: dict[str, Any], path: str, found: dict[str, str]) -> None:
    required = set(schema.get("required", ()))
    for name, each in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        text = "integer or string" if each.get("x-kubernetes-int-or-string") else each.get("type")
        found[here] = f"{text} required" if name in required else f"{text}"
        _note_properties(each, here, found)
    if "items" in schema:
        _note_properties(schema["items"], f"{path}[]", found)


@pytest.mark.parametrize("kind", ["fields", "calls", "resource"])
def test_what_the_last_release_had_is_still_there(kind: str) -> None:
    released = json.loads(RELEASED.read_text(encoding="utf-8"))[kind]
    now = present()[kind]
    changed = {
        name: (text, now.get(name))
        for name, text in released.items()
        if now.get(name) not in (text, _WIDER.get(text))
    }
    assert changed == {}, "add a field instead, and reserve the number of one that goes"


def test_no_field_of_the_resource_has_become_required() -> None:
    """A job that an older version took would be refused at its next write."""
    released = json.loads(RELEASED.read_text(encoding="utf-8"))["resource"]
    added = {name: text for name, text in present()["resource"].items() if name not in released}
    parents = {name: name.rpartition(".")[0].removesuffix("[]") for name in added}
    assert [
        name
        for name, text in added.items()
        if text.endswith("required") and parents[name] in released
    ] == []


if __name__ == "__main__":
    RELEASED.write_text(json.dumps(present(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
