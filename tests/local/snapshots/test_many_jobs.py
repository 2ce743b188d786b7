"""Several jobs share the daemons; one that ends leaves nothing and disturbs no other."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from combinations import Combination
from control_plane import ControlServer
from harness import RawCluster, RawJob
from raw_trainer import RawTrainer
from waiting import wait_for

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.worlds import MemberWorld
from holdfast_daemon.net.control import HEARTBEAT_S
from holdfast_protos import codec, control_pb2

MEMBERS = 4
QUIET_S = 5.0
"""Over which the processor time of an idle daemon is measured."""
LOOKS_MAX = 4
"""What does the same takes several times as long while others use the machine's caches."""
AT_ONCE_S = 10.0
"""Half of what a daemon that ends would give writes to durable storage."""


def test_jobs_share_daemons_and_one_that_ends_leaves_nothing(
    cluster: RawCluster, combination: Combination
) -> None:
    nodes = cluster.start_nodes(MEMBERS)
    jobs = [
        combination.job(cluster, list(nodes), name=f"team/job-{i}", nbytes=100_000)
        for i in range(3)
    ]
    for job in jobs:
        job.form()
    for job in jobs:
        job.start_trainers()
    for _ in range(3):
        for job in jobs:
            job.step += 1
            job.save(job.step)
        for job in jobs:
            job.wait_protected(job.step)
    used = {n: cluster.daemons[n].status()["memory_used_bytes"] for n in nodes}
    ended, *others = jobs
    ended.drop()
    for node in nodes:
        daemon = cluster.daemons[node]
        wait_for("the job to be gone", lambda daemon=daemon: not daemon.job(ended.name))  # type: ignore[misc]
        assert len(list((daemon.root / "jobs").iterdir())) == len(others)
        assert daemon.status()["memory_used_bytes"] == used[node] * 2 // 3
    cluster.daemons[nodes[1]].lose()
    (fresh,) = cluster.start_nodes(1)
    for job in others:
        newest = job.generation
        job.nodes[1] = fresh
        job.form()
        assert job.check_restored(job.start_trainers(), newest) == newest
        job.train(2)


class ChangingJob:
    """A job whose members leave and come back, while its nodes stay."""

    def __init__(self, cluster: RawCluster, nodes: list[str]) -> None:
        self.job = RawJob(cluster, nodes, name="team/changing", policy=PolicyType.FULL)
        self._nodes = list(nodes)
        self.job.form()
        self.job.start_trainers()
        self._world = self.job.membership().world
        self._past: list[MemberWorld] = []
        self.newest = self.job.train(2)

    def change(self, *members: int) -> None:
        """Begin an epoch with these members. What the world before had captured must be there, and
        no rank have other bytes; then the new one is protected."""
        job, saved = self.job, self.job.trainers
        job.stop_trainers()
        job.nodes = [self._nodes[index] for index in members]
        job.epoch += 1
        self._past.append(self._world)
        places = tuple(
            replace(place, index=index)
            for place, index in zip(job.membership().members, members, strict=True)
        )
        membership = replace(
            job.membership(),
            members=places,
            groups=(members,),
            since=job.epoch,
            past=tuple(self._past),
        )
        self._world = membership.world
        message = control_pb2.ControlMessage(membership=codec.membership_to_proto(membership))
        for node in job.nodes:
            job.cluster.control.send(node, message)
        job.trainers = [job.make_trainer(rank) for rank in range(job.size)]
        with ThreadPoolExecutor(job.size) as pool:
            list(pool.map(lambda trainer: trainer.join(job.epoch), job.trainers))
            restored = list(pool.map(RawTrainer.restore_earlier, job.trainers))
            list(pool.map(RawTrainer.open, job.trainers))
        assert {generation for generation, _ in restored} == {self.newest}
        found = {rank: data for _, read in restored for rank, data in read.items()}
        assert found == {trainer.rank: trainer.content_at(self.newest) for trainer in saved}
        self.newest = job.train(2)


def test_a_job_that_changes_its_world_leaves_another_one_on_its_nodes_alone(
    cluster: RawCluster,
) -> None:
    nodes = cluster.start_nodes(MEMBERS)
    steady = RawJob(cluster, list(nodes), name="team/steady")
    steady.form()
    steady.start_trainers()
    steady.train(2)
    changing = ChangingJob(cluster, nodes)

    def files() -> dict[Path, int]:
        """Arenas of the steady job, and their inodes."""
        roots = [steady.daemon(member).root / "jobs" for member in range(MEMBERS)]
        arenas = [one for root in roots for one in root.glob("*steady*/arenas/*/*arena*")]
        return {arena: arena.stat().st_ino for arena in arenas}

    def used() -> list[int]:
        return [cluster.daemons[node].status()["memory_used_bytes"] for node in nodes]

    arenas, memory = files(), used()
    assert len(arenas) == MEMBERS
    over = threading.Event()

    def train() -> int:
        while not over.is_set():
            steady.train()
        return steady.step

    with ThreadPoolExecutor(1) as beside:
        training = beside.submit(train)
        try:
            begun = []
            for members in ((0, 2, 3), (0, 2), (0, 1, 2, 3)):
                begun.append(steady.step)
                changing.change(*members)
        finally:
            over.set()
        ended = training.result()
    assert sorted({*begun, ended}) == [*begun, ended]  # it trained during each change
    wait_for(
        "the memory of earlier worlds to be free",
        lambda: changing.job.train() and used() == memory,
    )
    newest = steady.generation
    assert newest.epoch == 1 and files() == arenas
    steady.form()
    assert steady.check_restored(steady.start_trainers(), newest) == newest


class WindowedJob(RawJob):
    """A job that saves windows of steps, each into one slot."""

    WINDOW = 4

    def begin_window(self) -> None:
        """Write the first half of a window."""
        for trainer in self.trainers:
            slot = trainer.grant(self.step + self.WINDOW, first_step=self.step + 1)
            assert slot is not None
            trainer.copy(slot, self.step + self.WINDOW, part=0.5)
            self._slots[trainer.rank] = slot

    def end_window(self) -> None:
        """Write the rest, and seal it; return when it is protected."""
        self.step += self.WINDOW
        for trainer in self.trainers:
            trainer.copy(self._slots[trainer.rank], self.step)
            trainer.commit(self._slots[trainer.rank], self.step)
        self.wait_protected(self.step)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = PolicyType.FULL
        self._slots: dict[int, int] = {}


def test_two_jobs_with_windows_share_nodes_of_which_one_job_loses_one(cluster: RawCluster) -> None:
    """Both are in the middle of a window. The job whose node it was goes back to its newest whole
    window; the other one completes the window that it was writing."""
    nodes = cluster.start_nodes(MEMBERS)
    losing = WindowedJob(cluster, nodes[:-1], name="team/losing")
    other = WindowedJob(cluster, nodes[1:], name="team/other")
    for job in (losing, other):
        job.form()
        job.start_trainers()
        job.begin_window()
    for job in (other, losing):
        job.end_window()
        job.begin_window()
    whole = losing.generation
    cluster.daemons[losing.nodes[0]].lose()
    other.end_window()
    (losing.nodes[0],) = cluster.start_nodes(1)
    losing.form()
    assert losing.check_restored(losing.start_trainers(), whole) == whole
    for job in (losing, other):
        job.begin_window()
    for job in (losing, other):
        job.end_window()
    assert other.epoch == 1
    for job in (losing, other):
        newest = job.generation
        job.form()
        assert job.check_restored(job.start_trainers(), newest) == newest


def test_sigterm_ends_a_daemon_at_once_and_the_next_one_takes_everything_over(
    combination: Combination,
) -> None:
    with RawCluster(plain=True) as cluster:
        job = combination.job(cluster, cluster.start_nodes(3))
        job.form()
        job.start_trainers()
        newest = job.train(2)
        for node in job.nodes:
            began = time.monotonic()
            assert cluster.daemons[node].kill(signal.SIGTERM) == 0
            assert time.monotonic() - began < AT_ONCE_S
            cluster.restart(node)
            assert cluster.daemons[node].logged("daemon_started")[-1]["adopted_jobs"] == [job.name]
        job.form()
        restored = job.start_trainers()
        assert job.check_restored(restored, newest) == newest
        assert {source for _, _, source in restored} == {"local"}
        job.train(2)


def test_sigusr1_prints_what_each_thread_does_and_disturbs_nothing(cluster: RawCluster) -> None:
    job = RawJob(cluster, cluster.start_nodes(2))
    job.form()
    job.start_trainers()
    daemon = job.daemon(0)
    daemon.send_signal(signal.SIGUSR1)
    for part in ("Current thread", "holdfast_daemon/__main__.py"):  # thread by thread
        wait_for(f"the stacks: {part}", lambda part=part: part in daemon.log.read_text())  # type: ignore[misc]
    assert daemon.logged("daemon_started")
    job.train(2)


def test_an_idle_daemon_costs_almost_nothing() -> None:
    control = ControlServer(heartbeat_s=HEARTBEAT_S)
    with RawCluster(plain=True, control=control) as cluster:
        job = RawJob(cluster, cluster.start_nodes(2))
        job.form()
        job.start_trainers()
        job.train(3)
        processes = [psutil.Process(_pid(job, member)) for member in range(job.size)]
        wait_for("the daemons to settle", lambda: all(_settled(job, m) for m in range(job.size)))
        for _ in range(LOOKS_MAX):
            share = max(_shares([process.pid for process in processes]))
            if share < 0.01:
                break
        memory = max(process.memory_full_info().uss for process in processes)
        print(f"idle: {share:.2%} of a core, private {memory / 1e6:.0f} MB")
        assert share < 0.01
        assert memory < 120e6


def _shares(pids: list[int]) -> list[float]:
    """For each process, the share of a core that it takes for a while."""
    before = [_running_s(pid) for pid in pids]
    threading.Event().wait(QUIET_S)
    return [(_running_s(pid) - was) / QUIET_S for pid, was in zip(pids, before, strict=True)]


def _running_s(pid: int) -> float:
    """The processor time of the threads of `pid`, to the nanosecond: counted in clock ticks, an
    idle daemon's is a handful."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def _pid(job: RawJob, member: int) -> int:
    process = job.daemon(member).process
    assert process is not None
    return process.pid


def _settled(job: RawJob, member: int) -> bool:
    held = job.daemon(member).job(job.name)
    return not held["rebuilding"] and all(p["state"] != "building" for p in held["parity"])
