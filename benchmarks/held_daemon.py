"""A daemon that fetches no parity while its node's rank exchanges gradients.

This way of yielding the network is measured beside the daemon's own and is not part of it: training
would have to signal when it communicates (docs/decisions/0029). Here the rank signals through a
byte of shared memory, the cheapest way there is.

python -m benchmarks.held_daemon, with the arguments of holdfast-daemon
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from holdfast_daemon.__main__ import main
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.node import Node
from holdfast_daemon.parity.traffic import JobTraffic, NodeTraffic
from holdfast_daemon.settings import DaemonSettings

HELD_S_MAX = 2.0
LOOK_S = 0.001


class Exchange:
    """Flag whether a node exchanges gradients: its rank sets it, its daemon reads it."""

    def __init__(self, root: Path) -> None:
        path = root.with_suffix(".exchange")
        with path.open("a+b") as file:
            file.truncate(1)
            self._byte = mmap.mmap(file.fileno(), 1)

    @property
    def under_way(self) -> bool:
        return bool(self._byte[0])

    @under_way.setter
    def under_way(self, value: bool) -> None:
        self._byte[0] = value


class HeldTraffic(NodeTraffic):
    """Traffic whose fetches for parity wait, for a limited time, while an exchange is under way."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def of_job(self) -> JobTraffic:
        return HeldJobTraffic(self)


class HeldJobTraffic(JobTraffic):
    """Traffic of one job."""

    def __init__(self, node: HeldTraffic) -> None:
        super().__init__(node)
        self._exchange = node.exchange

    def take(self, nbytes: int, limits: tuple[int, int], scope: EpochScope) -> None:
        until = time.monotonic() + HELD_S_MAX
        while self._exchange.under_way and time.monotonic() < until:
            scope.ended.wait(LOOK_S)
        super().take(nbytes, limits, scope)


class HeldNode(Node):
    """A daemon with `HeldTraffic`."""

    def __init__(self, settings: DaemonSettings) -> None:
        super().__init__(settings)
        self._traffic.parity = HeldTraffic(Exchange(settings.root))


if __name__ == "__main__":
    raise SystemExit(main(make_node=HeldNode))
