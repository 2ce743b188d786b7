"""A field is added to a copy of the sources as CONTRIBUTING.md describes, and found everywhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from changed_sources import ROOT, copy_packages, insert_member, run_with

SECTION = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .partition("\n## A new field of a job\n")[2]
    .partition("\n## ")[0]
)
DECLARATION, RULE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
PACKAGES = ("core/holdfast_core", "operator/holdfast_operator", "trainer_sdk/holdfast")

FIND = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from holdfast_operator.crd.__main__ import main

def generated(*arguments):
    with redirect_stdout(StringIO()) as out:
        assert main(list(arguments)) == 0
    return out.getvalue()

page, document = json.load(sys.stdin)
resource, reference = generated(), generated("--reference", page)
Path("holdfast/_job_settings.py").write_text(generated("--settings"), encoding="utf-8")

import holdfast
from holdfast._environment import read_environment
from holdfast._init import _complete_settings as complete
from holdfast_core.errors import HoldfastError
from holdfast_core.job.parsing import parse_job

def refused(value, **spec):
    snapshot = {"copyPauseMs": value} | spec.pop("snapshot", {})
    try:
        parse_job({**document, "spec": {**document["spec"], "snapshot": snapshot, **spec}})
    except HoldfastError as error:
        return str(error)

document["spec"]["snapshot"] = {"copyPauseMs": 5}
job = parse_job(document)
environment = read_environment(job.variables)
try:
    holdfast.Settings(copy_pause_ms=-1)
except HoldfastError as error:
    wrong_setting = str(error)
print(json.dumps({
    "resource": resource,
    "reference": reference,
    "parsed": job.spec.snapshot.copy_pause_ms,
    "variables": job.variables,
    "beyond": refused(1_001),
    "broken": refused(5, snapshot={"policy": {"type": "Selective"}}),
    "external": refused(5, trainer={"external": True}),
    "of the job": complete(None, environment).copy_pause_ms,
    "of the script": complete(holdfast.Settings(copy_pause_ms=7), environment).copy_pause_ms,
    "of neither": complete(None, read_environment({})).copy_pause_ms,
    "wrong setting": wrong_setting,
    "help": holdfast.Settings.__mro__[1].__annotations__["copy_pause_ms"],
}))
"""


def declare(sources: Path) -> None:
    """Write what the section says where it says it."""
    place = re.search(r"in `class (\w+)` of\s`core/(\S+)`, after its last field", SECTION)
    assert place is not None
    insert_member(sources / place[2], place[1], ast.AnnAssign, DECLARATION)
    rules = sources / "holdfast_core/job/rules.py"
    before, opening, after = rules.read_text(encoding="utf-8").partition('    "spec": (\n')
    assert opening
    rules.write_text(f"{before}{opening}{RULE.rstrip()},\n{after}", encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What there is of the field once it is declared."""
    sources = tmp_path_factory.mktemp("sources")
    copy_packages(PACKAGES, sources)
    declare(sources)
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "nodes": 2,
            "parallelism": {"dp": 2},
            "trainer": {"template": {"spec": {"containers": [{"command": ["x"]}]}}},
        },
    }
    return run_with(sources, FIND, str(ROOT / "docs" / "job.md"), document)


def test_the_parser_reads_it_and_refuses_it_in_its_own_words(found: dict[str, Any]) -> None:
    assert "`snapshot.copyPauseMs: 5`" in SECTION and found["parsed"] == 5
    assert (
        "spec.snapshot.copyPauseMs = 1001: expected int <= 1000; give milliseconds between the "
        "copies of two tensors, for example 5" in found["beyond"]
    )


def test_the_resource_and_the_reference_describe_it(found: dict[str, Any]) -> None:
    says = "Milliseconds between the copies of two tensors. Leaves the bus to training meanwhile."
    (row,) = (line for line in found["reference"].splitlines() if says in line)
    assert row == f"| `snapshot.copyPauseMs` | integer, 0 to 1000 | `0` | {says} |"
    part = found["resource"].partition("copyPauseMs:\n")[2][:400]
    assert re.sub(r"\s+", " ", part).startswith(
        f" description: {says} type: integer format: int64 minimum: 0 maximum: 1000 default: 0"
    )


def test_a_pod_gets_it_and_the_session_takes_it_unless_the_script_decides(
    found: dict[str, Any],
) -> None:
    assert "`HOLDFAST_COPY_PAUSE_MS=5`" in SECTION
    assert found["variables"]["HOLDFAST_COPY_PAUSE_MS"] == "5"
    assert (found["of the job"], found["of the script"], found["of neither"]) == (5, 7, 0)
    assert found["help"] == "int | None"
    assert found["wrong setting"].startswith("copy_pause_ms=-1: expected int >= 0; give millisec")


def test_its_rules_are_those_of_the_api_server_and_of_the_parser(found: dict[str, Any]) -> None:
    rules = re.sub(r"\s+", " ", found["resource"])
    assert "!self.trainer.external || !(self.snapshot.copyPauseMs != 0)" in rules
    assert "self.snapshot.copyPauseMs == oldSelf.snapshot.copyPauseMs" in rules
    assert "self.snapshot.copyPauseMs == 0 || self.snapshot.policy.type == 'Full'" in rules
    assert "spec.snapshot.copyPauseMs = 5: the policy is Selective, whose" in found["broken"]
    assert "needs pods that Holdfast makes" in found["external"]
