"""What helm makes of the chart, and of which settings the tests look at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from cluster import Cluster
from holdfast_system import CHART, RELEASE

DRY = "chart-dry-run"
"""A namespace in which nothing is ever made but a service account."""
URL = "redis://user:secret-word@redis.example:6380/0"

Document = dict[str, Any]

NO_USER: Document = {"runAsUser": None, "runAsGroup": None}
"""What takes user and group out of a security context, as OpenShift wants it."""

VALUE_SETS: dict[str, Document] = {
    "defaults": {},
    "minimal": {
        "crds": {"enabled": False},
        "operator": {
            "replicas": 1,
            "resources": {},
            "podDisruptionBudget": {"enabled": False},
            "nodeRecord": {"enabled": False},
        },
        "daemon": {"auth": "none", "priorityClassName": "", "tolerations": []},
        "rbac": {"aggregatedRoles": False},
        "networkPolicy": {"enabled": False},
        "uninstall": {"releaseFinalizers": False},
    },
    "everything": {
        "fullnameOverride": "other",
        "image": {"tag": "1", "pullSecrets": ["registry"]},
        "operator": {
            "image": "registry.example/operator@sha256:" + "0" * 64,
            "priorityClassName": "system-cluster-critical",
            "serviceAccount": {"name": "runner", "annotations": {"team": "a"}},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
            "podLabels": {"team": "a"},
            "podAnnotations": {"team": "a"},
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "system", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "notices": ["VMEventScheduled", "example.com/leaving"],
            "suspectNodes": "Cordon",
            "extraArgs": ["--log-level=debug"],
        },
        "daemon": {
            "cpu": {"request": 2, "limit": "8"},
            "idleCheckSeconds": 1800,
            "protectionBandwidth": "1.5G",
            "updateStrategy": {"type": "RollingUpdate", "maxUnavailable": "10%"},
            "serviceAccount": {"annotations": {"team": "a"}},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
            "seLinuxOptions": {"type": "spc_t"},
            "podLabels": {"team": "a"},
            "podAnnotations": {"team": "a"},
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "storage": {
                "envFrom": [{"secretRef": {"name": "s3"}}],
                "volumes": [
                    {"name": "tier", "nfs": {"server": "nfs.example", "path": "/training"}},
                    {"name": "credentials", "secret": {"secretName": "gcs"}},
                ],
                "volumeMounts": [
                    {"name": "tier", "mountPath": "/mnt/training"},
                    {"name": "credentials", "mountPath": "/etc/storage", "readOnly": True},
                ],
            },
            "extraArgs": ["--log-format=text"],
        },
        "persistence": {
            "locations": [
                {"prefix": "s3://team-{namespace}", "secretName": "s3.keys"},
                {"prefix": "s3://old/copies", "namespaces": ["a", "b"], "secretName": "s3.keys"},
                {"prefix": "file:///mnt/training/{namespace}/"},
            ]
        },
        "gangScheduling": {"volcano": True, "coscheduling": True},
        "kueue": {"enabled": True},
        "redis": {
            "enabled": True,
            "persistence": {"enabled": True, "storageClassName": "fast"},
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"operator": "Exists"}],
        },
        "networkPolicy": {"daemonExtraEgress": [{"ports": [{"port": 9000}]}]},
        "monitoring": {
            "monitors": {"enabled": True, "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "disabled": ["HoldfastJobFailed"]},
            "dashboard": {"enabled": True, "annotations": {"folder": "training"}},
        },
    },
    "redis": {"redis": {"enabled": True}},
    "external Redis": {"redis": {"external": {"url": URL, "port": 6380}}},
    "Redis of a secret": {"redis": {"external": {"existingSecret": "redis-url"}}},
    "own certificates": {
        "security": {
            "bulk": "encrypted",
            "certificates": {"source": "existing", "daemonSecret": "d", "operatorSecret": "o"},
        }
    },
    "insecure": {"security": {"insecure": True}},
    "one namespace": {"operator": {"watchNamespaces": ["team-a"]}},
    "suspect nodes, one namespace": {
        "operator": {"watchNamespaces": ["team-a"], "suspectNodes": "Taint"}
    },
    "two namespaces": {"operator": {"watchNamespaces": ["team-a", "holdfast-system"]}},
    "accounts and roles of others": {
        "operator": {"serviceAccount": {"create": False, "name": "their-operator"}},
        "daemon": {"serviceAccount": {"create": False, "name": "their-daemon"}},
        "rbac": {"create": False},
    },
    "users that the cluster chooses": {
        "operator": {"podSecurityContext": NO_USER},
        "daemon": {"user": 1000900001},
        "redis": {"enabled": True, "podSecurityContext": {**NO_USER, "fsGroup": None}},
    },
    "monitoring": {
        "monitoring": {
            "monitors": {"enabled": True},
            "rules": {"enabled": True},
            "dashboard": {"enabled": True},
        }
    },
}


_documents: dict[str, str] = {}
"""Values → what helm made of them; both are JSON. Many tests look at the same values."""


class Renderer:
    """`helm template`, as documents."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self._folder = cluster, folder

    def values(self, values: Document) -> Path:
        path = self._folder / "values.yaml"
        path.write_text(json.dumps(values))
        return path

    def text(self, values: Document) -> str:
        chosen = ("--namespace", DRY, "--values", self.values(values))
        return self.cluster.helm("template", RELEASE, CHART, *chosen)

    def documents(self, values: Document) -> list[Document]:
        key = json.dumps(values)
        if key not in _documents:
            found = yaml.load_all(self.text(values), yaml.CSafeLoader)
            _documents[key] = json.dumps([each for each in found if each])
        made: list[Document] = json.loads(_documents[key])
        return made

    def one(self, kind: str, name: str, values: Document | None = None) -> Document:
        """The only document of its kind and name."""
        (found,) = (
            each
            for each in self.documents(values or {})
            if (each["kind"], each["metadata"]["name"]) == (kind, name)
        )
        return found
