"""What a local run does otherwise than the kubelet is said, and is in the documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast_core.job.local_differences import (
    APPLIED_TO_CONTAINER,
    OF_CONTAINER,
    OF_POD,
    POD,
    local_differences,
)
from holdfast_core.job.parsing import ignored_locally, parse_job

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "local-cluster.md").read_text()
AT = f"{POD}.containers[0]"


def _template(container: dict[str, Any], **of_pod: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "command": ["t"], **container}], **of_pod}}


def _said(template: dict[str, Any], trainer: int = 0) -> list[str]:
    return [*local_differences(template, template["spec"]["containers"][trainer])]


def test_a_container_whose_fields_all_work_here_has_no_difference() -> None:
    env = [{"name": "A", "value": "$(B)"}]
    assert _said(_template({"args": ["x"], "env": env, "workingDir": "/srv"})) == []


@pytest.mark.parametrize("field", sorted(OF_CONTAINER))
def test_each_field_of_a_container_is_named_with_what_happens_instead(field: str) -> None:
    value: dict[str, Any] = (
        {"env": [{"name": "POD", "valueFrom": {}}]} if "." in field else {field: {}}
    )
    (line,) = _said(_template(value))
    named = f"{AT}.env[0].valueFrom (POD)" if "." in field else f"{AT}.{field}"
    assert line == f"{named} is ignored here: {OF_CONTAINER[field]}"


@pytest.mark.parametrize("field", sorted({*OF_POD} - {"containers"}))
def test_each_field_of_a_pod_is_named_with_what_happens_instead(field: str) -> None:
    assert _said(_template({}, **{field: []})) == [
        f"{POD}.{field} is ignored here: {OF_POD[field]}"
    ]


def test_a_sidecar_is_named_wherever_it_is() -> None:
    template = _template({})
    template["spec"]["containers"].insert(0, {"name": "proxy", "image": "p"})
    assert _said(template, trainer=1) == [
        f"{POD}.containers[0] (proxy) is ignored here: {OF_POD['containers']}"
    ]


def test_a_field_that_kubernetes_adds_later_is_named_too() -> None:
    assert _said(_template({"newField": 1}, other=2)) == [
        f"{AT}.newField is ignored here: a local run does not know this field",
        f"{POD}.other is ignored here: a local run does not know this field",
    ]


def test_the_lines_of_a_job_are_those_of_its_template() -> None:
    template = _template({"envFrom": []}, volumes=[])
    spec = {"nodes": 2, "parallelism": {"dp": 2}, "trainer": {"template": template}}
    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "MoETrainingJob"}
    job = parse_job({**head, "metadata": {"name": "a"}, "spec": spec})
    assert [line.split()[0] for line in ignored_locally(job)] == [f"{AT}.envFrom", f"{POD}.volumes"]


def test_the_documents_have_every_field() -> None:
    table = PAGE.partition("## Differences from a cluster")[2].partition("\n## ")[0]
    missing = [field for field in (*OF_CONTAINER, *OF_POD) if f"`{field}`" not in table]
    assert missing == []
    assert not APPLIED_TO_CONTAINER & {*OF_CONTAINER}
