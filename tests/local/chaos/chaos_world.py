"""The cluster that `chaos` breaks: nodes on small tmpfs, a job of raw trainers, perhaps a Redis.

It plays the control loop: it replaces lost nodes, restarts dead daemons and forms the next epoch.
The faults are in `chaos_kinds`; the checks that follow them are in `chaos_run`.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc
from chaos_cluster import SmallCluster, Surroundings
from chaos_tier import DIRECTORY, OBJECTS, ChaosTier
from control_plane import ControlServer
from daemons import DaemonProcess
from faulty_daemon import Trap
from harness import JOB, RawJob, Restored
from operator_control import OperatorControl
from raw_trainer import RawTrainer
from redis_process import RedisServer
from waiting import wait_for

from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.generations import Generation
from holdfast_protos.connections.identity import Role

BUDGET_BYTES = 16 << 20
PAYLOAD_BYTES = 120_000
SAVES_MAX = 20
"""Saves until one is protected again; more are a violation."""
PERSISTED_S = 60.0
TRAPPED_SAVES_MAX = 4
"""A trap that is not met within so many saves is taken away again."""
DEATH_S = 0.6
"""After a save: a trap that has not been met by then waits for the next one."""
PROTECTED_S = 4.0
"""Then the next save is tried: this one may have lost a piece that no node has any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Number of members, and size of their groups."""

    members: int
    group_size: int

    def group_of(self, member: int) -> int:
        return member // self.group_size


@dataclass(slots=True)
class Ghost:
    """A member that was frozen and replaced: when it is continued, it must be fenced."""

    daemon: DaemonProcess
    trainer: RawTrainer
    since: float = 0.0
    """When it went on, by the monotonic clock."""

    def has_let_go(self, job: str) -> bool:
        """Whether its daemon reports that it is fenced, in a later epoch, or no longer has the job:
        a daemon that receives a membership without it drops all that it held."""
        try:
            jobs = self.daemon.status()["jobs"]
        except grpc.RpcError:  # it may only just have gone on
            return False
        return job not in jobs or jobs[job]["fenced"] or jobs[job]["epoch"] > self.trainer.epoch


@dataclass(slots=True)
class World:
    """One cluster and its job, from the first epoch to the last; `close` ends all of it."""

    shape: Shape
    surroundings: Surroundings
    tier_kind: str = DIRECTORY
    guarded: bool = False
    """Whether daemons and the control loop have certificates."""
    operated: bool = False
    """Whether the control server is the operator's own."""
    cluster: SmallCluster = field(init=False)
    tier: ChaosTier = field(init=False)
    job: RawJob = field(init=False)
    floor: Generation | None = None
    """What must be restored at least, after what was broken in this round; None when nothing that
    memory or storage owed is left."""
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
    _calming: list[threading.Timer] = field(default_factory=list)

    def __post_init__(self) -> None:
        around = self.surroundings
        redis = ("--redis", around.redis.url) if around.redis else ()
        limits = ("--budget", str(BUDGET_BYTES), "--scrub-interval", "0.5")
        tls = around.certificates if self.guarded else None
        server = OperatorControl if self.operated else ControlServer
        self.cluster = SmallCluster(
            arguments=(*limits, *redis),
            mounts=around.mounts,
            tls=tls / Role.DAEMON if tls else None,
            control=cast("ControlServer", server(tls / Role.OPERATOR if tls else None)),
        )
        self.cluster.__enter__()
        if self.tier_kind == OBJECTS and around.objects is not None:
            name = self.cluster.directory.name
            self.tier = ChaosTier.objects(JOB, around.objects, name)
        else:
            root = self.cluster.directory / "tier"
            root.mkdir()
            self.cluster.mount(root)
            self.tier = ChaosTier.directory(JOB, root)
        self.cluster.access = self.tier.access

    def begin(self) -> None:
        """Start the nodes and train, if that has not been done."""
        if self.cluster.jobs:
            return
        nodes = self.cluster.start_nodes(self.shape.members)
        self.job = RawJob(
            self.cluster,
            nodes,
            nbytes=PAYLOAD_BYTES,
            group_size=self.shape.group_size,
            tier=self.tier.tier,
        )
        self.job.form()
        self.job.start_trainers()
        self.train()

    def close(self) -> None:
        for clock in (*self._clocks, *self._calming):
            clock.cancel()
            clock.join()
        self.cluster.__exit__()
        self.tier.close()
        shutil.rmtree(self.tier.real, ignore_errors=True)
        if self.redis_hangs and self.redis is not None:
            self.redis.resume()

    @property
    def redis(self) -> RedisServer | None:
        return self.surroundings.redis

    # --- training ---------------------------------------------------------------------------------

    def save(self) -> Generation:
        """Save the next step on all living ranks and ignore failures, as training would."""
        self.job.step += 1
        for trainer in self.job.trainers:
            if trainer.rank not in self.ended:
                try:
                    trainer.save(self.job.step)
                except (grpc.RpcError, HoldfastError):
                    continue
        return self.job.generation

    def train(self) -> Generation:
        """Save until every member reports a step as protected."""
        for _ in range(SAVES_MAX):
            wanted = self.save()
            try:
                self.job.wait_protected(wanted.step, PROTECTED_S)
            except AssertionError:
                continue
            return wanted
        raise HoldfastError(f"nothing was protected in {SAVES_MAX} saves of epoch {self.job.epoch}")

    def persist(self) -> None:
        """Save until a set of this epoch is complete in storage, as training would.

        Raises:
            HoldfastError: when none was within `PERSISTED_S`.
        """
        until = time.monotonic() + PERSISTED_S
        wanted = Generation(self.job.epoch, 0)
        while (self.tier.newest_sound() or wanted) <= wanted:
            if time.monotonic() > until:
                raise HoldfastError(f"nothing of epoch {self.job.epoch} was persisted")
            self.train()

    def calm_later(self, pause_s: float) -> None:
        """End the trouble of storage after `pause_s` seconds, whatever goes on then."""
        clock = threading.Timer(pause_s, self.tier.calm)
        self._calming = [c for c in self._calming if c.is_alive()]
        self._calming.append(clock)
        clock.start()

    def kill_at(self, member: int, trap: Trap) -> bool:
        """Set a trap for the member's daemon: whether it met the trap within some saves, and
        died."""
        daemon = self.job.daemon(member)
        daemon.arm(trap)
        for _ in range(TRAPPED_SAVES_MAX):
            self.save()
            if wait_dead(daemon, DEATH_S):
                return True
        daemon.trap.unlink(missing_ok=True)
        return False

    def later(self, pause_s: float, daemon: DaemonProcess) -> None:
        """Continue a stopped daemon after `pause_s` seconds."""
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
        """Start new trainers, which restore and open; returns what each restored. Raises when one
        of them fails."""
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
        """Take the epoch from the daemons, as a control loop does that was killed."""
        states = [self.cluster.control.state(node, self.job.name) for node in self.job.nodes]
        self.job.epoch = max((state.epoch for state in states if state), default=self.job.epoch)

    # --- loss -------------------------------------------------------------------------------------

    def lose(self, member: int) -> None:
        """Lose the node with its memory."""
        daemon = self.job.daemon(member)
        daemon.lose()
        self.cluster.unmount(daemon.root)
        self.gone.add(member)

    def freeze(self, member: int) -> None:
        """Silence the node until it has been replaced."""
        daemon = self.job.daemon(member)
        daemon.send_signal(signal.SIGSTOP)
        trainer = self.job.trainers[member]
        self.frozen.append(Ghost(daemon, trainer))
        self.ended.add(member)
        self.gone.add(member)

    def thaw(self) -> None:
        """Continue the members that were frozen and have been replaced."""
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
    """Fill a file system; returns the file that takes the space."""
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
    """Make Redis lose all its data."""
    redis.kill()
    redis.start()


def wait_dead(daemon: DaemonProcess, timeout_s: float) -> bool:
    """Whether the daemon ends within `timeout_s` seconds."""
    try:
        wait_for(f"the end of {daemon.node}", lambda: not daemon.alive, timeout_s)
    except AssertionError:
        return False
    daemon.kill()
    return True
