"""What a launcher sees of real processes: blocked, stopped, wrapped, without an offer, hostile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from holdfast._launch.inspecting import STACK_BYTES_MAX, inspect_workers
from holdfast._launch.process_tree import state_of
from holdfast._stacks import STACK_SIGNAL
from holdfast_core.inspections import GroupCollectives, SessionActivity, bounded_process

pytestmark = pytest.mark.timeout(300)  # the processes import torch one after the other

OFFERS = """
import os, sys, pathlib, signal
from holdfast._environment import read_stack_directory
from holdfast._stacks import offer_stack
offer_stack(read_stack_directory())
"""
READS = (
    OFFERS
    + """
def load(path):
    print("up", flush=True)
    with open(path, "rb", buffering=0) as file:
        return file.read(1)

load(sys.argv[1])
"""
)
SAVES = (
    OFFERS
    + """
import time
from holdfast._activity import ACTIVITY
ACTIVITY.begin_world(3, 8, 40)
ACTIVITY.complete(41)
with ACTIVITY.training_in("save"):
    with ACTIVITY.training_in("wait_staged"):
        ACTIVITY.save_by("waits for a slot")
    print("up", flush=True)
    time.sleep(60)
"""
)
SPINS = (
    OFFERS
    + """
def evaluate():
    print("up", flush=True)
    sum(iter(int, 1))  # in C, and never returns

evaluate()
"""
)
SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
OWN_HANDLER = (
    f"import signal; signal.signal({int(STACK_SIGNAL)}, lambda *_: print('hit'))\n"
    + OFFERS
    + SLEEPS
)
CLOSED = OFFERS + "os.closerange(3, 100)\n" + SLEEPS
FORKS = (
    READS.replace("load(sys.argv[1])", "")
    + """
if os.fork() == 0:
    load(sys.argv[1])
os.wait()
"""
)
MEETS = (
    OFFERS
    + """
import torch, torch.distributed as dist

store, rank = dist.FileStore(sys.argv[1] + ".store", 2), RANK
for world in range(2):  # The groups of both worlds have the same names.
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(world), store), rank=rank, world_size=2
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for _ in range(3 - world):
        dist.all_reduce(torch.zeros(1))
    if world == 0:
        dist.all_reduce(torch.zeros(1), group=pairs[0])
        dist.destroy_process_group()
print("up", flush=True)
for pair in pairs if rank == 0 else pairs[::-1]:
    dist.all_reduce(torch.zeros(1), group=pair)
"""
)
LIES = f"""
import os, pathlib, signal, time
file = pathlib.Path(os.environ["HOLDFAST_STACKS"], str(os.getpid())).open("wb", buffering=0)
file.write(b"%d\\n" % file.fileno())
line = b'  File "' + b"a" * 900 + b'\\x1b[2J", line 99 in ' + b"f" * 900 + b"\\n"
signal.signal({int(STACK_SIGNAL)}, lambda *_: file.write(1000 * line))
print("up", flush=True)
time.sleep(60)
"""
"""Answers the signal by itself, with far more than a stack."""


class Workers:
    """Processes that the test has started, by their lanes."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.running = directory, list[subprocess.Popen[bytes]]()
        self.fifo = directory / "data.fifo"
        os.mkfifo(self.fifo)
        self.writer = os.open(self.fifo, os.O_RDWR)  # so that readers open it, and wait

    def start(self, program: str, *, wrapped: bool = False) -> subprocess.Popen[bytes]:
        process = self.launch(program, wrapped=wrapped)
        assert process.stdout is not None and process.stdout.readline()
        return process

    def launch(self, program: str, *, wrapped: bool = False) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, str(self.fifo)]
        if wrapped:
            command = ["sh", "-c", '"$@"; :', "sh", *command]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "HOLDFAST_STACKS": str(self.directory)},
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def start_waiting(self, program: str) -> subprocess.Popen[bytes]:
        """Start a program that waits after its first line, and return once it does."""
        process = self.start(program)
        while state_of(process.pid) != "S":
            assert process.poll() is None
        return process

    def pids(self) -> dict[int, int]:
        return {lane: process.pid for lane, process in enumerate(self.running)}

    def close(self) -> None:
        for process in self.running:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        os.close(self.writer)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


def test_processes_that_do_not_react_to_anything_show_where_they_are(workers: Workers) -> None:
    workers.start_waiting(READS)
    workers.start(SPINS)
    workers.start(READS, wrapped=True)
    os.kill(workers.start(SPINS).pid, signal.SIGSTOP)
    reads, spins, wrapped, stopped = inspect_workers(workers.pids(), workers.directory).values()
    assert [frame.function for frame in reads.frames] == ["load", "<module>"]
    assert reads.state == "S" and reads.call in ("", f"read of {workers.fifo}")
    assert [frame.function for frame in spins.frames] == ["evaluate", "<module>"]
    assert (spins.state, spins.call) == ("R", "")
    assert wrapped.frames == reads.frames
    assert (stopped.state, stopped.frames) == ("T", ())
    # They go on as before, and can be asked again.
    again = inspect_workers(workers.pids(), workers.directory)
    assert again[0].frames == reads.frames
    assert all(process.poll() is None for process in workers.running)


def test_a_call_on_a_file_is_named_where_the_kernel_shows_it(workers: Workers) -> None:
    pid = workers.start_waiting(READS).pid
    try:
        Path(f"/proc/{pid}/syscall").read_text()
    except OSError as error:
        pytest.skip(f"the kernel does not show it to this user: {error}")
    (found,) = inspect_workers(workers.pids(), workers.directory).values()
    assert found.call == f"read of {workers.fifo}"


def test_the_notes_of_a_session_are_read_while_its_process_hangs(workers: Workers) -> None:
    os.kill(workers.start(SAVES).pid, signal.SIGSTOP)
    (saves,) = inspect_workers(workers.pids(), workers.directory).values()
    assert saves.session == SessionActivity(
        epoch=3, ranks=8, step=41, training="save", saving="waits for a slot"
    )
    assert "in save of its session after step 41, while a save waits for a slot" in saves.in_words


def test_what_a_session_does_is_seen_where_the_signal_is_taken(workers: Workers) -> None:
    """Each `holdfast.init` of a script offers again."""
    again = SAVES.replace("import time\n", "import time\noffer_stack(read_stack_directory())\n")
    workers.start(f"import signal; signal.signal({int(STACK_SIGNAL)}, lambda *_: 0)\n" + again)
    (saves,) = inspect_workers(workers.pids(), workers.directory).values()
    assert saves.frames == () and saves.session is not None
    assert saves.session.saving == "waits for a slot"


def test_a_child_of_a_rank_is_named_when_it_is_stopped(workers: Workers) -> None:
    rank = workers.start(FORKS)
    child = int(Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text())
    os.kill(child, signal.SIGSTOP)
    (found,) = inspect_workers(workers.pids(), workers.directory).values()
    assert found.helper == f"its child process {child} is stopped"
    assert [frame.function for frame in found.frames] == ["<module>"]


@pytest.mark.parametrize(
    "program", [SLEEPS, OWN_HANDLER, CLOSED], ids=["no offer", "handler of its own", "closed file"]
)
def test_a_process_without_an_offer_gets_no_signal(program: str, workers: Workers) -> None:
    process = workers.start_waiting(program)
    (found,) = inspect_workers(workers.pids(), workers.directory).values()
    assert (found.frames, found.no_stack) == ((), "its process has offered none")
    assert found.state == "S" and process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None and process.stdout.read() == b""


def test_without_a_directory_the_state_is_all_there_is(workers: Workers) -> None:
    workers.start_waiting(READS)
    (found,) = inspect_workers(workers.pids(), None).values()
    assert (found.state, found.frames) == ("S", ())


def test_what_a_process_claims_is_bounded(workers: Workers) -> None:
    workers.start(LIES)
    (found,) = inspect_workers(workers.pids(), workers.directory).values()
    assert 0 < len(found.frames) <= STACK_BYTES_MAX / 1800
    shown = bounded_process(found).frames[0]
    assert (len(shown.file), len(shown.function)) == (160, 80)
    assert shown.file.endswith("a?[2J")


def test_a_collective_that_waits_for_the_other_rank_is_seen(workers: Workers) -> None:
    for rank in range(2):
        workers.launch(MEETS.replace("RANK", str(rank)))
    awaited = ("1 gloo", "2 gloo")
    own, other = dict[str, GroupCollectives](), dict[str, GroupCollectives]()
    # Only the second world uses group 2.
    while not all(n in g and g[n].pending for n, g in zip(awaited, (own, other), strict=True)):
        assert all(process.poll() is None for process in workers.running)
        inspected = inspect_workers(workers.pids(), workers.directory)
        own, other = ({g.group: g for g in inspected[lane].collectives} for lane in range(2))
    assert own["1 gloo"] == GroupCollectives(
        group="1 gloo", entered=1, pending=1, operation="all_reduce", size=2, members=(0, 1)
    )
    assert other["2 gloo"] == structs.replace(own["1 gloo"], group="2 gloo")
    # The first world's collectives are over, and do not count.
    assert own["2 gloo"] == GroupCollectives(group="2 gloo", size=2)
    assert other["1 gloo"] == GroupCollectives(group="1 gloo", size=2)
    assert own["0 gloo"] == GroupCollectives(group="0 gloo", entered=2, size=2)


def test_a_worker_that_has_ended_has_no_state(workers: Workers) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert inspect_workers({0: ended.pid}, workers.directory)[0].state == ""
