"""Network traffic of protection for a whole job, from the reports of its daemons. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.quantities import format_rate
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_operator.reconciler.observe.views import ClusterView

DIGITS = 2
"""Significant digits of a rate: with more of them, the status would change all the time."""

NOTHING_BYTES_S = 1000.0
"""Rates below this become 0: what daemons report fades slowly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectionTraffic:
    """Recent traffic between nodes for parity, in bytes a second, rounded."""

    node_bytes_s: int
    """Bytes a second that the busiest node fetched."""
    bytes_s: int
    """Bytes a second that all nodes together fetched."""
    limit_bytes_s: int
    """Bytes a second that the job lets each node fetch; 0: no limit."""


def traffic_of(observed: ClusterView, membership: Membership | None) -> ProtectionTraffic | None:
    """Traffic of a job; None for a job that has no redundancy or is not placed."""
    if membership is None or membership.redundancy is Redundancy.NONE:
        return None
    rates = [view.protection_bytes_s for view in observed.views(membership) if view is not None]
    return ProtectionTraffic(
        node_bytes_s=_rounded(max(rates, default=0.0)),
        bytes_s=_rounded(sum(rates)),
        limit_bytes_s=membership.protection_bytes_s,
    )


def traffic_text(traffic: ProtectionTraffic) -> str:
    """Traffic in one sentence."""
    text = (
        f"protection fetches {format_rate(traffic.bytes_s)} over all nodes, "
        f"{format_rate(traffic.node_bytes_s)} into the busiest one"
    )
    if traffic.limit_bytes_s:
        text += f" (at most {format_rate(traffic.limit_bytes_s)})"
    return text


def _rounded(bytes_s: float) -> int:
    return int(float(f"{bytes_s:.{DIGITS}g}")) if bytes_s >= NOTHING_BYTES_S else 0
