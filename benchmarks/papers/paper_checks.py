"""What this model makes of the published figures, beside them.

Each column of a table says where its numbers come from: the paper gives them, they are inferred
from what it gives, or they are computed here. What the paper contradicts is listed
(`published_figures.CONTRADICTIONS`), never fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import ceil, inf, sqrt

from benchmarks.papers.published_figures import (
    CONTRADICTIONS,
    FIGURE_11,
    HOUR_LEAST,
    LARGEST,
    LARGEST_GEMINI,
    LENGTH_S,
    MTBFS_S,
    TABLE_3,
    TABLE_7,
    TABLE_7_MTBFS_S,
    TrainedModel,
)
from holdfast_cli.planner.effective_time.incidents import DrawOf
from holdfast_cli.planner.effective_time.policy_models import (
    Cluster,
    Level,
    PolicyModel,
    Workload,
    closed_form_ettr,
    expected_redone_s,
)
from holdfast_cli.planner.effective_time.runs import simulate_many

Value = float | str


class Origin(StrEnum):
    """Where the numbers of a column come from."""

    GIVEN = "given"
    INFERRED = "inferred"
    COMPUTED = "computed"
    ASSUMED = "assumed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    origin: Origin | None
    """None for names and conditions, which are no results."""
    digits: int = 3
    """Digits after the point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTable:
    """Published figures beside those of this model."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Two constants of a model that the paper does not give."""

    overhead: float
    """What snapshots add to a step, as a portion of it."""
    repair_s: float
    """What each failure costs beyond steps that are done again."""
    error: float
    """Greatest deviation, relative to the published ETTR."""


def fit_ettr(ettr: Sequence[float], mtbfs_s: Sequence[float], redone_s: float) -> Fit:
    """Overhead and time of a repair with the least greatest relative error.

    1 / ETTR = (1 + o)(1 + (D + R) / MTBF) is a line in 1 / MTBF. Of the best line through three of
    the points in the sense of Chebyshev, the worst three decide.

    Args:
        redone_s: R, known beforehand.
    """
    points = [(1 / mtbf_s, 1 / ratio) for mtbf_s, ratio in zip(mtbfs_s, ettr, strict=True)]
    best = (0.0, 0.0, -1.0)
    for (x1, y1), (x2, y2), (x3, y3) in combinations(sorted(points), 3):
        # a + b x = y (1 + e), y (1 - e), y (1 + e) in turn, with one e for all three.
        weight = (x3 - x2) / (x3 - x1)
        between = weight * y1 + (1 - weight) * y3
        error = (y2 - between) / (between + y2)
        slope = (y3 - y1) * (1 + error) / (x3 - x1)
        if abs(error) > best[2]:
            best = (y1 * (1 + error) - slope * x1, slope, abs(error))
    start, slope, error = best
    return Fit(overhead=start - 1, repair_s=slope / start - redone_s, error=error)


def fit_sum(baseline_ettr: Sequence[float], recovery_s: Sequence[float]) -> Fit:
    """Overhead and time of a repair that come closest to 1 - ETTR = o + (R + D n) / length, where R
    is what the paper gives for all n failures together (least squares)."""
    rest = [1 - e - r / LENGTH_S for e, r in zip(baseline_ettr, recovery_s, strict=True)]
    rates = [1 / mtbf_s for mtbf_s in MTBFS_S]
    mean_x, mean_y = sum(rates) / len(rates), sum(rest) / len(rest)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(rates, rest, strict=True))
    slope = above / sum((x - mean_x) ** 2 for x in rates)
    start = mean_y - slope * mean_x
    error = max(abs(start + slope * x - y) for x, y in zip(rates, rest, strict=True))
    return Fit(overhead=start, repair_s=slope, error=error)


def sparse_model(model: TrainedModel, overhead: float) -> tuple[PolicyModel, Workload]:
    """MoEvement on one model of table 3, with E[R] = 3/2 W T_iter M / (M + S - 1)."""
    workload = Workload(step_s=model.step_s, stages=model.stages, micro_batches=model.micro_batches)
    level = Level(experts=1, interval_steps=1, stall_s=overhead * model.step_s)
    policy = PolicyModel(
        name=model.name, levels=(level,), window_steps=model.window_steps, by_stage=True
    )
    return policy, workload


def fit_model(model: TrainedModel) -> Fit:
    """The two constants of one model of table 3."""
    policy, workload = sparse_model(model, 0.0)
    redone_s = expected_redone_s(policy, workload)
    return fit_ettr(model.moevement.ettr, MTBFS_S, redone_s)


def without_shortage(repair_s: float) -> Cluster:
    """A cluster in which a failure costs `repair_s` and nodes never lack, as in the paper."""
    return Cluster(
        nodes=1, spares=1_000_000, detect_s=0.0, restart_s=max(0.0, repair_s), replacement_s=inf
    )


def table_3(draw_of: DrawOf, runs: int) -> tuple[PaperTable, ...]:
    """Table 3 of MoEvement beside this model."""
    own = PaperTable(
        title="MoEvement, table 3: its own rows",
        columns=(
            Column(name="model", origin=None),
            Column(name="MTBF, min", origin=None, digits=0),
            Column(name="ETTR", origin=Origin.GIVEN),
            Column(name="formula", origin=Origin.COMPUTED),
            Column(name="off", origin=Origin.COMPUTED, digits=4),
            Column(name="with o, D", origin=Origin.COMPUTED),
            Column(name="off, %", origin=Origin.COMPUTED, digits=2),
            Column(name="simulated", origin=Origin.COMPUTED),
            Column(name="off by", origin=Origin.COMPUTED, digits=4),
        ),
        rows=tuple(row for model in TABLE_3 for row in _own_rows(model, draw_of, runs)),
        notes=(
            "formula: appendix C with E[R] = 3/2 W T_iter, overhead and W as given, nothing fitted",
            "with o, D: the overhead and the time of a repair that fit best, two for each model",
            f"simulated: {runs} runs of 12 h with the same o and D, failures also in recoveries",
        ),
    )
    return (_inputs(), own, _checkfreq(), _gemini(), _moc(), contradictions())


def _own_rows(model: TrainedModel, draw_of: DrawOf, runs: int) -> Iterator[tuple[Value, ...]]:
    fit = fit_model(model)
    given, workload = sparse_model(model, model.overhead_s / model.step_s)
    fitted, _ = sparse_model(model, fit.overhead)
    everybody = Workload(step_s=model.step_s)
    cluster, at_once = without_shortage(fit.repair_s), without_shortage(0.0)
    for mtbf_s, ettr in zip(MTBFS_S, model.moevement.ettr, strict=True):
        formula = closed_form_ettr(given, everybody, at_once, mtbf_s)
        ours = closed_form_ettr(fitted, workload, cluster, mtbf_s)
        found = simulate_many(
            fitted, workload, cluster, mtbf_s, runs=runs, length_s=LENGTH_S, draw_of=draw_of
        )
        yield (
            model.name,
            mtbf_s / 60,
            ettr,
            formula,
            formula - ettr,
            ours,
            100 * (ours / ettr - 1),
            found.ettr,
            found.ettr - ettr,
        )


def _inputs() -> PaperTable:
    rows: list[tuple[Value, ...]] = []
    for model in TABLE_3:
        fit = fit_model(model)
        rows.append(
            (
                model.name,
                model.window_steps,
                model.overhead_s,
                f"{model.stages}, {model.dp}, {model.ep}",
                model.step_s,
                model.micro_batches,
                100 * fit.overhead,
                fit.repair_s,
                100 * fit.error,
            )
        )
    given, inferred = Origin.GIVEN, Origin.INFERRED
    return PaperTable(
        title="MoEvement, table 3: inputs",
        columns=(
            Column(name="model", origin=None),
            Column(name="W", origin=given, digits=0),
            Column(name="overhead, s", origin=given, digits=2),
            Column(name="PP, DP, EP", origin=given),
            Column(name="T_iter, s", origin=inferred, digits=2),
            Column(name="M", origin=inferred, digits=0),
            Column(name="o, %", origin=inferred, digits=1),
            Column(name="D, s", origin=inferred, digits=1),
            Column(name="error, %", origin=Origin.COMPUTED, digits=2),
        ),
        rows=tuple(rows),
        notes=(
            "T_iter: MoC's overhead in seconds by its overhead in percent, one digit, so ±10 %",
        ),
    )


def _checkfreq() -> PaperTable:
    rows: list[tuple[Value, ...]] = []
    for model in TABLE_3:
        baseline = model.checkfreq
        fit = fit_sum(baseline.ettr, baseline.recovery_s)
        half_s = model.checkfreq_steps * model.step_s / 2
        for mtbf_s, ettr, all_s in zip(MTBFS_S, baseline.ettr, baseline.recovery_s, strict=True):
            failures = LENGTH_S / mtbf_s
            ours = 1 - fit.overhead - (all_s + fit.repair_s * failures) / LENGTH_S
            rows.append(
                (model.name, mtbf_s / 60, ettr, all_s / failures, half_s, ours, ours - ettr)
            )
    given, inferred = Origin.GIVEN, Origin.INFERRED
    return PaperTable(
        title="MoEvement, table 3: CheckFreq",
        columns=(
            Column(name="model", origin=None),
            Column(name="MTBF, min", origin=None, digits=0),
            Column(name="ETTR", origin=given),
            Column(name="a recovery, s", origin=given, digits=1),
            Column(name="half an interval, s", origin=inferred, digits=1),
            Column(name="as a sum", origin=inferred),
            Column(name="off", origin=Origin.COMPUTED, digits=4),
        ),
        rows=tuple(rows),
        notes=(
            "as a sum: 1 - o - (recoveries as given + D n) / 12 h, with o and D that fit best",
            "half an interval: the interval is given, T_iter is inferred; the rest of a recovery "
            "is loading",
        ),
    )


def gemini_overheads(model: TrainedModel) -> tuple[float, ...]:
    """The overhead that Gemini's rows of table 3 leave, by MTBF, with MoEvement's D."""
    repair_s = fit_model(model).repair_s
    return tuple(
        1 - ettr - (all_s + repair_s * LENGTH_S / mtbf_s) / LENGTH_S
        for mtbf_s, ettr, all_s in zip(
            MTBFS_S, model.gemini.ettr, model.gemini.recovery_s, strict=True
        )
    )


def _gemini() -> PaperTable:
    inferred = Origin.INFERRED
    return PaperTable(
        title="MoEvement, table 3: overhead that Gemini's rows leave, in %",
        columns=(
            Column(name="model", origin=None),
            *(Column(name=f"{at // 60} min", origin=inferred, digits=1) for at in MTBFS_S),
            Column(name="text, 120 min", origin=Origin.GIVEN),
            Column(name="text, 10 min", origin=Origin.GIVEN),
        ),
        rows=tuple(
            (model.name, *(100 * o for o in gemini_overheads(model)), "at most 2", "11 to 15")
            for model in TABLE_3
        ),
        notes=("Gemini's intervals for each MTBF are not given, so its ETTR cannot be computed",),
    )


def moc_first(model: TrainedModel) -> float:
    """MoC's ETTR at two hours, before its budget is exhausted: overhead and recovery as given."""
    failures = LENGTH_S / MTBFS_S[0]
    repair_s = fit_model(model).repair_s + model.moc.recovery_s[0] / failures
    return 1 / (1 + model.moc_overhead) / (1 + repair_s / MTBFS_S[0])


def _moc() -> PaperTable:
    rows: list[tuple[Value, ...]] = [
        (
            model.name,
            model.moc.ettr[0],
            moc_first(model),
            *(1 / ettr for ettr in model.moc.ettr[1:]),
        )
        for model in TABLE_3
    ]
    inferred = Origin.INFERRED
    return PaperTable(
        title="MoEvement, table 3: MoC",
        columns=(
            Column(name="model", origin=None),
            Column(name="ETTR, 120 min", origin=Origin.GIVEN),
            Column(name="ours", origin=Origin.COMPUTED),
            *(Column(name=f"slower, {at // 60}", origin=inferred, digits=1) for at in MTBFS_S[1:]),
        ),
        rows=tuple(rows),
        notes=(
            "slower: how many times longer the training takes at the other MTBFs (1 / ETTR); their "
            "overheads and the budget of tokens are not given",
        ),
    )


def contradictions() -> PaperTable:
    """What the paper contradicts itself in."""
    return PaperTable(
        title="contradictions and gaps in the paper, not fitted",
        columns=(Column(name="what", origin=None),),
        rows=tuple((text,) for text in CONTRADICTIONS),
    )


STALL_S_BYTE = 1.0834
"""Seconds that a full snapshot takes for each byte of a parameter's state, in all rows of table 7:
16.4 G parameters by 15.1 GB/s. The one constant that is fitted to the five stalls."""


def table_7() -> tuple[PaperTable, ...]:
    """Table 7 of MoEvement beside this model."""
    return (_stalls(), _intervals(), contradictions())


def _stalls() -> PaperTable:
    rows: list[tuple[Value, ...]] = []
    for row in TABLE_7:
        full_s = STALL_S_BYTE * row.state_bytes
        ours_s = full_s - row.step_s
        rows.append(
            (
                row.name,
                row.state_bytes,
                row.step_s,
                row.moc_stall_s,
                ours_s,
                100 * (ours_s / row.moc_stall_s - 1),
                row.window_steps,
                ceil(full_s / row.step_s),
            )
        )
    given, inferred, computed = Origin.GIVEN, Origin.INFERRED, Origin.COMPUTED
    return PaperTable(
        title="MoEvement, table 7: stalls of full snapshots, and windows",
        columns=(
            Column(name="compute, master, optimizer", origin=None),
            Column(name="B/param", origin=given, digits=0),
            Column(name="T_iter, s", origin=inferred, digits=1),
            Column(name="stall, s", origin=given, digits=2),
            Column(name="ours, s", origin=computed, digits=2),
            Column(name="off, %", origin=computed, digits=2),
            Column(name="W", origin=given, digits=0),
            Column(name="our W", origin=computed, digits=0),
        ),
        rows=tuple(rows),
        notes=(
            f"ours: {STALL_S_BYTE} s for each byte of a parameter's state, less the step that "
            f"hides it; one constant for all rows",
            "W: full snapshot by step, rounded up; the third row is listed as a contradiction",
        ),
    )


def _intervals() -> PaperTable:
    rows: list[tuple[Value, ...]] = []
    for row in TABLE_7:
        stalls_s = [
            overhead_s * steps
            for overhead_s, steps in zip(row.gemini_overhead_s, row.gemini_steps, strict=True)
        ]
        stall_s = sum(stalls_s) / len(stalls_s)
        oracle = [sqrt(2 * stall_s * mtbf_s) / row.step_s for mtbf_s in TABLE_7_MTBFS_S]
        fit = fit_ettr(row.ettr, TABLE_7_MTBFS_S, 0.0)
        rows.append(
            (
                row.name,
                " ".join(map(str, row.gemini_steps)),
                stall_s / row.state_bytes,
                " ".join(f"{at:.0f}" for at in oracle),
                " ".join(f"{ettr:.3f}" for ettr in row.ettr),
                100 * fit.overhead,
                fit.repair_s,
                100 * fit.error,
            )
        )
    given, inferred, computed = Origin.GIVEN, Origin.INFERRED, Origin.COMPUTED
    return PaperTable(
        title="MoEvement, table 7: Gemini's intervals and MoEvement's ETTR at 1 h, 30, 10 min",
        columns=(
            Column(name="compute, master, optimizer", origin=None),
            Column(name="intervals", origin=given),
            Column(name="stall a byte, s", origin=inferred, digits=2),
            Column(name="oracle", origin=computed),
            Column(name="MoEvement", origin=given),
            Column(name="o, %", origin=inferred, digits=1),
            Column(name="D + R, s", origin=inferred, digits=1),
            Column(name="error, %", origin=computed, digits=2),
        ),
        rows=tuple(rows),
        notes=("oracle: √(2 stall MTBF), with the stall that overhead and interval give",),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchors:
    """What the numbers in figure 11's text imply for its largest model."""

    redone_s: tuple[float, float]
    """Least and greatest time that a failure costs MoEvement."""
    overhead: tuple[float, float]
    """Greatest and least overhead that go with them."""
    gemini_stall_s: tuple[float, float]
    gemini_interval_s: tuple[float, float]


LEAST_OVERHEAD = 0.01
"""Overhead of MoEvement in tables 3 and 7: 1 to 2 %."""
REPAIR_MAX_S = 60.0
"""Longest time that a failure may cost Gemini beside what is done again, for the anchors."""


def anchors() -> Anchors:
    """Solve 0.86 at ten minutes with at least 0.91 at one hour, and Gemini's 0.55 at its best."""
    product, hour = 1 / LARGEST, 1 / HOUR_LEAST
    most_s = 600 * (product / (1 + LEAST_OVERHEAD) - 1)
    # (1 + o)(1 + R / 600) = 1 / 0.86 and (1 + o)(1 + R / 3600) = 1 / 0.91.
    least_s = (product - hour) / (hour / 600 - product / 3600)
    stalls, intervals = [], []
    for repair_s in (REPAIR_MAX_S, 0.0):
        # (1 + s / I)(1 + (D + I / 2) / 600), at its best I, is (√(600 + D) + √(s / 2))² / 600.
        stall_s = 2 * (sqrt(600 / LARGEST_GEMINI) - sqrt(600 + repair_s)) ** 2
        stalls.append(stall_s)
        intervals.append(sqrt(2 * stall_s * (600 + repair_s)))
    return Anchors(
        redone_s=(least_s, most_s),
        overhead=(product / (1 + least_s / 600) - 1, LEAST_OVERHEAD),
        gemini_stall_s=(stalls[0], stalls[1]),
        gemini_interval_s=(intervals[0], intervals[1]),
    )


def figure_11(draw_of: DrawOf, runs: int) -> tuple[PaperTable, ...]:
    """Figure 11 of MoEvement: what its text implies, and simulations at both ends of that."""
    found = anchors()
    rows: list[tuple[Value, ...]] = []
    for redone_s, overhead in zip(found.redone_s, found.overhead, strict=True):
        level = Level(experts=1, interval_steps=1, stall_s=overhead)
        policy = PolicyModel(name="MoEvement", levels=(level,))
        workload = Workload(step_s=1.0)
        for mtbf_s in (3600, 600):
            runs_of = simulate_many(
                policy,
                workload,
                without_shortage(redone_s - expected_redone_s(policy, workload)),
                mtbf_s,
                runs=runs,
                length_s=LENGTH_S,
                draw_of=draw_of,
            )
            published = str(LARGEST) if mtbf_s == 600 else f"above {HOUR_LEAST}"
            formula = 1 / (1 + overhead) / (1 + redone_s / mtbf_s)
            rows.append(
                (
                    "MoEvement",
                    mtbf_s / 60,
                    published,
                    redone_s,
                    100 * overhead,
                    formula,
                    runs_of.ettr,
                )
            )
    rows.extend(_gemini_anchors(found))
    given, inferred, computed = Origin.GIVEN, Origin.INFERRED, Origin.COMPUTED
    models = PaperTable(
        title="MoEvement, figure 11: models",
        columns=(
            Column(name="model", origin=None),
            Column(name="GPUs", origin=given, digits=0),
            Column(name="stages", origin=given, digits=0),
            Column(name="pipelines", origin=given, digits=0),
            Column(name="T_iter, W, bandwidth", origin=given),
        ),
        rows=tuple(
            (each.name, each.gpus, each.stages, each.pipelines, "none") for each in FIGURE_11
        ),
    )
    return (
        models,
        PaperTable(
            title="MoEvement, figure 11: what its text implies for 671B on 16,384 GPUs",
            columns=(
                Column(name="system", origin=None),
                Column(name="MTBF, min", origin=None, digits=0),
                Column(name="ETTR", origin=given),
                Column(name="a failure, s", origin=inferred, digits=0),
                Column(name="overhead, %", origin=inferred, digits=1),
                Column(name="formula", origin=computed),
                Column(name="simulated", origin=computed),
            ),
            rows=tuple(rows),
            notes=(
                "two ends of what both numbers allow together; figure 11 is matched, not predicted",
                f"Gemini: at its best interval, with 0 to {REPAIR_MAX_S:g} s for a repair",
            ),
        ),
        contradictions(),
    )


def _gemini_anchors(found: Anchors) -> Iterator[tuple[Value, ...]]:
    ends = zip(found.gemini_stall_s, found.gemini_interval_s, (REPAIR_MAX_S, 0.0), strict=True)
    for stall_s, interval_s, repair_s in ends:
        cost_s = repair_s + interval_s / 2
        formula = 1 / (1 + stall_s / interval_s) / (1 + cost_s / 600)
        yield (
            f"Gemini, stall {stall_s:.0f} s",
            10.0,
            str(LARGEST_GEMINI),
            cost_s,
            100 * stall_s / interval_s,
            formula,
            "",
        )
