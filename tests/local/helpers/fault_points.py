"""Points at which `test_fault_points` kills a daemon, and the cases made of them, as data.

A point is a list of traps, and what makes the daemon pass them. Each effect of the engine, each
file step and each transfer between daemons has a point before and one after it, or in its middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from faulty_daemon import Trap

from holdfast_core.snapshots.membership import Redundancy

REBUILD_READS = {Redundancy.RAIM5: 9, Redundancy.RAIM6: 4, Redundancy.REPLICATION: 1}
"""Of one snapshot in a group of four; with replicas, of two."""

LEADER, OTHER = 0, 2


@dataclass(frozen=True, slots=True)
class Point:
    """A point at which a daemon dies, and what makes the daemon pass it."""

    name: str
    during: str
    """`saves`, `epoch` (a new one begins), `rebuild` (the victim is a fresh node that takes over),
    `rebuild-source` (it serves one), `adoption` (it restarts)."""
    traps: tuple[Trap, ...]
    """Met one after another, by one daemon after another."""
    victims: tuple[int, ...] = (LEADER, OTHER)

    def traps_for(self, redundancy: Redundancy) -> tuple[Trap, ...]:
        """The traps for a redundancy whose rebuild may read less often: at its last read, if it has
        fewer than the trap's count."""
        most = REBUILD_READS[redundancy]
        return tuple(
            replace(trap, count=min(trap.count, most)) if trap.at == "Rebuild" else trap
            for trap in self.traps
        )


_EFFECTS = (
    # (name, during, effect)
    ("seal", "saves", "Seal"),
    ("parity", "saves", "BuildParity"),
    ("locate", "saves", "locate"),
    ("free-slot", "saves", "FreeSlot"),
    ("free-parity", "saves", "FreeParity"),
    ("forget-peers", "saves", "ForgetPeers"),
    ("save-epoch", "saves", "SaveEpoch"),
    ("report-snapshot", "saves", "SendReport:snapshot"),
    ("report-parity", "saves", "SendReport:parity"),
    ("inventory", "epoch", "SendReport:epoch"),
    ("begin-epoch", "epoch", "SaveEpoch"),
    ("verify", "epoch", "VerifySnapshot"),
    ("verify-parity", "epoch", "VerifyParity"),
    ("fetch-manifest", "rebuild", "FetchManifest"),
    ("allocate", "rebuild", "AllocateArena"),
    ("rebuild", "rebuild", "Rebuild"),
    ("adopt", "adoption", "VerifySnapshot"),
    ("adopt-parity", "adoption", "VerifyParity"),
)

_LEADING = (
    ("announce-protected", "saves", "SendDirective:protected"),
    ("announce-line", "epoch", "SendDirective:line"),
)

_FILES = (
    # (name, pattern)
    ("manifest", "slot-*.manifest"),
    ("entry", "*.entry"),
    ("epoch", "epoch.json"),
    ("kept", "[0-9]*.manifest"),
)


def _points() -> Iterator[Point]:
    for when in ("before", "after"):
        for name, during, effect in _EFFECTS:
            yield Point(f"{name}-{when}", during, (Trap(at=effect, when=when),))
        for name, during, effect in _LEADING:
            yield Point(f"{name}-{when}", during, (Trap(at=effect, when=when),), (LEADER,))
    for name, pattern in _FILES:
        torn = Trap(at="write", when="during", match=f"{pattern}.tmp")
        yield Point(f"torn-{name}", "saves", (torn,))
        renamed = Trap(at="rename", when="after", match=pattern)
        yield Point(f"renamed-{name}", "saves", (renamed,))
        if name != "epoch":
            unlinked = Trap(at="unlink", when="after", match=pattern)
            yield Point(f"unlinked-{name}", "saves", (unlinked,))
    torn = Trap(at="write", when="during", match="slot-*.manifest.tmp")
    yield Point("torn-rebuilt-manifest", "rebuild", (torn,))
    yield Point("torn-then-killed-adopting", "saves", (torn, Trap(at="VerifySnapshot")))
    yield Point("parity-half-received", "saves", (Trap(at="BuildParity", when="during"),))
    yield Point("parity-late", "saves", (Trap(at="BuildParity", when="during", count=5),))
    yield Point("chunk-half-sent", "saves", (Trap(at="send", when="during"),))
    yield Point("chunk-sent", "saves", (Trap(at="send", when="after"),))
    yield Point("rebuild-first-chunk", "rebuild", (Trap(at="Rebuild", when="during"),))
    yield Point("rebuild-late-chunk", "rebuild", (Trap(at="Rebuild", when="during", count=7),))
    yield Point("source-half-sent", "rebuild-source", (Trap(at="send", when="during"),))
    yield Point("source-locates", "rebuild-source", (Trap(at="locate"),))
    twice = (Trap(at="VerifySnapshot"), Trap(at="VerifyParity", when="after"))
    yield Point("adopt-twice", "adoption", twice)


POINTS = tuple(_points())


@dataclass(frozen=True, slots=True)
class Case:
    """A point, the member that dies there, and how it comes back."""

    point: Point
    victim: int
    loss: str
    """`daemon` (its daemon starts again), `node` (a spare takes over), `addresses` (its daemon
    starts again, at another address and in the same epoch)."""

    @property
    def name(self) -> str:
        return f"{self.point.name}-member{self.victim}-{self.loss}"


def _losses(point: Point) -> tuple[str, ...]:
    if point.during == "rebuild-source":
        # A fresh node and its source are two nodes of one group: not promised to survive.
        return ("daemon",)
    # Where trainers save; elsewhere it differs from a new epoch in nothing that is at stake.
    addresses = point.during == "saves" and "-after" not in point.name
    return ("daemon", "node", "addresses") if addresses else ("daemon", "node")


CASES = tuple(
    Case(point, victim, loss)
    for point in POINTS
    for loss in _losses(point)
    for victim in point.victims
)


def _short() -> Iterator[Case]:
    for number, point in enumerate(POINTS):
        losses, victims = _losses(point), point.victims
        for i, loss in enumerate(losses):
            for j, victim in enumerate(victims):
                if 1 in (len(losses), len(victims)) or (number + i + j) % 2 == 0:
                    yield Case(point, victim, loss)


SHORT = frozenset(_short())
"""Every point with each of its victims and with each of its losses, if not with each two of them.
"""


def _once() -> Iterator[Case]:
    """Every point, its victims and losses in turns."""
    for number, point in enumerate(POINTS):
        cases = [case for case in CASES if case in SHORT and case.point is point]
        yield cases[number % len(cases)]


FEW = frozenset(tuple(_once())[2::3])
"""Every third point, its victims and losses in turns."""
