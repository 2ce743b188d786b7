"""Real daemons check for themselves where a job may persist to."""

from __future__ import annotations

import json
from pathlib import Path

from harness import JOB, RawCluster, RawJob
from waiting import wait_for

from holdfast_core.snapshots.membership import Tier
from holdfast_storage.sets import SetStore


def _nodes(cluster: RawCluster, tmp_path: Path) -> list[str]:
    location = json.dumps({"prefix": f"{tmp_path}/{{namespace}}"})
    cluster.plain = True  # daemons that can be trapped open storage in their own way
    return cluster.start_nodes(3, "--storage-location", location)


def test_a_job_whose_membership_names_others_storage_waits_with_an_error_that_names_its_own(
    cluster: RawCluster, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    job = RawJob(cluster, _nodes(cluster, tmp_path), tier=Tier(uri=str(theirs), every_steps=1))
    job.form()
    words = f"Namespace tests may use {tmp_path}/tests: choose one, or ask the platform team"
    wait_for("the refusal", lambda: words in str(job.daemon(0).job(JOB).get("problem")))
    assert not list(theirs.iterdir())


def test_a_job_within_its_location_is_persisted(cluster: RawCluster, tmp_path: Path) -> None:
    uri = f"{tmp_path}/tests/run1"
    job = RawJob(cluster, _nodes(cluster, tmp_path), tier=Tier(uri=uri, every_steps=1))
    job.form()
    job.start_trainers()
    job.train()
    wait_for("a complete set", lambda: list(SetStore(uri, JOB).complete()))
