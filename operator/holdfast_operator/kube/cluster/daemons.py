"""Tracks starts and ends of daemons' pods where heartbeats cannot show them. Pure.

A daemon on a living node that was stopped on purpose, or has just been started again, is worth
waiting for: its memory is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.cluster.nodes import KubeNode
from holdfast_operator.reconciler.observe.views import NodeView

REVISION_LABEL = "controller-revision-hash"
"""Label that Kubernetes writes on the pods and ControllerRevisions of a DaemonSet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonPod:
    """The relevant part of a daemon's pod, equal to itself until a process starts or ends."""

    node: str
    uid: str
    containers: tuple[tuple[str, bool], ...]
    """(id, whether it runs) of each container."""
    ending: bool
    name: str = field(default="", compare=False)
    owner: str = field(default="", compare=False)
    """Uid of its DaemonSet."""
    revision: str = field(default="", compare=False)
    """Hash of the template that the pod was made from."""
    ready: bool = field(default=False, compare=False)
    begun: bool = field(default=False, compare=False)
    """Whether some container has passed its startup probe since it was started last."""

    @property
    def runs(self) -> bool:
        """Whether all containers run, and the pod is not being ended."""
        return bool(self.containers) and all(on for _, on in self.containers) and not self.ending


def read_daemon(raw: Object) -> DaemonPod:
    """Read a daemon's pod from the API's form."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    conditions = status.get("conditions") or []
    containers = status.get("containerStatuses") or []
    return DaemonPod(
        node=(raw.get("spec") or {}).get("nodeName", ""),
        uid=metadata.get("uid", ""),
        containers=tuple(
            (each.get("containerID", ""), "running" in (each.get("state") or {}))
            for each in containers
        ),
        ending="deletionTimestamp" in metadata,
        name=metadata.get("name", ""),
        owner=owner_of(metadata)[0],
        revision=(metadata.get("labels") or {}).get(REVISION_LABEL, ""),
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        begun=any(each.get("started") for each in containers),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateRevision:
    """One version of the pods of a DaemonSet, as its controller keeps it. New pods are made from
    the newest; a rollback makes an older one the newest."""

    owner: str
    """Uid of the DaemonSet."""
    owner_name: str
    number: int
    revision: str
    """Hash of the template, as in `DaemonPod.revision`."""


def read_revision(raw: Object) -> TemplateRevision:
    """Read a ControllerRevision from the API's form."""
    metadata = raw["metadata"]
    owner, name = owner_of(metadata)
    return TemplateRevision(
        owner=owner,
        owner_name=name,
        number=int(raw.get("revision", 0)),
        revision=(metadata.get("labels") or {}).get(REVISION_LABEL, ""),
    )


def owner_of(metadata: Object) -> tuple[str, str]:
    """(uid, name) of the DaemonSet that an object belongs to; empty when it belongs to none."""
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("kind") == "DaemonSet":
            return owner.get("uid", ""), owner.get("name", "")
    return "", ""


def without_daemon(
    nodes: Iterable[KubeNode], pods: Iterable[DaemonPod], known: Mapping[str, NodeView]
) -> frozenset[str]:
    """Nodes that should have a daemon, as its pod or an earlier connection shows, and whose daemon
    is not connected. Nodes that have left the cluster do not count."""
    here = {node.name for node in nodes}
    connected = {name for name, view in known.items() if view.connected}
    return frozenset((with_daemon(pods, known) & here) - connected)


def with_daemon(pods: Iterable[DaemonPod], known: Mapping[str, NodeView]) -> frozenset[str]:
    """Nodes that should have a daemon, as its pod or an earlier connection shows."""
    return frozenset({pod.node for pod in pods} | known.keys())


class Daemons:
    """Times when the daemon of each node was last seen starting or ending, in monotonic seconds,
    and the pod of it that is being ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed_at: dict[str, float] = {}
        self._ending: dict[str, str] = {}

    def change(self, before: DaemonPod | None, now: DaemonPod | None) -> None:
        """Take in that a pod came, changed or went. A pod that already runs when it is first seen,
        as after a start of this process, does not count as a change: it may have run for long, and
        its node may have lost its power since."""
        if before is not None and self._ending.get(before.node) == before.uid:
            del self._ending[before.node]
        if now is not None and now.ending:
            self._ending[now.node] = now.uid
        if before is None and now is not None and now.runs:
            return
        for pod in (before, now):
            if pod is not None and pod.node:
                self._changed_at[pod.node] = self._clock()

    def returns(self, node: str, heartbeat_at: float) -> bool:
        """Whether a daemon whose newest heartbeat came at `heartbeat_at` is about to come back: its
        pod is being ended, as in an upgrade, or one of its containers started or ended after that.
        The kubelet may report the end of a process late."""
        return node in self._ending or self._changed_at.get(node, float("-inf")) > heartbeat_at
