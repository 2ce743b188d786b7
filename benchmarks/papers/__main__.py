"""Print the figures of a paper beside those that this version's models compute, as Markdown.

    python -m benchmarks.papers --paper table3
    python -m benchmarks.papers --goal --costs build/bench/recovery.json

`--paper` takes MoEvement's tables 3 and 7 and figure 11, recoveries of TrainMover, DeadPool and
FFTrainer, and Lazarus' spot instances; `--goal` shows how near this version comes to its ETTR
goals, and why.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from benchmarks.papers.goals import goal_tables
from benchmarks.papers.paper_checks import Column, PaperTable, Value, figure_11, table_3, table_7
from benchmarks.papers.recoveries import recovery_table
from benchmarks.papers.spot_trace import spot_tables
from holdfast_cli.arguments import count
from holdfast_cli.planner.arguments import add_simulated_costs
from holdfast_cli.planner.effective_time.assumed_policies import AssumedCosts
from holdfast_cli.planner.effective_time.incidents import DrawOf
from holdfast_cli.planner.effective_time.policy_models import Cluster
from holdfast_cli.planner.seeds import generator
from holdfast_cli.planner.simulation.inputs import (
    ASSUMED,
    EXPERTS,
    EXPERTS_SHARE,
    FLAG,
    LAYERS,
    STATE_BYTES,
    STORAGE_BYTES_S,
    Sources,
    duration_of,
    memory_rates_of,
    repair_of,
    slower_of,
)
from holdfast_core.errors import HoldfastError

SPOT_RUNS = 200
"""Draws of the nodes that a spot trace loses."""

PAPERS: dict[str, Callable[[DrawOf, int], tuple[PaperTable, ...]]] = {
    "table3": table_3,
    "table7": lambda draw_of, runs: table_7(),
    "figure11": figure_11,
    "recoveries": lambda draw_of, runs: (recovery_table(),),
    "spot": lambda draw_of, runs: spot_tables(draw_of, SPOT_RUNS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bench NAME=papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = parser.add_mutually_exclusive_group(required=True)
    shown.add_argument("--paper", choices=[*PAPERS], help="the model beside published figures")
    shown.add_argument("--goal", action="store_true", help="ETTR goals, and what they would take")
    parser.add_argument("--runs", type=count, default=40, metavar="N", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    add_simulated_costs(parser)
    options = parser.parse_args(arguments)
    try:
        tables = _tables(options)
    except HoldfastError as error:
        print(f"benchmarks.papers: {error}", file=sys.stderr)
        return 2
    if options.json:
        text = msgspec.json.encode(_papers_document(tables))
        print(msgspec.json.format(text, indent=2).decode())
    else:
        for line in _paper_lines(tables):
            print(line)
    return 0


def _tables(options: argparse.Namespace) -> tuple[PaperTable, ...]:
    if options.goal:
        base, cluster, explained = _goal_inputs(options)
        return (_inputs_table(explained), *goal_tables(base, cluster, generator, options.runs))
    return PAPERS[options.paper](generator, options.runs)


def _goal_inputs(
    options: argparse.Namespace,
) -> tuple[AssumedCosts, Cluster, Sequence[tuple[str, str, str]]]:
    """What `--goal` needs beside the papers' models: rates, and what a repair takes."""
    sources = Sources(options)
    copy_bytes_s, network_bytes_s = memory_rates_of(options, sources)
    slower = slower_of(options, sources)
    detect_s, restart_s, reform_s = repair_of(options, sources)
    losses = 1.0 if options.node_losses is None else options.node_losses
    source = FLAG if options.node_losses is not None else ASSUMED
    sources.explain("failures that take a node with them", f"{losses:.0%}", source)
    sources.explain(
        "state", f"{STATE_BYTES} B a parameter, {EXPERTS_SHARE:.0%} in experts", ASSUMED
    )
    cluster = Cluster(
        nodes=1,
        spares=1,
        detect_s=detect_s,
        restart_s=restart_s,
        replacement_s=duration_of(options.replacement),
        node_losses=losses,
        reform_s=reform_s,
        join_wait_s=120.0,
    )
    base = AssumedCosts(
        expert_bytes=0,
        other_bytes=0,
        experts_per_layer=EXPERTS,
        moe_layers=LAYERS,
        copy_bytes_s=copy_bytes_s,
        network_bytes_s=network_bytes_s,
        storage_bytes_s=STORAGE_BYTES_S,
        slower=slower,
    )
    return base, cluster, sources.explained


def _inputs_table(explained: Sequence[tuple[str, str, str]]) -> PaperTable:
    """The inputs beside tables of papers."""
    columns = tuple(Column(name=name, origin=None) for name in ("input", "value", "from"))
    return PaperTable(title="inputs", columns=columns, rows=tuple(explained))


def _paper_lines(tables: Sequence[PaperTable]) -> Iterator[str]:
    """Published figures beside ours, as Markdown, with the origin of each column; a table is as
    wide as it has to be, so that no number is cut off."""
    for each in tables:
        heads = [
            column.name if column.origin is None else f"{column.name} ({column.origin})"
            for column in each.columns
        ]
        cells = [
            [_cell(value, column) for value, column in zip(row, each.columns, strict=True)]
            for row in each.rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        numbers = [column.origin is not None for column in each.columns]
        rule = [
            f"{'-' * (width - 1)}{':' if number else '-'}"
            for width, number in zip(widths, numbers, strict=True)
        ]
        yield f"**{each.title}**"
        yield ""
        for row in (heads, rule, *cells):
            texts = (
                text.rjust(width) if number else text.ljust(width)
                for text, width, number in zip(row, widths, numbers, strict=True)
            )
            yield f"| {' | '.join(texts)} |"
        yield ""
        for note in each.notes:
            yield from textwrap.wrap(f"- {note}", width=100, subsequent_indent="  ")
        if each.notes:
            yield ""


def _cell(value: Value, column: Column) -> str:
    return str(value) if isinstance(value, str) else f"{value:.{column.digits}f}"


def _papers_document(tables: Sequence[PaperTable]) -> list[dict[str, Any]]:
    """The tables for `--json`."""
    return [
        {
            "title": each.title,
            "columns": [
                {"name": column.name}
                if column.origin is None
                else {"name": column.name, "origin": column.origin.value}
                for column in each.columns
            ],
            "rows": [list(row) for row in each.rows],
            "notes": list(each.notes),
        }
        for each in tables
    ]


if __name__ == "__main__":
    raise SystemExit(main())
