"""The examples for training frameworks, as users run them, and a loop of its own: a rank is killed
in the middle, and the run ends with the losses and the bytes of one that nothing disturbed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_fewer_nodes
import yaml
from world_sizes import is_recovered

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import parse_job
from holdfast_core.job.status import RecoveryMode
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.counters import Outcome

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS = 30
KILL_AFTER = 8
WAIT_S = 240.0


def options(folder: Path, *others: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    files = ["--log-file", str(folder / "log"), "--hash-file", str(folder / "hash")]
    return ["--steps", str(STEPS), *files, *others]


def lines(folder: Path) -> list[dict[str, Any]]:
    log = folder / "log"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def by_step(folder: Path) -> dict[int, float]:
    """Loss of each step; of one that was repeated, the newest."""
    return {line["step"]: line["loss"] for line in lines(folder)}


async def run_killed(
    name: str,
    script: Path,
    folder: Path,
    memory: Path,
    *others: str,
    on_node: int = 1,
    stays: bool = False,
) -> RecoveryMode | None:
    """Run the example's job with a script, and kill a rank once some steps are logged. Return what
    the job had announced for that case.

    Args:
        on_node: number of ranks on each node.
        stays: whether to check that all other processes stay.
    """
    document = yaml.safe_load((EXAMPLES / f"{name}-job.yaml").read_text(encoding="utf-8"))
    spec = document["spec"]
    spec |= {"nprocPerNode": on_node, "parallelism": {"dp": on_node * spec["nodes"]}}
    (container,) = document["spec"]["trainer"]["template"]["spec"]["containers"]
    container["command"] = [sys.executable, str(script)]
    container["args"] = options(folder, *others)
    cluster = LocalCluster(parse_job(document), LocalSettings(directory=memory))
    async with cluster:
        await cluster.wait_for(
            lambda status: bool(status.protected) and len(lines(folder)) > KILL_AFTER,
            timeout_s=WAIT_S,
        )
        announced, before = cluster.status.recovery_mode, processes(cluster.status)
        epoch = cluster.status.epoch
        await cluster.kill_rank(1)
        if stays:
            recovered = await cluster.wait_for(
                lambda status: status.epoch > epoch and is_recovered(status), timeout_s=WAIT_S
            )
            after = processes(recovered)
            assert [rank for rank in before if after[rank] != before[rank]] == [1]
        assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
        assert cluster.status.recoveries == 1
        (recovery,) = cluster.status.local.recoveries
        assert recovery.restored_step
    return announced


def processes(status: Status) -> dict[int, int]:
    """Rank → its process."""
    return {rank.rank: rank.pid for member in status.local.members for rank in member.ranks}


def check_undisturbed(script: Path, directory: Path, *others: str, ranks: int = 2) -> None:
    """Check that a run which nothing disturbs has the losses and the state of `killed`."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    arguments = [sys.executable, *launcher, str(script), *options(directory / "whole", *others)]
    subprocess.run(arguments, check=True, timeout=WAIT_S)
    assert by_step(directory / "killed") == by_step(directory / "whole")
    hashes = [(directory / one / "hash").read_text() for one in ("killed", "whole")]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "huggingface",
        pytest.param("fsdp2", marks=pytest.mark.exhaustive),
        pytest.param("lightning", marks=pytest.mark.exhaustive),
    ],
)
def test_an_example_that_is_killed_ends_like_one_that_was_not(directory: Path, name: str) -> None:
    script = EXAMPLES / f"train_{name}.py"
    asyncio.run(run_killed(name, script, directory / "killed", directory / "memory"))
    check_undisturbed(script, directory)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_example_for_accelerate_keeps_all_processes_but_the_one_that_is_killed(
    directory: Path,
) -> None:
    script, others = EXAMPLES / "train_accelerate.py", ("--steps", "120")
    killed, memory = directory / "killed", directory / "memory"
    asyncio.run(run_killed("accelerate", script, killed, memory, *others, on_node=2, stays=True))
    check_undisturbed(script, directory, *others, ranks=4)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("others", [(), ("--accelerate",)], ids=["plain", "accelerate"])
def test_a_model_of_transformers_in_a_loop_of_its_own_keeps_the_processes_that_are_left(
    directory: Path, others: tuple[str, ...]
) -> None:
    script = Path(__file__).parents[1] / "trainers" / "huggingface_trainer.py"
    killed = directory / "killed"
    memory = directory / "memory"
    announced = asyncio.run(run_killed("huggingface", script, killed, memory, *others))
    assert announced is RecoveryMode.IN_PLACE
    check_undisturbed(script, directory, *others)
    processes = [line.split()[0] for line in (killed / "pids").read_text().splitlines()]
    assert sorted(processes) == ["0", "1", "1"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_model_of_transformers_in_a_loop_of_its_own_goes_on_with_fewer_nodes_and_with_more() -> (
    None
):
    nodes = {"nodes": 3, "parallelism": {"dp": 3}}

    async def change() -> None:
        async with test_fewer_nodes.running(
            stay=True, members=3, transformers=True, **nodes
        ) as run:
            first = run.cluster.status
            (home,) = [one.node for one in first.local.members if one.index == 1]
            smaller = await test_fewer_nodes.lose(run, 1, left=2)
            await run.cluster.start_node(home)
            grown = await run.wait_size(3, smaller.epoch, "three members again", WAIT_S)
            for recovery in grown.local.recoveries:
                assert (recovery.source, recovery.lost_steps) == (RestoreSource.LIVE, 0)
            await run.cluster.stop()
            assert await asyncio.to_thread(run.check) == [3, 2, 3]
            through = [lines for lines in run.lines().values() if lines[0].epoch == first.epoch]
            assert sum(lines[-1].epoch == grown.epoch for lines in through) == 2

    asyncio.run(change())
