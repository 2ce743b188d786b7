"""What protection takes of the network, of a whole job: from the words of its daemons. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.quantities import format_rate
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_operator.reconciler.views import Observed

DIGITS = 2
"""Significant ones: a status that differs in more would be written all the time."""

NOTHING_BYTES_S = 1000.0
"""Less is shown as nothing: daemons show a rate that fades."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectionTraffic:
    """Bytes a second that nodes fetched from each other for parity of late, rounded."""

    node_bytes_s: int
    """Of the busiest node."""
    bytes_s: int
    """Of all nodes."""
    limit_bytes_s: int
    """What the job lets each node fetch; 0: no limit."""


def traffic_of(observed: Observed, membership: Membership | None) -> ProtectionTraffic | None:
    """The traffic of a job; None where it has no redundancy or is not placed."""
    if membership is None or membership.redundancy is Redundancy.NONE:
        return None
    rates = [view.protection_bytes_s for view in observed.views(membership) if view is not None]
    return ProtectionTraffic(
        node_bytes_s=_rounded(max(rates, default=0.0)),
        bytes_s=_rounded(sum(rates)),
        limit_bytes_s=membership.protection_bytes_s,
    )


def traffic_text(traffic: ProtectionTraffic) -> str:
    """The traffic in a sentence."""
    text = (
        f"protection fetches {format_rate(traffic.bytes_s)} over all nodes, "
        f"{format_rate(traffic.node_bytes_s)} into the busiest one"
    )
    if traffic.limit_bytes_s:
        text += f" (at most {format_rate(traffic.limit_bytes_s)})"
    return text


def _rounded(bytes_s: float) -> int:
    return int(float(f"{bytes_s:.{DIGITS}g}")) if bytes_s >= NOTHING_BYTES_S else 0
