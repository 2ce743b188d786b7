"""A trainer that saves step after step until it is killed.

Usage: `killed_trainer.py KIND SOCKET JOB BYTES`. After step n its only weight holds n everywhere.
It prints each step that is committed.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import holdfast

_WAIT_S = 60.0


class Model(nn.Module):
    """One weight."""

    def __init__(self, kind: str, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes // 4, device=kind))


def session_of(model: Model, socket: str, job: str) -> holdfast.Session:
    return holdfast.init(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        socket=socket,
        job=job,
        rank=0,
        settings=holdfast.Settings(start_wait_s=_WAIT_S),
    )


def _train(kind: str, socket: str, job: str, nbytes: str) -> None:
    model = Model(kind, int(nbytes))
    session = session_of(model, socket, job)
    step = session.restore() or 0
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        session.save(step).committed.result(_WAIT_S)
        print(step, flush=True)


if __name__ == "__main__":
    _train(*sys.argv[1:])
