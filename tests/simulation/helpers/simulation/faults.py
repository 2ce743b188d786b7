"""Faults of the simulation: each strikes one node, between effects or exactly at one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from simulation.daemon import VirtualDaemon
from simulation.disk import Disk, DiskArena
from simulation.options import Options
from simulation.trainers import TrainingWorld, Worker
from simulation.world import Trainer, World

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_daemon.memory.arenas import SealedSlot

LURKING = ("end_before_parity", "end_while_writing")
"""Kinds of faults that wait for their moment."""


class Faults(World):
    """The part of a simulated cluster that breaks it. It spares a group that may not lose a member
    now: no redundancy has to survive more than it promises."""

    membership: Membership | None
    training: TrainingWorld | None
    """The newest training world."""
    daemons: dict[str, VirtualDaemon]
    workers: list[Worker]
    protected: Generation | None
    check_disks: Callable[[], None]
    start_daemon: Callable[[str], None]
    look: Callable[[], None]

    def __init__(self, options: Options, rng: random.Random) -> None:
        self._kinds = options.kinds
        if options.changes_worlds and "kill_node" in self._kinds:
            self._kinds += ("kill_node",) * len(self._kinds)  # worlds change where nodes are lost
        self._faults_left = options.faults
        self._strike_rate = rng.choice((0.0005, 0.002, 0.006))
        self._flip_rate = rng.choice((0.0, 0.0, 0.01))
        self._striking = False
        self._lurking = ""
        """The kind of fault that waits for its moment."""
        self._lose_at_line = False
        """Whether a node is lost as soon as the next epoch has its line."""
        self._suspects: dict[str, float] = {}
        """Node that is silent → the time since which it is."""
        self._control_down_until = 0.0

    # --- what may be lost -------------------------------------------------------------------------

    def may_lose(self, member: int) -> int:
        """Number of members of the member's groups that may be lost now; see `Bearable`."""
        return self.bearable.of(member, *self._worlds())

    def lose(self, member: int) -> None:
        """Count the loss of `member`."""
        self.bearable.lose(member, *self._worlds())

    def _worlds(self) -> tuple[MemberWorld, MemberWorld]:
        """The world that captured the newest protected generation, and the present one."""
        membership = self.membership
        assert membership is not None
        guarding = membership.world_of(self.protected) if self.protected else membership.world
        assert guarding is not None, f"the world of {self.protected} was forgotten"
        return guarding, membership.world

    # --- faults -----------------------------------------------------------------------------------

    def strike(self, node: str, where: str) -> None:
        """Give a fault the chance to strike the node's daemon, or the node, at an effect."""
        if self._striking or self._faults_left <= 0 or self.membership is None:
            return
        if self.clock.rng.random() >= self._strike_rate:
            return
        kind = self.clock.rng.choice(("kill_daemon", "kill_node"))
        if kind not in self._kinds:
            return
        self._inject(kind, node, where)

    def strike_transfer(self, owner: str, source: str) -> None:
        """Give a fault the chance to strike between two parts of a transfer: the node that asks,
        the one that answers, or the leader's."""
        # A transfer has many parts; other places must get their share of the faults.
        if self.membership is not None and self.clock.rng.random() < 0.3:
            leader = self.membership.member(self.membership.leader).node
            victim = self.clock.rng.choice((owner, source, leader))
            self.strike(victim, f"while {owner} receives from {source}")

    def _random_fault(self) -> None:
        """Strike between effects: with any kind of fault, on any node."""
        if self._faults_left <= 0 or self.done:
            return
        self.clock.after(self.clock.rng.uniform(0.05, 0.8), self._random_fault)
        if self.membership is None or self.clock.now < 0.3:
            return
        node = self.clock.rng.choice(self.membership.members).node
        self._inject(self.clock.rng.choice(self._kinds), node, "between effects")

    def _inject(self, kind: str, node: str, when: str) -> None:
        membership = self.membership
        assert membership is not None
        member = membership.member_on(node)
        if member is None or node in self.dead_nodes:
            return
        loses_memory = kind in (
            "kill_node",
            "corrupt_arena",
            "corrupt_parity",
            "corrupt_manifest",
            "pause_daemon",
            "cut_node",
        )
        left = self.may_lose(member)
        if loses_memory and left < 1:
            return
        if kind in ("pause_daemon", "cut_node") and self._suspects:
            return
        if kind in LURKING and self._lurking:
            return
        self._faults_left -= 1
        self.counts[kind] += 1
        self.say(f"FAULT {kind} {node} (member {member}) {when}")
        if loses_memory:
            self.lose(member)
        self._striking = True
        getattr(self, f"_{kind}")(node)
        if kind == "kill_node" and left > 1:
            self._kill_others(membership, membership.group_of(member), left - 1)
        self._striking = False
        self.check_disks()

    def end_faults(self) -> None:
        """Let nothing break any more."""
        self._faults_left, self._lurking, self._lose_at_line = 0, "", False

    def wire_flips(self) -> bool:
        return self.clock.rng.random() < self._flip_rate

    # --- faults that wait for their moment --------------------------------------------------------

    def _end_before_parity(self, node: str) -> None:
        """End the epoch while the newest generation is whole and has no parity, and lose a node
        once the next epoch has begun from it: an older generation must still be there."""
        self._lurking = "end_before_parity"

    def committed(self, generation: Generation) -> None:
        """React to a rank's snapshot of `generation` that was sealed."""
        if self._lurking != "end_before_parity" or self.membership is None:
            return
        whole = {
            arena.rank
            for place in self.membership.members
            for arena, _, sealed in self.disks[place.node].snapshots()
            if sealed.manifest.generation == generation
        }
        newer = self.protected is not None and generation > self.protected
        if newer and len(whole) == self.membership.world_size:
            self._lose_at_line = True
            self._end_epoch(f"while {generation} has no parity")

    def line_decided(self) -> None:
        """React to the leader's decision of an epoch's line."""
        if self._lose_at_line and self.membership is not None:
            self._lose_at_line = False
            place = self.clock.rng.choice(self.membership.members)
            delay_s = self.clock.rng.uniform(0.0, 0.01)
            self.clock.after(delay_s, lambda: self._lose_node(place.node))

    def _lose_node(self, node: str) -> None:
        member = self.membership.member_on(node) if self.membership else None
        if self.membership is None or member is None or node in self.dead_nodes:
            return
        if self.may_lose(member) < 1:
            return
        self.lose(member)
        self.counts["lost_at_line"] += 1
        self.say(f"FAULT {node} (member {member}) is lost right after the line")
        self._kill_node(node)
        self.check_disks()

    def _end_while_writing(self, node: str) -> None:
        """End the epoch while a hanging trainer is writing, and damage the rank's snapshot that the
        next epoch begins from: it is rebuilt while the trainer may still write."""
        self._lurking = "end_while_writing"

    def writing(self, trainer: Trainer) -> None:
        """React to a trainer that is in the middle of writing a snapshot."""
        membership, rng = self.membership, self.clock.rng
        if self._lurking != "end_while_writing" or membership is None:
            return
        member = membership.member_on(trainer.node)
        mine = [
            held for held in self.disks[trainer.node].snapshots() if held[0].rank == trainer.rank
        ]
        newest = max(mine, key=lambda held: held[2].manifest.generation, default=None)
        if newest is None or newest[2].manifest.generation != self.protected:
            return  # it could not be rebuilt, or the next epoch does not begin from it
        if member is None or self.may_lose(member) < 1:
            return
        self.lose(member)
        self._flip(*newest)
        trainer.pause(rng.uniform(0.05, 0.2))
        self._end_epoch(f"while rank {trainer.rank} hangs and writes", spared=trainer)

    def _end_epoch(self, when: str, spared: Trainer | None = None) -> None:
        """Kill a worker, and let the control loop notice it at once."""
        self._lurking = ""
        workers = self.training.workers.values() if self.training else ()
        living = [worker for worker in workers if worker.alive and worker is not spared]
        if living:
            victim = self.clock.rng.choice(living)
            self.say(f"FAULT rank {victim.rank} killed {when}")
            victim.kill()
            self.look()

    # --- faults that strike at once ---------------------------------------------------------------

    def _kill_rank(self, node: str) -> None:
        if self.training is None:
            return
        mine = [w for w in self.training.workers.values() if w.node == node and w.alive]
        if mine:
            self.clock.rng.choice(mine).kill()

    def _kill_daemon(self, node: str) -> None:
        self.daemons[node].alive = False
        self.clock.after(self.clock.rng.uniform(0.1, 1.5), lambda: self.start_daemon(node))

    def _kill_node(self, node: str) -> None:
        self.daemons[node].alive = False
        self.dead_nodes.add(node)
        self.disks[node] = Disk(memory_id="gone")
        for worker in self.workers:
            if worker.node == node:
                worker.alive = False

    def _kill_others(self, membership: Membership, group: tuple[int, ...], left: int) -> None:
        """Kill up to `left` more nodes of the group at the same instant."""
        alive = [m for m in group if membership.member(m).node not in self.dead_nodes]
        for member in self.clock.rng.sample(alive, self.clock.rng.randint(0, left)):
            if self.may_lose(member) < 1:
                continue
            node = membership.member(member).node
            self.counts["killed_at_once"] += 1
            self.say(f"FAULT kill_node {node} at the same instant")
            self.lose(member)
            self._kill_node(node)

    def _kill_control(self, node: str) -> None:
        if self.daemons[node].engine.memory.membership:
            self.membership = None
        self._control_down_until = self.clock.now + self.clock.rng.uniform(0.1, 2.0)

    def _pause_daemon(self, node: str) -> None:
        daemon = self.daemons[node]
        daemon.paused = True
        self.clock.after(self.clock.rng.uniform(0.3, 6.0), daemon.resume)

    def _cut_node(self, node: str) -> None:
        self.network.cut.add(node)
        self.clock.after(self.clock.rng.uniform(0.3, 6.0), lambda: self.network.cut.discard(node))

    def _jump_clock(self, node: str) -> None:
        self.clock_offset[node] += self.clock.rng.choice((-1e5, -3.0, 3.0, 1e5))

    def _fill_tmpfs(self, node: str) -> None:
        disk = self.disks[node]
        disk.full = True
        self.clock.after(self.clock.rng.uniform(0.1, 2.0), lambda: setattr(disk, "full", False))

    def _corrupt_arena(self, node: str) -> None:
        held = list(self.disks[node].snapshots())
        if held:
            self._flip(*self.clock.rng.choice(held))
        self._scrub(node)

    def _flip(self, arena: DiskArena, slot: int, sealed: SealedSlot) -> None:
        """Flip a bit of a snapshot."""
        at = self.clock.rng.randrange(sealed.manifest.payload_bytes)
        byte, piece_map = bytearray(1), PieceMap(slot, sealed.places)
        arena.read_into(piece_map, at, memoryview(byte))
        byte[0] ^= 0x10
        arena.write(piece_map, at, memoryview(byte))

    def _corrupt_parity(self, node: str) -> None:
        disk = self.disks[node]
        sealed = [(key, record.nbytes) for key, record in disk.records.items() if record.nbytes]
        if sealed:
            key, nbytes = self.clock.rng.choice(sealed)
            disk.blocks[key][self.clock.rng.randrange(nbytes)] ^= 0x01
        self._scrub(node)

    def _corrupt_manifest(self, node: str) -> None:
        """Damage the manifests on the tmpfs; the next daemon finds it when it adopts them."""
        self.disks[node].damage_manifests()
        self._kill_daemon(node)

    def _scrub(self, node: str) -> None:
        """Run the background scrub some time later."""

        def scrub() -> None:
            daemon = self.daemons[node]
            memory = daemon.engine.memory
            items = [(True, arena.rank, slot.index) for arena, slot in memory.slots()]
            items += [(False, lane, slot) for lane, slot in memory.parities]
            for snapshot, index, slot in items:
                daemon.call(functools.partial(self._scrub_one, daemon, snapshot, index, slot))

        self.clock.after(self.clock.rng.uniform(0.05, 1.0), scrub)

    def _scrub_one(self, daemon: VirtualDaemon, snapshot: bool, index: int, slot: int) -> None:
        daemon.carry_out(daemon.engine.scrub(daemon.now, snapshot=snapshot, index=index, slot=slot))
