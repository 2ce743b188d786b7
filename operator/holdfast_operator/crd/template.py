"""The schema of `spec.trainer.template`: what Holdfast reads of it; the rest is Kubernetes' own.

The whole schema of a pod would make the resource too big for `kubectl apply`. The operator has the
API server judge the pod that it makes of the template.
"""

from __future__ import annotations

from typing import Any

_WORDS = {"type": "array", "items": {"type": "string"}}
_ENV_NAME = "^[-._a-zA-Z][-._a-zA-Z0-9]*$"


def template_schema(description: str) -> dict[str, Any]:
    """The schema of a pod template, as far as it is ours."""
    env = _open(
        "One variable.",
        ["name"],
        name={"type": "string", "pattern": _ENV_NAME, "description": "Its name."},
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
    labels = _open(
        "Labels and annotations of the pods.",
        [],
        labels={
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Labels of the pods.",
        },
        annotations={
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Annotations of the pods.",
        },
    )
    pod = _open("The specification of the pods.", ["containers"], containers=containers)
    return _open(description, ["spec"], metadata=labels, spec=pod)


def _open(description: str, required: list[str], **properties: object) -> dict[str, Any]:
    """An object that may have more than these properties."""
    schema: dict[str, Any] = {"type": "object", "description": description}
    if required:
        schema["required"] = required
    return {**schema, "properties": properties, "x-kubernetes-preserve-unknown-fields": True}
