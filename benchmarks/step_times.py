"""What it costs a step that a session measures its parts (`holdfast._session.step_times`).

    make bench NAME=steptimes

Measures the calls of one step in one process, on one group of one rank: what a wait takes longer
than without the measurement, what the boundary of a step takes, and what the gradients of a
DistributedDataParallel take. Prints them, and the part of a step that they are together, for a step
of `--step-ms` with `--waits` collectives. Of the medians of a window, which come once in many
steps, it has its part.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported
from torch.nn.parallel import DistributedDataParallel

from holdfast._copying.devices import CpuDevice
from holdfast._session import step_times, torch_waits
from holdfast._session.step_times import StepMeter
from holdfast_core.stragglers import WINDOW_STEPS
from holdfast_core.topology import Topology

ROUNDS, CALLS = 25, 1000
GOAL = 0.002
"""Part of a step that measuring may cost."""


def call_ns(function: Callable[[], object]) -> float:
    """Nanoseconds of a call, as processor time: other work on the machine adds little to it."""
    began_ns = time.thread_time_ns()
    for _ in range(CALLS):
        function()
    return (time.thread_time_ns() - began_ns) / CALLS


def wait_ns(work: dist.Work) -> float:
    """Nanoseconds by which a wait takes longer than with torch's own method, by runs in turn."""
    plain = partial(dist.Work.wait, work)  # before it is replaced
    meter = torch_waits.measured(Topology(dp=1), 0, CpuDevice())
    measured = partial(dist.Work.wait, work)
    found = median(call_ns(measured) - call_ns(plain) for _ in range(ROUNDS))
    torch_waits.stop_measuring(meter)
    return found


def boundary_ns() -> float:
    """Nanoseconds of a step's boundary, within a window."""
    meter, step = StepMeter(), 0

    def end_step() -> None:
        nonlocal step
        step += 1
        meter.on_step(step)

    return median(call_ns(end_step) for _ in range(ROUNDS))


def medians_ns(step_ms: float) -> float:
    """Nanoseconds of the medians of a window, divided among its steps of such a length."""
    steps = max(WINDOW_STEPS, math.ceil(step_times.WINDOW_S / (1e-3 * step_ms)))
    steps_ns, meter, step = [], StepMeter(), 0
    meter.on_step(step)
    for _ in range(step_times.SKIPPED_WINDOWS + ROUNDS):
        for _ in range(steps - 1):
            step += 1
            meter.on_step(step)
        meter._window_began_s -= step_times.WINDOW_S  # as if the steps had taken so long
        step += 1
        began_ns = time.thread_time_ns()
        times = meter.on_step(step)
        if times is not None:
            steps_ns.append((time.thread_time_ns() - began_ns) / steps)
    assert len(steps_ns) == ROUNDS, "each window but the first has medians"
    return median(steps_ns)


def gradients_ns(parameters: int) -> float:
    """Nanoseconds to read when the gradients of so many parameters were complete."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(parameters)))
    replica = DistributedDataParallel(layers)
    meter = torch_waits.measured(Topology(dp=1), 0, CpuDevice())
    replica(torch.ones(1, 1)).sum().backward()

    def read() -> None:
        meter.on_forward(replica.reducer, time.monotonic())
        meter.before_optimizer(time.monotonic())

    found = median(call_ns(read) for _ in range(ROUNDS))
    torch_waits.stop_measuring(meter)
    return found


def main() -> int:
    """Measure, print, and return 1 if measuring costs more than the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=100.0, help="length of the step (100)")
    parser.add_argument("--waits", type=int, default=100, help="collectives in it (100)")
    parser.add_argument("--parameters", type=int, default=200, help="of the model (200)")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    one_wait_ns, gradients = wait_ns(work), gradients_ns(options.parameters)
    dist.destroy_process_group()
    boundary, medians = boundary_ns(), medians_ns(options.step_ms)
    total_ns = options.waits * one_wait_ns + boundary + medians + gradients
    part = total_ns / (options.step_ms * 1e6)
    print(f"a wait takes longer by                 {one_wait_ns:8.0f} ns")
    print(f"the boundary of a step                 {boundary:8.0f} ns")
    print(f"its part of a window's medians         {medians:8.0f} ns")
    print(f"the gradients of {options.parameters} parameters         {gradients:8.0f} ns")
    print(
        f"part of a step of {options.step_ms:g} ms with {options.waits} waits: {part:.4%} "
        f"(goal: {GOAL:.1%})"
    )
    return 0 if part <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
