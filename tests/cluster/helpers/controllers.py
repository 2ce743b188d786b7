"""Controllers of other projects beside a test cluster: the real Kueue, JobSet and Kubeflow Trainer,
with their resources and webhooks.

Each runs as a process in the network namespace of the control plane, so that the API server reaches
its webhooks on the loopback interface. It has the administrator's identity: what is tested with it
is what Holdfast may do. Of its webhooks those for its own kinds are installed.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import binaries
import yaml
from cluster import Cluster
from machine import ClusterError, run, wait_for
from network import inside

STARTED_S = 60.0
_CONFIG = "config.yaml"
_CERTIFICATES = "kueue/metrics/certs"
"""Below /etc: where Kueue, alone, insists on the certificate for its metrics."""

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One project's controller."""

    name: str
    command: str
    group: str
    """API group of its resources."""
    port: int
    """The first of two: its webhooks', and that of its probes."""
    configuration: Mapping[str, Any]
    """What its configuration has besides addresses."""
    names_certificates: bool = True
    """Whether the configuration names the folder of its certificate; otherwise that is in the
    temporary folder."""

    @property
    def namespace(self) -> str:
        return f"{self.name}-system"


_NO_CERTIFICATES = {"internalCertManagement": {"enable": False}}

KUEUE = Kind(
    name="kueue",
    command="kueue",
    group="kueue.x-k8s.io",
    port=9443,
    configuration={
        **_NO_CERTIFICATES,
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "namespace": "kueue-system",
        "featureGates": {"VisibilityOnDemand": False, "MultiKueue": False},
        "integrations": {
            "frameworks": ["batch/job"],
            "externalFrameworks": ["MoETrainingJob.v1alpha1.holdfast.dev"],
        },
    },
)
JOBSET = Kind(
    name="jobset",
    command="jobset",
    group="jobset.x-k8s.io",
    port=9543,
    configuration={**_NO_CERTIFICATES, "apiVersion": "config.jobset.x-k8s.io/v1alpha1"},
)
TRAINER = Kind(
    name="trainer",
    command="trainer-controller-manager",
    group="trainer.kubeflow.org",
    port=9643,
    configuration={
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "certManagement": {"enable": False},
    },
    names_certificates=False,
)
"""Its TrainJobs become JobSets, so that it needs JobSet's controller as well."""


class Controller:
    """One project's controller manager. A context manager that ends it, and deletes its resources
    with all objects of them."""

    def __init__(self, cluster: Cluster, kind: Kind) -> None:
        self._cluster, self._kind = cluster, kind
        self._home = cluster.home / kind.name
        self._built = binaries.build_controller(kind.name)
        self._definitions: list[Document] = []

    def __enter__(self) -> Self:
        self._certificates.mkdir(parents=True, exist_ok=True)
        self._make_certificate()
        documents = list(self._manifests())
        self._definitions = [d for d in documents if d["kind"] == "CustomResourceDefinition"]
        namespace = {"apiVersion": "v1", "kind": "Namespace"}
        self._cluster.apply(namespace | {"metadata": {"name": self._kind.namespace}})
        # The definitions are too long for the annotation that other applies leave.
        words = ("apply", "--server-side", "-f", "-")
        self._cluster.kubectl(*words, stdin=yaml.safe_dump_all(self._definitions))
        self._cluster.wait_served()
        self._start()
        self._cluster.apply(*(d for d in documents if d not in self._definitions))
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.processes.end(self._kind.name)
        for kind in ("mutating", "validating"):
            self._cluster.kubectl("delete", f"{kind}webhookconfiguration", self._kind.name)
        self._release()
        words = (*self._crds, f"namespace/{self._kind.namespace}")
        self._cluster.kubectl("delete", *words, "--timeout=60s")

    @property
    def _crds(self) -> list[str]:
        return [f"crd/{each['metadata']['name']}" for each in self._definitions]

    @property
    def _certificates(self) -> Path:
        return self._home / "etc" / _CERTIFICATES

    @property
    def _temporary(self) -> Path:
        """Its temporary folder, with the certificate where controller-runtime looks for one."""
        place = self._home / "tmp"
        (place / "k8s-webhook-server").mkdir(parents=True, exist_ok=True)
        link = place / "k8s-webhook-server" / "serving-certs"
        if not link.is_symlink():
            link.symlink_to(self._certificates)
        return place

    def _release(self) -> None:
        """Take the finalizers from objects that only the controller would take them from."""
        for each in self._definitions:
            name = each["metadata"]["name"]
            for item in self._cluster.get(name, "--all-namespaces")["items"]:
                metadata = item["metadata"]
                if metadata.get("finalizers"):
                    where = ("-n", metadata["namespace"]) if "namespace" in metadata else ()
                    patch = ("--type=merge", "-p", '{"metadata":{"finalizers":null}}')
                    self._cluster.kubectl("patch", name, metadata["name"], *where, *patch)

    def _start(self) -> None:
        config = self._home / _CONFIG
        config.write_text(yaml.safe_dump(self._configuration()))
        command = (str(self._built / self._kind.command), "--config", str(config))
        own = shlex.join((*command, "--kubeconfig", str(self._cluster.kubeconfig)))
        etc = shlex.quote(str(self._home / "etc"))
        temporary = shlex.quote(str(self._temporary))
        script = f"mount --bind {etc} /etc && TMPDIR={temporary} exec {own}"
        self._cluster.processes.start(
            self._kind.name,
            inside(self._cluster.network.control_plane, "unshare", "--mount", "sh", "-c", script),
        )
        wait_for(f"{self._kind.name} to answer", self._is_ready, STARTED_S)

    def _configuration(self) -> Document:
        kind, port = self._kind, self._kind.port
        webhook: Document = {"host": "127.0.0.1", "port": port}
        if kind.names_certificates:
            webhook["certDir"] = str(self._certificates)
        return {
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{port + 1}"},
            "metrics": {"bindAddress": "0"},
            "webhook": webhook,
            "leaderElection": {"leaderElect": False},
            **kind.configuration,
        }

    def _is_ready(self) -> bool:
        if self._cluster.processes.find(self._kind.name) is None:
            log = self._cluster.processes.logs / f"{self._kind.name}.log"
            raise ClusterError(f"{self._kind.name} has ended: {log.read_text()[-2000:]}")
        url = f"http://127.0.0.1:{self._kind.port + 1}/readyz"
        probe = f"import urllib.request as r; r.urlopen({url!r}, timeout=2)"
        try:
            run(*inside(self._cluster.network.control_plane, "python3", "-c", probe))
        except ClusterError:
            return False
        return True

    def _make_certificate(self) -> None:
        run(
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={self._kind.name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", self._certificates / "tls.key", "-out", self._certificates / "tls.crt"),
        )

    def _manifests(self) -> Iterator[Document]:
        authority = base64.b64encode((self._certificates / "tls.crt").read_bytes()).decode()
        text = (self._built / binaries.MANIFESTS).read_text(encoding="utf-8")
        for document in filter(None, yaml.load_all(text, yaml.CSafeLoader)):
            if "webhooks" in document:
                document["metadata"]["name"] = self._kind.name
                document["webhooks"] = [
                    each
                    for each in document["webhooks"]
                    if each["rules"][0]["apiGroups"] == [self._kind.group]
                ]
                for each in document["webhooks"]:
                    path = each["clientConfig"]["service"]["path"]
                    url = f"https://127.0.0.1:{self._kind.port}{path}"
                    each["clientConfig"] = {"url": url, "caBundle": authority}
            yield document
