"""A whole cluster in one process on a virtual clock, driven by one seed.

The engines are the real ones, and so is the code that carries out their effects; disks, network,
trainers and the control loop are small models with real bytes. Faults strike between any two
effects, and between any two pieces of a transfer. After each fault the invariants of
docs/architecture.md §2 are checked against the contents of the disks.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from simulation.bucket import PERSISTING, Bucket
from simulation.changing import WorldChanges
from simulation.checking import (
    Bearable,
    check_memory,
    expected_block,
    holds_everything,
    only_present,
)
from simulation.clock import Clock, Network
from simulation.daemon import VirtualDaemon
from simulation.disk import Disk
from simulation.faults import Faults
from simulation.fibers import Broken, Fiber
from simulation.options import Options
from simulation.trainers import TrainingWorld, Worker
from simulation.vault import Vault

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.protection import recovery
from holdfast_core.protection.codes import code_for
from holdfast_core.snapshots import layouts
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN
from holdfast_core.snapshots.manifests import Inventory
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_daemon.engine.effects import Completion, Note
from holdfast_daemon.memory.parity_blocks import ParityRecord


class Cluster(Faults):
    """Runs one schedule. `run` raises AssertionError when an invariant breaks."""

    vault: Vault | None = None
    tier: Tier | None = None

    def __init__(self, options: Options) -> None:
        self.options = options
        rng = random.Random(options.seed)
        self.clock = Clock(rng)
        self.network = Network(
            self.clock,
            loss=rng.choice((0.0, 0.0, 0.05, 0.2)),
            repeat=rng.choice((0.0, 0.1)),
            slow=rng.choice((0.0, 0.02, 0.1)),
        )
        self.members = rng.choice((2, 3, 4, 4, 5))
        self.nproc = rng.choice((1, 1, 2))
        self.group_size = self.members if self.members < 4 else rng.choice((2, self.members))
        if options.losses > 1:
            self.group_size = self.members = max(self.members, options.losses + 1)
        self.disks: dict[str, Disk] = {}
        self.clock_offset: dict[str, float] = {}
        self.daemons: dict[str, VirtualDaemon] = {}
        self.dead_nodes: set[str] = set()
        self.membership: Membership | None = None
        self.training: TrainingWorld | None = None
        self.workers: list[Worker] = []
        self.done = False
        self.protected: Generation | None = None
        """Newest generation that any leader has announced as protected."""
        self.bearable = Bearable(options.losses)
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.bucket = Bucket(self, options.seed, is_used=options.persists)
        self._nodes = 0
        super().__init__(options, rng)
        drawn = rng.choice((PolicyType.FULL, *PolicyType))
        self.policy = options.policy or (PolicyType.FULL if options.changes_worlds else drawn)
        self.changes = WorldChanges(
            options, members=self.members, nproc=self.nproc, group_size=self.group_size
        )
        self._newest_epoch = 0
        """Newest epoch that was published: the control loop stores it first."""
        self.turns = rng.choice((2, 3, 5))
        self.slots = options.slots or rng.choice((SLOTS_MIN, SLOTS_MAX))
        self.captured: dict[tuple[int, Generation], bytes] = {}
        self.windows: dict[Generation, int] = {}
        self.fibers: list[Fiber[Completion]] = []
        for _ in range(self.members + options.faults * options.losses + 2):
            self._boot_new_node()

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step through all faults."""
        self._control()
        self._random_fault()
        try:
            while not self.done:
                if not self.clock.step() or self.clock.now > self.options.time_limit_s:
                    raise AssertionError(f"no progress: {self.describe()}")
        except Broken as broken:
            raise broken.why from broken
        else:
            self.bucket.check()
        finally:
            for fiber in self.fibers:
                fiber.kill()

    def describe(self) -> str:
        lines = [
            f"seed {self.options.seed} at {self.clock.now:.3f} s, {self.members} members × "
            f"{self.nproc}, groups of {self.group_size}, {self.slots} slots, {self.policy}, "
            f"protected {self.protected}",
            *self.log[-40:],
        ]
        for node, daemon in sorted(self.daemons.items()):
            memory = daemon.engine.memory
            if memory.me is not None and daemon.alive:
                lines.append(
                    f"  {node} member {memory.me} epoch {memory.epoch}/{memory.epoch_seen} "
                    f"verified {memory.verified} directive {memory.directive} rebuilds "
                    f"{list(memory.rebuilds)} {memory.inventory()}"
                )
        return "\n".join(lines)

    def say(self, text: str) -> None:
        self.log.append(f"  {self.clock.now:8.4f} {text}")

    # --- nodes ------------------------------------------------------------------------------------

    def _boot_new_node(self) -> None:
        node = f"n{self._nodes}"
        self._nodes += 1
        self.disks[node] = Disk(memory_id=f"memory of {node}")
        self.clock_offset[node] = self.clock.rng.uniform(-1e6, 1e6)
        self._run_daemon(node)

    def start_daemon(self, node: str) -> None:
        if node not in self.dead_nodes and not self.daemons[node].alive:
            self.say(f"daemon of {node} starts again")
            self._run_daemon(node)
            self._send_membership(node)

    def _run_daemon(self, node: str) -> None:
        self.daemons[node] = VirtualDaemon(
            self, node, self.disks[node], bucket=self.bucket, vault=self.vault
        )
        self.daemons[node].start()

    def reachable_daemon(self, a: str, b: str) -> VirtualDaemon | None:
        """The daemon of node `b` as a connection from node `a` would find it."""
        daemon = self.daemons.get(b)
        if daemon is None or not daemon.alive or daemon.paused or b in self.dead_nodes:
            return None
        return daemon if self.network.reaches(a, b) else None

    def is_claimed(self, node: str, rank: int) -> bool:
        """Whether a living process holds the lock of the rank's arena on this node."""
        return any(
            worker.node == node and worker.rank == rank and worker.alive and worker.claimed
            for worker in self.workers
        )

    # --- control loop -----------------------------------------------------------------------------

    def _control(self) -> None:
        """Look at the cluster every 50 ms, and form the next epoch if needed (level-triggered).
        Killed, the loop forgets everything, and learns the epoch from the daemons."""
        if not self.done:
            self.clock.after(0.05, self._control)
            self.look()

    def look(self) -> None:
        """Do what the control loop does in each round."""
        if self.clock.now < self._control_down_until:
            return
        if self.membership is None:
            known = [d.engine.memory.membership for d in self.daemons.values() if d.alive]
            self.membership = max((m for m in known if m), key=lambda m: m.epoch, default=None)
        if self.membership is None:
            nodes = [n for n in sorted(self.daemons) if n not in self.dead_nodes]
            begins_with = self.changes.members_at_first()
            self._publish(dict(enumerate(nodes[:begins_with])))
            return
        places = {place.index: place.node for place in self.membership.members}
        nodes = list(places.values())
        lost = [n for n in nodes if self._is_lost(n)]
        world_broken = self.training is None or any(
            not worker.alive for worker in self.training.workers.values()
        )
        outdated = any(
            self.daemons[n].engine.memory.loading.beyond >= self.membership.epoch for n in nodes
        )
        due = bool(lost) or outdated or (world_broken and self._world_is_due())
        if not due and not self.changes.is_time_to_grow(self.membership):
            for node in nodes:
                if self.daemons[node].engine.memory.epoch < self.membership.epoch:
                    self._send_membership(node)
            return
        spares = [
            n
            for n in sorted(self.daemons)
            if n not in nodes
            and n not in self.dead_nodes
            and n not in self.network.cut
            and self.daemons[n].alive
        ]
        for index, node in list(places.items()):
            if node not in lost:
                continue
            if self.changes.leaves(self.membership, len(places)):
                self.say(f"{node} leaves, and member {index} with it")
                self.counts["members_left"] += 1
                del places[index]
                continue
            places[index] = spares.pop(0)
            self.say(f"{node} replaced by {places[index]}")
        for index in self.changes.newcomers(self.membership, places) if spares else ():
            places[index] = spares.pop(self.changes.rng.randrange(len(spares)))
            self.say(f"{places[index]} comes as member {index}")
            self.counts["members_came"] += 1
            self._boot_new_node()
        self._publish(places)

    def _world_is_due(self) -> bool:
        """Whether to replace a broken world: it is replaced once, and the next one gets time to
        form."""
        assert self.membership is not None
        if self.training is None or self.training.epoch < self.membership.epoch:
            return self.training is None and self.clock.now > 5.0
        return True

    def _is_lost(self, node: str) -> bool:
        """Whether a node counts as lost: a dead one at once, a cut or paused one after a second
        without heartbeats."""
        if node in self.dead_nodes:
            return True
        if not self._is_silent(node):
            self._suspects.pop(node, None)
            return False
        since = self._suspects.setdefault(node, self.clock.now)
        return self.clock.now - since > 1.0

    def _is_silent(self, node: str) -> bool:
        return node in self.network.cut or self.daemons[node].paused

    def _publish(self, places: dict[int, str]) -> None:
        """Begin an epoch with these members: nodes by index."""
        memories = [daemon.engine.memory for daemon in self.daemons.values()]
        seen = max(max(memory.epoch_seen, memory.loading.beyond) for memory in memories)
        self._newest_epoch = epoch = max(seen, self._newest_epoch) + 1
        world, past = self.changes.worlds(
            self.membership, epoch, tuple(sorted(places)), self.protected
        )
        self.counts["worlds"] += bool(self.membership) and world.since == epoch
        self.counts["worlds_behind_a_gap"] += any(each.until for each in past)
        self.membership = Membership(
            job="job",
            epoch=epoch,
            members=tuple(
                Member(
                    index=i,
                    node=node,
                    memory_id=self.disks[node].memory_id,
                    peer_address=node,
                    bulk_address=node,
                )
                for i, node in sorted(places.items())
            ),
            nproc_per_node=self.nproc,
            groups=world.groups,
            since=world.since,
            past=past,
            redundancy=self.options.redundancy,
            replicas=self.options.losses,
            tier=self.tier or self.bucket.tier,
            slots=self.slots,
        )
        self.say(f"epoch {epoch} on {places}, in the world of {world.since}")
        for worker in self.workers:
            # Agents end the old world's workers soon, not at once: until then they may write.
            self.clock.after(self.clock.rng.uniform(0.0, 0.2), worker.kill)
        self.training = TrainingWorld(self, self.membership)
        for place in self.membership.members:
            self._send_membership(place.node)
            for rank in self.membership.ranks_of(place.index):
                self._start_worker(self.training, place.node, rank)

    def _start_worker(self, world: TrainingWorld, node: str, rank: int) -> None:
        def start() -> None:
            if self.training is world and node not in self.dead_nodes:
                self.workers = [worker for worker in self.workers if worker.alive]
                self.workers.append(Worker(world, node, rank))

        self.clock.after(self.clock.rng.uniform(0.05, 0.3), start)

    def _send_membership(self, node: str) -> None:
        membership = self.membership
        if membership is None or membership.member_on(node) is None:
            return

        def deliver() -> None:
            daemon = self.daemons[node]
            daemon.call(
                lambda: daemon.carry_out(daemon.engine.set_membership(membership, daemon.now))
            )

        self.network.send("control", node, deliver)

    # --- what daemons note, and what must hold ----------------------------------------------------

    def noted(self, node: str, note: Note) -> None:
        """Record that a daemon noted an event."""
        if note.event == "protected" and self.membership and note.generation is not None:
            memory = self.daemons[node].engine.memory
            if memory.leads and memory.epoch == self.membership.epoch:
                self.counts["protected"] += 1
                if self.protected is None or note.generation > self.protected:
                    self.protected = note.generation
                directive = memory.directive
                # What is protected beside a newer line may be about to be freed.
                if directive and directive.retained in (None, note.generation):
                    self.check_protected(note.generation)
        elif note.event == "committed" and note.generation is not None:
            self.committed(note.generation)
        elif note.event in ("line", "corrupt", "corrupt_parity", "rebuilt", "fenced", *PERSISTING):
            if note.event == "persisted" and note.generation is not None:
                self.bucket.announced(note.generation)
            self.counts[note.event] += 1
            self.say(f"{node} {note.event} {note.rank} {note.generation} {note.detail}")
            if note.event == "line" and self.daemons[node].engine.memory.leads:
                self.line_decided()

    def check_protected(self, generation: Generation) -> None:
        """Let each group lose members again whose disks hold all that the leader calls
        protected."""
        membership = self.membership
        world = membership.world_of(generation) if membership else None
        assert membership is not None and world is not None
        if generation == self.protected:
            self.bearable.protected_in(world)
        holdings = recovery.Holdings.of(membership, self._inventories())
        for group in world.groups:
            sound = holds_everything(membership, holdings, group, generation)
            # A silent member may be replaced at any time: it counts as lost already.
            silent = sound and any(self._is_silent(membership.member(m).node) for m in group)
            if sound and not silent:
                self.bearable.refill(world, group)

    def check_disks(self) -> None:
        """Check the invariants on the members' disks, after any fault."""
        if self.membership is None:
            return
        for place in self.membership.members:
            disk = self.disks[place.node]
            for arena, slot, sealed in disk.snapshots():
                data, generation = arena.payload(slot), sealed.manifest.generation
                assert data is None or data == self.captured[arena.rank, generation], (
                    f"invariant 1: {place.node} holds other bytes of rank {arena.rank} than "
                    f"{generation} has"
                )
            for record, block in disk.whole_blocks():
                self._check_block(place.node, record, block)
            check_memory(self.membership, place.index, disk.arenas.values())
        self._check_line()

    def has_memory_back(self) -> bool:
        """Whether all members have given back what only earlier worlds needed."""
        membership = self.membership
        return membership is not None and all(
            only_present(membership, place.index, self.disks[place.node].arenas.values())
            for place in membership.members
        )

    def _check_line(self) -> None:
        """Check invariant 2: after any allowed fault the disks still hold a line, no older than the
        generation that was announced as protected."""
        if self.protected is None or self.membership is None:
            return
        line = recovery.recovery_line(self.membership, self._inventories())
        assert line.generation is not None and line.generation >= self.protected, (
            f"invariant 2: line {line} after {self.protected} was protected\n{self.describe()}"
        )

    def check_block(self, node: str, lane: int, slot: int) -> None:
        """Check that a parity block that a daemon is about to announce matches its entry."""
        disk = self.disks[node]
        record = disk.records[lane, slot]
        block = bytes(disk.blocks[lane, slot][: record.nbytes])
        assert layouts.piece_digests(block, record.piece_bytes) == record.digests
        self._check_block(node, record, block)

    def _check_block(self, node: str, record: ParityRecord, block: bytes) -> None:
        """Check that it is the sum of one chunk of each source, as captured, times its factor."""
        entry = record.entry
        code = code_for(self.options.redundancy, len(entry.group), self.options.losses)
        payloads = {
            entry.group.index(rank // self.nproc): self.captured[rank, entry.generation]
            for rank, _ in entry.sources
        }
        row, pieces = entry.lane // self.nproc, record.piece_bytes
        assert code and block == expected_block(code, row, payloads, len(block), pieces), (
            f"a parity block of {node} is not what {entry.generation} makes"
        )

    def resumed(self, epoch: int, line: Generation | None) -> None:
        """Record that all ranks of an epoch restored the same generation."""
        self.counts["resumed"] += 1
        if line is not None and self.membership and self.membership.epoch == epoch:
            self.counts["restored_of_another_world"] += not self.membership.is_present(line)
        self.say(f"epoch {epoch} resumes from {line}")
        assert self.protected is None or (line is not None and line >= self.protected), (
            f"resumed from {line} after {self.protected} was protected\n{self.describe()}"
        )
        # After the line, another timeline begins.
        if line is not None:
            self.protected = line if self.protected is None else min(self.protected, line)

    def restore_failed(self, rank: int) -> None:
        self.say(f"rank {rank} found a corrupt piece while restoring")

    def is_finished(self, epoch: int, step: int) -> bool:
        """Whether the last step is trained, and a generation captured at it or later is protected:
        after the faults have ended, protection must come back by itself."""
        if step < self.options.steps:
            return False
        self.end_faults()
        wanted = Generation(epoch, self.options.steps)
        protected = self.protected is not None and self.protected >= wanted
        self.done = self.bucket.has_come_back(wanted) and protected and self.has_memory_back()
        if self.done:
            self.say(f"epoch {epoch} finished step {step}")
        return self.done

    def _inventories(self) -> dict[int, Inventory]:
        assert self.membership is not None
        return {
            place.index: replace(self.disks[place.node].inventory(), writing=(), passed=())
            for place in self.membership.members
        }
