"""Two pipeline stages whose waits for each other are marked without the script: snapshots wait for
them, and are copied in them."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import reserve_port
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.torch_version import TorchVersion

import holdfast
from holdfast import elastic
from holdfast._copying.bubbles import Bubbles
from holdfast._copying.schedule_waits import FUNCTIONS, PrivateFunction, mark_waits
from holdfast._elastic.session import ElasticSession
from holdfast.testing import FakeDaemon

RANKS, STEPS_MAX, WAIT_S = 2, 600, 60
COMPUTE_S = 0.03
"""Seconds that a stage computes for a microbatch."""
WIDTH, MICROBATCHES = 300, 2
WAIT = FUNCTIONS[0]
TOPOLOGY = holdfast.Topology(dp=1, pp=RANKS)
Run = Callable[[Any], None]


class Stage(nn.Module):
    """A layer that takes its time, and a parameter without a gradient that is larger than all
    messages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.ballast = nn.Parameter(torch.ones(1000, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end_s, numbers = time.monotonic() + COMPUTE_S, torch.ones(64, 64)
        while time.monotonic() < end_s:
            numbers @ numbers
        out: torch.Tensor = self.layer(x)
        return out


def by_hand(rank: int, pipeline: elastic.Pipeline, stage: Stage, *, marked: bool) -> Run:
    """All forward passes first; a script that marks its waits does that as well."""

    def run(session: holdfast.Session) -> None:
        waits, x = session.bubble if marked else nullcontext, torch.zeros(1, WIDTH)
        for number in range(MICROBATCHES):
            if rank == 0:
                pipeline.send_activation(number, stage(x).detach())
            else:
                with waits():
                    pipeline.receive_activation(number, x)
                stage(x)
        for number in range(MICROBATCHES):
            if rank == 1:
                pipeline.send_gradient(number, x)
            else:
                with waits():
                    pipeline.receive_gradient(number, x)

    return run


def of_torch(rank: int, stage: Stage, kind: Any) -> Run:
    x = torch.zeros(1, WIDTH)
    part: Any = PipelineStage(
        stage,
        rank,
        RANKS,
        torch.device("cpu"),
        input_args=x.clone().requires_grad_(rank > 0),
        output_args=x.clone().requires_grad_(),
    )
    schedule = kind(part, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    given = torch.ones(MICROBATCHES, WIDTH)

    def run(session: holdfast.Session) -> None:
        del session
        schedule.step(*([given] if rank == 0 else []), target=given if rank == 1 else None)

    return run


def copies_come_in_waits(
    rank: int, home: Path, stage: Stage, run: Run, pipeline: elastic.Pipeline | None
) -> None:
    """Train until the first stage has copied a snapshot in its wait, after it has computed."""
    home.mkdir(exist_ok=True)
    optimizer = torch.optim.SGD(stage.layer.parameters(), lr=0.0)

    def make() -> Any:
        return holdfast.init(
            model=stage,
            optimizer=optimizer,
            topology=TOPOLOGY,
            daemon=FakeDaemon(home, rank=rank, world_size=RANKS),
            settings=holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S),
        )

    session: Any = make() if pipeline is None else None
    if pipeline is not None:
        session = ElasticSession(pipeline.world, make, [optimizer], WAIT_S, pipeline=pipeline)
    in_wait = torch.zeros(1)
    for step in session.steps(STEPS_MAX):
        with step:
            run(session)
            saver = getattr(session, "_session", session)._saver
            # Copied before the optimizer asks for the tensors, but not while the stage computed.
            seen = not saver.busy and saver.bubbles.waited_s > COMPUTE_S
            # All of it, where nothing else slows copies down for some steps.
            seen = seen and saver.bubbles.copied_bytes >= stage.ballast.nbytes
            in_wait.fill_(seen or rank == 1)
            dist.all_reduce(in_wait, op=dist.ReduceOp.MIN)
            optimizer.step()
        if in_wait:
            break
    assert in_wait, "no snapshot was copied in a wait"
    if rank == 0:
        assert session.counters.bubble_s > COMPUTE_S
        assert session.counters.bubble_bytes >= stage.ballast.nbytes
    session.close()


def work(rank: int, port: int, directory: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    world = elastic.init("gloo")
    home = Path(directory)
    pipeline = elastic.Pipeline(world, TOPOLOGY, log_bytes=2**20)
    for marked in (False, True):
        stage = Stage()
        run = by_hand(rank, pipeline, stage, marked=marked)
        copies_come_in_waits(rank, home / f"marked-{marked}", stage, run, pipeline)
    for kind in (ScheduleGPipe, Schedule1F1B) if hasattr(schedules, WAIT.path) else ():
        stage = Stage()
        run = of_torch(rank, stage, kind)
        copies_come_in_waits(rank, home / kind.__name__, stage, run, None)
    world.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_snapshots_are_copied_while_a_stage_waits_for_another(tmp_path: Path) -> None:
    run_ranks(work, (reserve_port(), str(tmp_path)), RANKS)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="its schedules have none")
def test_the_schedules_of_torch_have_the_function_that_waits() -> None:
    assert WAIT.module == schedules.__name__
    assert callable(getattr(schedules, WAIT.path))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.path)
def test_schedules_without_that_function_stay_as_they_are(
    function: PrivateFunction, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older, bubbles = ModuleType(function.module), Bubbles(RANKS)
    monkeypatch.setitem(sys.modules, function.module, older)
    with caplog.at_level(logging.DEBUG, "holdfast"):
        for _ in range(2):
            mark_waits(bubbles)
    assert not hasattr(older, function.path.partition(".")[0])
    assert caplog.text.count(f" {function.path} in this version, so waits there") == 1


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Work:
    """A transfer of torch, whose wait takes a second of the virtual clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self) -> bool:
        self.clock.now += 1.0
        return True


class Library:
    """Replaces the module of Megatron-Core with one whose functions return `answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.answer = Clock(), None
        self.bubbles = Bubbles(RANKS, self.clock)
        module: Any = ModuleType(FUNCTIONS[1].module)
        module._p2p_ops = lambda **_: self.answer
        module.P2PCommunicator = type("P2PCommunicator", (), {})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        self.module = module

    def started(self, answer: Any) -> Any:
        self.answer = answer
        return self.module._p2p_ops(group=None)


def test_transfers_of_another_form_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    mark_waits(library.bubbles)
    work = Work(library.clock)
    for answer in (None, work, (work,)):
        assert library.started(answer) is answer
    assert library.started([None]) == [None] and library.started({"a": None}) == {"a": None}
    for count, [marked] in enumerate((library.started([work]), library.started([work])), 1):
        assert marked.wait() and library.bubbles.total_s == count
    assert library.started({"a": work})["a"].wait() and library.bubbles.total_s == 3.0
    assert copy.copy(marked).wait() and library.bubbles.total_s == 4.0


def test_a_static_method_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(monkeypatch)
    kind: Any = library.module.P2PCommunicator
    kind._communicate_shapes = staticmethod(lambda *shapes: shapes)
    with caplog.at_level(logging.DEBUG, "holdfast"):
        mark_waits(library.bubbles)
    assert kind()._communicate_shapes(1, 2) == (1, 2)
    assert "P2PCommunicator._communicate_shapes in this version, so waits there" in caplog.text


def test_an_exchange_of_shapes_is_not_marked_where_it_waits_for_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(monkeypatch)
    kind: Any = library.module.P2PCommunicator
    kind._communicate_shapes = lambda self: Work(library.clock).wait()
    mark_waits(library.bubbles)
    for devices, total_s in ((False, 1.0), (True, 1.0), (False, 2.0)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda found=devices: found)
        assert kind()._communicate_shapes() and library.bubbles.total_s == total_s
