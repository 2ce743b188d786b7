"""What would gain most for a job: which changes are simulated, and which one is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_command import JOB

from holdfast_cli.main import main
from holdfast_cli.planner.effective_time.assumed_policies import AssumedCosts, PolicyKind
from holdfast_cli.planner.effective_time.policy_models import Cluster, PolicyModel, Workload
from holdfast_cli.planner.effective_time.runs import TrainingRun, simulate_runs
from holdfast_cli.planner.seeds import generator
from holdfast_cli.planner.simulation.levers import JobSetting, Levers, compare_levers
from holdfast_cli.planner.simulation.view import lever_view

MTBF_S = 600.0
SETTING = JobSetting(
    kind=PolicyKind.FULL,
    costs=AssumedCosts(
        expert_bytes=9 * 10**9,
        other_bytes=10**9,
        experts_per_layer=16,
        moe_layers=4,
        copy_bytes_s=10e9,
        network_bytes_s=2.5e9,
        storage_bytes_s=1e9,
        group_nodes=4,
        stored_every_s=1800.0,
    ),
    workload=Workload(step_s=2.0),
    cluster=Cluster(
        nodes=16,
        spares=99,
        detect_s=2.0,
        restart_s=5.0,
        replacement_s=600.0,
        node_losses=0.5,
        reform_s=2.0,
    ),
)


def simulate(model: PolicyModel, workload: Workload, cluster: Cluster) -> list[TrainingRun]:
    return simulate_runs(
        model, workload, cluster, MTBF_S, runs=8, length_s=6 * 3600, draw_of=generator
    )


def compared(setting: JobSetting, *possible: PolicyKind, **options: float | None) -> Levers:
    return compare_levers(
        setting, frozenset(possible or (setting.kind,)), MTBF_S, MTBF_S, simulate, **options
    )


def changed(setting: JobSetting, **costs: Any) -> JobSetting:
    return replace(setting, costs=replace(setting.costs, **costs))


def on(setting: JobSetting, **cluster: Any) -> JobSetting:
    return replace(setting, cluster=replace(setting.cluster, **cluster))


def best(levers: Levers) -> str:
    """The change that is named first."""
    shown = re.search(r"what would gain most: (.*?), \+", lever_view(levers).plain)
    assert shown is not None
    return shown[1]


def changes(levers: Levers) -> set[str]:
    return {lever.change for lever in levers.levers}


def test_a_job_that_waits_for_nodes_gains_most_from_spares() -> None:
    levers = compared(on(SETTING, spares=0))
    assert best(levers) == "3 spare nodes in place of 0 (failurePolicy.spares)"
    assert levers.levers[0].gain == pytest.approx(levers.levers[0].ettr - levers.ettr)


def test_a_job_that_saves_rarely_gains_most_from_an_automatic_interval() -> None:
    levers = compared(changed(SETTING, interval_steps=200))
    assert best(levers) == "snapshot.interval.steps: auto"
    assert levers.every_steps == 200
    (auto,) = (lever for lever in levers.levers if lever.change.endswith(": auto"))
    assert auto.every_steps < 10


def test_a_job_without_redundancy_gains_most_from_parity() -> None:
    levers = compared(changed(SETTING, losses=0, stored_every_s=0.0, group_nodes=1))
    assert best(levers) in {"redundancy.type: RAIM5", "redundancy.type: RAIM6"}
    assert "redundancy.type: RAIM6" in changes(levers)
    assert levers.ettr < 0.5


def test_a_window_that_is_too_long_is_the_lever_of_a_windowed_job() -> None:
    windowed = replace(SETTING, kind=PolicyKind.SPARSE_GLOBAL)
    levers = compared(changed(windowed, window_steps=16))
    windows = {change for change in changes(levers) if "sparse.window" in change}
    assert windows == {"snapshot.policy.sparse.window: 1", "snapshot.policy.sparse.window: 8"}
    shorter, longer = (
        next(lever for lever in levers.levers if lever.change.endswith(f"window: {steps}"))
        for steps in (1, 8)
    )
    assert shorter.gain > longer.gain > 0
    assert levers.every_steps == 16


def test_processes_that_stay_are_a_lever_where_a_report_says_what_they_bring() -> None:
    slow = on(SETTING, restart_s=90.0)
    assert best(compared(slow, stay_restart_s=1.0)) == (
        "processes that stay when their world changes"
    )
    assert "processes that stay when their world changes" not in changes(compared(slow))


def test_policies_that_the_job_can_ask_for_and_scripts_are_compared() -> None:
    staged = replace(SETTING, workload=Workload(step_s=2.0, stages=4, micro_batches=4))
    names = changes(compared(staged, PolicyKind.FULL, PolicyKind.PARTIAL))
    assert "snapshot.policy.type: PartialExperts" in names
    assert "snapshot.policy.type: Full" not in names
    assert any("elastic.Pipeline" in name for name in names)
    assert not any("elastic.Pipeline" in name for name in changes(compared(SETTING)))


def test_a_policy_that_loses_more_tokens_than_allowed_is_no_lever() -> None:
    strict = changed(SETTING, loss_limit=1e-9)
    assert "snapshot.policy.type: PartialExperts" not in changes(
        compared(strict, PolicyKind.FULL, PolicyKind.PARTIAL)
    )


def test_nothing_counts_where_failures_are_rare() -> None:
    rare = compare_levers(
        SETTING,
        frozenset({PolicyKind.FULL}),
        1e9,
        1e9,
        lambda model, workload, cluster: simulate_runs(
            model, workload, cluster, 1e9, runs=3, length_s=3600, draw_of=generator
        ),
    )
    assert not any(lever.counts for lever in rare.levers)


# --- what the command prints ----------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["simulate", *map(str, arguments), "--policies", "full", "--runs", "4"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_command_names_the_lever_and_the_job_as_it_is(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (job, "--mtbf", "2h,10m", "--node-losses", "1", "--spares", "0")
    text = printed(capsys, *arguments)
    found = re.search(
        r"what would gain most: \d+ spare nodes in place of 0 \(failurePolicy.spares\), "
        r"\+(\d+)% of the time: ETTR ([\d.]+)\. "
        r"As it is \(full, a snapshot every step\), the job has ETTR ([\d.]+) at 10 min\. "
        r"Next, each by itself: .+, \+[\d.]+%",
        text,
    )
    assert found is not None
    assert float(found[2]) - float(found[3]) == pytest.approx(int(found[1]) / 100, abs=0.01)
    assert main(["simulate", *map(str, arguments), "--runs", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["as_it_is"]["policy"] == "full"
    assert document["as_it_is"]["ettr"] == pytest.approx(float(found[3]), abs=1e-3)
    assert document["levers"][0]["ettr"] == pytest.approx(float(found[2]), abs=1e-3)
    gains = [lever["gain"] for lever in document["levers"]]
    assert gains == sorted(gains, reverse=True)


def test_the_command_says_when_nothing_gains_more_than_noise(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, job, "--mtbf", "9000d", "--slower-percent", "0", "--parameters", "1G")
    assert re.search(
        r"what would gain most: nothing gains more than noise \(up to 0\.1%\) of the \d+ changes "
        r"that were simulated\. As it is \(full, a snapshot every step\), the job has ETTR 1\.000",
        text,
    )


def test_a_jobs_own_policy_and_interval_are_what_is_changed(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "  snapshot: {interval: {steps: 50}, policy: {type: Selective}}\n"
    job.write_text(JOB.replace("  model:", spec + "  model:"))
    text = printed(capsys, job, "--mtbf", "10m", "--spares", "90")
    assert "As it is (selective, a snapshot every 50 steps)" in text
    assert "what would gain most: snapshot.interval.steps: auto" in text
    spec = "  snapshot: {policy: {type: Sparse, sparse: {window: 12}}}\n"
    job.write_text(JOB.replace("  model:", spec + "  model:"))
    text = printed(capsys, job, "--mtbf", "10m", "--spares", "90")
    assert "As it is (sparse-global, W = 12)" in text
    job.write_text(JOB.replace("  model:", spec.replace("12", "auto") + "  model:"))
    text = printed(capsys, job, "--mtbf", "10m", "--spares", "90")
    assert "As it is (sparse-global, W = 1)" in text, "as short as the step allows"


def test_windows_of_a_job_that_may_shrink_are_simulated(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shrinking = JOB.replace("nodes: 4", "nodes: 4\n  minNodes: 2").replace(", ep: 8", "")
    spec = "  snapshot: {policy: {type: Sparse, sparse: {window: 3, repeats: Optimizer}}}\n"
    job.write_text(shrinking.replace("  model:", spec + "  model:"))
    text = printed(capsys, job, "--mtbf", "10m")
    assert "As it is (fewer-grads, W = 3)" in text
    fewer = replace(changed(SETTING, interval_steps=1), kind=PolicyKind.FEWER)
    auto = "snapshot.interval.steps: auto"
    assert auto in changes(compared(fewer))
    of_windows = changes(compared(replace(fewer, kind=PolicyKind.FEWER_GRADS)))
    assert auto not in of_windows, "it is refused"
    assert any("sparse.window" in change for change in of_windows)


def test_a_replayed_trace_has_levers_too(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "losses.csv"
    trace.write_text("600,-1\n900,1\n")
    text = printed(capsys, job, "--trace", trace, "--length", "1h")
    assert "what would gain most: minNodes" in text
    assert "with the trace" in text


def test_a_plan_names_the_lever_that_a_simulation_with_its_inputs_names(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--expert-bytes", "335M", "--other-bytes", "8G", "--step-seconds", "2")
    rates = ("--copy-bandwidth", "10G", "--network-bandwidth", "2G")
    failures = ("--node-mtbf-days", "1", "--process-mtbf-days", "3")
    assert main(["plan", str(job), *sizes, *rates, *failures]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assumed = ("--mtbf", "270m", "--length", "225h", "--node-losses", "0.75", "--runs", "8")
    assert main(["simulate", str(job), *sizes, *rates, *assumed, "--policies", "full"]) == 0
    simulated = " ".join(capsys.readouterr().out.split())
    sentences = [re.search(r"what would gain most: .+? by itself:", x) for x in (plan, simulated)]
    first, second = (each and each[0] for each in sentences)
    assert first == second
    assert first and "spare nodes in place of 0 (failurePolicy.spares), +" in first
