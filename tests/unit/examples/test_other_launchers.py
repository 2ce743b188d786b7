"""`examples/indexed-job.yaml`: what its three documents must say alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from holdfast._environment import read_environment
from holdfast_core.job.parsing import parse_job
from holdfast_operator.kube.manifests import SOCKET_PATH, VOLUME_PATH
from holdfast_operator.kube.pods import read_pod
from holdfast_operator.kube.resources import JOB_LABEL

FILE = Path(__file__).resolve().parents[3] / "examples" / "indexed-job.yaml"


def test_the_pods_are_those_of_the_job_and_find_their_daemon() -> None:
    document, service, made = yaml.safe_load_all(FILE.read_text(encoding="utf-8"))
    job, template = parse_job(document), made["spec"]["template"]
    assert job.spec.trainer.external and made["spec"]["completions"] == job.spec.nodes
    labels = template["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == {JOB_LABEL: job.metadata.name}

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
    found = read_environment(given | {"RANK": "2"})
    assert (found.job, found.world_size) == (job.key, job.world_size)
    assert str(found.socket) == SOCKET_PATH and str(found.token_file) == f"{VOLUME_PATH}/token"
    assert found.store_address.startswith(
        f"{made['metadata']['name']}-0.{service['metadata']['name']}:"
    )
