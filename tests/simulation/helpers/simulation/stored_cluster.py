"""A simulated cluster that loses more than parity covers, with durable storage behind it.

What must hold then: all ranks continue from one generation with exactly its bytes, the newest
undamaged one in storage; or they wait. While storage holds a usable set, no job starts from the
beginning, whether storage answers or not.
"""

from __future__ import annotations

from dataclasses import replace

from simulation.cluster import Cluster
from simulation.options import Options
from simulation.trainers import (
    PIECE_BYTES,
    content,
    extras_bytes_of,
    layout_of,
    tensor_bytes_of,
)
from simulation.vault import URI, StoredSnapshot, Vault

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout, encode_manifest, layout_id, piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Tier
from holdfast_daemon.engine.effects import Note

STORAGE_FAULTS = ("lose_two", "lose_all", "storage_away", "damage_set")


class StoredCluster(Cluster):
    """A `Cluster` with sets in storage and the faults of `STORAGE_FAULTS`."""

    vault: Vault

    def __init__(self, options: Options, *, earlier_run: Generation | None = None) -> None:
        """Boot the cluster; `earlier_run` is a set that an earlier job of this name left behind."""
        self.vault = Vault()
        self.tier = Tier(uri=URI, every_s=1e9)  # only `_store` writes sets
        super().__init__(
            replace(options, tier=False, worlds=False)
        )  # writing by daemons is not tested here
        self._damaged = False
        if earlier_run is not None:
            self._leave_behind(earlier_run)

    # --- what gets into storage -------------------------------------------------------------------

    def noted(self, node: str, note: Note) -> None:
        super().noted(node, note)
        if note.event in ("storage_choice", "storage_unreachable", "loaded", "load_failed"):
            self.counts[note.event] += 1
            self.say(f"{node} {note.event} {note.rank} {note.generation} {note.detail}")
        if note.event == "protected" and note.generation is not None and self._store_now():
            self._store(note.generation)

    def _store_now(self) -> bool:
        return self.vault.reachable and self.clock.rng.random() < 0.3

    def _store(self, generation: Generation) -> None:
        """Copy a generation as the daemons would, if every member has all of it."""
        if self.membership is None or generation in self.windows:
            return
        ranks = {}
        for place in self.membership.members:
            for arena, slot, sealed in self.disks[place.node].snapshots():
                payload = arena.payload(slot)
                if sealed.manifest.generation == generation and payload is not None:
                    ranks[arena.rank] = StoredSnapshot(
                        layout=arena.encoded_layout,
                        manifest=sealed.encoded,
                        content=sealed.manifest,
                        payload=bytearray(payload),
                    )
        if sorted(ranks) == list(range(self.membership.world_size)):
            self.vault.sets.setdefault(generation, ranks)
            self.counts["stored"] += 1

    def _leave_behind(self, generation: Generation) -> None:
        size = self.members * self.nproc
        ranks = {}
        for rank in range(size):
            data = content(rank, size, generation)
            self.captured[rank, generation] = data
            layout = layout_of(rank, size, rank)
            manifest = Manifest(
                job="job",
                rank=rank,
                world_size=size,
                generation=generation,
                layout_id=layout_id(layout),
                payload_bytes=len(data),
                extras_offset=tensor_bytes_of(rank, size),
                extras_bytes=extras_bytes_of(rank, generation),
                piece_bytes=decode_layout(layout).piece_bytes,
                digests=piece_digests(data, PIECE_BYTES),
            )
            ranks[rank] = StoredSnapshot(
                layout=layout,
                manifest=encode_manifest(manifest),
                content=manifest,
                payload=bytearray(data),
            )
        self.vault.sets[generation] = ranks

    # --- faults -----------------------------------------------------------------------------------

    def _inject(self, kind: str, node: str, when: str) -> None:
        if kind not in STORAGE_FAULTS:
            super()._inject(kind, node, when)
            return
        self._faults_left -= 1
        self.counts[kind] += 1
        self.say(f"FAULT {kind} {when}")
        getattr(self, f"_{kind}")(node)

    def _lose_two(self, node: str) -> None:
        assert self.membership is not None
        member = self.membership.member_on(node)
        assert member is not None
        others = [m for m in self.membership.group_of(member) if m != member]
        self._lose([node, self.membership.member(self.clock.rng.choice(others)).node])

    def _lose_all(self, node: str) -> None:
        assert self.membership is not None
        self._lose([place.node for place in self.membership.members])

    def _lose(self, nodes: list[str]) -> None:
        """Lose nodes beyond what the redundancy covers."""
        self.bearable.clear()
        self.protected = None
        for lost in nodes:
            if lost not in self.dead_nodes:
                self._boot_new_node()
                self._kill_node(lost)

    def _storage_away(self, node: str) -> None:
        self.vault.reachable = False
        self.clock.after(
            self.clock.rng.uniform(0.3, 6.0), lambda: setattr(self.vault, "reachable", True)
        )

    def _damage_set(self, node: str) -> None:
        usable = self.vault.usable()
        if not usable:
            return
        self._damaged = True
        rng = self.clock.rng
        rank = rng.choice(sorted(self.vault.sets[usable[0]]))
        at = rng.randrange(1000)
        self.vault.damage(usable[0], rank, at)
        if len(usable) == 1:  # an operator repairs the last usable set
            self.clock.after(rng.uniform(0.5, 20.0), lambda: self.vault.damage(usable[0], rank, at))

    # --- what must hold ---------------------------------------------------------------------------

    def resumed(self, epoch: int, line: Generation | None) -> None:
        super().resumed(epoch, line)
        assert line is not None or not self.vault.sets, (
            f"epoch {epoch} began from the beginning while storage held "
            f"{sorted(self.vault.sets)}\n{self.describe()}"
        )
        if line is None or not self._is_stored(epoch):
            return
        self.counts["resumed_from_storage"] += 1
        assert line in self.vault.sets, f"{line} is not in storage\n{self.describe()}"
        newest = max(self.vault.sets)
        assert self._damaged or line == newest, (
            f"epoch {epoch} went on from {line} and not from {newest}\n{self.describe()}"
        )
        assert line.epoch < epoch, f"what epoch {epoch} captures would not be newer than {line}"

    def _is_stored(self, epoch: int) -> bool:
        directives = [d.engine.memory.directive for d in self.daemons.values()]
        return any(d and d.epoch == epoch and d.line and d.line.stored for d in directives)
