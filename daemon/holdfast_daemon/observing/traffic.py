"""Copies the counts of the daemon's servers and of its parity work, which they keep in their
threads, to /metrics."""

from __future__ import annotations

from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing.http import HttpServer
from holdfast_daemon.parity.traffic import NodeTraffic
from holdfast_daemon.trainers.descriptors import DescriptorServer
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.server import BulkServer


class Traffic:
    """Adds to the counters of `metrics` what was counted since the last call of `count`."""

    def __init__(self, metrics: DaemonMetrics, protection_bytes_s: int = 0) -> None:
        """`protection_bytes_s`: bytes that all jobs together may fetch in a second for new parity;
        0: no limit."""
        self._metrics = metrics
        self._before: dict[str, int] = {}
        self.parity = NodeTraffic(protection_bytes_s)

    def count(
        self,
        bulk: BulkServer,
        client: BulkClient,
        descriptors: DescriptorServer,
        http: HttpServer | None,
    ) -> None:
        """Bring the counters up to date; `http`: None when there is no such server."""
        self._metrics.add("sent_bytes", self._more("sent", bulk.sent_bytes))
        self._metrics.add("received_bytes", self._more("received", client.received_bytes))
        self._metrics.add("protection_bytes", self._more("parity", self.parity.received_bytes))
        self._metrics.add("mirrored_bytes", self._more("mirrored", self.parity.mirrored_bytes))
        done = self.parity.recomputed
        self._metrics.add("recomputed_units", self._more("units", done.units))
        self._metrics.add("recomputed_bytes", self._more("computed", done.nbytes))
        self._metrics.add("recomputed_pieces_sent", self._more("differed", done.pieces_differed))
        shed = {
            "arena": descriptors.shed,
            "bulk": bulk.shed + bulk.refused,
            "http": http.shed if http else 0,
        }
        for service, count in shed.items():
            self._metrics.add("connections_shed", self._more(service, count), service=service)

    def _more(self, name: str, count: int) -> int:
        before = self._before.get(name, 0)
        self._before[name] = count
        return count - before
