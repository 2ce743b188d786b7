"""Cost in tokens of a policy that leaves experts out."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.experts.loss_reports import LossReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Cost of the policy in tokens, as fractions of all routed tokens."""

    at_risk: float = 0.0
    """Loss in a recovery of the newest snapshot (of this rank's tokens)."""
    at_risk_mlt: float = 0.0
    """Loss in a recovery of the newest snapshot as MLT (MoEtion eq. 6): the sum of the layers'
    portions."""
    lost: float = 0.0
    """Loss in all recoveries of the job's life (PLT, PEC eq. 4): of the tokens of all ranks as of
    the newest recovery, and as if each rank had routed as many since then as this one."""
    lost_mlt: float = 0.0
    """Loss in all recoveries as MLT, as of the newest one."""
    k: int = 0
    """Experts in a snapshot, as the policy counts them: of each layer, or of all layers."""
    report: LossReport | None = None
    """Sums behind these fractions, for the daemon, which adds up those of all ranks."""


NO_LOSS = Loss()
