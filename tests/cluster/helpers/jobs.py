"""The example job for the test cluster: our image, this machine's torch, real limits."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import images
import yaml
from machine import ROOT, ClusterError

TORCH = "/opt/torch"
"""Where trainers find the packages of the environment that runs the tests."""

OUTPUT = "/output"
"""Where trainers find the folder that `lend_folder` gives them."""

PACE = ("--step-seconds", "0.5")
"""Arguments of a job that trains as long as a test likes: the machine, which plays all nodes, has
other work than steps that nobody waits for."""

_EXAMPLES = ROOT / "examples"


def trainer_job(
    name: str = "moe",
    *,
    example: str = "moe-job.yaml",
    namespace: str = "default",
    steps: int = 200,
    memory: str = "2Gi",
    arguments: tuple[str, ...] = (),
    **spec: Any,
) -> dict[str, Any]:
    """A job of the examples for this cluster.

    Args:
        example: its file.
        steps: how long the trainer trains.
        memory: limit of each trainer container; arenas are charged to the daemon.
        arguments: more for the trainer's command line.
        spec: replaces fields of the job's spec as they are.
    """
    [job] = example_documents(example)
    job["metadata"] = {"name": name, "namespace": namespace}
    pod = job["spec"]["trainer"]["template"]["spec"]
    pod["containers"][0]["args"] = ["--steps", str(steps), *arguments]
    fit(pod, memory)
    job["spec"] |= copy.deepcopy(spec)
    return job


def example_documents(file: str) -> list[dict[str, Any]]:
    """The objects in a file of the examples, as they are."""
    return list(yaml.safe_load_all((_EXAMPLES / file).read_text(encoding="utf-8")))


def fit(pod: dict[str, Any], memory: str) -> None:
    """Give a trainer's pod this cluster's image, this machine's torch and limits."""
    pod["containers"][0] |= {
        "image": images.TRAINER,
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}},
    }
    lend_torch(pod)


def small_job(
    name: str, namespace: str, pod: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """A job of one member without redundancy, whose pod never gets further than its image.

    Args:
        pod: more fields of the pod's spec, or others.
        spec: more fields of the job's spec, or others.
    """
    stuck = {
        "name": "trainer",
        "image": "localhost/none",
        "imagePullPolicy": "Never",
        "command": ["train"],
    }
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "nodes": 1,
            "parallelism": {"dp": 1, "ep": 1},
            "redundancy": {"type": "None"},
            "snapshot": {"memoryPerNode": "16Mi"},
            "trainer": {"template": {"spec": {"containers": [stuck]} | (pod or {})}},
            **spec,
        },
    }


def lend_torch(pod: dict[str, Any]) -> None:
    """Give every container of a pod's spec the packages of this machine, torch among them."""
    source = {"path": str(site_packages()), "type": "Directory"}
    pod.setdefault("volumes", []).append({"name": "torch", "hostPath": source})
    for container in pod["containers"]:
        mount = {"name": "torch", "mountPath": TORCH, "readOnly": True}
        container.setdefault("volumeMounts", []).append(mount)
        container.setdefault("env", []).append({"name": "PYTHONPATH", "value": TORCH})


def lend_folder(pod: dict[str, Any], folder: Path) -> None:
    """Give the trainer of a pod's spec a folder of this machine, the same on every node."""
    pod.setdefault("volumes", []).append({"name": "output", "hostPath": {"path": str(folder)}})
    mount = {"name": "output", "mountPath": OUTPUT}
    pod["containers"][0].setdefault("volumeMounts", []).append(mount)


def make_folder(folder: Path) -> None:
    """Make the folder empty, for trainers of any user."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def site_packages() -> Path:
    """The folder that torch is installed in.

    Raises:
        ClusterError: when there is none.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ClusterError("torch is not installed: run the tests by `make test-cluster`")
    return Path(found.origin).parents[1]
