"""Parity after ranks have loaded a snapshot from storage whose bytes are others than in memory.

Copies that leave experts out (`persistence.experts`) give a lost rank older versions of some. What
it loads is of the same generation as what was lost, so that parity of it may still be there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from expert_snapshots import EXTRAS_BYTES, PIECE, PIECES_EACH, expert_bytes, rank_layout

from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import encode_layout, piece_count, piece_digests
from holdfast_core.snapshots.manifests import ExpertVersion
from holdfast_core.snapshots.membership import Member, Membership, Tier
from holdfast_core.snapshots.pieces import PieceMap, bit_map
from holdfast_core.snapshots.reports import Directive
from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.durable.loader import Loader
from holdfast_daemon.engine import EngineSettings, JobEngine, effects
from holdfast_daemon.engine.effects import Effect
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage
from holdfast_daemon.parity.changes import change_of
from holdfast_daemon.parity.combining import Effort
from holdfast_daemon.transport.client import BulkClient
from holdfast_daemon.transport.protocol import Kind, Located, Request
from holdfast_daemon.transport.server import BulkServer

JOB = "default.run1"
RANKS, EXPERTS = 3, 12
HOMES = [[f"layer0/expert{EXPERTS * r + i}" for i in range(EXPERTS)] for r in range(RANKS)]
TIMEOUT_S = 20.0

Content = list[list[tuple[Generation, bytes]]]
"""Version and bytes of each expert, by rank."""


class Node:
    """A daemon's engine and adapters, over real files and sockets, with a rank."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.index, self._stack = index, cluster.stack
        self._node = NodeStorage(cluster.root / f"n{index}-{cluster.count()}", 1 << 24)
        self.storage = JobStorage(self._node, JOB)
        self.storage.adopt()
        self.server = BulkServer("127.0.0.1", 0, self)
        self.server.start()
        self.engine = JobEngine(
            job=JOB,
            node=f"n{index}",
            memory_id=self._node.memory_id,
            incarnation=1,
            settings=EngineSettings(retry_s=0.0),
        )
        tier, bulk = DurableTier(1, TierAccess(None)), BulkClient(timeout_s=TIMEOUT_S)
        self._stack.callback(bulk.close)
        self._stack.callback(self._node.close)
        self.worker = EffectWorker(
            self.storage,
            bulk=bulk,
            peers=cluster,
            executor=cluster.pool,
            persister=tier.persister(JOB, self.storage),
            effort=Effort(threads=1),
            loader=Loader(self.storage, JOB, tier.open_sets),
        )
        self.session = ""
        self.payload = b""

    def locate(self, request: Request) -> Located:
        snapshot = request.kind is Kind.SNAPSHOT
        find = self.storage.locate_snapshot if snapshot else self.storage.locate_parity
        return find(request.index, request.generation, request.offset, request.nbytes)

    def change(self, request: Request) -> Iterator[bytes]:
        return change_of(self.storage, request)

    @property
    def directive(self) -> Directive:
        assert self.engine.memory.current is not None
        return self.engine.memory.current.directive

    @property
    def member(self) -> Member:
        return Member(
            index=self.index,
            node=f"n{self.index}",
            memory_id=self._node.memory_id,
            peer_address=str(self.index),
            bulk_address=self.server.address,
        )


class Cluster:
    """A parity group of three nodes on a virtual clock."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.stack, self._made = root, stack, 0
        self.pool = stack.enter_context(ThreadPoolExecutor(4))
        self._now = 0.0
        self._waiting: deque[tuple[Node, Sequence[Effect]]] = deque()
        self.nodes = [Node(self, index) for index in range(RANKS)]
        stack.callback(self._close)

    def _close(self) -> None:
        for node in self.nodes:
            node.server.close()

    def count(self) -> int:
        self._made += 1
        return self._made

    def fetch_manifest(
        self, place: Member, job: str, epoch: int, rank: int, generation: Generation
    ) -> tuple[bytes, bytes]:
        return self.nodes[place.index].storage.describe(rank, generation) or (b"", b"")

    def lose(self, *indices: int) -> None:
        """Nodes are lost with their memory, and replaced. All trainers end."""
        for node in self.nodes:
            self._do(node, node.engine.session_ended(node.session, clean=True, now=self._now))
        for index in indices:
            self.nodes[index].server.close()
            self.nodes[index] = Node(self, index)

    def begin(self, epoch: int) -> None:
        membership = Membership(
            job=JOB,
            epoch=epoch,
            members=tuple(node.member for node in self.nodes),
            nproc_per_node=1,
            groups=(tuple(range(RANKS)),),
            tier=Tier(uri=str(self.root / "tier"), every_steps=1, keep=5, experts=1),
        )
        for node in self.nodes:
            self._waiting.append((node, node.engine.set_membership(membership, self._now)))
        self._pump()
        self.tick()

    def tick(self) -> None:
        for _ in range(10):
            self._now += 1.5
            for node in self.nodes:
                self._do(node, node.engine.tick(self._now))

    def open(self) -> None:
        for node in self.nodes:
            node.session, made = node.engine.open(
                rank=node.index,
                epoch=node.engine.epoch,
                layout=encode_layout(rank_layout(node.index, RANKS, HOMES[node.index])),
                largest_slot_bytes=0,
                pid=1,
                now=self._now,
            )
            self._do(node, made)
            assert node.engine.opened(node.session)
            self._do(node, node.engine.claimed(node.session, self._now))

    def save(
        self, step: int, captured: Sequence[int], base: Generation | None, content: Content
    ) -> None:
        """Every rank saves its experts with the numbers `captured`, and all else has not changed
        since `base`."""
        versions = tuple(
            ExpertVersion(unit=unit, generation=version, number=version.step, tokens=0)
            for home, held in zip(HOMES, content, strict=True)
            for unit, (version, _) in zip(home, held, strict=True)
        )
        for node in self.nodes:
            self._save(node, step, captured, base, content[node.index], versions)
        self.tick()

    def _save(
        self,
        node: Node,
        step: int,
        captured: Sequence[int],
        base: Generation | None,
        held: Sequence[tuple[Generation, bytes]],
        versions: tuple[ExpertVersion, ...],
    ) -> None:
        rank, epoch = node.index, node.engine.epoch
        left_out = [
            1 + PIECES_EACH * i + at
            for i in range(EXPERTS)
            for at in range(PIECES_EACH)
            if i not in captured
        ]
        slot_bytes = rank_layout(rank, RANKS, HOMES[rank]).slot_bytes
        same = bit_map(left_out, piece_count(slot_bytes, PIECE)) if base is not None else b""
        granted, made = node.engine.grant(
            node.session, epoch=epoch, step=step, now=self._now, base=base, unchanged=same
        )
        self._do(node, made)
        dense = random.Random(f"{rank} {epoch} {step}").randbytes(PIECE + EXTRAS_BYTES)
        node.payload = dense[:PIECE] + b"".join(each for _, each in held) + dense[PIECE:]
        arena = node.storage.arena(rank, node.engine.memory.sessions[node.session].layout_id)
        for piece in range(piece_count(len(node.payload), PIECE)):
            if not (granted.carried and piece in left_out):
                part = node.payload[piece * PIECE : (piece + 1) * PIECE]
                where = PieceMap(granted.slot, granted.places)
                arena.write(where, piece * PIECE, memoryview(part))
        committed = node.engine.commit(
            node.session,
            epoch=epoch,
            step=step,
            slot=granted.slot,
            payload_bytes=len(node.payload),
            extras_bytes=EXTRAS_BYTES,
            digests=piece_digests(node.payload, PIECE),
            nan_units=(),
            experts=tuple(sorted(versions, key=lambda one: one.unit)),
            now=self._now,
        )
        self._do(node, committed)

    def content(self, generation: Generation) -> Content:
        """What the trainers have after they have restored the generation."""
        found: Content = []
        for node in self.nodes:
            held = node.storage.held(node.index, generation)
            payload = bytearray(held.manifest.payload_bytes)
            held.read_into(0, memoryview(payload))
            versions = {one.unit: one.generation for one in held.manifest.experts}
            starts = [PIECE * (1 + PIECES_EACH * i) for i in range(EXPERTS)]
            found.append(
                [
                    (versions[unit], bytes(payload[start : start + PIECES_EACH * PIECE]))
                    for unit, start in zip(HOMES[node.index], starts, strict=True)
                ]
            )
        return found

    def _do(self, node: Node, made: Sequence[Effect]) -> None:
        self._waiting.append((node, made))
        self._pump()

    def _pump(self) -> None:
        while self._waiting:
            node, made = self._waiting.popleft()
            for effect in made:
                self._run(node, effect)

    def _run(self, node: Node, effect: Effect) -> None:
        now, answer = self._now, self._waiting.append
        if isinstance(effect, effects.Note):
            return
        if isinstance(effect, effects.SendReport):
            to = self.nodes[effect.to.index]
            answer((to, to.engine.on_report(effect.report, now)))
        elif isinstance(effect, effects.SendDirective):
            to = self.nodes[effect.to.index]
            answer((to, to.engine.on_directive(effect.directive, now)))
        elif isinstance(effect, effects.Seal):
            node.worker.apply(effect)
            answer((node, node.engine.on_completion(effect.sealed(None), now)))
        elif isinstance(effect, effects.AtOnce):
            node.worker.apply(effect)
        else:
            assert isinstance(effect, effects.Background), effect
            done = node.worker.submit(effect).result(TIMEOUT_S)
            answer((node, node.engine.on_completion(done, now)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def versions(step: int, epoch: int = 1) -> list[tuple[Generation, bytes]]:
    generation = Generation(epoch, step)
    return [(generation, expert_bytes(unit, generation)) for home in HOMES for unit in home]


def test_parity_is_made_again_from_what_was_loaded_and_so_is_what_follows(cluster: Cluster) -> None:
    cluster.begin(1)
    cluster.open()
    flat = versions(1)
    content: Content = [flat[EXPERTS * r : EXPERTS * (r + 1)] for r in range(RANKS)]
    cluster.save(1, range(EXPERTS), None, content)
    newer = versions(2)
    for rank in range(RANKS):
        content[rank][:2] = newer[EXPERTS * rank : EXPERTS * rank + 2]
    cluster.save(2, (0, 1), Generation(1, 1), content)
    line, leader = Generation(1, 2), cluster.nodes[0]
    directive = leader.directive
    assert directive.protected == directive.persisted == line

    cluster.lose(1, 2)
    cluster.begin(2)
    directive = leader.directive
    assert directive.line is not None and directive.line.generation == line
    assert directive.line.stored
    loaded = cluster.content(line)
    assert loaded != content, "the copies leave nothing out, so this proves nothing"
    assert directive.protected == line, "parity protects what was loaded"

    cluster.open()
    newest = Generation(2, 3)
    for rank, unit in enumerate(home[2] for home in HOMES):
        loaded[rank][2] = (newest, expert_bytes(unit, newest))
    cluster.save(3, (2,), line, loaded)
    assert leader.directive.protected == newest
    payloads = [node.payload for node in cluster.nodes]
    for node in cluster.nodes:
        assert block_of(node, newest) == xor_of(node.index, payloads)

    cluster.lose(2)
    cluster.begin(3)
    line_now = leader.directive.line
    assert line_now is not None and line_now.generation == newest and not line_now.stored
    assert cluster.content(newest) == loaded


def block_of(node: Node, generation: Generation) -> bytes:
    (found,) = (
        bytes(node.storage.block_view(lane, slot)[: node.storage.parity_record(lane, slot).nbytes])
        for (lane, slot), parity in node.engine.memory.parities.items()
        if parity.generation == generation
    )
    return found


def xor_of(owner: int, payloads: Sequence[bytes]) -> bytes:
    """The parity block of `owner`, from the payloads of the others."""
    code, which = Code(RANKS, RANKS - 1, 1), BlockId(owner)
    sizes = {rank: len(payload) for rank, payload in enumerate(payloads) if rank != owner}
    block = bytearray(code.block_bytes(which, sizes, PIECE))
    for part in code.contributions(which, sizes, PIECE):
        for at in range(part.range.nbytes):
            block[at] ^= payloads[part.position][part.range.start + at]
    return bytes(block)
