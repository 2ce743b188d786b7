"""A job whose pods another controller makes and starts again, as an example describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jobs
from cluster import Cluster
from holdfast_system import Job

from holdfast_operator.kube.pods.containers import trainer_status

NODES, STEPS, FIRST_STEPS = 4, 100_000, 5
"""More steps than a test waits for."""
WAIT_S = 300.0
ARGUMENTS = (
    *("--seq", "32", "--dim", "32", "--layers", "1", "--experts", "8"),
    *("--hash-steps", "--log-file", f"{jobs.OUTPUT}/log.jsonl"),
)
INDEX = "batch.kubernetes.io/job-completion-index"
IF_THERE = ("--ignore-not-found", "--timeout=120s")

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The job at one moment."""

    status: Document
    pods: dict[str, Document]
    """Completion index → the pod that is not being removed."""

    def on(self, index: int) -> str:
        """Node of a pod."""
        return str(self.pods[str(index)]["spec"]["nodeName"])

    @property
    def uids(self) -> dict[str, str]:
        return {index: pod["metadata"]["uid"] for index, pod in self.pods.items()}

    @property
    def restarts(self) -> dict[str, int]:
        """How often kubelets have started each trainer's container again."""
        return {index: trainer_status(pod)["restartCount"] for index, pod in self.pods.items()}


class Launched:
    """An example for this cluster, in a namespace of its own: the job, and what makes its pods."""

    def __init__(self, cluster: Cluster, example: str, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.folder = cluster.home / "shared" / namespace
        self.documents = jobs.example_documents(example)
        for document in self.documents:
            document["metadata"]["namespace"] = namespace
        self.launcher = self.documents[-1]
        [pod] = _pod_specs(self.documents)
        command = self.launcher["spec"].get("trainer", pod["containers"][0])
        command["args"] = ["--steps", str(STEPS), *ARGUMENTS]
        jobs.fit(pod, "1500Mi")
        jobs.lend_folder(pod, self.folder)
        self.job = Job(cluster, self.documents[0])

    def log(self) -> list[Document]:
        with suppress(FileNotFoundError):
            text = (self.folder / "log.jsonl").read_text()
            return [json.loads(line) for line in text.split("\n")[:-1]]
        return []

    def pods(self) -> dict[str, Document]:
        """Completion index → the newest pod that is not being removed."""
        label = f"holdfast.dev/job={self.job.name}"
        found = self.cluster.get("pods", "-n", self.namespace, "-l", label)
        there = [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]
        there.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        return {pod["metadata"]["labels"][INDEX]: pod for pod in there}

    def addresses(self, hostname: str) -> list[str]:
        """All addresses by which pods find this one: those that its service publishes."""
        found = self.cluster.get("endpointslices", "-n", self.namespace)["items"]
        endpoints = [each for slice in found for each in slice["endpoints"] or ()]
        return [
            address
            for each in endpoints
            if each.get("hostname") == hostname and each["conditions"]["ready"]
            for address in each["addresses"]
        ]

    def delete(self) -> None:
        """Delete what makes the pods, and then the job."""
        for document in reversed(self.documents):
            kind, name = document["kind"], document["metadata"]["name"]
            self.cluster.kubectl("delete", kind, name, "-n", self.namespace, *IF_THERE)

    def stand(self, what: str, recoveries: int) -> Standing:
        """The job, once it has recovered so often and has protected some steps since."""
        first = self.log()[-1]["step"] if recoveries else 0

        def trains(status: Document) -> bool:
            epoch, _, step = status.get("protected", "0.0").partition(".")
            return (
                status.get("phase") == "Running"
                and status.get("recoveries", 0) >= recoveries
                and int(epoch) == status.get("epoch")
                and int(step) >= first + FIRST_STEPS
            )

        self.job.wait(what, trains, WAIT_S)
        pods = self.pods()
        return Standing(status=self.job.status(), pods=pods)


def _pod_specs(document: object) -> Iterator[Document]:
    """Specs of pods, wherever they are in an object."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        else:
            for value in document.values():
                yield from _pod_specs(value)
    elif isinstance(document, list):
        for value in document:
            yield from _pod_specs(value)
