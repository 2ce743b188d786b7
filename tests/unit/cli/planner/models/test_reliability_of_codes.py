"""The odds of each redundancy, against sums over all sets of lost nodes."""

from __future__ import annotations

from itertools import combinations, product
from math import comb, expm1, isclose, prod
from pathlib import Path

import pytest

from holdfast_cli.planner.models.reliability import FailureModel, parity_survival, time_to
from holdfast_core.durable.schedule import EXPOSURE_S, NODE_LIFE_S, loss_rate_per_s
from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.codes import BlockId, Code, code_for
from holdfast_core.protection.intervals import group_loss_probability, group_loss_rate_per_s
from holdfast_core.snapshots.membership import Redundancy

NOTE = Path(__file__).parents[5] / "docs" / "reliability.md"

CODES = [
    *((Redundancy.RAIM5, n, 1) for n in (2, 3, 5)),
    *((Redundancy.RAIM6, n, 1) for n in (2, 3, 4, 6)),
    *((Redundancy.REPLICATION, n, r) for n, r in ((2, 1), (3, 2), (4, 2), (4, 3))),
]
PROBABILITIES = [0.0, 1e-9, 1e-4, 0.03, 0.2, 0.5, 0.97, 1.0]

each_code = pytest.mark.parametrize(("redundancy", "n", "replicas"), CODES)


def code(redundancy: Redundancy, n: int, replicas: int) -> Code:
    found = code_for(redundancy, n, replicas)
    assert found is not None
    return found


def survives(of: Code, lost: frozenset[int]) -> bool:
    """Whether everything that the lost members held follows from what the others hold."""
    left = frozenset(range(of.n)) - lost
    blocks = {BlockId(owner, row) for owner in left for row in range(of.rows)}
    return all(of.solvable(member, left, blocks) for member in lost)


def subsets(n: int) -> list[frozenset[int]]:
    return [frozenset(c) for k in range(n + 1) for c in combinations(range(n), k)]


def chance(lost: frozenset[int], n: int, p: float) -> float:
    return p ** len(lost) * (1 - p) ** (n - len(lost))


@each_code
@pytest.mark.parametrize("p", PROBABILITIES)
def test_a_group_is_lost_with_the_sets_that_its_code_cannot_rebuild(
    redundancy: Redundancy, n: int, replicas: int, p: float
) -> None:
    of = code(redundancy, n, replicas)
    by_hand = sum(chance(lost, n, p) for lost in subsets(n) if not survives(of, lost))
    found = group_loss_probability(p, n, losses=of.rows)
    assert isclose(found, by_hand, rel_tol=1e-9, abs_tol=1e-300)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_copies_in_a_large_group_survive_more_than_is_counted(p: float) -> None:
    """Such a group is one that could not be divided: its copies are not all on the same nodes."""
    of = code(Redundancy.REPLICATION, 6, 2)
    by_hand = sum(chance(lost, 6, p) for lost in subsets(6) if not survives(of, lost))
    assert group_loss_probability(p, 6, losses=of.rows) >= by_hand * (1 - 1e-9)
    assert all(survives(of, lost) for lost in subsets(6) if len(lost) <= 2)


@each_code
def test_a_job_survives_when_each_of_its_groups_does(
    redundancy: Redundancy, n: int, replicas: int
) -> None:
    of, groups, time = code(redundancy, n, replicas), 2, 3.0
    rate = 0.1
    model = FailureModel(
        nodes=groups * n, group_size=n, hardware_rate=rate, software_rate=0.0, losses=of.rows
    )
    p = -expm1(-rate * time)
    by_hand = sum(
        prod(chance(lost, n, p) for lost in each)
        for each in product(subsets(n), repeat=groups)
        if all(survives(of, lost) for lost in each)
    )
    assert parity_survival(model, time) == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("losses", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [8, 40])
@pytest.mark.parametrize("p", [1e-12, 1e-7, 1e-3, 0.1, 0.3, 0.999])
def test_more_losses_are_more_terms(losses: int, n: int, p: float) -> None:
    exact = sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(losses + 1, n + 1))
    assert group_loss_probability(p, n, losses=losses) == pytest.approx(exact, rel=1e-9)


def test_a_group_that_survives_the_loss_of_all_its_members_is_never_lost() -> None:
    assert group_loss_probability(0.4, 3, losses=3) == 0.0
    assert group_loss_probability(1e-6, 3, losses=3) == 0.0


@pytest.mark.parametrize("losses", [0, 4, -1])
def test_losses_that_no_group_survives_are_refused(losses: int) -> None:
    with pytest.raises(InvalidJobError, match=f"losses={losses}"):
        FailureModel(nodes=8, group_size=4, hardware_rate=1.0, software_rate=1.0, losses=losses)
    if losses < 1:
        with pytest.raises(InvalidJobError, match=f"losses={losses}"):
            group_loss_probability(0.1, 4, losses=losses)


def test_copies_are_computed_for_what_the_redundancy_survives() -> None:
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    rate = 1 / NODE_LIFE_S

    def of(redundancy: Redundancy, replicas: int = 1) -> float:
        return loss_rate_per_s(groups, redundancy, replicas=replicas, lost_nodes=0, watched_s=0.0)

    for redundancy, replicas, losses in (
        (Redundancy.RAIM5, 1, 1),
        (Redundancy.RAIM6, 1, 2),
        (Redundancy.REPLICATION, 3, 3),
    ):
        each = group_loss_rate_per_s(rate, 4, exposure_s=EXPOSURE_S, losses=losses)
        assert of(redundancy, replicas) == pytest.approx(2 * each, rel=1e-12)
    assert of(Redundancy.NONE) == pytest.approx(8 * rate)


def rows() -> list[str]:
    """The table of the note."""
    day_s, life_days, found = 86400.0, 180.0, []
    for name, redundancy, n, replicas in (
        ("`RAIM5`", Redundancy.RAIM5, 8, 1),
        ("`RAIM6`", Redundancy.RAIM6, 8, 1),
        ("`Replication`, `replicas: 2`", Redundancy.REPLICATION, 3, 2),
    ):
        losses = code(redundancy, n, replicas).rows
        model = FailureModel(
            nodes=64, group_size=n, hardware_rate=1 / life_days, software_rate=0.0, losses=losses
        )
        days = time_to(lambda t, model=model: parity_survival(model, t), 0.9)  # type: ignore[misc]
        rate = group_loss_rate_per_s(1 / life_days / day_s, n, exposure_s=60.0, losses=losses)
        lost = -expm1(-rate * 64 / n * 30 * day_s)
        found.append(f"| {name} | {days:.1f} | {lost:.1e} |")
    return found


def test_the_note_has_the_figures_that_the_formulas_give() -> None:
    text = NOTE.read_text()
    for row in rows():
        assert row in text, row
