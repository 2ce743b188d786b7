from __future__ import annotations

from itertools import cycle

import pytest
from choice_bounds import selective_bound
from expert_worlds import (
    after_full_snapshot,
    any_worlds,
    generation,
    taken_by_layer,
    unit,
    world,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.budgeted import (
    Budgets,
    allocate,
    experts_within,
    select_local,
    selective_guard,
)
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.tables import ExpertTable

# --- budgets --------------------------------------------------------------------------------------


def test_a_budget_is_bandwidth_times_step() -> None:
    budgets = Budgets.of(host_bytes_s=25e9, network_bytes_s=5e9, step_s=0.5, links=4)
    assert (budgets.local_bytes, budgets.remote_bytes) == (50_000_000_000, 10_000_000_000)


@pytest.mark.parametrize(
    "change",
    [{"host_bytes_s": -1}, {"step_s": float("nan")}, {"links": 0}, {"network_bytes_s": -5}],
)
def test_impossible_bandwidths_are_refused(change: dict[str, float]) -> None:
    given: dict[str, float] = {"host_bytes_s": 1, "network_bytes_s": 1, "step_s": 1, "links": 1}
    with pytest.raises(InvalidJobError, match="give values of at least 0"):
        Budgets.of(**{**given, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "reserved", "experts"),
    [
        pytest.param(450, 0, 4, id="whole experts only"),
        pytest.param(450, 200, 2, id="what is reserved is left out"),
        pytest.param(10_000, 0, 6, id="no more than there are"),
        pytest.param(0, 0, 1, id="no budget"),
        pytest.param(99, 0, 1, id="less than one expert"),
        pytest.param(450, 9000, 1, id="nothing left"),
    ],
)
def test_s_total_is_the_budget_in_experts(budget: int, reserved: int, experts: int) -> None:
    found = experts_within(world([4, 2], nbytes=100), budget, reserved_bytes=reserved)
    assert found.experts == experts


def test_a_budget_below_one_expert_warns_that_it_may_delay_the_step() -> None:
    reason = experts_within(world([4]), 0).reason
    assert "hold 0 of 4 experts" in reason
    assert reason.endswith("; 1 is captured, which may delay the step")


def test_a_model_without_experts_needs_no_budget() -> None:
    assert experts_within(ExpertTable(layers=(), dense_bytes=1), 10**9).experts == 0


@pytest.mark.parametrize(("budget", "reserved"), [(-1, 0), (0, -1)])
def test_budgets_below_0_are_refused(budget: int, reserved: int) -> None:
    with pytest.raises(InvalidJobError, match="give at least 0"):
        experts_within(world([1]), budget, reserved_bytes=reserved)


# --- allocation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("risks", "sizes", "total", "expected"),
    [
        pytest.param([60, 30, 10], [9, 9, 9], 10, [6, 3, 1], id="in proportion"),
        pytest.param([50, 30, 20], [9, 9, 9], 4, [2, 1, 1], id="largest remainder"),
        pytest.param([1, 1, 1], [9, 9, 9], 4, [2, 1, 1], id="ties to the lower layer"),
        pytest.param([90, 5, 5], [4, 9, 9], 10, [4, 3, 3], id="what is too much goes to others"),
        pytest.param([90, 10, 0], [2, 2, 8], 9, [2, 2, 5], id="layers without risk come last"),
        pytest.param([0, 0], [3, 6], 6, [2, 4], id="no risk: by number of experts"),
        pytest.param([5, 5], [2, 2], 99, [2, 2], id="more than there are"),
        pytest.param([5, 5], [2, 2], 0, [0, 0], id="nothing"),
        pytest.param([1, 10**9], [8, 8], 4, [0, 4], id="no risk to speak of"),
    ],
)
def test_allocation(risks: list[int], sizes: list[int], total: int, expected: list[int]) -> None:
    given = allocate(dict(enumerate(risks)), dict(enumerate(sizes)), total)
    assert [given[layer] for layer in range(len(sizes))] == expected


LAYERS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), max_size=6)


@given(LAYERS, st.integers(0, 60))
def test_allocation_gives_all_that_it_can(layers: list[tuple[int, int]], total: int) -> None:
    risks = {i: risk for i, (risk, _) in enumerate(layers)}
    sizes = {i: size for i, (_, size) in enumerate(layers)}
    given = allocate(risks, sizes, total)
    assert sum(given.values()) == min(total, sum(sizes.values()))
    assert all(0 <= given[i] <= sizes[i] for i in sizes)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 30))
def test_allocation_is_within_one_of_the_formula(risks: list[int], total: int) -> None:
    given = allocate(dict(enumerate(risks)), dict.fromkeys(range(len(risks)), 30), total)
    for layer, risk in enumerate(risks):
        exact = risk * total / sum(risks)
        assert int(exact) <= given[layer] <= int(exact) + 1


# --- selection ------------------------------------------------------------------------------------


def loaded(table: ExpertTable, tokens: dict[tuple[int, int], int]) -> ExpertLedger:
    return after_full_snapshot(table).routed({unit(*at): n for at, n in tokens.items()})


def test_layers_share_by_risk_and_the_most_popular_experts_go_first() -> None:
    table = world([4, 4])
    ledger = loaded(table, {(0, 0): 10, (0, 3): 50, (0, 2): 30, (1, 1): 30})
    assert select_local(table, ledger, 4).units == (
        *(unit(0, 0), unit(0, 2), unit(0, 3)),
        unit(1, 1),
    )


def test_without_tokens_at_risk_the_oldest_go_first() -> None:
    table = world([3, 3])
    ledger = after_full_snapshot(table).captured(generation(1), [unit(0, 0), unit(1, 0)])
    assert select_local(table, ledger, 2).units == (unit(0, 1), unit(1, 1))


def test_what_has_no_version_comes_on_top() -> None:
    table = world([3])
    ledger = ExpertLedger.start(table.units).captured(generation(0), [unit(0, 0)])
    selection = select_local(table, ledger.routed({unit(0, 0): 5}), 1)
    assert selection.units == table.units
    assert "2 without any version" in selection.reason
    lost_copy = select_local(table, after_full_snapshot(table), 1, uncaptured={unit(0, 2)})
    assert lost_copy.units == (unit(0, 0), unit(0, 2))


def test_the_reason_shows_how_much_risk_is_covered() -> None:
    table = world([4])
    ledger = loaded(table, {(0, 0): 80, (0, 1): 20})
    assert select_local(table, ledger, 1).reason == (
        "1 of 4 experts captured, with 80 of 100 tokens at risk; 0 overdue, 0 without any version"
    )


@given(any_worlds(), st.integers(0, 50), st.lists(st.integers(0, 9), min_size=1, max_size=7))
def test_a_selection_has_the_size_of_the_budget(
    table: ExpertTable, total: int, tokens: list[int]
) -> None:
    ledger = after_full_snapshot(table).routed(dict(zip(table.units, cycle(tokens), strict=False)))
    selection = select_local(table, ledger, total)
    assert len(selection.units) == min(total, len(table.units))
    assert sum(taken_by_layer(table, selection.units).values()) == len(selection.units)


def test_a_budget_below_0_experts_is_refused() -> None:
    table = world([2])
    with pytest.raises(InvalidJobError, match="S_total=-1"):
        select_local(table, after_full_snapshot(table), -1)


def longest_wait(table: ExpertTable, total: int, tokens: list[int], snapshots: int) -> int:
    ledger, longest = after_full_snapshot(table), 0
    counts = dict(zip(table.units, cycle(tokens), strict=False))
    for step in range(1, snapshots):
        ledger = ledger.routed(counts)
        ledger = ledger.captured(generation(step), select_local(table, ledger, total).units)
        ledger = ledger.pruned({})
        longest = max(longest, *map(ledger.age, table.units))
    return longest


@settings(max_examples=30)
@given(any_worlds(), st.integers(1, 12), st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_no_traffic_makes_an_expert_wait_longer_than_the_bound(
    table: ExpertTable, total: int, tokens: list[int]
) -> None:
    bound = selective_bound(len(table.units), total)
    assert longest_wait(table, total, tokens, min(150, 2 * bound)) < bound


def test_without_the_guard_experts_without_tokens_would_starve() -> None:
    table = world([4, 4])
    wait = longest_wait(table, 2, [9, 9, 0, 0, 0, 0, 0, 0], snapshots=200)
    assert selective_guard(8, 2) <= wait < selective_bound(8, 2)
