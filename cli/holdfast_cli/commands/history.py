"""`holdfast history`: shows a job's recoveries as recorded in the catalogue in Redis."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from holdfast_cli._environment import redis_url
from holdfast_cli.commands import catalogue_places
from holdfast_cli.commands.recorded_recoveries import (
    History,
    RecoveryRecord,
    RecoveryStage,
    history_of,
)
from holdfast_cli.commands.run import chosen_cluster, find_run, key_of
from holdfast_cli.commands.show import make_table
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import read_status
from holdfast_cli.plotting import needs_matplotlib
from holdfast_core.catalogue.events import JobEvent
from holdfast_core.catalogue.records import EventView
from holdfast_core.errors import StorageError
from holdfast_core.packages import PackageGroup, needing
from holdfast_core.quantities import format_portion

TIMEOUT_S = 10.0


def history(options: argparse.Namespace) -> int:
    """Carry out `holdfast history`; returns the exit code."""
    with _catalogue(options) as (url, named):
        job, events = asyncio.run(_read(url, named))
    if options.stacks:
        print("\n".join(stacks_in(events)) or f"the catalogue has no inspection of {job}")
        if not options.plot:
            return 0
    recorded = history_of(events)
    if not recorded.recoveries:
        raise StorageError(f"the catalogue has events of {job}, but of no epoch: they are too old")
    if options.plot:
        with needs_matplotlib():
            from holdfast_cli.commands.history_plot import write_history_plot  # noqa: PLC0415
        write_history_plot(options.plot, recorded, title=job)
    if options.json:
        print(json.dumps(as_json(job, recorded), indent=1))
    elif not options.stacks:
        Console().print(history_view(job, recorded))
    return 0


@contextmanager
def _catalogue(options: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """(URL of the catalogue, key of the job or None), valid until the context ends."""
    url = options.redis or redis_url()
    if url:
        yield url, None if options.job is None else key_of(options.job)
        return
    if (cluster := chosen_cluster(options)) is not None:
        key = None if cluster.job is None else f"{cluster.namespace}.{cluster.job}"
        with catalogue_places.of_cluster(cluster) as forwarded:
            yield forwarded, key
        return
    path = find_run(options.dir, options.job)
    job = read_status(path / "status.json").local.job
    yield catalogue_places.of_run(RunDirectory(path, job)), job


async def _read(url: str, job: str | None) -> tuple[str, Sequence[EventView]]:
    """The job's key and its events. If no job is named, the catalogue must hold only one."""
    with needing("holdfast history", PackageGroup.CATALOGUE):
        from holdfast_storage.catalogue import CatalogueReader, connect_redis  # noqa: PLC0415
    client = connect_redis(url, TIMEOUT_S)
    try:
        reader = CatalogueReader(client, timeout_s=TIMEOUT_S)
        events = await reader.read_events(job) if job is not None else []
        if job is not None and events:
            return job, events
        known = await reader.jobs()
        if job is None and len(known) == 1:
            return known[0], await reader.read_events(known[0])
    finally:
        await client.aclose()
    there = f"it has {', '.join(known)}" if known else "it has none"
    if job is None:
        raise StorageError(f"name one of the jobs in the catalogue: {there}")
    raise StorageError(
        f"the catalogue has no events of {job} ({there}); it keeps those of the last seven days"
    )


def stacks_in(events: Sequence[EventView]) -> list[str]:
    """A line for each rank in each inspection of a job that hung, oldest first."""
    lines = []
    for each in events:
        event = each.event
        if event.get("event") == JobEvent.INSPECTED:
            at, epoch, rank = (event.get(name) for name in ("time", "epoch", "rank"))
            when = _clock(at) if isinstance(at, float | int) else "at a time unknown"
            lines.append(f"{when}  epoch {epoch}  rank {rank}  {event.get('detail', '')}")
    return lines


def as_json(job: str, history: History) -> dict[str, Any]:
    """The history as JSON values; times are seconds since the Unix epoch."""
    return {
        "job": job,
        "ended_at": history.ended_at,
        "counts": {event.value: count for event, count in sorted(history.counts.items())},
        "recoveries": [
            {
                "epoch": each.epoch,
                "noticed_at": each.noticed_at,
                "lost_ranks": each.lost_ranks,
                "seconds": {stage.value: each.seconds(stage) for stage in RecoveryStage},
                "line": None if each.line is None else str(each.line),
                "reason": each.reason,
                "live": each.live,
                "stayed": each.stayed,
                "rebuilt": sorted(each.rebuilt),
                "loaded": sorted(each.loaded),
                "loss": None if each.loss is None else asdict(each.loss),
            }
            for each in history.recoveries
        ],
    }


def history_view(job: str, history: History) -> RenderableType:
    """One line for each recovery, and what else happened to the job."""
    lossy = any(each.loss is not None for each in history.recoveries)
    stages = [stage.value for stage in RecoveryStage]
    titles = ["when", "epoch", "lost", "stayed", *stages, "from", "repair"]
    table = make_table(*titles, *(("tokens lost",) if lossy else ()))
    for each in history.recoveries:
        table.add_row(*_cells(each), *((_loss(each),) if lossy else ()))
    count = sum(not each.is_start for each in history.recoveries)
    noun = "recovery" if count == 1 else "recoveries"
    ended = f", ended {_clock(history.ended_at)}" if history.ended_at is not None else ""
    head = Text.assemble((job, "bold"), f"  {count} {noun}{ended}")
    others = ", ".join(
        f"{count} × {event.value}" for event, count in sorted(history.counts.items())
    )
    note = "seconds from the first sign of a loss until the last node or rank was done"
    return Group(head, table, Text(note, style="dim"), *([Text(others)] if others else []))


def _cells(each: RecoveryRecord) -> list[str]:
    seconds = [each.seconds(stage) for stage in RecoveryStage]
    repair = [f"{len(ranks)} {how}" for ranks, how in _repairs(each) if ranks]
    return [
        _clock(each.noticed_at),
        str(each.epoch),
        _lost(each),
        str(len(each.stayed)) if each.stayed else "-",
        *("-" if one is None else f"{one:.1f}" for one in seconds),
        "live" if each.live else "-" if each.line is None else str(each.line),
        ", ".join(repair) or "-",
    ]


def _lost(each: RecoveryRecord) -> str:
    if each.is_start:
        return "(start)"
    if not each.lost_ranks:
        return "-"
    first, *others = each.lost_ranks
    return f"rank {first}" + (f" + {len(others)}" if others else "")


def _repairs(each: RecoveryRecord) -> tuple[tuple[list[int], str], ...]:
    return (each.rebuilt, "rebuilt"), (each.loaded, "from storage")


def _loss(each: RecoveryRecord) -> str:
    if each.loss is None:
        return "-"
    more = f", K {each.loss.k_before} → {each.loss.k_after}"
    return format_portion(each.loss.plt) + (more if each.loss.k_before != each.loss.k_after else "")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
