"""How the runs of `benchmarks.recovery.stacks` are started, disturbed and ended: by Holdfast, or by
torchft beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import parse_job
from holdfast_operator.reconciler.observe.counters import Outcome

NODES, NPROC = 2, 2
RANKS = NODES * NPROC
WITHIN_S = 600.0
"""Upper limit for whatever a run waits for; frameworks take long to import."""
LOOK_S = 0.05
TORCHFT_WORKER = Path(__file__).with_name("torchft_worker.py")


class Job(Protocol):
    """A job that trains."""

    async def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until `reached`, and until a rank that is lost would cost the job no step.

        Raises:
            UnreachableError: it did not come to that, or not in WITHIN_S.
        """

    async def kill(self, rank: int, pid: int) -> None:
        """Kill the process of `rank` by SIGKILL."""

    async def completed(self) -> None:
        """Wait for the end.

        Raises:
            UnreachableError: the job failed, or did not end in WITHIN_S.
        """


class HoldfastJob:
    """A job of two virtual nodes with two ranks each."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    async def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        await self._cluster.wait_for(
            lambda status: status.protected.startswith(f"{status.epoch}.") and reached(),
            timeout_s=WITHIN_S,
            what=what,
        )

    async def kill(self, rank: int, pid: int) -> None:
        del pid
        await self._cluster.kill_rank(rank)

    async def completed(self) -> None:
        if await self._cluster.finished(timeout_s=WITHIN_S) is not Outcome.COMPLETE:
            raise UnreachableError("the job did not complete")


@asynccontextmanager
async def holdfast_job(
    command: Sequence[str], variables: Mapping[str, str], folder: Path
) -> AsyncIterator[HoldfastJob]:
    """Run `command` in each rank.

    Args:
        variables: environment of the ranks, and of the launchers that fork them.
        folder: for the directory of the run.
    """
    env = [{"name": name, "value": value} for name, value in variables.items()]
    containers = [{"name": "trainer", "command": list(command), "env": env}]
    job = parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "stacks"},
            "spec": {
                "nodes": NODES,
                "nprocPerNode": NPROC,
                "parallelism": {"dp": RANKS},
                "snapshot": {"memoryPerNode": "64Mi"},
                "redundancy": {"type": "RAIM5", "raim5": {"groupSize": NODES}},
                "failurePolicy": {
                    "spares": 0,
                    "maxRestarts": 1000,
                    "detection": {"heartbeatSeconds": 0.5, "missedHeartbeats": 8},
                },
                "trainer": {"template": {"spec": {"containers": containers}}},
            },
        }
    )
    async with LocalCluster(job, LocalSettings(directory=folder / "run")) as cluster:
        yield HoldfastJob(cluster)


class TorchftJob:
    """Replica groups of one rank, each with a launcher of torch that starts its process again."""

    def __init__(self, launchers: Sequence[asyncio.subprocess.Process]) -> None:
        self._launchers = launchers

    async def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                while not reached():
                    if any(launcher.returncode is not None for launcher in self._launchers):
                        raise UnreachableError(f"a launcher ended before {what}")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise UnreachableError(f"waited {WITHIN_S:g} s for {what}") from None

    async def kill(self, rank: int, pid: int) -> None:
        del rank
        os.kill(pid, signal.SIGKILL)

    async def completed(self) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                codes = [await launcher.wait() for launcher in self._launchers]
        except TimeoutError:
            raise UnreachableError(f"the job did not end in {WITHIN_S:g} s") from None
        if any(codes):
            raise UnreachableError(f"the launchers ended with {codes}")


@asynccontextmanager
async def torchft_job(
    steps: int, lighthouse: Sequence[str], site: Path, path: str, folder: Path
) -> AsyncIterator[TorchftJob]:
    """Run `torchft_worker.py` in each rank.

    Args:
        lighthouse: more arguments of torchft's lighthouse.
        site: packages of the environment that has torchft.
        path: the other folders that Python searches.
        folder: for what processes log.
    """
    processes: list[asyncio.subprocess.Process] = []
    with socket.socket() as reserved:  # for the lighthouse, which has to be told a port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        variables = {
            "PYTHONPATH": os.pathsep.join((str(site), path)),
            "TORCHFT_LIGHTHOUSE": f"http://{address}",
            "OMP_NUM_THREADS": "1",
        }
        program = site.parents[2] / "bin" / "torchft_lighthouse"
        leader = [str(program), "--bind", address, "--min_replicas", f"{RANKS}", *lighthouse]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        launcher += ["--max-restarts", "1000", str(TORCHFT_WORKER)]
        async with AsyncExitStack() as ended:

            async def start(name: str, *arguments: str) -> None:
                with (folder / f"{name}.log").open("wb") as log:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        *arguments,
                        env=os.environ | variables,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                processes.append(process)
                ended.push_async_callback(_end, process)

            await start("lighthouse", *leader)
            for rank in range(RANKS):
                await start(
                    f"rank-{rank}", *launcher, f"{rank}", f"{RANKS}", f"{steps}", str(folder)
                )
            yield TorchftJob(processes[1:])


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
