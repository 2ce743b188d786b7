"""When daemons' pods start and end, for as long as their heartbeats cannot tell. Pure.

A daemon that is ended on purpose, or was just started again, on a living node is worth waiting for:
its memory is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_operator.kube.api import Object

REVISION_LABEL = "controller-revision-hash"
"""Of a DaemonSet's pods and ControllerRevisions; Kubernetes writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonPod:
    """What matters of a daemon's pod: it is equal to itself until a process starts or ends."""

    node: str
    uid: str
    containers: tuple[tuple[str, bool], ...]
    """(id, whether it runs) of each container."""
    ending: bool
    name: str = field(default="", compare=False)
    owner: str = field(default="", compare=False)
    """Uid of its DaemonSet."""
    revision: str = field(default="", compare=False)
    """Hash of the template that it was made from."""
    ready: bool = field(default=False, compare=False)
    begun: bool = field(default=False, compare=False)
    """Some container has passed its startup probe since it was started last."""

    @property
    def runs(self) -> bool:
        """All its containers run, and nobody ends them."""
        return bool(self.containers) and all(on for _, on in self.containers) and not self.ending


def read_daemon(raw: Object) -> DaemonPod:
    """The pod."""
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
    """One version of the pods of a DaemonSet, as its controller keeps them. The newest is what a
    new pod is made from; going back to an older one makes that the newest."""

    owner: str
    """Uid of the DaemonSet."""
    owner_name: str
    number: int
    revision: str
    """As in `DaemonPod.revision`."""


def read_revision(raw: Object) -> TemplateRevision:
    """The ControllerRevision."""
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


class Daemons:
    """By node: when its daemon was last seen starting or ending, in monotonic seconds, and which
    pod of it is being ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed_at: dict[str, float] = {}
        self._ending: dict[str, str] = {}

    def change(self, before: DaemonPod | None, now: DaemonPod | None) -> None:
        """One pod came, changed or went. One that runs when it is seen first, as after a start of
        this process, may have run for long: its node may have lost its power since."""
        if before is not None and self._ending.get(before.node) == before.uid:
            del self._ending[before.node]
        if now is not None and now.ending:
            self._ending[now.node] = now.uid
        if before is None and now is not None and now.runs:
            return
        for pod in (before, now):
            if pod is not None and pod.node:
                self._changed_at[pod.node] = self._clock()

    def returns(self, node: str, heard_at: float) -> bool:
        """Whether a daemon that was last heard at `heard_at` is about to come back: its pod is
        being ended, as in an upgrade, or something of it started or ended after that. What the
        kubelet tells of a process that ended may be late."""
        return node in self._ending or self._changed_at.get(node, float("-inf")) > heard_at
