"""Training changes tensors while a real daemon's arena is filled: nothing torn is ever restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RawCluster, RawJob
from torch import nn
from waiting import WAIT_S

import holdfast
from holdfast_core.snapshots.membership import Redundancy

TENSORS = 48
ELEMENTS = 1 << 18
"""Of each tensor: a copy of all takes longer than the start of the next change."""

SAVES = 8


def through_torch(parameters: list[nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for p in parameters:
            p.fill_(value)


def at_once(parameters: list[nn.Parameter], value: float) -> None:
    del value
    with torch.no_grad():
        torch._foreach_zero_([*parameters])


def through_data(parameters: list[nn.Parameter], value: float) -> None:
    for p in parameters:
        p.data.fill_(value)


class Plain:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[object, dict[str, Any]] = {}


WAYS = [through_torch, at_once, through_data]


def parameters_of(value: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((ELEMENTS,), value)) for _ in range(TENSORS)]


def session_of(job: RawJob, parameters: list[nn.Parameter], optimizer: object) -> holdfast.Session:
    daemon = job.daemon(0)
    return holdfast.init(
        model=nn.ParameterList(parameters),
        optimizer=optimizer,
        socket=daemon.socket,
        job=job.name,
        rank=0,
        settings=holdfast.Settings(start_wait_s=WAIT_S),
    )


@pytest.fixture
def job(cluster: RawCluster) -> RawJob:
    made = RawJob(cluster, cluster.start_nodes(1), redundancy=Redundancy.NONE)
    made.form()
    return made


def check_restored(job: RawJob, make: Callable[[list[nn.Parameter]], object], step: int) -> None:
    """In a new epoch: every element is of `step`."""
    job.form()
    parameters = parameters_of(-7.0)
    with session_of(job, parameters, make(parameters)) as session:
        assert session.restore() == step
        values = {float(v) for p in parameters for v in torch.unique(p.detach())}
    assert values == {float(step)}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_committed_although_training_did_not_wait_is_of_one_step(
    way: Callable[[list[nn.Parameter], float], None], job: RawJob
) -> None:
    parameters = parameters_of(1.0)
    with session_of(job, parameters, sgd(parameters)) as session:
        session.save(1).committed.result(WAIT_S)
        committed, dropped = 1, 0
        for step in range(2, SAVES + 2):
            through_torch(parameters, float(step))
            handle = session.save(step)
            way(parameters, -1.0)
            error = handle.committed.exception(WAIT_S)
            if error is None:
                committed = step
                break
            assert "changed in place" in str(error)
            dropped += 1
    assert committed > 1 or dropped == SAVES
    check_restored(job, sgd, committed)


@pytest.mark.timeout(120)
def test_a_loop_without_a_hook_has_every_save_committed_and_whole(job: RawJob) -> None:
    parameters = parameters_of(0.0)
    with session_of(job, parameters, Plain(parameters)) as session:
        for step in range(1, SAVES + 1):
            through_data(parameters, float(step))
            handle = session.save(step)
            through_data(parameters, -1.0)
            handle.committed.result(WAIT_S)
    check_restored(job, Plain, SAVES)
