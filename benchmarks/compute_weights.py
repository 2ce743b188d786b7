"""Saves without the compute weights that follow from their masters, beside saves with them.

The state is that of Adam in mixed precision: bfloat16 weights, float32 masters and two moments,
14 bytes for each parameter, of which 12 are stored. `weights_slot` compares the bytes of a slot,
`weights_staged` the time until training may go on, in which the weights are compared with their
masters.

    python -m benchmarks.compute_weights --bytes N --out FILE
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from benchmarks.floors import SHARED_MEMORY
from benchmarks.measure import REPETITIONS, WARM_UPS, Figure, Outcome, ratio, run_part
from holdfast._session.protected import ProtectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.layouts import decode_layout

BYTES_PER_PARAMETER = 14
TENSORS = 16
WITHIN_S = 120.0


class MixedState(torch.optim.Optimizer):
    """An optimizer that only has state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for p in (p for group in self.param_groups for p in group["params"]):
            master = p.detach().float()
            self.state[p] = {
                "master_param": master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }


def measure(nbytes: int) -> Outcome:
    """Both rows, for about `nbytes` of state."""
    each = nbytes // BYTES_PER_PARAMETER // TENSORS
    weights = [nn.Parameter(torch.randn(each).bfloat16()) for _ in range(TENSORS)]
    model, optimizer = nn.ParameterList(weights), MixedState(weights)
    staged: dict[bool, list[float]] = {True: [], False: []}
    slots: dict[bool, int] = {}
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        sessions = {}
        for stored in (True, False):
            daemon = FakeDaemon(Path(directory) / f"{stored}")
            session = holdfast.init(
                model=model,
                optimizer=optimizer,
                daemon=daemon,
                settings=holdfast.Settings(store_compute_weights=stored, nan_check_every=0),
            )
            assert isinstance(session, ProtectedSession)
            session.save(1).committed.result(WITHIN_S)
            home = next(iter(daemon.sealed().values())).home
            slots[stored] = decode_layout((home / "layout.json").read_bytes()).slot_bytes
            sessions[stored] = session
        for step in range(2, 2 + WARM_UPS + REPETITIONS):
            for stored in (True, False):
                began_s = time.perf_counter()
                handle = sessions[stored].save(step)
                handle.staged.result(WITHIN_S)
                staged[stored].append(time.perf_counter() - began_s)
                handle.committed.result(WITHIN_S)
        for session in sessions.values():
            session.close()
    size = slots[False] / slots[True]
    return Outcome(
        rows={
            "weights_slot": Figure(
                value=size, unit="× with them", low=size, high=size, repetitions=1
            ),
            "weights_staged": ratio(
                staged[False][WARM_UPS:], staged[True][WARM_UPS:], "× with them"
            ),
        }
    )


if __name__ == "__main__":
    run_part(lambda nbytes, folder: measure(nbytes), __doc__)
