"""`examples/indexed-job.yaml`, `jobset.yaml` and `trainjob.yaml`: what their documents must say
alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from holdfast._environment import read_environment
from holdfast_core.job.parsing import parse_job
from holdfast_operator.kube.client.resources import JOB_LABEL
from holdfast_operator.kube.pods.manifests import SOCKET_PATH, VOLUME_PATH
from holdfast_operator.kube.pods.pods import read_pod

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def check_pods(document: Any, made: Any, rank_0: str, **others: str) -> None:
    """Check that pods are those of the job, and find their daemon and rank 0.

    Args:
        others: variables that the pods' command sets.
    """
    job, template = parse_job(document), made["template"]
    assert job.spec.trainer.external and made["completions"] == job.spec.nodes
    labels = template["metadata"]["labels"]
    assert labels == {JOB_LABEL: job.metadata.name}

    container = template["spec"]["containers"][0]
    variables: dict[str, Any] = {each["name"]: each.get("value") for each in container["env"]}
    number = labels | {"batch.kubernetes.io/job-completion-index": "2"}
    metadata = {"name": "p", "namespace": "default", "labels": number}
    metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
    pod = read_pod({"metadata": metadata, "spec": template["spec"]})
    assert pod is not None and pod.adopted and pod.member == 2
    given = {
        name: text.replace("$(NAMESPACE)", "default") for name, text in variables.items() if text
    }
    found = read_environment(given | others | {"RANK": "2"})
    assert (found.job, found.world_size) == (job.key, job.world_size)
    assert str(found.socket) == SOCKET_PATH and str(found.token_file) == f"{VOLUME_PATH}/token"
    assert found.store_address.startswith(f"{rank_0}:")


def test_pods_of_an_indexed_job_are_those_of_the_job_and_find_their_daemon() -> None:
    document, service, made = documents("indexed-job.yaml")
    name, subdomain = made["metadata"]["name"], service["metadata"]["name"]
    check_pods(document, made["spec"], f"{name}-0.{subdomain}")
    assert made["spec"]["template"]["spec"]["subdomain"] == subdomain
    assert service["spec"]["selector"] == made["spec"]["template"]["metadata"]["labels"]
    assert "publishNotReadyAddresses" not in service["spec"]


def test_pods_of_a_jobset_are_those_of_the_job_and_find_their_daemon() -> None:
    document, made = documents("jobset.yaml")
    name, network = made["metadata"]["name"], made["spec"]["network"]
    [workers] = made["spec"]["replicatedJobs"]
    assert workers.get("replicas", 1) == 1  # so that pods have the numbers of one Job
    rank_0 = f"{name}-{workers['name']}-0-0.{network['subdomain']}"
    check_pods(document, workers["template"]["spec"], rank_0)
    assert network["publishNotReadyAddresses"] is False


def test_pods_of_a_trainjob_are_those_of_the_job_and_find_their_daemon() -> None:
    document, runtime, made = documents("trainjob.yaml")
    spec, trainer = runtime["spec"], made["spec"]["trainer"]
    assert made["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    nodes, processes = trainer["numNodes"], trainer["numProcPerNode"]
    [node] = spec["template"]["spec"]["replicatedJobs"]
    pods = node["template"]["spec"] | {"completions": nodes}
    rank_0 = f"{made['metadata']['name']}-{node['name']}-0-0"
    by_torchrun = {
        "WORLD_SIZE": str(nodes * processes),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": rank_0,
        "MASTER_PORT": "29500",
    }
    check_pods(document, pods, rank_0, **by_torchrun)
    assert parse_job(document).spec.nproc_per_node == processes
    assert spec["template"]["spec"]["network"]["publishNotReadyAddresses"] is False
