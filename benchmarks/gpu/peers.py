"""The same device state saved by Holdfast and by other packages, in one run.

- `blocked_NAME`: until training may change its tensors, when nothing is computed meanwhile;
- `survives_NAME`: until the bytes survive this process;

each against one copy of the same bytes to pinned memory, and in memory only, where each package is
at its best. Packages that are not installed, or fail, are skipped by name, with the reason.

    python -m benchmarks.gpu.peers --out FILE.json
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import holdfast
from benchmarks.floors import SHARED_MEMORY
from benchmarks.gpu.arenas import JOB, one_daemon
from benchmarks.gpu.results import Pair, Results, run, settle
from benchmarks.gpu.room import GIB, MIB, state_bytes
from benchmarks.measure import timed
from benchmarks.peers import PEERS

STATE_BYTES_MAX = 2 * GIB
PREPARE_S, LIMIT_S = 4.0, 65.0
TENSORS = 32
WARM_UPS, REPETITIONS = 1, 3
WITHIN_S = 60.0
NEEDS = {"dlrover_flash": "dlrover", "safetensors": "safetensors"}
"""Peer → package that it needs beside torch."""

FOREIGN_PROCESS = "dcp_async_process"
"""Peer that starts a process, which imports torch."""

Save = Callable[[int], float]
"""Save a step until its bytes survive this process; return the seconds that training waited."""


def measure(results: Results) -> None:
    """Measure all figures."""
    nbytes = state_bytes(results, prepare_s=PREPARE_S, most=STATE_BYTES_MAX, small=4 * MIB)
    elements = nbytes // 4 // TENSORS
    model = nn.ParameterList(
        nn.Parameter(torch.randn(elements, device=results.device)) for _ in range(TENSORS)
    )
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    floor = _Floor(results, tensors)
    results.attempt("blocked_holdfast", partial(_holdfast, results, floor, model, nbytes))
    for name in ("torch_save", "safetensors", "dcp_async_thread", FOREIGN_PROCESS, "dlrover_flash"):
        needed = NEEDS.get(name, "torch")
        if importlib.util.find_spec(needed) is None:
            results.skip(f"blocked_{name}", f"{needed} is not installed")
        elif results.small and name == FOREIGN_PROCESS:
            results.skip(f"blocked_{name}", "its process takes longer to start than a short run")
        else:
            least_s = 15.0 if name in {FOREIGN_PROCESS, "dlrover_flash"} else 6.0
            compare = partial(_peer, results, floor, name, tensors)
            results.attempt(f"blocked_{name}", compare, least_s)


class _Floor:
    """One copy of all tensors' bytes to pinned memory."""

    def __init__(self, results: Results, tensors: dict[str, Tensor]) -> None:
        self._device = results.device
        self._source = torch.cat([*tensors.values()])
        self._pinned = torch.empty(self._source.shape, pin_memory=results.on_gpu)

    def __call__(self) -> float:
        """Seconds of the copy."""
        settle(self._device)

        def copy() -> None:
            self._pinned.copy_(self._source, non_blocking=True)
            settle(self._device)

        return timed(copy)


def _holdfast(results: Results, floor: _Floor, model: nn.Module, nbytes: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        one_daemon(nbytes) as daemon,
        holdfast.init(
            model=model, optimizer=optimizer, socket=daemon.socket, job=JOB, rank=0
        ) as session,
    ):
        session.restore()
        session.prepare()

        def save(step: int) -> float:
            begin_s = time.perf_counter()
            handle = session.save(step)
            session.wait_staged()
            blocked_s = time.perf_counter() - begin_s
            handle.committed.result(WITHIN_S)
            return blocked_s

        _compare(results, floor, "holdfast", save)


class _PeerError(Exception):
    """Failure of another package, which is no failure of ours."""


def _peer(results: Results, floor: _Floor, name: str, tensors: dict[str, Tensor]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=SHARED_MEMORY))
    try:
        peer = PEERS[name](directory)

        def save(step: int) -> float:
            try:
                return peer.save(step, tensors)
            except Exception as error:
                raise _PeerError(f"{type(error).__name__}: {error}") from error

        try:
            _compare(results, floor, name, save)
        finally:
            peer.close()
    except _PeerError as error:
        results.skip(f"blocked_{name}", f"the package failed: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _compare(results: Results, floor: _Floor, name: str, save: Save) -> None:
    blocked: list[Pair] = []
    survived: list[Pair] = []
    for turn in range(-WARM_UPS, 1 if results.small else REPETITIONS):
        floor_s = floor()
        begin_s = time.perf_counter()
        blocked_s = save(turn + WARM_UPS + 1)
        survived_s = time.perf_counter() - begin_s
        if turn >= 0:
            blocked.append((blocked_s, floor_s))
            survived.append((survived_s, floor_s))
    results.durations(f"blocked_{name}", blocked, "pinned copy")
    results.durations(f"survives_{name}", survived, "pinned copy")


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.peers", str(__doc__), measure, limit_s=LIMIT_S))
