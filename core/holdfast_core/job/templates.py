"""Checks of a job's pod template: Holdfast needs the trainer's command and environment.

The rest of the pod's specification belongs to Kubernetes and is passed on as it is; what is beside
it would be dropped, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_core.job.documents import MISSING, Problem, at, unknown_field

TEMPLATE = "spec.trainer.template"
TEMPLATE_FIELDS = ("metadata", "spec")
METADATA_FIELDS = ("labels", "annotations", "name", "namespace", "creationTimestamp")
"""Fields of a template's metadata. The last three are what tools write into templates; pods get
names, and the namespace, of their job."""

ENV_NAME_PATTERN = "[-._a-zA-Z][-._a-zA-Z0-9]*"
"""Pattern of the name of an environment variable, for Python and RE2."""


def template_problems(template: object) -> Iterator[Problem]:
    """Problems of the types of `spec.trainer.template`, which the job's own types leave open."""
    if not isinstance(template, Mapping):
        return
    path = TEMPLATE
    metadata = at(template, "metadata")
    for each, where, fields in (
        (template, path, TEMPLATE_FIELDS),
        (metadata, f"{path}.metadata", METADATA_FIELDS),
    ):
        if isinstance(each, Mapping):
            for key in each:
                if key not in fields:
                    yield unknown_field(key, each[key], where, list(fields))
    path = f"{path}.spec.containers"
    containers = at(template, "spec", "containers")
    if not isinstance(containers, list | tuple):
        wrong = "is required" if containers is MISSING else "not a list"
        yield Problem(path=path, value=containers, wrong=wrong, fix="give a list with the trainer")
    if not isinstance(containers, list | tuple) or not containers:
        return
    trainer = containers[0]
    if not isinstance(trainer, Mapping):
        yield Problem(
            path=f"{path}[0]",
            value=trainer,
            wrong="not a container",
            fix="give a mapping with name, image and command",
        )
        return
    yield from _command_problems(trainer, f"{path}[0]")
    yield from _env_problems(trainer.get("env", ()), f"{path}[0].env")


def _command_problems(trainer: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for key in ("command", "args"):
        words = trainer.get(key) or ()
        if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
            yield Problem(
                path=f"{path}.{key}",
                value=words,
                wrong="not a list of words",
                fix='give one, for example ["python", "train.py"], with numbers in quotes',
            )


def _env_problems(env: object, path: str) -> Iterator[Problem]:
    if not isinstance(env, list | tuple):
        yield Problem(path=path, value=env, wrong="not a list", fix="give a list of name and value")
        return
    seen: set[str] = set()
    for i, entry in enumerate(env):
        name = at(entry, "name")
        if not isinstance(name, str) or not re.fullmatch(ENV_NAME_PATTERN, name):
            yield Problem(
                path=f"{path}[{i}].name",
                value=name,
                wrong="not the name of an environment variable",
                fix="use letters, digits, '_', '-' and '.', not beginning with a digit",
            )
            continue
        if name in seen:
            yield Problem(
                path=f"{path}[{i}].name",
                value=name,
                wrong="is given twice",
                fix="remove one of the two",
            )
        seen.add(name)
        value = at(entry, "value")
        if not isinstance(value, str) and value is not MISSING:
            yield Problem(
                path=f"{path}[{i}].value",
                value=value,
                wrong="not text",
                fix="write it in quotes",
            )
