"""What of the chart is generated, and what of it can be checked without Helm."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import chart_files
import msgspec
import pytest
import yaml
from dashboards import SECTIONS, dashboard, series
from values_schema import schema

from holdfast_core.job.locations import StorageLocation
from holdfast_core.metric_definitions import Definition, MetricType
from holdfast_daemon import metrics as daemon
from holdfast_operator.kube import metrics as operator

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "holdfast"
DEFINITIONS: list[Definition] = [*daemon.DEFINITIONS, *operator.DEFINITIONS]
LABELS_OF_TARGETS = {"node", "le"}
"""Given by the monitors and by histograms, not by a definition."""


def loaded(name: str) -> Any:
    return yaml.safe_load((CHART / name).read_text(encoding="utf-8"))


def alerts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = loaded("files/alerts.yaml")["alerts"]
    return found


def expressions() -> list[str]:
    panels = json.loads((CHART / "files/dashboard.json").read_text(encoding="utf-8"))["panels"]
    shown = [each["expr"] for panel in panels for each in panel.get("targets", ())]
    return [*shown, *(alert["expr"] for alert in alerts())]


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\bholdfast_\w+", expression))


@pytest.mark.parametrize("name", chart_files.files(), ids=str)
def test_a_generated_file_is_what_it_is_made_from(name: Path) -> None:
    there = (CHART / name).read_text(encoding="utf-8")
    assert there == chart_files.files()[name], "run 'make chart'"


def test_the_chart_has_the_version_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert loaded("Chart.yaml")["appVersion"] == project["version"]


# --- dashboard and alerts -----------------------------------------------------------------------


def test_every_metric_has_a_panel() -> None:
    shown = set().union(*(metrics_of(expression) for expression in expressions()))
    hidden = [each.exposed_name for each in DEFINITIONS if not shown & set(series(each))]
    assert not hidden


def test_panels_and_alerts_use_metrics_that_exist() -> None:
    known = {name for each in DEFINITIONS for name in series(each)}
    used = set().union(*(metrics_of(expression) for expression in expressions()))
    assert used <= known


def test_panels_and_alerts_use_labels_that_their_metrics_have() -> None:
    labels = {name: set(each.labels) for each in DEFINITIONS for name in series(each)}
    for expression in expressions():
        chosen = re.findall(r"\b(holdfast_\w+)\{([^}]*)\}", expression)
        for name, matchers in chosen:
            used = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matchers))
            assert used <= labels[name] | LABELS_OF_TARGETS, expression
        all_labels = set().union(*(labels[name] for name in metrics_of(expression)))
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            used = {label.strip() for label in grouped.split(",")}
            assert used <= all_labels | LABELS_OF_TARGETS, expression


def test_alerts_name_values_of_labels_that_exist() -> None:
    values = {
        (name, label): allowed
        for each in daemon.DEFINITIONS
        for name in series(each)
        for label, allowed in each.values
    }
    for alert in alerts():
        for name, matchers in re.findall(r"\b(holdfast_\w+)\{([^}]*)\}", alert["expr"]):
            for label, value in re.findall(r"(\w+)=\"([^\"]*)\"", matchers):
                if (name, label) in values:
                    assert value in values[name, label], alert["alert"]


def test_every_alert_leads_to_its_section_of_the_runbooks() -> None:
    path = "docs/runbooks.md"
    sections = re.findall(r"^## (\w+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page.startswith("https://") and page.endswith(path)
        assert anchor == alert["alert"].lower()


def test_the_runbooks_name_metrics_that_exist() -> None:
    known = {name for each in DEFINITIONS for name in series(each)}
    assert metrics_of((ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")) <= known


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_states_what_happened_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("info", "warning", "critical")
    assert alert["expr"].count("(") == alert["expr"].count(")")
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    shown = set(re.findall(r"\$labels\.(\w+)", summary + description))
    grouped = re.search(r"by \(([^)]*)\)", alert["expr"])
    metric_labels: set[str] = set().union(
        *(set(each.labels) for each in DEFINITIONS if metrics_of(alert["expr"]) & set(series(each)))
    )
    there = set(grouped[1].split(", ")) if grouped else metric_labels | {"node"}
    assert shown <= there, "it shows a label that its expression has dropped"


def test_a_metric_without_a_section_is_refused_by_name() -> None:
    stranger = Definition(name="new", type=MetricType.GAUGE, help="New.", prefix=operator.PREFIX)
    with pytest.raises(ValueError, match=r"give a section .* to holdfast_operator_new"):
        dashboard([*DEFINITIONS, stranger])


def test_a_section_with_a_metric_that_is_gone_is_refused_by_name() -> None:
    left = [each for each in DEFINITIONS if each.exposed_name != "holdfast_epoch"]
    with pytest.raises(ValueError, match=r"take out .*: holdfast_epoch"):
        dashboard(left)


def test_no_two_panels_have_the_same_title() -> None:
    titles = [panel["title"] for panel in dashboard(DEFINITIONS)["panels"]]
    assert sorted(titles) == sorted(set(titles))


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard(DEFINITIONS)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(panels) == len(DEFINITIONS) + len(SECTIONS)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


# --- values and their schema --------------------------------------------------------------------

TEXT = """
# A heading of no setting.

part:
  # -- What it is,
  # in two lines.
  # @schema {"minimum": 1}
  size: 3
  # -- Anything.
  # @schema {"additionalProperties": true}
  free: {a: 1}
"""


def test_descriptions_and_types_come_from_the_values() -> None:
    part = schema(TEXT, yaml.safe_load(TEXT))["properties"]["part"]
    assert part["additionalProperties"] is False
    assert part["properties"] == {
        "size": {"description": "What it is, in two lines.", "type": "integer", "minimum": 1},
        "free": {"description": "Anything.", "type": "object", "additionalProperties": True},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A comment.\nsize: 3\n", "size has no comment that begins with --"),
        ("part:\n  # -- A list.\n  names: []\n", 'part.names needs "# @schema"'),
        ("# -- A map.\nlabels: {}\n", 'labels needs "# @schema"'),
        ("# -- What?\nnone:\n", 'none needs "# @schema"'),
    ],
)
def test_an_incomplete_setting_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        schema(text, yaml.safe_load(text))


def test_a_description_belongs_to_the_setting_below_it_alone() -> None:
    text = "# -- One.\none: 1\n\n# -- Two, far away.\n\ntwo: 2\n"
    with pytest.raises(ValueError, match="two has no comment"):
        schema(text, yaml.safe_load(text))


def test_the_chart_knows_all_of_a_storage_location() -> None:
    settings = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    location = settings["persistence"]["properties"]["locations"]["items"]["properties"]
    names = {field.encode_name for field in msgspec.structs.fields(StorageLocation)}
    assert names - {"credentials"} | {"secretName"} == set(location)


# --- permissions --------------------------------------------------------------------------------


def rules() -> dict[str, list[dict[str, Any]]]:
    text = (CHART / "files/rbac.yaml").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", text))
    return found


def test_every_permission_has_a_name_of_its_own_and_a_reason() -> None:
    every = [rule for group in rules().values() for rule in group]
    names = [rule["name"] for rule in every]
    assert len(set(names)) == len(names)
    for rule in every:
        assert rule["why"].startswith("to ")
        assert set(rule) <= {"name", "why", "apiGroups", "resources", "resourceNames", "verbs"}


def test_no_permission_is_for_everything() -> None:
    for group in rules().values():
        for rule in group:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert rule["resources"] != ["secrets"]
