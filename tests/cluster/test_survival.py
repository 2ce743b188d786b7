"""A real job in real pods survives everything that a cluster does to it, byte for byte.

One job takes all faults, one after another, and its processes stay when others are lost; another
takes all shortages, and starts all processes again. What each led to is looked at afterwards.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jobs
import pytest
from alone import train_alone
from cluster import Cluster
from holdfast_system import Holdfast
from shortages import STEPS_WITHOUT, Shortages
from survival import DETECTION_S, EVERYTHING, PATIENT, Fault, Run

from holdfast_cli.demo.report import FaultReport
from holdfast_cli.local import Recovery
from holdfast_operator.kube.job.status import recoveries_of

STEPS = 280
ARGUMENTS = ("--seq", "32", "--dim", "64")
"""Small steps: what a machine is slow in is not tested here."""
DISTURBED = (*ARGUMENTS, "--step-seconds", "0.75")
"""The same beside faults, some of which do not stop training: however fast the machine is, it must
not end before the last of them was survived."""
UNCOUNTED = {"kill-daemon", "rollout", "drain", "delete-redis"}
"""Faults that do not count towards `maxRestarts`: training goes on, or the rules say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    sha256: str
    faults: dict[str, FaultReport]
    protected: dict[str, int]
    """Kind of fault → the newest protected step that the status knew before it."""
    behind: dict[str, int]
    """Kind of fault → by how many steps parity was behind training then."""
    recoveries: dict[str, list[Recovery]]
    """Kind of fault → the recoveries that were decided upon from then on."""
    status: dict[str, Any]


Short = tuple[Shortages, Outcome]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> str:
    """Hash of the final state of the same training in one pod, without Holdfast."""
    folder = cluster.home / "shared" / "undisturbed"
    arguments = ("--steps", str(STEPS), *ARGUMENTS, "--hash-file", f"{jobs.OUTPUT}/sha256")
    train_alone(cluster, "train_moe.py", folder, *arguments, processes=4)
    return (folder / "sha256").read_text().strip()


@pytest.fixture(scope="module")
def outcome(cluster: Cluster, holdfast: Holdfast) -> Outcome:
    return _outcome(Run(cluster, "survivor", STEPS, stays=True, arguments=DISTURBED), EVERYTHING)


@pytest.fixture(scope="module")
def short(cluster: Cluster, holdfast: Holdfast) -> Iterator[Short]:
    """The outcome of a run that had to do without, and what was seen meanwhile."""
    slow, *_, other = sorted(cluster.nodes)
    cluster.kubectl("cordon", other)  # so that a member is on the slow one
    try:
        with cluster.disk_of_its_own(slow) as device:
            holdfast.wait_daemon(slow)
            shortages = Shortages(slow_node=slow, slow_device=device)
            run = Run(cluster, "short", STEPS, arguments=DISTURBED, detection=PATIENT)
            yield shortages, _outcome(run, shortages.script)
    finally:
        cluster.kubectl("uncordon", other)


def _outcome(run: Run, script: Sequence[Fault]) -> Outcome:
    sha256 = run.carry_out(script)
    status = run.job.status()
    run.job.delete()
    faults = {report.kind: report for report in run.faults}
    return Outcome(
        sha256=sha256,
        faults=faults,
        protected=run.protected,
        behind=run.behind,
        recoveries=run.recoveries,
        status=status,
    )


# --- everything that breaks ---------------------------------------------------------------------


@pytest.mark.timeout(1500)
def test_the_final_bytes_are_those_of_an_undisturbed_run(
    outcome: Outcome, undisturbed: str
) -> None:
    assert outcome.sha256 == undisturbed


@pytest.mark.parametrize("kind", [fault.kind for fault in EVERYTHING])
def test_every_fault_is_survived_and_no_protected_step_is_lost(outcome: Outcome, kind: str) -> None:
    report = outcome.faults[kind]
    assert report.survived
    assert report.restored_step is not None
    assert report.restored_step >= outcome.protected[kind], report


def test_recoveries_lose_a_step_more_at_most_than_parity_was_behind(outcome: Outcome) -> None:
    """The step that was going on. How far parity is behind depends on the machine, which plays all
    nodes here; it was read a moment before the fault, so the worst fault may lose more."""
    lost = {
        kind: (report.lost_steps, outcome.behind[kind])
        for kind, report in outcome.faults.items()
        if report.restarted and report.lost_steps is not None
    }
    assert statistics.median(steps - behind for steps, behind in lost.values()) <= 1, lost


@pytest.mark.parametrize("kind", ["kill-node", "partition"])
def test_a_lost_node_comes_back_from_parity(outcome: Outcome, kind: str) -> None:
    """Nobody else holds its experts. If the line is of the step that the others have, its rank
    restores it alone; otherwise all do, and the status says why. If the machine causes another
    recovery after that, the spare's memory has what was rebuilt."""
    caused = outcome.recoveries[kind]
    rebuilt = next((each for each in caused if each.source), None)
    assert rebuilt is not None and rebuilt.source == "parity", caused
    alone = r"rank \d restored step \d+ alone; the others kept their state"
    assert re.fullmatch(alone, rebuilt.replay) or "could not alone" in rebuilt.replay, caused


@pytest.mark.parametrize("kind", ["kill-daemon", "rollout", "delete-redis"])
def test_what_training_does_not_need_does_not_stop_it(outcome: Outcome, kind: str) -> None:
    assert not outcome.faults[kind].restarted


def test_restarts_are_counted_as_the_rules_say(outcome: Outcome) -> None:
    """All recoveries count but that of the drained node, whose pod the control loop may see being
    removed or, where it looks later, find gone. A machine that plays all nodes may cause more of
    them than the script does."""
    causes = [recovery.cause for recovery in recoveries_of(outcome.status)]
    drained = ("EvictionByEvictionAPI", "has no agent, and node")
    assert sum(any(words in cause for words in drained) for cause in causes) == 1, causes
    assert outcome.status["restarts"] == outcome.status["recoveries"] - 1, causes
    assert outcome.status["restarts"] >= len(EVERYTHING) - len(UNCOUNTED)


def test_a_crash_is_decided_upon_within_a_second(outcome: Outcome) -> None:
    """One of two, at least: the machine, which plays all nodes here, may hold up the other."""
    assert _detected_s(outcome, "kill-rank", "kill-operator") < 1.0


def test_a_lost_node_is_replaced_soon_after_it_counts_as_lost(outcome: Outcome) -> None:
    assert _detected_s(outcome, "kill-node", "partition") < DETECTION_S + 3.0


def _detected_s(outcome: Outcome, *kinds: str) -> float:
    """The shortest time between one of these faults and the decision about it."""
    found = [outcome.faults[kind].detected_seconds for kind in kinds]
    return min(seconds for seconds in found if seconds is not None)


# --- everything that can be short ---------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_shortages_do_not_show_in_the_final_bytes(short: Short, undisturbed: str) -> None:
    _, outcome = short
    assert outcome.sha256 == undisturbed


@pytest.mark.exhaustive
def test_only_crashes_stop_training(short: Short) -> None:
    _, outcome = short
    restarted = {kind for kind, report in outcome.faults.items() if report.restarted}
    assert restarted == {"crash-in-full-memory", "pod-on-slow-disk"}
    assert outcome.status["restarts"] == 2


@pytest.mark.exhaustive
def test_daemons_tell_redis_what_they_hold_and_tell_it_again_when_it_has_forgotten(
    short: Short,
) -> None:
    shortages, _ = short
    before, afterwards = shortages.catalogue["before"], shortages.catalogue["afterwards"]
    assert len(before.nodes) == len(before.protected) == 4
    assert afterwards.nodes == before.nodes
    assert all(afterwards.protected[rank] > step for rank, step in before.protected.items())


@pytest.mark.exhaustive
def test_a_full_memory_is_counted_and_reported_and_stops_nothing(short: Short) -> None:
    shortages, _ = short
    seen = shortages.full
    assert seen is not None
    assert seen.degraded["reason"] == "ProtectionBehind"
    assert seen.failed_saves >= STEPS_WITHOUT / 2 or seen.failed_parity >= 1
    assert seen.steps >= STEPS_WITHOUT
    assert seen.recoveries == 0


@pytest.mark.exhaustive
def test_a_slow_disk_was_slow(short: Short) -> None:
    shortages, _ = short
    assert shortages.write_s > 1.0
