"""What a job's pods and shared objects look like."""

from __future__ import annotations

import pytest
from samples import make_job

from holdfast_core.job.parsing import Gang, MoETrainingJob
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import (
    COSCHEDULING_POD_GROUPS,
    DISRUPTION_BUDGETS,
    SERVICES,
    TOLERATION,
    VOLCANO_POD_GROUPS,
)
from holdfast_operator.kube.pods.gangs import gang_parts
from holdfast_operator.kube.pods.manifests import TrainerVolume, job_objects
from holdfast_operator.kube.pods.manifests import pod_manifest as manifest
from holdfast_operator.kube.pods.pods import read_pod

GANGS = {
    Gang.KUEUE_POD_GROUP: {"gang": "KueuePodGroup", "queue": "team-a"},
    Gang.VOLCANO: {"gang": "Volcano", "queue": "team-a"},
    Gang.COSCHEDULING: {"gang": "Coscheduling"},
}


def pod_manifest(
    job: MoETrainingJob,
    member: int,
    node: str,
    attempt: int,
    volume: TrainerVolume = TrainerVolume.CSI,
) -> Object:
    return manifest(job, member, node, attempt, volume)


def test_the_trainers_command_is_run_by_the_launcher() -> None:
    container = pod_manifest(make_job(), 1, "n7", 2)["spec"]["containers"][0]
    assert container["command"] == [
        *("python", "-m", "holdfast.launch", "--socket", "/run/holdfast/sockets/daemon.sock"),
        *("--job", "team.moe", "--nodes", "2", "--nproc", "4", "--member-node", "n7"),
        *("--host", "$(HOLDFAST_POD_IP)", "--"),
        *("python", "train.py", "--steps", "9"),
    ]
    assert "args" not in container
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["HOLDFAST_JOB"] == "team.moe"
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {"name": "HOLDFAST_POD_IP", "valueFrom": address} in container["env"]
    assert env["HOLDFAST_TOKEN_FILE"] == "/run/holdfast/token"


def test_a_pod_names_its_trainer_for_the_operator_and_for_kubectl() -> None:
    containers = [
        {"name": "train", "image": "t", "command": ["true"]},
        {"name": "logs", "image": "l"},
    ]
    job = make_job({"containers": containers})
    annotations = pod_manifest(job, 0, "n0", 1)["metadata"]["annotations"]
    assert annotations["holdfast.dev/container"] == "train"
    assert annotations["kubectl.kubernetes.io/default-container"] == "train"
    template = job.spec.trainer.template
    assert template is not None
    template["metadata"] = {"annotations": {"kubectl.kubernetes.io/default-container": "logs"}}
    annotations = pod_manifest(job, 0, "n0", 1)["metadata"]["annotations"]
    assert annotations["holdfast.dev/container"] == "train"
    assert annotations["kubectl.kubernetes.io/default-container"] == "logs"


@pytest.mark.parametrize(
    ("asked_s", "pod_s", "workers"),
    [
        (None, 8, []),  # the launcher's default
        (120, 120, ["--grace-s", "117"]),
        (2, 2, ["--grace-s", "1"]),
        (0, 0, ["--grace-s", "1"]),
    ],
)
def test_the_templates_grace_is_that_of_the_pod_and_of_its_workers(
    asked_s: int | None, pod_s: int, workers: list[str]
) -> None:
    template = {} if asked_s is None else {"terminationGracePeriodSeconds": asked_s}
    raw = pod_manifest(make_job(template), 0, "n0", 1)
    command = raw["spec"]["containers"][0]["command"]
    own = command[: command.index("--")]
    assert raw["spec"]["terminationGracePeriodSeconds"] == pod_s
    assert own[own.index("--grace-s") :] == workers if workers else "--grace-s" not in own
    pod = read_pod(raw)
    assert pod is not None and pod.grace_s == pod_s


@pytest.mark.parametrize("given", [None, {"value": "0"}, {"valueFrom": {"fieldRef": {}}}])
def test_a_default_variable_gives_way_to_the_templates(given: Object | None) -> None:
    name = "PYTHONUNBUFFERED"
    env = [] if given is None else [{"name": name, **given}]
    containers = [{"name": "t", "image": "i", "command": ["true"], "env": env}]
    found = pod_manifest(make_job({"containers": containers}), 0, "n0", 1)
    written = [e for e in found["spec"]["containers"][0]["env"] if e["name"] == name]
    assert written == [{"name": name, "value": "1"} if given is None else {"name": name, **given}]


@pytest.mark.parametrize("field", ["serviceAccountName", "serviceAccount"])
def test_a_template_with_an_account_keeps_it_and_gets_none(field: str) -> None:
    job = make_job({field: "mine"})
    assert pod_manifest(job, 0, "n0", 1)["spec"]["serviceAccountName"] == "mine"
    assert [body["kind"] for _, body in job_objects(job, budgets=False)] == ["Service"]


def test_the_launcher_is_told_of_a_time_that_is_not_its_default() -> None:
    job = make_job(failurePolicy={"reformSeconds": 7.5})
    command = pod_manifest(job, 1, "n7", 2)["spec"]["containers"][0]["command"]
    given = command[: command.index("--")]
    assert given[-2:] == ["--reform-s", "7.5"]
    default = make_job(failurePolicy={"reformSeconds": 30})
    assert "--reform-s" not in pod_manifest(default, 1, "n7", 2)["spec"]["containers"][0]["command"]


def test_a_pod_is_named_labelled_owned_and_never_restarted() -> None:
    pod = pod_manifest(make_job(), 1, "n7", 2)
    assert pod["metadata"]["name"] == "moe-1-2"
    assert pod["metadata"]["namespace"] == "team"
    assert pod["metadata"]["labels"]["holdfast.dev/job"] == "moe"
    assert pod["metadata"]["labels"]["holdfast.dev/member"] == "1"
    assert pod["metadata"]["labels"]["holdfast.dev/attempt"] == "2"
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
    owner = pod["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == ("job-uid", True)
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["serviceAccountName"] == "moe-trainer"
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("moe-1", "moe")


def test_what_is_written_into_a_pod_is_read_from_it() -> None:
    pod = pod_manifest(make_job(), 1, "n7", 2)
    found = read_pod(pod)
    assert found is not None
    assert (found.job_key, found.member, found.attempt) == ("team.moe", 1, 2)
    assert (found.node, found.owner) == ("n7", "job-uid")


def test_a_pod_comes_to_its_node_whatever_alternatives_the_template_gives() -> None:
    terms = [
        {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]},
        {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r1"]}]},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    job = make_job({"affinity": {"nodeAffinity": required}})
    for template in (job, make_job()):
        affinity = pod_manifest(template, 0, "n7", 1)["spec"]["affinity"]["nodeAffinity"]
        found = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert [term["matchFields"][0]["values"] for term in found] == [["n7"]] * len(found)
    assert (
        "matchFields"
        not in (job.spec.trainer.template or {})["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"][0]
    )


def test_a_template_keeps_its_own_fields() -> None:
    container = {
        "name": "t",
        "command": ["train"],
        "env": [{"name": "A", "value": "1"}, {"name": "HOLDFAST_JOB", "value": "other"}],
        "volumeMounts": [{"name": "big", "mountPath": "/dev/shm"}],
    }
    template = {
        "containers": [container, {"name": "sidecar", "command": ["watch"]}],
        "serviceAccountName": "mine",
        "volumes": [{"name": "big", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        "tolerations": [{"operator": "Exists"}],
    }
    spec = pod_manifest(make_job(template), 0, "n", 1)["spec"]
    assert spec["serviceAccountName"] == "mine"
    assert spec["tolerations"] == [{"operator": "Exists"}, TOLERATION]
    assert spec["containers"][1] == {"name": "sidecar", "command": ["watch"]}
    env = [(entry["name"], entry.get("value")) for entry in spec["containers"][0]["env"]]
    assert env.count(("A", "1")) == 1
    assert ("HOLDFAST_JOB", "other") not in env
    assert [volume["name"] for volume in spec["volumes"]] == ["big", "holdfast"]


def test_a_pod_has_the_volume_of_the_driver_and_shared_memory() -> None:
    spec = pod_manifest(make_job(), 0, "n", 1)["spec"]
    mounts = {m["mountPath"]: m for m in spec["containers"][0]["volumeMounts"]}
    assert mounts["/run/holdfast"]["readOnly"]
    assert "/dev/shm" in mounts
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["holdfast"]["csi"] == {"driver": "holdfast.dev", "readOnly": True}
    assert not any("hostPath" in volume for volume in volumes.values())


def test_with_host_paths_a_pod_has_the_nodes_sockets_and_a_service_account_token() -> None:
    spec = pod_manifest(make_job(), 0, "n", 1, TrainerVolume.HOST_PATH)["spec"]
    mounts = {m["mountPath"]: m for m in spec["containers"][0]["volumeMounts"]}
    assert mounts["/run/holdfast/sockets"]["readOnly"]
    assert "/var/run/secrets/holdfast.dev" in mounts
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    token = volumes["holdfast-token"]["projected"]["sources"][0]["serviceAccountToken"]
    assert token == {"audience": "holdfast.dev/daemon", "expirationSeconds": 3600, "path": "token"}
    env = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
    assert env["HOLDFAST_TOKEN_FILE"] == "/var/run/secrets/holdfast.dev/token"


def test_what_pods_share_is_owned_and_allows_one_thing() -> None:
    objects = job_objects(make_job())
    assert [(body["kind"], body["metadata"]["name"]) for _, body in objects] == [
        ("Service", "moe"),
        ("ServiceAccount", "moe-trainer"),
        ("Role", "moe-trainer"),
        ("RoleBinding", "moe-trainer"),
        ("PodDisruptionBudget", "moe"),
    ]
    assert all(b["metadata"]["ownerReferences"][0]["uid"] == "job-uid" for _, b in objects)
    service = next(body for resource, body in objects if resource == SERVICES)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    role = next(body for _, body in objects if body["kind"] == "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["holdfast.dev"],
            "resources": ["moetrainingjobs"],
            "resourceNames": ["moe"],
            "verbs": ["get"],
        }
    ]


@pytest.mark.parametrize(
    ("redundancy", "most"),
    [
        ({"type": "RAIM5"}, 1),
        ({"type": "None"}, None),
    ],
)
def test_evictions_take_no_more_pods_than_a_parity_group_can_lose(
    redundancy: Object, most: int | None
) -> None:
    objects = dict(job_objects(make_job(redundancy=redundancy)))
    budget = objects.get(DISRUPTION_BUDGETS)
    assert (budget is None) == (most is None)
    if budget is not None:
        assert budget["spec"]["maxUnavailable"] == most
        labels = pod_manifest(make_job(), 0, "n", 1)["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_without_a_gang_pods_are_plain() -> None:
    parts = gang_parts(make_job())
    assert (parts.labels, parts.annotations, parts.objects) == ({}, {}, ())
    assert "schedulerName" not in pod_manifest(make_job(), 0, "n", 1)["spec"]


def test_kueue_finds_the_group_by_labels() -> None:
    pod = pod_manifest(make_job(scheduling=GANGS[Gang.KUEUE_POD_GROUP]), 0, "n", 1)["metadata"]
    assert pod["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert pod["labels"]["kueue.x-k8s.io/pod-group-name"] == "moe"
    assert pod["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"


def test_volcano_gets_a_pod_group_with_its_queue() -> None:
    job = make_job(scheduling=GANGS[Gang.VOLCANO])
    pod = pod_manifest(job, 0, "n", 1)
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "moe"
    group = dict(job_objects(job))[VOLCANO_POD_GROUPS]
    assert group["spec"] == {"minMember": 2, "queue": "team-a"}
    assert group["metadata"]["ownerReferences"][0]["uid"] == "job-uid"


def test_coscheduling_gets_a_pod_group_and_the_templates_scheduler() -> None:
    job = make_job({"schedulerName": "ours"}, scheduling=GANGS[Gang.COSCHEDULING])
    pod = pod_manifest(job, 0, "n", 1)
    assert pod["spec"]["schedulerName"] == "ours"
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "moe"
    assert dict(job_objects(job))[COSCHEDULING_POD_GROUPS]["spec"] == {"minMember": 2}
