"""Experts whose parts lie on several ranks: no snapshot of all ranks has parts of two saves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import WAIT_S, Meeting, Seat

from holdfast._agree.expert_counts import Chosen, ExpertCounts
from holdfast._capture.gradients import NO_GRADIENTS
from holdfast._capture.partial import PartialCapture
from holdfast._capture.partial_state import START, PartialState
from holdfast._capture.strategy import SaveCall
from holdfast._restoring.restore import find_agreed_versions
from holdfast_core.errors import CorruptError, SnapshotSkippedError
from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer
from holdfast_core.job.snapshots import ExpertChoice, LossyPolicy, PartialExperts, Selective
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind

RANKS, LAYERS, EXPERTS = 3, 2, 6
IN_TURN = PartialExperts(experts_per_layer=1)
BY_LOAD = PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE)
POLICIES = [IN_TURN, BY_LOAD, Selective(experts=2)]
IDS = ["turn", "load", "selective"]


def holders(unit: UnitKey) -> tuple[int, ...]:
    """Some experts lie on all ranks, some on two, the last on one."""
    return {4: (0, 1), 5: (2,)}.get(unit.expert or 0, tuple(range(RANKS)))


def layer_of(layer: int) -> MoeLayer:
    units = [UnitKey(layer, UnitKind.EXPERT, index) for index in range(EXPERTS)]
    return MoeLayer(
        layer=layer,
        stage=0,
        experts=tuple(
            Expert(unit=unit, nbytes=90, gradient_bytes=9, owners=holders(unit), stage=0, share=0)
            for unit in units
        ),
    )


TABLE = ExpertTable(layers=tuple(map(layer_of, range(LAYERS))), dense_bytes=0)
SPREAD = {unit: len(holders(unit)) for unit in TABLE.units if len(holders(unit)) > 1}

Versions = Mapping[UnitKey, int]
"""Of a rank's experts: the save that each was captured in."""


class Deaf(ExpertCounts):
    """Does not receive the choice of some saves in time."""

    deaf = False

    def wait_choice(self, number: int, wait_s: float) -> Chosen | None:
        found = super().wait_choice(number, wait_s)
        return None if self.deaf else found


@dataclass
class Rank:
    """One rank, and what its daemon holds."""

    rank: int
    policy: LossyPolicy
    meeting: Meeting
    epoch: int = 1
    state: PartialState = START
    base: Versions = field(default_factory=dict)
    """What could be carried over."""
    sealed: dict[int, Versions] = field(default_factory=dict)
    states: dict[int, PartialState] = field(default_factory=dict)
    announced: int = -1
    """The newest save that was called."""

    def __post_init__(self) -> None:
        self.counting = Deaf(Seat(self.meeting, self.rank), self.rank, RANKS)
        self.capture = PartialCapture(self.policy, self.counting, WAIT_S, NO_GRADIENTS)
        self.capture.resume(self.state)
        self.own = frozenset(unit for unit in TABLE.units if self.rank in holders(unit))
        self.capture.begin(TABLE, RANKS, self.own, SPREAD)

    def call(self, number: int) -> None:
        if number > self.announced:
            self.announced = number
            self.capture.on_save_called(number, number, float(number))

    def save(self, number: int, fate: str) -> frozenset[UnitKey] | None:
        """Its own experts that were captured; None when the save was skipped.

        `fate`: `kept`; `refused` before anything; `empty`: nothing can be carried over; `lost`:
        begun and not committed; `unanswered`: committed, and the rank does not learn of it;
        `deaf`: the choice does not arrive; `late`: still in progress when the next one is called;
        `early`: the next one is called, and spoken for, before this one has begun.
        """
        self.call(number)
        try:
            return None if fate == "refused" else self._attempt(number, fate)
        except SnapshotSkippedError:
            return None
        finally:
            self.capture.on_ended(number)

    def _attempt(self, number: int, fate: str) -> frozenset[UnitKey]:
        capture, call = self.capture, SaveCall(number=number, step=number)
        capture.count(dict.fromkeys(TABLE.units, 1 + number % 3), {})
        self.counting.deaf = fate == "deaf"
        choice = capture.choose(call, None)
        if fate == "empty":
            self.base = {}
        if fate == "early":
            self.call(number + 1)
            first = self.state.ledger.snapshots
            self.meeting.wait_begun(self.rank, number - first + 2)
        choice = capture.on_granted(number, choice, carried=bool(self.base))
        if fate == "late":
            self.call(number + 1)
        generation = Generation(self.epoch, number)
        record = capture.record(generation, call, choice, {})
        taken = self.own - choice.left_out
        versions = {unit: number if unit in taken else self.base[unit] for unit in self.own}
        if fate != "lost":
            self.sealed[number], self.states[number] = versions, record.state
        if fate not in ("lost", "unanswered"):
            self.base = versions
            capture.on_committed(record)
        return taken


def world(policy: LossyPolicy) -> list[Rank]:
    meeting = Meeting(RANKS)
    return [Rank(rank, policy, meeting) for rank in range(RANKS)]


def close(ranks: Sequence[Rank]) -> None:
    """All at once and after the same saves, as the ranks of a world do."""
    for rank in ranks:
        rank.call(max(each.announced for each in ranks))
    ends = [threading.Thread(target=rank.capture.close, args=(WAIT_S,)) for rank in ranks]
    for end in ends:
        end.start()
    for end in ends:
        end.join()


def complete(ranks: Sequence[Rank]) -> list[int]:
    """The saves of which each rank's daemon holds a snapshot, ascending."""
    return sorted(set.intersection(*(set(rank.sealed) for rank in ranks)))


def torn(ranks: Sequence[Rank]) -> list[tuple[int, UnitKey]]:
    return [
        (number, unit)
        for number in complete(ranks)
        for unit in SPREAD
        if len({ranks[rank].sealed[number][unit] for rank in holders(unit)}) > 1
    ]


def resumed(ranks: Sequence[Rank], number: int, policy: LossyPolicy) -> list[Rank]:
    """The world after all ranks were killed and went back to save `number`."""
    meeting = Meeting(RANKS)
    return [
        Rank(
            rank.rank,
            policy,
            meeting,
            epoch=rank.epoch + 1,
            state=rank.states[number],
            base=rank.sealed[number],
            sealed={number: rank.sealed[number]},
            states={number: rank.states[number]},
            announced=number,
        )
        for rank in ranks
    ]


FATES = st.sampled_from(
    ["kept"] * 8 + ["refused", "empty", "lost", "unanswered", "deaf", "late", "late", "early"]
)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_of_one_expert_are_of_one_save_whoever_skips_what(
    policy: LossyPolicy, data: st.DataObject
) -> None:
    ranks = world(policy)
    number = 0
    for _ in range(data.draw(st.integers(1, 14), label="saves")):
        fates = [data.draw(FATES, label="fate") for _ in ranks]
        for rank, fate in zip(ranks, fates, strict=True):
            rank.save(number, fate)
        assert torn(ranks) == []
        number += 1
        if complete(ranks) and data.draw(st.integers(0, 5), label="killed") == 0:
            line = complete(ranks)[-1]
            close(ranks)
            ranks, number = resumed(ranks, line, policy), line + 1
    close(ranks)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_experts_that_are_spread_are_left_out_like_others(policy: LossyPolicy) -> None:
    ranks = world(policy)
    for number in range(8):
        taken = [rank.save(number, "kept") for rank in ranks]
        chosen = frozenset[UnitKey]().union(*(units or () for units in taken))
        assert taken == [rank.own & chosen for rank in ranks]
        assert len(chosen) == (LAYERS * EXPERTS if number == 0 else 2)
    assert complete(ranks) == list(range(8))
    close(ranks)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@pytest.mark.parametrize("fate", ["refused", "lost"])
def test_after_a_save_that_one_rank_skipped_only_what_it_lacks_comes_on_top(
    policy: LossyPolicy, fate: str
) -> None:
    ranks = world(policy)
    for number in range(3):
        for rank in ranks:
            rank.save(number, "kept")
    taken = [rank.save(3, fate if rank.rank == 1 else "kept") for rank in ranks]
    missed = (taken[0] or frozenset()) & ranks[1].own
    assert missed
    again = [rank.save(4, "kept") for rank in ranks]
    chosen = frozenset[UnitKey]().union(*(units or () for units in again))
    assert missed <= chosen
    assert len(chosen) <= 4
    assert complete(ranks) == [0, 1, 2, 4]
    close(ranks)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_a_rank_whose_save_ends_otherwise_than_it_stated_skips_the_next(
    policy: LossyPolicy,
) -> None:
    ranks = world(policy)
    for rank in ranks:
        rank.save(0, "kept")
    for rank in ranks:
        rank.save(1, "early" if rank.rank == 0 else "lost")
    assert ranks[0].save(2, "kept") is None
    for rank in ranks[1:]:
        rank.save(2, "kept")
    for number in (3, 4):
        assert None not in [rank.save(number, "kept") for rank in ranks]
    assert torn(ranks) == []
    close(ranks)


def test_a_rank_that_carries_nothing_over_skips_and_then_all_capture_its_experts() -> None:
    ranks = world(IN_TURN)
    for number in range(3):
        for rank in ranks:
            rank.save(number, "kept")
    assert [rank.save(3, "empty" if rank.rank == 1 else "kept") for rank in ranks][1] is None
    again = [rank.save(4, "kept") for rank in ranks]
    assert [
        ranks[1].own & rank.own <= (taken or set())
        for rank, taken in zip(ranks, again, strict=True)
    ] == [True] * 3
    after = [rank.save(5, "kept") for rank in ranks]
    assert all(len(taken or TABLE.units) <= 2 for taken in after)
    assert complete(ranks) == [0, 1, 2, 4, 5]
    assert torn(ranks) == []
    close(ranks)


def test_when_sums_end_no_rank_captures_by_a_choice_that_another_does_not_have() -> None:
    ranks = world(IN_TURN)
    for number in range(3):
        for rank in ranks:
            rank.save(number, "kept")
    ranks[0].meeting.break_up()
    for number in range(3, 8):
        for rank in ranks:
            rank.save(number, "kept")
        assert torn(ranks) == []
    assert complete(ranks)[-1] == 7, "experts are captured whole in the end"
    assert ranks[0].sealed[7] == dict.fromkeys(ranks[0].own, 7)
    close(ranks)


def test_a_restore_refuses_parts_of_different_generations() -> None:
    alike = [{"layer0/expert0": "1.5", f"layer0/expert{i}": "1.4"} for i in (1, 2)]
    assert find_agreed_versions(alike) == {
        "layer0/expert0": "1.5",
        "layer0/expert1": "1.4",
        "layer0/expert2": "1.4",
    }
    torn_apart = [*alike, {"layer0/expert0": "1.3"}]
    with pytest.raises(CorruptError, match=r"parts of layer0/expert0 .* 1\.5 and 1\.3"):
        find_agreed_versions(torn_apart)


def test_a_rank_states_nothing_about_experts_that_it_captured_before_a_restart() -> None:
    ranks = world(IN_TURN)
    for rank in ranks:
        rank.save(0, "kept")
    close(ranks)
    unit = UnitKey(0, UnitKind.EXPERT, 4)  # of ranks 0 and 1
    state = ranks[2].states[0]
    ranks[2].states[0] = replace(state, marks={**state.marks, unit: ranks[0].states[0].marks[unit]})
    again = resumed(ranks, 0, IN_TURN)
    for number in (1, 2):
        taken = [rank.save(number, "kept") for rank in again]
    assert [len(units or ()) <= 2 for units in taken] == [True] * RANKS
    close(again)
