"""Jobs that hang in real processes: the culprit is named, and only then something restarts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_jobs import make_job, short_folder

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase

WAIT_S = 120.0

TRAINS = """
import os, pathlib, sys, time, torch, holdfast
import torch.distributed as dist

where, blocks = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([0, 1])]


def is_first(what):
    mark = where / f"{what}.{rank}"
    if what not in blocks or mark.exists():
        return False
    mark.touch()
    return True


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        if rank == 1 and index == 4 and is_first("loader"):
            os.read(os.open(where / "data.fifo", os.O_RDWR), 1)
        time.sleep(0.05)
        return torch.ones(4)


def write_checkpoint():
    (where / "mount.fifo").open("wb").close()  # of a mount that does not answer


def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.init(model=model, optimizer=optimizer) as session:
        step = session.restore() or 0
        for batch in torch.utils.data.DataLoader(Data(), num_workers=int(sys.argv[3])):
            if step == 6 and rank == 1 and is_first("storage"):
                write_checkpoint()
            if step == 9 and rank == 1 and is_first("leaves"):
                dist.barrier(pairs[0])
                break
            model(batch).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            backwards = step == 6 and rank == 1 and is_first("order")
            for pair in pairs[::-1] if backwards else pairs:
                if rank < 2:
                    dist.all_reduce(torch.zeros(1), group=pair)
            optimizer.step()
            step += 1
            session.save(step)


train()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_folder() as path:
        os.mkfifo(path / "data.fifo")
        os.mkfifo(path / "mount.fifo")
        yield path


def job_of(directory: Path, blocks: str, helpers: int = 0) -> MoETrainingJob:
    """A job of two members with two ranks each."""
    script = directory / "train.py"
    script.write_text(TRAINS)
    command = [sys.executable, str(script), str(directory), blocks, str(helpers)]
    return make_job(
        "hangs",
        command,
        nodes=2,
        nproc=2,
        snapshot={"memoryPerNode": "64Mi"},
        failurePolicy={"detection": {"heartbeatSeconds": 0.5, "hangSeconds": 2}},
    )


def inspections(status: Status) -> list[str]:
    return [event.message for event in status.local.events if event.reason == "HangInspected"]


def recovered(status: Status, times: int) -> bool:
    """Whether the job trains after that many hangs."""
    return status.recoveries == times and status.phase is Phase.RUNNING and bool(status.step)


def causes(status: Status) -> list[str]:
    return [each.cause for each in status.last_recoveries or ()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_hang_names_its_culprit(directory: Path) -> None:
    async def hang() -> Status:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job_of(directory, "loader,order,leaves"), settings) as cluster:
            await cluster.wait_for(lambda status: recovered(status, 3), timeout_s=WAIT_S)
            ranks = [rank for member in cluster.status.local.members for rank in member.ranks]
            os.kill(next(rank.pid for rank in ranks if rank.rank == 2), signal.SIGSTOP)
            await cluster.wait_for(lambda status: recovered(status, 4), timeout_s=WAIT_S)
            return cluster.status

    status = asyncio.run(hang())
    loads, order, leaves, stopped = inspections(status)
    assert "rank 1 is in its data loader, in `__getitem__` " in loads
    assert "3 others are waiting in all_reduce " in loads and "train.py:" in loads
    assert "they wait for each other: rank " in order
    assert re.search(r"rank 0 waits in all_reduce \d+ of group 1 gloo for rank 1\b", order)
    assert re.search(r"rank 1 waits in all_reduce \d+ of group 2 gloo for rank 0\b", order)
    assert "rank 1 is waiting in barrier " in leaves
    assert "3 others are waiting in all_reduce " in leaves
    assert "not answering" not in loads + order + leaves + stopped
    assert "rank 2 is stopped (by SIGSTOP or a debugger); 3 others are waiting in " in stopped
    for cause, text in zip(causes(status), inspections(status), strict=True):
        verdict, _, calls = text.partition(": ")[2].partition(". Innermost calls of ")
        assert verdict in cause and bool(calls) is (text is not stopped)
    assert status.last_hang is not None
    assert (status.last_hang.kind, status.last_hang.text) == ("Stopped", stopped.partition(": ")[2])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("blocks", "helpers", "expected"),
    [
        ("loader", 1, "rank 1 is in its data loader, in `train` "),
        ("storage", 0, "rank 1 is in code of the script, in `write_checkpoint` "),
    ],
    ids=["a process of the data loader", "a file on a mount that hangs"],
)
def test_other_hangs_are_explained(
    blocks: str, helpers: int, expected: str, directory: Path
) -> None:
    async def hang() -> Status:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job_of(directory, blocks, helpers), settings) as cluster:
            await cluster.wait_for(lambda status: recovered(status, 1), timeout_s=WAIT_S)
            return cluster.status

    (text,) = inspections(asyncio.run(hang()))
    assert expected in text
