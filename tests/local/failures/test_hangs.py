"""Jobs that hang in real processes: the culprit is named, and only then something restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
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
import os, pathlib, subprocess, sys, time, torch, holdfast
import torch.distributed as dist

where, blocks = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([0, 1])]


def is_first(what):
    mark = where / f"{what}.{rank}"
    if blocks != what or mark.exists():
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


def write_to_frozen_mount():
    with (where / "mount" / "checkpoint").open("wb", buffering=0) as file:
        file.write(b"1")
        subprocess.run(["fsfreeze", "--freeze", where / "mount"], check=True)
        file.write(b"2")


def reduce_in_order(tensor, groups):
    for group in groups:
        dist.all_reduce(tensor, group=group)


def reduce_backwards(tensor):
    reduce_in_order(tensor, pairs[::-1])


def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.init(model=model, optimizer=optimizer) as session:
        step = session.restore() or 0
        for batch in torch.utils.data.DataLoader(Data(), num_workers=int(sys.argv[3])):
            if step == 6 and rank == 1 and is_first("storage"):
                write_checkpoint()
            if step == 6 and rank == 1 and is_first("frozen"):
                write_to_frozen_mount()
            if step == 6 and rank == 1 and is_first("leaves"):
                dist.barrier(pairs[0])
                break
            model(batch).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            if step == 6 and is_first("order") and rank == 1:
                reduce_backwards(torch.zeros(1))
            elif rank < 2:
                reduce_in_order(torch.zeros(1), pairs)
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


@pytest.fixture
def mount(directory: Path) -> Iterator[Path]:
    """A file system of its own, which can be frozen: what writes to it then is in state D."""
    programs = ("mkfs.ext4", "mount", "fsfreeze")
    if os.geteuid() or not all(map(shutil.which, programs)):
        pytest.skip(f"needs root, and the programs {', '.join(programs)}")
    image, path = directory / "image", directory / "mount"
    path.mkdir()
    image.touch()
    os.truncate(image, 16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=False).returncode:
        pytest.skip("this machine mounts no images")
    yield path
    thaw(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def thaw(path: Path) -> None:
    subprocess.run(["fsfreeze", "--unfreeze", str(path)], check=False, stderr=subprocess.DEVNULL)


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
def test_a_rank_that_waits_for_data_and_one_that_is_stopped_are_named(directory: Path) -> None:
    async def hang_twice() -> Status:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job_of(directory, "loader"), settings) as cluster:
            await cluster.wait_for(lambda status: recovered(status, 1), timeout_s=WAIT_S)
            ranks = [rank for member in cluster.status.local.members for rank in member.ranks]
            os.kill(next(rank.pid for rank in ranks if rank.rank == 2), signal.SIGSTOP)
            await cluster.wait_for(lambda status: recovered(status, 2), timeout_s=WAIT_S)
            return cluster.status

    status = asyncio.run(hang_twice())
    loads, stopped = inspections(status)
    assert "rank 1 is in its data loader, in `__getitem__` " in loads
    assert "3 others are waiting in all_reduce " in loads and "train.py:" in loads
    assert "not answering" not in loads + stopped
    assert "rank 2 is stopped (by SIGSTOP or a debugger); 3 others are waiting in " in stopped
    first, second = causes(status)
    assert loads.partition(": ")[2] in first and stopped.partition(": ")[2] in second


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("blocks", "helpers", "expected"),
    [
        ("order", 0, ["called from `reduce_backwards` ", "they wait for each other"]),
        ("loader", 1, ["rank 1 is in its data loader, in `train` "]),
        ("storage", 0, ["rank 1 is in code of the script, in `write_checkpoint` "]),
        ("leaves", 0, ["rank 1 is waiting in barrier ", "3 others are waiting in all_reduce "]),
    ],
    ids=[
        "two groups in opposite order",
        "a process of the data loader",
        "a file on a mount that hangs",
        "a rank that leaves the loop early",
    ],
)
def test_other_hangs_are_explained(
    blocks: str, helpers: int, expected: list[str], directory: Path
) -> None:
    async def hang() -> Status:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job_of(directory, blocks, helpers), settings) as cluster:
            await cluster.wait_for(lambda status: recovered(status, 1), timeout_s=WAIT_S)
            return cluster.status

    (text,) = inspections(asyncio.run(hang()))
    for part in expected:
        assert part in text


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_rank_that_waits_for_a_mount_which_does_not_answer_is_named(
    directory: Path, mount: Path
) -> None:
    """Nothing can interrupt it, so it has no stack to show."""

    async def hang() -> Status:
        settings = LocalSettings(directory=directory / "run")
        async with LocalCluster(job_of(directory, "frozen"), settings) as cluster:
            await cluster.wait_for(lambda status: bool(inspections(status)), timeout_s=WAIT_S)
            thaw(mount)  # or the rank could not even be killed
            await cluster.wait_for(lambda status: recovered(status, 1), timeout_s=WAIT_S)
            return cluster.status

    (text,) = inspections(asyncio.run(hang()))
    where = f"rank 1 is waiting in write of {mount / 'checkpoint'} and cannot be interrupted"
    assert f"{where} (state D): for storage or a driver; 3 others are waiting in " in text
