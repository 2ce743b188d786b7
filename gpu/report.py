"""Results of a session as records, and the records as Markdown.

    python -m gpu.report RESULTS.jsonl    # keep it, and put its figures into docs/performance.md

The document's figures come from the kept file alone (a test compares them), so none can be typed.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpu import ROOT

KEPT = ROOT / "gpu" / "results.jsonl"
"""The results that the document shows; absent until a session ran on a device."""
MACHINE = "machine"
"""Step of the record that describes the machine."""
DOCUMENT = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"

NEVER = """\
No GPU has been measured yet: everything above ran on CPUs. `make gpu-bundle` makes what a CUDA
machine without a network needs; `gpu/run.sh --out DIR` measures there, and `python -m gpu.report
DIR/results.jsonl` puts its figures here ([how](testing.md#on-a-bare-cuda-machine))."""

_MET = {True: "yes", False: "**no**", None: ""}


class State(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    SKIPPED = "skipped"
    """Nothing failed and nothing ran: all of it needs what this machine lacks."""
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    MISSING = "missing"
    """Its file is not in the bundle."""
    NOT_REACHED = "not reached"
    """The session's deadline came first."""


SOUND = frozenset({State.PASSED, State.SKIPPED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of `results.jsonl`: the machine, or a step."""

    step: str
    state: State
    seconds: float = 0.0
    facts: Mapping[str, object] = field(default_factory=dict)
    """The machine, or facts that a module of figures records about its measurements."""
    tests: Sequence[Mapping[str, Any]] = ()
    """`test`, `outcome`, `seconds` and `reason` of each."""
    figures: Sequence[Mapping[str, Any]] = ()
    """`name`, `value`, `unit`, `floor`, `floor_name`, `ratio`, `goal` and `met` of each."""
    skipped: Sequence[str] = ()
    """What a module of figures left out, and why."""
    failed: Sequence[str] = ()
    """What a module of figures could not measure, and the error."""
    tail: str = ""
    """The end of what an unsound step printed."""

    def line(self) -> str:
        return json.dumps(asdict(self))


def read(path: Path) -> list[Record]:
    """The records of a `results.jsonl`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Record(**{**found, "state": State(found["state"])}) for found in map(json.loads, lines)]


def outcomes_by_test(outcomes: Path, begin: int) -> dict[str, dict[str, Any]]:
    """The last outcome of each test, from the byte `begin` of `outcomes` on.

    A test that failed before its teardown passed has failed; a line cut off by a crash is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    with outcomes.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    for line in lines:
        try:
            new = json.loads(line)
        except ValueError:
            continue
        old = found.get(new["test"])
        if old is None or old["outcome"] != "failed":
            found[new["test"]] = new
    return found


def unfinished(tests: Mapping[str, Mapping[str, Any]]) -> int:
    """Number of tests that began and whose process ended before they did."""
    return sum(test["outcome"] == "started" for test in tests.values())


def state_of_tests(ended: State, tests: Iterable[Mapping[str, Any]]) -> State:
    """State of a step of tests whose last process ended as `ended`."""
    outcomes = {test["outcome"] for test in tests}
    if ended is State.TIMED_OUT:
        return ended
    if "started" in outcomes:
        return State.CRASHED
    if ended not in SOUND:
        return ended
    if "failed" in outcomes:
        return State.FAILED
    return State.PASSED if "passed" in outcomes else State.SKIPPED


def summary(records: Sequence[Record]) -> str:
    """What a person wants to know first of a session, as Markdown. Failures come last: it is
    printed to a terminal, or to a log of which some keep only the end."""
    parts = ["# GPU session", _steps(records), _figures(records)]
    parts += [_skipped(records), _machine(records)]
    parts += [_bad(record) for record in records if record.state not in SOUND]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(records: Sequence[Record]) -> str:
    """What the document shows of the kept results."""
    if not records:
        return NEVER
    skipped = _list("Figures skipped", _skipped_figures(records))
    return "\n\n".join([_machine(records), _steps(records), _figures(records), skipped]).strip()


def _steps(records: Sequence[Record]) -> str:
    lines = ["| step | | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for record in records:
        outcomes = [test["outcome"] for test in record.tests]
        counts = [
            outcomes.count("passed") + len(record.figures),
            len(outcomes)
            - outcomes.count("passed")
            - outcomes.count("skipped")
            + len(record.failed),
            outcomes.count("skipped") + len(record.skipped),
        ]
        state = record.state if record.state in SOUND else f"**{record.state.upper()}**"
        cells = [f"`{record.step}`", state, *map(str, counts), f"{record.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(records: Sequence[Record]) -> str:
    return "\n\n".join(_table(record) for record in records if record.figures)


def _table(record: Record) -> str:
    facts = ", ".join(f"{name} {_cell(value)}" for name, value in record.facts.items())
    lines = [_wrapped(f"`{record.step}`: {facts}" if facts else f"`{record.step}`"), ""]
    lines += ["| figure | measured | floor | ratio | goal | met |", "|---|---|---|---|---|---|"]
    for row in record.figures:
        unit, met = row.get("unit", ""), _MET[row.get("met")]
        floor = f"{_cell(row.get('floor'), unit)} {row.get('floor_name') or ''}".strip()
        cells = [str(row["name"]), _cell(row["value"], unit), floor, _cell(row.get("ratio"))]
        lines.append(f"| {' | '.join([*cells, _cell(row.get('goal')), met])} |")
    return "\n".join(lines)


def _cell(value: object, unit: str = "") -> str:
    if value is None:
        return ""
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{number} {unit}".strip().replace("|", "\\|")


def _bad(record: Record) -> str:
    parts = [f"## {record.step}: {record.state}"]
    for test in record.tests:
        if test["outcome"] not in {"passed", "skipped"}:
            outcome = "ended the process" if test["outcome"] == "started" else test["outcome"]
            parts += [f"`{test['test']}` {outcome}", _block(test["reason"])]
    parts += [f"`{text}`" for text in record.failed]
    if record.state is not State.FAILED or len(parts) == 1:  # else the reasons are the end
        parts.append(_block(record.tail))
    return "\n\n".join(part for part in parts if part)


def _block(text: str) -> str:
    return f"```\n{text.strip()}\n```" if text.strip() else ""


def _skipped(records: Sequence[Record]) -> str:
    tests = [
        f"- `{test['test']}`: {test['reason']}"
        for record in records
        for test in record.tests
        if test["outcome"] == "skipped"
    ]
    return _list("Skipped", [*tests, *_skipped_figures(records)])


def _skipped_figures(records: Sequence[Record]) -> list[str]:
    return [_wrapped(f"- `{record.step}`: {text}") for record in records for text in record.skipped]


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *lines]) if lines else ""


def _wrapped(line: str) -> str:
    """Wrap a line of Markdown as the documents are."""
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _machine(records: Sequence[Record]) -> str:
    facts = [record.facts for record in records if record.step == MACHINE]
    lines = [f"- {name}: {value}" for found in facts for name, value in found.items()]
    return _list("Machine", lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("results", type=Path, metavar="RESULTS.jsonl")
    results = parser.parse_args(arguments).results
    if not any(record.facts.get("cuda_devices") for record in read(results)):
        print(f"{results} was measured without a CUDA device; nothing was kept", file=sys.stderr)
        return 1
    # What a step printed has the paths of that machine.
    kept = [replace(record, tail="").line() for record in read(results)]
    KEPT.write_text("\n".join([*kept, ""]), encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    shown = f"{before}{BEGIN}\n\n{section(read(KEPT))}\n\n{END}{after}"
    DOCUMENT.write_text(shown, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
