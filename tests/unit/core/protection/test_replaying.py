"""Which ranks restore alone, and which steps they repeat: every loss in small topologies, the
smallest scope in all of up to 16 ranks, and every contradiction."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from holdfast_core.protection.replaying import (
    FRUITLESS_MAX,
    NO_LINE,
    ReplayEvidence,
    ReplayPlan,
    ReplayProgress,
    pipeline_neighbours,
    plan_replay,
)
from holdfast_core.protection.standing import RankStanding, StandingAction, standing
from holdfast_core.topology import Topology

LINE, TARGET = 4, 7
SHAPES = [Topology(pp=pp, dp=dp, tp=tp) for pp in (2, 3, 4) for dp in (1, 2) for tp in (1, 2)]


def kept(topology: Topology) -> ReplayEvidence:
    """Statement of a rank that has its state and all logs."""
    return ReplayEvidence(
        step=TARGET,
        line=LINE,
        whole=LINE,
        logged_from=1,
        logged_to=TARGET,
        topology=str(topology),
    )


def lost(topology: Topology) -> ReplayEvidence:
    return ReplayEvidence(line=LINE, whole=LINE, topology=str(topology))


def evidence(topology: Topology, stages: Sequence[int]) -> list[ReplayEvidence]:
    """Statements where all ranks of `stages` are lost."""
    ranks = range(topology.world_size)
    return [
        lost(topology) if topology.coordinates(rank).pp in stages else kept(topology)
        for rank in ranks
    ]


def losses(topology: Topology) -> Iterator[tuple[int, ...]]:
    """All sets of stages of which some are left."""
    for count in range(1, topology.pp):
        yield from itertools.combinations(range(topology.pp), count)


def needed(plan: ReplayPlan, topology: Topology) -> set[tuple[int, int]]:
    """The logs, as (rank, step), without which some rank of the scope cannot repeat its steps."""
    found = set()
    for step in range(plan.line + 1, plan.target + 1):
        found.add((plan.shared_by, step))
        for rank in plan.scope:
            for other in pipeline_neighbours(rank, topology):
                if other not in plan.scope:
                    assert other in plan.sources[rank]
                    found.add((other, step))
    return found


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_lost_stages_and_no_others_repeat_the_steps_after_the_line(topology: Topology) -> None:
    for stages in losses(topology):
        plan = plan_replay(evidence(topology, stages))
        assert isinstance(plan, ReplayPlan)
        ranks = range(topology.world_size)
        assert plan.scope == tuple(r for r in ranks if topology.coordinates(r).pp in stages)
        assert (plan.line, plan.target) == (LINE, TARGET)
        assert plan.shared_by not in plan.scope
        for rank, sources in plan.sources.items():
            assert rank in plan.scope
            assert not set(sources) & set(plan.scope)
            at = topology.coordinates(rank)
            for source in sources:
                there = topology.coordinates(source)
                assert (there.dp, there.tp, abs(there.pp - at.pp)) == (at.dp, at.tp, 1)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_a_stage_whose_log_is_needed_and_too_short_goes_back_as_well(topology: Topology) -> None:
    for stages in losses(topology):
        complete = evidence(topology, stages)
        plan = plan_replay(complete)
        assert isinstance(plan, ReplayPlan)
        wanted = needed(plan, topology)
        for rank in set(range(topology.world_size)) - set(plan.scope):
            steps = {step for giver, step in wanted if giver == rank}
            for first, last in itertools.product(range(1, TARGET + 2), range(TARGET + 1)):
                changed = list(complete)
                changed[rank] = msgspec.structs.replace(
                    complete[rank], logged_from=first, logged_to=last
                )
                found = plan_replay(changed)
                if steps <= set(range(first, last + 1)):
                    assert found == plan
                elif isinstance(found, ReplayPlan):
                    assert set(found.scope) >= {*plan.scope, rank}
                else:
                    assert len(stages) == topology.pp - 1
                    assert f"rank {rank} has logged steps {first} to {last}" in found


TO_16 = [
    Topology(dp=dp, ep=ep, tp=tp, pp=pp)
    for dp, tp, pp in itertools.product(range(1, 17), repeat=3)
    if dp * tp * pp <= 16
    for ep in range(1, dp + 1)
    if dp % ep == 0
]


def shares_steps(topology: Topology, ranks: set[int]) -> set[int]:
    """`ranks` and all others without which they cannot repeat a step: those of their groups for
    data, expert and tensor parallelism, and so on."""
    while True:
        found = set(ranks)
        for rank in ranks:
            at = topology.coordinates(rank)
            found |= {topology.rank_at(dp=dp, tp=at.tp, pp=at.pp) for dp in range(topology.dp)}
            found |= {topology.rank_at(dp=at.dp, tp=tp, pp=at.pp) for tp in range(topology.tp)}
        if found == ranks:
            return found
        ranks = found


def smallest_scope(
    said: Sequence[ReplayEvidence],
    topology: Topology,
    replicated: set[int],
    *,
    received: bool = False,
) -> set[int] | None:
    """The smallest set of ranks that can repeat steps alone while others give the `replicated` of
    the lost ranks their state, by trying all; None if none can. If ranks have logged what they
    `received`, those of the set that are not lost need nobody's log."""
    everyone = set(range(topology.world_size))
    lacking = {rank for rank, one in enumerate(said) if one.step is None}
    must = shares_steps(topology, lacking - replicated)
    others = {frozenset(shares_steps(topology, {rank})) for rank in everyone - must}
    for count in range(len(others) + 1):
        found = []
        for more in itertools.combinations(others, count):
            scope = must.union(*more)
            needed = {
                (giver, rank)
                for rank in scope
                for giver in pipeline_neighbours(rank, topology, said[0].ring)
                if giver not in scope
            }
            has_log = {
                rank
                for rank, one in enumerate(said)
                if rank not in lacking and one.logged_from <= LINE + 1 and one.logged_to >= TARGET
            }
            logs = all(giver in has_log or (received and rank in has_log) for giver, rank in needed)
            given = all(replicas_left(topology, rank, lacking | scope) for rank in lacking - scope)
            if scope < everyone and logs and given:
                found.append(scope)
        if found:
            [only] = found
            return only
    return None


def replicas_left(topology: Topology, rank: int, without: set[int]) -> set[int]:
    """The ranks with the state of `rank` that are not among those `without` it."""
    at = topology.coordinates(rank)
    same = {
        topology.rank_at(dp=dp, tp=at.tp, pp=at.pp)
        for dp in range(topology.dp)
        if dp % topology.ep == at.ep
    }
    return same - without


def check_scope(
    topology: Topology, gone: set[int], short: set[int], ring: bool, what: str
) -> tuple[int, int] | None:
    """Compare the plan after the loss of `gone` with the smallest scope, where the logs of `short`
    do not reach back to the line.

    Returns:
        The ranks in the scope less those lost, and the ranks that get their state live; None where
        nothing has to be repeated.
    """
    ranks = range(topology.world_size)
    said = [
        msgspec.structs.replace(
            lost(topology) if rank in gone else kept(topology),
            ring=ring,
            logged_from=LINE + 2 if rank in short else 1,
        )
        for rank in ranks
    ]
    replicated = {rank for rank in gone if replicas_left(topology, rank, gone)}
    if gone == replicated:
        return None
    plan = plan_replay(said, replicated)
    best = smallest_scope(said, topology, replicated) if len(gone) < len(ranks) else None
    assert (set(plan.scope) if isinstance(plan, ReplayPlan) else None) == best, what
    given = plan.given if isinstance(plan, ReplayPlan) else ()
    assert isinstance(plan, str) or set(given) == gone - set(plan.scope), what
    return len(best or ()) - len(gone), len(given)


@pytest.mark.parametrize(
    "ranks", [*range(2, 9), *(pytest.param(n, marks=pytest.mark.slow) for n in range(9, 17))]
)
def test_whichever_nodes_are_lost_the_scope_is_the_smallest(ranks: int) -> None:
    """With one and two ranks a node, in pipelines and rings: all sets of nodes of up to eight
    ranks, and of up to six also where some rank has dropped its log; one node or two of more."""
    checked = 0
    for topology, per_node, ring in itertools.product(TO_16, (1, 2), (False, True)):
        if topology.world_size != ranks or ranks % per_node:
            continue
        nodes = ranks // per_node
        for count in range(1, nodes if ranks <= 8 else min(2, nodes - 1) + 1):
            for lost_nodes in itertools.combinations(range(nodes), count):
                gone = {rank for rank in range(ranks) if rank // per_node in lost_nodes}
                shorts = [set(), *({rank} for rank in range(ranks) if ranks <= 6)]
                for short in shorts:
                    what = f"{topology}, nodes {lost_nodes} of {per_node}, short {short}"
                    checked += check_scope(topology, gone, short, ring, what) is not None
    assert checked


@pytest.mark.parametrize("ring", [False, True], ids=["line", "ring"])
def test_the_scope_is_the_smallest_that_can_be_recovered(ring: bool) -> None:
    """Random losses of ranks, and of nodes with two of them, with or without live replicas, where
    some of the others have dropped logs; against every set of ranks."""
    planned, given = Counter[int](), Counter[int]()
    for topology in TO_16:
        ranks = topology.world_size
        for seed in range(16):
            rng = random.Random(f"{topology} {seed}")
            per_node = rng.choice((1, 2)) if ranks % 2 == 0 else 1
            nodes = rng.sample(range(ranks // per_node), min(rng.choice((1, 1, 2, 3)), ranks // 2))
            gone = {rank for rank in range(ranks) if rank // per_node in nodes}
            if seed % 2:  # and a whole stage
                stage = rng.randrange(topology.pp)
                gone |= {rank for rank in range(ranks) if topology.coordinates(rank).pp == stage}
            short = {rank for rank in range(ranks) if rng.random() < rng.choice((0, 0.2))}
            planned_scope = check_scope(topology, gone, short, ring, f"{topology}, seed {seed}")
            if planned_scope is not None:
                more, live = planned_scope
                planned[more] += 1
                given[live] += 1
    # Losses of whole stages, of parts of stages, and all that nobody can repeat alone.
    assert planned[0] > 50 and planned[1] > 50 and planned[2] > 20, planned
    assert sum(count for more, count in planned.items() if more < 0) > 100, planned
    assert sum(count for more, count in given.items() if more) > 10, given


def test_copies_at_receivers_spare_stages_after_a_rank_was_replaced() -> None:
    """What logs of received messages gain, against every set of ranks. Where stages are lost at
    once: nothing. Where a neighbour has lost its log before: the neighbour. Of ranks that are lost
    at once: few cases, in which a part of a stage survives beside a rank that gets its state."""
    gains = Counter[str]()
    for topology in TO_16:
        if topology.pp in (1, topology.world_size) or topology.world_size > 12:
            continue
        everyone = range(topology.world_size)
        stage_of = [topology.coordinates(rank).pp for rank in everyone]
        for stages in losses(topology):
            said = evidence(topology, stages)
            plan = plan_replay(said)
            assert isinstance(plan, ReplayPlan)
            assert smallest_scope(said, topology, set(), received=True) == set(plan.scope)
        # A rank has got its state from a replica after the line; then a stage is lost.
        for late, stage in itertools.product(everyone, range(topology.pp)):
            if stage_of[late] == stage or not replicas_left(topology, late, {late}):
                continue
            said = evidence(topology, (stage,))
            returned = plan_replay(said)
            assert isinstance(returned, ReplayPlan)
            said[late] = msgspec.structs.replace(said[late], logged_from=LINE + 2)
            plan = plan_replay(said)
            beside = {stage_of[other] for other in pipeline_neighbours(late, topology)}
            if stage not in beside:
                assert plan == returned
            elif isinstance(plan, ReplayPlan):
                assert len(plan.scope) > len(returned.scope)
                gains["fewer go back"] += 1
            else:
                gains["some do not go back"] += 1
        # Ranks are lost at once, some of them with replicas.
        rng = random.Random(str(topology))
        for _ in range(8):
            gone = set(rng.sample(everyone, min(rng.choice((2, 3, 4)), topology.world_size - 1)))
            replicated = {rank for rank in gone if replicas_left(topology, rank, gone)}
            if gone == replicated:
                continue
            said = [lost(topology) if rank in gone else kept(topology) for rank in everyone]
            with_copies = smallest_scope(said, topology, replicated, received=True)
            same = with_copies == smallest_scope(said, topology, replicated)
            gains["at once, equal" if same else "at once, smaller"] += 1
    assert gains["fewer go back"] > 50 and gains["some do not go back"] > 50, gains
    assert gains["at once, smaller"] < gains["at once, equal"] / 20, gains


LONG = Topology(dp=1, pp=8)


def replays(*cut_off: tuple[set[int], int]) -> list[ReplayPlan | str]:
    """The plans that follow one another, until one is refused, while stages of `LONG` are lost.

    Args:
        cut_off: for each replay its stages, and the last step that it repeats before the next loss,
            which ends the processes of all of them but the one that knows this step.
    """
    plans: list[ReplayPlan | str] = []
    known = [ReplayProgress()] * LONG.pp
    for stages, reached in cut_off:
        said = [
            msgspec.structs.replace(one, progress=progress)
            for one, progress in zip(evidence(LONG, sorted(stages)), known, strict=True)
        ]
        plan = plan_replay(said)
        plans.append(plan)
        if isinstance(plan, str):
            break
        known = [plan.progress] * LONG.pp
        for rank in stages:
            known[rank] = ReplayProgress()
        witness = min(stages)
        known[witness] = msgspec.structs.replace(plan.progress, reached=max(LINE, reached))
    return plans


def test_replays_go_on_while_their_scopes_grow_or_they_come_further() -> None:
    grows = [(set(range(1, count + 1)), LINE) for count in range(1, LONG.pp)]
    comes_further = [({1, 2}, reached) for reached in range(LINE, TARGET + 1)]
    for cut_off in (grows, comes_further, [*comes_further, *grows[2:]]):
        plans = replays(*cut_off)
        assert len(plans) == len(cut_off)
        assert not any(isinstance(plan, str) for plan in plans)


@pytest.mark.parametrize("reached", [LINE, LINE + 1, TARGET])
def test_all_ranks_restore_after_replays_that_lead_no_further(reached: int) -> None:
    first = reached > LINE  # this one still does
    plans = replays(*[({1, 2}, reached)] * 20)
    assert len(plans) == FRUITLESS_MAX + first + 1
    assert f"{FRUITLESS_MAX} replays after step {LINE} were cut off" in str(plans[-1])
    # Neither a smaller scope nor a step that was reached before is progress.
    assert len(replays(*[({1, 2}, TARGET), ({1}, LINE + 1)] * 20)) == FRUITLESS_MAX + 2


def test_whatever_is_cut_off_replays_of_a_step_come_to_an_end() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        cut_off = [
            (set(rng.sample(range(LONG.pp), rng.randrange(1, LONG.pp))), rng.randint(LINE, TARGET))
            for _ in range(100)
        ]
        plans = replays(*cut_off)
        assert isinstance(plans[-1], str), seed
        assert len(plans) <= FRUITLESS_MAX + LONG.pp + TARGET - LINE + 1, seed


def test_what_one_rank_knows_of_replays_counts_for_all() -> None:
    """Some ranks may not have got a plan, because the world ended meanwhile; new ones know
    nothing."""
    for knows in range(LONG.pp):
        said = evidence(LONG, (1, 2))
        over = ReplayProgress(fruitless=FRUITLESS_MAX, widest=2, before=LINE, reached=LINE)
        said[knows] = msgspec.structs.replace(said[knows], progress=over)
        assert isinstance(plan_replay(said), str)
    said = evidence(LONG, (1, 2))
    said[0] = msgspec.structs.replace(said[0], progress=over)
    further = ReplayProgress(widest=2, before=LINE, reached=LINE + 1)
    said[1] = msgspec.structs.replace(said[1], progress=further)
    assert isinstance(plan_replay(said), str), "too many were fruitless already"
    fewer = msgspec.structs.replace(over, fruitless=FRUITLESS_MAX - 1)
    said[0] = msgspec.structs.replace(said[0], progress=fewer)
    plan = plan_replay(said)
    assert isinstance(plan, ReplayPlan)
    assert plan.progress == ReplayProgress(
        fruitless=FRUITLESS_MAX - 1, widest=2, before=LINE + 1, reached=LINE + 1
    )


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_in_a_ring_the_first_and_the_last_stage_are_neighbours(topology: Topology) -> None:
    for stages in losses(topology):
        line = evidence(topology, stages)
        plan = plan_replay([msgspec.structs.replace(one, ring=True) for one in line])
        without = plan_replay(line)
        assert isinstance(plan, ReplayPlan) and isinstance(without, ReplayPlan)
        assert plan.scope == without.scope
        for rank, sources in plan.sources.items():
            at = topology.coordinates(rank)
            ends = {0: topology.pp - 1, topology.pp - 1: 0}
            other = topology.rank_at(dp=at.dp, tp=at.tp, pp=ends.get(at.pp, at.pp))
            across = {other} - set(plan.scope)
            assert sources == tuple(sorted({*without.sources[rank], *across}))


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_what_contradicts_the_others_leads_back_to_the_line(topology: Topology) -> None:
    for stages in losses(topology):
        complete = evidence(topology, stages)
        for rank, one in enumerate(complete):
            wrong: list[dict[str, Any]] = [
                {"problem": "torn"},
                {"line": LINE - 1},
                {"whole": LINE + 1},
                {"topology": "dp9·ep1·tp1·pp9"},
            ]
            if one.step is not None:
                others = sum(other.step is not None for other in complete) > 1
                wrong += [{"step": TARGET - 1}] if others else []
            for changes in wrong:
                changed = list(complete)
                changed[rank] = msgspec.structs.replace(one, **changes)
                assert isinstance(plan_replay(changed), str), (stages, rank, changes)


@pytest.mark.parametrize("line", [NO_LINE, TARGET + 1])
def test_there_is_no_replay_from_a_line_that_is_missing_or_too_new(line: int) -> None:
    topology = Topology(pp=2, dp=2)
    said = [msgspec.structs.replace(one, line=line, whole=line) for one in evidence(topology, (0,))]
    assert isinstance(plan_replay(said), str)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_a_window_is_repeated_from_its_first_save_past_its_last(topology: Topology) -> None:
    for stages in losses(topology):
        for whole in range(LINE - 1, TARGET + 2):
            said = [msgspec.structs.replace(one, whole=whole) for one in evidence(topology, stages)]
            plan = plan_replay(said)
            if LINE <= whole <= TARGET:
                assert isinstance(plan, ReplayPlan)
                assert (plan.line, plan.target) == (LINE, TARGET)
            else:  # some of its units would stay frozen
                assert isinstance(plan, str)
                assert f"from line {LINE}, whole after {whole}" in plan


SHARDED = [Topology(dp=dp, ep=ep, tp=tp, pp=pp) for dp, ep, tp, pp in (
    (2, 1, 1, 1), (4, 1, 1, 1), (4, 2, 1, 1), (2, 1, 2, 1), (1, 1, 4, 1), (2, 1, 1, 2)
)]  # fmt: skip


def sharded(
    topology: Topology, dead: Sequence[int], line: int, whole: int | None = None
) -> list[ReplayEvidence]:
    """Statements where the ranks `dead` are lost, and nobody has logged anything."""
    return [
        ReplayEvidence(
            step=None if rank in dead else TARGET,
            line=line,
            whole=line if whole is None else whole,
            topology=str(topology),
        )
        for rank in range(topology.world_size)
    ]


@pytest.mark.parametrize("topology", SHARDED, ids=str)
def test_any_ranks_restore_a_line_of_the_others_step_alone(topology: Topology) -> None:
    for count in range(1, topology.world_size):
        for dead in itertools.combinations(range(topology.world_size), count):
            plan = plan_replay(sharded(topology, dead, TARGET))
            assert isinstance(plan, ReplayPlan)
            assert (plan.scope, plan.line, plan.target) == (dead, TARGET, TARGET)
            assert not plan.sources
            window = sharded(topology, dead, TARGET)
            window[0] = msgspec.structs.replace(window[0], window=True)
            why = plan_replay(window)
            assert isinstance(why, str) and "window" in why


@pytest.mark.parametrize("topology", SHARDED, ids=str)
def test_no_rank_restores_a_line_of_another_step_alone(topology: Topology) -> None:
    for count in range(1, topology.world_size + 1):
        for dead in itertools.combinations(range(topology.world_size), count):
            lines = [(line, line) for line in range(NO_LINE, TARGET + 3) if line != TARGET]
            windows = [(first, TARGET) for first in range(TARGET)]
            for line, whole in lines + windows:
                assert isinstance(plan_replay(sharded(topology, dead, line, whole)), str)
    why = plan_replay(sharded(topology, (0,), TARGET - 1))
    assert isinstance(why, str)
    assert f"{TARGET - 1}" in why and f"{TARGET}" in why


def test_nobody_restores_alone_where_ranks_name_different_lines_or_have_different_steps() -> None:
    topology = Topology(dp=3)
    for rank, changes in itertools.product(
        range(3), [{"line": TARGET - 1, "whole": TARGET - 1}, {"whole": TARGET + 1}]
    ):
        said = sharded(topology, (1,), TARGET)
        said[rank] = msgspec.structs.replace(said[rank], **changes)
        assert isinstance(plan_replay(said), str)
    said = sharded(topology, (1,), TARGET)
    said[2] = msgspec.structs.replace(said[2], step=TARGET - 1)
    assert isinstance(plan_replay(said), str)


def test_nothing_is_planned_where_no_stage_or_every_stage_is_lost() -> None:
    topology = Topology(pp=2, dp=2)
    assert isinstance(plan_replay([kept(topology)] * 4), str)
    assert isinstance(plan_replay([lost(topology)] * 4), str)


@pytest.mark.parametrize(
    "topology", [*SHAPES[:-1], pytest.param(SHAPES[-1], marks=pytest.mark.slow)], ids=str
)
def test_ranks_stand_for_a_replay_exactly_where_nobody_else_has_a_lost_state(
    topology: Topology,
) -> None:
    ranks = range(topology.world_size)
    for count in range(1, topology.world_size):
        for lacking in itertools.combinations(ranks, min(count, 4)):
            said = [
                RankStanding()
                if rank in lacking
                else RankStanding(step=TARGET, topology=str(topology), rank=rank)
                for rank in ranks
            ]
            verdict = standing(said)
            gone = any(set(topology.dense_replicas(rank)) <= set(lacking) for rank in lacking)
            assert (verdict.action is StandingAction.REPLAY) == gone
            replicated = {rank for rank in lacking if replicas_left(topology, rank, set(lacking))}
            assert set(verdict.sources) == replicated
            assert gone or replicated == set(lacking)


def test_a_step_whose_vote_has_passed_is_finished_before_a_replay() -> None:
    topology = str(Topology(pp=2, dp=2))
    done = RankStanding(step=TARGET, topology=topology, rank=2)
    behind = RankStanding(step=TARGET - 1, ready=True, topology=topology, rank=3)
    said = [RankStanding(), RankStanding(), done, behind]
    assert standing(said).action is StandingAction.FORWARD
    said[3] = msgspec.structs.replace(done, rank=3)
    assert standing(said).action is StandingAction.REPLAY
    said[2] = msgspec.structs.replace(done, rank=3)  # it was another replica before
    assert standing(said).action is not StandingAction.REPLAY
