from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from benchmarks.policies.__main__ import TABLE_COLUMNS, print_table, write_json
from benchmarks.policies.figures import Figure, pec_figures
from benchmarks.policies.models import MOETION, PEC_SMALL, Shape, captured
from rich.console import Console

from holdfast_core.experts import ExpertTable
from holdfast_core.topology import Topology

TINY = Shape(layers=4, dim=8, hidden=32, experts=4, every=2, vocabulary=16, context=4)


def test_units_are_those_that_the_sdk_finds() -> None:
    ranks = captured(TINY, Topology(dp=2, ep=2))
    assert {rank: sorted({str(t.unit) for t in tensors}) for rank, tensors in ranks.items()} == {
        rank: sorted(
            [
                *("embedding", "head", "other"),
                *(f"layer{layer}/dense" for layer in range(4)),
                *(f"layer{layer}/gate" for layer in (1, 3)),
                *(f"layer{layer}/expert{2 * rank + i}" for layer in (1, 3) for i in range(2)),
            ]
        )
        for rank in (0, 1)
    }
    embedding = [t.nbytes for t in ranks[0] if str(t.unit) == "embedding"]
    assert embedding == [16 * 8 * 4] * 3  # weights and two moments


def test_a_tied_head_is_captured_once_and_moments_are_float32() -> None:
    tied = Shape(layers=1, dim=8, hidden=32, experts=2, tied=True, dtype=torch.bfloat16)
    tensors = captured(tied, Topology(dp=1))[0]
    assert "head" not in {str(t.unit) for t in tensors}
    weights = sum(t.nbytes for t in tensors if t.dtype == "bfloat16")
    assert sum(t.nbytes for t in tensors) == 5 * weights


def test_the_figures_of_pec_are_reached() -> None:
    figures = {figure.key: figure for figure in pec_figures(PEC_SMALL, "pec")}
    assert [key for key, figure in figures.items() if figure.met is not True] == []
    assert figures["pec_peak_reduction_ranges"].value > 87


@pytest.mark.parametrize(("name", "billions"), [("1.6B-64E", 58.7), ("2.9B-16E", 30.1)])
def test_models_have_the_parameters_that_the_paper_prints(name: str, billions: float) -> None:
    topology = Topology(dp=1)
    table = ExpertTable.of(captured(MOETION[name], topology), topology)
    assert table.full_bytes / 10 / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("least", "most", "met"),
    [(None, None, None), (5, None, True), (6, None, False), (None, 4, False), (5, 5, True)],
)
def test_a_figure_is_met_within_its_bounds(
    least: float | None, most: float | None, met: bool | None
) -> None:
    figure = Figure(key="k", what="w", value=5, unit="%", at_least=least, at_most=most)
    assert figure.met is met


def test_the_report_holds_each_figure_and_what_it_had_to_be(tmp_path: Path) -> None:
    figure = Figure(key="size", what="w", value=5, unit="%", at_most=4)
    write_json(tmp_path / "bench" / "policies.json", [figure])
    report = json.loads((tmp_path / "bench" / "policies.json").read_text())
    assert report["size"] == 5
    assert (report["details"]["size"]["at_most"], report["details"]["size"]["met"]) == (4, False)


def test_rows_of_the_table_are_not_wrapped() -> None:
    figure = Figure(
        key="risk",
        what="1.6B-64E, 6 experts: at risk, load-aware to round robin",
        value=1957.25,
        unit="GB",
        paper=9.623,
        at_least=8.661,
        at_most=10.59,
        note="2007 to 463 MB, the longest module, causal masks saved",
    )
    written = io.StringIO()
    print_table(Console(file=written, width=TABLE_COLUMNS), [figure])
    (row,) = (line for line in written.getvalue().splitlines() if figure.what in line)
    assert figure.note in row
