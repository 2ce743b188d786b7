"""Nodes that fail again and again are closed and opened through the API."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest
from fake_api import FakeApi
from samples import make_job

from holdfast_core.node_failures import HALF_LIFE_S, FailureKind, NodeFailure
from holdfast_core.suspect_nodes import SuspectPolicy
from holdfast_operator.kube.client.api import FORBIDDEN, ApiError, Object
from holdfast_operator.kube.client.resources import CONFIG_MAPS, NODES, SUSPECT
from holdfast_operator.kube.cluster.node_record import NodeRecord
from holdfast_operator.kube.cluster.nodes import read_node, unfit, wants_of
from holdfast_operator.kube.cluster.suspects import SuspectNodes
from holdfast_operator.reconciler.observe.views import Event

OTHER = {"key": "gpu", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
TAINT, CORDON = SuspectPolicy.TAINT, SuspectPolicy.CORDON


class Desk:
    """Four nodes, of which each has a daemon unless a test says otherwise."""

    def __init__(self, policy: SuspectPolicy = TAINT) -> None:
        self.api, self.now = FakeApi(), 1.7e9
        self.api.put(CONFIG_MAPS, {"metadata": {"name": "record", "namespace": "hf"}})
        for name in ("n0", "n1", "n2", "n3"):
            self.put(name, {"taints": [OTHER]})
        self.training: Collection[str] = {"n0", "n1", "n2", "n3"}
        self.posted: list[tuple[str, Event]] = []
        self.start(policy)

    def start(self, policy: SuspectPolicy) -> None:
        """Begin to lead, as another replica does."""
        self.record = NodeRecord(self.api, namespace="hf", name="record", wall=lambda: self.now)
        self.suspects = SuspectNodes(
            self.api,
            policy,
            self.record,
            nodes=lambda: [
                read_node(body) for key, body in self.api.objects.items() if key[0] == "nodes"
            ],
            training=lambda: self.training,
            post=lambda about, event: self.posted.append((about["metadata"]["name"], event)),
        )

    def put(self, name: str, spec: Object, **annotations: str) -> None:
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": name, "annotations": annotations}
        self.api.put(NODES, {"metadata": metadata, "spec": spec, "status": ready})

    def fails(self, *names: str) -> None:
        for epoch, job in enumerate(("team.a", "team.a", "team.b")):
            failure = NodeFailure(
                kind=FailureKind.LOST_NODE, job=job, epoch=epoch, at=self.now - 3600.0 * epoch
            )
            self.record.note([(name, failure) for name in names])

    def apply(self) -> None:
        asyncio.run(self.record.synchronise())
        asyncio.run(self.suspects.apply())

    def node(self, name: str) -> tuple[Any, Any, Any]:
        """(taints, unschedulable, annotation)."""
        body = self.api.objects["nodes", "", name]
        spec, annotations = body["spec"], body["metadata"]["annotations"]
        return spec.get("taints"), spec.get("unschedulable"), annotations.get(SUSPECT)

    def reasons(self) -> list[tuple[str, str]]:
        return [(name, event.reason) for name, event in self.posted]


@pytest.mark.parametrize(
    ("policy", "closed"),
    [
        (TAINT, ([OTHER, {"key": SUSPECT, "effect": "NoSchedule"}], None, "Taint")),
        (CORDON, ([OTHER], True, "Cordon")),
    ],
)
def test_a_node_is_closed_once_and_opens_when_its_failures_have_faded(
    policy: SuspectPolicy, closed: object
) -> None:
    desk = Desk(policy)
    desk.fails("n2")
    desk.apply()
    assert desk.node("n2") == closed
    ((name, event),) = desk.posted
    assert (name, event.reason, event.warning) == ("n2", "NodeSuspected", True)
    assert "after 3 failures in 2 hours; `holdfast nodes` shows them" in event.message
    desk.start(policy)  # the next replica finds it like that
    desk.apply()
    assert desk.node("n2") == closed and len(desk.posted) == 1
    desk.now += 5 * HALF_LIFE_S
    desk.apply()
    assert desk.node("n2") == ([OTHER], None, None)
    assert desk.reasons() == [("n2", "NodeSuspected"), ("n2", "NodeOpened")]


def test_jobs_of_holdfast_may_still_use_a_tainted_node_and_no_cordoned_one() -> None:
    wants = wants_of(make_job())
    for policy, why in ((TAINT, ""), (CORDON, "cordoned")):
        desk = Desk(policy)
        desk.put("n2", {})
        desk.fails("n2")
        desk.apply()
        node = read_node(desk.api.objects["nodes", "", "n2"])
        assert node.closed and unfit(node, wants, ()) == why


def test_nothing_is_opened_before_the_record_has_been_read() -> None:
    desk = Desk()
    desk.fails("n2")
    desk.apply()
    desk.start(TAINT)
    desk.api.refuse = ApiError("not now", status=500)
    desk.apply()
    assert desk.node("n2")[2] == "Taint"
    del desk.api.objects["configmaps", "hf", "record"]
    desk.start(TAINT)
    desk.apply()
    assert desk.node("n2")[2] == "Taint"


def test_the_cordon_of_somebody_else_stays() -> None:
    desk = Desk(CORDON)
    desk.put("n2", {"unschedulable": True})
    desk.fails("n2")
    desk.apply()
    assert desk.node("n2") == (None, True, None)
    desk.now += 5 * HALF_LIFE_S
    desk.apply()
    assert desk.node("n2") == (None, True, None) and desk.posted == []


def test_a_node_that_a_person_has_opened_stays_open_until_it_is_suspect_anew() -> None:
    desk = Desk()
    desk.fails("n2")
    desk.apply()
    desk.put("n2", {}, **{SUSPECT: "Taint"})
    desk.apply()
    assert desk.node("n2") == (None, None, "Opened")
    desk.now += 5 * HALF_LIFE_S
    desk.apply()
    assert desk.node("n2") == (None, None, None)
    desk.fails("n2")
    desk.apply()
    assert desk.node("n2")[2] == "Taint"


def test_the_cordon_of_a_person_who_had_opened_the_node_before_stays() -> None:
    desk = Desk(CORDON)
    desk.fails("n2")
    desk.apply()
    spec = desk.api.objects["nodes", "", "n2"]["spec"]
    for unschedulable in (None, True):
        spec["unschedulable"] = unschedulable
        desk.apply()
        spec = desk.api.objects["nodes", "", "n2"]["spec"]
        assert desk.node("n2")[1:] == (unschedulable, "Opened")
    desk.now += 5 * HALF_LIFE_S
    desk.apply()
    assert desk.node("n2")[1:] == (True, None)
    assert desk.reasons() == [("n2", "NodeSuspected")]


def test_one_of_four_nodes_is_closed_and_the_others_are_told_of_once() -> None:
    desk = Desk()
    desk.fails("n1", "n2")
    desk.apply()
    desk.apply()
    assert [desk.node(name)[2] for name in ("n1", "n2")] == ["Taint", None]
    assert [(name, event.message) for name, event in desk.posted[:1]] == [
        ("n2", "left open in spite of 3 failures in 2 hours: at most 1 of 4 nodes may be closed")
    ]
    assert desk.reasons() == [("n2", "NodeSuspected"), ("n1", "NodeSuspected")]


def test_nodes_without_a_daemon_are_nobodys_business() -> None:
    desk = Desk()
    desk.training = {"n0", "n1"}
    desk.fails("n0", "n3")
    desk.apply()
    assert all(desk.node(name)[2] is None for name in ("n0", "n3")), "two nodes are too few"


def test_a_change_of_somebody_else_at_the_same_time_is_kept() -> None:
    desk = Desk()
    desk.fails("n2")
    read = desk.api.get

    async def slow(resource: Any, namespace: str, name: str) -> Object:
        found = await read(resource, namespace, name)
        if resource is NODES and "more" not in str(desk.api.objects):
            desk.put(name, {"taints": [OTHER, {"key": "more", "effect": "NoSchedule"}]})
        return found

    desk.api.get = slow  # type: ignore[method-assign]
    desk.apply()
    assert desk.node("n2")[2] is None and desk.posted == []
    desk.apply()
    assert [taint["key"] for taint in desk.node("n2")[0]] == ["gpu", "more", SUSPECT]


def test_without_the_right_nothing_is_done_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    desk.fails("n2")
    asyncio.run(desk.record.synchronise())
    for _ in range(2):
        desk.api.refuse = ApiError("nodes is forbidden", status=FORBIDDEN)
        asyncio.run(desk.suspects.apply())
    assert [record.getMessage() for record in caplog.records] == [
        "a suspect node is left as it is: nodes is forbidden"
    ]
    desk.apply()
    assert desk.node("n2")[2] == "Taint"
