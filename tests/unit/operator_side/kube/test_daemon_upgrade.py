"""Daemons of an older version are replaced through the API, and events report it."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_api import FakeApi

from holdfast_core.snapshots.generations import Generation
from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import PODS
from holdfast_operator.kube.cluster.daemons import (
    DaemonPod,
    TemplateRevision,
    read_daemon,
    read_revision,
)
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.upgrade.daemon_upgrade import (
    ABSENT_S,
    CATCH_UP_S,
    REPORTED_AFTER_S,
    DaemonUpgrade,
)
from holdfast_operator.reconciler.observe.views import Event
from holdfast_operator.reconciler.upgrade_plan import JobRequirements

OWNER = [{"kind": "DaemonSet", "name": "holdfast-daemon", "uid": "ds"}]


def revision(number: int, text: str, owner: list[Object] | None = None) -> TemplateRevision:
    metadata = {
        "labels": {"controller-revision-hash": text},
        "ownerReferences": OWNER if owner is None else owner,
    }
    return read_revision({"metadata": metadata, "revision": number})


class Desk:
    """Daemons on a and b, of revision "old"; "new" is the newest."""

    def __init__(self) -> None:
        self.api, self.metrics, self.now = FakeApi(), OperatorMetrics(), 100.0
        self.pods: dict[str, DaemonPod] = {}
        for node in ("a", "b"):
            self.pod(node, "old")
        self.revisions = {"1": revision(1, "old"), "2": revision(2, "new")}
        self.jobs: list[JobRequirements] | None = []
        self.changed: list[set[str]] = []
        self.posted: list[tuple[str, Event]] = []
        self.upgrade = DaemonUpgrade(
            self.api,
            "hf",
            pods=lambda: self.pods,
            revisions=lambda: self.revisions,
            jobs=lambda: self.jobs,
            changed=lambda nodes: self.changed.append(set(nodes)),
            post=self.post,
            metrics=self.metrics,
            clock=lambda: self.now,
        )

    def post(self, about: Object, event: Event) -> None:
        self.posted.append((f"{about['kind']} {about['metadata']['name']}", event))

    def pod(self, node: str, version: str, *, ready: bool = True, begun: bool = True) -> None:
        name = f"daemon-{node}-{version}"
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": "hf",
            "uid": name,
            "labels": {"controller-revision-hash": version},
            "ownerReferences": OWNER,
        }
        status = {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"started": begun, "state": {}}],
        }
        raw = {"metadata": metadata, "spec": {"nodeName": node}, "status": status}
        self.api.put(PODS, raw)
        self.pods[node] = read_daemon(raw)

    def turn(self) -> list[str]:
        """The pods that one turn deletes."""
        before = len(self.api.requests)
        asyncio.run(self.upgrade.turn())
        return [name for verb, _, name in self.api.requests[before:] if verb == "delete"]

    def outdated(self) -> float | None:
        return self.metrics.registry.get_sample_value("holdfast_operator_daemons_outdated")


PAIR = JobRequirements(key="t.j", groups=(("a", "b"),), protected=Generation(epoch=1, step=5))
LATER = JobRequirements(key="t.j", groups=(("a", "b"),), protected=Generation(epoch=1, step=6))


def test_daemons_are_replaced_one_after_the_other_and_events_show_it() -> None:
    desk = Desk()
    desk.jobs = [PAIR]
    assert desk.turn() == ["daemon-a-old"]
    assert desk.outdated() == 2.0
    assert desk.changed == [{"a", "b"}]
    assert desk.turn() == []  # the watch has not shown the end of the first yet
    desk.pod("a", "new", ready=False, begun=False)
    assert desk.turn() == []
    desk.pod("a", "new")
    assert desk.turn() == []  # not protected anew yet
    desk.jobs = [LATER]
    assert desk.turn() == ["daemon-b-old"]
    desk.pod("b", "new", ready=False, begun=False)
    assert desk.turn() == []
    assert "DaemonsRenewed" not in {event.reason for _, event in desk.posted}
    desk.pod("b", "new")
    assert desk.turn() == []
    assert desk.outdated() == 0.0
    assert desk.upgrade.condition(("a", "b")) is None
    assert [event.reason for _, event in desk.posted] == [
        *("RenewingDaemon", "RenewingDaemon", "DaemonsRenewed")
    ]
    assert desk.posted[-1][1].message == "all 2 daemons are of revision new and ready"
    about, event = desk.posted[0]
    assert about == "DaemonSet holdfast-daemon"
    assert event.message == (
        "the daemon on a is replaced by one of revision new; 0 of 2 daemons run the new version"
    )


def test_a_job_that_saves_rarely_is_not_waited_for_without_end() -> None:
    desk = Desk()
    desk.jobs = [PAIR]
    desk.turn()
    desk.pod("a", "new")
    assert desk.turn() == []
    desk.now += CATCH_UP_S
    assert desk.turn() == ["daemon-b-old"]


def test_a_wait_is_reported_once_it_lasts() -> None:
    desk = Desk()
    desk.jobs = [JobRequirements(key="t.j", groups=(("a", "b"),), hold="it is not protected")]
    assert desk.turn() == []
    assert desk.posted == []
    desk.now += REPORTED_AFTER_S
    assert desk.turn() == []
    assert desk.posted[0][1].message == (
        "the daemon on a keeps its version: job t.j: it is not protected"
    )


def test_nothing_is_replaced_before_all_jobs_are_known() -> None:
    desk = Desk()
    desk.jobs = None
    assert desk.turn() == []
    desk.jobs = []
    assert desk.turn() == ["daemon-a-old"]


def test_a_daemon_that_never_started_is_replaced_at_once() -> None:
    desk = Desk()
    desk.pod("b", "old", ready=False, begun=False)
    desk.jobs = [JobRequirements(key="t.j", groups=(("a", "b"),), hold="it is not protected")]
    assert desk.turn() == ["daemon-b-old"]
    assert "at once, because it never started" in desk.posted[0][1].message


def test_the_first_of_a_new_version_is_alone_although_its_pod_is_not_there_yet() -> None:
    desk = Desk()
    assert desk.turn() == ["daemon-a-old"]
    del desk.pods["a"]
    assert desk.turn() == []
    desk.now += ABSENT_S  # the node is gone
    assert desk.turn() == ["daemon-b-old"]


def test_going_back_to_an_older_version_is_a_renewal_too() -> None:
    desk = Desk()
    desk.revisions = {"1": revision(3, "old"), "2": revision(2, "new")}
    desk.pod("a", "new")
    assert desk.turn() == ["daemon-a-new"]


def test_daemons_of_no_known_daemon_set_are_left_alone() -> None:
    desk = Desk()
    desk.revisions = {"1": revision(9, "new", owner=[{**OWNER[0], "uid": "another"}])}
    assert desk.turn() == []
    desk.revisions = {"1": revision(9, "new", owner=[])}
    assert desk.turn() == []


def test_a_deletion_that_is_refused_is_tried_again() -> None:
    desk = Desk()
    desk.api.refuse = ApiError("no", status=403)
    assert desk.turn() == ["daemon-a-old"]
    assert desk.turn() == ["daemon-a-old"]
    name = "holdfast_operator_action_failures_total"
    assert desk.metrics.registry.get_sample_value(name, {"action": "RenewDaemon"}) == 1.0
