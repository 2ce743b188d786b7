"""What `make cluster` prints, and a person then types, on a cluster without Holdfast; and then new
versions of the daemons, which come to the nodes by the operator's hand while that job trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from directions import directions
from holdfast_system import CHART, NAMESPACE, RELEASE, Holdfast, Job
from machine import ROOT, run, wait_for

WAIT_S = 240.0
THREADS = ("--set", "daemon.threads=3")

Document = dict[str, Any]

pytestmark = pytest.mark.slow


class Installation:
    """The release and the job of the printed commands."""

    def __init__(self, cluster: Cluster, files: Path) -> None:
        self.cluster, self.holdfast = cluster, Holdfast(cluster)
        self.job = Job(cluster, {"metadata": {"name": "moe"}})
        self._values = files / "values.yaml"
        self.printed = run("bash", "-euc", _printed(directions(cluster, files)), cwd=ROOT)

    def upgrade(self, *settings: str) -> str:
        """Upgrade the release; its notes."""
        words = ("upgrade", RELEASE, CHART, "--namespace", NAMESPACE, "--values", self._values)
        return self.cluster.helm(*words, "--wait=legacy", "--timeout", "180s", *settings)

    def daemons(self) -> dict[str, Document]:
        """Node → its daemon's pod; without those that are being ended."""
        label = "app.kubernetes.io/component=daemon"
        found = self.cluster.get("pods", "-n", NAMESPACE, "-l", label)["items"]
        alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return {pod["spec"]["nodeName"]: pod for pod in alive if "nodeName" in pod["spec"]}

    def uids(self) -> dict[str, str]:
        return {node: pod["metadata"]["uid"] for node, pod in self.daemons().items()}

    def all_are_new(self) -> bool:
        nodes = set(self.cluster.nodes)
        ready = {node for node, pod in self.daemons().items() if _is_ready(pod)}
        return self.holdfast.renewed() == len(nodes) and ready == nodes

    def renewals(self, part: str) -> list[str]:
        """Notes of the DaemonSet's events about replacing daemons that contain `part`."""
        chosen = "regarding.kind=DaemonSet,reason=RenewingDaemon"
        words = ("events.events.k8s.io", "-n", NAMESPACE, "--field-selector", chosen)
        notes = [event["note"] for event in self.cluster.get(*words)["items"]]
        return [note for note in notes if part in note]

    def outdated(self) -> str:
        """Message of the job's condition about older daemons; empty when there are none."""
        return str(self.job.condition("DaemonsOutdated").get("message", ""))

    def protected_after(self, before: Document) -> Document:
        """The job's status, once it is protected anew."""
        step = before["protectedStep"]
        return self.job.wait(
            "training to go on", lambda s: s.get("protectedStep", 0) > step, WAIT_S
        )


def _printed(text: str) -> str:
    """The indented lines of all that comes before `Break it`."""
    lines = text.partition("Break it:")[0].splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("  "))


def _is_ready(pod: Document) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)


@pytest.fixture(scope="module")
def installation(
    holdfast: Holdfast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """On the cluster without the release, which is put back afterwards."""
    cluster = holdfast.cluster
    holdfast.uninstall()
    try:
        yield Installation(cluster, tmp_path_factory.mktemp("printed"))
    finally:
        cluster.kubectl("delete", "moejob", "moe", "--ignore-not-found", "--timeout=120s")
        holdfast.install()
        for node in cluster.nodes:
            holdfast.wait_daemon(node)


def test_what_make_cluster_prints_works_as_it_is_printed(installation: Installation) -> None:
    assert "Succeeded" in installation.printed  # of `helm test`
    assert "default/moe" in installation.printed  # of `holdfast status`
    installation.job.wait(
        "the job to be protected", lambda s: s.get("protectedStep", 0) > 0, WAIT_S
    )
    assert installation.job.status()["restarts"] == 0
    assert installation.outdated() == ""


def test_a_new_version_takes_one_daemon_of_a_group_at_a_time_and_training_goes_on(
    installation: Installation,
) -> None:
    before, uids = installation.job.status(), installation.uids()
    members = {member["node"] for member in before["members"]}
    served = set(uids.values())
    seen: list[set[str]] = []
    conditions: list[str] = []

    def renewed() -> bool:
        pods = installation.daemons()
        served.update(pod["metadata"]["uid"] for pod in pods.values() if _is_ready(pod))
        there = {node for node, pod in pods.items() if pod["metadata"]["uid"] in served}
        seen.append(members - there)
        conditions.append(installation.outdated())
        return installation.all_are_new() and not conditions[-1]

    notes = installation.upgrade(*THREADS)
    wait_for("all daemons to be new", renewed, WAIT_S)
    (events,) = (line.split() for line in notes.splitlines() if " events --for " in line)
    assert "RenewingDaemon" in installation.cluster.kubectl(*events[1:])
    assert not set(installation.uids().values()) & set(uids.values())
    assert max(map(len, seen)) == 1
    assert any("run an older version" in each for each in conditions)
    assert len(installation.renewals("is replaced by one of revision")) >= len(uids)
    after = installation.protected_after(installation.job.status())
    assert (after["epoch"], after["recoveries"]) == (before["epoch"], before["recoveries"])


def test_a_version_whose_image_is_nowhere_takes_one_daemon_which_the_next_heals_at_once(
    installation: Installation,
) -> None:
    before, uids = installation.job.status(), installation.uids()
    installation.upgrade(*THREADS, "--set", "daemon.image=localhost/none:1")
    waits = "the first of the new version, is not ready yet"
    wait_for("the job's condition", lambda: waits in installation.outdated(), WAIT_S)
    kept = {node: uid for node, uid in installation.uids().items() if uids[node] == uid}
    assert len(kept) == len(uids) - 1
    installation.upgrade(*THREADS)
    wait_for("the daemon to be healed", installation.all_are_new, WAIT_S)
    assert installation.renewals("at once, because it never started")
    assert kept.items() <= installation.uids().items()
    after = installation.protected_after(installation.job.status())
    assert (after["epoch"], after["recoveries"]) == (before["epoch"], before["recoveries"])
