"""Seeded schedules in which pipeline stages are lost, in sparse windows and in their replays, or
shards that no other rank has.

`make test` runs the first of them, and `make test-schedules` ten times as many as `make test-all`.
"""

from __future__ import annotations

import pytest
import staging

from holdfast_core.topology import Topology


@pytest.mark.timeout(300)
@pytest.mark.seeds(first=0, of_1000=8, short=4, size=8)
def test_every_rank_has_the_bytes_of_a_run_without_losses(first_seed: int, seeds: int) -> None:
    counts = staging.run(first_seed, seeds)
    # Schedules from which nobody recovers prove nothing.
    assert counts["goes on"] + counts["goes back"] > 0


@pytest.mark.timeout(300)
@pytest.mark.seeds(first=0, of_1000=8, short=4, size=8)
def test_lost_shards_are_restored_alone_where_the_line_is_of_the_others_step(
    first_seed: int, seeds: int
) -> None:
    counts = staging.run(first_seed, seeds, shards=True)
    assert counts["goes on"] + counts["goes back"] > 0
    assert counts["step"] > 20 * seeds


@pytest.mark.parametrize(("every", "event"), [(1, "alone"), (3, "global")])
def test_ranks_that_have_their_shards_go_back_only_to_a_line_that_is_older(
    every: int, event: str
) -> None:
    with staging.surroundings():
        cluster = staging.play(
            staging.Schedule(
                seed=-1,
                topology=Topology(dp=staging.RANKS),
                window=1,
                steps=12,
                every=every,
                losses=tuple(
                    staging.Loss(step=step, point="reduce", victims=victims)
                    for step, victims in ((5, (1,)), (9, (0, 3)))
                ),
            )
        )
    assert cluster.counts[event] == 2 * staging.RANKS - 3
    assert cluster.counts["goes back" if every == 1 else "goes on"] == 0


def play(
    topology: Topology,
    *losses: staging.Loss,
    every: int = 0,
    steps: int = 12,
    log_received: bool = False,
) -> staging.Cluster:
    with staging.surroundings():
        return staging.play(
            staging.Schedule(
                seed=-1,
                topology=topology,
                window=3,
                steps=steps,
                losses=losses,
                every=every,
                log_received=log_received,
            )
        )


def test_a_stage_that_repeats_a_window_alone_leaves_all_others_where_they_are() -> None:
    losses = (
        staging.Loss(step=step, point="sum", victims=(rank,))
        for step, rank in ((6, 1), (8, 2), (10, 3))
    )
    cluster = play(Topology(dp=1, pp=4), *losses)
    assert cluster.counts["alone"] == 3 * (staging.RANKS - 1)
    assert not cluster.counts["goes back"]
    assert cluster.counts["frozen step"] >= 2


@pytest.mark.parametrize("victim", range(staging.RANKS))
def test_a_lost_part_of_a_stage_takes_back_only_the_others_of_its_stage(victim: int) -> None:
    cluster = play(staging.PARTS, staging.Loss(step=8, point="reduce", victims=(victim,)))
    goes_on = {rank: one.first_in[2] == 8 for rank, one in cluster.processes.items()}
    assert goes_on == {rank: rank // 2 != victim // 2 for rank in range(staging.RANKS)}
    assert cluster.counts["alone"] == staging.RANKS - 1
    assert cluster.counts["goes back"] == 1


@pytest.mark.parametrize(
    ("topology", "first", "then", "stay"),
    [
        (Topology(dp=1, pp=4), (1,), (1,), (0, 2, 3)),  # the same stage
        (Topology(dp=1, pp=4), (1,), (1, 2), (0, 3)),  # and a neighbour
        (Topology(dp=1, pp=4), (1,), (1, 3), (0, 2)),  # and one that is none
        (Topology(dp=1, pp=4), (0, 1), (1, 3), (2,)),  # one that repeats steps with it stays
        (staging.PARTS, (0,), (1,), (2, 3)),  # the one that went back with it
        (staging.PARTS, (0,), (0,), (2, 3)),
    ],
    ids=str,
)
def test_a_loss_in_a_replay_widens_its_scope_and_the_same_logs_are_used(
    topology: Topology, first: tuple[int, ...], then: tuple[int, ...], stay: tuple[int, ...]
) -> None:
    cluster = play(
        topology,
        staging.Loss(step=8, point="sum", victims=first),
        staging.Loss(step=2, point="backward", victims=then),
    )
    for rank in stay:
        # They wait through the replay that is cut off, and never repeat a step.
        assert cluster.processes[rank].first_in == {1: 1, 3: 8}
    assert cluster.counts["step alone"] > 0


@pytest.mark.parametrize(
    ("victims", "live", "stay"),
    [
        ((0, 1, 4), (4,), (2, 3, 5)),  # the other stage is none of its neighbours
        pytest.param((4, 5, 1), (1,), (0, 2, 3), marks=pytest.mark.exhaustive),
        ((0, 1, 2), (), (4, 5)),  # the log of a neighbour is lost with it
        pytest.param((2, 3, 5), (), (0, 1), marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 3), (), (4, 5), marks=pytest.mark.exhaustive),
        pytest.param((0, 1, 3, 4), (), (), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_rank_that_is_lost_beside_a_stage_gets_its_state_from_its_replica(
    victims: tuple[int, ...], live: tuple[int, ...], stay: tuple[int, ...]
) -> None:
    cluster = play(staging.WIDE, staging.Loss(step=8, point="sum", victims=victims))
    for rank, process in cluster.processes.items():
        assert (process.first_in[2] == 8) == (rank in (*live, *stay)), rank
    assert bool(cluster.counts["step alone"]) == bool(stay)


@pytest.mark.parametrize(
    ("nodes", "live"),
    [
        # A stage and a node of another one: its experts are on the stage's other node as well.
        ((0, 1, 4), (8, 9)),
        pytest.param((0, 1), (), marks=pytest.mark.exhaustive),
        pytest.param((4, 5, 1), (2, 3), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_nodes_with_experts_that_are_lost_beside_a_stage_get_their_state_from_replicas(
    nodes: tuple[int, ...], live: tuple[int, ...]
) -> None:
    victims = tuple(2 * node + lane for node in nodes for lane in (0, 1))
    topology = Topology(dp=4, ep=2, pp=3)
    cluster = play(topology, staging.Loss(step=8, point="sum", victims=victims))
    back = {rank // 4 for rank in set(victims) - set(live)}
    for rank, process in cluster.processes.items():
        assert (process.first_in[2] == 8) == (rank // 4 not in back), rank
    assert cluster.counts["step alone"]


@pytest.mark.parametrize(
    ("point", "then", "goes_on"),
    [
        # In the hand-over: the rank that gets its state, the one that gives it (nobody else has
        # it), and one of the lost stage.
        ("restore", (4,), (2, 3, 4, 5)),
        pytest.param("restore", (5,), (2, 3), marks=pytest.mark.exhaustive),
        pytest.param("restore", (1,), (2, 3, 4, 5), marks=pytest.mark.exhaustive),
        # While the stage repeats steps: now either one can give the other its state.
        pytest.param("backward", (1, 4), (2, 3, 4, 5), marks=pytest.mark.exhaustive),
        pytest.param("backward", (1, 5), (2, 3, 4, 5), marks=pytest.mark.exhaustive),
        # The lost stage's neighbour, with its log; and rank 4 has none since it got its state.
        pytest.param("backward", (1, 3), (), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_loss_while_a_replica_gives_its_state_widens_the_scope_by_what_it_needs(
    point: str, then: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    first = staging.Loss(step=8, point="sum", victims=(0, 1, 4))
    second = staging.Loss(step=2, point=point, victims=then)
    cluster = play(staging.WIDE, first, second)
    for rank, process in cluster.processes.items():
        assert (process.first_in[3] == 8) == (rank in goes_on), rank


@pytest.mark.parametrize(
    ("log_received", "losses", "stay"),
    [
        # A rank gets its state from its replica, and then a neighbouring stage needs its log.
        (False, [((2,), "sum"), ((0, 1), "sum")], (4, 5)),
        (True, [((2,), "sum"), ((0, 1), "sum")], (2, 3, 4, 5)),
        # The same beside a stage that repeats steps, and within them.
        pytest.param(
            True, [((0, 1, 4), "sum"), ((2, 3), "sum")], (0, 1, 4, 5), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            True, [((0, 1, 4), "sum"), ((1, 3), "backward")], (4, 5), marks=pytest.mark.exhaustive
        ),
        # Both ends of a boundary at once: nobody has what crossed it.
        pytest.param(True, [((2, 4), "sum"), ((0, 1), "sum")], (), marks=pytest.mark.exhaustive),
        # Two stages at once need no more than the logs of the third one.
        pytest.param(False, [((0, 1, 2, 3), "sum")], (4, 5), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_log_that_neighbours_return_keeps_a_stage_where_it_is(
    log_received: bool, losses: list[tuple[tuple[int, ...], str]], stay: tuple[int, ...]
) -> None:
    cluster = play(
        staging.WIDE,
        *(
            staging.Loss(step=2 if point == "backward" else 9 + number, point=point, victims=of)
            for number, (of, point) in enumerate(losses)
        ),
        every=6,
        log_received=log_received,
    )
    last = len(losses) + 1
    reached = {rank: one.first_in[last] for rank, one in cluster.processes.items()}
    newest = max(reached.values()) if stay else None
    assert {rank for rank, step in reached.items() if step == newest} == set(stay)


def test_a_scope_that_widens_again_and_again_goes_on_with_the_same_logs() -> None:
    # Each loss takes one of those that repeat steps, and one more; one rank is left that never is.
    again = [staging.Loss(step=2, point="sum", victims=(rank - 1, rank)) for rank in range(2, 7)]
    cluster = play(Topology(dp=1, pp=7), staging.Loss(step=8, point="sum", victims=(1,)), *again)
    assert cluster.processes[0].first_in == {1: 1, 7: 8}


def test_a_replay_that_comes_further_each_time_goes_on_with_the_same_logs() -> None:
    # One rank of the stage dies in each replay. The other one may not have completed the step
    # before, but it has completed the one before that: they add up their gradients in each step.
    first = staging.Loss(step=20, point="reduce", victims=(0, 1))
    again = [
        staging.Loss(step=step, point="reduce", victims=(number % 2,))
        for number, step in enumerate((13, 15, 17, 19))
    ]
    cluster = play(Topology(dp=2, pp=2), first, *again, every=10, steps=21)
    replays = [plan for _, plan in sorted(cluster.replays.items())]
    assert [(plan.line, plan.target) for plan in replays] == [(10, 19)] * 5
    before = [plan.progress.before for plan in replays]
    assert before == sorted(set(before)), "each one comes further than those before"
    for rank in (2, 3):
        assert cluster.processes[rank].first_in == {1: 1, 6: 20}


def test_a_replay_that_ends_has_come_further() -> None:
    losses = [staging.Loss(step=8, point="reduce", victims=(1,)) for _ in range(4)]
    cluster = play(Topology(dp=1, pp=4), *losses, every=4)
    replays = [plan for _, plan in sorted(cluster.replays.items())]
    assert [(plan.line, plan.target) for plan in replays] == [(4, 7)] * 4
    assert [plan.progress.fruitless for plan in replays] == [0, 0, 1, 2]
    for rank in (0, 2, 3):
        assert set(cluster.processes[rank].first_in.values()) == {1, 8}


@pytest.mark.parametrize(
    ("topology", "first"), [(Topology(dp=1, pp=4), (1,)), (Topology(dp=2, pp=2), (0, 1))], ids=str
)
def test_all_ranks_go_back_when_replays_are_cut_off_at_the_same_step_again_and_again(
    topology: Topology, first: tuple[int, ...]
) -> None:
    again = [staging.Loss(step=2, point="backward", victims=(1,)) for _ in range(3)]
    cluster = play(topology, staging.Loss(step=8, point="sum", victims=first), *again)
    for rank in (2, 3):
        assert cluster.processes[rank].first_in[5] < 8


def test_a_step_of_all_ranks_ends_the_count_of_fruitless_replays() -> None:
    again = [staging.Loss(step=2, point="backward", victims=(1,)) for _ in range(3)]
    first, last = (staging.Loss(step=step, point="reduce", victims=(1,)) for step in (11, 14))
    cluster = play(Topology(dp=1, pp=4), first, *again, last, every=8, steps=15)
    replays = [plan for _, plan in sorted(cluster.replays.items())]
    assert [(plan.line, plan.target) for plan in replays] == [(8, 10)] * 3 + [(8, 13)]
    assert [plan.progress.fruitless for plan in replays] == [0, 1, 2, 0]
    for rank in (0, 2, 3):
        first_in = cluster.processes[rank].first_in
        assert (first_in[5], first_in[6]) == (9, 14)


@pytest.mark.parametrize("late", [(), (2,)], ids=str)
def test_the_model_knows_the_step_of_ranks_that_have_gone_back(late: tuple[int, ...]) -> None:
    # All go back from step 6 to step 4. Then a stage is lost before they have step 6 again, and not
    # in step 7 of the world that has ended, where its rank may not yet have heard of the first one.
    first = staging.Loss(step=7, point="reduce", victims=(1,), late=frozenset(late), diverges=True)
    second = staging.Loss(step=6, point="reduce", victims=(2,))
    cluster = play(Topology(dp=1, pp=4), first, second, every=4)
    assert cluster.counts["alone"] == staging.RANKS - 1
    for rank in (0, 1, 3):
        assert cluster.processes[rank].first_in[3] == 6


@pytest.mark.parametrize("then", [(1,), (2,), (1, 3)], ids=str)
def test_a_loss_before_ranks_have_agreed_on_a_replay_counts_with_the_one_before(
    then: tuple[int, ...],
) -> None:
    first = staging.Loss(step=8, point="reduce", victims=(1,))
    second = staging.Loss(step=1, point="stand", victims=then)
    cluster = play(Topology(dp=1, pp=4), first, second, every=4)
    [plan] = cluster.replays.values()
    assert (plan.scope, plan.line, plan.target) == (tuple(sorted({1, *then})), 4, 7)
    for rank in {*range(staging.RANKS)} - {*plan.scope}:
        assert cluster.processes[rank].first_in == {1: 1, 3: 8}


def test_a_replay_has_the_messages_of_the_last_execution_of_each_step() -> None:
    with staging.surroundings():
        schedule = staging.Schedule.of_two_timelines(5)
        cluster = staging.play(schedule)
    assert cluster.counts["drawn anew"]
    [second] = schedule.losses[1].victims
    for rank in {*range(staging.RANKS)} - {second}:
        first_in = cluster.processes[rank].first_in
        assert (first_in[2], first_in[3]) == (5, 8)


@pytest.mark.parametrize("lies", ["messages", "digests"])
def test_all_ranks_go_back_where_logs_lack_what_they_state(lies: str) -> None:
    loss = staging.Loss(step=6, point="sum", victims=(1,), lies=lies)
    cluster = play(Topology(dp=1, pp=4), loss)
    assert cluster.counts["step alone"] > 0  # the replay runs to its end
    assert cluster.counts["goes back"] == staging.RANKS - 1
