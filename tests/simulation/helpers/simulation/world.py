"""Interfaces through which the parts of a simulated cluster use it and each other.

Disks, network, daemons, trainers, storage and faults are modules of their own, which only `cluster`
puts together. They reach the rest through the protocols here, so that no imports are circular.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from simulation.checking import Bearable
from simulation.clock import Clock, Network
from simulation.disk import Disk
from simulation.fibers import Fiber

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.effects import Completion, Effect, Note


class Daemon(Protocol):
    """A daemon process, as the other parts use it."""

    node: str
    disk: Disk
    engine: JobEngine
    alive: bool
    paused: bool
    """Whether SIGSTOP has stopped it."""

    @property
    def now(self) -> float:
        """Time on its node's own clock."""
        ...

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the daemon now, or when it is continued; never once it is dead."""
        ...

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry out effects of the daemon's engine."""
        ...

    def resume(self) -> None:
        """Continue the process, as SIGCONT does."""
        ...

    def pause_storage(self) -> None:
        """Wait for storage, from inside a call to it."""
        ...


class Trainer(Protocol):
    """A trainer process, as the other parts use it."""

    node: str
    rank: int
    alive: bool
    claimed: bool
    """Whether it holds the lock of its arena."""

    def pause(self, pause_s: float) -> None:
        """Stop the process as SIGSTOP does, and continue it after `pause_s` seconds."""
        ...

    def kill(self) -> None:
        """Kill the process, as SIGKILL does."""
        ...


class World(Protocol):
    """The simulated cluster, as its parts use it."""

    clock: Clock
    network: Network
    membership: Membership | None
    members: int
    nproc: int
    disks: dict[str, Disk]
    clock_offset: dict[str, float]
    """By node, the error of its clock in seconds."""
    dead_nodes: set[str]
    done: bool
    policy: PolicyType
    turns: int
    """Number of saves in which each piece is captured once, where pieces take turns: the steps of a
    window."""
    windows: dict[Generation, int]
    """Generation that is a window → the step of its first save."""
    captured: dict[tuple[int, Generation], bytes]
    """By rank and generation, the bytes that the rank captured, or would have."""
    bearable: Bearable
    """What the job may lose now."""
    counts: Counter[str]
    fibers: list[Fiber[Completion]]
    """Transfers that have begun."""

    daemons: Mapping[str, Daemon]
    """By node, its newest daemon."""
    workers: Sequence[Trainer]
    """Trainers of all epochs that may still run."""

    # --- events -----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Write a line into the schedule's log."""
        ...

    def strike(self, node: str, where: str) -> None:
        """Give a fault the chance to strike the node."""
        ...

    def strike_transfer(self, owner: str, source: str) -> None:
        """Give a fault the chance to strike between two parts of a transfer from `source` to
        `owner`."""
        ...

    def noted(self, node: str, note: Note) -> None:
        """Record that a daemon noted an event."""
        ...

    def writing(self, trainer: Trainer) -> None:
        """Record that a trainer is in the middle of writing a snapshot."""
        ...

    def resumed(self, epoch: int, line: Generation | None) -> None:
        """Record that all ranks of an epoch restored the same generation."""
        ...

    def restore_failed(self, rank: int) -> None:
        """Record that a rank found a corrupt piece."""
        ...

    def is_finished(self, epoch: int, step: int) -> bool:
        """Whether training ends with this step."""
        ...

    # --- state ------------------------------------------------------------------------------------

    def reachable_daemon(self, a: str, b: str) -> Daemon | None:
        """The daemon of node `b` that a connection from node `a` would reach; None when it would
        reach none."""
        ...

    def is_claimed(self, node: str, rank: int) -> bool:
        """Whether a living process holds the lock of the rank's arena on this node."""
        ...

    def wire_flips(self) -> bool:
        """Whether a bit of the data sent now flips on its way."""
        ...

    def check_block(self, node: str, lane: int, slot: int) -> None:
        """Check that the block matches its entry.

        Raises:
            AssertionError: when it does not.
        """
        ...
