"""Snapshots that carry pieces over from an older one, in the engine and on disk; and slots that are
granted for a window of steps."""

from __future__ import annotations

from collections.abc import Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_core.errors import SnapshotSkippedError, StepOrderError, UnknownSessionError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    Layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.membership import Member, Membership, Redundancy
from holdfast_core.snapshots.pieces import bit_map
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.answers import Granted
from holdfast_daemon.engine.effects import (
    ArenaReady,
    Effect,
    FreeSlot,
    Seal,
    SnapshotVerified,
    VerifySnapshot,
)
from holdfast_daemon.engine.effects import SlotSealed as SealedEvent
from holdfast_daemon.engine.slots import RebuildJob, SlotState
from holdfast_daemon.memory.arenas import SealedSlot
from holdfast_daemon.memory.job_storage import JobStorage
from holdfast_daemon.memory.node_storage import NodeStorage

PIECE = 16
PIECES = 6
LAYOUT = encode_layout(
    Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=(),
        extras_offset=PIECES * PIECE,
        extras_capacity=PIECE,
        piece_bytes=PIECE,
        largest_slot_bytes=4096,
    )
)
MEMBERSHIP = Membership(
    job="job",
    epoch=1,
    members=(Member(index=0, node="n0", memory_id="m", peer_address="", bulk_address=""),),
    nproc_per_node=1,
    groups=((0,),),
    redundancy=Redundancy.NONE,
)


class Engine:
    """An engine of one rank whose effects end well at once."""

    def __init__(self, slots: int = 3) -> None:
        self.engine = JobEngine(
            job="job", node="n0", memory_id="m", incarnation=1, settings=EngineSettings()
        )
        self.seals: list[Seal] = []
        self.asked: list[VerifySnapshot] = []
        self.do(self.engine.set_membership(MEMBERSHIP, 0.0))
        self.session, effects = self.engine.open(
            rank=0, epoch=1, layout=LAYOUT, largest_slot_bytes=4096, pid=1, now=0.0
        )
        self.do(effects)
        (arena,) = self.engine.memory.arenas.values()
        done = ArenaReady(rank=0, layout_id=arena.layout_id, slots=slots)
        self.do(self.engine.on_completion(done, 0.0))
        self.do(self.engine.claimed(self.session, 0.0))
        self.arena = arena

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Seal):
                self.seals.append(effect)
                event = SealedEvent(rank=0, slot=effect.slot, generation=effect.manifest.generation)
                self.do(self.engine.on_completion(event, 0.0))
            elif isinstance(effect, VerifySnapshot):
                self.asked.append(effect)

    def grant(
        self, step: int, base: int | None = None, unchanged: Set[int] = frozenset()
    ) -> Granted:
        granted, effects = self.engine.grant(
            self.session,
            epoch=1,
            step=step,
            now=0.0,
            base=None if base is None else Generation(1, base),
            unchanged=bit_map(unchanged, PIECES),
        )
        self.do(effects)
        return granted

    def start_commit(self, step: int, slot: int, digests: bytes) -> list[Effect]:
        """Commit; the slot is sealed when the effects are done."""
        return self.engine.commit(
            self.session,
            epoch=1,
            step=step,
            slot=slot,
            payload_bytes=PIECES * PIECE + 4,
            extras_bytes=4,
            digests=digests,
            nan_units=(),
            now=0.0,
        )

    def commit(self, step: int, slot: int, digests: bytes) -> None:
        self.do(self.start_commit(step, slot, digests))

    def save(
        self, step: int, base: int | None = None, unchanged: Set[int] = frozenset()
    ) -> Granted:
        granted = self.grant(step, base, unchanged)
        self.commit(step, granted.slot, digests_of(step))
        return granted


def digests_of(step: int) -> bytes:
    return b"".join((100 * step + piece).to_bytes(8, "little") for piece in range(PIECES + 1))


def test_what_is_unchanged_stays_where_it_is_and_keeps_its_digest() -> None:
    engine = Engine()
    assert engine.save(1) == Granted(slot=0, places=b"", carried=False)
    granted = engine.save(2, base=1, unchanged={0, 1, 4})
    assert granted.carried
    assert granted.places[: PIECES + 1] == bytes([0, 0, 1, 1, 0, 1, 1])
    manifest = engine.seals[-1].manifest
    assert engine.seals[-1].places == granted.places[: PIECES + 1]
    steps = [
        int.from_bytes(manifest.digests[8 * p : 8 * p + 8], "little") // 100
        for p in range(PIECES + 1)
    ]
    assert steps == [1, 1, 2, 2, 1, 2, 2]


def test_the_slot_of_a_freed_snapshot_is_used_around_what_is_still_needed() -> None:
    engine = Engine()
    engine.save(1)
    engine.save(2, base=1, unchanged={0, 1})
    # Without redundancy a newer complete generation frees the older one.
    assert engine.arena.slots[0].state is SlotState.FREE
    granted = engine.save(3, base=2, unchanged={3})
    assert granted.slot == 0
    assert granted.places[: PIECES + 1] == bytes([1, 1, 0, 1, 0, 0, 0])


@pytest.mark.parametrize("base", [None, 7])
def test_without_the_base_everything_is_written(base: int | None) -> None:
    engine = Engine()
    engine.save(1)
    granted = engine.save(2, base=base, unchanged={0, 1})
    assert not granted.carried
    assert engine.seals[-1].manifest.digests == digests_of(2)


def test_a_base_that_is_not_verified_is_not_carried_over() -> None:
    engine = Engine()
    engine.save(1)
    engine.arena.slots[0].verified = False
    assert not engine.grant(2, base=1, unchanged={0}).carried


def test_after_damage_in_one_snapshot_those_that_share_pieces_are_verified() -> None:
    engine = Engine()
    engine.save(1)
    engine.grant(2, base=1, unchanged={0})
    slots = engine.arena.slots
    slots[2].state, slots[2].generation = SlotState.SEALED, Generation(1, 3)
    slots[2].manifest, slots[2].verified = slots[0].manifest, True
    slots[2].places = bytes([0, 2, 2, 2, 2, 2, 2])
    engine.asked.clear()
    bad = SnapshotVerified(rank=0, slot=0, generation=Generation(1, 1), ok=False)
    effects = engine.engine.on_completion(bad, 0.0)
    assert any(isinstance(e, FreeSlot) and e.slot == 0 for e in effects)
    assert [e.slot for e in effects if isinstance(e, VerifySnapshot)] == [2]


def test_nothing_is_granted_while_an_earlier_trainer_may_write_anywhere() -> None:
    first = Engine()
    first.save(1)
    first.save(2, base=1, unchanged={0})
    seal = first.seals[-1]
    again = JobEngine(job="job", node="n0", memory_id="m", incarnation=2, settings=EngineSettings())
    again.adopt(
        membership=MEMBERSHIP,
        line=None,
        retained=None,
        arenas=[(0, LAYOUT, 3, {seal.slot: (seal.encoded, seal.places)}, True)],
        parities=[],
        now=0.0,
    )
    (arena,) = again.memory.arenas.values()
    assert arena.slots[seal.slot].places == seal.places
    assert arena.free_slot() is None
    again.claim_ended(arena, 0.0)
    assert arena.free_slot() is not None


def test_a_new_epoch_leaves_a_slot_to_the_trainer_that_may_still_write_into_it() -> None:
    engine = Engine()
    engine.save(1)
    granted = engine.grant(2)
    slot = engine.arena.slots[granted.slot]
    engine.do(engine.engine.set_membership(replace(MEMBERSHIP, epoch=2), 0.0))
    assert engine.arena.free_slot() is not slot
    engine.do(engine.engine.session_ended(engine.session, clean=False, now=0.0))
    assert engine.arena.free_slot() is slot


def test_what_an_earlier_daemon_left_is_verified_newest_first() -> None:
    first = Engine()
    first.save(9)
    first.save(10)
    sealed = {seal.slot: (seal.encoded, seal.places) for seal in first.seals}
    again = JobEngine(job="job", node="n0", memory_id="m", incarnation=2, settings=EngineSettings())
    effects = again.adopt(
        membership=MEMBERSHIP,
        line=None,
        retained=None,
        arenas=[(0, LAYOUT, 3, sealed, False)],
        parities=[],
        now=0.0,
    )
    verified = [e.manifest.generation for e in effects if isinstance(e, VerifySnapshot)]
    assert verified == [Generation(1, 10), Generation(1, 9)]


def test_places_are_kept_on_disk_and_bytes_are_found_there(tmp_path: Path) -> None:
    payload = bytes(range(PIECES * PIECE + 4))
    engine = Engine()
    engine.save(1)
    engine.save(2, base=1, unchanged={0, 1, 4})
    seal = engine.seals[-1]
    manifest = decode_manifest(seal.encoded)
    assert len(piece_digests(payload, PIECE)) == len(manifest.digests)
    for restart in range(2):
        with closing(NodeStorage(tmp_path, budget_bytes=1 << 20)) as node:
            job = JobStorage(node, "job")
            adopted = job.adopt()
            if not restart:
                job.allocate(0, LAYOUT)
                sealed = SealedSlot(manifest=manifest, encoded=seal.encoded, places=seal.places)
                job.seal(0, layout_id(LAYOUT), seal.slot, sealed)
            else:
                (arena,) = adopted.arenas
                assert arena.sealed[seal.slot].places == seal.places
                assert arena.sealed[seal.slot].encoded == encode_manifest(manifest)
            found = job.locate_snapshot(0, Generation(1, 2), PIECE + 3, 4 * PIECE)
            assert found.parts == (
                (PIECE + 3, PIECE - 3),
                (4096 + 2 * PIECE, 2 * PIECE),
                (4 * PIECE, PIECE),
                (4096 + 5 * PIECE, 3),
            )
            job.check_manifest_file(0, layout_id(LAYOUT), seal.slot)


def test_with_two_slots_a_save_waits_until_the_one_before_is_kept_in_place_of_the_line() -> None:
    engine = Engine(slots=2)
    engine.save(1)
    granted = engine.grant(2)
    sealing = engine.start_commit(2, granted.slot, digests_of(2))
    with pytest.raises(SnapshotSkippedError, match="every slot of rank 0 is in use"):
        engine.grant(3)
    engine.do(sealing)
    assert engine.grant(4).slot != granted.slot


@pytest.mark.parametrize("slots", [2, 3])
def test_a_slot_whose_trainer_never_learned_of_it_is_taken_back_with_the_next_grant(
    slots: int,
) -> None:
    engine = Engine(slots=slots)
    engine.save(1)
    for step in range(2, 8):  # the answers are lost, or giving the slot back fails each time
        engine.grant(step)
        assert sum(s.state is SlotState.GRANTED for s in engine.arena.slots) == 1
    engine.save(8)
    assert [seal.manifest.generation.step for seal in engine.seals] == [1, 8]


def test_a_slot_that_was_taken_back_cannot_be_committed_nor_its_successor_be_given_back() -> None:
    engine = Engine()
    first = engine.grant(2)
    second = engine.grant(3)
    with pytest.raises(UnknownSessionError, match="was not granted for step 2"):
        engine.commit(2, first.slot, digests_of(2))
    engine.do(engine.engine.abort(engine.session, epoch=1, step=2, now=1.0))  # comes late
    engine.commit(3, second.slot, digests_of(3))


@pytest.mark.parametrize("clean", [True, False])
def test_a_granted_slot_is_free_once_its_session_has_ended(clean: bool) -> None:
    engine = Engine(slots=2)
    engine.save(1)
    engine.grant(2)
    engine.do(engine.engine.session_ended(engine.session, clean=clean, now=1.0))
    assert not any(s.state is SlotState.GRANTED for s in engine.arena.slots)


def test_the_last_free_slot_is_for_a_snapshot_that_is_about_to_be_rebuilt() -> None:
    engine = Engine(slots=2)
    engine.save(1)
    engine.engine.memory.rebuilds[0] = RebuildJob(generation=Generation(1, 1), digest=1)
    with pytest.raises(SnapshotSkippedError, match="for a rebuild"):
        engine.grant(2)
    del engine.engine.memory.rebuilds[0]
    assert engine.grant(3).slot is not None


# --- windows of steps -----------------------------------------------------------------------------


def granted(engine: Engine, first: int, last: int) -> int:
    found, effects = engine.engine.grant(
        engine.session, epoch=1, step=last, first_step=first, now=1.0
    )
    engine.do(effects)
    return found.slot


def test_a_window_is_the_generation_of_its_last_step_and_is_at_its_first() -> None:
    engine = Engine()
    slot = granted(engine, 3, 5)
    record = engine.engine.memory.rank(0)
    assert (record.last_step, record.passed) == (3, Generation(1, 5))
    assert engine.arena.slots[slot].state is SlotState.GRANTED
    engine.engine.progress(engine.session, step=4, now=9.0)
    assert (record.last_step, record.last_sign) == (4, 9.0)
    assert engine.seals == []
    engine.commit(5, slot, digests_of(5))
    assert [seal.manifest.generation for seal in engine.seals] == [Generation(1, 5)]


def test_a_window_that_is_given_up_leaves_its_slot_and_the_next_has_a_later_end() -> None:
    engine = Engine()
    slot = granted(engine, 3, 5)
    engine.do(engine.engine.abort(engine.session, epoch=1, step=5, now=1.0))
    assert engine.arena.slots[slot].state is SlotState.FREE
    with pytest.raises(StepOrderError, match="asks to save step 5 after step 5"):
        granted(engine, 4, 5)
    assert granted(engine, 6, 8) == slot


@pytest.mark.parametrize("slots", [2, 3])
def test_a_window_that_two_slots_leave_out_says_what_to_change(slots: int) -> None:
    engine = Engine(slots)
    engine.save(1)
    for slot in engine.arena.slots[1:]:  # as while it is being protected
        slot.state, slot.generation = SlotState.SEALED, Generation(1, 1 + slot.index)
    with pytest.raises(SnapshotSkippedError) as skipped:
        granted(engine, 8, 9)
    assert "protection is behind" in str(skipped.value)
    assert ("set snapshot.slots to 3" in str(skipped.value)) == (slots == 2)
    with pytest.raises(SnapshotSkippedError) as skipped:
        engine.grant(10)
    assert "snapshot.slots" not in str(skipped.value), "other snapshots are taken when it is over"


def test_a_window_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(StepOrderError, match="a window from step 6 to step 5"):
        granted(Engine(), 6, 5)
