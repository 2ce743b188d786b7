"""The cluster that `chaos` breaks: nodes on small tmpfs, a job of raw trainers, perhaps a Redis.

It plays the control loop: replaces what is lost, starts what has died, forms the next epoch. What
breaks it is in `chaos_kinds`; what must hold afterwards is in `chaos_checks`.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from daemons import DaemonProcess
from harness import RawCluster, RawJob, Restored
from raw_trainer import RawTrainer
from redis_process import RedisServer
from waiting import wait_for

from holdfast_core.errors import HoldfastError
from holdfast_core.values import Generation

TMPFS_BYTES = 24 << 20
BUDGET_BYTES = 16 << 20
PAYLOAD_BYTES = 120_000
SAVES_MAX = 20
"""Saves until one is protected again; more are a violation."""
PROTECTED_S = 4.0
"""Then the next save is tried: this one may have lost a piece that nobody has any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How many members, in groups of how many."""

    members: int
    group_size: int

    def group_of(self, member: int) -> int:
        return member // self.group_size


def may_mount(directory: Path) -> bool:
    """Whether small tmpfs can be mounted here."""
    return _mount(directory) and _umount(directory)


def _mount(directory: Path) -> bool:
    directory.mkdir(parents=True, exist_ok=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
    return subprocess.run(mounting, check=False, capture_output=True).returncode == 0


def _umount(directory: Path) -> bool:
    return subprocess.run(["umount", "--lazy", str(directory)], check=False).returncode == 0


@dataclass(slots=True)
class SmallCluster(RawCluster):
    """Each node's memory is a tmpfs of its own where that can be mounted."""

    mounts: bool = False
    mounted: list[Path] = field(default_factory=list)

    def make_node(self, *arguments: str, root: Path | None = None) -> DaemonProcess:
        daemon = RawCluster.make_node(self, *arguments, root=root)
        if self.mounts and _mount(daemon.root):
            self.mounted.append(daemon.root)
        return daemon

    def unmount(self, root: Path) -> None:
        if root in self.mounted:
            self.mounted.remove(root)
            _umount(root)

    def __exit__(self, *exception: object) -> None:
        for daemon in self.daemons.values():
            daemon.end()
        for root in list(self.mounted):
            self.unmount(root)
        RawCluster.__exit__(self, *exception)


@dataclass(slots=True)
class Ghost:
    """A member that was frozen and replaced: when it goes on, it must find itself fenced."""

    daemon: DaemonProcess
    trainer: RawTrainer
    since: float = 0.0
    """When it went on, by the monotonic clock."""


@dataclass(slots=True)
class World:
    """One cluster and its job, from the first epoch to the last; `close` ends all of it."""

    shape: Shape
    mounts: bool
    redis: RedisServer | None
    cluster: SmallCluster = field(init=False)
    job: RawJob = field(init=False)
    gone: set[int] = field(default_factory=set)
    """Members whose node must be replaced."""
    ended: set[int] = field(default_factory=set)
    """Ranks whose trainer is dead."""
    hogs: list[Path] = field(default_factory=list)
    """Files that fill a tmpfs."""
    frozen: list[Ghost] = field(default_factory=list)
    ghosts: list[Ghost] = field(default_factory=list)
    controlled: bool = True
    """Whether the control server listens."""
    redis_hangs: bool = False
    _clocks: list[threading.Timer] = field(default_factory=list)

    def __post_init__(self) -> None:
        redis = ("--redis", self.redis.url) if self.redis else ()
        limits = ("--budget", str(BUDGET_BYTES), "--scrub-interval", "0.5")
        self.cluster = SmallCluster(arguments=(*limits, *redis), mounts=self.mounts)
        self.cluster.__enter__()

    def begin(self) -> None:
        """Start the nodes and train, if that has not been done."""
        if self.cluster.jobs:
            return
        nodes = self.cluster.start_nodes(self.shape.members)
        self.job = RawJob(
            self.cluster, nodes, nbytes=PAYLOAD_BYTES, group_size=self.shape.group_size
        )
        self.job.form()
        self.job.start_trainers()
        self.train()

    def close(self) -> None:
        for clock in self._clocks:
            clock.cancel()
            clock.join()
        self.cluster.__exit__()
        if self.redis_hangs and self.redis is not None:
            self.redis.resume()

    # --- training ---------------------------------------------------------------------------------

    def save(self) -> Generation:
        """The ranks that live save the next step, whatever becomes of it, as training would."""
        self.job.step += 1
        for trainer in self.job.trainers:
            if trainer.rank not in self.ended:
                try:
                    trainer.save(self.job.step)
                except (grpc.RpcError, HoldfastError):
                    continue
        return self.job.generation

    def train(self) -> Generation:
        """Save until a step is protected, as every member sees it."""
        for _ in range(SAVES_MAX):
            wanted = self.save()
            try:
                self.job.wait_protected(wanted.step, PROTECTED_S)
            except AssertionError:
                continue
            return wanted
        raise HoldfastError(f"nothing was protected in {SAVES_MAX} saves of epoch {self.job.epoch}")

    def later(self, pause_s: float, daemon: DaemonProcess) -> None:
        """Let a stopped daemon go on in a while."""
        clock = threading.Timer(pause_s, self._go_on, (daemon,))
        self._clocks = [c for c in self._clocks if c.is_alive()]
        self._clocks.append(clock)
        clock.start()

    def _go_on(self, daemon: DaemonProcess) -> None:
        if daemon.alive:
            daemon.send_signal(signal.SIGCONT)

    # --- the control loop -------------------------------------------------------------------------

    def form(self) -> None:
        """Bring everything back, as the control loop would, and begin an epoch."""
        self._restore_surroundings()
        job, cluster = self.job, self.cluster
        for member in sorted(self.gone):
            (job.nodes[member],) = cluster.start_nodes(1)
        self.gone.clear()
        for member in range(job.size):
            if not job.daemon(member).alive:
                self.restart(member)
        job.form()

    def restart(self, member: int) -> None:
        daemon = self.job.daemon(member)
        daemon.trap.unlink(missing_ok=True)
        self.cluster.restart(daemon.node)

    def resume(self) -> list[Restored]:
        """New trainers, restored and open; what each restored. Raises when one of them failed."""
        restored = self.job.start_trainers()
        self.ended.clear()
        return restored

    def _restore_surroundings(self) -> None:
        for clock in self._clocks:
            clock.join()
        for hog in self.hogs:
            hog.unlink(missing_ok=True)
        self.hogs.clear()
        if not self.controlled:
            self.cluster.control.start()
            self.controlled = True
            for member in set(range(self.job.size)) - self.gone:
                if self.job.daemon(member).alive:
                    self.cluster.wait_beat(self.job.nodes[member])
            self._learn_epoch()
        if self.redis is not None and self.redis_hangs:
            self.redis.resume()
            self.redis_hangs = False

    def _learn_epoch(self) -> None:
        """A control loop that was killed knows nothing but what the daemons say."""
        states = [self.cluster.control.state(node, self.job.name) for node in self.job.nodes]
        self.job.epoch = max((state.epoch for state in states if state), default=self.job.epoch)

    # --- loss -------------------------------------------------------------------------------------

    def lose(self, member: int) -> None:
        """The node is gone, with its memory."""
        daemon = self.job.daemon(member)
        daemon.lose()
        self.cluster.unmount(daemon.root)
        self.gone.add(member)

    def freeze(self, member: int) -> None:
        """The node is silent until it has been replaced."""
        daemon = self.job.daemon(member)
        daemon.send_signal(signal.SIGSTOP)
        trainer = self.job.trainers[member]
        self.frozen.append(Ghost(daemon, trainer))
        self.ended.add(member)
        self.gone.add(member)

    def thaw(self) -> None:
        """What was frozen, and has been replaced, goes on."""
        for ghost in self.frozen:
            ghost.daemon.send_signal(signal.SIGCONT)
            ghost.since = time.monotonic()
        self.ghosts += self.frozen
        self.frozen = []

    def bury(self, ghost: Ghost) -> None:
        self.ghosts.remove(ghost)
        ghost.daemon.lose()
        self.cluster.unmount(ghost.daemon.root)


def fill(directory: Path) -> Path:
    """Take all that is left of a file system; the file that takes it."""
    hog = directory / "hog"
    with hog.open("wb", buffering=0) as file:
        for nbytes in (1 << 16, 512):
            try:
                while True:
                    file.write(bytes(nbytes))
            except OSError:
                continue
    return hog


def wipe(redis: RedisServer) -> None:
    """Redis forgets everything."""
    redis.kill()
    redis.start()


def wait_dead(daemon: DaemonProcess, timeout_s: float) -> bool:
    """Whether the daemon ends within the time."""
    try:
        wait_for(f"the end of {daemon.node}", lambda: not daemon.alive, timeout_s)
    except AssertionError:
        return False
    daemon.kill()
    return True
