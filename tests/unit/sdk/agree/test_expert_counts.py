"""Ranks that add up what they know of their experts, and choose by it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from choice_bounds import selective_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import WAIT_S, Meeting, Seat

from holdfast._agree.exchange import Alone
from holdfast._agree.expert_counts import ExpertCounts
from holdfast._capture.gradients import NO_GRADIENTS
from holdfast._capture.partial import PartialCapture
from holdfast._capture.partial_state import START, PartialState
from holdfast._capture.strategy import SaveCall
from holdfast_core.experts.counts import AgreedCounts, CountStatement, Mark
from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer, Selection
from holdfast_core.job.snapshots import ExpertChoice, LossyPolicy, PartialExperts, Selective
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind

RANKS = 3
PER_RANK = 2
LAYERS = 2
BY_LOAD = PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE)


def unit(layer: int, expert: int) -> UnitKey:
    return UnitKey(layer, UnitKind.EXPERT, expert)


def held_by(rank: int) -> frozenset[UnitKey]:
    return frozenset(u for u in TABLE.units if u.expert is not None and u.expert % RANKS == rank)


TABLE = ExpertTable(
    layers=tuple(
        MoeLayer(
            layer=layer,
            stage=0,
            experts=tuple(
                Expert(
                    unit=unit(layer, index),
                    nbytes=100,
                    gradient_bytes=20,
                    owners=(index % RANKS,),
                    stage=0,
                    share=index % RANKS,
                )
                for index in range(RANKS * PER_RANK)
            ),
        )
        for layer in range(LAYERS)
    ),
    dense_bytes=0,
)


@dataclass
class Rank:
    """One rank's saves, without tensors: what a save does to the policy."""

    rank: int
    policy: LossyPolicy
    meeting: Meeting
    epoch: int = 1
    state: PartialState = START
    captured: dict[UnitKey, int] = field(default_factory=dict)
    """Of its own experts: the save that they were last captured in, in truth."""

    def __post_init__(self) -> None:
        counting = ExpertCounts(Seat(self.meeting, self.rank), self.rank, RANKS)
        self.capture = PartialCapture(self.policy, counting, WAIT_S, NO_GRADIENTS)
        self.capture.resume(self.state)
        self.capture.begin(TABLE, RANKS, held_by(self.rank))

    def save(self, number: int, routed: dict[UnitKey, int], fate: str) -> frozenset[UnitKey] | None:
        """What the rank's choice is, None when it is asked for none.

        `fate`: `kept`, `refused` (by the training thread, or before there is a place), `full` (the
        snapshot before is gone, so that everything is captured), `lost` (not committed).
        """
        capture = self.capture
        capture.on_save_called(number, number, float(number))
        if fate == "refused":
            capture.on_ended(number)
            return None
        capture.count(routed, {})
        call = SaveCall(number=number, step=number)
        choice = capture.choose(call, None)
        chosen = frozenset(TABLE.units) - choice.left_out
        choice = capture.on_granted(number, choice, carried=fate != "full")
        record = capture.record(Generation(self.epoch, number), call, choice, {})
        if fate != "lost":
            capture.on_committed(record)
            self.state = record.state
            self.captured |= dict.fromkeys(held_by(self.rank) - choice.left_out, number)
        capture.on_ended(number)
        return chosen


def ranks_of(policy: LossyPolicy, before: Sequence[Rank] = ()) -> list[Rank]:
    meeting = Meeting(RANKS)
    states = [rank.state for rank in before] or [START] * RANKS
    return [Rank(r, policy, meeting, 1 + bool(before), states[r]) for r in range(RANKS)]


def close(ranks: Sequence[Rank]) -> None:
    """All at once, as the ranks of a world do."""
    ends = [threading.Thread(target=rank.capture.close, args=(WAIT_S,)) for rank in ranks]
    for end in ends:
        end.start()
    for end in ends:
        end.join()


def routed(rank: int, number: int, hot: int) -> dict[UnitKey, int]:
    """Each rank routes other tokens; one expert is hot."""
    return {u: 1 + rank + 50 * (u.expert == hot) + number % 3 for u in TABLE.units if u.expert}


fates = st.sampled_from(["kept", "kept", "kept", "refused", "full", "lost"])
POLICIES = [BY_LOAD, Selective(experts=3), Selective()]


@pytest.mark.parametrize("policy", POLICIES, ids=["load", "selective", "budget"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ranks_choose_alike_whoever_skips_what(policy: LossyPolicy, data: st.DataObject) -> None:
    ranks = ranks_of(policy)
    first = True
    for number in range(data.draw(st.integers(1, 12), label="saves")):
        hot = data.draw(st.integers(0, RANKS * PER_RANK - 1), label="hot")
        choices = []
        for rank in ranks:
            fate = "kept" if first else data.draw(fates, label="fate")
            chosen = rank.save(number, routed(rank.rank, number, hot), fate)
            if chosen is not None:
                choices.append(chosen)
        first = False
        assert len(set(choices)) <= 1
    close(ranks)
    assert len(set(ranks[0].meeting.done)) == 1


@pytest.mark.parametrize("policy", POLICIES, ids=["load", "selective", "budget"])
def test_what_was_not_captured_is_chosen_again(policy: LossyPolicy) -> None:
    ranks = ranks_of(policy)
    hot = unit(0, 1)  # of rank 1
    tokens = dict.fromkeys(TABLE.units, 1) | {hot: 1000}
    for number in range(12):
        for rank in ranks:  # rank 1 has a place for every second snapshot only
            skips = rank.rank == 1 and number % 2
            chosen = rank.save(number, tokens, "refused" if skips else "kept")
            assert chosen is None or number < 1 or hot in chosen
    assert ranks[1].captured[hot] == 10
    close(ranks)


def test_experts_without_tokens_are_captured_within_the_bound() -> None:
    total = 3
    ranks = ranks_of(Selective(experts=total))
    idle = unit(1, 0)
    tokens = {u: 100 + u.expert for u in TABLE.units if u.expert}
    bound = selective_bound(len(TABLE.units), total)
    taken = [0]
    for number in range(2 * bound + 2):
        first, *others = [rank.save(number, tokens, "kept") for rank in ranks]
        assert first is not None
        assert others == [first, first]
        if idle in first and number:
            taken.append(number)
    assert len(taken) >= 3
    assert max(b - a for a, b in pairwise(taken)) <= bound
    assert taken[1] > 3  # it is not just everybody's turn
    close(ranks)


def test_a_resumed_run_chooses_by_what_was_captured_before() -> None:
    ranks = ranks_of(BY_LOAD)
    hot = {unit(0, 4), unit(1, 3)}  # of different ranks, which save equally many
    for number in range(3):
        for rank in ranks:
            rank.save(number, {u: 1 + 9 * (u in hot) for u in TABLE.units}, "kept")
    close(ranks)
    resumed = ranks_of(BY_LOAD, ranks)
    choices = {rank.save(3, {}, "kept") for rank in resumed}
    close(resumed)
    assert choices == {frozenset(hot)}


def test_a_snapshot_of_another_policy_has_no_marks_and_the_first_choice_is_everything() -> None:
    ranks = ranks_of(BY_LOAD)
    for rank in ranks:
        rank.save(0, {}, "kept")
        assert rank.state != START
        document = {k: v for k, v in rank.state.to_dict().items() if k not in ("marks", "measures")}
        rank.state = PartialState.from_dict(document)
    close(ranks)
    resumed = ranks_of(BY_LOAD, ranks)
    assert {rank.save(1, {}, "kept") for rank in resumed} == {frozenset(TABLE.units)}
    close(resumed)


def test_a_state_is_read_as_it_was_written() -> None:
    ranks = ranks_of(BY_LOAD)
    for rank in ranks:
        rank.save(0, {unit(0, 1): 5}, "kept")
        assert rank.state != START
        assert PartialState.from_dict(rank.state.to_dict()) == rank.state
        assert set(rank.state.marks) == held_by(rank.rank)
    close(ranks)


def test_a_rank_without_the_sum_captures_all_of_its_own_and_others_choose_on() -> None:
    meeting = Meeting(RANKS)
    ranks = [Rank(r, BY_LOAD, meeting) for r in range(RANKS)]
    for rank in ranks:
        rank.save(0, {}, "kept")
    meeting.break_up()  # at the latest the sum after save 1 fails
    for number in (1, 2):
        choices = [rank.save(number, dict.fromkeys(TABLE.units, 1), "kept") for rank in ranks]
    assert choices == [held_by(rank.rank) for rank in ranks]
    assert {rank.captured[u] for rank in ranks for u in held_by(rank.rank)} == {2}
    close(ranks)


def statement(number: int) -> CountStatement:
    return CountStatement(number=number, tokens={}, marks={unit(0, 0): Mark(number, 0)})


def nothing(counts: AgreedCounts) -> Selection:
    return Selection(units=(), reason=f"save {counts.number} is over")


def test_a_rank_that_waited_in_vain_does_not_wait_again_before_a_choice_arrives() -> None:
    counting = ExpertCounts(Alone(), 0, 1)
    assert counting.wait_choice(5, 0.01) is None
    assert counting.wait_choice(6, 1e9) is None
    counting.start(7, TABLE.units, statement, nothing)
    counting.close(WAIT_S)  # after the first sum
    found = counting.wait_choice(7, 0.0)
    assert found is not None
    assert found.counts.number == 6


def test_all_saves_that_were_called_are_added_up_before_the_end() -> None:
    meeting = Meeting(2)
    both = [ExpertCounts(Seat(meeting, rank), rank, 2) for rank in (0, 1)]
    for counting in both:
        counting.start(0, TABLE.units, statement, nothing)
        for number in range(4):
            counting.on_save_called(number)
    both[0].on_save_decided(3)  # the other skipped it, and comes to its end
    ends = [threading.Thread(target=counting.close, args=(WAIT_S,)) for counting in both]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert meeting.done == [5, 5]
