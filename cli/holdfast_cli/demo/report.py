"""Results of the demo: figures of each fault, the table, the plot and the JSON report.

Steps and times come from the trainer's own log, because it records what training really did. The
control loop adds when it decided, and where state came from. This module only computes and formats.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from holdfast_cli.local import Recovery, TimedEvent
from holdfast_core.job.snapshots import PolicyType
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.views import EventReason

UNDISTURBED, DISTURBED, FAULT, FEWER = "#8a8f98", "#1f6feb", "#c0392b", "#e0a030"
SOURCES = {
    RestoreSource.LIVE: "live",
    RestoreSource.LOCAL: "memory",
    RestoreSource.PARITY: "parity",
    RestoreSource.STORAGE: "storage",
    RestoreSource.NONE: "nothing",
}
_OF_DAEMONS = (EventReason.DAEMON_EXITED, EventReason.DAEMON_SILENT, EventReason.DAEMON_BACK)
"""Events that show a fault which led to no recovery."""
PACKAGES = ("holdfast", "torch", "grpcio", "numpy")
LOSS_TOLERANCE = 0.05
"""Fraction by which the final loss may differ where snapshots leave experts out."""
LOSS_STEPS = 10
"""Number of last steps whose mean loss is the final loss: single batches vary too much."""


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the trainer's log: one completed step."""

    step: int
    loss: float
    """Training loss in nats per byte."""
    time: float
    """Seconds since the Unix epoch."""
    epoch: int
    lost: float = 0.0
    """Portion of all routed tokens that recoveries have lost to experts (PLT)."""
    ranks: int = 0
    """Number of ranks that trained."""


_LOGGED_STEP = msgspec.json.Decoder(LoggedStep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Injected:
    """A fault that was injected."""

    kind: str
    what: str
    """Process or node that was killed, in words."""
    step: int
    """Last step that training had completed."""
    epoch: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """Consequences of a fault. A figure is None where there is nothing to measure."""

    kind: str
    what: str
    step: int
    survived: bool
    """Whether training completed a step after the fault."""
    restarted: bool
    """False when training went on and nothing had to be restored."""
    restored_step: int | None
    lost_steps: int | None
    detected_seconds: float | None
    recovery_seconds: float | None
    """Seconds from the fault to the end of the next step."""
    source: RestoreSource


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldReport:
    """Consecutive steps that the same number of ranks trained, and that no recovery undid."""

    ranks: int
    first: int
    last: int

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """Report of the whole demo."""

    final_state_sha256: str
    fault_free_sha256: str
    equal: bool
    steps: int
    nodes: int
    spares: int
    duration_seconds: float
    faults: tuple[FaultReport, ...]
    versions: dict[str, str]
    policy: str = "Full"
    loss_difference: float | None = None
    """Difference of the loss over the last steps, disturbed against undisturbed, as a fraction."""
    lost_tokens: float = 0.0
    """Portion of all routed tokens that recoveries lost to experts (PLT)."""
    worlds: tuple[WorldReport, ...] = ()
    """Numbers of ranks that trained, one after the other. The run without faults had the same."""

    @property
    def exact(self) -> bool:
        """Whether the policy promises the bytes of the undisturbed run."""
        return self.policy in (PolicyType.FULL, PolicyType.SPARSE)

    @property
    def success(self) -> bool:
        survived = bool(self.final_state_sha256) and all(f.survived for f in self.faults)
        if self.exact:
            return survived and self.equal
        return survived and abs(self.loss_difference or 0.0) <= LOSS_TOLERANCE


def read_log(path: Path) -> list[LoggedStep]:
    """The complete lines of a trainer's log; none while there is no log."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [_LOGGED_STEP.decode(line) for line in lines]


def account(
    fault: Injected,
    log: Sequence[LoggedStep],
    recoveries: Sequence[Recovery],
    events: Sequence[TimedEvent],
) -> FaultReport:
    """Report the consequences of `fault`. `log`, `recoveries` and `events` end before the next
    fault."""
    caused = [r for r in recoveries if r.decided_at >= fault.time]
    after = [line for line in log if line.time > fault.time]
    if caused:
        after = [line for line in after if line.epoch >= caused[-1].epoch]
    first = after[0] if after else None
    noticed = [e.time for e in events if e.time >= fault.time and e.reason in _OF_DAEMONS]
    detected_at = caused[0].decided_at if caused else min(noticed, default=None)
    restored: int | None = fault.step
    lost: int | None = 0
    if caused:
        before = max((line.step for line in log if line.epoch <= fault.epoch), default=0)
        restored = None if first is None else first.step - 1
        lost = None if restored is None else max(0, before - restored)
    return FaultReport(
        kind=fault.kind,
        what=fault.what,
        step=fault.step,
        survived=first is not None,
        restarted=bool(caused),
        restored_step=restored,
        lost_steps=lost,
        detected_seconds=None if detected_at is None else round(detected_at - fault.time, 3),
        recovery_seconds=None if first is None else round(first.time - fault.time, 3),
        source=caused[-1].source if caused else RestoreSource.LOCAL,
    )


def worlds_of(log: Sequence[LoggedStep]) -> tuple[WorldReport, ...]:
    """Numbers of ranks that trained the steps that count. If a step was repeated after a recovery,
    its last execution counts."""
    newest = {line.step: line.ranks for line in log}
    worlds: list[WorldReport] = []
    for step, ranks in sorted(newest.items()):
        if worlds and worlds[-1].ranks == ranks:
            worlds[-1] = replace(worlds[-1], last=step)
        else:
            worlds.append(WorldReport(ranks=ranks, first=step, last=step))
    return tuple(worlds)


def history(report: DemoReport) -> str:
    """The worlds that were compared, in words."""
    worlds = [f"{w.ranks} ranks in steps {w.first} to {w.last}" for w in report.worlds]
    text = f"Both runs had {', '.join(worlds)}"
    if len(report.worlds) == 2:
        text += "; the node was not back before the end"
    return f"{text}. The one without faults used no Holdfast."


def loss_difference(
    undisturbed: Sequence[LoggedStep], disturbed: Sequence[LoggedStep]
) -> float | None:
    """Excess of the second run's final loss over the first run's, as a fraction of the first."""
    means = []
    for log in (undisturbed, disturbed):
        newest = {line.step: line.loss for line in log}
        last = [newest[step] for step in sorted(newest)[-LOSS_STEPS:]]
        if not last:
            return None
        means.append(sum(last) / len(last))
    return round(means[1] / means[0] - 1, 4)


def partial_verdict(report: DemoReport) -> str:
    """Verdict in words for a policy with which bytes need not be equal."""
    difference = report.loss_difference
    text = "no loss to compare" if difference is None else f"{difference:+.1%} in the final loss"
    colour = "green" if report.success else "red"
    return (
        f"[bold {colour}]{text}[/], with {report.lost_tokens:.2%} of all tokens lost to experts "
        f"that returned to older versions"
    )


def versions() -> dict[str, str]:
    """Versions and machine with which the figures were measured."""
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def fault_table(faults: Sequence[FaultReport]) -> Table:
    """Table of the faults, one per row."""
    shown = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    shown.add_column("killed", no_wrap=True)
    for name in ("at step", "noticed", "restored", "lost", "next step"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("from", no_wrap=True)
    for fault in faults:
        shown.add_row(
            fault.what,
            str(fault.step),
            _seconds(fault.detected_seconds),
            _number(fault.restored_step) if fault.restarted else "went on",
            _number(fault.lost_steps),
            _seconds(fault.recovery_seconds) if fault.survived else "never",
            SOURCES.get(fault.source, fault.source),
        )
    return shown


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def write(
    report: DemoReport,
    path: Path,
    *,
    undisturbed: Sequence[LoggedStep],
    disturbed: Sequence[LoggedStep],
    injected: Sequence[Injected],
) -> Path:
    """Write the JSON report at `path` and the plot beside it; returns the plot's path."""
    write_json(path, asdict(report))
    picture = path.with_suffix(".png")
    plot(report, undisturbed, disturbed, injected).savefig(picture, dpi=150)
    return picture


def write_json(path: Path, report: object) -> None:
    """Write a report for scripts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def plot(
    report: DemoReport,
    undisturbed: Sequence[LoggedStep],
    disturbed: Sequence[LoggedStep],
    injected: Sequence[Injected],
) -> Figure:
    """Plot loss and step over time for both runs, with the faults marked. Time starts at each run's
    first completed step."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, step = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    verdict = "the same bytes at the end" if report.equal else "DIFFERENT bytes at the end"
    figure.suptitle(
        f"A Mixture-of-Experts job on {report.nodes} nodes and {report.spares} spare: {verdict}"
    )
    for axes, field, label in ((loss, "loss", "loss (nats per byte)"), (step, "step", "step")):
        _curve(axes, undisturbed, field, UNDISTURBED, "run without faults", 2.6)
        _curve(axes, disturbed, field, DISTURBED, "run with faults", 1.4)
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if disturbed:
        _shade_fewer((loss, step), disturbed)
        _mark(loss, step, report.faults, injected, disturbed[0].time)
    step.set_xlabel("seconds since the first completed step")
    if undisturbed or disturbed:
        loss.legend(loc="upper right", frameon=True, fontsize=9)
    return figure


def _curve(
    axes: Axes, log: Sequence[LoggedStep], field: str, colour: str, label: str, width: float
) -> None:
    """Draw one run. Each epoch is a line of its own, so that a recovery shows as a gap."""
    for number, epoch in enumerate(sorted({line.epoch for line in log})):
        lines = [line for line in log if line.epoch == epoch]
        axes.plot(
            [line.time - log[0].time for line in lines],
            [getattr(line, field) for line in lines],
            color=colour,
            linewidth=width,
            label=None if number else label,
        )


def _shade_fewer(both: Sequence[Axes], log: Sequence[LoggedStep]) -> None:
    """Shade the time in which fewer ranks trained."""
    most = max(line.ranks for line in log)
    fewer = [line for line in log if line.ranks < most]
    if fewer:
        since, until = fewer[0].time - log[0].time, fewer[-1].time - log[0].time
        for number, axes in enumerate(both):
            label = None if number else f"{fewer[0].ranks} of {most} ranks"
            axes.axvspan(since, until, color=FEWER, alpha=0.25, label=label)


def _mark(
    loss: Axes,
    step: Axes,
    faults: Sequence[FaultReport],
    injected: Sequence[Injected],
    start: float,
) -> None:
    """Mark each fault with a line, a shade until the next step, and an entry in the legend."""
    for number, (done, fault) in enumerate(zip(injected, faults, strict=True), start=1):
        at = done.time - start
        for axes in (loss, step):
            axes.axvline(at, color=FAULT, linestyle="--", linewidth=1)
            axes.axvspan(at, at + (fault.recovery_seconds or 0.0), color=FAULT, alpha=0.12)
        loss.annotate(
            str(number),
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=FAULT,
            fontweight="bold",
        )
        loss.plot([], [], color=FAULT, linestyle="--", linewidth=1, label=f"{number}: {fault.what}")
