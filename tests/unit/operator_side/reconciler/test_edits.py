"""What an edit of a job does: the table in docs/job.md, against what is done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from virtual_world import World, make_job, running

from holdfast_core.job.parsing import parse_job
from holdfast_core.job.rules import RULES

DOCUMENT = (Path(__file__).parents[4] / "docs" / "job.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[tuple[list[str], str]]:
    """Rows of the table below a heading: the fields of the first cell, and the last cell."""
    text = DOCUMENT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall("`([^`]+)`", first), rest[-1]) for first, *rest in lines]


EDITS = {field: text for fields, text in rows("What an edit does") for field in fields}


def edit_of(field: str) -> str | None:
    """Text of the row that says most exactly what an edit of the field does; None without one."""
    parts = field.replace("[]", "").split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((EDITS[name] for name in names if name in EDITS), None)


def test_the_table_says_what_an_edit_of_every_field_does() -> None:
    fields = [field for names, _ in rows("spec") for field in names[:1]]
    assert len(fields) > 80
    inner = {field for field in fields if any(f.startswith(f"{field}.") for f in fields)}
    assert [field for field in fields if field not in inner and edit_of(field) is None] == []
    assert [field for field in EDITS if field not in fields] == []


def test_every_field_of_which_the_table_says_so_is_refused_by_the_api_server() -> None:
    fixed = [
        f"{path}{rule.field}".removeprefix("spec").removeprefix(".")
        for path, rules in RULES.items()
        for rule in rules
        if rule.changes
    ]
    for field in (names[0] for names, _ in rows("spec")):
        refused = any(f"{field}.".startswith(f"{part}.") for part in fixed)
        inner = any(part.startswith(f"{field}.") for part in fixed)
        assert inner or refused == str(edit_of(field)).startswith("is refused"), field


def edited(path: str, value: Any) -> World:
    """A job that was suspended, and is to run with another value."""
    world = running(make_job(spares=0))
    world.job = make_job(spares=0, suspend=True)
    world.settle(2.0)
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "job"},
        "spec": {
            "nodes": 4,
            "parallelism": {"dp": 4},
            "redundancy": {"type": "RAIM5"},
            "failurePolicy": {"spares": 0},
            "trainer": {"template": {"spec": {"containers": [{"name": "t", "command": ["x"]}]}}},
        },
    }
    *parents, last = path.split(".")
    at: Any = document["spec"]
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    world.job = parse_job(document)
    return world


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("snapshot.policy.type", "PartialExperts"),
        ("snapshot.interval.steps", "auto"),
        ("snapshot.compareReplicasEvery", 1),
        ("snapshot.storeComputeWeights", False),
        ("snapshot.requireProtection", True),
        ("snapshot.memoryPerNode", "64Mi"),
        ("snapshot.slots", 2),
        ("redundancy.bandwidth", "500M"),
        ("trainer.template.spec.nodeSelector", {"gpu": "h200"}),
        ("elastic.seatsPerRank", 8),
        ("scheduling.gang", "Volcano"),
        ("persistence.uri", "/store"),
        ("minNodes", 3),
        ("failurePolicy.maxRestarts", 3),
    ],
)
def test_a_suspended_job_goes_on_from_its_snapshots_after_an_edit(path: str, value: Any) -> None:
    world = edited(path, value)
    world.settle(3.0)
    assert not world.dropped and world.phase() == "Running"
    assert "from generation 1.10" in world.messages("Running")[-1]
    assert "over" not in str(edit_of(path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("parallelism", {"dp": 2, "tp": 2}),
        ("nprocPerNode", 1),
        ("redundancy.type", "RAIM6"),
        ("redundancy.raim5", {"groupSize": 2}),
    ],
)
def test_a_suspended_job_starts_over_after_an_edit_of_its_shape(path: str, value: Any) -> None:
    if path == "nprocPerNode":
        world = running(make_job(spares=0, nproc=2))
        world.job = make_job(spares=0, nproc=2, suspend=True)
        world.settle(2.0)
        world.job = make_job(spares=0)
    else:
        world = edited(path, value)
    world.protected = None
    world.settle(5.0)
    assert world.dropped and len(world.messages("Reshaped")) == 1
    text = str(edit_of(path))
    assert "starts training over" in text or "training starts over" in text


def test_limits_take_effect_with_the_next_epoch_without_a_suspension() -> None:
    world = running()
    assert (world.membership.memory_bytes, world.membership.slots) == (0, 0)
    world.job = make_job(spec={"snapshot": {"memoryPerNode": "64Mi", "slots": 2}})
    world.settle(5.0)
    assert (world.membership.epoch, world.membership.memory_bytes) == (1, 0)
    world.lose_rank(0)
    world.settle(3.0)
    found = world.membership
    assert (found.epoch, found.memory_bytes, found.slots) == (2, 64 << 20, 2)
    assert world.phase() == "Running"


def test_another_bandwidth_takes_effect_when_the_job_is_resumed() -> None:
    world = edited("redundancy.bandwidth", "500M")
    world.settle(3.0)
    assert world.membership.protection_bytes_s == 500_000_000
