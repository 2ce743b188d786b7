"""What a policy that leaves experts out costs in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.experts.loss_reports import LossReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the policy costs in tokens, as fractions of all that were routed."""

    at_risk: float = 0.0
    """What a recovery of the newest snapshot would lose (of this rank's tokens)."""
    at_risk_mlt: float = 0.0
    """The same as MLT (MoEtion eq. 6): the sum of the layers' portions."""
    lost: float = 0.0
    """What recoveries have lost in the job's life (PLT, PEC eq. 4)."""
    lost_mlt: float = 0.0
    """The same as MLT, as of the newest recovery."""
    k: int = 0
    """Experts of each layer in a snapshot; with the policy Selective, of all layers together."""
    report: LossReport | None = None
    """The sums behind these fractions, for the daemon, which adds up those of all ranks."""


NO_LOSS = Loss()
