from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.elastic import ElasticVariable, Placement
from holdfast_core.job.parsing import (
    DEFAULT_RULES,
    MANAGER,
    FailureAction,
    Gang,
    MoETrainingJob,
    On,
    PolicyType,
    Scheduling,
    check_local,
    ignored_locally,
    parse_job,
)
from holdfast_core.job.snapshots import (
    ExpertBudget,
    Full,
    PartialExperts,
    PolicySpec,
    Selective,
    SparseWindows,
)
from holdfast_core.snapshots.membership import Redundancy
from holdfast_core.topology import Topology


def document(**spec: Any) -> dict[str, Any]:
    """A small valid job with `spec` over it."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "nodes": 4,
            "parallelism": {"dp": 4, "ep": 2},
            "trainer": {
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "image": "registry/trainer:1",
                                "command": ["python", "train.py"],
                                "args": ["--steps", "10"],
                                "env": [
                                    {"name": "SEED", "value": "7"},
                                    {"name": "EMPTY"},
                                    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {}}},
                                ],
                            }
                        ]
                    }
                }
            },
            **spec,
        },
    }


FULL = document(
    suspend=True,
    nodes=16,
    minNodes=12,
    nprocPerNode=8,
    parallelism={"dp": 32, "tp": 2, "pp": 2, "ep": 2},
    model={"numExperts": 64, "numMoELayers": 32},
    snapshot={"policy": {"type": "Full"}, "interval": {"steps": 2}, "memoryPerNode": "200Gi"},
    redundancy={
        "type": "RAIM5",
        "raim5": {"groupSize": 4, "spreadTopologyKey": "topology.kubernetes.io/rack"},
    },
    persistence={
        "uri": "s3://bucket/run1",
        "interval": {"minutes": 30},
        "keep": 3,
    },
    failurePolicy={
        "maxRestarts": 20,
        "restartWindowSeconds": 3600,
        "spares": 2,
        "joinWaitSeconds": 0,
        "detection": {"heartbeatSeconds": 1, "missedHeartbeats": 5, "hangSeconds": 600},
        "rules": [
            {"when": "ExitCode", "values": [42], "action": "RestartInPlace"},
            {"when": "Disruption", "action": "ReplaceNode", "countTowardsMax": False},
            {"when": "NodeLost", "action": "ReplaceNode"},
            {"when": "NoReplacement", "afterSeconds": 300, "action": "Shrink"},
            {"when": "Any", "action": "RestartInPlace"},
        ],
    },
    scheduling={"gang": "KueuePodGroup", "queue": "team-a"},
    preRunningDeadlineSeconds=1800,
    activeDeadlineSeconds=86400,
    ttlSecondsAfterFinished=0,
    managedBy="example.com/controller",
)


def test_a_small_job_gets_sensible_defaults() -> None:
    job = parse_job(document())
    spec = job.spec
    assert (spec.suspend, spec.min_nodes, spec.nproc_per_node, spec.model) == (False, None, 1, None)
    assert (spec.least_nodes, spec.may_shrink) == (4, False)
    assert spec.snapshot.policy.type is PolicyType.FULL
    assert spec.snapshot.interval.steps == 1
    assert spec.redundancy.type is Redundancy.RAIM5
    assert spec.persistence is None
    assert (spec.failure_policy.max_restarts, spec.failure_policy.spares) == (20, 0)
    assert spec.failure_policy.join_wait_seconds == 120.0
    assert spec.failure_policy.rules == DEFAULT_RULES
    detection = spec.failure_policy.detection
    assert (detection.heartbeat_seconds, detection.missed_heartbeats) == (1.0, 5)
    assert (detection.hang_seconds, detection.hang_limit_s) == (None, 600.0)
    assert spec.scheduling == Scheduling(gang=Gang.NONE, queue=None)
    deadlines = (spec.pre_running_deadline_seconds, spec.active_deadline_seconds)
    assert (*deadlines, spec.ttl_seconds_after_finished) == (None, None, None)
    assert spec.managed_by == MANAGER


def test_accessors_return_what_the_rest_of_holdfast_needs() -> None:
    job = parse_job(document())
    assert job.key == "default.tiny"
    assert job.world_size == 4
    assert job.topology() == Topology(dp=4, ep=2)
    assert job.group_size == 4
    assert job.spread_topology_key == "kubernetes.io/hostname"
    assert job.memory_per_node_bytes is None
    assert job.command == ("python", "train.py", "--steps", "10")
    assert job.env == {"SEED": "7", "EMPTY": ""}


def test_every_field_of_the_schema_can_be_given() -> None:
    job = parse_job(FULL)
    assert job.topology() == Topology(dp=32, tp=2, pp=2, ep=2)
    assert job.memory_per_node_bytes == 200 * 1024**3
    assert job.spread_topology_key == "topology.kubernetes.io/rack"
    assert job.group_size == 4
    assert job.spec.model is not None
    assert job.spec.model.num_moe_layers == 32
    assert job.spec.persistence is not None
    assert job.spec.persistence.uri == "s3://bucket/run1"
    assert (job.spec.least_nodes, job.spec.may_shrink) == (12, True)
    assert job.spec.failure_policy.join_wait_seconds == 0.0
    shrink = job.spec.failure_policy.rules[3]
    assert (shrink.on, shrink.after_seconds, shrink.action) == (
        On.NO_REPLACEMENT,
        300.0,
        FailureAction.SHRINK,
    )
    assert job.spec.scheduling == Scheduling(gang=Gang.KUEUE_POD_GROUP, queue="team-a")
    deadlines = (job.spec.pre_running_deadline_seconds, job.spec.active_deadline_seconds)
    assert (*deadlines, job.spec.ttl_seconds_after_finished) == (1800, 86400, 0)
    assert job.spec.managed_by == "example.com/controller"


@pytest.mark.parametrize("source", [document(), FULL], ids=["small", "full"])
def test_an_encoded_job_is_a_document_of_the_same_job(source: dict[str, Any]) -> None:
    job = parse_job(source)
    assert parse_job(msgspec.to_builtins(job)) == job
    assert msgspec.json.decode(msgspec.json.encode(job), type=MoETrainingJob) == job


def test_parsing_leaves_the_document_as_it_was() -> None:
    source = document()
    source["status"] = {"phase": "Running"}
    source["metadata"]["resourceVersion"] = "5"
    before = msgspec.json.encode(source)
    parse_job(source)
    assert msgspec.json.encode(source) == before


def test_what_an_api_server_adds_is_ignored_or_kept() -> None:
    source = document()
    source["status"] = {"phase": "Running"}
    source["metadata"] |= {
        "namespace": "team-a",
        "uid": "1b7f",
        "generation": 3,
        "resourceVersion": "17",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{}],
        "finalizers": ["holdfast.dev/memory"],
        "labels": {"team": "a"},
        "annotations": {"note": "b"},
    }
    job = parse_job(source)
    assert job.key == "team-a.tiny"
    assert (job.metadata.uid, job.metadata.generation) == ("1b7f", 3)
    assert job.metadata.labels == {"team": "a"}


def test_small_jobs_have_small_groups_and_jobs_without_redundancy_none() -> None:
    two = parse_job(document(nodes=2, parallelism={"dp": 2}))
    assert two.group_size == 2
    none = parse_job(document(redundancy={"type": "None"}))
    assert none.group_size == 1
    one = parse_job(document(nodes=1, parallelism={"dp": 1}, redundancy={"type": "None"}))
    assert one.world_size == 1


def test_a_job_may_go_on_with_fewer_nodes() -> None:
    assert parse_job(FULL).spec.may_shrink


def test_sparse_windows_have_a_length() -> None:
    assert PolicySpec(type=PolicyType.SPARSE).chosen == SparseWindows(window=4)
    job = parse_job(document(snapshot={"policy": {"type": "Sparse", "sparse": {"window": 6}}}))
    assert job.spec.snapshot.policy.chosen == SparseWindows(window=6)
    assert not job.spec.snapshot.policy.leaves_experts_out
    text = job.variables["HOLDFAST_POLICY"]
    assert json.loads(text) == {
        "type": "Sparse",
        "sparse": {"order": "Fixed", "repeats": "Training", "window": 6},
    }, "images of an older version do not know the other fields"
    adapting = {"type": "Sparse", "sparse": {"window": "auto", "maxWindow": 12}}
    job = parse_job(document(snapshot={"policy": adapting}))
    policy = msgspec.json.decode(job.variables["HOLDFAST_POLICY"], type=PolicySpec).chosen
    assert policy == SparseWindows(window="auto", max_window=12)
    assert (policy.adapts, policy.window_steps) == (True, 12)
    assert (SparseWindows(window="auto").window_steps, SparseWindows().adapts) == (8, False)


def test_a_policy_reaches_the_trainer_in_its_environment() -> None:
    assert "HOLDFAST_POLICY" not in parse_job(document()).variables
    chosen = {"type": "PartialExperts", "partialExperts": {"expertsPerLayer": 2}}
    job = parse_job(document(snapshot={"policy": chosen}))
    policy = msgspec.json.decode(job.variables["HOLDFAST_POLICY"], type=PolicySpec)
    assert policy.chosen == PartialExperts(experts_per_layer=2)
    assert PolicySpec(type=PolicyType.PARTIAL_EXPERTS).chosen == PartialExperts()
    assert PolicySpec().chosen == Full()


def test_each_field_of_a_policy_reaches_the_trainer() -> None:
    chosen = {
        "type": "Selective",
        "selective": {"budget": {"hostBytesPerSecond": 9, "networkBytesPerSecond": 7}},
    }
    job = parse_job(document(snapshot={"policy": chosen}))
    policy = msgspec.json.decode(job.variables["HOLDFAST_POLICY"], type=PolicySpec)
    budget = ExpertBudget(host_bytes_per_second=9, network_bytes_per_second=7)
    assert policy.chosen == Selective(budget=budget)
    assert PolicySpec(type=PolicyType.SELECTIVE).chosen == Selective()


def test_a_job_may_leave_its_interval_to_what_is_measured() -> None:
    assert "HOLDFAST_RECOVERIES_PER_DAY" not in parse_job(document()).variables
    job = parse_job(document(snapshot={"interval": {"steps": "auto"}}))
    interval = job.spec.snapshot.interval
    assert (interval.auto, interval.least_steps) == (True, 1)
    each_day = job.spec.nodes * (1 / 180 + 1 / 60)  # what `holdfast plan` assumes
    assert float(job.variables["HOLDFAST_RECOVERIES_PER_DAY"]) == pytest.approx(each_day)


def test_the_expected_number_of_recoveries_follows_from_the_job() -> None:
    interval = {"steps": "auto", "nodeMtbfDays": 20, "processMtbfDays": 5.0}
    job = parse_job(document(snapshot={"interval": interval}))
    assert job.recoveries_per_day == pytest.approx(job.spec.nodes * (1 / 20 + 1 / 5))
    alone = document(snapshot={"interval": interval}, redundancy={"type": "None"})
    assert parse_job(alone).recoveries_per_day == pytest.approx(job.spec.nodes / 5)


def test_the_period_of_comparisons_reaches_the_trainer() -> None:
    assert "HOLDFAST_COMPARE_REPLICAS_EVERY" not in parse_job(document()).variables
    job = parse_job(document(snapshot={"compareReplicasEvery": 3}))
    assert job.variables["HOLDFAST_COMPARE_REPLICAS_EVERY"] == "3"


def test_uneven_copies_reach_the_trainer_in_its_environment() -> None:
    assert "HOLDFAST_ELASTIC" not in parse_job(document()).variables
    seats = {"seatsPerRank": 4, "placement": "Recovery"}
    job = parse_job(document(parallelism={"dp": 4}, elastic=seats))
    text = job.variables["HOLDFAST_ELASTIC"]
    found = msgspec.json.decode(text, type=ElasticVariable)
    assert (found.seats_per_rank, found.min_copies, found.placement) == (4, 2, Placement.RECOVERY)
    assert found.node_mtbf_days == job.spec.snapshot.interval.node_mtbf_days


def test_a_trainer_learns_that_weights_follow_from_masters() -> None:
    assert "HOLDFAST_STORE_COMPUTE_WEIGHTS" not in parse_job(document()).variables
    job = parse_job(document(snapshot={"storeComputeWeights": False}))
    assert job.variables["HOLDFAST_STORE_COMPUTE_WEIGHTS"] == "0"


def test_a_job_of_another_controller_is_not_run_here() -> None:
    check_local(parse_job(document()))
    with pytest.raises(InvalidJobError) as caught:
        check_local(parse_job(FULL))
    assert str(caught.value).splitlines() == [
        "job default.tiny cannot run on this machine alone, 1 problem:",
        '  spec.managedBy = "example.com/controller": the job belongs to another controller; '
        "remove the field, or write holdfast.dev/operator, to run it here",
    ]


def test_fields_without_effect_on_one_machine_are_named() -> None:
    gang, ttl, token, image = ignored_locally(parse_job(FULL))
    assert ignored_locally(parse_job(document())) == (token, image)
    assert gang.startswith("spec.scheduling.gang = KueuePodGroup is ignored here: all nodes")
    assert ttl.startswith("spec.ttlSecondsAfterFinished = 0 is ignored here: a local run")
    queued = document()
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    queue, *_ = ignored_locally(parse_job(queued))
    assert queue.endswith("= team-a is ignored here: a local run has no queue")


@pytest.mark.parametrize("gang", ["Volcano", "Coscheduling"])
def test_a_gang_without_a_queue_is_enough_where_one_is_not_needed(gang: str) -> None:
    assert parse_job(document(scheduling={"gang": gang})).spec.scheduling.gang == gang
