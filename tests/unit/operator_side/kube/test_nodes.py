"""Which nodes could take a member, and what else is seen of them."""

from __future__ import annotations

from typing import Any

import pytest
from samples import make_job

from holdfast_operator.kube.client.amounts import amount, amounts
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.cluster.nodes import node_view, read_node, unfit, wants_of
from holdfast_operator.kube.cluster.notices import NOTICES, notice_of
from holdfast_operator.reconciler.observe.views import JobView, NodeView

GIB = 2.0**30


def node(ready: str = "True", **changes: Any) -> Object:
    found: Object = {
        "metadata": {"name": "n0", "labels": {"gpu": "h200", "rack": "r1", "count": "8"}},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"},
        },
    }
    for part, values in changes.items():
        found[part] |= values
    return found


def taint(key: str, effect: str = "NoSchedule", value: str = "") -> Object:
    return {"key": key, "value": value, "effect": effect}


def affinity(**expression: Any) -> Object:
    terms = [{"matchExpressions": [expression]}]
    required = {"nodeSelectorTerms": terms}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("500m", 0.5), ("2", 2.0), (3, 3.0), ("64Gi", 64 * GIB), ("1k", 1000.0)),
        *(("1e3", 1000.0), ("100n", 1e-7), ("", 0.0), ("many", 0.0)),
    ],
)
def test_amounts_are_read_as_kubernetes_writes_them(text: str, value: float) -> None:
    assert amount(text) == pytest.approx(value)


def test_requests_are_summed_and_limits_stand_in_for_them() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "4", "gpu": "1"}}},
            {"resources": {"requests": {"cpu": "1"}}},
            {},
        ]
    }
    assert amounts(spec) == (("cpu", 1.5), ("gpu", 1.0))


def container(cpu: str, **more: str) -> Object:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


@pytest.mark.parametrize(
    ("spec", "cpus"),
    [
        ({"containers": [container("1")], "initContainers": [container("3")]}, 3),
        ({"containers": [container("4")], "initContainers": [container("3")]}, 4),
        # A sidecar runs beside the containers, and beside init containers after it.
        (
            {
                "containers": [container("1")],
                "initContainers": [container("1", restartPolicy="Always"), container("3")],
            },
            4,
        ),
        (
            {
                "containers": [container("1")],
                "initContainers": [container("2"), container("1", restartPolicy="Always")],
            },
            2,
        ),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, 1.25),
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "2"}}}, 2),
    ],
)
def test_a_pod_takes_what_the_scheduler_counts(spec: Object, cpus: float) -> None:
    assert amounts(spec) == (("cpu", cpus),)


@pytest.mark.parametrize(
    ("template", "raw", "why"),
    [
        ({}, node(), ""),
        ({}, node(ready="Unknown"), "not ready"),
        ({}, node(spec={"unschedulable": True}), "cordoned"),
        ({}, node(spec={"taints": [taint("dedicated")]}), "taint dedicated"),
        ({}, node(spec={"taints": [taint("soft", "PreferNoSchedule")]}), ""),
        (
            {"tolerations": [{"key": "dedicated", "operator": "Exists"}]},
            node(spec={"taints": [taint("dedicated", "NoExecute", "x")]}),
            "",
        ),
        (
            {"tolerations": [{"key": "dedicated", "value": "y"}]},
            node(spec={"taints": [taint("dedicated", value="x")]}),
            "taint dedicated",
        ),
        (
            {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]},
            node(spec={"taints": [taint("dedicated")]}),
            "taint dedicated",
        ),
        ({"nodeSelector": {"gpu": "h200"}}, node(), ""),
        ({"nodeSelector": {"gpu": "b200"}}, node(), "label gpu is not b200"),
        (affinity(key="rack", operator="In", values=["r1", "r2"]), node(), ""),
        (affinity(key="rack", operator="NotIn", values=["r1"]), node(), "node affinity"),
        (affinity(key="rack", operator="DoesNotExist"), node(), "node affinity"),
        (affinity(key="gpu", operator="Exists"), node(), ""),
        (affinity(key="count", operator="Gt", values=["4"]), node(), ""),
        (affinity(key="count", operator="Lt", values=["4"]), node(), "node affinity"),
    ],
)
def test_a_node_takes_what_the_scheduler_would_let_it_take(
    template: Object, raw: Object, why: str
) -> None:
    assert unfit(read_node(raw), wants_of(make_job(template)), ()) == why


def test_what_other_jobs_take_of_a_node_is_not_there() -> None:
    resources = {"limits": {"nvidia.com/gpu": "6"}}
    job = make_job({"containers": [{"name": "t", "command": ["x"], "resources": resources}]})
    free = read_node(node())
    assert unfit(free, wants_of(job), ()) == ""
    assert unfit(free, wants_of(job), (("nvidia.com/gpu", 4.0),)) == "not enough nvidia.com/gpu"


def test_a_node_without_an_object_is_gone() -> None:
    view = node_view("n0", None, NodeView(name="n0", connected=True), wants_of(make_job()))
    assert view.gone
    assert not view.schedulable


def test_a_taint_makes_a_node_gone_or_leaving() -> None:
    wants = wants_of(make_job())
    out = node(spec={"taints": [taint("node.kubernetes.io/out-of-service", "NoExecute")]})
    assert node_view("n0", read_node(out), None, wants).gone
    spot = node(spec={"taints": [taint("aws-node-termination-handler/spot-itn")]})
    assert "spot-itn" in node_view("n0", read_node(spot), None, wants).disruption


@pytest.mark.parametrize("key", sorted(NOTICES))
def test_every_usual_taint_for_the_end_of_a_node_is_known(key: str) -> None:
    view = node_view(
        "n0", read_node(node(spec={"taints": [taint(key)]})), None, wants_of(make_job())
    )
    assert (view.disruption, view.gone) == (f"taint {key}", False)


def test_more_taints_and_conditions_can_be_named() -> None:
    names = ("example.com/leaving", "Leaving")
    tainted = node(spec={"taints": [taint("example.com/leaving", "PreferNoSchedule")]})
    assert notice_of(tainted) == ""
    assert notice_of(tainted, names) == "taint example.com/leaving"
    raw = node()
    raw["status"]["conditions"].append({"type": "Leaving", "status": "True", "message": "in 30 s"})
    assert notice_of(raw) == ""
    assert read_node(raw, names).leaving == "condition Leaving (in 30 s)"
    raw["status"]["conditions"][-1]["status"] = "False"
    assert notice_of(raw, names) == ""


@pytest.mark.parametrize(
    ("message", "announced"),
    [
        ("Preempt Scheduled: Sat, 01 Aug 2026 05:41:02 GMT. For more information, see", True),
        ("Redeploy Scheduled: Sat, 01 Aug 2026 05:41:02 GMT", True),
        ("Reboot Scheduled: Sat, 01 Aug 2026 05:41:02 GMT", True),  # its memory is lost
        ("Freeze Scheduled: Sat, 01 Aug 2026 05:41:02 GMT", False),
        ("", False),
    ],
)
def test_an_event_of_a_virtual_machine_is_a_notice_unless_it_is_a_pause(
    message: str, announced: bool
) -> None:
    raw = node()
    condition = {"type": "VMEventScheduled", "status": "True", "message": message}
    raw["status"]["conditions"].append(condition)
    assert bool(notice_of(raw)) == announced
    condition["status"] = "False"
    assert notice_of(raw) == ""


@pytest.mark.parametrize(
    ("name", "value", "announced"),
    [
        ("cloud.google.com/active-node-maintenance", "ONGOING", True),
        ("cloud.google.com/active-node-maintenance", "PENDING", False),
        ("dgxc.nvidia.com/nvsentinel-state", "quarantined", True),
        ("dgxc.nvidia.com/nvsentinel-state", "drain-failed", True),
        ("dgxc.nvidia.com/nvsentinel-state", "remediation-succeeded", True),  # it has yet to reboot
        ("dgxc.nvidia.com/nvsentinel-state", "remediation-failed", True),
        ("dgxc.nvidia.com/nvsentinel-state", "healthy", False),
    ],
)
def test_labels_announce_the_end_of_a_node_by_their_values(
    name: str, value: str, announced: bool
) -> None:
    raw = node()
    raw["metadata"]["labels"] = {**raw["metadata"].get("labels", {}), name: value}
    assert read_node(raw).leaving == (f"label {name}={value}" if announced else "")


@pytest.mark.parametrize(
    ("kind", "status", "problem"),
    [
        ("GPUMissing", "True", "condition GPUMissing"),
        ("GPUMissing", "False", ""),
        ("AcceleratedHardwareReady", "False", "condition AcceleratedHardwareReady is False"),
        ("AcceleratedHardwareReady", "True", ""),
        ("AcceleratedHardwareReady", "Unknown", ""),
    ],
)
def test_conditions_of_clouds_name_problems_by_their_own_status(
    kind: str, status: str, problem: str
) -> None:
    raw = node()
    raw["status"]["conditions"].append({"type": kind, "status": status})
    assert read_node(raw).problem == problem


def test_what_only_repels_pods_is_not_a_notice() -> None:
    for key in ("node.kubernetes.io/unschedulable", "node.kubernetes.io/not-ready", "gpu"):
        assert notice_of(node(spec={"taints": [taint(key)]})) == ""
    assert notice_of({"metadata": {"name": "n0"}}) == ""


def test_the_failure_domain_is_the_label_that_the_job_names() -> None:
    redundancy = {"type": "RAIM5", "raim5": {"groupSize": 2, "spreadTopologyKey": "rack"}}
    wants = wants_of(make_job(redundancy=redundancy))
    assert node_view("n0", read_node(node()), None, wants).domain == "r1"


def test_only_a_ready_node_returns() -> None:
    wants = wants_of(make_job())
    assert node_view("n0", read_node(node()), None, wants, returning=True).returning
    dead = read_node(node(ready="False"))
    assert not node_view("n0", dead, None, wants, returning=True).returning


def test_a_daemon_without_memory_left_takes_no_new_job() -> None:
    wants = wants_of(make_job(snapshot={"memoryPerNode": "2Gi"}))
    full = NodeView(name="n0", memory_budget_bytes=3 * 2**30, memory_used_bytes=2 * 2**30)
    there = read_node(node())
    assert not node_view("n0", there, full, wants).schedulable
    holds = NodeView(name="n0", memory_budget_bytes=0, job=JobView())
    assert node_view("n0", there, holds, wants).schedulable


def test_nothing_is_known_of_the_memory_of_a_daemon_that_has_not_connected() -> None:
    """It may hold the job: the node must not look like one that was cordoned."""
    wants = wants_of(make_job(snapshot={"memoryPerNode": "2Gi"}))
    unheard = node_view("n0", read_node(node()), None, wants)
    assert unheard.schedulable and unheard.heartbeat_at == float("-inf")
    cordoned = {**node(), "spec": {"unschedulable": True}}
    assert not node_view("n0", read_node(cordoned), None, wants).schedulable
