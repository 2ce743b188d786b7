"""A cluster of real daemons, and jobs of raw trainers on it; the test plays the control loop.

Nothing here depends on how the daemons work: it starts processes, kills them, and checks what the
trainers of a job restore.
"""

from __future__ import annotations

import itertools
import random
import shutil
import uuid
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from control_plane import ControlServer
from daemons import DaemonProcess
from raw_trainer import RawTrainer, forget
from waiting import WAIT_S, wait_for

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import SLOTS_MAX
from holdfast_core.snapshots.membership import Member, Membership, Redundancy, Tier
from holdfast_protos import codec, control_pb2

JOB = "tests.job"
_subnets = itertools.count(random.SystemRandom().randrange(1, 200))

Restored = tuple[Generation | None, bytes, str]


@dataclass(slots=True)
class RawCluster:
    """Daemons without a job. As a context manager, it ends everything that it started."""

    arguments: tuple[str, ...] = ()
    plain: bool = False
    """Run the daemon's command, instead of forking daemons that can be trapped."""
    tls: Path | None = None
    """Directory of the daemons' certificate; they do without when None."""
    directory: Path = field(
        default_factory=lambda: Path("/dev/shm") / f"hft-{uuid.uuid4().hex[:8]}"
    )
    control: ControlServer = field(default_factory=ControlServer)
    daemons: dict[str, DaemonProcess] = field(default_factory=dict)
    jobs: list[RawJob] = field(default_factory=list)
    _subnet: int = field(default_factory=lambda: next(_subnets) % 250)
    _made: int = 0

    def __enter__(self) -> RawCluster:
        self.directory.mkdir(parents=True)
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self.jobs:
            job.stop_trainers()
        for daemon in self.daemons.values():
            daemon.end()
        self.control.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
        forget(self.directory)

    def make_node(self, *arguments: str, root: Path | None = None) -> DaemonProcess:
        """Make a node without starting its daemon."""
        name = f"n{self._made}"
        daemon = DaemonProcess(
            node=name,
            control_port=self.control.port,
            root=root or self.directory / name,
            host=f"127.78.{self._subnet}.{self._made % 250 + 1}",
            arguments=(*self.arguments, *arguments),
            plain=self.plain,
            tls=self.tls,
        )
        self._made += 1
        self.daemons[name] = daemon
        return daemon

    def start_nodes(self, count: int, *arguments: str) -> list[str]:
        """Start new daemons on fresh memory; returns when all have sent a heartbeat."""
        made = [self.make_node(*arguments) for _ in range(count)]
        for daemon in made:
            daemon.start()
        for daemon in made:
            self.wait_beat(daemon.node)
        return [daemon.node for daemon in made]

    def restart(self, node: str) -> None:
        """Start the node's daemon again on the memory that it left."""
        daemon = self.daemons[node]
        daemon.kill()
        self.control.forget(node)
        daemon.start()
        self.wait_beat(node)

    def wait_beat(self, node: str) -> control_pb2.Heartbeat:
        daemon = self.daemons[node]

        def beat() -> control_pb2.Heartbeat | None:
            assert daemon.alive, f"{node} ended: {daemon.log.read_text()[-2000:]}"
            return self.control.beats.get(node)

        found = wait_for(f"a heartbeat of {node}", beat)
        assert found is not None
        return found

    def report(self) -> str:
        """State and last log lines of the daemons, for a failed test's report."""
        lines = []
        for name, daemon in self.daemons.items():
            if not daemon.alive or not daemon.log.exists():
                continue
            lines.append(f"--- {name}")
            for job in self.jobs:
                held = daemon.job(job.name)
                lines.append(f"{job.name} epoch {held.get('epoch')} line {held.get('line')}")
                lines.append(f"protected {held.get('protected')}: {held.get('problem')}")
                lines += [str(item) for item in (*held.get("slots", ()), *held.get("parity", ()))]
            logged = daemon.log.read_text().splitlines()
            lines += [line for line in logged if '"level":"debug"' not in line][-10:]
        return "\n".join(lines)


@dataclass(slots=True)
class RawJob:
    """A job of one rank per member, and the control loop that the test plays for it."""

    cluster: RawCluster
    nodes: list[str]
    """By member."""
    name: str = JOB
    nbytes: int = 300_000
    group_size: int = 0
    redundancy: Redundancy = Redundancy.RAIM5
    replicas: int = 1
    slots: int = SLOTS_MAX
    tier: Tier | None = None
    policy: PolicyType = PolicyType.PARTIAL_EXPERTS
    """Which pieces the saves carry over, where they can."""
    bulk_addresses: dict[str, str] = field(default_factory=dict)
    """Node → address that its peers are given instead of its own."""
    epoch: int = 0
    revision: int = 0
    step: int = 0
    """Newest step that was saved."""
    trainers: list[RawTrainer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster.jobs.append(self)

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def generation(self) -> Generation:
        """The generation of the newest step in this epoch."""
        return Generation(self.epoch, self.step)

    def daemon(self, member: int) -> DaemonProcess:
        return self.cluster.daemons[self.nodes[member]]

    # --- control ----------------------------------------------------------------------------------

    def membership(self) -> Membership:
        size = self.group_size or self.size
        return Membership(
            job=self.name,
            epoch=self.epoch,
            revision=self.revision,
            members=tuple(self._place(i, node) for i, node in enumerate(self.nodes)),
            nproc_per_node=1,
            groups=tuple(tuple(range(i, i + size)) for i in range(0, self.size, size)),
            redundancy=self.redundancy,
            replicas=self.replicas,
            tier=self.tier,
            slots=self.slots,
        )

    def _place(self, index: int, node: str) -> Member:
        beat = self.cluster.wait_beat(node)
        return Member(
            index=index,
            node=node,
            memory_id=beat.memory_id,
            peer_address=beat.peer_address,
            bulk_address=self.bulk_addresses.get(node, beat.bulk_address),
        )

    def form(self) -> None:
        """Begin a new epoch."""
        self.epoch, self.revision = self.epoch + 1, 0
        self._publish(self.nodes)

    def readdress(self) -> None:
        """Publish the new addresses of daemons that came back, in the same epoch."""
        self.revision += 1
        self._publish(self.nodes)

    def publish_to(self, *nodes: str) -> None:
        """Publish the membership again to these nodes."""
        self._publish(nodes)

    def _publish(self, nodes: tuple[str, ...] | list[str]) -> None:
        membership = codec.membership_to_proto(self.membership())
        for node in nodes:
            self.cluster.control.send(node, control_pb2.ControlMessage(membership=membership))

    def drop(self) -> None:
        self.stop_trainers()
        message = control_pb2.ControlMessage(drop=control_pb2.DropJob(job=self.name))
        for node in self.nodes:
            self.cluster.control.send(node, message)

    # --- trainers ---------------------------------------------------------------------------------

    def make_trainer(self, rank: int) -> RawTrainer:
        """Make a trainer of `rank` that has done nothing yet."""
        largest = self.nbytes + 5000 * self.size
        trainer = RawTrainer(
            self.daemon(rank), self.name, rank, self.size, self.rank_bytes(rank), largest
        )
        trainer.policy = self.policy
        return trainer

    def rank_bytes(self, rank: int) -> int:
        """Bytes of a rank's payload without extras; no two ranks have equally many."""
        return self.nbytes + 5000 * rank

    def carry(self, carries: bool) -> None:
        """Carry pieces over from the next save on, or do not."""
        self.capture(PolicyType.PARTIAL_EXPERTS if carries else PolicyType.FULL)

    def capture(self, policy: PolicyType) -> None:
        """Carry over the pieces of `policy` from the next save on."""
        self.policy = policy
        for trainer in self.trainers:
            trainer.policy = policy

    def start_trainers(self) -> list[Restored]:
        """Start new trainers on all members, which restore and open; returns what each restored."""
        self.stop_trainers()
        self.trainers = [self.make_trainer(rank) for rank in range(self.size)]
        with futures.ThreadPoolExecutor(self.size) as pool:
            for trainer in self.trainers:
                trainer.join(self.epoch)
            restored = list(pool.map(lambda t: t.restore(), self.trainers))
            list(pool.map(lambda t: t.open(), self.trainers))
        return restored

    def stop_trainers(self) -> None:
        for trainer in self.trainers:
            trainer.die()

    def save(self, step: int) -> None:
        """Save `step` on every rank. Raises AssertionError when one gets no slot."""
        for trainer in self.trainers:
            if not trainer.save(step):
                raise AssertionError(f"rank {trainer.rank} got no slot for step {step}")

    def try_save(self, *, without: int | None = None) -> Generation:
        """Save the next step on every rank, or all but `without`, and ignore failures, as training
        would."""
        self.step += 1
        for trainer in self.trainers:
            if trainer.rank == without:
                continue
            try:
                trainer.save(self.step)
            except grpc.RpcError:
                continue
        return Generation(self.epoch, self.step)

    # --- what came of it --------------------------------------------------------------------------

    def protected(self, member: int = 0) -> Generation | None:
        """The newest generation that the member's daemon reports as protected."""
        text = self.daemon(member).job(self.name).get("protected")
        return Generation.parse(text) if text else None

    def wait_protected(self, step: int, timeout_s: float = WAIT_S) -> None:
        """Wait until every daemon reports that `step` of this epoch is protected."""
        wanted = Generation(self.epoch, step)
        for member in range(self.size):
            wait_for(
                f"{wanted} to be protected as member {member} sees it",
                lambda member=member: self.protected(member) == wanted,  # type: ignore[misc]
                timeout_s,
            )

    def train(self, steps: int = 1) -> Generation:
        """Save the next steps, each protected before the next one; returns the newest
        generation."""
        for _ in range(steps):
            if self.slots < SLOTS_MAX:
                wait_for("a save for which every rank has a slot", self._is_saved)
            else:
                self.step += 1
                self.save(self.step)
            self.wait_protected(self.step)
        return self.generation

    def _is_saved(self) -> bool:
        """Save the next step on every rank; whether all had a slot. With two slots, none may be
        left after a fault until a snapshot that was not given up is protected; and a slot that one
        rank has is free again once it is known that another one has none."""
        self.step += 1
        granted = [self._has_slot(trainer) for trainer in self.trainers]
        return all(granted)

    def _has_slot(self, trainer: RawTrainer) -> bool:
        try:
            return trainer.save(self.step)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False

    def check_restored(self, restored: list[Restored], not_before: Generation) -> Generation:
        """Check that all ranks restored exactly the bytes of one generation, at least `not_before`;
        returns it."""
        generations = {generation for generation, _, _ in restored}
        assert len(generations) == 1, f"ranks restored {generations}"
        generation = generations.pop()
        assert generation is not None, f"nothing was restored: {restored[0][2]}"
        assert generation >= not_before, f"{generation} is older than {not_before}"
        for trainer, (_, payload, _) in zip(self.trainers, restored, strict=True):
            right = payload == trainer.content_at(generation)
            assert right, f"rank {trainer.rank} restored other bytes than {generation} has"
        return generation
