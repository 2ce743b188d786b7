"""Worlds of several ranks in one process: sessions over fake daemons, a thread for each rank.

Every tensor's value follows from its name in the whole model, so that ranks of any world can be
compared; only buffers differ between replicas, as running statistics do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from meeting import Meeting, Seat, TransferSeat
from mixed_precision import MasterOptimizer
from torch import nn

from holdfast import Settings
from holdfast._agree.exchange import Alone
from holdfast._agree.expert_counts import ExpertCounts
from holdfast._agree.interval import DueSaves
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.window_order import WindowDecisions
from holdfast._capture.gradients import NO_GRADIENTS
from holdfast._capture.partial import PartialCapture
from holdfast._capture.strategy import CaptureStrategy
from holdfast._capture.whole import WholeCapture
from holdfast._capture.windows import WindowCapture
from holdfast._copying.devices import CpuDevice
from holdfast._session.protected import ProtectedSession
from holdfast._state.capture import LiveState
from holdfast.testing import FakeDaemon
from holdfast_core.errors import HoldfastError
from holdfast_core.job.snapshots import LossyPolicy, SparseWindows
from holdfast_core.topology import Topology

WAIT_S = 20.0
EXPERTS = 4
WIDTH = 48

_T = TypeVar("_T")
State = dict[str, torch.Tensor]


class Stack(nn.Module):
    """Stacked experts, with a buffer that has a row for each."""

    load: torch.Tensor

    def __init__(self, share: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(share, WIDTH, 24))
        self.register_buffer("load", torch.zeros(share, 3))


class Layer(nn.Module):
    """Dense weights, running statistics, and experts of both kinds."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 7 * WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.norm = nn.BatchNorm1d(5)
        listed = nn.ModuleList(nn.Linear(WIDTH, 20) for _ in range(share))
        self.listed = nn.ModuleDict({"experts": listed})
        self.experts = Stack(share)


class Net(nn.Module):
    """Two layers behind an embedding; `ep` ranks share the experts."""

    def __init__(self, ep: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList(Layer(EXPERTS // ep) for _ in range(2))
        self.to(dtype)


def foreign_masters(params: Any) -> torch.optim.Optimizer:
    """An optimizer of float32 masters that the model does not have, and rounds them."""
    parameters = list(params)
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=0.1)

    def before(*_: Any) -> None:
        for p, master in zip(parameters, masters, strict=True):
            master.grad = p.grad.float()

    def after(*_: Any) -> None:
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                p.copy_(master)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "masters": MasterOptimizer,
    "foreign masters": foreign_masters,
}


class Who:
    """A stateful object that knows whose state it has loaded."""

    def __init__(self, rank: int) -> None:
        self.rank: int | None = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rank = state["rank"]


def noise(name: str, shape: Sequence[int]) -> torch.Tensor:
    """float32 numbers that follow from `name`."""
    generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(name.encode()))
    return torch.randn(*shape, generator=generator)


class Rank:
    """One rank of a world: its live state and its session."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        exchange: Any,
        daemon: FakeDaemon,
        *,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        settings: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        policy: CaptureStrategy | None = None,
        deciding: Seat | None = None,
    ) -> None:
        self.rank, self.topology, self.exchange = rank, topology, exchange
        self.model = model if model is not None else Net(topology.ep, dtype)
        for parameter in self.model.parameters():
            nn.init.constant_(parameter, 0.5 * daemon.epoch)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.who = Who(rank)
        self.stage = f"stage {topology.coordinates(rank).pp}: "
        self.live = LiveState(self.model, [self.optimizer], topology, rank)
        given = Settings(
            start_wait_s=WAIT_S,
            exchange_timeout_s=WAIT_S,
            **{"copy_threads": 1, **(settings or {})},
        )
        strategy = policy or WholeCapture()
        if isinstance(given.policy, SparseWindows):
            decisions = WindowDecisions(deciding or Alone(), given.policy)
            strategy = WindowCapture(given.policy, decisions, given.start_wait_s / 2)
        self.session = ProtectedSession(
            live=self.live,
            stateful={"who": self.who},
            topology=topology,
            rank=rank,
            client=daemon,
            exchange=exchange,
            device=CpuDevice(),
            settings=given,
            replica_check=ReplicaCheck(Alone(), topology, 0),
            strategy=strategy,
            interval=DueSaves(),
        )

    def train(self, step: int, without: str = "") -> None:
        """One step with gradients that follow from names, and other statistics on each rank; a
        parameter `without` has none."""
        for source in self.live.discover():
            if source.name in self.live.anchors and ":" not in source.name:
                anchor = self.live.anchors[source.name]
                parameter = anchor.parameter
                if "/master" in source.name:
                    continue
                if anchor.place.name == without:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = parameter.grad if anchor.index is None else parameter.grad[anchor.index]
                grad.copy_(noise(f"{self.stage}{source.name} {step}", grad.shape))
        self.optimizer.step()
        first = self.topology.coordinates(self.rank).ep * (EXPERTS // self.topology.ep)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name.endswith("load"):
                    for i in range(buffer.shape[0]):
                        buffer[i].copy_(noise(f"{self.stage}{name} {first + i}", buffer.shape[1:]))
                else:
                    buffer.fill_(100 * step + self.rank)

    def state(self) -> State:
        """Every tensor, copied, under its name in the whole model."""
        first = self.topology.coordinates(self.rank).ep * (EXPERTS // self.topology.ep)
        found: State = {}
        for source in self.live.discover():
            if source.name.endswith("load(buffer)"):
                rows = {f"{source.name} {first + i}": row for i, row in enumerate(source.tensor)}
            else:
                rows = {source.name: source.tensor}
            found |= {f"{self.stage}{name}": tensor.clone() for name, tensor in rows.items()}
        return found


class Ranks:
    """All ranks of one world.

    Args:
        reads: for each rank the old ranks whose snapshots it reads, if another world captured the
            line.
        captured_by: number of ranks of that world.
        policy: the job's, if it leaves experts out.
    """

    def __init__(
        self,
        directory: Path,
        topology: Topology,
        *,
        epoch: int = 1,
        reads: Sequence[Sequence[int]] = (),
        captured_by: int = 0,
        make_daemon: Callable[..., FakeDaemon] = FakeDaemon,
        policy: LossyPolicy | None = None,
        **more: Any,
    ) -> None:
        size = topology.world_size
        self.meeting, self.topology = Meeting(size), topology
        self.daemons = [
            make_daemon(
                directory,
                rank=rank,
                world_size=size,
                epoch=epoch,
                captured_by=captured_by,
                reads=reads[rank] if captured_by else (),
            )
            for rank in range(size)
        ]
        self.seats = [TransferSeat(self.meeting, rank) for rank in range(size)]
        counting, deciding = Meeting(size), Meeting(size)

        def capture(rank: int) -> CaptureStrategy | None:
            if policy is None:
                return None
            together = ExpertCounts(Seat(counting, rank), rank, size)
            return PartialCapture(policy, together, WAIT_S / 2, NO_GRADIENTS)

        self.ranks = [
            Rank(
                rank,
                topology,
                seat,
                daemon,
                policy=capture(rank),
                deciding=Seat(deciding, rank),
                **more,
            )
            for rank, (seat, daemon) in enumerate(zip(self.seats, self.daemons, strict=True))
        ]

    def each(self, work: Callable[[Rank], _T]) -> list[_T]:
        """Call `work` for all ranks at once."""
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return [done.result(WAIT_S) for done in [threads.submit(work, r) for r in self.ranks]]

    def restore(self) -> list[int | None]:
        return self.each(lambda rank: rank.session.restore())

    def errors(self) -> list[HoldfastError]:
        """Errors of a restore that fails on every rank."""

        def fail(rank: Rank) -> HoldfastError:
            try:
                rank.session.restore()
            except HoldfastError as error:
                return error
            raise AssertionError(f"rank {rank.rank} restored")

        return self.each(fail)

    def save(self, step: int) -> None:
        def save(rank: Rank) -> None:
            rank.session.save(step).committed.result(WAIT_S)

        self.each(save)

    def train(self, step: int) -> None:
        for rank in self.ranks:
            rank.train(step)

    def states(self) -> list[State]:
        return [rank.state() for rank in self.ranks]

    def close(self) -> None:
        self.each(lambda rank: rank.session.close())


def whole_state(states: Sequence[State]) -> State:
    """The state of all ranks; where they differ, that of the lowest."""
    found: State = {}
    for state in reversed(states):
        found |= state
    return found


def assert_restored(ranks: Ranks, whole: State) -> None:
    """Every rank has exactly the tensors that it should have, bit by bit."""
    for rank in ranks.ranks:
        for name, tensor in rank.state().items():
            saved = whole[name]
            assert tensor.dtype == saved.dtype, name
            assert tensor.shape == saved.shape, name
            same = torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8),
                saved.contiguous().view(-1).view(torch.uint8),
            )
            assert same, (rank.rank, name)
    together = set().union(*(rank.state() for rank in ranks.ranks))
    assert together == whole.keys()
