"""Targets that Holdfast must reach, and figures shown side by side, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One row of the table."""

    key: str
    """Key of the row in the report."""
    figure: str
    """Name of the measured quantity, for people."""
    at_most: float | None
    """Upper limit in the figure's unit; None for a row that is shown without a target."""


TARGETS: tuple[Target, ...] = (
    Target(key="blocked", figure="trainer blocked, not overlapped", at_most=1.15),
    Target(key="staged", figure="time to staged", at_most=1.15),
    Target(key="save_call_ms", figure="save() call", at_most=5.0),
    Target(key="committed", figure="time to committed", at_most=1.2),
    Target(key="first_save", figure="first save after open", at_most=1.5),
    Target(key="looked", figure="… comparing all of it, if replicated", at_most=None),
    Target(key="partial_staged", figure="1 of 8 experts: staged", at_most=1.1),
    Target(key="partial_committed", figure="1 of 8 experts: committed", at_most=1.1),
    Target(key="partial_2_staged", figure="2 of 8 experts: staged", at_most=1.1),
    Target(key="partial_2_committed", figure="2 of 8 experts: committed", at_most=1.1),
    Target(key="partial_4_staged", figure="4 of 8 experts: staged", at_most=1.1),
    Target(key="partial_4_committed", figure="4 of 8 experts: committed", at_most=1.1),
    Target(key="partial_over", figure="… committed, over its share", at_most=None),
    Target(
        key="partial_over_floor", figure="… … floor: two calls to a daemon at rest", at_most=None
    ),
    Target(key="weights_slot", figure="slot without compute weights", at_most=None),
    Target(key="weights_staged", figure="… time to staged", at_most=None),
    Target(key="restore", figure="restore after a trainer crash", at_most=1.3),
    Target(key="restore_floor", figure="… floor: reading the bytes back", at_most=None),
    Target(key="protected", figure="protected, 4 daemons on loopback", at_most=1.5),
    Target(key="protected_cpu", figure="… CPU time of the daemons, for a GiB", at_most=None),
    Target(key="changed_network", figure="… bytes sent, beside what changed", at_most=5.0),
    Target(key="rebuild", figure="rebuild of a lost member", at_most=1.5),
    Target(key="rebuild_floor", figure="… floor: the bare path and the next three", at_most=None),
    Target(key="rebuild_combined", figure="… … bytes combined, by themselves", at_most=None),
    Target(key="rebuild_verified", figure="… … bytes verified, by themselves", at_most=None),
    Target(key="rebuild_written", figure="… … bytes written, by themselves", at_most=None),
    Target(
        key="rebuild_from_membership",
        figure="… from the new membership on, allocation included",
        at_most=None,
    ),
    Target(
        key="membership_floor", figure="… … floor: that of a rebuild, the next three", at_most=None
    ),
    Target(key="rebuild_survivors", figure="… … … survivors verify, by themselves", at_most=None),
    Target(key="rebuild_asked", figure="… … … a manifest asked for, by itself", at_most=None),
    Target(key="rebuild_allocated", figure="… … … an arena allocated, by itself", at_most=None),
    Target(key="rebuild_cpu", figure="… … CPU time of the daemons, for a GiB", at_most=None),
    Target(key="memory_error", figure="memory, beside what was predicted", at_most=2.0),
    Target(key="overhead", figure="longer step, a snapshot in each", at_most=None),
    Target(
        key="overhead_floor", figure="… floor: its bytes copied and hashed, no more", at_most=None
    ),
    Target(key="overhead_daemon", figure="… CPU time of the daemon, for a step", at_most=None),
    Target(key="detectors", figure="longer step, all detectors on", at_most=0.3),
    Target(
        key="persist_overhead", figure="longer step, every fifth persisted, core free", at_most=None
    ),
    Target(key="persist_overhead_busy", figure="… with a rank on every core", at_most=None),
    Target(key="persist_overhead_bare", figure="… … floor: plain writes", at_most=None),
    Target(key="many_save_ms", figure="CPU time of save(), 20,000 small tensors", at_most=None),
    Target(key="many_read", figure="… reading addresses and versions alone", at_most=None),
    Target(key="many_cached", figure="… … if they are in the processor's cache", at_most=None),
    Target(key="many_moved", figure="… looking for tensors that moved", at_most=None),
    Target(key="many_noted", figure="… noting the rest of what may not change", at_most=None),
    Target(key="many_extras", figure="… what is no tensor", at_most=None),
    Target(key="many_forms", figure="… how they are read, beside training", at_most=None),
    Target(key="many_checked", figure="… … compared, beside training", at_most=None),
    Target(
        key="many_modules_ms", figure="CPU time of save(), as many in a deep model", at_most=None
    ),
    Target(key="stay_rank_step", figure="rank crash to the next step", at_most=1.0),
    Target(
        key="stay_node_after_noticed", figure="node loss, detection to the next step", at_most=2.0
    ),
    Target(
        key="stay_fewer_after_noticed",
        figure="node loss without a spare, detection to the next step",
        at_most=2.0,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One row of the table that has a column for each number of slots."""

    figure: str
    """Name of the measured quantity, for people."""
    key: str
    """Key of the row in the report, without the number of slots before it."""

    def key_of(self, slots: int) -> str:
        """Key of the row in the report for so many slots."""
        return f"slots_{slots}_{self.key}"


_STAGES = {
    "interval": "from save to save",
    "call": "save() call",
    "blocked": "trainer blocked",
    "committed": "committed",
    "protected": "protected",
    "skipped": "saves skipped",
    "planned": "… as `holdfast plan` computes it",
}

OF_SLOTS: tuple[Compared, ...] = (
    *(
        Compared(figure=f"{pace}: {figure}", key=f"{name}_{stage}")
        for name, pace in (("dense", "back to back"), ("roomy", "with room"))
        for stage, figure in _STAGES.items()
    ),
    Compared(figure="memory of a node, at most", key="taken"),
    Compared(figure="… reserved, as predicted", key="taken_predicted"),
    Compared(figure="memory of a node between builds", key="settled"),
    Compared(figure="… as predicted", key="settled_predicted"),
)
