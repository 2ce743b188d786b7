"""Where training goes on after every crash of three ranks, and what leads back to the line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import pytest

from holdfast_core.errors import ProtocolError
from holdfast_core.protection.replaying import ReplayEvidence, ReplayPlan, plan_replay
from holdfast_core.protection.standing import (
    NEW,
    RankStanding,
    StandingAction,
    can_lose_member,
    can_lose_rank,
    read_standings,
    standing,
)
from holdfast_core.topology import Topology

RANKS = 3
K = 7
"""Completed steps when the step begins in which ranks die."""


class At(IntEnum):
    """How far a rank has come in step K + 1 when the world ends."""

    FORWARD = 0
    BACKWARD = 1
    BEFORE_VOTE = 2
    IN_VOTE = 3
    """Its part of the vote is sent, and it has seen no result."""
    AFTER_VOTE = 4
    OPTIMIZER = 5
    AFTER_OPTIMIZER = 6
    SAVE = 7


def possible(places: tuple[At, ...]) -> bool:
    """Whether ranks can be there at one time: none passes the vote before all have come to it."""
    return max(places) < At.AFTER_VOTE or min(places) >= At.IN_VOTE


def states(at: At) -> RankStanding:
    """What a rank that lives on states. One whose vote has passed finishes its step alone first."""
    done = K + (at >= At.AFTER_VOTE)
    return RankStanding(step=done, ready=at is At.IN_VOTE, topology="dp3·ep1·tp1·pp1")


@dataclass
class Process:
    """A rank that lives on; `bytes_of` names the steps that its parameters contain."""

    said: RankStanding
    bytes_of: tuple[int, ...]


def survivors(places: tuple[At, ...], dead: frozenset[int]) -> dict[int, Process]:
    found = {}
    for rank, at in enumerate(places):
        if rank not in dead:
            said = states(at)
            found[rank] = Process(said, tuple(range(1, said.step + 1)))
    return found


def all_ranks(found: Mapping[int, Process]) -> list[RankStanding]:
    """Statements of the new world, in which new processes take the places of the lost."""
    lost = RankStanding()
    return [found[r].said if r in found else lost for r in range(RANKS)]


def finish(process: Process, step: int, rank: int) -> None:
    """Let a rank that holds its gradients finish the step."""
    assert process.said.ready and process.said.step == step - 1
    process.said = RankStanding(step=step, topology=process.said.topology, rank=rank)
    process.bytes_of += (step,)


def settle(found: dict[int, Process], *, sharded: bool) -> None:
    """Let those who are left follow the rule to its end, and check where that is."""
    for rank, process in found.items():
        process.said = RankStanding(
            step=process.said.step,
            ready=process.said.ready,
            topology=process.said.topology,
            rank=rank,
            unshared=sharded,
        )
    verdict = standing(all_ranks(found))
    passed = any(one.said.step == K + 1 for one in found.values())
    behind = [rank for rank, one in found.items() if one.said.step == K]
    if passed and behind:
        assert verdict.action is StandingAction.FORWARD and verdict.step == K + 1
        for some in subsets(behind):  # another one dies, or the world ends, when these have done it
            left = {r: Process(one.said, one.bytes_of) for r, one in found.items()}
            for rank in some:
                finish(left[rank], verdict.step, rank)
            for dead in subsets(left) if some else ():
                rest = {rank: one for rank, one in left.items() if rank not in dead}
                if rest:
                    settle(rest, sharded=sharded)
        return
    lost = set(range(RANKS)) - found.keys()
    alone = sharded and bool(lost)
    assert verdict.action is (StandingAction.REPLAY if alone else StandingAction.LIVE)
    assert {one.said.step for one in found.values()} == {verdict.step}
    assert verdict.step == K + passed
    assert {one.bytes_of for one in found.values()} == {tuple(range(1, verdict.step + 1))}
    givers = {rank: (min(found), min(found)) for rank in lost}
    assert verdict.sources == ({} if alone else givers)
    if alone:
        settle_by_line(found, verdict.step)


def settle_by_line(found: Mapping[int, Process], step: int) -> None:
    """With each line that may be there, the ranks that are lost restore alone if and only if it is
    of the step that the others have; otherwise all go back to it."""
    for line in range(-1, K + 3):
        plan = plan_replay(
            [
                ReplayEvidence(
                    step=found[rank].said.step if rank in found else None,
                    line=line,
                    whole=line,
                    topology="dp3·ep1·tp1·pp1",
                )
                for rank in range(RANKS)
            ]
        )
        assert isinstance(plan, ReplayPlan) is (line == step)
        if isinstance(plan, ReplayPlan):
            assert set(plan.scope) == set(range(RANKS)) - found.keys()
            assert plan.line == plan.target == step


def subsets(of: object) -> Iterator[tuple[int, ...]]:
    items = list(of)  # type: ignore[call-overload]
    for count in range(len(items) + 1):
        yield from itertools.combinations(items, count)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "sharded"])
@pytest.mark.parametrize("dead", [s for s in subsets(range(RANKS)) if len(s) < RANKS])
def test_survivors_of_every_crash_end_at_one_step(dead: tuple[int, ...], sharded: bool) -> None:
    seen = 0
    for places in itertools.product(At, repeat=RANKS):
        if possible(places):
            settle(survivors(places, frozenset(dead)), sharded=sharded)
            seen += 1
    assert seen == 4**3 + 5**3 - 1  # before the vote, and after all have come to it


def live(step: int = K, **fields: object) -> RankStanding:
    given = {"topology": "dp3·ep1·tp1·pp1", **fields}
    return RankStanding(step=step, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dead", range(RANKS))
def test_a_step_that_was_cut_off_after_its_vote_leads_back_to_the_line(dead: int) -> None:
    ranks = [live(K + 1, rank=rank) for rank in range(RANKS)]
    ranks[(dead + 1) % RANKS] = live(K, torn="step 8 was cut off after its vote")
    ranks[dead] = RankStanding()
    verdict = standing(ranks)
    assert verdict.action is StandingAction.LINE
    assert "cut off after its vote" in verdict.reason and not verdict.sources


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([RankStanding()] * 3, "no process has outlived its world"),
        ([live(), live(K + 1, rank=1), RankStanding()], "without the vote on the next one"),
        ([live(ready=True), live(K + 2, rank=1), RankStanding()], "has completed step 9"),
        ([live(), live(topology="dp3·ep3·tp1·pp1", rank=1)], "different topologies"),
        ([live(topology="nonsense")], "cannot be read"),
        ([live(topology="dp1·ep1·tp2·pp1")] * 3, "does not fit a training world of 3"),
        ([RankStanding(torn="cut"), live(rank=1), live(rank=2)], "rank 0: cut"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_no_vote_explains_leads_back_to_the_line(
    ranks: list[RankStanding], reason: str
) -> None:
    verdict = standing(ranks)
    assert verdict.action is StandingAction.LINE
    assert reason in verdict.reason


def expert_ranks(count: int, topology: str, lost: set[int]) -> list[RankStanding]:
    return [
        RankStanding() if rank in lost else live(rank=rank, topology=topology, experts=True)
        for rank in range(count)
    ]


def test_experts_come_from_a_rank_that_has_the_same_ones() -> None:
    verdict = standing(expert_ranks(4, "dp4·ep2·tp1·pp1", {1}))
    assert verdict.action is StandingAction.LIVE
    assert verdict.sources == {1: (0, 3)}


def test_experts_that_nobody_else_has_are_restored() -> None:
    verdict = standing(expert_ranks(4, "dp4·ep2·tp1·pp1", {1, 3}))
    assert (verdict.action, verdict.step, verdict.sources) == (StandingAction.REPLAY, K, {})
    assert verdict.reason.endswith("nobody is left who holds the experts of rank 1")


def test_a_lost_state_is_restored_alone_only_in_a_world_of_the_same_places() -> None:
    private = [live(rank=rank, unshared=True) for rank in range(RANKS)]
    verdict = standing([*private[:2], RankStanding()])
    assert verdict.action is StandingAction.REPLAY
    assert verdict.reason.endswith("rank 2 is to hold tensors that no other rank has")
    moved = [private[0], private[2], RankStanding()]
    larger = [*private, RankStanding()]
    for ranks in (moved, larger):
        verdict = standing(ranks)
        assert verdict.action is StandingAction.LINE
        assert "tensors that no other rank has" in verdict.reason


def test_each_pipeline_stage_needs_a_rank_that_is_left() -> None:
    ranks = expert_ranks(4, "dp2·ep1·tp1·pp2", {3})
    assert standing(ranks).sources == {3: (2, 2)}
    verdict = standing(expert_ranks(4, "dp2·ep1·tp1·pp2", {2, 3}))
    assert verdict.action is StandingAction.REPLAY
    assert verdict.reason.endswith("nobody is left who holds what rank 2 is to hold")


def test_uneven_copies_go_on_live_as_long_as_each_expert_has_one() -> None:
    def seated(rank: int, *held: tuple[int, ...]) -> RankStanding:
        return live(rank=rank, held=held, layer_experts=3)

    ranks = [seated(0, (0, 1), (1, 2)), seated(1, (2, 1), (0, 1)), RankStanding()]
    verdict = standing(ranks)
    assert (verdict.action, verdict.sources) == (StandingAction.LIVE, {2: (0, 0)})
    verdict = standing([seated(0, (0, 1, 2), (1, 2)), RankStanding()])
    assert verdict.action is StandingAction.LINE
    assert verdict.reason == "no rank is left that holds expert 0 of layer 1"


def seats(*held: tuple[int, ...], experts: int = 3, **more: Any) -> RankStanding:
    return live(held=held, layer_experts=experts, **more)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (seats((0, 3), (1, 2)), "rank 1 states to hold expert 3 of layer 0, which has 3"),
        (seats((-1,), (1, 2)), "rank 1 states to hold expert -1 of layer 0, which has 3"),
        (seats((0, 1)), "rank 1 states 1 layers of 3 experts, and rank 0 2 of 3"),
        (seats((0,), (1,), experts=2), "rank 1 states 2 layers of 2 experts, and rank 0 2 of 3"),
        (seats((), (), step=-7), "rank 1 states to have completed -7 steps"),
        (
            seats((0,), (1,), rank=10**9),
            "topology dp3·ep1·tp1·pp1 has no rank 1000000000; its ranks are 0 to 2",
        ),
        (
            seats((0,), (1,), topology=f"dp{10**7 + 1}·ep2·tp1·pp1"),
            "ranks state different topologies",
        ),
    ],
)
def test_statements_that_cannot_be_true_lead_back_to_the_line(
    lie: RankStanding, reason: str
) -> None:
    verdict = standing([seats((0, 1, 2), (0, 1, 2)), lie])
    assert verdict.action is StandingAction.LINE
    assert verdict.reason.startswith(reason)


def test_large_numbers_that_a_rank_states_take_no_time() -> None:
    verdict = standing([seats((0, 1), (2,), experts=10**15)])
    assert verdict.reason == "no rank is left that holds expert 2 of layer 0"
    for degree in ("9" * 5000, "100000000001"):
        verdict = standing([live(topology=f"dp{degree}·ep2·tp1·pp1")])
        assert verdict.action is StandingAction.LINE and "cannot be read" in verdict.reason


@pytest.mark.parametrize("text", ["", "{", '{"step":"x"}', '{"held":[[1.5]]}', "[" * 5000])
def test_a_statement_that_cannot_be_read_names_its_rank(text: str) -> None:
    honest = msgspec.json.encode(seats((0, 1, 2))).decode()
    with pytest.raises(ProtocolError, match="cannot decode the statement of rank 1 about"):
        read_standings([honest, text])


def test_a_smaller_world_goes_on_with_what_it_has() -> None:
    verdict = standing([live(rank=0), live(rank=2)])
    assert (verdict.action, verdict.step, verdict.sources) == (StandingAction.LIVE, K, {})


def test_a_rank_that_has_the_part_of_another_one_leads_back_to_the_line() -> None:
    ranks = [live(rank=rank, topology="dp4·ep2·tp1·pp1", experts=True) for rank in (0, 2)]
    assert standing(ranks).reason == "rank 1 holds the part of another rank"


def test_a_rank_in_the_next_vote_waits_until_the_others_have_caught_up() -> None:
    ranks = [live(K + 1, ready=True), live(K, ready=True, rank=1), RankStanding(step=NEW)]
    verdict = standing(ranks)
    assert (verdict.action, verdict.step) == (StandingAction.FORWARD, K + 1)


def shapes() -> Iterator[tuple[str, int, int, bool, bool]]:
    """Topology, number of ranks, ranks of each member, and whether ranks have tensors that no other
    rank holds, and experts."""
    for dp, tp, pp in itertools.product((1, 2, 4), (1, 2), (1, 2)):
        for ep in (part for part in (1, 2, 4) if dp % part == 0):
            ranks = dp * tp * pp
            for nproc in (part for part in (1, 2, 4) if ranks % part == 0):
                for unshared, experts in itertools.product((False, True), repeat=2):
                    yield str(Topology(dp=dp, ep=ep, tp=tp, pp=pp)), ranks, nproc, unshared, experts


@pytest.mark.parametrize("step", [0, K])
def test_a_member_can_be_lost_where_the_others_would_go_on_live(step: int) -> None:
    seen = set()
    for topology, ranks, nproc, unshared, experts in shapes():
        own = [
            RankStanding(
                step=step, topology=topology, rank=rank, unshared=unshared, experts=experts
            )
            for rank in range(ranks)
        ]
        for member in range(ranks // nproc):
            lost = range(member * nproc, (member + 1) * nproc)
            left = [RankStanding() if rank in lost else own[rank] for rank in range(ranks)]
            lives = standing(left).action is StandingAction.LIVE
            seen.add(lives)
            assert can_lose_member(own[lost[0]], ranks, nproc) is lives, (topology, nproc)
    assert seen == {False, True}


@pytest.mark.parametrize("step", [0, K])
def test_a_rank_can_be_lost_where_the_others_would_go_on_live(step: int) -> None:
    seen = set()
    for topology, ranks, nproc, unshared, experts in shapes():
        own = [
            RankStanding(
                step=step, topology=topology, rank=rank, unshared=unshared, experts=experts
            )
            for rank in range(ranks)
        ]
        for lost in range(ranks):
            left = [RankStanding() if rank == lost else own[rank] for rank in range(ranks)]
            lives = standing(left).action is StandingAction.LIVE
            assert can_lose_rank(own[lost], ranks) is lives, topology
            whole = can_lose_member(own[lost], ranks, nproc)
            assert lives or not whole, "a member that can be lost has no rank that cannot"
            seen.add((lives, whole))
    assert seen == {(False, False), (True, False), (True, True)}


def test_what_is_the_state_of_no_step_is_nothing_to_go_on_with() -> None:
    torn = RankStanding(step=0, topology="dp3·ep1·tp1·pp1", torn="x")
    assert not can_lose_member(torn, 3, 1) and not can_lose_rank(torn, 3)
