"""How a rank divides its steps: on a clock of the test, and with waits of torch itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from holdfast._copying.devices import CpuDevice, CudaDevice
from holdfast._session import step_times, torch_waits
from holdfast._session.step_times import WAITS_MAX, WINDOW_S, WINDOW_STEPS_MAX, StepMeter
from holdfast.testing import FakeDaemon
from holdfast_core.stragglers import WINDOW_STEPS, StepTimes
from holdfast_core.topology import Topology

PAUSE_S = 0.02


class Clock:
    """The clock of the module, which a test sets."""

    def __init__(self) -> None:
        self.now_s, self.processor_s = 1000.0, 50.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.processor_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_times, "time", clock)
    monkeypatch.setattr(step_times, "delayed_s", lambda: 0.0)
    return clock


def run_step(clock: Clock, meter: StepMeter, *, own_s: float = 0.2, wait_s: float = 0.05) -> None:
    """A step of own work, a wait for others, and the same time in which Holdfast copies."""
    began_s = clock.now_s
    clock.now_s += own_s
    clock.processor_s += own_s / 2
    meter.on_batch(began_s, began_s + own_s / 4)
    meter.on_wait(clock.now_s, clock.now_s + wait_s)
    clock.now_s += wait_s
    meter.on_held(clock.now_s, clock.now_s + wait_s)
    clock.now_s += wait_s


def window(clock: Clock, meter: StepMeter, first: int = 1, every: int = 1) -> StepTimes | None:
    """Train until a window has ended; returns what was reported of it."""
    found = [meter.on_step(first - every)]
    for step in range(first, first + 10 * WINDOW_STEPS * every, every):
        for _ in range(every):
            run_step(clock, meter)
        found.append(meter.on_step(step))
    return next(filter(None, found), None)


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_is_divided_into_own_work_waiting_and_the_time_of_holdfast(
    clock: Clock, every: int
) -> None:
    times = window(clock, StepMeter(stage=2), every=every)
    assert times is not None
    assert (times.window, times.steps, times.stage) == (1, WINDOW_STEPS, 2)
    assert times.step_s == pytest.approx(0.3) and times.own_s == pytest.approx(0.2)
    assert times.wait_s == pytest.approx(0.05) and times.data_s == pytest.approx(0.05)
    assert times.own_spread_s == pytest.approx(0.0, abs=1e-9)
    assert times.processor_s == pytest.approx(0.1)


def test_the_first_window_is_not_reported_and_short_steps_make_no_short_windows(
    clock: Clock,
) -> None:
    meter, found = StepMeter(), list[tuple[int, StepTimes]]()
    for step in range(1000):
        clock.now_s += 0.01
        if (times := meter.on_step(step)) is not None:
            found.append((step, times))
    assert [times.window for _, times in found] == [*range(1, len(found) + 1)]
    assert found[0][0] == pytest.approx(200, abs=2) and found[0][1].steps in (100, 101)


@pytest.mark.parametrize(("passed", "step_s"), [(1, 0.001), (10, 0.01), (10, 0.1)])
def test_a_delay_counts_for_all_steps_of_a_window_of_which_few_are_kept(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, passed: int, step_s: float
) -> None:
    """A tenth of the time passes without a processor; `passed` steps end with each save."""
    monkeypatch.setattr(step_times, "delayed_s", lambda: (clock.now_s - 1000.0) / 10)
    meter, found, saves = StepMeter(), list[StepTimes](), 0
    while len(found) < 3:
        for _ in range(passed):
            clock.now_s += step_s
        saves += 1
        if (times := meter.on_step(passed * saves)) is not None:
            found.append(times)
        assert len(meter._steps) <= WINDOW_STEPS_MAX
    for times in found:
        calls = max(WINDOW_S / (passed * step_s), WINDOW_STEPS)
        assert times.steps == pytest.approx(min(calls, WINDOW_STEPS_MAX), abs=1)
        assert times.step_s == pytest.approx(step_s)
        assert times.processor_s == pytest.approx(step_s / 10)


def test_a_wait_within_the_time_of_holdfast_counts_once(clock: Clock) -> None:
    meter = StepMeter()
    meter.on_step(0)
    for step in range(1, 100):
        clock.now_s += 0.1
        began_s = clock.now_s
        meter.on_wait(began_s + 0.01, began_s + 0.03)
        meter.on_held(began_s, began_s + 0.05)
        clock.now_s += 0.05
        if (times := meter.on_step(step)) is not None:
            break
    assert times is not None
    assert times.own_s == pytest.approx(0.1) and times.wait_s == pytest.approx(0.02)


def test_many_waits_of_a_step_take_bounded_memory(clock: Clock) -> None:
    meter = StepMeter()
    meter.on_step(0)
    for step in range(1, 3 * WINDOW_STEPS):
        for _ in range(3 * WAITS_MAX):
            meter.on_wait(clock.now_s, clock.now_s + 1e-4)
            clock.now_s += 1e-4
        assert len(meter._waits) <= WAITS_MAX
        clock.now_s += 0.2
        if (times := meter.on_step(step)) is not None:
            break
    assert times is not None
    assert times.wait_s == pytest.approx(3e-4 * WAITS_MAX) and times.own_s == pytest.approx(0.2)


def test_a_backward_pass_of_ddp_waits_from_its_last_gradient_on(clock: Clock) -> None:
    meter = StepMeter()
    reducer = SimpleNamespace(get_backward_stats=lambda: [40_000_000, 60_000_000, 0])
    meter.on_step(0)
    for step in range(1, 100):
        clock.now_s += 0.1
        meter.on_forward(reducer, clock.now_s)
        meter.on_wait(clock.now_s + 0.01, clock.now_s + 0.02)  # within the backward pass
        meter.on_wait(clock.now_s + 0.07, clock.now_s + 0.08)  # after it: part of that wait
        clock.now_s += 0.1
        meter.before_optimizer(clock.now_s)
        meter.before_optimizer(clock.now_s)
        if (times := meter.on_step(step)) is not None:
            break
    assert times is not None
    assert times.wait_s == pytest.approx(0.01 + 0.04) and times.own_s == pytest.approx(0.15)


def test_going_back_or_another_thread_begins_anew(clock: Clock) -> None:
    meter = StepMeter()
    for step in (1, 2, 3, 2, 3):
        clock.now_s += 0.1
        meter.on_step(step)
    assert len(meter._steps) == 1
    thread = threading.Thread(target=meter.on_step, args=(4,))
    thread.start()
    thread.join()
    assert meter._steps == [] and meter.thread == thread.ident


# --- torch ----------------------------------------------------------------------------------------


@pytest.fixture
def meter() -> Iterator[StepMeter]:
    meter = torch_waits.measured(Topology(dp=1), 0, CpuDevice())
    meter.on_step(0)
    yield meter
    torch_waits.stop_measuring(meter)


@pytest.fixture
def group() -> Iterator[None]:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def waited_s(meter: StepMeter) -> float:
    return sum(end - begin for begin, end in meter._waits)


@pytest.mark.parametrize(
    "collective",
    [
        dist.all_reduce,
        lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
        lambda tensor: dist.all_gather([tensor], tensor),
        lambda tensor: dist.all_to_all_single(tensor, tensor.clone()),
        lambda tensor: dist.broadcast(tensor, 0),
        lambda tensor: dist.barrier(),
    ],
)
@pytest.mark.usefixtures("group")
def test_waits_of_the_training_thread_are_seen(meter: StepMeter, collective: Any) -> None:
    collective(torch.ones(4))
    assert len(meter._waits) >= 1
    before = len(meter._waits)
    thread = threading.Thread(target=collective, args=(torch.ones(4),))
    thread.start()
    thread.join()
    assert len(meter._waits) == before  # Holdfast's own threads, and those of libraries
    torch_waits.stop_measuring(meter)
    collective(torch.ones(4))
    assert meter._waits == []


@pytest.mark.usefixtures("group")
def test_a_ddp_tells_when_its_gradients_were_complete(meter: StepMeter) -> None:
    model, incomplete_s = DistributedDataParallel(torch.nn.Linear(4, 4)), list[float]()

    def slow(gradient: torch.Tensor) -> torch.Tensor:
        incomplete_s.append(time.monotonic() + 2 * PAUSE_S)
        time.sleep(2 * PAUSE_S)
        return gradient

    began_s = time.monotonic()
    output = model(torch.ones(2, 4))
    forward_s = time.monotonic() - began_s  # in which the reducer's clock may have begun
    output.register_hook(slow)
    output.sum().backward()
    complete_s = time.monotonic()
    time.sleep(PAUSE_S)  # stands for the others' gradients
    now_s = time.monotonic()
    meter.before_optimizer(now_s)
    assert now_s - complete_s - forward_s <= waited_s(meter) < now_s - incomplete_s[0]


class _Slow(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        time.sleep(PAUSE_S)
        return index


def test_the_time_of_a_data_loader_is_seen(meter: StepMeter) -> None:
    assert len(list(DataLoader(_Slow()))) == 3
    assert meter._data_s >= 3 * PAUSE_S


def test_a_session_reports_its_times_to_the_daemon(
    trainer: Any, open_session: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "WINDOW_S", 0.0)
    session = open_session(trainer, daemon, report_interval_s=0.0)
    for step in range(1, 3 * WINDOW_STEPS):
        trainer.train()
        session.save(step).committed.result(60)
    session.prepare()
    times = daemon.reports[-1].times
    assert times is not None and times.window == 1 and times.steps == WINDOW_STEPS
    assert 0 < times.own_s <= times.step_s
    session.close()
    assert torch_waits._Measuring.newest is None


class _Elsewhere:
    """A device that is not the CPU, and copies as that does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(CpuDevice(), name)


def test_a_session_on_another_device_reports_no_times(
    trainer: Any, open_session: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host only queues work there, and a rank with a slow host would look like a straggler."""
    monkeypatch.setattr(step_times, "WINDOW_S", 0.0)
    monkeypatch.setattr("holdfast._init.device_of", lambda tensors: _Elsewhere())
    session = open_session(trainer, daemon, report_interval_s=0.0)
    for step in range(1, 3 * WINDOW_STEPS):
        trainer.train()
        session.save(step).committed.result(60)
    session.prepare()
    assert daemon.reports and daemon.reports[-1].times is None
    assert torch_waits._Measuring.newest is None


@pytest.mark.parametrize("offloaded", [False, True])
def test_nothing_of_torch_is_replaced_where_a_gpu_computes(
    monkeypatch: pytest.MonkeyPatch, offloaded: bool
) -> None:
    replaced = list[bool]()
    monkeypatch.setattr(torch_waits, "_replace_methods", lambda: replaced.append(True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: offloaded)
    device = CpuDevice() if offloaded else object.__new__(CudaDevice)
    meter = torch_waits.measured(Topology(dp=1), 0, device)
    assert replaced == [] and torch_waits._Measuring.newest is None
    assert [meter.on_step(step) for step in range(3)] == [None] * 3


@pytest.mark.usefixtures("group")
def test_a_compiler_follows_a_wait_without_a_warning(meter: StepMeter) -> None:
    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        return tensor + 1

    compiled = torch.compile(reduce, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert meter.on_step(1) is None


def test_an_error_ends_the_measurement_and_nothing_else(
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> list[int]:
        raise RuntimeError("no statistics")

    monkeypatch.setattr(step_times, "WINDOW_S", 0.0)
    session = open_session(trainer, daemon, report_interval_s=0.0)
    caplog.set_level(logging.DEBUG, "holdfast")
    for step in range(1, 3 * WINDOW_STEPS):
        meter = torch_waits._Measuring.newest
        assert meter is not None
        meter.on_forward(SimpleNamespace(get_backward_stats=broken), time.monotonic())
        trainer.train()
        session.save(step).committed.result(60)
    session.prepare()
    assert daemon.reports[-1].times is None
    logged = [each for each in caplog.records if "not measured any more" in each.message]
    assert [each.levelno for each in logged] == [logging.DEBUG]


def test_no_reducer_is_kept_after_its_step_nor_after_the_measurement(clock: Clock) -> None:
    meter, reducer = StepMeter(), SimpleNamespace(get_backward_stats=list)
    meter.on_step(0)
    meter.on_forward(reducer, clock.now_s)
    meter.on_step(1)
    assert meter._backward is None
    meter.on_forward(reducer, clock.now_s)
    torch_waits.stop_measuring(meter)
    meter.on_forward(reducer, clock.now_s)
    assert meter._backward is None
