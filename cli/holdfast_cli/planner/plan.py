"""`holdfast plan`: reads its inputs, computes, prints and draws."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from holdfast_cli.job_files import load_job
from holdfast_cli.planner.copies_plan import plan_copies
from holdfast_cli.planner.models.policy_comparison import Assumptions, Comparison
from holdfast_cli.planner.plan_inputs import assumptions_of, model_of, mtbf_days_of, sent_of
from holdfast_cli.planner.planning import (
    PlannedModel,
    PlanSettings,
    check_memory,
    compare_and_recommend,
    plan_view,
)
from holdfast_cli.planner.simulation.plan_levers import levers_of_plan
from holdfast_cli.planner.simulation.view import lever_view
from holdfast_cli.plotting import needs_matplotlib
from holdfast_core.errors import InvalidJobError

COLUMNS = 100
"""Least width of tables: in a narrower terminal lines wrap, and no number is cut off."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def plan(options: argparse.Namespace) -> int:
    """Carry out `holdfast plan`; returns the exit code."""
    if options.plot is not None and options.plot.suffix not in PLOT_SUFFIXES:
        raise InvalidJobError(
            f"--plot {options.plot}: the suffix sets the format; use {', '.join(PLOT_SUFFIXES)}"
        )
    job = load_job(options.job)
    if options.experts:
        return plan_copies(options, job)
    node_mtbf_days, process_mtbf_days = mtbf_days_of(options, job)
    settings = PlanSettings(
        bytes_per_rank=options.bytes_per_rank,
        node_mtbf_days=node_mtbf_days,
        process_mtbf_days=process_mtbf_days,
        replace_s=options.replace_seconds,
        snapshot_s=options.snapshot_seconds,
        step_s=options.step_seconds,
        days=options.days,
        sent=sent_of(options),
    )
    console = Console(width=max(Console().width, COLUMNS))
    sizes = model_of(options, job)
    if sizes is None:
        console.print(plan_view(job, settings))
        check_memory(job, settings, None)
        return 0
    model = PlannedModel(sizes=sizes, assumed=assumptions_of(options, job, sizes))
    advice = compare_and_recommend(job, model)
    comparison = advice.comparison
    console.print(plan_view(job, settings, model, advice))
    console.print()
    console.print(lever_view(levers_of_plan(job, sizes, model.assumed)))
    if options.plot is not None:
        _plot(options.plot, comparison, model.assumed, title=job.key)
        print(f"wrote {options.plot}")
    check_memory(job, settings, comparison)
    return 0


def _plot(path: Path, comparison: Comparison, assumed: Assumptions, *, title: str) -> None:
    with needs_matplotlib():
        from holdfast_cli.planner.plan_plot import write_plot  # noqa: PLC0415
    write_plot(path, comparison, assumed, title=title)
