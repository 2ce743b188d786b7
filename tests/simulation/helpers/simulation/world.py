"""What the parts of a simulated cluster know of it, and of each other.

Disks, network, daemons, trainers, storage and faults are modules of their own, which only `cluster`
puts together. They see the rest through the protocols here, so that none of them imports what
imports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from simulation.clock import Clock, Network
from simulation.disk import Disk
from simulation.fibers import Fiber

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.effects import Completion, Effect, Note


class Daemon(Protocol):
    """A daemon process, as others meet it."""

    node: str
    disk: Disk
    engine: JobEngine
    alive: bool
    paused: bool
    """Whether SIGSTOP holds it."""

    @property
    def now(self) -> float:
        """Its node's own clock."""
        ...

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in it now, or when it is continued; never once it is dead."""
        ...

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry out effects of its engine."""
        ...

    def resume(self) -> None:
        """SIGCONT."""
        ...

    def pause_storage(self) -> None:
        """From inside a call of storage: wait for it."""
        ...


class Trainer(Protocol):
    """A trainer process, as others meet it."""

    node: str
    rank: int
    alive: bool
    claimed: bool
    """Whether it holds the lock of its arena."""

    def pause(self, pause_s: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


class World(Protocol):
    """The simulated cluster, as its parts see it."""

    clock: Clock
    network: Network
    membership: Membership | None
    members: int
    nproc: int
    disks: dict[str, Disk]
    clock_offset: dict[str, float]
    """By node, what its clock is wrong by."""
    dead_nodes: set[str]
    done: bool
    policy: PolicyType
    turns: int
    """In how many saves each piece is captured once, where they take turns."""
    captured: dict[tuple[int, Generation], bytes]
    """What each rank captured, or would have."""
    may_lose: dict[tuple[int, ...], int]
    """Members that a parity group may lose now; none when it is not in here."""
    counts: Counter[str]
    fibers: list[Fiber[Completion]]
    """Transfers that have begun."""

    daemons: Mapping[str, Daemon]
    """By node, the newest one."""
    workers: Sequence[Trainer]
    """Of all epochs, those that may still run."""

    # --- what happens -----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Write a line into the schedule's log."""
        ...

    def strike(self, node: str, where: str) -> None:
        """Give a fault the chance to strike the node."""
        ...

    def strike_transfer(self, owner: str, source: str) -> None:
        """The same between two parts of a transfer from `source` to `owner`."""
        ...

    def heard(self, node: str, note: Note) -> None:
        """A daemon says that something happened."""
        ...

    def writing(self, trainer: Trainer) -> None:
        """A trainer is in the middle of writing a snapshot."""
        ...

    def resumed(self, epoch: int, line: Generation | None) -> None:
        """All ranks of an epoch restored the same generation."""
        ...

    def restore_failed(self, rank: int) -> None:
        """A rank found a corrupt piece."""
        ...

    def is_finished(self, epoch: int, step: int) -> bool:
        """Whether training ends with this step."""
        ...

    # --- what there is ----------------------------------------------------------------------------

    def reachable_daemon(self, a: str, b: str) -> Daemon | None:
        """The daemon of node `b` as a connection from node `a` would find it."""
        ...

    def is_claimed(self, node: str, rank: int) -> bool:
        """Whether a living process holds the lock of the rank's arena on this node."""
        ...

    def wire_flips(self) -> bool:
        """Whether a bit of what is sent now flips on its way."""
        ...

    def check_block(self, node: str, lane: int, slot: int) -> None:
        """Raise AssertionError unless the block is what its entry says."""
        ...
