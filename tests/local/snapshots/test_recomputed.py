"""A node is lost whose replica was brought forward from gradients, not from its bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import RawCluster, RawJob
from moe_example import train_moe
from torch import nn
from waiting import WAIT_S, wait_for

import holdfast
from holdfast_core.job.snapshots import PartialExperts
from holdfast_core.snapshots.membership import Redundancy

RECEIVED = "holdfast_received_bytes_total"
COMPUTED = "holdfast_recomputed_units_total"
DIFFERED = "holdfast_recomputed_pieces_sent_total"
PULSES = "holdfast_loop_lag_seconds_count"
EXPERTS, WIDTH = 4, 128
STATE_BYTES = 14 * EXPERTS * WIDTH * WIDTH
"""Of a rank's experts: weights in bfloat16; master, moments in float32."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": Experts()})])


class Rank:
    """One rank in this process: random gradients, and a session with its node's daemon."""

    def __init__(self, job: RawJob, rank: int, *, recompute: bool = True) -> None:
        torch.manual_seed(10 * job.epoch + rank)
        self.model = Model()
        self.optimizer = train_moe().MasterAdamW(self.model.parameters(), lr=1e-3)
        daemon = job.daemon(rank)
        policy = PartialExperts(experts_per_layer=EXPERTS * 2, recompute=recompute)
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            topology=holdfast.Topology(dp=2, ep=2),
            socket=daemon.socket,
            job=job.name,
            rank=rank,
            settings=holdfast.Settings(policy=policy),
        )

    def train(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for p in self.model.parameters():
            tensors += [p, *self.optimizer.state[p].values()]
        return [tensor.detach().clone().reshape(-1) for tensor in tensors]


@pytest.fixture
def job(cluster: RawCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RawJob]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = RawJob(cluster, cluster.start_nodes(2), redundancy=Redundancy.REPLICATION)
    made.form()
    yield made


def run(job: RawJob, ranks: list[Rank], steps: int) -> None:
    for _ in range(steps):
        job.step += 1
        for rank in ranks:
            rank.train()
        handles = [rank.session.save(job.step) for rank in ranks]
        for handle in handles:
            handle.protected.result(WAIT_S)


def measured(job: RawJob, *samples: str) -> list[float]:
    """The metrics of both daemons together, once all is in them."""
    daemons = [job.daemon(member) for member in range(job.size)]
    before = [daemon.metric(PULSES) for daemon in daemons]
    wait_for(
        "two pulses",
        lambda: all(d.metric(PULSES) >= n + 2 for d, n in zip(daemons, before, strict=True)),
    )
    return [sum(daemon.metric(sample) for daemon in daemons) for sample in samples]


@pytest.mark.timeout(120)
def test_a_lost_node_comes_back_from_a_replica_that_was_computed(
    cluster: RawCluster, job: RawJob
) -> None:
    ranks = [Rank(job, rank) for rank in range(2)]
    for rank in ranks:
        assert rank.session.restore() is None
    run(job, ranks, 3)
    began = measured(job, RECEIVED, COMPUTED, DIFFERED)
    run(job, ranks, 4)
    received, computed, differed = (
        now - then
        for now, then in zip(measured(job, RECEIVED, COMPUTED, DIFFERED), began, strict=True)
    )
    assert (computed, differed) == (4 * 2 * EXPERTS, 0)
    # The layers' own part, with the step counters of their stacks (4 KiB each, 0086).
    assert received < 0.35 * 4 * 2 * STATE_BYTES, received / (8 * STATE_BYTES)

    wanted = [rank.state() for rank in ranks]
    for rank in ranks:
        rank.session.close()
    job.daemon(0).lose()
    job.nodes[0] = cluster.start_nodes(1)[0]
    job.form()
    again = [Rank(job, rank) for rank in range(2)]
    for rank, state in zip(again, wanted, strict=True):
        assert rank.session.restore() == job.step
        for found, right in zip(rank.state(), state, strict=True):
            assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
    run(job, again, 3)
    for rank in again:
        rank.session.close()


@pytest.mark.timeout(120)
def test_without_recomputation_the_state_crosses_the_network(job: RawJob) -> None:
    ranks = [Rank(job, rank, recompute=False) for rank in range(2)]
    for rank in ranks:
        rank.session.restore()
    run(job, ranks, 2)
    (began,) = measured(job, RECEIVED)
    run(job, ranks, 2)
    (received,) = measured(job, RECEIVED)
    assert received - began >= 2 * 2 * STATE_BYTES
    for rank in ranks:
        rank.session.close()
