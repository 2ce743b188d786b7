"""The `save()` call, and snapshots of many small tensors with and without gathering them.

- `save_call_large`, `save_call_small`: seconds in which the training thread is in `save()`, for a
  few large tensors and for 20,000 small ones;
- `blocked_large`, `blocked_small`: until the optimizer may change the tensors, when nothing is
  computed meanwhile, against a pinned copy of the same bytes;
- `save_changed_small`: of the call with small tensors, looking for those that moved;
- `staged_small_gathered`, `restored_small_gathered`: small tensors on a device are gathered there
  and cross over together, against the same snapshot with one copy for each (their floor);
- `staged_gathered_N`: the same for tensors of one size, which decides up to which size tensors are
  gathered (`GATHERED_BYTES_MAX`).

    python -m benchmarks.gpu.saving --out FILE.json
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn

import holdfast
from benchmarks.gpu.arenas import JOB, OpenArena, one_daemon, opened_arena
from benchmarks.gpu.copying import plan_of, random_bytes
from benchmarks.gpu.results import Goal, Results, in_turn, run, settle
from benchmarks.gpu.room import GIB, MIB, state_bytes
from benchmarks.measure import timed
from holdfast._copying.engine import CopyEngine
from holdfast._session.protected import ProtectedSession

LARGE_BYTES_MAX = 4 * GIB
LARGE_TENSORS = 16
SMALL_TENSORS, SMALL_ELEMENTS = 20_000, 256
PREPARE_S, LIMIT_S = 6.0, 65.0
THREADS = 2
SIZES = {
    "2KiB": 2048,
    "16KiB": 16 << 10,
    "64KiB": 64 << 10,
    "128KiB": 128 << 10,
    "256KiB": 256 << 10,
}
OF_SIZE_BYTES = 128 * MIB
WITHIN_S = 60.0
CALL = Goal(limit=5.0)


def measure(results: Results) -> None:
    """Measure all figures."""
    tensors = 400 if results.small else SMALL_TENSORS
    nbytes = state_bytes(results, prepare_s=PREPARE_S, most=LARGE_BYTES_MAX, small=4 * MIB)
    results.attempt("save_call_small", partial(_small_saves, results, tensors))
    results.attempt("save_call_large", partial(_large_saves, results, nbytes))
    if not results.on_gpu:
        for name in ("staged_small_gathered", "restored_small_gathered", "staged_gathered_2KiB"):
            results.skip(name, "needs a CUDA device")
        return
    small_bytes = 4 * SMALL_ELEMENTS
    with opened_arena(max(OF_SIZE_BYTES, tensors * small_bytes), results.device) as arena:
        engine = CopyEngine(THREADS, arena.device)
        gathering = partial(_gathering, results, arena, engine)
        results.attempt("staged_small_gathered", partial(gathering, "small", tensors, small_bytes))
        for name, size in SIZES.items():
            count = min(OF_SIZE_BYTES // size, tensors)
            figure = f"gathered_{name}"
            results.attempt(figure, partial(gathering, name, count, size))
        engine.close()


def _small_saves(results: Results, tensors: int) -> None:
    """Small tensors: a quarter each of parameters, two moments, and counts of steps."""
    device = results.device
    parameters = [
        nn.Parameter(torch.randn(SMALL_ELEMENTS, device=device)) for _ in range(tensors // 4)
    ]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    _saves(results, "small", nn.ParameterList(parameters), optimizer, None)


def _large_saves(results: Results, nbytes: int) -> None:
    """A few large tensors: parameters and their momenta."""
    elements = nbytes // 8 // LARGE_TENSORS
    parameters = [
        nn.Parameter(torch.randn(elements, device=results.device)) for _ in range(LARGE_TENSORS)
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    _saves(results, "large", nn.ParameterList(parameters), optimizer, CALL)


def _saves(
    results: Results,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    goal: Goal | None,
) -> None:
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
    nbytes = sum(tensor.nbytes for tensor in held)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=results.device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=results.on_gpu)
    calls: list[float] = []
    changed: list[float] = []
    pairs = []
    with one_daemon(nbytes * 5 // 4) as daemon:
        session = holdfast.init(
            model=model, optimizer=optimizer, socket=daemon.socket, job=JOB, rank=0
        )
        assert isinstance(session, ProtectedSession)
        with session:
            session.restore()
            session.prepare()
            for turn in range(-2, results.repetitions):
                floor_s = _copied_s(results, pinned, on_device)
                begin_s = time.perf_counter()
                handle = session.save(turn + 3)
                call_s = time.perf_counter() - begin_s
                session.wait_staged()
                blocked_s = time.perf_counter() - begin_s
                handle.committed.result(WITHIN_S)
                if turn >= 0:
                    calls.append(call_s)
                    pairs.append((blocked_s, floor_s))
                    changed.append(timed(session.live.has_changed))
    results.plain(f"save_call_{name}", [1e3 * seconds for seconds in calls], "ms", goal)
    results.plain(f"save_changed_{name}", [1e3 * seconds for seconds in changed], "ms")
    results.durations(f"blocked_{name}", pairs, "pinned copy")


def _copied_s(results: Results, pinned: torch.Tensor, source: torch.Tensor) -> float:
    settle(results.device)

    def copy() -> None:
        pinned.copy_(source, non_blocking=True)
        settle(results.device)

    return timed(copy)


def _gathering(
    results: Results, arena: OpenArena, engine: CopyEngine, name: str, count: int, size: int
) -> None:
    """Compare snapshots of `count` tensors of `size` bytes, gathered and one by one."""
    whole = random_bytes(count * size, results.device)
    tensors = [part.clone() for part in whole.split(size)]
    of_part = arena.part(whole.numel())
    digests: list[bytes] = []

    def stage(gathered_bytes_max: int) -> None:
        captured = engine.capture(plans[gathered_bytes_max], of_part.placed, arena.device.fence())
        digests[:] = [engine.finish(of_part.placed, b"", captured)]

    def back(gathered_bytes_max: int) -> None:
        plan = plans[gathered_bytes_max]
        engine.restore(plan, of_part.placed, whole.numel(), digests[0])

    plans = {limit: plan_of(tensors, limit) for limit in (0, size)}
    for figure, action in (("staged", stage), ("restored", back)):
        ours, floor = partial(action, size), partial(action, 0)
        pairs = in_turn(ours, floor, results.device, results.repetitions)
        if not torch.equal(torch.cat([*tensors]), whole):
            raise RuntimeError("tensors came back with other bytes")
        torch._foreach_zero_(tensors)
        results.durations(f"{figure}_{name}_gathered", pairs, "one copy for each tensor")


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.saving", str(__doc__), measure, limit_s=LIMIT_S))
