"""Ranks that compare what they hold in every n-th save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import WAIT_S, Meeting, Seat

from holdfast._agree.exchange import Alone
from holdfast._agree.interval import DueSaves
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.replicas import UnitDigests, digests_of
from holdfast._capture.whole import WholeCapture
from holdfast._copying.devices import CpuDevice
from holdfast._copying.engine import CopyEngine
from holdfast._daemon.client import Grant, GrantRequest
from holdfast._session.protected import ProtectedSession
from holdfast._settings import Settings
from holdfast._state.capture import LiveState
from holdfast.testing import FakeDaemon
from holdfast_core.errors import (
    HoldfastError,
    ReplicasDivergedError,
    SnapshotSkippedError,
)
from holdfast_core.topology import Topology

TOPOLOGY = Topology(dp=4, ep=2)
RANKS = 4


def held(
    rank: int, *, gate: int = 1, expert: int = 1, seated: dict[str, int] | None = None
) -> UnitDigests:
    """What a rank holds: ranks 0 and 2 have expert 0, ranks 1 and 3 have expert 1."""
    shared = {"layer0/gate": gate, f"layer0/expert{rank % 2}": expert, "layer0/dense": 7}
    return UnitDigests(shared, seated or {})


Fate = UnitDigests | None
"""What a rank holds in a save; None when the save is refused before it looks."""


@dataclass
class World:
    """Ranks that save together, each on a thread, as the saver of a session does."""

    every: int
    first: int = 0
    meeting: Meeting = field(default_factory=lambda: Meeting(RANKS))

    def __post_init__(self) -> None:
        self.ranks = [
            ReplicaCheck(Seat(self.meeting, r), TOPOLOGY, self.every) for r in range(RANKS)
        ]
        self._threads = ThreadPoolExecutor(RANKS)
        self._number = self.first

    def save(self, fates: Sequence[Fate]) -> list[HoldfastError | None]:
        """What became of the next save on each rank: None where it is committed."""
        number = self._number
        self._number += 1
        work = [self._threads.submit(self._one, r, number, fates[r]) for r in range(RANKS)]
        return [each.result(WAIT_S) for each in work]

    def _one(self, rank: int, number: int, fate: Fate) -> HoldfastError | None:
        comparing, step = self.ranks[rank], 10 * number
        comparing.on_save_called(number, step)
        if fate is None:
            comparing.on_save_failed(step)
            return SnapshotSkippedError("refused")
        try:
            if comparing.due(number, WAIT_S):
                comparing.hand_over(number, fate)
            comparing.settle(number)
        except HoldfastError as error:
            comparing.on_save_failed(step)
            return error
        return None

    def close(self) -> None:
        work = [self._threads.submit(each.close, WAIT_S) for each in self.ranks]
        for each in work:
            each.result(WAIT_S)
        self._threads.shutdown()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(every=3)
    yield made
    made.close()


EQUAL = [held(rank) for rank in range(RANKS)]
GATE_DIFFERS = [*EQUAL[:2], held(2, gate=9), EQUAL[3]]
NOT_ALL = [*EQUAL[:3], None]


def test_equal_replicas_meet_once_in_every_third_save() -> None:
    world = World(every=3)
    for _ in range(7):
        assert world.save(EQUAL) == [None] * RANKS
    world.close()
    assert world.meeting.done == [2] * RANKS
    assert all(each.problem is None for each in world.ranks)


def test_where_replicas_differ_no_rank_commits_and_all_name_the_unit_and_the_ranks(
    world: World,
) -> None:
    for _ in range(5):
        world.save(EQUAL)
    found = world.save(GATE_DIFFERS)
    for rank, error in enumerate(found):
        assert isinstance(error, ReplicasDivergedError), error
        assert "unit layer0/gate: ranks [0, 2]" in str(error)
        assert "at step 50 rank 0 holds different bytes from ranks [2]" in str(error)
        assert "equal at step 20" in str(error)
        assert world.ranks[rank].problem is error


def test_an_expert_is_compared_with_its_own_replicas(world: World) -> None:
    """Experts 0 and 1 are other units; each is held by two of the four ranks."""
    different = [held(rank, expert=5 + rank % 2) for rank in range(RANKS)]
    for _ in range(3):
        assert world.save(different) == [None] * RANKS
    different[3] = held(3, expert=8)
    world.save(EQUAL), world.save(EQUAL)
    error = world.save(different)[0]
    assert "unit layer0/expert1: ranks [1, 3]" in str(error)


def test_an_expert_in_seats_is_compared_with_its_copies_on_any_ranks(world: World) -> None:
    seats = [{0: 5, 1: 6}, {1: 6}, {2: 7, 0: 5}, {}]

    def all_held(*, of_rank_2: int, missing: int | None = None) -> list[Fate]:
        held_by = [*seats[:2], {**seats[2], 0: of_rank_2}, seats[3]]
        return [
            None
            if rank == missing
            else held(rank, seated={f"layer1/expert{e}": d for e, d in experts.items()})
            for rank, experts in enumerate(held_by)
        ]

    world.save(EQUAL), world.save(EQUAL)
    assert world.save(all_held(of_rank_2=5)) == [None] * RANKS
    world.save(EQUAL), world.save(EQUAL)
    found = world.save(all_held(of_rank_2=9, missing=0))
    assert all(isinstance(error, SnapshotSkippedError) for error in found), "no other copy is known"
    for error in world.save(all_held(of_rank_2=9)):
        assert isinstance(error, ReplicasDivergedError), error
        assert "unit layer1/expert0: ranks [0, 2]" in str(error)


def test_nothing_is_committed_before_a_comparison_finds_replicas_equal_again(world: World) -> None:
    world.save(EQUAL), world.save(EQUAL)
    assert all(world.save(GATE_DIFFERS))
    for _ in range(2):  # not compared
        assert all(isinstance(error, ReplicasDivergedError) for error in world.save(EQUAL))
    assert world.save(EQUAL) == [None] * RANKS
    assert world.save(EQUAL) == [None] * RANKS
    assert world.ranks[0].problem is None


def test_a_save_that_a_rank_could_not_read_is_complete_nowhere_and_the_next_is_compared(
    world: World,
) -> None:
    world.save(EQUAL), world.save(EQUAL)
    found = world.save(NOT_ALL)
    assert all(isinstance(error, SnapshotSkippedError) for error in found)
    assert "ranks [3] did not take" in str(found[0])
    assert all(isinstance(error, ReplicasDivergedError) for error in world.save(GATE_DIFFERS))


def test_ranks_that_could_not_read_their_tensors_do_not_count_as_different(world: World) -> None:
    world.save(EQUAL), world.save(EQUAL), world.save(NOT_ALL)
    assert world.save(EQUAL) == [None] * RANKS


def test_a_session_that_goes_on_from_a_later_save_counts_from_there() -> None:
    world = World(every=2, first=41)
    for _ in range(4):
        assert world.save(EQUAL) == [None] * RANKS
    world.close()
    assert world.meeting.done == [2] * RANKS


def test_waiting_for_the_verdict_does_not_wait_for_a_rank_whose_save_was_refused() -> None:
    """Rank 3 refuses its save and calls no other one: the others learn that at once."""
    world = World(every=1)
    found = world.save(NOT_ALL)
    assert all(isinstance(error, SnapshotSkippedError) for error in found)
    world.close()


def test_a_session_that_ends_takes_part_in_what_it_has_called() -> None:
    world = World(every=1)
    for comparing in world.ranks[:3]:
        comparing.on_save_called(0, 0)
        comparing.hand_over(0, held(0))
    world.ranks[3].on_save_called(0, 0)
    world.close()
    assert world.meeting.done == [1] * RANKS
    with pytest.raises(SnapshotSkippedError, match=r"ranks \[3\]"):
        world.ranks[0].settle(0)


def test_a_verdict_that_comes_before_the_digests_is_not_waited_for_again() -> None:
    comparing = ReplicaCheck(Seat(Meeting(1), 0), Topology(dp=1), 1)
    comparing.on_save_called(0, 0)
    assert comparing.due(0, WAIT_S)
    comparing.on_save_failed(0)
    while comparing.due(0, WAIT_S):  # until the ranks have concluded without this one
        pass
    comparing.hand_over(0, held(0))
    with pytest.raises(SnapshotSkippedError, match=r"ranks \[0\] did not take"):
        comparing.settle(0)
    comparing.close(WAIT_S)


def test_when_the_exchange_fails_the_save_is_given_up_and_later_ones_are_not_compared() -> None:
    world = World(every=1)
    world.meeting.break_up()
    assert all(isinstance(error, SnapshotSkippedError) for error in world.save(EQUAL))
    assert world.save(GATE_DIFFERS) == [None] * RANKS
    world.close()


class Garbling(Seat):
    """Seat to which the others' statements arrive damaged."""

    def gather(self, data: bytes) -> list[bytes]:
        return [text[:-1] for text in super().gather(data)]


def test_a_statement_that_cannot_be_read_ends_the_comparisons_and_nobody_waits() -> None:
    comparing = ReplicaCheck(Garbling(Meeting(1), 0), Topology(dp=1), 1)
    comparing.on_save_called(0, 0)
    assert comparing.due(0, WAIT_S)
    comparing.hand_over(0, held(0))
    with pytest.raises(SnapshotSkippedError, match="neither compared nor complete"):
        comparing.settle(0)
    comparing.on_save_called(1, 10)
    assert not comparing.due(1, WAIT_S)
    comparing.close(WAIT_S)


def test_replicas_that_differed_before_an_exchange_failed_stay_unsaved() -> None:
    world = World(every=2)
    world.save(EQUAL)
    assert all(world.save(GATE_DIFFERS))
    world.meeting.break_up()
    for _ in range(4):
        assert all(isinstance(error, HoldfastError) for error in world.save(EQUAL))
    world.close()


@pytest.mark.parametrize(
    "comparing",
    [ReplicaCheck(Alone(), TOPOLOGY, 1), ReplicaCheck(Seat(Meeting(RANKS), 0), TOPOLOGY, 0)],
)
def test_a_rank_that_is_alone_or_does_not_want_it_compares_nothing(comparing: ReplicaCheck) -> None:
    comparing.on_save_called(0, 0)
    assert not comparing.due(0, WAIT_S)
    comparing.on_save_failed(0)
    comparing.settle(0)
    comparing.close(WAIT_S)


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 4),
    saves=st.lists(
        st.tuples(st.sampled_from([1, 1, 2]), st.sets(st.integers(0, RANKS - 1), max_size=2)),
        max_size=24,
    ),
)
def test_at_most_so_many_whole_saves_are_mixed(
    every: int, saves: list[tuple[int, set[int]]]
) -> None:
    """Each save: what rank 2 holds of the gate, and who refuses it. A save is whole when all ranks
    commit it, and mixed when rank 2 differs."""
    world = World(every=every)
    mixed, run = [], 0
    for gate, refuse in saves:
        found = world.save(
            [None if r in refuse else held(r, gate=gate if r == 2 else 1) for r in range(RANKS)]
        )
        kinds = {type(found[r]) for r in range(RANKS) if r not in refuse}
        assert len(kinds) <= 1, "all ranks that could look come to the same verdict"
        if any(error is not None for error in found):
            continue
        run = run + 1 if gate != 1 else 0
        mixed.append(run)
    world.close()
    assert max(mixed, default=0) < every


def session_in_pair(daemon: FakeDaemon) -> tuple[ProtectedSession, ReplicaCheck, UnitDigests]:
    """The session of rank 0, the comparisons of rank 1, and what both hold at first."""
    pair, meeting = Topology(dp=2), Meeting(2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    live = LiveState(model, [torch.optim.SGD(model.parameters())], pair, 0)
    if isinstance(daemon, Overtaking):
        daemon.parameter = model.get_parameter("0.weight")
    engine = CopyEngine(1, CpuDevice())
    held_by_both = digests_of(live.discover(), pair, 0, engine, None)
    engine.close()
    session = ProtectedSession(
        live=live,
        stateful={},
        topology=pair,
        rank=0,
        client=daemon,
        exchange=Alone(),
        device=CpuDevice(),
        settings=Settings(start_wait_s=WAIT_S, report_interval_s=3600.0),
        replica_check=ReplicaCheck(Seat(meeting, 0), pair, 1),
        strategy=WholeCapture(),
        interval=DueSaves(),
    )
    return session, ReplicaCheck(Seat(meeting, 1), pair, 1), held_by_both


class Overtaking(FakeDaemon):
    """Training goes on when a slot is granted, without waiting for the copy."""

    parameter: torch.nn.Parameter

    def grant(self, request: GrantRequest) -> Grant:
        with torch.no_grad():
            self.parameter.add_(1.0)
        return super().grant(request)


def test_a_save_that_training_overtook_is_no_divergence(tmp_path: Path) -> None:
    """Rank 0 is a session; rank 1 says that it holds what rank 0 held when both saved."""
    daemon = Overtaking(tmp_path, rank=0, world_size=2)
    session, other, held_by_both = session_in_pair(daemon)
    other.on_save_called(0, 1)
    other.hand_over(0, held_by_both)
    error = session.save(1).committed.exception(WAIT_S)
    assert isinstance(error, SnapshotSkippedError), error
    with pytest.raises(SnapshotSkippedError, match=r"ranks \[0\] did not take"):
        other.settle(0)
    assert session.problem is None
    session.close()
    other.close(WAIT_S)


def test_what_the_last_save_has_shown_is_reported_before_the_session_ends(tmp_path: Path) -> None:
    """The next report would have been due in an hour."""
    daemon = FakeDaemon(tmp_path, rank=0, world_size=2)
    session, other, held_by_both = session_in_pair(daemon)
    for number, digests in enumerate([held_by_both, UnitDigests({"layer0/dense": 9}, {})]):
        other.on_save_called(number, number + 1)
        handle = session.save(number + 1)
        assert other.due(number, WAIT_S)
        other.hand_over(number, digests)
        error = handle.committed.exception(WAIT_S)
        assert isinstance(error, ReplicasDivergedError) == (number == 1), error
    session.close()
    other.close(WAIT_S)
    assert [report.divergence and report.divergence.step for report in daemon.reports] == [None, 2]
