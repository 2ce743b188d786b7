"""A real job in real pods survives everything that a cluster does to it, byte for byte.

One job takes all faults, one after another; what each led to is looked at afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from cluster import Cluster
from holdfast_system import Holdfast
from survival import DETECTION_S, EVERYTHING, Run

from holdfast_operator.demo_report import FaultReport

STEPS = 400
UNCOUNTED = {"kill-daemon", "rollout", "drain"}
"""Faults that do not count towards `maxRestarts`: training goes on, or the rules say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    undisturbed: str
    disturbed: str
    faults: dict[str, FaultReport]
    status: dict[str, Any]


@pytest.fixture(scope="module")
def outcome(cluster: Cluster, holdfast: Holdfast) -> Outcome:
    undisturbed = Run(cluster, "undisturbed", STEPS)
    sha256 = undisturbed.carry_out()
    undisturbed.job.delete()
    run = Run(cluster, "survivor", STEPS)
    disturbed = run.carry_out(EVERYTHING)
    status = run.job.status()
    run.job.delete()
    return Outcome(
        undisturbed=sha256,
        disturbed=disturbed,
        faults={report.kind: report for report in run.faults},
        status=status,
    )


@pytest.mark.timeout(1500)
def test_the_final_bytes_are_those_of_an_undisturbed_run(outcome: Outcome) -> None:
    assert outcome.disturbed == outcome.undisturbed


@pytest.mark.parametrize("kind", [fault.kind for fault in EVERYTHING])
def test_every_fault_is_survived_and_no_protected_step_is_lost(outcome: Outcome, kind: str) -> None:
    report = outcome.faults[kind]
    assert report.survived
    assert report.lost_steps is not None
    assert report.lost_steps <= 1, report


@pytest.mark.parametrize("kind", ["kill-node", "partition"])
def test_a_lost_node_comes_back_from_parity(outcome: Outcome, kind: str) -> None:
    assert outcome.faults[kind].source == "parity"


def test_restarts_are_counted_as_the_rules_say(outcome: Outcome) -> None:
    counted = [fault for fault in EVERYTHING if fault.kind not in UNCOUNTED]
    assert outcome.status["restarts"] == len(counted)


def test_a_crash_is_decided_upon_within_a_second(outcome: Outcome) -> None:
    detected_s = outcome.faults["kill-rank"].detected_seconds
    assert detected_s is not None
    assert detected_s < 1.0


def test_a_lost_node_is_replaced_soon_after_it_counts_as_lost(outcome: Outcome) -> None:
    detected_s = outcome.faults["kill-node"].detected_seconds
    assert detected_s is not None
    assert detected_s < DETECTION_S + 3.0
