"""Schema of `spec.trainer.template`: the fields that Holdfast reads; the rest is Kubernetes' own.

A pod's whole schema would make the resource too large for `kubectl apply`. The operator has the API
server check the pod that it makes of the template.
"""

from __future__ import annotations

from typing import Any

from holdfast_core.job.templates import ENV_NAME_PATTERN, METADATA_FIELDS

_WORDS = {"type": "array", "items": {"type": "string"}}


def template_schema(description: str) -> dict[str, Any]:
    """Schema of a pod template, limited to the fields that Holdfast reads."""
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
