"""A trainer is killed while its tensors are copied, and the next one has the step before."""

from __future__ import annotations

import mmap
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import killed_trainer
import pytest
import torch
from harness import RawCluster, RawJob
from machines import Machine
from waiting import wait_for

from holdfast_core.snapshots.layouts import SLOTS_MAX, Layout, decode_layout

ATTEMPTS = 5
WAIT_S = 30.0


@pytest.fixture
def job(arenas: Path) -> Iterator[RawJob]:
    arguments = ("--metrics-port", "0", "--budget", str(8 << 30))
    with RawCluster(arguments=arguments, directory=arenas / "cluster") as cluster:
        made = RawJob(cluster, cluster.start_nodes(1))
        yield made
        print(cluster.report())


@dataclass
class Arena:
    """A look at the first and the last number of the weight in each slot."""

    memory: mmap.mmap
    layout: Layout

    def ends(self, slot: int) -> tuple[float, float]:
        (weight,) = [entry for entry in self.layout.entries if entry.tensor == "weight"]
        at = slot * self.layout.slot_bytes + weight.offset
        (first,) = struct.unpack_from("<f", self.memory, at)
        (last,) = struct.unpack_from("<f", self.memory, at + weight.nbytes - 4)
        return float(first), float(last)

    def torn(self) -> set[float]:
        """Steps of which a slot holds only the beginning."""
        ends = [self.ends(slot) for slot in range(SLOTS_MAX)]
        return {first for first, last in ends if first > last}


def arena_of(root: Path) -> Arena:
    """The arena of the only rank, once there is one."""
    wait_for("an arena", lambda: list(root.glob("jobs/*/arenas/*/arena")), WAIT_S)
    (path,) = root.glob("jobs/*/arenas/*/arena")
    wait_for("its room", lambda: path.stat().st_size, WAIT_S)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Arena(memory, decode_layout((path.parent / "layout.json").read_bytes()))


def kill_in_mid_copy(machine: Machine, job: RawJob, socket: str, nbytes: int) -> tuple[int, bool]:
    """Start a trainer and kill it in the midst of a copy.

    Returns:
        (newest step that it reported as committed, whether a copy was really cut off).
    """
    command = [sys.executable, killed_trainer.__file__, machine.kind, socket, job.name, str(nbytes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = child.stdout.readline()
    assert first, "the trainer ended before its first step was committed"
    arena = arena_of(job.daemon(0).root)
    before = arena.torn()  # left by an earlier one
    while child.poll() is None and not arena.torn() - before:
        pass  # a copy takes milliseconds
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read()
    assert child.wait(WAIT_S) == -signal.SIGKILL
    child.stdout.close()
    torn = bool(arena.torn() - before)
    arena.memory.close()
    return int((first + rest).split()[-1]), torn


def test_a_trainer_that_is_killed_in_mid_copy_leaves_the_step_before(
    machine: Machine, job: RawJob
) -> None:
    nbytes = (1 << 30) if machine.is_cuda else (96 << 20)
    daemon = job.daemon(0)
    socket = str(daemon.socket)
    for _ in range(ATTEMPTS):
        job.form()
        step, torn = kill_in_mid_copy(machine, job, socket, nbytes)
        if torn:
            break
    assert torn, f"{ATTEMPTS} kills came before or after a copy"
    job.form()
    model = killed_trainer.Model(machine.kind, nbytes)
    session = killed_trainer.session_of(model, socket, job.name)
    assert session.restore() == step
    session.close()
    assert bool(torch.all(model.weight == step))
