"""A short run of `make chaos`: many kinds of faults, close together, and every invariant holds."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import chaos_culprits
import chaos_report
import chaos_world
import pytest
from chaos import prepare
from chaos_culprits import CULPRITS, CulpritFault, CulpritKind, Culprits
from chaos_kinds import KINDS, Kind
from chaos_run import SHAPES, Chaos, draw_round
from chaos_world import Shape, World
from waiting import WAIT_S

SEED, ROUNDS = 1941, 8
EVERYTHING = frozenset({"mount", "redis", "identity"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_with_every_kind_of_fault_breaks_nothing(tmp_path: Path) -> None:
    chaos = Chaos(SEED, prepare(tmp_path))
    try:
        chaos.run(range(ROUNDS), until=math.inf)
    finally:
        chaos.surroundings.end()
    assert chaos.violations == []
    assert chaos.rounds == ROUNDS
    assert chaos.wrong_bytes == 0
    assert len(chaos.faults) > ROUNDS
    assert len({fault.kind for fault in chaos.faults}) > len(KINDS) // 3
    assert chaos.restores >= 3 * ROUNDS
    assert chaos.fenced > 0
    assert all(fault.seconds is not None for fault in chaos.faults)


def _lose_two(world: World, _: int, __: random.Random) -> str:
    world.lose(0)
    world.lose(1)
    return "two nodes of one group"


@pytest.mark.timeout(300)
def test_what_does_not_hold_is_reported_with_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one save: a second one would be stored, and the job could go on from there."""
    monkeypatch.setattr(chaos_world, "PROTECTED_S", WAIT_S)
    kind = Kind("lose_two", "nodes", _lose_two)
    printed: list[str] = []
    chaos = Chaos(7, kinds=(kind,), say=printed.append, records=tmp_path)
    chaos.run(range(3, 4), until=math.inf)
    (violation,) = chaos.violations
    assert "no recovery line after" in violation
    assert "--seed 7 --first 3 --rounds 1" in violation
    assert f"VIOLATION {violation}" in printed
    kept = tmp_path / "violation-1"
    assert "no recovery line" in (kept / "violation.txt").read_text()
    assert json.loads((kept / "schedule.json").read_text())[-1]["kind"] == "lose_two"
    assert "epoch_began" in (kept / "n0.log").read_text()
    assert (kept / "storage.txt").exists()
    chaos_report.write(chaos, tmp_path, Culprits(7))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["seed"], report["violations"], report["wrong_bytes"]) == (7, 1, 0)
    assert report["faults"] == len(report["timeline"]) == len(chaos.faults)
    assert "no recovery line" in report["timeline"][-1]["violation"]
    assert (tmp_path / "report.html").read_text().count("<svg") == 2
    assert "INVARIANTS DID NOT HOLD" in chaos_report.verdict(chaos)


def test_the_report_counts_culprits_that_were_named_rightly(tmp_path: Path) -> None:
    culprits = Culprits(7)
    for rank, outcome in enumerate(("right", "right", "wrong", "nobody", "unexplained")):
        culprits.faults.append(
            CulpritFault(
                kind="slow", culprit=f"rank {rank}", outcome=outcome, seconds=rank, text="<rank 9>"
            )
        )
    assert culprits.verdict == "culprits named rightly: 2 of 5, 1 wrongly"
    assert [fault.outcome for fault in culprits.missed] == ["wrong", "nobody", "unexplained"]
    chaos_report.write(Chaos(7, kinds=()), tmp_path, culprits)
    (row,) = json.loads((tmp_path / "report.json").read_text())["culprits"]["kinds"]
    assert row == {"kind": "slow", "count": 5, "right": 2, "wrong": 1, "median_s": 2}
    page = (tmp_path / "report.html").read_text()
    assert "<td>2 of 5</td><td>1</td>" in page and page.count("&lt;rank 9&gt;") == 3


def test_an_error_of_one_fault_leaves_the_report_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def suffer(kind: CulpritKind, rank: int, directory: Path) -> CulpritFault:
        if culprits.faults:
            raise KeyboardInterrupt
        raise ProcessLookupError("the rank is gone")

    monkeypatch.setattr(chaos_culprits, "suffer", suffer)
    culprits = Culprits(7, kinds=[kind for kind in CULPRITS if not kind.narrow])
    with pytest.raises(KeyboardInterrupt):
        culprits.run(until=math.inf)
    (fault,) = culprits.missed
    assert (fault.outcome, fault.text) == ("nobody", "ProcessLookupError: the rank is gone")


def test_kinds_that_a_machine_does_not_allow_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = list[str]()
    kinds = [replace(kind, why_not=lambda: "no root") for kind in CULPRITS if kind.narrow]
    monkeypatch.setattr(chaos_culprits, "CULPRITS", [*kinds, CULPRITS[0]])
    assert chaos_culprits.present(said.append) == [CULPRITS[0]]
    assert said == ["no rank or node suffers `narrow_link`: no root"]


def test_each_kind_of_culprit_is_drawn_equally_often_and_follows_from_the_seed() -> None:
    drawn = list(itertools.islice(Culprits(5).draws(), 3 * len(CULPRITS)))
    assert drawn == list(itertools.islice(Culprits(5).draws(), 3 * len(CULPRITS)))
    assert Counter(kind.name for kind, _ in drawn) == {kind.name: 3 for kind in CULPRITS}
    assert {rank for _, rank in drawn} == set(range(4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounds_follow_from_the_seed_and_spare_a_group_that_has_lost_a_member(shape: Shape) -> None:
    seen = set()
    for number in range(300):
        draws = draw_round(5, number, shape, EVERYTHING)
        assert draws == draw_round(5, number, shape, EVERYTHING)
        seen |= {draw.kind.name for draw in draws}
        losing = {draw.member for draw in draws if draw.kind.loses_memory}
        assert len({shape.group_of(member) for member in losing}) == len(losing)
    assert seen == {kind.name for kind in KINDS}
    assert draw_round(5, 0, shape, EVERYTHING) != draw_round(6, 0, shape, EVERYTHING)


def test_what_is_not_there_is_not_broken() -> None:
    drawn = {
        draw.kind.needs for n in range(300) for draw in draw_round(5, n, SHAPES[0], frozenset())
    }
    assert drawn == {""}
