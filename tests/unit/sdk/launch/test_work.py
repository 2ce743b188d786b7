"""What the kernel knows of the work of real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from holdfast._launch.kernel_log import KernelLog
from holdfast._launch.memory_kills import MemoryKills
from holdfast._launch.work import WorkWatch, usage_below
from holdfast_core.inspections import InspectedProcess

SLEEPS = "print('up', flush=True); import time; time.sleep(60)"
SPINS = "print('up', flush=True)\nwhile True: pass"
READS = """
import time
print('up', flush=True)
while True:
    with open('/dev/zero', 'rb', buffering=0) as zeros:
        zeros.read(4_000_000)
    time.sleep(0.5)
"""
BELOW = f"""
import subprocess, sys
subprocess.run([sys.executable, '-c', {SPINS!r}])
"""


class Started:
    """Launch of workers that the test has started."""

    node_rank = 2

    def __init__(self, *programs: str) -> None:
        self.running = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            for program in programs
        ]
        for process in self.running:
            assert process.stdout is not None and process.stdout.readline()
        self.reports: list[list[int]] = []
        self.inspects = 0
        self.inspections: list[tuple[int, list[InspectedProcess]]] = []

    def workers(self) -> Mapping[int, int]:
        return {lane: process.pid for lane, process in enumerate(self.running)}

    def report_work(self, ranks: Collection[int]) -> int:
        self.reports.append(list(ranks))
        return self.inspects

    def report_inspection(self, number: int, processes: Sequence[InspectedProcess]) -> None:
        self.inspections.append((number, list(processes)))

    def close(self) -> None:
        for process in self.running:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for pid in (*children.split(), process.pid):
                subprocess.run(["kill", "-9", str(pid)], check=False)
            process.communicate()


@pytest.fixture
def launch() -> Iterator[Started]:
    made = Started(SLEEPS, SPINS, BELOW)
    yield made
    made.close()


def kills(tmp_path: Path) -> MemoryKills:
    return MemoryKills(tmp_path, tmp_path)


def test_workers_work_that_spin_themselves_or_by_a_child_and_sleepers_do_not(
    launch: Started, tmp_path: Path
) -> None:
    watch = WorkWatch(launch, 3, kills(tmp_path), KernelLog(tmp_path), None)
    watch.look()
    assert launch.reports == [[6, 7, 8]]  # all have started
    before = usage_below(launch.workers().values())
    pids = launch.workers()
    while any(
        usage_below([pids[lane]])[pids[lane]].processor_s - before[pids[lane]].processor_s < 0.5
        for lane in (1, 2)
    ):
        pass  # until both have had the processor, however busy the machine is
    watch.look()
    assert launch.reports[1:] == [[7, 8]]


def test_a_worker_that_reads_works_though_it_sleeps_most_of_the_time(tmp_path: Path) -> None:
    launch = Started(READS)
    try:
        pid, watch = (
            launch.workers()[0],
            WorkWatch(launch, 1, kills(tmp_path), KernelLog(tmp_path), None),
        )
        watch.look()
        first = usage_below([pid])[pid].moved_bytes  # after the look, which counts from less
        while usage_below([pid])[pid].moved_bytes < first + 4_000_000:
            pass
        watch.look()
        assert launch.reports == [[2], [2]]
    finally:
        launch.close()


class BrokenLog(KernelLog):
    def look(self) -> None:
        raise OSError("no log")


def test_work_is_reported_though_the_log_of_the_kernel_cannot_be_read(tmp_path: Path) -> None:
    launch = Started(SLEEPS)
    try:
        with pytest.raises(OSError, match="no log"):
            WorkWatch(launch, 1, kills(tmp_path), BrokenLog(tmp_path), None).look()
        assert launch.reports == [[2]]
    finally:
        launch.close()


def test_a_worker_that_has_ended_is_left_out() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert usage_below([ended.pid]) == {}


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/pod/trainer\n", "pod/trainer/memory.events"),
        ("0::/../outside\n", "memory.events"),
        (
            "4:cpu,cpuacct:/a\n3:memory:/pod/trainer\n0::/pod\n",
            "memory/pod/trainer/memory.oom_control",
        ),
        ("3:memory:/outside\n", "memory/memory.oom_control"),
    ],
    ids=["v2", "v2 in a namespace", "v1", "v1 in a namespace"],
)
def test_kills_for_lack_of_memory_are_counted_in_each_kind_of_control_group(
    tmp_path: Path, cgroup: str, file: str
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cgroup").write_text(cgroup)
    path = tmp_path / "sys" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 9\n")
    found = MemoryKills(tmp_path / "proc", tmp_path / "sys")
    assert not found.any_recent()
    path.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    assert found.any_recent()


def test_where_kills_are_not_counted_none_is_known(tmp_path: Path) -> None:
    assert not kills(tmp_path).any_recent()
    (tmp_path / "cgroup").write_text("0::/gone\n")
    assert not kills(tmp_path).any_recent()
