"""The report of `holdfast check`, as text and as JSON. Decides nothing."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any

from holdfast_core.job.snapshots import DEFAULT_GROUP_SIZE, DEFAULT_LARGE_GROUP_SIZE
from holdfast_core.protection.budget import SLOTS_AUTO, NodeMemory, predict
from holdfast_core.restart_check import Comparison, Record, captured_by
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.membership import Redundancy

COLUMNS = 98
_ROLES = {
    TensorRole.COMPUTE: "parameters",
    TensorRole.MASTER: "float32 masters",
    TensorRole.OPTIMIZER: "optimizer states",
    TensorRole.BUFFER: "buffers",
}
_REDUNDANCIES = (
    (Redundancy.NONE, 1),
    (Redundancy.RAIM5, DEFAULT_GROUP_SIZE),
    (Redundancy.RAIM6, DEFAULT_LARGE_GROUP_SIZE),
)
"""Each kind of redundancy with the nodes of a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The outcome of a check."""

    script: str
    step: int
    """Step that was saved and restored."""
    first: tuple[Record, ...]
    """Records of the first processes, by rank."""
    comparison: Comparison
    slot_bytes: int
    """Bytes of one rank's snapshot."""
    traceback: str
    """Traceback of what a second process raised; empty if none did."""


def text_report(report: CheckReport) -> str:
    """The report for a reader."""
    lines = []
    for title, content in (
        ("captured", _captured(report)),
        ("not captured", _not_captured(report.comparison)),
        ("what a restart changes", _changes(report)),
        ("memory of a node", _memory(report)),
        ("verdict", [_verdict(report)]),
    ):
        lines += [title, *(_wrapped(line) for line in content), ""]
    return "\n".join(lines[:-1])


def _wrapped(line: str) -> str:
    """A line of a section. Sentences get several lines; columns and tracebacks stay as they are."""
    if len(line) <= COLUMNS or line.startswith(" "):
        return f"  {line}"
    return textwrap.fill(line, COLUMNS, initial_indent="  ", subsequent_indent="      ")


def _captured(report: CheckReport) -> list[str]:
    ranks = len(report.first)
    lines = [
        f"{_ROLES.get(TensorRole(kind.role), kind.role):<17} {kind.tensors:>7,} tensors "
        f"{kind.nbytes:>19,} bytes"
        for kind in captured_by(report.first)
    ]
    if ranks > 1:
        lines.append(f"(tensors of all {ranks} processes)")
    return [*lines, *report.first[0].stepped.extras]


def _not_captured(comparison: Comparison) -> list[str]:
    lines = [f"{name}: changed by a restart" for name in comparison.lost]
    lines += [f"{name}: the same after a restart" for name in comparison.same]
    lines += [f"{name}: see the data below" for name in comparison.loaders]
    return lines or ["nothing with a state of its own was found"]


def _changes(report: CheckReport) -> list[str]:
    comparison = report.comparison
    lines = [*comparison.changes]
    if comparison.same_data:
        lines.append("not the data: the step has the same inputs")
    if comparison.same_data is None and comparison.comes_back:
        lines.append("perhaps the data: the model's forward was not called in the step")
    if comparison.comes_back:
        lines.append("not the state: all of it is the same to the bit after one more step")
    return [*lines, *report.traceback.splitlines()]


def _memory(report: CheckReport) -> list[str]:
    ranks = len(report.first)
    heads = f"bytes with {ranks} such process{'es' if ranks > 1 else ''}"
    rows: list[tuple[str, ...]] = [(heads, *(f"{slots} slots" for slots in SLOTS_AUTO))]
    for redundancy, nodes in _REDUNDANCIES:
        name = "no parity" if nodes == 1 else f"{redundancy.value}, groups of {nodes} nodes"
        needed = [_node(report, redundancy, nodes, slots) for slots in SLOTS_AUTO]
        rows.append((name, *(f"{node.total_bytes:,}" for node in needed)))
    return [f"{name:<26}" + "".join(f"{cost:>20}" for cost in costs) for name, *costs in rows]


def _node(report: CheckReport, redundancy: Redundancy, nodes: int, slots: int) -> NodeMemory:
    ranks = len(report.first)
    groups = [range(nodes)] if nodes > 1 else []
    return predict(
        [report.slot_bytes] * (ranks * nodes), groups, ranks, slots=slots, redundancy=redundancy
    )[0]


def _verdict(report: CheckReport) -> str:
    if report.comparison.comes_back:
        return (
            f"{report.script} comes back: killed after step {report.step + 1}, it restored step "
            f"{report.step} and made the next one again to the bit"
        )
    return (
        f"{report.script} does not come back as it was: after a restart training continues with "
        f"other state or data, as listed above"
    )


def json_report(report: CheckReport) -> str:
    """The report for a program."""
    document: dict[str, Any] = {
        "script": report.script,
        "comesBack": report.comparison.comes_back,
        "step": report.step,
        "processes": len(report.first),
        "captured": {
            "tensors": {
                kind.role: {"number": kind.tensors, "bytes": kind.nbytes}
                for kind in captured_by(report.first)
            },
            "others": list(report.first[0].stepped.extras),
        },
        "notCaptured": {
            "changed": list(report.comparison.lost),
            "same": list(report.comparison.same),
            "loaders": list(report.comparison.loaders),
        },
        "changes": list(report.comparison.changes),
        "sameData": report.comparison.same_data,
        "traceback": report.traceback,
        "nodeMemory": [
            {
                "redundancy": redundancy.value,
                "groupSize": nodes,
                "slots": slots,
                "arenaBytes": node.arena_bytes,
                "parityBytes": node.parity_bytes,
                "totalBytes": node.total_bytes,
            }
            for redundancy, nodes in _REDUNDANCIES
            for slots in SLOTS_AUTO
            for node in [_node(report, redundancy, nodes, slots)]
        ],
    }
    return json.dumps(document, indent=1)
