"""Report of a chaos run: `report.json`, and a page with a picture of it for people.

This module only computes and shows; it breaks nothing.
"""

from __future__ import annotations

import html
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_culprits import Culprits
from chaos_pictures import clock, colour_of, recoveries, svg, timeline
from chaos_run import Chaos, Fault

SLOWEST = 8
"""Number of recoveries that are shown one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Summary of all faults of one kind."""

    kind: str
    lane: str
    count: int
    while_recovering: int
    from_parity: int
    from_storage: int
    median_s: float
    worst_s: float
    worst_lost_steps: int
    violations: int


def summarise(faults: Sequence[Fault]) -> list[Row]:
    """One row for each kind, in alphabetical order."""
    rows = []
    for kind in sorted({fault.kind for fault in faults}):
        mine = [fault for fault in faults if fault.kind == kind]
        seconds = [fault.seconds for fault in mine if fault.seconds is not None]
        rows.append(
            Row(
                kind=kind,
                lane=mine[0].lane,
                count=len(mine),
                while_recovering=sum(fault.while_recovering for fault in mine),
                from_parity=sum("parity" in fault.source for fault in mine),
                from_storage=sum("storage" in fault.source for fault in mine),
                median_s=statistics.median(seconds) if seconds else 0.0,
                worst_s=max(seconds, default=0.0),
                worst_lost_steps=max((f.lost_steps or 0 for f in mine), default=0),
                violations=sum(bool(fault.violation) for fault in mine),
            )
        )
    return rows


def verdict(chaos: Chaos) -> str:
    """The outcome in one line."""
    held = "every invariant held" if not chaos.violations else "INVARIANTS DID NOT HOLD"
    return (
        f"{len(chaos.faults)} faults in {chaos.rounds} rounds: {len(chaos.violations)} violations, "
        f"{chaos.wrong_bytes} wrong bytes in {chaos.restores} restores and {chaos.sets} stored "
        f"sets, {chaos.fenced} writes of older epochs refused; {held}"
    )


def write(chaos: Chaos, directory: Path, culprits: Culprits) -> None:
    """Write `report.json`, `report.html` and `timeline.png` into the directory."""
    rows = summarise(chaos.faults)
    document = {
        "seed": chaos.seed,
        "faults": len(chaos.faults),
        "violations": len(chaos.violations),
        "wrong_bytes": chaos.wrong_bytes,
        "rounds": chaos.rounds,
        "seconds": round(chaos.ended_s, 1),
        "restores": chaos.restores,
        "stored_sets": chaos.sets,
        "fenced": chaos.fenced,
        "machine": f"{platform.machine()}, Linux {platform.release()}",
        "what_did_not_hold": chaos.violations,
        "kinds": [asdict(row) for row in rows],
        "timeline": [asdict(fault) for fault in chaos.faults],
        "culprits": culprits.document(),
    }
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "report.html").write_text(_page(chaos, rows, culprits))
    if chaos.faults:
        picture = timeline(chaos.faults, chaos.ended_s)
        picture.savefig(directory / "timeline.png", dpi=100, facecolor="white")


# --- the page -------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff;
       max-width: 1180px; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { margin-bottom: 0; } h1.good { color: #1a7f37; } .sub { color: #6b7280; margin-top: .2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.6rem 0; }
.tile { flex: 1; min-width: 7rem; border: 1px solid #e5e7eb; border-radius: 10px;
        padding: .7rem 1rem; }
.tile b { display: block; font-size: 1.7rem; font-variant-numeric: tabular-nums; }
.tile span { color: #6b7280; } .good b { color: #1a7f37; } .bad b, .bad { color: #d4002a; }
.violation { border-left: 4px solid #d4002a; padding: .1rem 1rem; margin: 1rem 0;
             background: #fff5f6; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .28rem .6rem; border-bottom: 1px solid #eceef1; }
th:first-child, td:first-child, td.text, .faults th:nth-child(n+3):nth-child(-n+5)
{ text-align: left; } th { color: #6b7280; font-weight: 500; }
i { display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin-right: .5rem; }
"""


def _page(chaos: Chaos, rows: Sequence[Row], culprits: Culprits) -> str:
    held = not chaos.violations
    pictures = (
        "<h2>The run</h2><p class=sub>Read it like a page of text: each row is a stretch of time, "
        "each dot a fault, and the bar after it lasts until all ranks had restored. Where bars lie "
        "above each other, faults struck together, or while a recovery ran.</p>"
        f"{svg(timeline(chaos.faults, chaos.ended_s))}"
        f"<h2>Recoveries</h2>{svg(recoveries(chaos.faults))}{_slowest(chaos.faults)}"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>Chaos, seed {chaos.seed}</title><style>{_STYLE}</style>"
        f"<h1 class={'good' if held else 'bad'}>Chaos: "
        f"{'every invariant held' if held else 'invariants did not hold'}</h1>"
        f"<p class=sub>seed {chaos.seed}, {clock(chaos.ended_s)} minutes; "
        f"repeat with <code>make chaos ARGS=&quot;--seed {chaos.seed}&quot;</code></p>"
        f"<div class=tiles>{_tiles(chaos)}</div>{_violations(chaos)}"
        f"{pictures if chaos.faults else ''}{_table(rows)}{_culprits(culprits)}</html>\n"
    )


def _violations(chaos: Chaos) -> str:
    """The violations, each with the faults of its round and where to look further."""
    if not chaos.violations:
        return ""
    shown = []
    for number, text in enumerate(chaos.violations, start=1):
        last = next((f for f in chaos.faults if f.violation and f.violation in text), None)
        round_of = [f for f in chaos.faults if last is not None and f.round == last.round]
        shown.append(
            f"<div class=violation><p><b>{number}.</b> {html.escape(text)}</p>{_list(round_of)}"
            f"<p>What daemons held and logged: <code>violation-{number}/</code> beside this page; "
            f"<code>violation.txt</code> first.</p></div>"
        )
    return f"<h2>What did not hold</h2>{''.join(shown)}"


def _slowest(faults: Sequence[Fault]) -> str:
    recovered = [fault for fault in faults if fault.seconds is not None]
    slowest = sorted(recovered, key=lambda fault: -(fault.seconds or 0.0))[:SLOWEST]
    return f"<h3>The slowest</h3>{_list(slowest)}"


def _list(faults: Sequence[Fault]) -> str:
    heads = ("at", "round", "fault", "what", "restored from", "steps lost", "seconds")
    body = "".join(
        f"<tr><td>{clock(fault.time_s)}</td><td>{fault.round}</td>"
        f"<td class=text><i style='background:{colour_of(fault.lane)}'></i>{fault.kind}</td>"
        f"<td class=text>{html.escape(fault.target)}"
        f"{', while recovering' if fault.while_recovering else ''}</td>"
        f"<td class=text>{fault.source or '–'}</td>"
        f"<td>{'–' if fault.lost_steps is None else fault.lost_steps}</td>"
        f"<td>{'–' if fault.seconds is None else f'{fault.seconds:.2f}'}</td></tr>"
        for fault in faults
    )
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"<table class=faults><tr>{head}</tr>{body}</table>"


def _tiles(chaos: Chaos) -> str:
    seconds = [fault.seconds for fault in chaos.faults if fault.seconds is not None]
    good, bad = "tile good", "tile bad"
    tiles = (
        ("tile", f"{len(chaos.faults):,}", "faults of real processes"),
        (bad if chaos.violations else good, str(len(chaos.violations)), "violations"),
        (bad if chaos.wrong_bytes else good, str(chaos.wrong_bytes), "wrong bytes"),
        ("tile", f"{chaos.restores:,}", "restores compared"),
        ("tile", f"{chaos.sets:,}", "stored sets compared"),
        ("tile", f"{chaos.fenced:,}", "old writers refused"),
        ("tile", f"{statistics.median(seconds) if seconds else 0:.2f} s", "median recovery"),
        ("tile", f"{max(seconds, default=0):.1f} s", "worst recovery"),
    )
    return "".join(
        f"<div class='{kind}'><b>{value}</b><span>{what}</span></div>"
        for kind, value, what in tiles
    )


def _culprits(culprits: Culprits) -> str:
    """How often the rank that held up or spoilt a job was named; empty if none was to be."""
    if not culprits.faults:
        return ""
    heads = ("fault of a rank", "culprit named rightly", "another one named", "median s")
    body = "".join(
        f"<tr><td>{row.kind}</td><td>{row.right} of {row.count}</td><td>{row.wrong}</td>"
        f"<td>{row.median_s:.1f}</td></tr>"
        for row in culprits.rows()
    )
    missed = "".join(
        f"<p class={'bad' if fault.outcome == 'wrong' else 'sub'}>{fault.kind} of "
        f"{fault.culprit}, {fault.outcome}: {html.escape(fault.text)}</p>"
        for fault in culprits.missed
    )
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f"<h2>Culprits</h2><p class=sub>{culprits.verdict}. Of a job to which nothing was done, "
        f"nothing is to be said.</p><table><tr>{head}</tr>{body}</table>{missed}"
    )


def _table(rows: Sequence[Row]) -> str:
    heads = (
        "fault", "count", "while recovering", "from parity", "from storage", "median s", "worst s",
        "most steps lost", "violations",
    )  # fmt: skip
    body = "".join(
        f"<tr><td><i style='background:{colour_of(row.lane)}'></i>{row.kind}</td>"
        f"<td>{row.count}</td><td>{row.while_recovering}</td><td>{row.from_parity}</td><td>{row.from_storage}</td>"
        f"<td>{row.median_s:.2f}</td><td>{row.worst_s:.2f}</td><td>{row.worst_lost_steps}</td>"
        f"<td>{row.violations}</td></tr>"
        for row in rows
    )
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"<h2>By kind</h2><table><tr>{head}</tr>{body}</table>"
