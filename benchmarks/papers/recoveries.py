"""What one failure costs other systems, beside what MoEvement's table 3 implies.

These systems publish the time of a recovery, and no ETTR. The closed form (MoEvement appendix C)
with that time, and with nothing else, gives the ETTR that they could reach at most.
"""

from __future__ import annotations

from benchmarks.papers.paper_checks import (
    Column,
    Origin,
    PaperTable,
    Value,
    fit_model,
    sparse_model,
)
from benchmarks.papers.published_figures import GPUS, RECOVERIES, TABLE_3
from holdfast_cli.planner.effective_time.policy_models import expected_redone_s

MTBFS_MIN = (120, 30, 10)
"""Of the MTBFs of table 3, those that the table shows."""


def recovery_table() -> PaperTable:
    """Published recoveries, and those that table 3 implies."""
    rows = [
        _row(each.system, each.source, each.gpus, each.given, None, each.cost_s)
        for each in RECOVERIES
    ]
    for model in TABLE_3:
        policy, workload = sparse_model(model, 0.0)
        cost_s = fit_model(model).repair_s + expected_redone_s(policy, workload)
        name = f"MoEvement, {model.name}"
        rows.append(_row(name, "NSDI 2026, table 3", GPUS, "", cost_s, cost_s))
    given, computed = Origin.GIVEN, Origin.COMPUTED
    return PaperTable(
        title="what a failure costs, and the ETTR that leaves",
        columns=(
            Column(name="system", origin=None),
            Column(name="source", origin=None),
            Column(name="GPUs, up to", origin=given),
            Column(name="a failure costs", origin=given),
            Column(name="a failure costs, s", origin=Origin.INFERRED, digits=1),
            *(Column(name=f"ETTR at {minutes} min", origin=computed) for minutes in MTBFS_MIN),
        ),
        rows=tuple(rows),
        notes=(
            "ETTR: 1 / (1 + cost / MTBF), at most: without what snapshots add to steps, failures "
            "during recoveries, and a lack of nodes; of a bound (under 40 s), the bound",
            "MoEvement: D of --paper table3 and the steps that are done again",
            "FFTrainer's abstract gives no seconds, so that there is no ETTR",
            "GPUs, models and failures differ: no row says what a system would do elsewhere",
        ),
    )


def _row(
    system: str,
    source: str,
    gpus: int | None,
    given: str,
    inferred_s: float | None,
    cost_s: float | None,
) -> tuple[Value, ...]:
    ratios: list[Value] = [
        "" if cost_s is None else 1 / (1 + cost_s / (60 * minutes)) for minutes in MTBFS_MIN
    ]
    return (
        system,
        source,
        "" if gpus is None else str(gpus),
        given,
        "" if inferred_s is None else inferred_s,
        *ratios,
    )
