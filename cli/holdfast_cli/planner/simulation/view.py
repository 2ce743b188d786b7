"""Formats simulations for a terminal of 100 columns, and as JSON. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_cli.planner.effective_time.assumed_policies import (
    MEANINGS,
    SHRINKING,
    PolicyKind,
)
from holdfast_cli.planner.effective_time.policy_models import PolicyModel, Workload
from holdfast_cli.planner.effective_time.runs import Activity, Runs
from holdfast_cli.planner.models.policy_comparison import NEGLIGIBLE
from holdfast_cli.planner.simulation.inputs import Inputs, duration_text
from holdfast_cli.planner.simulation.levers import WINDOWED, Levers
from holdfast_core.quantities import format_portion

MARKS = {
    Activity.STALLED: "s",
    Activity.REDOING: "=",
    Activity.DETECTING: "d",
    Activity.RESTARTING: "R",
    Activity.WAITING: ".",
    Activity.SMALLER: "m",
}
"""Letters of bars, readable without colours."""

COLOURS = {
    Activity.STALLED: "#e8a33d",
    Activity.REDOING: "#c0392b",
    Activity.DETECTING: "#8e6bbf",
    Activity.RESTARTING: "#1f6feb",
    Activity.WAITING: "#8fa3bf",
    Activity.SMALLER: "#6a9f58",
}

BAR_COLUMNS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One policy under one failure rate."""

    kind: PolicyKind
    mtbf_s: float | None
    """None where a trace is replayed."""
    model: PolicyModel
    formula: float | None
    """The closed form; None with a trace."""
    runs: Runs


def _inputs_view(explained: Sequence[tuple[str, str, str]]) -> Table:
    """The inputs, each with its origin."""
    table = Table("input", "value", "from", box=None, pad_edge=False)
    for row in explained:
        table.add_row(*row)
    return table


def simulation_view(
    inputs: Inputs, simulated: Sequence[Simulated], levers: Levers
) -> RenderableType:
    """The inputs, ETTR over MTBF, the uses of time at the shortest MTBF, and what would gain
    most."""
    rates = list(dict.fromkeys(each.mtbf_s for each in simulated))
    worst = [each for each in simulated if each.mtbf_s == rates[-1]]
    return Group(
        _inputs_view(inputs.explained),
        "",
        _over_mtbf(simulated, rates),
        "",
        _details(worst, inputs.workload),
        *_scopes(worst, inputs.workload),
        "",
        *_where(worst),
        "",
        *_recommended(inputs, worst),
        lever_view(levers),
        "",
        *_notes(inputs, simulated),
    )


def _name(each: Simulated) -> str:
    if not each.model.built:
        return f"{each.kind} *"
    return f"{each.kind} +" if each.model.of_script else each.kind.value


def _rate_name(mtbf_s: float | None) -> str:
    return "trace" if mtbf_s is None else duration_text(mtbf_s)


def _over_mtbf(simulated: Sequence[Simulated], rates: Sequence[float | None]) -> Table:
    table = Table("ETTR (simulated)", box=None, pad_edge=False)
    for rate in rates:
        table.add_column(_rate_name(rate), justify="right")
    least = min(each.runs.ettr for each in simulated)
    low = min(0.9, int(10 * least) / 10)
    table.add_column(f"{low:.1f}{'1.0':>37}", no_wrap=True)
    for kind in dict.fromkeys(each.kind for each in simulated):
        of_kind = [each for each in simulated if each.kind is kind]
        cells = [f"{each.runs.ettr:.3f}" for each in of_kind]
        line = [" "] * 40
        for number, each in reversed(list(enumerate(of_kind, 1))):
            line[min(39, int(40 * (each.runs.ettr - low) / (1 - low)))] = str(number % 10)
        table.add_row(_name(of_kind[0]), *cells, "".join(line))
    return table


def _details(worst: Sequence[Simulated], workload: Workload) -> Table:
    table = Table(f"at {_rate_name(worst[0].mtbf_s)}", box=None, pad_edge=False)
    heads = ("every", "overhead", "formula", "simulated", "90 % of runs", "failures", "tokens lost")
    for head in heads:
        table.add_column(head, justify="right")
    for each in worst:
        level = each.model.levels[0]
        window = each.model.window_steps
        lost = each.runs.lost_tokens
        table.add_row(
            _name(each),
            f"W = {window}" if window else f"{level.interval_steps}",
            format_portion(each.model.overhead(workload.step_s)),
            "" if each.formula is None else f"{each.formula:.3f}",
            f"{each.runs.ettr:.3f}",
            f"{each.runs.low:.3f}-{each.runs.high:.3f}",
            f"{each.runs.failures:.0f}",
            "0%" if not lost else f"{format_portion(lost)}, K to {each.runs.experts}",
        )
    return table


def _scopes(worst: Sequence[Simulated], workload: Workload) -> list[Text]:
    """The stages that recoveries replayed, where only some do."""
    if workload.stages == 1:
        return []
    lines = [
        f"{_name(each)}: a recovery replays {each.runs.replayed_stages:.2f} of {workload.stages} "
        f"stages, at most {each.runs.widest}; {each.runs.enlarged:.1f} failures of a run enlarged "
        f"one"
        for each in worst
        if each.model.by_stage and each.runs.replayed_stages
    ]
    return [Text(), *map(Text, lines)] if lines else []


def _where(worst: Sequence[Simulated]) -> list[Text]:
    """Bars of lost time, all to one scale."""
    most = max(1 - each.runs.ettr for each in worst) or 1.0
    lines = [Text(f"time lost, of {format_portion(most)} at most:", style="bold")]
    for each in worst:
        line = Text(f"{_name(each):<16}")
        done, total = 0, 0.0
        for what, mark in MARKS.items():
            total += each.runs.portions[what]
            end = round(BAR_COLUMNS * total / most)
            line.append(mark * (end - done), style=COLOURS[what])
            done = end
        line.append(f" {format_portion(1 - each.runs.ettr)}")
        lines.append(line)
    legend = Text()
    for what, mark in MARKS.items():
        legend.append(f"{mark} {what}  ", style=COLOURS[what])
    return [*lines, legend]


def _best_of(inputs: Inputs, worst: Sequence[Simulated]) -> Simulated | None:
    """The policy to use: among the policies that the job can ask for, that stay within their limit
    of lost tokens and whose ETTR is (almost) the greatest, the one that loses the fewest tokens.
    None if no such policy was simulated."""
    allowed = [
        each
        for each in worst
        if each.kind in inputs.possible and each.runs.lost_tokens <= each.model.loss_limit
    ]
    most = max((each.runs.ettr for each in allowed), default=0.0)
    close = [each for each in allowed if each.runs.ettr >= most - NEGLIGIBLE]
    return min(close, key=lambda each: (each.runs.lost_tokens, -each.runs.ettr), default=None)


def _recommended(inputs: Inputs, worst: Sequence[Simulated]) -> list[Text]:
    best = _best_of(inputs, worst)
    if best is None:
        return [Text("this job can ask for none of these", style="bold")]
    tokens = ", no tokens lost"
    if best.runs.lost_tokens:
        tokens = f", for {format_portion(best.runs.lost_tokens)} of all tokens"
    return [
        Text.assemble(
            ("recommended: ", "bold"),
            (best.kind.value, "bold green"),
            f": ETTR {best.runs.ettr:.3f} at {_rate_name(best.mtbf_s)}{tokens}",
        )
    ]


def lever_view(levers: Levers) -> Text:
    """The change that gains most, in words, and the next ones; or that none does."""
    at = "with the trace" if levers.mtbf_s is None else f"at {duration_text(levers.mtbf_s)}"
    every = f"W = {levers.every_steps}" if levers.kind in WINDOWED else _steps(levers.every_steps)
    as_is = f"As it is ({levers.kind}, {every}), the job has ETTR {levers.ettr:.3f} {at}."
    gaining = [lever for lever in levers.levers if lever.counts]
    if not gaining:
        noise = max((lever.noise for lever in levers.levers), default=NEGLIGIBLE)
        return Text.assemble(
            ("what would gain most: ", "bold"),
            f"nothing gains more than noise (up to {format_portion(noise)}) of the "
            f"{len(levers.levers)} changes that were simulated. {as_is}",
        )
    # What the job's document or its cluster can change comes before new training scripts.
    best, *rest = sorted(gaining, key=lambda lever: lever.of_script)
    tokens = f", for {format_portion(best.lost_tokens)} of all tokens" if best.lost_tokens else ""
    others = "; ".join(f"{each.change}, +{format_portion(each.gain)}" for each in rest[:2])
    return Text.assemble(
        ("what would gain most: ", "bold"),
        (best.change, "bold green"),
        f", +{format_portion(best.gain)} of the time: ETTR {best.ettr:.3f}{tokens}. {as_is} ",
        f"Next, each by itself: {others}." if others else "Nothing else gains more than noise.",
    )


def _steps(count: int) -> str:
    return "a snapshot every step" if count == 1 else f"a snapshot every {count} steps"


def _notes(inputs: Inputs, simulated: Sequence[Simulated]) -> list[Text]:
    kinds = dict.fromkeys(each.kind for each in simulated)
    notes = [f"{kind + ':':<14} {MEANINGS[kind]}" for kind in kinds]
    lacking = [kind for kind in kinds if kind in SHRINKING]
    if lacking and not inputs.possible & SHRINKING and inputs.costs.survives is None:
        named = " and ".join(lacking) + (" are" if len(lacking) > 1 else " is")
        notes.append(f"               this job has no minNodes, so that {named} not recommended")
    if any(not each.model.built for each in simulated):
        notes.append("*              not in this version: shown to compare, never recommended")
    if any(each.model.of_script for each in simulated):
        notes.append(
            "+              takes a script written for it: shown to compare, not recommended"
        )
    length = duration_text(inputs.length_s)
    notes += [
        f"simulated:     mean of {inputs.runs} runs of {length}, seeds {inputs.first_seed} to "
        f"{inputs.first_seed + inputs.runs - 1}; failures also during recoveries",
        "formula:       1 / (1 + overhead) x 1 / (1 + E[R] / MTBF) (MoEvement C), enough spares",
        "tokens lost:   to experts that were not in the snapshot; K: where Dynamic-K ended",
    ]
    return [Text(note, style="dim") for note in notes]


def document(inputs: Inputs, simulated: Sequence[Simulated], levers: Levers) -> dict[str, Any]:
    """Inputs and results for `--json`."""
    return {
        "inputs": [
            {"name": name, "value": value, "from": source}
            for name, value, source in inputs.explained
        ],
        "as_it_is": {
            "policy": levers.kind.value,
            "mtbf_s": levers.mtbf_s,
            "interval_steps": levers.every_steps,
            "ettr": levers.ettr,
        },
        "levers": [
            {
                "change": lever.change,
                "ettr": lever.ettr,
                "gain": lever.gain,
                "noise": lever.noise,
                "lost_tokens": lever.lost_tokens,
            }
            for lever in levers.levers
        ],
        "seeds": [inputs.first_seed, inputs.first_seed + inputs.runs - 1],
        "results": [
            {
                "policy": each.kind.value,
                "built": each.model.built,
                "mtbf_s": each.mtbf_s,
                "interval_steps": each.model.levels[0].interval_steps,
                "window_steps": each.model.window_steps,
                "overhead": each.model.overhead(inputs.workload.step_s),
                "formula": each.formula,
                "ettr": each.runs.ettr,
                "low": each.runs.low,
                "high": each.runs.high,
                "failures": each.runs.failures,
                "replayed_stages": each.runs.replayed_stages,
                "widest_scope": each.runs.widest,
                "enlarged_scopes": each.runs.enlarged,
                "lost_tokens": each.runs.lost_tokens,
                "experts": each.runs.experts,
                "portions": {what.value: part for what, part in each.runs.portions.items()},
            }
            for each in simulated
        ],
    }
