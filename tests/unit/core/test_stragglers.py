"""Slow ranks are named, and ranks of an undisturbed job never are.

The tests simulate a job with synchronous collectives: the others wait for the slowest rank of each
step. Seeds are part of each test's parameters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast_core.stragglers import (
    CAUSE_SHARE,
    ROUNDS,
    SLOWER,
    STEP_SHARE,
    SURE,
    TIME_S_MAX,
    WAITED_SHARE,
    WINDOW_STEPS,
    Cause,
    StepTimes,
    Straggler,
    StragglerWatch,
    bounded_times,
    slow_ranks,
)

STEP_S, TRANSFER_S = 0.1, 0.01
FOUND_WITHIN_STEPS = WINDOW_STEPS * (ROUNDS + 1)
"""Steps after which a rank that is 30 % slower is named, as documented."""
Own = Callable[[random.Random, int, int], float]
"""(generator, rank, step) → time of the rank's own work."""


def watched(
    own: Own,
    *,
    steps: int = 1000,
    ranks: int = 8,
    seed: int = 0,
    stage_of: Callable[[int], int] = lambda rank: 0,
    meets: Callable[[int], int] = lambda rank: 0,
) -> tuple[int, tuple[int, ...]] | None:
    """The step at which ranks are named for the first time, and which ones; None if none ever is.

    Args:
        meets: rank → group of ranks that wait for each other.
    """
    numbers = random.Random(seed)
    watch = StragglerWatch(epoch=1)
    window: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(ranks)}
    for step in range(1, steps + 1):
        own_s = {rank: own(numbers, rank, step) for rank in range(ranks)}
        for rank in range(ranks):
            together = max(own_s[r] for r in own_s if meets(r) == meets(rank))
            window[rank].append((own_s[rank], together + TRANSFER_S))
        if step % WINDOW_STEPS == 0:
            number = step // WINDOW_STEPS
            watch = watch.see(
                1, {r: times_of(number, rows, stage_of(r)) for r, rows in window.items()}
            )
            window = {rank: [] for rank in range(ranks)}
            if watch.stragglers:
                return step, tuple(each.rank for each in watch.stragglers)
    return None


def times_of(number: int, rows: list[tuple[float, float]], stage: int = 0) -> StepTimes:
    """The times of a window, as a session computes them, from own work and length of each step."""
    own_s = median(own for own, _ in rows)
    return StepTimes(
        window=number,
        steps=len(rows),
        stage=stage,
        step_s=median(step for _, step in rows),
        own_s=own_s,
        own_spread_s=median(abs(own - own_s) for own, _ in rows),
        wait_s=median(step - own for own, step in rows),
    )


def noisy(numbers: random.Random, share: float) -> float:
    return STEP_S * max(0.1, numbers.gauss(1.0, share))


# --- undisturbed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_named_in_a_thousand_undisturbed_steps(share: float, seed: int) -> None:
    assert watched(lambda numbers, rank, step: noisy(numbers, share), seed=seed) is None


def first_steps_are_slow(numbers: random.Random, rank: int, step: int) -> float:
    return noisy(numbers, 0.03) + (2.0 * (rank + 1) if step <= 5 else 0.0)


def one_rank_compiles_now_and_then(numbers: random.Random, rank: int, step: int) -> float:
    return noisy(numbers, 0.03) + (3.0 if rank == 2 and step % 25 == 0 else 0.0)


def rank_0_evaluates_every_tenth_step(numbers: random.Random, rank: int, step: int) -> float:
    return noisy(numbers, 0.03) + (5.0 if rank == 0 and step % 10 == 0 else 0.0)


def some_ranks_save_every_fifth_step(numbers: random.Random, rank: int, step: int) -> float:
    return noisy(numbers, 0.03) + (0.5 if rank < 3 and step % 5 == 0 else 0.0)


def collections_of_garbage(numbers: random.Random, rank: int, step: int) -> float:
    return noisy(numbers, 0.03) + (0.3 if numbers.random() < 0.2 else 0.0)


def a_pause_of_three_windows(numbers: random.Random, rank: int, step: int) -> float:
    slow = rank == 4 and 200 < step <= 200 + 3 * WINDOW_STEPS
    return noisy(numbers, 0.03) * (1.5 if slow else 1.0)


@pytest.mark.parametrize(
    "own",
    [
        first_steps_are_slow,
        one_rank_compiles_now_and_then,
        rank_0_evaluates_every_tenth_step,
        some_ranks_save_every_fifth_step,
        collections_of_garbage,
        a_pause_of_three_windows,
    ],
)
def test_what_happens_in_few_steps_names_nobody(own: Own) -> None:
    assert watched(own) is None


@pytest.mark.parametrize("dwell", [1, 3, 10, 20, 40])
def test_loads_of_experts_that_move_about_name_nobody(dwell: int) -> None:
    def own(numbers: random.Random, rank: int, step: int) -> float:
        busiest = (step // dwell * 7919 + 13) % 8
        return noisy(numbers, 0.03) * (1.5 if rank == busiest else 1.0)

    assert watched(own) is None


def test_uneven_stages_of_a_pipeline_name_nobody_and_a_slow_rank_of_one_is_named() -> None:
    def own(numbers: random.Random, rank: int, step: int) -> float:
        return noisy(numbers, 0.03) * (1.0 + rank // 2)

    def slow(numbers: random.Random, rank: int, step: int) -> float:
        return own(numbers, rank, step) * (1.3 if rank == 6 else 1.0)

    assert watched(own, stage_of=lambda rank: rank // 2) is None
    assert watched(slow, stage_of=lambda rank: rank // 2) == (ROUNDS * WINDOW_STEPS, (6,))
    assert watched(slow, stage_of=lambda rank: rank) is None  # a stage of one rank has no peers


def test_a_rank_for_which_nobody_waits_is_not_named() -> None:
    """Rank 3 works for longer, but the others do not wait for it: it computes beside them."""

    def own(numbers: random.Random, rank: int, step: int) -> float:
        return noisy(numbers, 0.03) * (1.5 if rank == 3 else 1.0)

    assert watched(own, meets=lambda rank: rank) is None


def test_ranks_that_measure_no_wait_name_nobody() -> None:
    """With NCCL the device waits, and a rank measures its whole step as its own work."""
    same = StepTimes(window=1, steps=10, step_s=0.1, own_s=0.1, wait_s=0.0)
    assert slow_ranks(dict.fromkeys(range(8), same)) == ()
    assert slow_ranks({**dict.fromkeys(range(7), same), 7: replace(same, own_s=0.2)}) == ()


# --- slow ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_rank_that_is_30_percent_slower_is_named_soon(
    ranks: int, share: float, seed: int
) -> None:
    slow = seed % ranks

    def own(numbers: random.Random, rank: int, step: int) -> float:
        return noisy(numbers, share) * (1.3 if rank == slow and step > 97 else 1.0)

    found = watched(own, ranks=ranks, seed=seed)
    assert found is not None
    assert found[1] == (slow,) and 97 < found[0] <= 97 + FOUND_WITHIN_STEPS


def test_all_slow_ranks_of_a_node_are_named_as_long_as_they_are_the_minority() -> None:
    def own(numbers: random.Random, rank: int, step: int) -> float:
        return noisy(numbers, 0.02) * (1.4 if rank in (2, 3) else 1.0)

    found = watched(own, ranks=4)
    assert found is not None and set(found[1]) == {2, 3}


def one_round(
    own_s: float, *, data_s: float = 0.0, processor_s: float = 0.0
) -> tuple[Straggler, ...]:
    """Three ranks that work for 1 s, and rank 3, which works for `own_s`."""
    peer = StepTimes(window=1, steps=10, step_s=own_s, own_s=1.0, wait_s=own_s - 1.0)
    slow = StepTimes(
        window=1,
        steps=10,
        step_s=own_s,
        own_s=own_s,
        wait_s=0.0,
        data_s=data_s,
        processor_s=processor_s,
    )
    return slow_ranks({0: peer, 1: peer, 2: peer, 3: slow})


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({}, Cause.UNKNOWN),
        ({"data_s": 0.4}, Cause.DATA),
        ({"processor_s": 0.4}, Cause.COMPUTE),
        ({"data_s": 0.4, "processor_s": 0.5}, Cause.DATA),  # it loads in its own thread
        ({"data_s": 0.1, "processor_s": 0.1}, Cause.UNKNOWN),
    ],
)
def test_the_cause_is_named_as_far_as_the_times_show_it(
    more: dict[str, float], cause: Cause
) -> None:
    (slow,) = one_round(1.5, **more)
    assert (slow.rank, slow.cause) == (3, cause)
    assert slow.delay_s == pytest.approx(0.5) and slow.slower == pytest.approx(0.5)
    assert slow.in_words.startswith("it works 1.5 s in each step, its peers 1 s, and they wait")


def test_small_differences_name_nobody() -> None:
    assert one_round(1.14) == ()
    assert len(one_round(1.16)) == 1


# --- rounds ---------------------------------------------------------------------------------------


def rounds(
    watch: StragglerWatch, count: int, *, own_s: float = 1.5, first: int = 1
) -> StragglerWatch:
    """`watch` after rounds in which rank 0 waits for rank 1."""
    for number in range(first, first + count):
        fast = StepTimes(window=number, steps=10, step_s=own_s, own_s=1.0, wait_s=own_s - 1.0)
        slow = StepTimes(window=number, steps=10, step_s=own_s, own_s=own_s, wait_s=0.0)
        watch = watch.see(1, {0: fast, 1: slow})
    return watch


def test_a_rank_is_named_after_several_rounds_and_until_it_kept_pace_for_as_many() -> None:
    watch = rounds(StragglerWatch(epoch=1), ROUNDS - 1)
    assert watch.stragglers == ()
    watch = rounds(watch, 1, first=ROUNDS)
    assert [each.rank for each in watch.stragglers] == [1]
    watch = rounds(watch, ROUNDS - 1, own_s=1.0, first=100)
    assert [each.rank for each in watch.stragglers] == [1]
    watch = rounds(watch, 1, own_s=1.0, first=200)
    assert watch.stragglers == () and watch.records == {}


def test_a_rank_without_times_stays_what_it_was() -> None:
    watch = rounds(StragglerWatch(epoch=1), ROUNDS)
    assert watch.is_slow_now(1) and not watch.is_slow_now(0)
    for number in range(100, 100 + 2 * ROUNDS):
        times = StepTimes(window=number, steps=10, step_s=1, own_s=1, wait_s=0)
        watch = watch.see(1, {0: times, 2: times})
    assert [each.rank for each in watch.stragglers] == [1] and not watch.is_slow_now(1)


def test_a_rank_that_was_slow_in_two_rounds_is_a_suspect() -> None:
    watch = rounds(StragglerWatch(epoch=1), 1)
    assert watch.suspects == frozenset()
    watch = rounds(watch, 1, first=2)
    assert watch.suspects == {1} and not watch.is_slow_now(1)
    assert rounds(watch, 1, own_s=1.0, first=3).suspects == frozenset()


def test_the_same_windows_are_judged_once_and_an_epoch_begins_anew() -> None:
    watch = rounds(StragglerWatch(epoch=1), ROUNDS - 1)
    times = StepTimes(window=ROUNDS, steps=10, step_s=2, own_s=2, wait_s=0)
    stale = {0: replace(times, window=ROUNDS - 1, own_s=1, wait_s=1), 1: times}
    assert watch.see(1, stale) is watch  # one of them is still to come
    assert watch.see(1, {}) is watch and watch.see(1, {1: times}) is watch
    assert rounds(watch.see(2, stale), 0) == StragglerWatch(epoch=2, windows={0: 4, 1: 5})


# --- bounds ---------------------------------------------------------------------------------------

SECONDS = st.floats(0, TIME_S_MAX)
TIMES = st.builds(
    StepTimes,
    window=st.integers(1, 2**32 - 1),
    steps=st.integers(1, 2**32 - 1),
    stage=st.integers(0, 3),
    **dict.fromkeys(
        ("step_s", "own_s", "own_spread_s", "wait_s", "data_s", "processor_s"), SECONDS
    ),
)


@given(st.dictionaries(st.integers(0, 20), TIMES, max_size=8))
def test_whatever_trainers_report_the_verdict_is_sane(times: dict[int, StepTimes]) -> None:
    found = slow_ranks(times)
    assert found == slow_ranks(dict(reversed(times.items())))
    for each in found:
        assert each.rank in times and each.in_words.isprintable()
        assert math.isfinite(each.delay_s) and 0 < each.slower <= 99
        peers = [
            t for r, t in times.items() if r != each.rank and t.stage == times[each.rank].stage
        ]
        assert times[each.rank].wait_s < median(t.wait_s for t in peers)
        assert times[each.rank].own_s > median(t.own_s for t in peers)
    watch = StragglerWatch(epoch=1)
    for _ in range(3):
        watch = watch.see(1, times)
    assert set(watch.records) <= set(times)


def judged(rank: int, own: StepTimes, peers: Sequence[StepTimes]) -> Straggler | None:
    """`rank` if it is slow beside `peers`, as decision 0127 defines it."""

    def of_peers(name: str) -> float:
        return float(median(getattr(each, name) for each in peers))

    peers_s, step_s = of_peers("own_s"), max(own.step_s, of_peers("step_s"))
    delay_s = own.own_s - peers_s
    slow = (
        delay_s > 0
        and delay_s >= SLOWER * peers_s
        and delay_s >= STEP_SHARE * step_s
        and delay_s >= SURE * math.hypot(own.uncertainty_s, of_peers("uncertainty_s"))
        and of_peers("wait_s") - own.wait_s >= WAITED_SHARE * delay_s
    )
    cause = Cause.UNKNOWN
    if own.data_s - of_peers("data_s") >= CAUSE_SHARE * delay_s:
        cause = Cause.DATA
    elif own.processor_s - of_peers("processor_s") >= CAUSE_SHARE * delay_s:
        cause = Cause.COMPUTE
    found = Straggler(rank=rank, own_s=own.own_s, peers_s=peers_s, step_s=step_s, cause=cause)
    return found if slow else None


def by_definition(times: dict[int, StepTimes]) -> set[Straggler]:
    """The slow ranks, each compared with a list of its peers."""
    found = set[Straggler]()
    for rank, own in times.items():
        peers = [each for r, each in times.items() if r != rank and each.stage == own.stage]
        if peers and (slow := judged(rank, own, peers)) is not None:
            found.add(slow)
    return found


EVEN_S = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 1.5])
"""Times of which many are equal."""
EVEN_TIMES = st.builds(
    StepTimes,
    window=st.just(1),
    steps=st.integers(1, 20),
    stage=st.integers(0, 1),
    own_spread_s=st.sampled_from([0.0, 0.1]),
    **dict.fromkeys(("step_s", "own_s", "wait_s", "data_s", "processor_s"), EVEN_S),
)


@given(st.dictionaries(st.integers(0, 20), st.one_of(EVEN_TIMES, TIMES), max_size=12))
def test_the_verdict_is_that_of_the_definition(times: dict[int, StepTimes]) -> None:
    found = slow_ranks(times)
    assert set(found) == by_definition(times) and len(found) == len(set(found))


def test_the_work_of_a_verdict_grows_like_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, uncertainty = list[StepTimes](), StepTimes.uncertainty_s

    def counted(times: StepTimes) -> float:
        read.append(times)
        return float(uncertainty.__get__(times))

    monkeypatch.setattr(StepTimes, "uncertainty_s", property(counted))
    ranks = 400
    own_s = {rank: 1.0 + rank / ranks for rank in range(ranks)}
    slow = slow_ranks(
        {
            rank: StepTimes(window=1, steps=10, step_s=2.0, own_s=own, wait_s=2.0 - own)
            for rank, own in own_s.items()
        }
    )
    assert len(slow) > ranks / 4 and len(read) <= 4 * ranks


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, -math.inf, 2 * TIME_S_MAX])
@pytest.mark.parametrize("field", ["step_s", "own_s", "own_spread_s", "wait_s", "data_s"])
def test_times_that_no_step_has_are_not_believed(field: str, seconds: float) -> None:
    times = StepTimes(window=1, steps=10, step_s=1.0, own_s=0.5, wait_s=0.5)
    assert bounded_times(times) == times
    assert bounded_times(replace(times, **{field: seconds})) is None
    assert bounded_times(replace(times, steps=0)) is None
    assert bounded_times(replace(times, window=0)) is None
