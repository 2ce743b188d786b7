"""The example trainer of pipeline stages, slowed down, with a snapshot at every n-th step only and,
where a test asks for it, stages that draw other numbers in a replay.

Faults are as in `staying_trainer`, at the points `repeat-<n>` before the n-th step that a process
repeats alone.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from staying_trainer import Faults

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import train_moe_pipeline

from holdfast import SaveHandle
from holdfast._elastic.session import ElasticSession
from holdfast._session.protected import ProtectedSession
from holdfast._session.unprotected import UnprotectedSession

PACE_S = 0.1
"""Part of each step in which a rank computes nothing: ranks outnumber cores, and a test reads their
logs."""


def save_every(steps: int) -> None:
    """Let only every n-th save be taken."""
    owner: Any = ProtectedSession
    save, no_session = owner.save, UnprotectedSession()

    def sometimes(session: ProtectedSession, step: int) -> SaveHandle:
        handle: SaveHandle = no_session.save(step) if step % steps else save(session, step)
        return handle

    owner.save = sometimes


def change_steps(faults: Faults, *, diverge: bool) -> None:
    """Slow each step down, make each step that is repeated a point, and put random generators into
    another state before it, if `diverge`."""
    owner: Any = ElasticSession
    begin = owner.begin
    repeated = itertools.count(1)

    def begin_differently(session: ElasticSession, step: int) -> None:
        begin(session, step)
        time.sleep(PACE_S)
        if session._replaying is None:
            return
        faults.at(f"repeat-{next(repeated)}")
        if diverge:
            torch.manual_seed(step)

    owner.begin = begin_differently


if __name__ == "__main__":
    every, diverge, directory, *rest = sys.argv[1:]
    save_every(int(every))
    faults = Faults(Path(directory), int(os.environ["RANK"]))
    change_steps(faults, diverge=diverge == "diverge")
    train_moe_pipeline.main(["--directory", directory, *rest])
