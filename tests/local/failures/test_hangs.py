"""Jobs that hang in real processes: the culprit is named, and only then something restarts."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_jobs import make_job, short_folder

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core import hang_limits
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase

WAIT_S = 200.0

TRAINS = """
import os, pathlib, subprocess, sys, time, torch, holdfast
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


def write_to_frozen_mount():
    with (where / "mount" / "checkpoint").open("wb", buffering=0) as file:
        file.write(b"1")
        subprocess.run(["fsfreeze", "--freeze", where / "mount"], check=True)
        file.write(b"2")


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
    """A job of two members with two ranks each. On a busy machine, ranks that do not hang may take
    no step for seconds either."""
    script = directory / "train.py"
    script.write_text(TRAINS)
    command = [sys.executable, str(script), str(directory), blocks, str(helpers)]
    return make_job(
        "hangs",
        command,
        nodes=2,
        nproc=2,
        snapshot={"memoryPerNode": "64Mi"},
        failurePolicy={"detection": {"heartbeatSeconds": 0.5, "hangSeconds": 6}},
    )


def inspections(status: Status) -> list[str]:
    return [event.message for event in status.local.events if event.reason == "HangInspected"]


def recovered(status: Status, times: int) -> bool:
    """Whether the job trains after that many hangs."""
    return status.recoveries == times and status.phase is Phase.RUNNING and bool(status.step)


def causes(status: Status) -> list[str]:
    return [each.cause for each in status.last_recoveries or ()]


@pytest.mark.slow
@pytest.mark.timeout(400)
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


PAUSES = """
import os, pathlib, subprocess, sys, time, torch, holdfast
import torch.distributed as dist

where, pause_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
BUSY = "import time; until = time.monotonic() + %s\\nwhile time.monotonic() < until: pass" % pause_s


def wait_for_data():
    (where / "hangs").touch()
    os.read(os.open(where / "data.fifo", os.O_RDWR), 1)


model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
def evaluate():
    exec(BUSY)


def compile_model():
    subprocess.run([sys.executable, "-c", BUSY], check=True)


LEARNS_S = 20.0
pauses = [evaluate] if rank == 0 else [compile_model, wait_for_data]
with holdfast.init(model=model, optimizer=optimizer) as session:
    pause_at_s = time.monotonic() + LEARNS_S + rank * (pause_s + 5.0)
    for step in range(10**6):
        if pauses and time.monotonic() > pause_at_s:
            pauses.pop(0)()
            pause_at_s = time.monotonic() + 5.0
        time.sleep(0.05)
        model(torch.ones(4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        session.save(step + 1)
"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize("pause_s", [20.0, 70.0])
def test_a_hang_is_noticed_by_what_was_learned_and_pauses_that_compute_are_none(
    pause_s: float, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of a job which was watched for hours, and whose longest pause before was
    one step: 60 s. A pause of 70 s is longer than that, but computes. So a pause of 20 s raises the
    limit for the hang to 100 s or a little more; after 70 s it would take six minutes."""
    monkeypatch.setattr(hang_limits, "WATCHED_S", 0.5)
    script, hangs = directory / "train.py", directory / "hangs"
    script.write_text(PAUSES)
    job = make_job(
        "pauses",
        [sys.executable, str(script), str(directory), str(pause_s)],
        nodes=2,
        snapshot={"memoryPerNode": "64Mi"},
        failurePolicy={"detection": {"heartbeatSeconds": 0.5}},
    )

    limits_s = []

    def ended(status: Status) -> bool:
        """Whether the pauses are over; notes the limits until then."""
        if status.hang_detection is not None:
            limits_s.append(status.hang_detection.quiet_seconds)
        return hangs.exists() or bool(inspections(status))

    async def hang() -> tuple[float, Status]:
        async with LocalCluster(job, LocalSettings(directory=directory / "run")) as cluster:
            await cluster.wait_for(ended, timeout_s=300)
            began_s = time.monotonic()
            assert not inspections(cluster.status), "it computed"
            if pause_s < 60:
                await cluster.wait_for(lambda status: bool(inspections(status)), timeout_s=200)
            return time.monotonic() - began_s, cluster.status

    took_s, status = asyncio.run(hang())
    assert hang_limits.QUIET_S_MIN in limits_s
    if pause_s < 60:
        assert hang_limits.PAUSES * pause_s < took_s < hang_limits.HANGING_S / 3
        (text,) = inspections(status)
        assert "rank 1 is in code of the script, in `wait_for_data` " in text


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
