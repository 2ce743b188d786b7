"""Job files of tests that run one command in each worker."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast_core.job.parsing import MoETrainingJob, parse_job

PATIENT = {"heartbeatSeconds": 0.5, "missedHeartbeats": 8}
"""Detection that notices a lost node within seconds, on a machine that is busy."""


def job_file(
    name: str,
    command: Sequence[str],
    *,
    nodes: int = 1,
    nproc: int = 1,
    env: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """The content of a job file, data parallel unless `spec` says otherwise.

    Args:
        spec: further fields of the job's spec, or others in place of those given here.
    """
    variables = [{"name": key, "value": value} for key, value in (env or {}).items()]
    container = {"name": "trainer", "command": [*command], "env": variables}
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": nodes,
            "nprocPerNode": nproc,
            "parallelism": {"dp": nodes * nproc},
            "trainer": {"template": {"spec": {"containers": [container]}}},
            **spec,
        },
    }


def make_job(name: str, command: Sequence[str], **more: Any) -> MoETrainingJob:
    """The job of such a file.

    Args:
        more: as for `job_file`.
    """
    return parse_job(job_file(name, command, **more))


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets of a cluster below it."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        yield Path(path)
