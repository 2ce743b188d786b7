"""Formats the comparison of snapshot policies as a table of 100 columns. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast_cli.planner.effective_time.runs import Activity
from holdfast_cli.planner.models.policy_comparison import Assumptions, Comparison, PolicyCost
from holdfast_cli.planner.models.recommending import (
    DETECT_S,
    FAILURES,
    RESTART_S,
    RUNS,
    Recommendation,
)
from holdfast_core.job.intervals import AUTO
from holdfast_core.job.parsing import PolicyType
from holdfast_core.job.snapshots import Repeats
from holdfast_core.quantities import format_bytes, format_portion

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_COLUMNS = (
    ("per rank", "{unit}"),
    ("per step", "{unit}"),
    ("copy", "s"),
    ("hidden", ""),
    ("protect", "s"),
    ("every", "steps"),
    ("memory", "{unit}/node"),
    ("redone", "steps"),
    ("time lost", "{days:g} days"),
    ("tokens", "lost"),
)


def name_of(cost: PolicyCost) -> str:
    """Name of the policy, with the number of experts that it captures, or the number of steps of
    its window and whether the window holds gradients."""
    if cost.policy is PolicyType.FULL:
        return "Full"
    how = " grads" if cost.repeats is Repeats.OPTIMIZER else ""
    return f"{cost.policy.value} {cost.experts}{how}"


def unit_of(sizes: Sequence[int]) -> tuple[str, int]:
    """The unit in which the largest of `sizes` is below 10,000, and its bytes."""
    power, largest = 0, max(sizes, default=0)
    while largest >= 10_000 * 1024**power and power < len(_UNITS) - 1:
        power += 1
    return _UNITS[power], 1024**power


def comparison_view(
    comparison: Comparison,
    assumed: Assumptions,
    *,
    days: float,
    model: str,
    limit_bytes: int | None = None,
    auto: bool = False,
) -> RenderableType:
    """Format the policies, one per row, the recommendation with its reason, and how to read them.

    Args:
        model: the model in words.
        limit_bytes: the job's own limit for the memory of a node.
        auto: whether the job's interval is chosen while it runs.
    """
    lossy = [cost for cost in comparison.fitting if cost.objection]
    notes = [
        f"model:     {model}",
        f"assumed:   a node copies {_rate(assumed.copy_bytes_s)} and sends "
        f"{_rate(assumed.network_bytes_s)}, a step takes {assumed.step_s:g} s",
        "per rank:  captured by the most loaded one (ADPS, PEC §3.2); per step: by all together",
        "hidden:    behind a step; otherwise the seconds that a snapshot adds to one (REFT eq. 8)",
        "every:     the best interval (REFT eq. 9), or the least that protection can follow",
        "redone:    steps, after one failure; time lost: added and redone together (REFT eq. 4)",
        "Sparse n:  its largest save of n steps, of which a failure redoes 1.5 n (MoEvement §3.6)",
        "grads:     with gradients (sparse.repeats Optimizer), of which it redoes 0.5 n",
        "tokens:    of all routed, those whose updates experts lose by recoveries (PEC eq. 4)",
    ]
    if auto:
        notes.append("auto:      by the same formula, from what is measured while the job runs")
    if lossy:
        notes.append(
            "*          loses more tokens than its limit allows, so that it would grow (PEC §3.1)"
        )
    notes += _too_large(comparison, limit_bytes) + _network(comparison)
    if not any(cost.protect_s for cost in comparison.costs):
        notes.append("no redundancy: a lost node loses all snapshots, which is not counted here")
    return Group(
        _table(comparison, days),
        "",
        *_recommended(comparison, auto=auto),
        "",
        *(Text(note, style="dim") for note in notes),
    )


def effective_view(advice: Recommendation) -> RenderableType:
    """Effective training time with each policy, and the time that is lost."""
    table = Table(box=None, pad_edge=False)
    table.add_column("effective training time")
    heads = ("simulated", "90 % of runs", "snapshots", "done again", "repairs", "tokens lost")
    for head in heads:
        table.add_column(head, justify="right")
    best = advice.comparison.best
    for cost, runs in zip(advice.comparison.costs, advice.runs, strict=True):
        portions = runs.portions
        repairs = portions[Activity.DETECTING] + portions[Activity.RESTARTING]
        table.add_row(
            name_of(cost),
            f"{runs.ettr:.5f}",
            f"{runs.low:.5f}-{runs.high:.5f}",
            *(
                format_portion(part)
                for part in (portions[Activity.STALLED], portions[Activity.REDOING], repairs)
            ),
            format_portion(runs.lost_tokens),
            style="bold green" if cost is best else None,
        )
    note = (
        f"{RUNS} trainings of {FAILURES} failures with each policy, {DETECT_S:g} s until a failure "
        f"is known and {RESTART_S:g} s"
    )
    more = "from there to the next step; holdfast simulate: other rates, sizes and policies"
    return Group(table, Text(note, style="dim"), Text(more, style="dim"))


def _recommended(comparison: Comparison, *, auto: bool) -> list[Text]:
    if not comparison.fitting:
        least = min(cost.memory_bytes for cost in comparison.costs)
        text = f"nothing fits: give a node at least {format_bytes(least)}, or take more nodes"
        return [Text(text, style="bold red")]
    best = (name_of(comparison.best), "bold green")
    return [
        Text.assemble(("recommended: ", "bold"), best, f": {comparison.reason}."),
        Text(_as_document(comparison.best, auto=auto), style="cyan"),
    ]


def _too_large(comparison: Comparison, limit_bytes: int | None) -> list[str]:
    """A note that names the rows that do not fit, and those that do."""
    if limit_bytes is None or len(comparison.fitting) == len(comparison.costs):
        return []
    limit = format_bytes(limit_bytes).partition(" (")[0]
    fitting = ", ".join(name_of(cost) for cost in comparison.fitting) or "none of them"
    return [
        f"!          needs more memory than spec.snapshot.memoryPerNode = {limit} on a node; what "
        f"fits: {fitting}"
    ]


def _network(comparison: Comparison) -> list[str]:
    """A note about the bytes that Selective sends, with and without gradients in place of state."""
    cost = next((c for c in comparison.costs if c.policy is PolicyType.SELECTIVE), None)
    if cost is None or cost.recomputed_bytes == cost.network_bytes:
        return []
    unit, scale = unit_of([cost.network_bytes])
    sent, gradients = (_number(n / scale) for n in (cost.network_bytes, cost.recomputed_bytes))
    of_memory, memory_scale = unit_of([cost.gradient_bytes])
    return [
        f"network:   {name_of(cost)} sends {sent} {unit} a snapshot; with selective.recompute "
        f"{gradients} {unit},",
        f"           while the same experts stay chosen (MoEtion §5.2), for "
        f"{_number(cost.gradient_bytes / memory_scale)} {of_memory} more memory on each node",
    ]


def _as_document(cost: PolicyCost, *, auto: bool) -> str:
    """The part of the job document that asks for the policy."""
    policy = f"type: {cost.policy.value}"
    if cost.policy is PolicyType.PARTIAL_EXPERTS:
        policy += f", partialExperts: {{expertsPerLayer: {cost.experts}}}"
    elif cost.policy is PolicyType.SPARSE:
        repeats = "" if cost.repeats is Repeats.TRAINING else f", repeats: {cost.repeats.value}"
        policy += f", sparse: {{window: {cost.experts}{repeats}}}"
    elif cost.policy is PolicyType.SELECTIVE:
        policy += f", selective: {{experts: {cost.experts}}}"
    lines = (
        "snapshot:",
        f"  policy: {{{policy}}}",
        f"  interval: {{steps: {AUTO if auto else cost.interval_steps}}}",
    )
    return "\n".join(f"  {line}" for line in lines)


def _table(comparison: Comparison, days: float) -> Table:
    unit, scale = unit_of([max(cost.job_bytes, cost.memory_bytes) for cost in comparison.costs])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for top, below in _COLUMNS:
        head = f"{top}\n{below.format(unit=unit, days=days)}"
        table.add_column(head, justify="right", no_wrap=True)
    for cost in comparison.costs:
        fits = cost in comparison.fitting
        row = (
            name_of(cost) + (" !" if not fits else " *" if cost.objection else ""),
            _number(cost.rank_bytes / scale),
            _number(cost.job_bytes / scale),
            _number(cost.copy_s),
            "yes" if not cost.stall_s else f"+{_number(cost.stall_s)} s",
            _number(cost.protect_s) if cost.protect_s else "-",
            str(cost.interval_steps),
            _number(cost.memory_bytes / scale),
            _number(cost.lost_steps),
            _duration(cost.overhead * days * 86400),
            format_portion(cost.lost_tokens),
        )
        style = "bold green" if cost is comparison.best else None
        table.add_row(*row, style=style if fits else "red")
    return table


def _number(value: float) -> str:
    """Format a number with three digits, or with two below 1."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{_number(seconds / length_s)} {unit}"
    return f"{_number(seconds)} s"


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.3g} GB/s"
