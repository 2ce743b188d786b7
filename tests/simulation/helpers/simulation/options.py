"""Options of one simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.membership import Redundancy

FAULTS = (
    "kill_rank",
    "kill_daemon",
    "kill_node",
    "kill_control",
    "pause_daemon",
    "corrupt_arena",
    "corrupt_parity",
    "corrupt_manifest",
    "cut_node",
    "jump_clock",
    "fill_tmpfs",
    "end_before_parity",
    "end_while_writing",
)
"""The kinds of faults; see `faults.Faults`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of one schedule."""

    seed: int
    steps: int = 12
    faults: int = 4
    kinds: tuple[str, ...] = FAULTS
    """Kinds of faults that may strike."""
    policy: PolicyType | None = None
    """Policy that decides which pieces a save captures; None for one that the seed chooses."""
    tier: bool | None = None
    """Whether generations are persisted, too; None for every eighth seed."""
    worlds: bool | None = None
    """Whether members leave and come, so that one world follows another; None for every eighth
    seed."""
    redundancy: Redundancy = Redundancy.RAIM5
    slots: int | None = None
    """Slots of each rank's arena; None for a number that the seed chooses."""
    losses: int = 1
    """Number of members that a group may lose at once: as many as the redundancy covers."""
    time_limit_s: float = 120.0

    @property
    def persists(self) -> bool:
        """Whether there is a durable tier."""
        return self.seed % 8 == 0 if self.tier is None else self.tier

    @property
    def changes_worlds(self) -> bool:
        """Whether the world changes. Then there is no durable tier, and snapshots are whole."""
        wanted = self.seed % 8 == 4 if self.worlds is None else self.worlds
        return wanted and not self.persists and self.policy in (None, PolicyType.FULL)
