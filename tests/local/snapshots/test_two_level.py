"""Copies that leave experts out, with real daemons: more is lost than parity covers, and experts
come from the memory that is left and from the copies that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from expert_snapshots import EXTRAS_BYTES, Made, expected, made, rank_layout
from harness import JOB, RawCluster, RawJob, Restored
from raw_trainer import PIECE_BYTES, RawTrainer
from waiting import WAIT_S, wait_for

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_manifest, encode_layout, piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Tier
from holdfast_protos import control_pb2, persisting, trainer_pb2
from holdfast_storage.sets import SetStore

ALONE = tuple(tuple(f"layer0/expert{3 * rank + i}" for i in range(3)) for rank in range(3))
"""Experts of one rank each."""
UNITS = tuple(unit for home in ALONE for unit in home)
SPREAD = "layer1/expert0"
"""Each rank holds a part of it."""
HOMES = tuple((*home, SPREAD) for home in ALONE)
SPREAD_STEP = 3
"""The step that captures that one again."""
CAPTURED = 2
"""Experts of a layer in a snapshot."""

Versions = dict[str, Generation]


class ExpertTrainer(RawTrainer):
    """A rank that captures some experts of its own in each snapshot, and says which."""

    versions: dict[Generation, Versions]

    def content_at(self, generation: Generation) -> bytes:
        return self._made(generation).payload

    def _made(self, generation: Generation) -> Made:
        versions = self.versions[generation]
        return made(self.rank, HOMES, generation, versions, job=self.job, piece=PIECE_BYTES)

    def _capture(self, step: int) -> None:
        """What is captured is known from the versions."""

    def commit(self, slot: int, step: int) -> None:
        content = self._made(Generation(self.epoch, step)).content
        self.daemon.stub().Commit(
            trainer_pb2.CommitRequest(
                session=self.session,
                epoch=self.epoch,
                step=step,
                slot=slot,
                payload_bytes=content.payload_bytes,
                extras_bytes=EXTRAS_BYTES,
                digests=piece_digests(self.content(step), PIECE_BYTES),
                experts=map(persisting.expert_to_proto, content.experts),
            ),
            timeout=WAIT_S,
        )

    def restored(self) -> Manifest:
        """The manifest of what is restored in this epoch."""
        request = trainer_pb2.RestoreRequest(job=self.job, rank=self.rank, epoch=self.epoch)
        *_, last = self.daemon.stub().Restore(request, timeout=WAIT_S)
        return decode_manifest(last.decision.manifest)


@dataclass
class ExpertJob(RawJob):
    """Three ranks with three experts each."""

    versions: dict[Generation, Versions] = field(default_factory=dict)
    newest: Versions = field(default_factory=dict)

    def make_trainer(self, rank: int) -> RawTrainer:
        trainer = ExpertTrainer(self.daemon(rank), self.name, rank, self.size, 100_000, 100_000)
        trainer.layout = encode_layout(rank_layout(rank, self.size, HOMES[rank], PIECE_BYTES))
        trainer.policy, trainer.versions = PolicyType.FULL, self.versions
        return trainer

    def step_on(self) -> Generation:
        """Train a step whose snapshot captures experts in turn."""
        now = Generation(self.epoch, self.step + 1)
        turn = range(CAPTURED * self.step, CAPTURED * self.step + CAPTURED)
        fresh = [UNITS[i * 2 % len(UNITS)] for i in turn] if self.newest else [*UNITS, SPREAD]
        if self.step == SPREAD_STEP - 1:
            fresh.append(SPREAD)
        self.newest = {**self.newest, **dict.fromkeys(fresh, now)}
        self.versions[now] = dict(self.newest)
        return self.train()

    def persist(self) -> None:
        """Have the newest generation persisted, and wait until every daemon knows it."""
        message = control_pb2.ControlMessage(persist=control_pb2.PersistNow(job=self.name))
        self.cluster.control.send(self.nodes[0], message)
        for member in range(self.size):
            wait_for(
                f"member {member} to learn that {self.generation} is persisted",
                lambda member=member: (  # type: ignore[misc]
                    self.daemon(member).job(JOB)["persist"]["persisted"] == str(self.generation)
                ),
            )

    def lose_first(self, count: int) -> list[Restored]:
        """What the ranks restore after the first `count` nodes were lost, and replaced."""
        for member in range(count):
            self.daemon(member).lose()
        self.nodes[:count] = self.cluster.start_nodes(count)
        self.form()
        return self.start_trainers()

    def own(self, manifest: Manifest) -> Versions:
        """The versions of the rank's own experts, as a manifest says."""
        home = HOMES[manifest.rank]
        return {e.unit: e.generation for e in manifest.experts if e.unit in home}


def persisted(cluster: RawCluster, directory: Path, *, steps: int) -> tuple[ExpertJob, SetStore]:
    """A job, and its storage, after steps that were all persisted: each holds one expert anew."""
    tier = Tier(uri=directory.as_uri(), every_s=1e9, experts=1, keep=1)
    job = ExpertJob(cluster, cluster.start_nodes(3), nbytes=100_000, tier=tier)
    job.form()
    job.start_trainers()
    for _ in range(steps):
        job.step_on()
        job.persist()
    return job, SetStore(tier.uri, JOB)


def test_survivors_give_fresh_experts_and_copies_the_rest(
    cluster: RawCluster, tmp_path: Path
) -> None:
    job, store = persisted(cluster, tmp_path, steps=4)
    line = job.generation
    job.step_on()
    stored = store.complete()[0]
    assert stored.generation == line
    new = [u for f in stored.files for u in f.units if u.held_in == line and u.unit != SPREAD]
    assert len(new) == 1, "of the layer's nine experts a copy holds one anew"
    restored = job.lose_first(2)
    assert {generation for generation, _, _ in restored} == {line}
    assert [source for _, _, source in restored] == ["storage", "storage", "local"]
    manifests = {trainer.rank: trainer.restored() for trainer in job.trainers}  # type: ignore[attr-defined]
    for rank, (_, payload, _) in enumerate(restored):
        assert payload == expected(rank, HOMES, manifests[rank]), "not the versions in its manifest"
    in_storage = {u.unit: u.version for file in stored.files for u in file.units}
    at_line = job.versions[line]
    for rank in (0, 1):
        assert job.own(manifests[rank]) == {unit: in_storage[unit] for unit in HOMES[rank]}
    assert job.own(manifests[2]) == {unit: at_line[unit] for unit in HOMES[2]}, "fresh, from memory"
    returned = {u: v for u, v in in_storage.items() if u not in HOMES[2] and v != at_line[u]}
    assert returned, "some experts went back to an older version"
    parts = {job.own(manifest)[SPREAD] for manifest in manifests.values()}
    assert parts == {Generation(1, SPREAD_STEP)}, "parts of one expert are of one step"
    held_in = {u.held_in for f in stored.files for u in f.units if u.unit == SPREAD}
    assert held_in == {Generation(1, SPREAD_STEP)}, "a copy that has it is named"
    for rank, manifest in manifests.items():
        marks = {(e.unit, e.generation): e.tokens for e in (*manifest.experts, *manifest.older)}
        for unit, version in returned.items():
            assert marks[unit, version] == 100 * version.step + rank, "tokens lost are not known"
    # Those who loaded it know that storage has it, and the next copy names what it holds.
    job.step, job.newest = line.step, at_line | returned
    again = job.step_on()
    job.persist()
    stored = store.complete()[0]
    assert stored.generation == again
    assert stored.needs, "the copy after the recovery holds some experts, not all"
    for rank in range(3):
        opened = store.open_rank(stored, rank)
        data = bytearray(opened.content.payload_bytes)
        opened.read_into(0, opened.pieces, memoryview(data))
        assert data == expected(rank, HOMES, opened.content)


def test_a_whole_cluster_goes_on_from_copies_that_name_others(
    cluster: RawCluster, tmp_path: Path
) -> None:
    job, store = persisted(cluster, tmp_path, steps=3)
    line = job.generation
    restored = job.lose_first(3)
    in_storage = {u.unit: u.version for f in store.complete()[0].files for u in f.units}
    for trainer, (generation, payload, source) in zip(job.trainers, restored, strict=True):
        assert isinstance(trainer, ExpertTrainer)
        manifest = trainer.restored()
        assert (generation, source) == (line, "storage")
        assert job.own(manifest) == {unit: in_storage[unit] for unit in HOMES[trainer.rank]}
        assert payload == expected(trainer.rank, HOMES, manifest)
    job.step, job.newest = line.step, dict(in_storage)
    again = job.step_on()
    job.persist()
    stored = store.complete()[0]
    assert stored.generation == again
    assert stored.needs
    assert job.daemon(0).logged("persist_given_up") == []
    mixtures = [entry["detail"] for entry in job.daemon(0).logged("loaded")]
    assert mixtures and all("0 experts from memory, 4 from storage" in each for each in mixtures)
