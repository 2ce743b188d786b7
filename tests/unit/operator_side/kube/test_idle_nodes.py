"""What counts against idle nodes, and where it is shown."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_api import FakeApi

from holdfast_core.idle_checks import FailedCheck, IdleCheck
from holdfast_core.node_failures import CLEAN, HALF_LIFE_S, FailureKind
from holdfast_operator.kube.client.resources import CONFIG_MAPS
from holdfast_operator.kube.cluster.daemons import DaemonPod
from holdfast_operator.kube.cluster.idle_nodes import IdleNodes
from holdfast_operator.kube.cluster.node_record import NodeRecord, read_record
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.reconciler.observe.views import Event, NodeView

GAUGE, COUNTER = "holdfast_operator_idle_node_failed", "holdfast_operator_node_failures_total"


class Cluster:
    """Four idle nodes that pass their checks, each with a daemon."""

    def __init__(self, *, remembers: bool = True) -> None:
        self.api, self.now = FakeApi(), 1.7e9
        self.api.put(CONFIG_MAPS, {"metadata": {"name": "record", "namespace": "hf"}})
        self.remembers = remembers
        self.views = {f"n{i}": self.view(f"n{i}") for i in range(4)}
        self.failing_since: dict[str, float] = {}
        self.posted: list[tuple[str, Event]] = []
        self.start()

    def start(self) -> None:
        """Begin to lead, as another replica does."""
        self.record = NodeRecord(self.api, namespace="hf", name="record", wall=lambda: self.now)
        self.metrics = OperatorMetrics()
        self.idle_nodes = IdleNodes(
            "hf",
            self.record if self.remembers else None,
            nodes=lambda: self.views,
            pods=lambda: [
                DaemonPod(node=name, uid=f"uid-{name}", containers=(), ending=end, name=f"d-{name}")
                for name in self.views
                for end in (False, True)
            ],
            post=lambda about, event: self.posted.append((about["metadata"]["name"], event)),
            metrics=self.metrics,
            wall=lambda: self.now,
        )

    @staticmethod
    def view(name: str, *failed: FailedCheck, connected: bool = True) -> NodeView:
        return NodeView(name=name, connected=connected, failed_checks=failed)

    def look(self) -> None:
        self.idle_nodes.look()
        asyncio.run(self.record.synchronise())

    def fails(self, *names: str, check: IdleCheck = IdleCheck.DISK, confirmed: bool = True) -> None:
        for name in names:
            since = self.failing_since.setdefault(name, self.now)
            failed = FailedCheck(
                check=check,
                text="it is broken",
                failing_s=self.now - since,
                confirmed=confirmed,
            )
            self.views[name] = self.view(name, failed)

    def recorded(self) -> dict[str, list[tuple[str, str, str, float]]]:
        """As somebody else reads it in the ConfigMap."""
        body = self.api.objects[CONFIG_MAPS.plural, "hf", "record"]
        record, problems = read_record(body, self.now)
        assert problems == ()
        return {
            node: [(each.kind, each.job, each.check, each.at) for each in failures]
            for node, failures in record.items()
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def test_a_node_that_fails_a_check_is_chosen_last_recorded_and_shown() -> None:
    cluster = Cluster()
    cluster.look()
    assert cluster.idle_nodes.rating("n2") == CLEAN and cluster.posted == []
    cluster.fails("n2")
    cluster.look()
    rating = cluster.idle_nodes.rating("n2")
    assert rating.score == pytest.approx(3.0)
    assert rating.text == "1 failure in 1 minute, failed check of disk: it is broken"
    assert {cluster.idle_nodes.rating(name) for name in ("n0", "n1", "n3", "other")} == {CLEAN}
    assert cluster.recorded() == {"n2": [(FailureKind.FAILED_CHECK, "", "disk", cluster.now)]}
    ((name, event),) = cluster.posted
    assert (name, event.reason, event.warning) == ("d-n2", "NodeCheckFailed", True)
    assert "node n2, which has no job: failed check of disk: it is broken" in event.message
    assert cluster.value(GAUGE, node="n2") == 1.0
    assert cluster.value(COUNTER, kind="FailedCheck") == 1.0


def test_what_goes_on_is_one_failure_that_fades_and_stands_as_long_as_it_lasts() -> None:
    cluster = Cluster()
    for _ in range(20):
        cluster.fails("n2")
        cluster.look()
        cluster.now += HALF_LIFE_S / 10
    assert [len(found) for found in cluster.recorded().values()] == [1]
    assert len(cluster.posted) == 1 and cluster.value(COUNTER, kind="FailedCheck") == 1.0
    assert 1.0 < cluster.idle_nodes.rating("n2").score < 1.6
    cluster.now += 10 * HALF_LIFE_S
    cluster.look()
    assert cluster.idle_nodes.rating("n2").score == 1.0, "it still fails"


@pytest.mark.parametrize("end", ["passes", "has a job", "is gone", "is not heard"])
def test_after_that_only_the_record_counts_until_it_has_faded(end: str) -> None:
    cluster = Cluster()
    cluster.fails("n2")
    cluster.look()
    match end:
        case "passes":
            cluster.views["n2"] = cluster.view("n2")
        case "has a job":
            cluster.views["n2"] = NodeView(name="n2", connected=True)
        case "is gone":
            del cluster.views["n2"]
        case "is not heard":
            (failed,) = cluster.views["n2"].failed_checks or ()
            cluster.views["n2"] = cluster.view("n2", failed, connected=False)
    cluster.look()
    assert cluster.idle_nodes.rating("n2").text == "1 failure in 1 minute"
    assert cluster.value(GAUGE, node="n2") is None
    cluster.now += 4 * HALF_LIFE_S
    cluster.look()
    assert cluster.idle_nodes.rating("n2") == CLEAN


def test_what_most_idle_nodes_have_in_common_is_said_once_and_counts_against_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    cluster = Cluster()
    cluster.fails("n0", "n1", "n2")
    for _ in range(3):
        cluster.look()
    assert {cluster.idle_nodes.rating(name) for name in cluster.views} == {CLEAN}
    assert cluster.posted == [] and cluster.recorded() == {}
    (said,) = caplog.messages
    assert said.startswith("3 of 4 nodes without a job fail the check of disk")
    assert [cluster.value(GAUGE, node=name) for name in cluster.views] == [1.0, 1.0, 1.0, None]


def test_a_check_that_fails_once_is_shown_and_recorded_when_it_fails_again() -> None:
    cluster = Cluster()
    cluster.fails("n2", confirmed=False)
    cluster.look()
    assert cluster.idle_nodes.rating("n2").score == 1.0, "for as long as it fails"
    assert cluster.recorded() == {} and len(cluster.posted) == 1
    assert cluster.value(COUNTER, kind="FailedCheck") == 0.0
    began = cluster.now
    cluster.now += 1800.0
    cluster.fails("n2")
    cluster.look()
    assert cluster.recorded() == {"n2": [(FailureKind.FAILED_CHECK, "", "disk", began)]}
    assert len(cluster.posted) == 1 and cluster.value(COUNTER, kind="FailedCheck") == 1.0


def test_one_steady_fault_is_reported_once_whatever_jobs_come_and_others_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    cluster = Cluster()
    for turn in range(11):
        if turn % 2:
            cluster.views["n2"] = NodeView(name="n2", connected=True)  # has a job
        else:
            cluster.fails("n2")
        if turn % 3 == 2:  # most nodes
            cluster.fails("n0", "n1", "n3", confirmed=False)
        else:
            cluster.views |= {name: cluster.view(name) for name in ("n0", "n1", "n3")}
        cluster.look()
        cluster.now += 3600.0
    assert [len(found) for found in cluster.recorded().values()] == [1]
    assert cluster.value(COUNTER, kind="FailedCheck") == 1.0
    assert [name for name, _ in cluster.posted] == ["d-n2"]
    assert sum(text.startswith("node n2") for text in caplog.messages) == 1
    cluster.views = {name: cluster.view(name) for name in cluster.views}
    cluster.look()
    del cluster.failing_since["n2"]
    cluster.fails("n2")
    cluster.look()
    assert len(cluster.posted) == 2, "it had passed meanwhile"


def test_the_next_replica_finds_the_failure_recorded() -> None:
    cluster = Cluster()
    cluster.fails("n2")
    cluster.look()
    before = cluster.recorded()
    cluster.now += 7200.0
    cluster.start()
    cluster.fails("n2")
    cluster.look()
    assert cluster.recorded() == before
    assert "failed check of disk" in cluster.idle_nodes.rating("n2").text


def test_another_check_that_fails_is_another_failure() -> None:
    cluster = Cluster()
    cluster.fails("n2")
    cluster.look()
    (disk,) = cluster.views["n2"].failed_checks or ()
    cluster.now += 7200.0
    memory = FailedCheck(check=IdleCheck.MEMORY, text="it flips", failing_s=0.0, confirmed=True)
    cluster.views["n2"] = cluster.view("n2", memory, disk)
    cluster.look()
    assert [check for _, _, check, _ in cluster.recorded()["n2"]] == ["disk", "memory"]
    assert cluster.posted[-1][1].message.startswith(
        "node n2, which has no job: failed check of memory: it flips;"
    )


def test_a_node_is_avoided_also_where_no_failures_are_remembered() -> None:
    cluster = Cluster(remembers=False)
    cluster.fails("n2")
    cluster.look()
    assert cluster.idle_nodes.rating("n2").score == 1.0
    assert cluster.recorded() == {}
