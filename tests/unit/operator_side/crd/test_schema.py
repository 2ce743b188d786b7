"""The resource that is written from the job's types. A real API server judges it in
`tests/cluster/test_crd.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from invalid_jobs import BASE, SMALL

from holdfast_core.job.parsing import parse_job
from holdfast_core.job.rules import RULES
from holdfast_operator.crd.__main__ import definition_text, main
from holdfast_operator.crd.reference import MARK, page
from holdfast_operator.crd.schema import job_schema, schema_at


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What an API server makes of `value`."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), part) for part in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: part["default"] for name, part in properties.items() if "default" in part}
    return {
        name: with_defaults(properties.get(name, {}), part)
        for name, part in {**filled, **value}.items()
    }


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def test_every_field_is_described() -> None:
    schema = job_schema()
    parts = [("spec", schema_at(schema, "spec")), ("status", schema_at(schema, "status"))]
    bare = [
        p for top, part in parts for p, field in fields(part, top) if "description" not in field
    ]
    assert bare == []


def test_no_rule_compares_a_double_with_an_integer() -> None:
    """An API server refuses the whole resource: CEL has no `==` of the two."""
    schema = schema_at(job_schema(), "spec")
    doubles = {p.rpartition(".")[2] for p, f in fields(schema, "") if f.get("type") == "number"}
    compared = [
        (name, number)
        for rules in RULES.values()
        for rule in rules
        for name, number in re.findall(r"\.(\w+) (?:==|!=) (-?\d[\d.]*)", rule.rule)
        if name in doubles
    ]
    assert "repeatStepsShare" in dict(compared)
    assert [each for each in compared if "." not in each[1]] == []


@pytest.mark.parametrize("document", [BASE, SMALL], ids=["base", "small"])
def test_the_defaults_of_the_schema_are_those_of_a_local_run(document: dict[str, Any]) -> None:
    filled = with_defaults(schema_at(job_schema(), "spec"), document["spec"])
    plain = msgspec.json.decode(msgspec.json.encode(parse_job(document).spec))
    assert filled == without_nulls(plain)


def test_a_document_with_the_defaults_of_the_schema_is_the_same_job() -> None:
    filled = with_defaults(schema_at(job_schema(), "spec"), SMALL["spec"])
    assert parse_job({**SMALL, "spec": filled}) == parse_job(SMALL)


def test_the_resource_is_small_enough_for_kubectl_apply() -> None:
    """It keeps the object as JSON in an annotation; all of them may have 256 KiB together."""
    kept = json.dumps(yaml.safe_load(definition_text()), separators=(",", ":"))
    assert len(kept.encode()) < 128 * 1024


def test_no_field_is_a_word_that_yaml_reads_as_something_else() -> None:
    schema = job_schema()
    names = [path.rsplit(".", 1)[1] for path, _ in fields(schema_at(schema, "spec"), "spec")]
    assert [name for name in names if yaml.safe_load(name) != name] == []


def test_the_resource_is_written_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "CustomResourceDefinition"


def test_the_introduction_of_the_page_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Mine\n\n{MARK}\nwritten last year\n", encoding="utf-8")
    assert main(["--reference", str(path)]) == 0
    written = capsys.readouterr().out
    assert written.startswith(f"# Mine\n\n{MARK}\n## spec\n")
    assert "| `nodes` | integer, 1 to 100000 | required | The number of nodes." in written
    assert "written last year" not in written


def test_a_page_without_the_mark_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="after which the reference goes"):
        page("# Mine\n")


def test_other_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--reference"]) == 2
    assert "usage: python -m holdfast_operator.crd" in capsys.readouterr().err
