"""A policy is added to a copy of the sources as CONTRIBUTING.md describes, and works everywhere."""

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
    .partition("\n## A new policy\n")[2]
    .partition("\n## ")[0]
)
MODULE, MEMBER = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
PACKAGES = (
    "cli/holdfast_cli",
    "core/holdfast_core",
    "operator/holdfast_operator",
    "trainer_sdk/holdfast",
)

RESOURCE = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO

from holdfast_cli.main import main as holdfast
from holdfast_core.errors import HoldfastError
from holdfast_core.job.parsing import parse_job
from holdfast_operator.crd.__main__ import main as crd

page, document, job_file = json.load(sys.stdin)

def output(main, *arguments):
    with redirect_stdout(StringIO()) as out:
        main(list(arguments))
    return out.getvalue()

def job(policy):
    return {**document, "spec": {**document["spec"], "snapshot": {"policy": policy}}}

def refused(policy):
    try:
        parse_job(job(policy))
    except HoldfastError as error:
        return str(error)

asked = {"type": "Oldest", "oldest": {"experts": 2}}
sizes = ["--expert-bytes", "335M", "--other-bytes", "8G", "--step-seconds", "2"]
failing = ["--node-mtbf-days", "0.5", "--process-mtbf-days", "0.5"]
with open(job_file, "w") as file:
    json.dump(job(asked), file)
print(json.dumps({
    "resource": output(crd),
    "reference": output(crd, "--reference", page),
    "parsed": repr(parse_job(job(asked)).spec.snapshot.policy.chosen),
    "variables": parse_job(job(asked)).variables,
    "beyond": refused({"type": "Oldest", "oldest": {"experts": 1_001}}),
    "another type": refused({"type": "Full", "oldest": {}}),
    "too many": refused({"type": "Oldest", "oldest": {"experts": 17}}),
    "plan": output(holdfast, "plan", job_file, *sizes, *failing),
}))
"""

TRAINING = """
import json, os, sys
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import HoldfastError
from holdfast_core.job.policies.oldest import Oldest

folder, variables = json.load(sys.stdin)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.norm = nn.Linear(64, 1, bias=False)

def begin(epoch, policy):
    model = nn.Module()
    model.layers = nn.ModuleList([Layer()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        daemon=FakeDaemon(Path(folder), epoch=epoch),
        settings=holdfast.Settings(policy=policy),
    )
    return model, optimizer, session

def values(model):
    return {name: parameter[0, 0].item() for name, parameter in model.named_parameters()}

try:
    holdfast.Settings(policy=Oldest(experts=0))
except HoldfastError as error:
    wrong = str(error)
os.environ.update(variables)  # as in a pod of a job that asks for it
model, optimizer, session = begin(1, None)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
for step in range(1, 4):  # each step adds 1 to everything
    for parameter in model.parameters():
        parameter.grad = -torch.ones_like(parameter)
    optimizer.step()
    session.count_tokens(0, [10, 10, 10])
    session.save(step).protected.result(30)
session.close()
model, _, session = begin(2, Oldest(experts=2))
step = session.restore()
session.close()
print(json.dumps({"wrong": wrong, "step": step, "values": values(model)}))
"""


def declare(sources: Path) -> None:
    """Write what the section says where it says it."""
    folder = re.search(r"in a module of its own in `core/(\S+)`", SECTION)
    name = re.search(r"For example, `(\w+)\.py`:", SECTION)
    place = re.search(r"in `class (\w+)` of\s`core/(\S+)`, after its last member", SECTION)
    assert folder is not None and name is not None and place is not None
    (sources / folder[1] / f"{name[1]}.py").write_text(MODULE, encoding="utf-8")
    path = sources / place[2]
    insert_member(path, place[1], ast.Assign, MEMBER)
    text = path.read_text(encoding="utf-8")
    package = folder[1].replace("/", ".")
    class_name = MEMBER.partition(" = ")[2].strip()
    line = f"from {package}.{name[1]} import {class_name}\n"
    before = f"from {package}.policy import "
    assert before in text
    path.write_text(text.replace(before, line + before, 1), encoding="utf-8")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the sources that has the policy."""
    folder = tmp_path_factory.mktemp("sources")
    copy_packages(PACKAGES, folder)
    declare(folder)
    return folder


@pytest.fixture(scope="module")
def found(sources: Path) -> dict[str, Any]:
    """What there is of the policy without a trainer."""
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "nodes": 4,
            "parallelism": {"dp": 4, "ep": 4},
            "model": {"numExperts": 8, "numMoELayers": 2},
            "trainer": {"template": {"spec": {"containers": [{"command": ["x"]}]}}},
        },
    }
    reference, job_file = str(ROOT / "docs" / "job.md"), str(sources / "job")
    return run_with(sources, RESOURCE, reference, document, job_file)


def test_the_parser_reads_it_and_refuses_it_in_its_own_words(found: dict[str, Any]) -> None:
    assert "`policy: {type: Oldest, oldest: {experts: 2}}`" in SECTION
    assert found["parsed"] == "Oldest(loss_limit=0.05, recompute=False, experts=2)"
    assert (
        "spec.snapshot.policy.oldest.experts = 1001: expected int <= 1000; give the number of "
        "experts, over all layers, that a snapshot captures, for example 6" in found["beyond"]
    )
    assert (
        "spec.snapshot.policy.type is Full; remove it, or set the type to Oldest"
        in (found["another type"])
    )
    assert (
        "spec.snapshot.policy.oldest.experts = 17: the model has only 16 experts"
        in (found["too many"])
    )


def test_the_resource_and_the_reference_describe_it(found: dict[str, Any]) -> None:
    (row,) = (line for line in found["reference"].splitlines() if "policy.type` | `Full`" in line)
    assert "or `Oldest`" in row
    assert "Oldest: the experts captured the longest ago, and everything else." in row
    assert (
        "| `snapshot.policy.oldest.experts` | integer, 1 to 1000 | `1` | The number of"
        in (found["reference"])
    )
    resource = re.sub(r"\s+", " ", found["resource"])
    assert "self.type == 'Oldest' || !has(self.oldest)" in resource.replace("''", "'")
    assert "self.snapshot.policy.oldest.recompute" in resource


def test_the_plan_compares_it_by_what_it_chooses(found: dict[str, Any]) -> None:
    """Two of 16 experts at a time, the oldest first: each is captured in every eighth snapshot, as
    in turn, and after a failure experts lack (8 - 1) / 2 snapshots on average."""
    rows = {
        name: line.split()[2:]
        for line in found["plan"].splitlines()
        for name in re.findall(r"^(Oldest 2|PartialExperts 1) +[0-9]", line)
    }
    assert rows["Oldest 2"][-1] == rows["PartialExperts 1"][-1]


@pytest.mark.slow
def test_a_pod_gets_it_and_its_trainer_captures_what_it_chooses(
    found: dict[str, Any], sources: Path
) -> None:
    trained = run_with(sources, TRAINING, str(sources / "daemon"), found["variables"])
    assert trained["wrong"].startswith("policy=Oldest(") and "experts" in trained["wrong"]
    assert trained["step"] == 3
    # The first save captures all; the second the experts 0 and 1, the third 2 and, of the others,
    # the one with the lower number.
    assert trained["values"] == {
        "layers.0.experts.0.weight": 3.0,
        "layers.0.experts.1.weight": 2.0,
        "layers.0.experts.2.weight": 3.0,
        "layers.0.norm.weight": 3.0,
    }
