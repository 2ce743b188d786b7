"""When daemons' pods start and end, for as long as their heartbeats cannot tell. Pure.

A daemon that was just started again on a living node is worth waiting for: its memory is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast_operator.kube.api import Object


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonPod:
    """What matters of a daemon's pod: it is equal to itself until a process starts or ends."""

    node: str
    uid: str
    containers: tuple[tuple[str, bool], ...]
    """(id, whether it runs) of each container."""
    ending: bool

    @property
    def runs(self) -> bool:
        """All its containers run, and nobody ends them."""
        return bool(self.containers) and all(on for _, on in self.containers) and not self.ending


def read_daemon(raw: Object) -> DaemonPod:
    """The pod."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    return DaemonPod(
        node=(raw.get("spec") or {}).get("nodeName", ""),
        uid=metadata.get("uid", ""),
        containers=tuple(
            (each.get("containerID", ""), "running" in (each.get("state") or {}))
            for each in status.get("containerStatuses") or []
        ),
        ending="deletionTimestamp" in metadata,
    )


class Daemons:
    """Node → when its daemon was last seen starting or ending, in monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed_at: dict[str, float] = {}

    def change(self, before: DaemonPod | None, now: DaemonPod | None) -> None:
        """One pod came, changed or went. One that runs when it is seen first, as after a start of
        this process, may have run for long: its node may have lost its power since."""
        if before is None and now is not None and now.runs:
            return
        for pod in (before, now):
            if pod is not None and pod.node:
                self._changed_at[pod.node] = self._clock()

    def changed_at(self, node: str) -> float:
        return self._changed_at.get(node, float("-inf"))
