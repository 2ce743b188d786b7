"""The table of documents that are refused, for the API server and for `parse_job`."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast_core.job.schema import SETTINGS

_TABLE = yaml.safe_load(
    (Path(__file__).parents[1] / "invalid_jobs.yaml").read_text(encoding="utf-8")
)

BASE: dict[str, Any] = _TABLE["base"]
SMALL: dict[str, Any] = {
    **BASE,
    "spec": {
        "nodes": 2,
        "parallelism": {"dp": 2},
        "persistence": {"uri": "s3://bucket/run1"},
        "redundancy": {"raim5": {}},
        "failurePolicy": {"rules": [{"when": "Hang", "action": "Fail"}]},
        "trainer": BASE["spec"]["trainer"],
    },
}
"""Leaves to the defaults what it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidJob:
    """One case of the table."""

    name: str
    document: dict[str, Any]
    path: str
    """What both name."""
    server: str
    """What the API server says."""
    local: str
    """What `parse_job` says."""


def changed(values: dict[str, Any], removed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The base document with values put at dotted paths, and without what is removed."""
    document: dict[str, Any] = deepcopy(BASE)
    for path, value in values.items():
        parent, key = _parent(document, path)
        parent[key] = deepcopy(value)  # a later path may lead into it
    for path in removed:
        parent, key = _parent(document, path)
        del parent[key]
    return document


def _parent(at: Any, path: str) -> tuple[Any, Any]:
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    return at, int(last) if isinstance(at, list) else last


INVALID_JOBS = [
    InvalidJob(
        name=case["name"],
        document=changed(case.get("set", {}), tuple(case.get("remove", ()))),
        path=case["path"],
        server=case.get("says") or case["server"],
        local=case.get("says") or case["local"],
    )
    for case in _TABLE["cases"]
]


def _another(value: object) -> object:
    """Another value of a setting than its default."""
    if isinstance(value, bool):
        return not value
    step = {int: 1, float: 0.25}.get(type(value))
    return "1" if step is None else value + step  # type: ignore[operator]


_UNHEARD = (
    "needs pods that Holdfast makes, and spec.trainer.external is true; pass holdfast.Settings in "
    "the script, or give a template"
)
INVALID_JOBS += [
    InvalidJob(
        name=f"{setting.path} that another controller's pods do not get",
        document=changed(
            {"spec.trainer.external": True, f"spec.{setting.path}": _another(setting.default)},
            ("spec.trainer.template",),
        ),
        path=f"spec.{setting.path}",
        server=_UNHEARD,
        local=_UNHEARD,
    )
    for setting in SETTINGS
]


def jobs_of_two(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Documents with the changes of two cases each that break rules of the spec."""
    chosen = random.Random(seed)
    cases = [case for case in _TABLE["cases"] if case.get("says") and "set" in case]
    cases = [case for case in cases if not any(p.startswith("metadata.") for p in case["set"])]
    found: list[dict[str, Any]] = []
    while len(found) < count:
        one, other = chosen.sample(cases, 2)
        removed = {*one.get("remove", ()), *other.get("remove", ())}
        try:
            found.append(changed({**one["set"], **other["set"]}, tuple(sorted(removed))))
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # what one changes, the other has taken away
    return found
