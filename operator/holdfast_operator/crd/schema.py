"""Schema of a `MoETrainingJob`, generated from the types that read it.

Types, limits, defaults, descriptions and rules come from `holdfast_core`. The schema of the pod
template has only the fields that Holdfast reads.
"""

from __future__ import annotations

import inspect as docstrings
from typing import Any

import msgspec
from msgspec import inspect

from holdfast_core.job.documents import without_nulls
from holdfast_core.job.rule import Rule
from holdfast_core.job.rules import RULES
from holdfast_core.job.schema import API_VERSION, KIND, Spec
from holdfast_core.job.status import JobStatus
from holdfast_core.job.templates import ENV_NAME_PATTERN, METADATA_FIELDS, TEMPLATE

GROUP, VERSION = API_VERSION.split("/")
PLURAL, SINGULAR, SHORT = "moetrainingjobs", "moetrainingjob", "moejob"

_LIMITS = {"ge": "minimum", "gt": "minimum", "le": "maximum"}
_COLUMNS = (
    ("State", "string", ".status.phase", "What the job is doing"),
    ("Ready", "string", ".status.readyText", "Ranks at work, of all ranks"),
    ("Active", "integer", ".status.strength.active", "Members that train together"),
    ("Desired", "integer", ".spec.nodes", "All members: nodes"),
    ("Step", "integer", ".status.step", "The newest completed step"),
    ("Protected", "integer", ".status.protectedStep", "The newest step that survives a lost node"),
    ("Restarts", "integer", ".status.restarts", "Recoveries that count towards maxRestarts"),
    ("Age", "date", ".metadata.creationTimestamp", "Since the job was created"),
)
_WORDS = {"type": "array", "items": {"type": "string"}}
_WIDE_COLUMNS = (
    (
        "Minimum",
        "integer",
        ".status.strength.minimum",
        "The fewest members that the job continues with",
    ),
    (
        "Joining",
        "integer",
        ".status.strength.joining",
        "Missing members that are getting ready to join",
    ),
    ("Slots", "integer", ".status.slots", "Snapshots of each rank that its node has room for"),
    (
        "Recovery",
        "string",
        ".status.recoveryMode",
        "What a recovery does to workers that have not failed",
    ),
    ("Manager", "string", ".spec.managedBy", "The controller that runs the job"),
    ("Lost", "string", ".status.tokenLoss.lost", "Tokens that recoveries have lost, of all"),
)


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    columns: list[dict[str, Any]] = [
        {"name": name, "type": kind, "jsonPath": path, "description": description}
        for name, kind, path, description in _COLUMNS + _WIDE_COLUMNS
    ]
    for column in columns[len(_COLUMNS) :]:
        column["priority"] = 1
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": job_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes",
                "statusReplicasPath": ".status.nodesReady",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/part-of": "holdfast"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def job_schema() -> dict[str, Any]:
    """The structural schema of the whole document, rules included."""
    schema = {
        "type": "object",
        "description": "A training job that Holdfast keeps alive.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"The version: {API_VERSION}."},
            "kind": {"type": "string", "description": f"The kind: {KIND}."},
            # Without this property, rules could not refer to the job's name.
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": _value(inspect.type_info(Spec), "spec", defaults=True),
            "status": _value(inspect.type_info(JobStatus), "status", defaults=False),
        },
    }
    for path, rules in RULES.items():
        schema_at(schema, path)["x-kubernetes-validations"] = [_validation(rule) for rule in rules]
    return schema


def _validation(rule: Rule) -> dict[str, Any]:
    """Entry of `x-kubernetes-validations`, without its empty parts."""
    text = rule.says.replace("\\", "\\\\").replace("'", "\\'")
    entry = {
        "rule": rule.rule,
        "message": "" if rule.values else rule.says,
        "messageExpression": f"'{text}'.format([{', '.join(rule.values)}])" if rule.values else "",
        "fieldPath": rule.field,
        "reason": "FieldValueForbidden" if rule.forbidden else "",
    }
    return {key: value for key, value in entry.items() if value}


def schema_at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The part of `schema` at a path like `spec.failurePolicy.rules[]`."""
    for name in path.replace("[]", ".[]").split(".") if path else ():
        schema = schema["items"] if name == "[]" else schema["properties"][name]
    return schema


def describe(kind: inspect.Type) -> str:
    """Description of a field for people: its title or description, with any addition; without
    either, the first paragraph of its Struct's docstring."""
    for part in _parts(kind):
        if isinstance(part, inspect.Metadata):
            extra = part.extra or {}
            what = (part.extra_json_schema or {}).get("description", "")
            return f"{extra.get('title') or _sentence(what)} {extra.get('more', '')}".strip()
        if isinstance(part, inspect.StructType):
            text = docstrings.getdoc(part.cls) or ""
            return text.partition("\n\n")[0].replace("\n", " ")
    return ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _parts(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """Members of a union without null, or the type itself."""
    if isinstance(kind, inspect.UnionType):
        return tuple(part for part in kind.types if not isinstance(part, inspect.NoneType))
    return (kind,)


def _value(kind: inspect.Type, path: str, *, defaults: bool) -> dict[str, Any]:
    """Schema of one value, with its description."""
    description = describe(kind)
    schema: dict[str, Any] = {"description": description} if description else {}
    if path == TEMPLATE:
        return _template_schema(description)
    parts = [part.type if isinstance(part, inspect.Metadata) else part for part in _parts(kind)]
    if len(parts) > 1:
        assert {type(part) for part in parts} == {inspect.StrType, inspect.IntType}, path
        schema |= {"x-kubernetes-int-or-string": True}
    match parts[0]:
        case inspect.StructType(fields=fields):
            schema |= _struct(fields, path, defaults=defaults)
        case inspect.EnumType(cls=cls):
            schema |= {"type": "string", "enum": [member.value for member in cls]}
        case inspect.BoolType():
            schema |= {"type": "boolean"}
        case inspect.IntType() | inspect.FloatType() as number:
            schema |= _number(number)
        case inspect.StrType(min_length=low, max_length=high):
            limits = {"minLength": low, "maxLength": high}
            schema |= {} if len(parts) > 1 else {"type": "string"}
            schema |= {key: limit for key, limit in limits.items() if limit is not None}
        case inspect.VarTupleType(item_type=item, max_length=high):
            schema |= {"type": "array"} | ({} if high is None else {"maxItems": high})
            schema |= {"items": _value(item, f"{path}[]", defaults=defaults)}
        case inspect.DictType():
            schema |= {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        case other:
            raise AssertionError(f"{path}: no schema for {other}")
    return schema | _extensions(kind)


def _extensions(kind: inspect.Type) -> dict[str, Any]:
    """Entries of a type that only the API server reads."""
    found: dict[str, Any] = {}
    for part in _parts(kind):
        if isinstance(part, inspect.Metadata):
            found |= part.extra_json_schema or {}
    return {key: value for key, value in found.items() if key not in ("description", "examples")}


def _struct(fields: tuple[inspect.Field, ...], path: str, *, defaults: bool) -> dict[str, Any]:
    properties = {}
    for field in fields:
        value = _value(field.type, f"{path}.{field.encode_name}", defaults=defaults)
        if defaults and not field.required and field.default is not None:
            value["default"] = _default(field)
        properties[field.encode_name] = value
    required = [field.encode_name for field in fields if field.required]
    return (
        {"type": "object"}
        | ({"required": required} if required else {})
        | {"properties": properties}
    )


def _default(field: inspect.Field) -> Any:
    """The default as an API server stores it: without nulls, but whole, because the rules must hold
    for it before the defaults within it are filled in."""
    return without_nulls(msgspec.to_builtins(field.default))


def _number(kind: inspect.IntType | inspect.FloatType) -> dict[str, Any]:
    whole = isinstance(kind, inspect.IntType)
    schema: dict[str, Any] = {"type": "integer", "format": "int64"} if whole else {"type": "number"}
    for name, key in _LIMITS.items():
        limit = getattr(kind, name)
        if limit is not None:
            schema[key] = limit
    if kind.gt is not None:
        schema["exclusiveMinimum"] = True
    return schema


def _template_schema(description: str) -> dict[str, Any]:
    """Schema of a pod template, limited to the fields that Holdfast reads. A pod's whole schema
    would make the resource too large for `kubectl apply`. The operator has the API server check the
    pod that it makes of the template."""
    env = _open(
        "One variable.",
        ["name"],
        name={"type": "string", "pattern": f"^{ENV_NAME_PATTERN}$", "description": "Its name."},
        value={"type": "string", "description": "Its value; a number is written in quotes."},
    )
    container = _open(
        "One container; the first is the trainer.",
        [],
        command={**_WORDS, "description": "The command. The trainer must have one."},
        args={**_WORDS, "description": "Arguments after the command."},
        env={
            "type": "array",
            "items": env,
            "description": "Environment variables.",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    containers = {
        "type": "array",
        "maxItems": 64,
        "items": container,
        "description": "The containers; the first is the trainer.",
    }
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    ignored = {"type": "string", "nullable": True, "description": "Of no effect on pods."}
    given = {
        "labels": {**texts, "description": "Labels of the pods."},
        "annotations": {**texts, "description": "Annotations of the pods."},
    }
    metadata = _closed(
        "Labels and annotations of the pods.", [], **dict.fromkeys(METADATA_FIELDS, ignored) | given
    )
    pod = _open("The specification of the pods.", ["containers"], containers=containers)
    return _closed(description, ["spec"], metadata=metadata, spec=pod)


def _open(description: str, required: list[str], **properties: object) -> dict[str, Any]:
    """Schema of an object that may have more than these properties."""
    schema = _closed(description, required, **properties)
    return {**schema, "x-kubernetes-preserve-unknown-fields": True}


def _closed(description: str, required: list[str], **properties: object) -> dict[str, Any]:
    """Schema of an object that has no other properties."""
    schema: dict[str, Any] = {"type": "object", "description": description}
    if required:
        schema["required"] = required
    return {**schema, "properties": properties}
