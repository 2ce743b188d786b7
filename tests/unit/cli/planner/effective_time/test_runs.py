"""Simulated trainings: by hand where failures are a trace, and against the formula where they are
drawn."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_cli.planner.effective_time.incidents import Draw, Incident, parse_trace, poisson
from holdfast_cli.planner.effective_time.policy_models import (
    AfterLoss,
    Cluster,
    Level,
    PolicyModel,
    Workload,
    closed_form_ettr,
)
from holdfast_cli.planner.effective_time.runs import (
    Activity,
    TrainingRun,
    simulate_many,
    simulate_run,
    summarize,
)
from holdfast_core.errors import InvalidJobError

CLUSTER = Cluster(nodes=4, spares=100, detect_s=2, restart_s=5, replacement_s=inf)
WORKLOAD = Workload(step_s=10)
FULL = PolicyModel(name="full", levels=(Level(experts=8, interval_steps=10, stall_s=0.0),))


def draw_of(seed: int) -> Draw:
    return random.Random(seed).random


def traced(
    text: str,
    model: PolicyModel = FULL,
    cluster: Cluster = CLUSTER,
    workload: Workload = WORKLOAD,
    length_s: float = 1000,
) -> TrainingRun:
    incidents = parse_trace(text)
    run = simulate_run(model, workload, cluster, incidents, length_s=length_s, draw=draw_of(0))
    assert sum(run.seconds.values()) == pytest.approx(length_s)
    assert run.ettr == pytest.approx(run.steps * workload.step_s / length_s)
    return run


def spent(run: TrainingRun) -> dict[Activity, float]:
    return {what: round(seconds, 9) for what, seconds in run.seconds.items() if seconds}


# --- by hand --------------------------------------------------------------------------------------


def test_without_failures_only_stalls_cost() -> None:
    stalling = replace(FULL, levels=(Level(experts=8, interval_steps=10, stall_s=5.0),))
    assert spent(traced("", stalling)) == {
        Activity.TRAINING: round(1000 / 1.05, 9),
        Activity.STALLED: round(1000 - 1000 / 1.05, 9),
    }


def test_a_failure_has_the_steps_since_the_newest_snapshot_done_again() -> None:
    """After 355 s there are 35.5 steps; the snapshot of step 30 is restored."""
    run = traced("355,0")
    assert spent(run) == {
        Activity.DETECTING: 2,
        Activity.RESTARTING: 5,
        Activity.REDOING: 55,
        Activity.TRAINING: 938,
    }
    assert (run.failures, run.restored) == (1, 1)


def test_a_snapshot_that_is_not_yet_usable_is_not_restored() -> None:
    (level,) = FULL.levels
    late = replace(FULL, levels=(replace(level, usable_after_s=60),))
    assert traced("355,0", late).seconds[Activity.REDOING] == pytest.approx(155)
    assert traced("365,0", late).seconds[Activity.REDOING] == pytest.approx(65)


@pytest.mark.parametrize(
    ("second", "redone_s", "repaired_s"),
    [
        (356, 55, 1 + 7),  # in detection, which begins again
        (360, 55, 5 + 7),  # in the restart
        (382, 20 + 55, 7 + 7),  # 20 s into the steps that are done again: the same snapshot
    ],
)
def test_failures_in_a_recovery_begin_it_again(
    second: int, redone_s: float, repaired_s: float
) -> None:
    run = traced(f"355,0\n{second},0")
    assert run.seconds[Activity.REDOING] == pytest.approx(redone_s)
    repaired = run.seconds[Activity.DETECTING] + run.seconds[Activity.RESTARTING]
    assert repaired == pytest.approx(repaired_s)


def test_a_job_without_spares_waits_for_a_node() -> None:
    bare = replace(CLUSTER, spares=0)
    run = traced("355,-1\n457,1", cluster=bare)
    assert run.seconds[Activity.WAITING] == pytest.approx(100)
    assert run.seconds[Activity.REDOING] == pytest.approx(55)
    assert traced("355,-1", cluster=bare).seconds[Activity.WAITING] == pytest.approx(643)
    assert traced("100,1\n355,-1", cluster=bare).seconds[Activity.WAITING] == 0


def test_a_lost_node_is_replaced_where_nothing_is_traced() -> None:
    bare = replace(CLUSTER, spares=0, replacement_s=50)
    assert traced("355,-1", cluster=bare).seconds[Activity.WAITING] == pytest.approx(48)
    spare = replace(CLUSTER, spares=1, replacement_s=50)
    assert traced("355,-1\n500,-1", cluster=spare).seconds[Activity.WAITING] == 0


def test_a_job_that_may_shrink_goes_on_and_takes_the_node_in_when_it_comes() -> None:
    """7 s of repair, 55 s of steps again at 3 / 4 of the speed, and a restart of 5 s to join."""
    fewer = replace(FULL, after_loss=AfterLoss.FEWER)
    cluster = replace(CLUSTER, spares=0, join_wait_s=20)
    run = traced("355,-1\n600,1", fewer, cluster)
    assert run.seconds[Activity.REDOING] == pytest.approx(55 * 4 / 3)
    assert run.seconds[Activity.RESTARTING] == pytest.approx(5 + 5)
    assert run.seconds[Activity.WAITING] == 0
    alone_s = 620 - 362 - 55 * 4 / 3
    assert run.seconds[Activity.SMALLER] == pytest.approx(alone_s / 4)


def test_optimizers_catch_up_before_steps_are_done_again_and_begin_anew_after_another_failure() -> (
    None
):
    """A restart ends at 362 s, and catching up at 372 s; another failure comes at 367 s."""
    late = replace(FULL, catch_up_s=10.0)
    assert traced("355,0", late).seconds[Activity.REDOING] == pytest.approx(10 + 55)
    assert traced("355,0\n367,0", late).seconds[Activity.REDOING] == pytest.approx(5 + 10 + 55)


def test_a_node_that_was_about_to_join_ends_the_wait_for_enough_nodes() -> None:
    """Three of four are needed; of the two that are lost, one comes back and joins 100 s later."""
    fewer = replace(FULL, after_loss=AfterLoss.FEWER)
    cluster = replace(CLUSTER, spares=0, join_wait_s=100, least_nodes=3)
    run = traced("355,-1\n390,1\n400,-1", fewer, cluster)
    assert run.seconds[Activity.WAITING] == pytest.approx(490 - 402)


def test_copies_that_live_lose_the_step_in_progress_and_no_more() -> None:
    live = replace(FULL, after_loss=AfterLoss.LIVE)
    cluster = replace(CLUSTER, reform_s=1)
    run = traced("355,-1", live, cluster)
    assert run.restored == 0
    assert run.seconds[Activity.REDOING] == pytest.approx(5)
    assert run.seconds[Activity.RESTARTING] == pytest.approx(1)


@pytest.mark.parametrize("trace", ["355,-2", "355,-1\n356,-1"])
def test_losing_as_many_nodes_at_once_as_there_are_copies_takes_a_snapshot(trace: str) -> None:
    live = replace(FULL, after_loss=AfterLoss.LIVE)
    run = traced(trace, live, replace(CLUSTER, reform_s=1))
    assert run.restored == 1
    assert run.seconds[Activity.REDOING] == pytest.approx(55)


@pytest.mark.parametrize(
    ("trace", "asked"), [("355,-1", (4, 1)), ("355,-2", (4, 2)), ("355,0", (4, 1))]
)
@pytest.mark.parametrize("survives", [0.0, 1.0])
def test_experts_in_seats_cost_a_reconfiguration_or_a_rollback(
    trace: str, asked: tuple[int, int], survives: float
) -> None:
    """2 s until it is known; then 1 s and half a step again, or 5 s and 5.5 steps. Processes that
    end take the copies of a node with them."""
    live = replace(
        FULL,
        after_loss=AfterLoss.LIVE,
        survives=lambda nodes, lost: survives if (nodes, lost) == asked else 0.5,
    )
    assert spent(traced(trace, live, replace(CLUSTER, reform_s=1))) == {
        Activity.DETECTING: 2,
        Activity.RESTARTING: 1 if survives else 5,
        Activity.REDOING: 5 if survives else 55,
        Activity.TRAINING: 992 if survives else 938,
    }


def test_experts_live_on_as_often_as_their_plan_says() -> None:
    live = replace(FULL, after_loss=AfterLoss.LIVE, survives=lambda nodes, lost: 0.25)
    incidents = parse_trace("355,-2")
    runs = [
        simulate_run(live, WORKLOAD, CLUSTER, incidents, length_s=400, draw=draw_of(seed))
        for seed in range(400)
    ]
    assert sum(1 - run.restored for run in runs) == pytest.approx(100, abs=30)


def test_seats_are_those_of_the_nodes_that_trained_before_the_loss() -> None:
    """Of four nodes one is lost, and later one of the other three."""
    asked = []

    def survives(nodes: int, lost: int) -> float:
        asked.append((nodes, lost))
        return 1.0

    live = replace(FULL, after_loss=AfterLoss.LIVE, survives=survives)
    traced("355,-1\n600,-1", live, replace(CLUSTER, spares=0, reform_s=1))
    assert asked == [(4, 1), (3, 1)]


def test_no_tokens_are_lost_where_copies_live() -> None:
    (level,) = FULL.levels
    lossy = replace(FULL, levels=(replace(level, lost_tokens=2.0),), after_loss=AfterLoss.LIVE)
    assert traced("355,-1", lossy).lost_tokens == 0
    assert traced("355,-2", lossy).lost_tokens > 0


def test_only_whole_copies_of_the_model_train() -> None:
    """Of four nodes, two for a copy, one is lost: two train until both others are there."""
    fewer = replace(FULL, after_loss=AfterLoss.FEWER)
    cluster = replace(CLUSTER, spares=0, join_wait_s=20, copy_nodes=2)
    run = traced("355,-1\n600,1", fewer, cluster)
    assert run.seconds[Activity.REDOING] == pytest.approx(55 * 2)
    assert run.seconds[Activity.SMALLER] == pytest.approx((620 - 362 - 110) / 2)
    # With another one lost meanwhile the same two train, and one that comes back waits.
    run = traced("355,-1\n500,-1\n700,1", fewer, cluster)
    assert run.seconds[Activity.WAITING] == 0
    assert run.seconds[Activity.RESTARTING] == pytest.approx(5 + 5)


def test_a_window_begins_one_and_a_half_windows_back_on_average() -> None:
    """After 35.5 steps the newest complete window of 10 is that of steps 20 to 30."""
    sparse = PolicyModel(name="sparse", levels=FULL.levels, window_steps=10)
    assert traced("355,0", sparse).seconds[Activity.REDOING] == pytest.approx(155)


def test_a_stage_that_replays_alone_fills_no_pipeline() -> None:
    sparse = PolicyModel(name="s", levels=FULL.levels, window_steps=10, by_stage=True)
    workload = Workload(step_s=10, stages=4, micro_batches=2)
    run = traced("355,0", sparse, workload=workload)
    assert run.seconds[Activity.REDOING] == pytest.approx(155 * 2 / 5)
    assert run.steps == pytest.approx((1000 - 7 - 62) / 10)


def test_a_stage_that_replays_from_a_snapshot_does_the_steps_since_it() -> None:
    """At the end of its replay the stage is where the others are: no step is done by all again."""
    stages = replace(FULL, by_stage=True)
    workload = Workload(step_s=10, stages=4, micro_batches=2)
    run = traced("355,0", stages, workload=workload)
    assert run.seconds[Activity.REDOING] == pytest.approx(55 * 2 / 5)
    assert run.steps == pytest.approx((1000 - 7 - 22) / 10)


def test_a_failure_of_a_neighbour_has_both_replay_together() -> None:
    sparse = PolicyModel(name="s", levels=FULL.levels, window_steps=10, by_stage=True)
    workload = Workload(step_s=10, stages=4, micro_batches=2)
    stages = iter([0.30, 0.55, 0.0])  # stages 1 and 2 of 0 to 3

    def draw() -> float:
        return next(stages)

    run = simulate_run(
        sparse, workload, CLUSTER, parse_trace("355,0\n360,0"), length_s=1000, draw=draw
    )
    assert run.seconds[Activity.REDOING] == pytest.approx(155 * 3 / 5)


STAGED = replace(FULL, by_stage=True)
SIX = Workload(step_s=10, stages=6, micro_batches=5)
"""A step of ten parts: a stage alone replays it in half of them, two neighbours in six."""


def hitting(*stages: int) -> Draw:
    """A generator for failures that hit these stages of six, in this order."""
    return iter([stage / 6 + 0.01 for stage in stages]).__next__


def staged(text: str, *stages: int) -> TrainingRun:
    run = simulate_run(
        STAGED, SIX, CLUSTER, parse_trace(text), length_s=1000, draw=hitting(*stages)
    )
    assert sum(run.seconds.values()) == pytest.approx(1000)
    return run


def scope(run: TrainingRun) -> tuple[int, int, int]:
    return run.replayed_stages, run.widest, run.enlarged


def test_a_failure_has_its_stage_alone_do_steps_again() -> None:
    run = staged("180,-1\n", 2)
    assert spent(run) == {
        Activity.DETECTING: 2,
        Activity.RESTARTING: 5,
        Activity.REDOING: 40,  # half of the eight steps since step 10
        Activity.TRAINING: 953,
    }
    assert scope(run) == (1, 1, 0)


def test_stages_that_fail_at_once_replay_beside_each_other_or_together_as_neighbours() -> None:
    apart = staged("180,-2\n", 1, 4)
    assert spent(apart)[Activity.REDOING] == 40
    assert scope(apart) == (2, 2, 0)
    together = staged("180,-2\n", 3, 4)
    assert spent(together)[Activity.REDOING] == 48
    assert scope(together) == (2, 2, 0)


@pytest.mark.parametrize("second", [1, 2, 3])
def test_a_failure_in_or_beside_a_replay_enlarges_it_and_begins_it_anew(second: int) -> None:
    """The replay began at 187 s; 20 s of it are lost."""
    run = staged("180,-1\n207,-1\n", 2, second)
    joint_s = 40 if second == 2 else 48
    assert spent(run)[Activity.REDOING] == 20 + joint_s
    assert spent(run)[Activity.DETECTING] == 4
    assert spent(run)[Activity.RESTARTING] == 10
    assert scope(run) == ((2, 1, 1) if second == 2 else (3, 2, 1))


def test_a_failure_elsewhere_is_repaired_while_a_replay_goes_on() -> None:
    """The first replay would end at 227 s; the second begins at 214 s and ends at 254 s."""
    run = staged("180,-1\n207,-1\n", 0, 4)
    assert spent(run)[Activity.TRAINING] == 1000 - (254 - 180)
    assert scope(run) == (2, 2, 0)
    early = staged("180,-1\n188,0\n", 0, 4)
    assert spent(early)[Activity.TRAINING] == 1000 - (188 + 7 + 40 - 180)


def test_a_failure_between_two_replays_joins_both() -> None:
    """Stages 1 and 3 replay when 2 fails: all three do so together, in seven of ten parts."""
    run = staged("180,-2\n200,-1\n", 1, 3, 2)
    assert spent(run)[Activity.REDOING] == 13 + 56
    assert scope(run) == (2 + 3, 3, 1)


def test_failures_enlarge_a_scope_until_all_stages_are_in_it() -> None:
    times = "".join(f"{180 + 20 * number},-1\n" for number in range(6))
    run = staged(times, 0, 1, 2, 3, 4, 5)
    assert scope(run) == (1 + 2 + 3 + 4 + 5 + 6, 6, 5)
    assert spent(run)[Activity.REDOING] == 5 * 13 + 80


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_scopes_of_any_failures_are_those_of_an_oracle(data: st.DataObject) -> None:
    """The oracle knows one rule: a scope is a row of neighbours, and begins when the newest failure
    in or beside it is repaired; training goes on when the last row has ended."""
    stages = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    gaps_s = data.draw(st.lists(st.integers(0, 45), min_size=5, max_size=5))
    rows: list[tuple[set[int], int]] = []
    at_s, ends_s = 180, 0
    text: list[str] = []
    for gap_s, stage in zip(gaps_s, stages, strict=False):
        at_s += gap_s if text else 0
        if text and at_s >= ends_s:
            break
        text.append(f"{at_s},-1\n")
        joined, begins_s = {stage}, at_s + 7
        # Repairs in progress are one: the job restarts when the newest failure is repaired.
        rows = [
            (row, max(start_s, begins_s) if start_s > at_s else start_s) for row, start_s in rows
        ]
        grown = True
        while grown:
            near = [row for row in rows if any(abs(a - b) < 2 for a in row[0] for b in joined)]
            grown = bool(near)
            for row in near:
                rows.remove(row)
                joined |= row[0]
        rows.append((joined, begins_s))
        ends_s = max(start + 8 * (4 + len(row)) for row, start in rows)
    run = staged("".join(text), *stages)
    assert run.seconds[Activity.TRAINING] == pytest.approx(1000 - (ends_s - 180))
    assert run.widest <= 6


def test_a_loss_that_redundancy_does_not_cover_takes_a_copy_in_storage_or_begins_anew() -> None:
    """At 185 s, in the recovery of the first loss, a second node of the only group is lost."""
    twice = "180,-1\n185,-1\n"
    covered = replace(FULL, covers=2, group_nodes=4)
    assert traced(twice, covered).seconds[Activity.REDOING] == 80
    one = replace(covered, covers=1)
    assert traced(twice, one).seconds[Activity.REDOING] == 180
    stored = replace(one, stored_every_steps=15, stored_load_s=3.0)
    run = traced(twice, stored)
    assert run.seconds[Activity.REDOING] == 30
    assert run.seconds[Activity.RESTARTING] == 3 + 5 + 3  # the first restart had begun
    apart = "180,-1\n300,-1\n"
    assert traced(apart, one).seconds[Activity.REDOING] == traced(apart).seconds[Activity.REDOING]


def test_without_redundancy_a_lost_node_takes_all_snapshots_with_it() -> None:
    none = replace(FULL, covers=0)
    assert traced("180,-1\n", none).seconds[Activity.REDOING] == 180
    assert traced("180,0\n", none).seconds[Activity.REDOING] == 80
    staged = replace(none, by_stage=True)
    run = traced("180,-1\n", staged, workload=Workload(step_s=10, stages=2, micro_batches=2))
    assert run.seconds[Activity.REDOING] == 180


def test_losses_in_different_groups_are_covered() -> None:
    one = replace(FULL, covers=1, group_nodes=2)
    lost = iter([0.1, 0.0, 0.9, 0.0]).__next__  # a group and a stage each
    incidents = parse_trace("180,-1\n185,-1\n")
    run = simulate_run(one, WORKLOAD, CLUSTER, incidents, length_s=1000, draw=lost)
    assert run.seconds[Activity.REDOING] == 80


def test_snapshots_hold_more_experts_once_recoveries_lost_too_much() -> None:
    """A recovery at step 35 loses 3 of 35 steps' worth of tokens, above 5 % for one of two K."""
    levels = (
        Level(experts=1, interval_steps=1, stall_s=0.0, lost_tokens=3.0),
        Level(experts=2, interval_steps=1, stall_s=1.0, lost_tokens=1.0),
        Level(experts=4, interval_steps=1, stall_s=5.0),
    )
    model = PolicyModel(name="partial", levels=levels, loss_limit=0.1)
    run = traced("355,0", model)
    assert run.experts == 2
    assert run.lost_tokens == pytest.approx(3 / run.steps)
    assert traced("355,0", replace(model, loss_limit=0.5)).experts == 1
    assert traced("355,0\n370,0\n400,0\n450,0", model).experts == 4


# --- against the formula --------------------------------------------------------------------------

MODELS = (
    FULL,
    replace(FULL, levels=(Level(experts=8, interval_steps=4, stall_s=2, usable_after_s=13),)),
    replace(FULL, name="stages", by_stage=True),
    PolicyModel(
        name="sparse",
        levels=(Level(experts=8, interval_steps=1, stall_s=0.2),),
        window_steps=5,
        by_stage=True,
    ),
    PolicyModel(
        name="sparse, global",
        levels=(Level(experts=8, interval_steps=1, stall_s=0.2),),
        window_steps=5,
    ),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("mtbf_s", [7200.0, 1800.0])
def test_simulations_agree_with_the_formula(model: PolicyModel, mtbf_s: float) -> None:
    workload = Workload(step_s=2.0, stages=6, micro_batches=4)
    cluster = replace(CLUSTER, node_losses=0.0)
    found = simulate_many(
        model, workload, cluster, mtbf_s, runs=40, length_s=100 * mtbf_s, draw_of=draw_of
    )
    assert found.ettr == pytest.approx(closed_form_ettr(model, workload, cluster, mtbf_s), abs=2e-3)
    assert found.low <= found.ettr <= found.high


def test_nodes_that_are_missing_agree_with_the_formula() -> None:
    fewer = replace(FULL, after_loss=AfterLoss.FEWER)
    cluster = Cluster(nodes=64, spares=0, detect_s=0, restart_s=0, replacement_s=1800)
    found = simulate_many(
        fewer, Workload(step_s=0.1), cluster, 3600.0, runs=40, length_s=720_000, draw_of=draw_of
    )
    expected = closed_form_ettr(fewer, Workload(step_s=0.1), cluster, 3600.0)
    assert found.ettr == pytest.approx(expected, abs=2e-3)


@given(seed=st.integers(0, 10_000), mtbf_s=st.floats(30, 5000), spares=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_time_is_accounted_for_and_no_policy_gains_time(
    seed: int, mtbf_s: float, spares: int
) -> None:
    cluster = replace(
        CLUSTER, spares=spares, replacement_s=200, reform_s=1, join_wait_s=30, node_losses=0.5
    )
    variants = [*MODELS, *(replace(FULL, after_loss=after) for after in AfterLoss)]
    for model in variants:
        run = simulate_run(
            model,
            Workload(step_s=3.0, stages=4, micro_batches=4),
            cluster,
            poisson(mtbf_s, 0.5, draw_of(seed)),
            length_s=5000,
            draw=draw_of(seed + 1),
        )
        assert sum(run.seconds.values()) == pytest.approx(5000)
        assert all(seconds >= 0 for seconds in run.seconds.values())
        assert 0 <= run.ettr <= 1
        assert run.steps * 3.0 == pytest.approx(run.ettr * 5000)


def test_one_seed_gives_one_history() -> None:
    first, again = (
        simulate_many(FULL, WORKLOAD, CLUSTER, 600, runs=5, length_s=43200, draw_of=draw_of)
        for _ in range(2)
    )
    assert first == again
    assert first.failures == pytest.approx(72, rel=0.2)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("12;3", "line 1 of the trace is '12;3'; write seconds,change like 2040,-4"),
        ("# minutes\n5,1\nx,2", "line 3 of the trace is 'x,2'"),
        ("5,1.5", "line 1 of the trace"),
        ("inf,1", "line 1 of the trace"),
        ("5,1\n4,1", "line 2 of the trace is earlier than the one before it"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_with_its_line(text: str, refusal: str) -> None:
    with pytest.raises(InvalidJobError) as error:
        parse_trace(text)
    assert refusal in str(error.value)


def test_a_trace_may_have_comments() -> None:
    trace = parse_trace("# AWS\n\n60, -2  # two\n61,0\n")
    assert trace == (Incident(at_s=60.0, nodes=-2), Incident(at_s=61.0, nodes=0))


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="give a time longer than 0"):
        next(poisson(0.0, 1.0, draw_of(0)))
    with pytest.raises(InvalidJobError, match="length_s=0"):
        traced("", length_s=0)
    with pytest.raises(InvalidJobError, match="at least one run"):
        summarize([])
    with pytest.raises(InvalidJobError, match="node_losses=2"):
        replace(CLUSTER, node_losses=2)
    with pytest.raises(InvalidJobError, match="at least one node"):
        replace(CLUSTER, spares=-1)
    with pytest.raises(InvalidJobError, match="stages=0"):
        Workload(step_s=1, stages=0)
    with pytest.raises(InvalidJobError, match="full: give at least one level"):
        replace(FULL, levels=())


def test_no_failures_come_at_an_infinite_mtbf() -> None:
    assert list(poisson(inf, 1.0, draw_of(0))) == []
