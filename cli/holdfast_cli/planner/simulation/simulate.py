"""`holdfast simulate`: the cost of failures for a job, for any scale, policy and failure rate."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from holdfast_cli.job_files import load_job
from holdfast_cli.planner.effective_time.assumed_policies import policy_models
from holdfast_cli.planner.effective_time.policy_models import (
    Cluster,
    PolicyModel,
    Workload,
    closed_form_ettr,
)
from holdfast_cli.planner.effective_time.runs import (
    TrainingRun,
    simulate_many,
    simulate_run,
    simulate_runs,
    summarize,
)
from holdfast_cli.planner.plan import COLUMNS, PLOT_SUFFIXES
from holdfast_cli.planner.seeds import generator
from holdfast_cli.planner.simulation.inputs import Inputs, inputs_of
from holdfast_cli.planner.simulation.levers import Levers, compare_levers
from holdfast_cli.planner.simulation.view import (
    Simulated,
    document,
    simulation_view,
)
from holdfast_core.errors import InvalidJobError


def simulate(options: argparse.Namespace) -> int:
    """Carry out `holdfast simulate`; returns the exit code."""
    if options.plot is not None and options.plot.suffix not in PLOT_SUFFIXES:
        raise InvalidJobError(
            f"--plot {options.plot}: the suffix sets the format; use {', '.join(PLOT_SUFFIXES)}"
        )
    job = load_job(options.job)
    inputs = inputs_of(options, job)
    started = time.perf_counter()
    simulated = list(_simulated(inputs))
    took_s = time.perf_counter() - started
    levers = _levers(inputs)
    if options.json:
        _write_json(document(inputs, simulated, levers))
    else:
        _console().print(simulation_view(inputs, simulated, levers))
        events = sum(each.runs.events for each in simulated)
        print(
            f"{len(simulated) * inputs.runs:,} runs and {events:,} events in {took_s:.1f} s: "
            f"{events / took_s:,.0f} events a second"
        )
    if options.plot is not None:
        _plot(options.plot, simulated, title=f"{job.key} on {inputs.cluster.nodes} nodes")
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0


def _console() -> Console:
    return Console(width=max(Console().width, COLUMNS))


def _write_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _simulated(inputs: Inputs) -> Iterator[Simulated]:
    """Every policy under every rate, with a progress bar on a terminal."""
    rates = [None] if inputs.trace else list(inputs.mtbfs_s)
    with _progress(len(rates) * len(inputs.kinds)) as advance:
        for mtbf_s in rates:
            # Intervals follow from a failure rate; for a trace, it is the rate of its losses.
            rate_s = mtbf_s or _mtbf_of(inputs)
            models = policy_models(inputs.costs, inputs.workload, inputs.cluster, rate_s)
            for kind in inputs.kinds:
                model = models[kind]
                formula = None
                if mtbf_s is None:
                    runs = summarize(_replayed(inputs, model, inputs.workload, inputs.cluster))
                else:
                    formula = closed_form_ettr(model, inputs.workload, inputs.cluster, mtbf_s)
                    runs = simulate_many(
                        model,
                        inputs.workload,
                        inputs.cluster,
                        mtbf_s,
                        runs=inputs.runs,
                        length_s=inputs.length_s,
                        draw_of=generator,
                        first_seed=inputs.first_seed,
                    )
                advance()
                yield Simulated(kind=kind, mtbf_s=mtbf_s, model=model, formula=formula, runs=runs)


def _mtbf_of(inputs: Inputs) -> float:
    failures = sum(incident.nodes <= 0 for incident in inputs.trace)
    return inputs.length_s / max(1, failures)


def _levers(inputs: Inputs) -> Levers:
    """The job as it is and changed, at the shortest time between failures."""
    mtbf_s = None if inputs.trace else inputs.mtbfs_s[-1]

    def simulate_changed(
        model: PolicyModel, workload: Workload, cluster: Cluster
    ) -> list[TrainingRun]:
        if mtbf_s is None:
            return _replayed(inputs, model, workload, cluster)
        return simulate_runs(
            model,
            workload,
            cluster,
            mtbf_s,
            runs=inputs.runs,
            length_s=inputs.length_s,
            draw_of=generator,
            first_seed=inputs.first_seed,
        )

    return compare_levers(
        inputs.job,
        inputs.possible,
        mtbf_s,
        mtbf_s or _mtbf_of(inputs),
        simulate_changed,
        stay_restart_s=inputs.stay_restart_s,
    )


def _replayed(
    inputs: Inputs, model: PolicyModel, workload: Workload, cluster: Cluster
) -> list[TrainingRun]:
    """One run of a trace for each seed; the seed draws the stages that are hit."""
    return [
        simulate_run(
            model,
            workload,
            cluster,
            inputs.trace,
            length_s=inputs.length_s,
            draw=generator(seed),
        )
        for seed in range(inputs.first_seed, inputs.first_seed + inputs.runs)
    ]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda: progress.advance(task)


def _plot(path: Path, simulated: list[Simulated], *, title: str) -> None:
    try:
        from holdfast_cli.planner.simulation.plot import write_picture  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise InvalidJobError(
            "--plot draws with matplotlib, which is not installed; pip install 'holdfast[cli]'"
        ) from error
    write_picture(path, simulated, title=title)
