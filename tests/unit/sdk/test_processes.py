"""Two ranks over gloo, each with a fake daemon over the same directory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixed_precision import MasterOptimizer
from ranks import run_ranks
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import CorruptError, NoRecoveryLineError, ReplicaMismatchError
from holdfast_core.job.snapshots import ExpertChoice, PartialExperts, Selective
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout

WAIT_S = 60
WORLD = 2
STEPS_MAX = 200
LEFT_OUT = {"store_compute_weights": False}
MEASURED, STEPS_MAX = 8, 80
"""Steps after which speeds are known, and that are enough if copies are slow for a while."""


class MoE(nn.Module):
    """One layer: a dense part that replicas share, and stacked experts."""

    def __init__(self, seed: int, experts_seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(700, 700)])
        torch.manual_seed(experts_seed)
        weights = {"w": nn.Parameter(torch.randn(2, 300, 300))}
        self.moe = nn.ModuleDict({"experts": nn.ParameterDict(weights)})


def experts_of(model: nn.Module) -> torch.Tensor:
    return model.get_parameter("moe.experts.w")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1 * step)
    optimizer.step()


def open_session(
    rank: int,
    directory: str,
    model: nn.Module,
    optimizer: Any,
    *,
    ep: int,
    pp: int = 1,
    epoch: int = 1,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> holdfast.Session:
    return holdfast.init(
        model=model,
        optimizer=optimizer,
        topology=holdfast.Topology(dp=WORLD // pp, ep=ep, pp=pp),
        daemon=FakeDaemon(directory, rank=rank, world_size=WORLD, epoch=epoch, **more),
        settings=holdfast.Settings(
            start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, **(settings or {})
        ),
    )


def save_and_restore(rank: int, directory: str, ep: int) -> None:
    model = MoE(1, 10 + (rank if ep == 2 else 0))
    optimizer = torch.optim.AdamW(model.parameters())
    session = open_session(rank, directory, model, optimizer, ep=ep)
    assert session.restore() is None
    session.save(1).committed.result(WAIT_S)  # the state appears only afterwards
    for step in (2, 3):
        train(model, optimizer, step)
        session.save(step).committed.result(WAIT_S)
    session.close()

    other = MoE(7, 8 + rank)
    again = torch.optim.AdamW(other.parameters())
    resumed = open_session(rank, directory, other, again, ep=ep, epoch=2)
    assert resumed.restore() == 3
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert optimizer.state[p].keys() == again.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, again.state[q][key]), (name, key)
    resumed.close()


def mismatch(rank: int, directory: str) -> None:
    model = MoE(1, 10 + rank)  # the experts differ, the topology says that they are replicas
    session = open_session(rank, directory, model, torch.optim.SGD(model.parameters()), ep=1)
    for step in (1, 2):
        error = session.save(step).committed.exception(WAIT_S)
        assert isinstance(error, ReplicaMismatchError), error
        assert "layer0/expert0" in str(error)
        assert "[0, 1]" in str(error)
    assert isinstance(session.problem, ReplicaMismatchError)
    session.close()


def one_rank_is_corrupt(rank: int, directory: str) -> None:
    model = MoE(1, 10 + rank)
    optimizer = torch.optim.SGD(model.parameters())
    session = open_session(rank, directory, model, optimizer, ep=2)
    session.save(1).committed.result(WAIT_S)
    session.close()
    daemon = FakeDaemon(directory, rank=rank)
    home = daemon.sealed()[Generation(1, 1)].home
    layout = decode_layout((home / "layout.json").read_bytes())
    if rank == 1:
        daemon.corrupt(Generation(1, 1), layout.entries[0].offset)
    dist.barrier()
    resumed = open_session(rank, directory, model, optimizer, ep=2, epoch=2)
    with pytest.raises(CorruptError, match=r"failed on ranks \[1\] of 2: rank 1: .*piece 0"):
        resumed.restore()
    resumed.close()


def ranks_disagree(rank: int, directory: str) -> None:
    model = MoE(1, 10 + rank)
    optimizer = torch.optim.SGD(model.parameters())
    session = open_session(rank, directory, model, optimizer, ep=2)
    for step in (1, 2):
        session.save(step).committed.result(WAIT_S)
    session.close()
    line = Generation(1, 1 + rank)
    resumed = open_session(rank, directory, model, optimizer, ep=2, epoch=2, line=line)
    with pytest.raises(NoRecoveryLineError, match=r"0: '1\.1', 1: '1\.2'"):
        resumed.restore()
    resumed.close()


def stages_of_a_pipeline(rank: int, directory: str) -> None:
    """Each waits for the other in bubbles, which the snapshots are copied in."""
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    session = open_session(rank, directory, model, optimizer, ep=1, pp=2)
    activations, used = torch.zeros(8, 700), torch.zeros(1)
    handle: Any = None
    for step in range(1, STEPS_MAX + 1):
        for _ in range(2):  # microbatches
            if rank == 0:
                dist.send(model(activations).detach(), 1)
                with session.bubble():
                    dist.recv(activations, 1)
            else:
                with session.bubble():
                    dist.recv(activations, 0)
                dist.send(model(activations).detach(), 0)
        train(model, optimizer, step)
        if handle is not None:
            handle.committed.result(WAIT_S)
        handle = session.save(step)
        if step == 1:  # the session opens
            handle.committed.result(WAIT_S)
        # Copies of a busy machine may take longer than a bubble.
        bubbles = session._saver.bubbles  # type: ignore[attr-defined]
        used.fill_(bubbles.schedule(1 << 20).bubble_bytes)
        dist.all_reduce(used, dist.ReduceOp.MIN)
        if step >= 5 and used > 0:
            break
    assert used > 0, "measured, and used"
    handle.committed.result(WAIT_S)
    wanted = [p.detach().clone() for p in model.parameters()]
    session.close()

    for p in model.parameters():
        p.data.zero_()
    resumed = open_session(rank, directory, model, optimizer, ep=1, pp=2, epoch=2)
    assert resumed.restore() == step
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), wanted, strict=True))
    resumed.close()


def experts_in_bubbles(rank: int, directory: str) -> None:
    """Copies wait almost a step for a bubble; the budget of experts is what they could do."""
    torch.manual_seed(rank)
    experts = nn.ModuleList([nn.Linear(300, 300) for _ in range(2)])
    size = (700, 2000)[rank]  # what every snapshot holds is more than the first stage copies
    layer = nn.ModuleDict({"dense": nn.Linear(size, size), "experts": experts})
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(rank): layer})})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"policy": Selective(loss_limit=1)}
    session = open_session(rank, directory, model, optimizer, ep=1, pp=2, settings=settings)
    activations, all_fit = torch.zeros(8, 700), torch.zeros(1)
    for step in range(1, STEPS_MAX):
        if rank == 0:
            busy(0.2)
            dist.send(activations, 1)
            with session.bubble():
                dist.recv(activations, 1)
        else:
            with session.bubble():
                dist.recv(activations, 0)
            busy(0.1)
            dist.send(activations, 0)
        train(model, optimizer, step)
        session.count_tokens(rank, [5, 5])
        handle = session.save(step)
        if step == 1:  # the session opens
            handle.committed.result(WAIT_S)
        all_fit.fill_(session.counters.loss.k == WORLD * 2)
        dist.all_reduce(all_fit, op=dist.ReduceOp.MIN)
        if step >= MEASURED and all_fit:  # later where something else slows copies down meanwhile
            break
    handle.committed.result(WAIT_S)
    bubbles = session._saver.bubbles  # type: ignore[attr-defined]
    assert rank == 1 or bubbles.waited_s > 0.05, "the pair was not tried"
    assert all_fit, "a step has time for every expert"
    session.close()


def busy(seconds: float) -> None:
    """Compute for so long, as a stage does with its microbatches."""
    end_s, numbers = time.monotonic() + seconds, torch.ones(64, 64)
    while time.monotonic() < end_s:
        numbers @ numbers


def choose_by_tokens(rank: int, directory: str, settings: dict[str, Any]) -> None:
    model = MoE(1, 10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = open_session(rank, directory, model, optimizer, ep=2, settings=settings)
    daemon = FakeDaemon(directory, rank=rank, world_size=WORLD)
    weights = experts_of(model)
    states: dict[int, Any] = {}
    for step in range(1, 6):
        train(model, optimizer, step)
        states[step] = weights.detach().clone()
        # Expert 3, of rank 1, has most tokens, but no rank sees that in its own. The unsaved ones
        # at each choice: 10 10 0 16, 20 20 0 16, 10 30 0 32, 20 40 0 16.
        session.count_tokens(0, ([0, 10, 0, 8], [10, 0, 0, 8])[rank])
        session.save(step).committed.result(WAIT_S)
        dist.barrier()
    written = len(set(daemon.sealed()[Generation(1, 5)].piece_map.places))
    assert written > 1, "nothing was carried over"
    session.close()
    other = MoE(7, 8 + rank)
    again = torch.optim.SGD(other.parameters(), lr=0.1)
    resumed = open_session(rank, directory, other, again, ep=2, epoch=2, settings=settings)
    assert resumed.restore() == 5
    ages = ((3, 5), (1, 4))[rank]
    for index, age in enumerate(ages):
        assert torch.equal(experts_of(other)[index], states[age][index]), (rank, index)
    train(other, again, 6)
    now = experts_of(other).detach().clone()
    resumed.count_tokens(0, [0, 0, 0, 0])
    resumed.save(6).committed.result(WAIT_S)
    resumed.close()
    ages = ((3, 5), (1, 6))[rank]  # unsaved: 10 10 0 16, as each was when it was captured
    last_model = MoE(7, 8 + rank)
    reader = open_session(
        rank,
        directory,
        last_model,
        torch.optim.SGD(last_model.parameters(), lr=0.1),
        ep=2,
        epoch=3,
        settings=settings,
    )
    assert reader.restore() == 6
    for index, age in enumerate(ages):
        expected = (states | {6: now})[age][index]
        assert torch.equal(experts_of(last_model)[index], expected), (rank, index)
    reader.close()


def each_makes_up_for_its_own(rank: int, directory: str) -> None:
    settings = {"policy": PartialExperts(experts_per_layer=1)}
    model = MoE(1, 10 + rank)
    optimizer = torch.optim.SGD(model.parameters())
    session = open_session(rank, directory, model, optimizer, ep=2, settings=settings)
    for step in (1, 2):
        session.count_tokens(0, [10 * (1 - rank)] * 4)  # only rank 0 has any
        session.save(step).committed.result(WAIT_S)
    session.close()
    resumed = open_session(rank, directory, model, optimizer, ep=2, epoch=2, settings=settings)
    assert resumed.restore() == 2
    factors = resumed.capacity_factors(0, 4)
    assert factors.count(1.1) == 3 * (1 - rank), factors  # the fourth was captured in step 2
    assert resumed.capacity_room == 1.1  # ranks send each other equal blocks
    resumed.close()


LOAD_AWARE = PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE, loss_limit=1)
SELECTIVE = Selective(experts=1, loss_limit=1)


def weights_beside_masters(rank: int, directory: str) -> None:
    """Two replicas divide masters, and leave out the weights; one weight is changed later."""
    model = MoE(1, 10).to(torch.bfloat16)
    optimizer = MasterOptimizer(model.parameters())
    session = open_session(rank, directory, model, optimizer, ep=1, settings=LEFT_OUT)
    train(model, optimizer, 1)
    session.save(1).committed.result(WAIT_S)
    train(model, optimizer, 2)
    with torch.no_grad():
        model.get_parameter("layers.0.weight")[0, 0] += 1
    found = session.save(2).committed.exception(WAIT_S)
    wrong = torch.tensor([found is not None])
    assert found is None or "layers.0.weight is no longer" in str(found)
    every = [torch.zeros_like(wrong) for _ in range(WORLD)]
    dist.all_gather(every, wrong)
    assert sum(map(int, every)) == 1  # the rank that captures this part of it
    session.save(3).committed.result(WAIT_S)
    session.close()
    other = MoE(7, 8 + rank).to(torch.bfloat16)
    again = MasterOptimizer(other.parameters())
    resumed = open_session(rank, directory, other, again, ep=1, epoch=2)
    assert resumed.restore() == 3
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(optimizer.state[p]["master"], again.state[q]["master"]), name
    resumed.close()


def everything(rank: int, directory: str, init_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    cases: dict[str, Callable[[int, str], None]] = {
        "experts of their own": lambda r, d: save_and_restore(r, d, ep=2),
        "all replicas": lambda r, d: save_and_restore(r, d, ep=1),
        "mismatch": mismatch,
        "corrupt": one_rank_is_corrupt,
        "disagree": ranks_disagree,
        "pipeline": stages_of_a_pipeline,
        "experts in bubbles": experts_in_bubbles,
        "load aware": lambda r, d: choose_by_tokens(r, d, {"policy": LOAD_AWARE}),
        "selective": lambda r, d: choose_by_tokens(r, d, {"policy": SELECTIVE}),
        "beside masters": weights_beside_masters,
        "replenishing": each_makes_up_for_its_own,
    }
    for name, case in cases.items():
        home = Path(directory) / name.replace(" ", "-")
        home.mkdir(exist_ok=True)
        try:
            case(rank, str(home))
        except BaseException:
            print(f"rank {rank}, {name}:\n{traceback.format_exc()}", flush=True)
            raise
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_share_the_capture_and_restore_together_or_not_at_all(tmp_path: Path) -> None:
    """One pair of processes for all cases: starting torch takes longer than they do."""
    run_ranks(everything, (str(tmp_path), str(tmp_path / "store")), WORLD)
    halves = [FakeDaemon(tmp_path / "all-replicas", rank=rank).sealed() for rank in range(WORLD)]
    payloads = [sealed[Generation(1, 3)].manifest.payload_bytes for sealed in halves]
    whole = 3 * (700 * 701 + 2 * 300 * 300) * 4
    assert all(abs(payload - whole / 2) < whole / 10 for payload in payloads), (payloads, whole)
    parts = [FakeDaemon(tmp_path / "beside-masters", rank=rank).sealed() for rank in range(WORLD)]
    for step, lacking in ((1, 0), (3, 1)):  # masters and momentum, 4 bytes each
        payloads = [sealed[Generation(1, step)].manifest.payload_bytes for sealed in parts]
        whole = (700 * 701 + 2 * 300 * 300) * 8 + lacking * 700 * 700
        assert abs(sum(payloads) - whole) < whole / 10, payloads
