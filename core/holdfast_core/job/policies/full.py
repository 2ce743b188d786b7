"""The policy `Full`: snapshots capture everything."""

from __future__ import annotations

from holdfast_core.job.policies.policy import Policy


class Full(Policy, frozen=True, kw_only=True):
    """Every unit in every snapshot; has no settings."""

    type_name = "Full"
    captures = "every unit"
