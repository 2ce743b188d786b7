"""A job's settings of durable storage, what is refused of them, and what daemons are sent."""

from __future__ import annotations

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.persistence import tier_of
from holdfast_core.snapshots.membership import Tier


def job(persistence: object = None, restore: object = None) -> MoETrainingJob:
    spec: dict[str, object] = {
        "nodes": 2,
        "parallelism": {"dp": 2},
        "trainer": {
            "template": {
                "spec": {"containers": [{"name": "t", "command": ["python"], "image": "i"}]}
            }
        },
    }
    if persistence is not None:
        spec["persistence"] = persistence
    if restore is not None:
        spec["restore"] = restore
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "run1"},
            "spec": spec,
        }
    )


def tier(persistence: object, restore: object = None) -> Tier | None:
    spec = job(persistence, restore).spec
    return tier_of(spec.persistence, spec.restore)


def test_a_job_without_persistence_has_no_tier() -> None:
    assert tier(None) is None


def test_the_tier_has_the_values_of_the_job() -> None:
    given = {
        "uri": "s3://bucket/run1",
        "interval": {"minutes": 30},
        "keep": 5,
        "keepEvery": 1000,
        "bandwidth": "500M",
    }
    assert tier(given, {"from": "3.1200"}) == Tier(
        uri="s3://bucket/run1",
        every_s=1800.0,
        keep=5,
        keep_every=1000,
        bytes_per_s=500_000_000,
        restore_from="3.1200",
    )
    assert tier({"uri": "/mnt/shared", "interval": {"steps": 50}}) == Tier(
        uri="/mnt/shared", every_steps=50
    )
    assert tier({"uri": "file:///mnt"}, {"from": "latest"}) == Tier(uri="file:///mnt")


@pytest.mark.parametrize(
    ("persistence", "restore", "word"),
    [
        ({"uri": "copies/here"}, None, "not a valid path or URI for copies"),
        ({"uri": "file://mnt"}, None, "not a valid path or URI for copies"),
        ({"uri": "/mnt/../etc"}, None, "not a valid path or URI for copies"),
        ({"uri": "/mnt", "keep": 0}, None, "keep = 0"),
        ({"uri": "/mnt", "keepEvery": 0}, None, "keepEvery = 0"),
        ({"uri": "/mnt", "interval": {"minutes": 1, "steps": 2}}, None, "remove one of the two"),
        ({"uri": "/mnt", "bandwidth": "fast"}, None, "not an amount of bytes"),
        ({"uri": "/mnt", "bandwidth": 0}, None, "not an amount of bytes"),
        ({"uri": "/mnt"}, {"from": "yesterday"}, "not a generation"),
        (None, {"from": "3.1200"}, "no spec.persistence"),
    ],
)
def test_contradictions_are_refused_by_name(
    persistence: object, restore: object, word: str
) -> None:
    with pytest.raises(InvalidJobError, match=word.replace(".", "[.]")):
        job(persistence, restore)
