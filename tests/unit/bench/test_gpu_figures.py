"""The figures of GPUs, where there is none: what needs one is skipped by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import detectors
from benchmarks.gpu.moe import BYTES_PER_PARAMETER, Model, Training, shape_for
from benchmarks.gpu.results import Goal, Results, in_turn
from gpu.steps import STEPS

ROOT = Path(__file__).parents[3]
WITHIN_S, LONG_S = 100.0, 300.0
FIELDS = {"name", "value", "unit", "floor", "floor_name", "ratio", "goal", "met", "runs"}
MEASURED = {
    "copying": {"first_use", "staged_1MiB_threads_2"},
    "restoring": {"restored_1MiB_threads_2", "hashed_from_buffers_threads_2"},
    "boundary_logs": {"micro_batch_logged_waiting"},
    "dispatching": {"layer_dispatched", "layer_planned_on_host", "layer_of_plain_ep"},
    "saving": {"save_call_small", "save_call_large", "blocked_small", "blocked_large"},
    "step": {"step_threads_2", "step_skipped_threads_2", "step_1gib_threads_2"},
    "detectors": {"step_detectors", "detectors_daemons", "detectors_trainers"},
    "hashing": {"hashed_threads_1"},
    "peers": {"blocked_holdfast", "survives_holdfast", "survives_torch_save"},
}
LONG = ("saving", "step", "detectors", "peers")
"""Modules that only `--every-combination` runs here: `make test-py312` runs all."""
SKIPPED = {
    "copying": "arena_copy_1MiB: needs a CUDA device",
    "restoring": "restored_1MiB_directly: needs a CUDA device",
    "boundary_logs": "micro_batch_logged: needs a CUDA device",
    "saving": "staged_small_gathered: needs a CUDA device",
    "peers": "blocked_dcp_async_process: its process takes longer to start than a short run",
}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(
            module,
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(LONG_S + 20)]
            if module in LONG
            else [],
        )
        for module in MEASURED
    ],
)
def test_each_module_writes_its_figures_and_names_what_it_skips(
    module: str, tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", "--small", "--out", str(out)]
    within_s = LONG_S if module in LONG else WITHIN_S
    ended = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=within_s
    )
    assert ended.returncode == 0, ended.stderr
    written = json.loads(out.read_text())
    assert set(written) == {"facts", "figures", "skipped", "failed"}
    figures: dict[str, dict[str, Any]] = {figure["name"]: figure for figure in written["figures"]}
    assert len(figures) == len(written["figures"])
    if not torch.cuda.is_available():
        assert MEASURED[module] <= figures.keys(), written
        assert SKIPPED.get(module, "") in [*written["skipped"], ""]
    for figure in figures.values():
        assert set(figure) == FIELDS
        assert math.isfinite(figure["value"])
        assert figure["runs"]
        assert (figure["floor"] is None) == (figure["ratio"] is None) == (not figure["floor_name"])
        assert (figure["goal"] is None) == (figure["met"] is None)


def results_in(folder: Path) -> tuple[Results, Path]:
    path = folder / "figures.json"
    return Results(path, small=True, limit_s=math.inf), path


def test_a_figure_that_fails_leaves_those_before_it_and_after_it(tmp_path: Path) -> None:
    results, path = results_in(tmp_path)
    results.plain("first", [1.0], "ms")
    assert [figure["name"] for figure in json.loads(path.read_text())["figures"]] == ["first"]

    def fail() -> None:
        raise ValueError("no such thing")

    results.attempt("second", fail)
    results.plain("third", [3.0, 4.0, 9.0], "ms", Goal(limit=5.0))
    written = json.loads(path.read_text())
    assert [figure["name"] for figure in written["figures"]] == ["first", "third"]
    assert (written["skipped"], written["failed"]) == ([], ["second: ValueError: no such thing"])
    assert (written["figures"][1]["value"], written["figures"][1]["met"]) == (4.0, True)


def test_a_figure_that_would_end_too_late_is_skipped_by_name(tmp_path: Path) -> None:
    results = Results(tmp_path / "figures.json", small=False, limit_s=0.0)
    results.attempt("late", lambda: pytest.fail("it began"))
    skipped = json.loads((tmp_path / "figures.json").read_text())["skipped"]
    assert skipped == ["late: 0 s are left of 0 s"]


def test_ratios_are_those_of_the_runs_and_rates_are_compared_with_rates(tmp_path: Path) -> None:
    results, path = results_in(tmp_path)
    pairs = [(0.5, 0.25), (1.0, 0.5), (1.0, 4.0)]
    results.rates("rate", 10**9, pairs, "pinned copy", Goal(limit=0.95, least=True))
    results.durations("duration", pairs, "pinned copy")
    results.longer("longer", pairs, "the step alone", Goal(limit=2.0))
    rate, duration, longer = json.loads(path.read_text())["figures"]
    assert (rate["value"], rate["floor"], rate["ratio"]) == (1.0, 2.0, 0.5)
    assert (rate["goal"], rate["met"]) == ("ratio ≥ 0.95", False)
    assert rate["runs"] == [[2.0, 4.0], [1.0, 2.0], [1.0, 0.25]]
    assert (duration["value"], duration["floor"], duration["ratio"]) == (1000.0, 500.0, 2.0)
    assert (longer["ratio"], longer["met"]) == (100.0, False)


def test_ours_and_the_floor_take_turns() -> None:
    calls: list[str] = []
    pairs = in_turn(
        lambda: calls.append("ours"),
        lambda: calls.append("floor"),
        torch.device("cpu"),
        repetitions=2,
        warm_ups=1,
    )
    assert calls == ["floor", "ours"] * 3
    assert len(pairs) == 2


def test_the_model_is_as_large_as_asked_for_and_trains() -> None:
    for gib in (1, 8):
        wanted = gib << 30
        shape = shape_for(wanted, small=False)
        with torch.device("meta"):
            model = Model(shape)
        nbytes = sum(p.numel() * BYTES_PER_PARAMETER for p in model.parameters())
        assert 0.6 * wanted < nbytes <= wanted
    training = Training(shape_for(0, small=True), torch.device("cpu"))
    masters = [state["master"] for state in training.optimizer.state.values()]
    before = [master.clone() for master in masters]
    for _ in range(3):
        training.step()
    assert not any(torch.equal(now, was) for now, was in zip(masters, before, strict=True))
    assert all(bool(p.isfinite().all()) for p in training.model.parameters())


def test_there_is_time_for_the_figure_of_the_detectors() -> None:
    (step,) = (step for step in STEPS if step.path == "benchmarks/gpu/detectors.py")
    assert detectors.IMPORTS_S + detectors.needed_s(detectors.SIZE) <= detectors.LIMIT_S
    assert step.limit_s > detectors.LIMIT_S
