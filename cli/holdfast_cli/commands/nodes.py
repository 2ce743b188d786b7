"""`holdfast nodes`: shows which nodes have failed, and clears the record of a repaired one."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_cli.commands.run import chosen_cluster, find_run
from holdfast_cli.commands.show import make_table
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.node_record import read_record, write_record
from holdfast_core.errors import InvalidJobError, StorageError, UnreachableError
from holdfast_core.node_failures import (
    HALF_LIFE_S,
    IN_WORDS,
    NodeFailure,
    Rating,
    Record,
    age_in_words,
    excused,
    ratings,
)
from holdfast_core.suspect_nodes import Mark
from holdfast_operator.kube.client.resources import CONFIG_MAPS, NODES

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api

CLOSED: Mapping[Mark, str] = {
    Mark.TAINT: "tainted",
    Mark.CORDON: "cordoned",
}
"""What the operator has done to a node, in words."""
SHOWN = 3
"""Failures that are shown of each node, the newest."""
TRIES = 5
"""Times that a node is forgotten while the operator writes the record as well."""


def nodes(options: argparse.Namespace) -> int:
    """Carry out `holdfast nodes`; returns the exit code.

    Raises:
        InvalidJobError: when a node to be forgotten has no record.
        StorageError: when there is no such run, or its record cannot be read or written.
        UnreachableError: when others write the record all the time.
        ApiError: when there is no record, or the API server refuses.
    """
    cluster = chosen_cluster(options)
    closed: Mapping[str, str] = {}
    if cluster is not None:
        record, half_life_s, problems = call_cluster(cluster, _of_cluster)
        closed = call_cluster(cluster, _closed)
    else:
        run = find_run(options.dir, options.job)
        record, problems = read_run(run, options.forget)
        half_life_s = HALF_LIFE_S
    for problem in problems:
        Console(stderr=True).print(f"not understood, and ignored: {problem}", markup=False)
    now = time.time()
    if options.json:
        print(json.dumps(as_json(record, now, half_life_s, closed), indent=1))
        return 0
    for node in options.forget:
        print(f"the failures of {node} are forgotten; it is chosen like any clean node")
    Console().print(nodes_view(record, now, half_life_s, closed))
    return 0


# --- reading and forgetting -----------------------------------------------------------------------


async def _of_cluster(
    api: Api, options: argparse.Namespace
) -> tuple[Record, float, tuple[str, ...]]:
    from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError  # noqa: PLC0415
    from holdfast_operator.kube.cluster.node_record import (  # noqa: PLC0415
        half_life_s,
        read_record,
        with_record,
    )

    namespace, name = options.system_namespace, options.record
    for _ in range(TRIES):
        try:
            body = await api.get(CONFIG_MAPS, namespace, name)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            raise StorageError(
                f"namespace {namespace} has no ConfigMap {name}: failures of nodes are not "
                f"remembered (operator.nodeRecord.enabled), or the release has another namespace "
                f"or name (--system-namespace, --record)"
            ) from error
        record, problems = read_record(body, time.time())
        if not options.forget:
            return record, half_life_s(body), problems
        record = _without(record, options.forget)
        try:
            await api.replace(CONFIG_MAPS, namespace, with_record(body, record))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        else:
            return record, half_life_s(body), ()
    raise UnreachableError(f"others write ConfigMap {name} all the time; try again")


async def _closed(api: Api, options: argparse.Namespace) -> dict[str, str]:
    """What the operator has done to suspect nodes, in words, by their names; empty for a user who
    may not list nodes."""
    from holdfast_operator.kube.client.api import ApiError, pages  # noqa: PLC0415
    from holdfast_operator.kube.cluster.nodes import read_node  # noqa: PLC0415

    found = {}
    try:
        async for page in pages(api, NODES):
            for node in map(read_node, page["items"]):
                if node.marked is not Mark.NONE:
                    found[node.name] = CLOSED[node.marked] if node.intact else "opened by hand"
    except ApiError as error:
        if not error.is_final:
            raise
    return found


def read_run(run: Path, forget: Sequence[str] = ()) -> tuple[Record, tuple[str, ...]]:
    """The record of a local run, without the nodes `forget`, which are removed from it, and what of
    it could not be understood.

    Raises:
        InvalidJobError: when a node to be forgotten has no record.
        StorageError: when there is no such run, or its record cannot be read or written.
    """
    if not (run / "status.json").exists():
        raise StorageError(f"there is no run in {run}; start one with `holdfast run JOB.yaml`")
    path = RunDirectory(run, "").node_failures_file
    try:
        record, problems = read_record(path, time.time())
        if not forget:
            return record, problems
        record = _without(record, forget)
        write_record(path, record)
    except OSError as error:
        raise StorageError(f"{path} cannot be used: {error.strerror}") from error
    return record, ()


def _without(record: Record, forget: Sequence[str]) -> Record:
    missing = [node for node in forget if node not in record]
    if missing:
        there = f"there are those of {', '.join(sorted(record))}" if record else "there are none"
        raise InvalidJobError(f"no failures of {', '.join(missing)} are recorded; {there}")
    return {node: failures for node, failures in record.items() if node not in forget}


# --- showing --------------------------------------------------------------------------------------


def _by_score(record: Record, rated: Mapping[str, Rating]) -> list[str]:
    return sorted(record, key=lambda node: (-rated.get(node, Rating()).score, node))


def _with_closed(record: Record, closed: Mapping[str, str]) -> Record:
    """The record, also with the nodes that are closed and of which no failure is remembered."""
    return {**dict.fromkeys(closed, ()), **record}


def as_json(
    record: Record, now: float, half_life_s: float, closed: Mapping[str, str]
) -> dict[str, Any]:
    """The record as JSON values; times are seconds since the Unix epoch."""
    record = _with_closed(record, closed)
    rated = ratings(record, now=now, half_life_s=half_life_s)
    pardoned = excused(record)
    return {
        "half_life_hours": half_life_s / 3600.0,
        "nodes": [
            {
                "name": node,
                "score": round(rated.get(node, Rating()).score, 3),
                "avoided": node in rated,
                "closed": closed.get(node, ""),
                "failures": [
                    {
                        "kind": failure.kind.value,
                        "device": failure.device,
                        "check": failure.check,
                        "job": failure.job,
                        "epoch": failure.epoch,
                        "at": failure.at,
                        "counts": failure not in pardoned,
                    }
                    for failure in reversed(record[node])
                ],
            }
            for node in _by_score(record, rated)
        ],
    }


def lines_about(record: Record, names: Collection[str], now: float) -> Iterator[str]:
    """What is remembered of the nodes `names`, a line for each that has failed."""
    pardoned = excused(record)
    for node in sorted(record.keys() & set(names)):
        yield f"{node}: {'; '.join(_failures(record[node], pardoned, now))}"


def nodes_view(
    record: Record, now: float, half_life_s: float, closed: Mapping[str, str]
) -> RenderableType:
    """A table of the nodes that have failed, the worst first, and of those that are `closed`."""
    record = _with_closed(record, closed)
    if not record:
        return Text("no failure of any node is remembered")
    rated = ratings(record, now=now, half_life_s=half_life_s)
    pardoned = excused(record)
    table = make_table("node", "score", "", "last failures")
    for node in _by_score(record, rated):
        rating = rated.get(node)
        state = Text("clean", "green") if rating is None else Text("avoided", "yellow")
        if node in closed:
            state = state.append(f", {closed[node]}", "red")
        table.add_row(
            Text(node),
            "-" if rating is None else f"{rating.score:.2f}",
            state,
            Text("\n".join(_failures(record[node], pardoned, now))),
        )
    hours = half_life_s / 3600.0
    note = (
        f"a failure counts half after {hours:g} hours; members go to nodes with a lower score, as "
        f"long as there are some"
    )
    return Group(table, Text(note, style="dim"))


def _failures(
    failures: Sequence[NodeFailure], pardoned: Collection[NodeFailure], now: float
) -> Iterator[str]:
    """The newest failures of a node in words, a line each. Those that are `pardoned` do not
    count."""
    for failure in failures[: -SHOWN - 1 : -1]:
        device = f" ({failure.device})" if failure.device else ""
        check = f" of {failure.check}" if failure.check else ""
        where = f"{failure.job} in epoch {failure.epoch}" if failure.job else "without a job"
        what = f"{IN_WORDS[failure.kind]}{check}{device}, {where}"
        why = " (alike on several nodes: does not count)" if failure in pardoned else ""
        yield f"{what}, {age_in_words(now - failure.at)} ago{why}"
    more = len(failures) - SHOWN
    if more > 0:
        yield f"and {more} more"
