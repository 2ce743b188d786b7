"""Every pair of a way to snapshot and another feature is trained with real processes, one of which
is killed, or refused when it is applied: none is allowed and untried.

`make test` has the refusals, and that each test that is named exists; `make test-faults` trains.
"""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from pairs import (
    COLUMNS,
    ELSEWHERE,
    ITSELF,
    REFUSED,
    REPOSITORY,
    ROWS,
    Spec,
    arguments,
    make_job,
    row_of,
    script_of,
    table,
)
from step_logs import ends_of_logs

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_cli.local.daemon_calls import daemon_status
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import NodeStatus
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import parse_job
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.report.recoveries import Recovery
from holdfast_protos import trainer_pb2_grpc

WAIT_S = 200.0
PLACEHOLDER = Path("/directory-of-the-run")
"""Stands for the folder of a run in its arguments, so that equal ones can be told."""
PAIRS = [pair for pair in product(ROWS, COLUMNS) if pair not in ITSELF]
TRAINED = [pair for pair in PAIRS if pair not in REFUSED]


@pytest.mark.parametrize(("row", "column"), PAIRS)
def test_a_pair_is_refused_with_the_reason_or_allowed(
    row: str, column: str, tmp_path: Path
) -> None:
    document = make_job(row, column, tmp_path)
    if (row, column) not in REFUSED:
        parse_job(document)
        return
    with pytest.raises(InvalidJobError) as caught:
        parse_job(document)
    assert REFUSED[row, column] in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallelism": {"dp": 1, "tp": 2}}, "whole experts, any of them; use tp = 1, or remove"),
        ({"parallelism": {"dp": 1, "pp": 2}}, "whole experts, any of them; use pp = 1, or remove"),
        (
            {"trainer": {"external": True}},
            "spec.elastic: needs pods that Holdfast makes, and spec.trainer.external is true",
        ),
    ],
    ids=["tp", "pp", "external"],
)
def test_what_experts_in_seats_cannot_have_is_refused_when_it_is_applied(
    changes: Spec, why: str, tmp_path: Path
) -> None:
    document = make_job("a rank is lost", "seats", tmp_path)
    document["spec"] |= changes
    with pytest.raises(InvalidJobError, match=why):
        parse_job(document)


def test_the_document_shows_every_pair() -> None:
    text = (REPOSITORY / "docs" / "combinations.md").read_text().splitlines()
    assert [line for line in text if line.startswith("|")] == table()


@pytest.mark.parametrize("name", sorted(set(ELSEWHERE.values())))
def test_what_is_trained_elsewhere_is_a_test(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((REPOSITORY / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("row", "column"), TRAINED)
def test_a_pair_survives_a_loss(row: str, column: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        directory = Path(path)
        try:
            recoveries = asyncio.run(_lose(row, column, directory))
        finally:
            print(ends_of_logs(directory))
        restored = [each.restored_step for each in recoveries if each.restored_step is not None]
        assert restored and min(restored) >= 1, restored  # 0: training began anew
        # Where the job has been resized, other batches follow.
        if COLUMNS[column].exact and not row_of(row, column).resizes:
            world = parse_job(make_job(row, column, directory)).world_size
            assert final_state(directory) == undisturbed(row, column, world)


async def _lose(row: str, column: str, directory: Path) -> Sequence[Recovery]:
    """Train the pair, lose what the row is for, and train to the end; return the recoveries."""
    job = parse_job(make_job(row, column, directory))
    settings = LocalSettings(directory=directory / "run", standbys=0)
    async with LocalCluster(job, settings) as cluster:

        def is_protected(status: Status) -> bool:
            _, _, step = status.protected.partition(".")
            chosen = status.pace is not None and bool(status.pace.window_steps)
            return bool(step) and int(step) >= 2 and (chosen or row != "window auto")

        status = await cluster.wait_for(is_protected, timeout_s=WAIT_S, what="the first steps")
        if not row_of(row, column).nodes_lost:
            await cluster.kill_rank(1)
        for member in status.local.members[1 : 1 + row_of(row, column).nodes_lost]:
            await cluster.kill_node(member.node)
        assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
        if row == "mirrors of replicas":
            run = RunDirectory(directory / "run", job.key)
            members = [node for node in cluster.status.local.nodes if node.member is not None]
            assert any(mirrored_bytes(node, run) for node in members)
        return cluster.status.local.recoveries


def mirrored_bytes(node: NodeStatus, directory: RunDirectory) -> float:
    """Bytes that the daemon of `node` has taken from mirrors beside it, instead of other nodes."""
    with grpc.insecure_channel(f"unix:{node.socket}") as channel:
        found, _ = daemon_status(trainer_pb2_grpc.TrainerStub(channel), directory)
    with urlopen(f"http://{node.host}:{found['metrics_port']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines)
    return float(samples["holdfast_mirrored_bytes_total"])


def final_state(directory: Path) -> object:
    """The final state that a script of an example has written."""
    hash_file = directory / "sha256"
    if hash_file.exists():
        return hash_file.read_text()
    lasts = [path.read_text().splitlines()[-1] for path in sorted(directory.glob("log-*"))]
    return [json.loads(line)["state"] for line in lasts]


def undisturbed(row: str, column: str, world: int) -> object:
    """The final state of the same script without Holdfast."""
    return _undisturbed(world, str(script_of(row, column)), *arguments(row, column, PLACEHOLDER))


@cache
def _undisturbed(world: int, *script: str) -> object:
    """The final state of a script, once for all rows that start it alike."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        command = [*("-m", "torch.distributed.run", "--nproc-per-node", str(world)), *script]
        command = [word.replace(str(PLACEHOLDER), path) for word in command]
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=WAIT_S)
        return final_state(Path(path))
