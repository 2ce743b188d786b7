"""New versions of the daemons come to the nodes by the operator's hand, while a job trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jobs
import pytest
from cluster import Cluster
from holdfast_system import NAMESPACE, Holdfast, Job
from machine import wait_for

STEPS = 100_000
"""More than any test waits for."""
WAIT_S = 240.0
PROTECTED: dict[str, Any] = {"daemon__updateStrategy__type": "Protected"}

Document = dict[str, Any]


class Daemons:
    """Of all nodes, with whom their DaemonSet leaves them to."""

    def __init__(self, holdfast: Holdfast) -> None:
        self.holdfast, self.cluster = holdfast, holdfast.cluster

    def pods(self) -> dict[str, Document]:
        """Node → its daemon's pod; without those that are being ended."""
        label = "app.kubernetes.io/component=daemon"
        found = self.cluster.get("pods", "-n", NAMESPACE, "-l", label)["items"]
        alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return {pod["spec"]["nodeName"]: pod for pod in alive if "nodeName" in pod["spec"]}

    def uids(self) -> dict[str, str]:
        return {node: pod["metadata"]["uid"] for node, pod in self.pods().items()}

    def away(self) -> set[str]:
        """Nodes whose daemons are not ready."""
        ready = {
            node
            for node, pod in self.pods().items()
            for each in pod["status"].get("conditions", ())
            if (each["type"], each["status"]) == ("Ready", "True")
        }
        return set(self.cluster.nodes) - ready

    def all_are_new(self) -> bool:
        return self.holdfast.renewed() == len(self.cluster.nodes) and not self.away()

    def told(self, reason: str) -> list[str]:
        """What the events of the DaemonSet with this reason say."""
        chosen = f"regarding.kind=DaemonSet,reason={reason}"
        found = self.cluster.get(
            "events.events.k8s.io", "-n", NAMESPACE, "--field-selector", chosen
        )
        return [event["note"] for event in found["items"]]


@pytest.fixture(scope="module")
def daemons(holdfast: Holdfast) -> Iterator[Daemons]:
    found = Daemons(holdfast)
    holdfast.install(**PROTECTED)
    wait_for("all daemons to be new", found.all_are_new, WAIT_S)
    yield found
    holdfast.install()
    for node in holdfast.cluster.nodes:
        holdfast.wait_daemon(node)


@pytest.fixture(scope="module")
def training(cluster: Cluster, daemons: Daemons) -> Iterator[Job]:
    job = Job(cluster, jobs.trainer_job("renewal", steps=STEPS))
    job.apply()
    job.wait("the job to be protected", lambda s: s.get("protectedStep", 0) > 0, WAIT_S)
    yield job
    job.delete()


def _followed(job: Job, before: Document) -> Document:
    """The status, once training has gone on and is protected as it was."""
    return job.wait(
        "training to go on", lambda s: s.get("protectedStep", 0) > before["protectedStep"], WAIT_S
    )


def test_a_new_version_takes_one_daemon_of_a_group_at_a_time_and_training_goes_on(
    daemons: Daemons, training: Job
) -> None:
    before, uids = training.status(), daemons.uids()
    members = {member["node"] for member in before["members"]}
    seen: list[set[str]] = []
    told: list[str] = []

    def renewed() -> bool:
        seen.append(daemons.away() & members)
        told.append(training.condition("DaemonsOutdated").get("message", ""))
        return daemons.all_are_new() and not told[-1]

    daemons.holdfast.install(**PROTECTED, daemon__threads="3")
    wait_for("all daemons to be new", renewed, WAIT_S)
    assert not set(daemons.uids().values()) & set(uids.values())
    assert max(map(len, seen)) == 1
    assert any("run an older version" in each for each in told)
    assert len(daemons.told("RenewingDaemon")) >= len(uids)
    after = _followed(training, training.status())
    assert (after["epoch"], after["recoveries"]) == (before["epoch"], before["recoveries"])


def test_a_version_whose_image_is_nowhere_takes_one_daemon_which_the_next_heals_at_once(
    daemons: Daemons, training: Job
) -> None:
    before, uids = training.status(), daemons.uids()
    with_image = {**PROTECTED, "daemon__threads": "3"}
    daemons.holdfast.install(**with_image, daemon__image="localhost/none:1")
    told = "the first of the new version, is not ready yet"
    wait_for(
        "the job to be told why its daemons are old",
        lambda: told in training.condition("DaemonsOutdated").get("message", ""),
        WAIT_S,
    )
    (broken,) = daemons.away()
    assert {n: u for n, u in daemons.uids().items() if n != broken} == {
        n: u for n, u in uids.items() if n != broken
    }
    daemons.holdfast.install(**with_image)
    wait_for("the daemon to be healed", daemons.all_are_new, WAIT_S)
    assert any("because it never started up" in each for each in daemons.told("RenewingDaemon"))
    after = _followed(training, training.status())
    assert (after["epoch"], after["recoveries"]) == (before["epoch"], before["recoveries"])
