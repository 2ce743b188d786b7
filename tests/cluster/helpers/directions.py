"""What `make cluster` prints at the end: commands that work as they are printed, and the values and
the job that they name."""

from __future__ import annotations

from pathlib import Path

import images
import yaml
from cluster import Cluster
from holdfast_system import NAMESPACE, RELEASE
from jobs import PACE, trainer_job
from machine import ROOT

FILES = ROOT / "build" / "cluster"
"""Where they are, unless a test wants them elsewhere."""
STEPS = 10_000

_VALUES = {
    "operator": {
        "image": images.OPERATOR,
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
    },
    "daemon": {"image": images.DAEMON, "memory": {"budget": "768Mi", "overhead": "320Mi"}},
    "redis": {"image": images.REDIS},
}
_ABOUT_VALUES = (
    "# The images of this cluster, and what one machine that plays all nodes can spare.\n"
)
_ABOUT_JOB = """\
# examples/moe-job.yaml for this cluster. torch is this machine's own, lent to the trainers: with
# its CUDA libraries it is several GB, which every node would keep anew. The image that
# `make images` builds, for other clusters, has torch in it.
"""


def directions(cluster: Cluster, files: Path = FILES) -> str:
    """The text; writes the files that it names."""
    files.mkdir(parents=True, exist_ok=True)
    values, job = files / "values.yaml", files / "moe-job.yaml"
    values.write_text(_ABOUT_VALUES + yaml.safe_dump(_VALUES, sort_keys=False))
    document = trainer_job("moe", steps=STEPS, memory="1500Mi", arguments=PACE)
    job.write_text(_ABOUT_JOB + yaml.safe_dump(document, sort_keys=False))
    return f"""\
Use it from this shell:
  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.commands}:$PATH
  kubectl get nodes
Install Holdfast, and train:
  helm install {RELEASE} charts/holdfast --namespace {NAMESPACE} --create-namespace \\
    --values {_short(values)} --wait=legacy --timeout 5m
  helm test {RELEASE} --namespace {NAMESPACE}
  kubectl apply -f {_short(job)}
  kubectl wait moejob moe --for=jsonpath='{{.status.phase}}'=Running --timeout 5m
  .venv/bin/holdfast status -n default moe
Break it:
  .venv/bin/python tests/cluster/helpers/cli.py kill node2      # and: boot, partition, heal
End it:
  make cluster-down"""


def _short(path: Path) -> Path:
    """As it is named from the root of the repository."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
