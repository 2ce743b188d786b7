"""Documents that several tests start from."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_operator.kube.client.api import Object

_JOB: Object = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "MoETrainingJob",
    "metadata": {
        "name": "moe",
        "namespace": "team",
        "uid": "job-uid",
        "generation": 3,
        "resourceVersion": "7",
    },
    "spec": {
        "nodes": 2,
        "nprocPerNode": 4,
        "parallelism": {"dp": 8},
        "trainer": {
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "trainer:1",
                            "command": ["python", "train.py"],
                            "args": ["--steps", "9"],
                        }
                    ]
                }
            }
        },
    },
}


def job_resource(template: Object | None = None, **spec: Any) -> Object:
    """A job as the API returns it. `template` is merged into the pod's spec."""
    found = deepcopy(_JOB)
    found["spec"] |= spec
    found["spec"]["trainer"]["template"]["spec"] |= template or {}
    return found


def make_job(template: Object | None = None, **spec: Any) -> MoETrainingJob:
    """The job of `job_resource`, parsed."""
    return parse_job(job_resource(template, **spec))
