"""The control plane: etcd, API server, controller manager, scheduler and DNS.

They run in one network namespace, each under an identity of its own, with authorization on
(Node, RBAC): what a service account may not do on a real cluster, it may not do here.
"""

from __future__ import annotations

import base64
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from binaries import KWOK_STAGES, Binaries
from machine import ClusterError, run, wait_for
from network import SERVICES, Network, inside
from processes import Processes

ADMIN = "admin"
_COMPONENTS = ("kube-controller-manager", "kube-scheduler", "kube-proxy")
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Of service accounts, which are what tests count; the system's own are left out.
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
_KWOK = {
    "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
    "kind": "KwokConfiguration",
    # Thousands of nodes and pods; by default four of each are seen to at a time.
    "options": {
        "nodeLeaseParallelism": 16,
        "nodePlayStageParallelism": 16,
        "podPlayStageParallelism": 16,
    },
}
_START_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPlane:
    """The servers of one cluster, and who may talk to them."""

    home: Path
    network: Network
    binaries: Binaries
    processes: Processes
    node_grace_s: int = 50
    """How long a node whose kubelet is silent stays Ready."""

    @property
    def kubeconfigs(self) -> Path:
        """Folder with a kubeconfig for each component."""
        return self.home / "kubeconfigs"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; it works from this host."""
        return self.home.parent / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON object a line for each request of a service account outside kube-system."""
        return self.home / "audit.log"

    def start(self, nodes: list[str]) -> None:
        """Start everything; returns when the API server answers.

        Args:
            nodes: names that get a kubeconfig for their kubelet.
        """
        self.home.mkdir(parents=True)
        tokens = {name: secrets.token_hex(16) for name in (ADMIN, *_COMPONENTS, *nodes)}
        known = "".join(f"{token},{_identity(name)}\n" for name, token in tokens.items())
        (self.home / "tokens.csv").touch(mode=0o600)
        (self.home / "tokens.csv").write_text(known)
        (self.home / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
        run("openssl", "genrsa", "-out", self._key, "2048")
        self._start("etcd", "--data-dir", self.home / "etcd", "--unsafe-no-fsync")
        self._start("kube-apiserver", *self._api_server())
        wait_for("the API server's certificate", self._certificate.exists, _START_S)
        self.kubeconfigs.mkdir()
        for name, token in tokens.items():
            self._write_kubeconfig(name, token)
        wait_for("the API server", self._is_ready, _START_S)
        self._start_clients()

    def start_kwok(self) -> None:
        """Start what plays the kubelet of nodes annotated `kwok.x-k8s.io/node: fake`."""
        selector = "kwok.x-k8s.io/node=fake"
        settings = self.home / "kwok.json"
        settings.write_text(json.dumps(_KWOK))
        configs = ("--config", self.binaries.find(KWOK_STAGES), "--config", settings)
        self._start(
            "kwok",
            *("--kubeconfig", self.kubeconfig, *configs),
            *("--manage-nodes-with-annotation-selector", selector, "--cidr", "10.240.0.0/13"),
            *("--node-lease-duration-seconds", str(self.node_grace_s * 4 // 5)),
            *("--node-ip", self.network.control_address),
        )

    @property
    def _key(self) -> Path:
        return self.home / "service-accounts.key"

    @property
    def _certificate(self) -> Path:
        return self.home / "certificates" / "apiserver.crt"

    def _start(self, name: str, *arguments: str | Path) -> None:
        command = inside(self.network.control_plane, self.binaries.find(name), *arguments)
        self.processes.start(name, command)

    def _api_server(self) -> list[str | Path]:
        address = self.network.control_address
        audit = ("--audit-log-path", self.audit_log)
        return [
            *("--etcd-servers", "http://127.0.0.1:2379"),
            *("--bind-address", address, "--advertise-address", address),
            *("--cert-dir", self._certificate.parent, "--service-cluster-ip-range", SERVICES),
            *("--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction"),
            *("--token-auth-file", self.home / "tokens.csv"),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-key-file", self._key),
            *("--service-account-signing-key-file", self._key),
            *("--kubelet-preferred-address-types", "InternalIP", "--allow-privileged=true"),
            *(*audit, "--audit-policy-file", self.home / "audit-policy.json"),
        ]

    def _start_clients(self) -> None:
        # Fast enough for thousands of pods; the defaults suit shared control planes.
        rates = ("--kube-api-qps", "500", "--kube-api-burst", "1000")
        common = ("--leader-elect=false", "--bind-address", "127.0.0.1", *rates)
        self._start(
            "kube-controller-manager",
            *("--kubeconfig", self.kubeconfigs / "kube-controller-manager", *common),
            *("--service-account-private-key-file", self._key, "--use-service-account-credentials"),
            *("--root-ca-file", self._certificate),
            *("--node-monitor-grace-period", f"{self.node_grace_s}s"),
        )
        self._start("kube-scheduler", "--kubeconfig", self.kubeconfigs / "kube-scheduler", *common)
        zone = f"kubernetes cluster.local {{\n    kubeconfig {self.kubeconfig} {ADMIN}\n  }}"
        corefile = f".:53 {{\n  bind {self.network.control_address}\n  errors\n  {zone}\n}}\n"
        (self.home / "Corefile").write_text(corefile)
        self._start("coredns", "-conf", self.home / "Corefile")

    def _is_ready(self) -> bool:
        with suppress(ClusterError):
            kubectl = (self.binaries.find("kubectl"), "--kubeconfig", self.kubeconfig)
            return run(*kubectl, "get", "--raw", "/readyz") == "ok"
        return False

    def _write_kubeconfig(self, name: str, token: str) -> None:
        authority = base64.b64encode(self._certificate.read_bytes()).decode()
        server = f"https://{self.network.control_address}:6443"
        cluster = {"server": server, "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": self.network.prefix, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": self.network.prefix, "user": name}}],
            "current-context": name,
        }
        path = self.kubeconfig if name == ADMIN else self.kubeconfigs / name
        path.touch(mode=0o600)  # helm and kubectl warn of a file that others may read
        path.write_text(json.dumps(config, indent=1))


def _identity(name: str) -> str:
    """User, id and groups of the bearer of the kubeconfig `name`, as the token file wants them."""
    if name == ADMIN:
        return f"{name},{name},system:masters"
    if name in _COMPONENTS:
        return f"system:{name},{name}"
    return f"system:node:{name},{name},system:nodes"
