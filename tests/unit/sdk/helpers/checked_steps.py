"""Ranks that train state without replicas, and execute steps again to find one that is wrong.

Each rank is a process with gloo groups. One call trains several jobs, one after the other.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast._agree.exchange import make_exchange
from holdfast._elastic.session import ElasticSession
from holdfast.testing import FakeDaemon
from holdfast_core.corruption import Divergence
from holdfast_core.topology import Topology

WAIT_S = 100.0
SHARE = 1e9
"""So much more than jobs may ask for that a check is followed by another one in the next step,
however long the machine takes for it."""
FIRST = 10
"""Step that is checked first."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A bit that flips once."""

    rank: int
    where: str
    """`activation`, `gradient`, `reduced gradient`, `parameter`, `moment`, or `written`: the script
    itself changes a parameter."""
    check: int = 2
    """It flips in a step that is checked: the first one, or a later one."""
    execution: int = 1
    """In which execution of this step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and what goes wrong."""

    kind: str
    """`fsdp`, `tp`, `ddp`, `messages`, or `wrapped anew`: by another DistributedDataParallel
    whenever the loop is entered again."""
    fault: Fault | None = None
    wrong: tuple[int, str] = (0, "")
    """Rank, and an operation that its device computes wrongly each time."""
    staged: bool = False
    """Whether the ranks are stages of a pipeline, which cannot execute a step again."""
    noise: bool = False
    """Whether training is not deterministic."""
    writes: bool = False
    """Whether the script changes a parameter before its optimizer."""
    share: float = SHARE
    scaled: bool = False
    """Whether a GradScaler is used."""
    gathers: int = 1
    """Steps over which gradients add up."""
    steps: int = 20
    """So many that the second check is over."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank ended with."""

    found: Divergence | None
    problem: str
    """Why its saves are refused."""
    state: list[bytes]
    executed: list[int]
    """Steps whose bodies ran, in their order."""
    checked: list[int]
    """Steps that were to be checked."""
    recorded: list[int]
    """Steps before which it waited until the save before them was copied, and then began to record
    them."""
    drawn: list[float]
    """The random number that each of these bodies drew."""


class _World:
    """The part of `World` that a session uses."""

    stays = groups_stay = ended = False
    verdict = failure = None
    epoch = nproc = 1

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def check_process(self) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def go_back_to(self, step: int) -> None: ...

    def begin_alone(self, *, held_beside: bool) -> None: ...

    def finish_collectives(self, since: Any = None) -> Any: ...

    def exchange(self, timeout_s: float) -> Any:
        return make_exchange(self.size, timeout_s)

    def survives(self, error: Exception) -> bool:
        del error
        return False


class _Log:
    """The part of a pipeline's log that a session uses."""

    keeps_received = False

    def drop_to(self, step: int) -> None: ...

    def restart(self, step: int) -> None: ...


class _Stages:
    """The part of `Pipeline` that a session uses."""

    log = _Log()
    idle: Any = None

    def begin(self, step: int) -> None: ...

    def complete(self, step: int) -> None: ...


class _Pair(nn.Module):
    """Two linear layers, between which a test can flip a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(nn.functional.gelu(self.first(batch)))
        out: torch.Tensor = self.second(self.between(hidden))
        return out


class _Passed(torch.autograd.Function):
    """Passes a tensor to the next rank, and its gradient back."""

    @staticmethod
    def forward(_: Any, own: torch.Tensor) -> torch.Tensor:
        return _pass(own, 1)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _pass(gradient, -1)


def _pass(own: torch.Tensor, by: int) -> torch.Tensor:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    taken = torch.empty_like(own)
    to, source = (rank + by) % ranks, (rank - by) % ranks
    works = [dist.isend(own.contiguous(), to), dist.irecv(taken, source)]
    for work in works:
        assert work is not None
        work.wait()
    return taken


def _flip(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Through `data`, because what happens to memory increments no version counter.
    local.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 22)


def _multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.bmm(one[None], other[None])[0]  # type: ignore[no-any-return]


def _add_quotient(
    to: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, value: float = 1.0
) -> torch.Tensor:
    return to.add_(one.div(other), alpha=value)


def _normalize(
    of: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...]:
    del shape, weight, bias
    variance, mean = torch.var_mean(of, -1, correction=0, keepdim=True)
    factor = (variance + eps).rsqrt()
    return (of - mean) * factor, mean, factor


_WRONG: dict[str, Callable[..., Any]] = {
    "mm": _multiply,
    "addcdiv_": _add_quotient,
    "native_layer_norm": _normalize,
}


@contextmanager
def _wrong_device(operation: str) -> Iterator[None]:
    """Within it, the first number that `operation` gives has a wrong bit each time."""
    if not operation:
        yield
        return

    def compute(*args: Any, **named: Any) -> Any:
        result = _WRONG[operation](*args, **named)
        _flip(result[0] if isinstance(result, tuple) else result)
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what replaces its own
        library = torch.library.Library("aten", "IMPL")
        library.impl(operation, compute, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _make(job: Job) -> tuple[_Pair, nn.Module, Topology]:
    torch.manual_seed(0)
    pair, ranks = _Pair(), dist.get_world_size()
    if job.kind == "fsdp":
        for part in (pair.first, pair.second, pair):
            fully_shard(part)
        return pair, pair, Topology(dp=ranks)
    if job.kind == "tp":
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(pair, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        return pair, pair, Topology(dp=1, tp=ranks)
    if job.kind == "ddp":
        return pair, DistributedDataParallel(pair), Topology(dp=ranks)
    if job.kind == "wrapped anew":
        # The first buckets are in the reverse order of parameters, and later ones in that of
        # gradients.
        pair._modules = {name: pair._modules[name] for name in ("norm", "second", "first")}
        return pair, pair, Topology(dp=ranks)
    for parameter in pair.parameters():
        with torch.no_grad():
            parameter.add_(0.01 * dist.get_rank())
    return pair, pair, Topology(dp=1, pp=ranks)


class _Trainer:
    """One rank of a job."""

    def __init__(self, job: Job, directory: Path) -> None:
        self.job, rank, ranks = job, dist.get_rank(), dist.get_world_size()
        self.pair, self.model, topology = _make(job)
        self.wrapped = self.model
        self.optimizer = torch.optim.AdamW(self.pair.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", enabled=job.scaled)
        self.fault = job.fault if job.fault is not None and job.fault.rank == rank else None
        self.executed, self.checked = list[int](), list[int]()
        self.drawn, self.found = list[float](), list[Divergence]()
        self.recorded = list[int]()
        of_messages = [name for name, _ in self.model.named_parameters()]
        daemon = FakeDaemon(directory / f"{rank}", rank=rank, world_size=ranks)

        def make() -> Any:
            return holdfast.init(
                model=self.model,
                optimizer=self.optimizer,
                topology=topology,
                daemon=daemon,
                stateful={"scaler": self.scaler} if job.scaled else {},
                private=of_messages if job.kind == "messages" else (),
            )

        self.session = ElasticSession(
            _World(),  # type: ignore[arg-type]
            make,
            [self.optimizer],
            WAIT_S,
            model=self.model,
            votes=True,
            pipeline=_Stages() if job.staged else None,  # type: ignore[arg-type]
            repeat_share=job.share,
        )
        inner: Any = self.session._session
        note = inner.on_step_checked

        def on_step_checked(one: Divergence, spoils: str) -> None:
            self.found.append(one)
            note(one, spoils)

        inner.on_step_checked = on_step_checked
        wait = inner.wait_staged

        def wait_staged() -> None:
            body = self.session._body
            assert body is not None and body._start is None, "what is copied later is noted later"
            self.recorded.append(body.step)
            wait()

        inner.wait_staged = wait_staged

    def train(self) -> Outcome:
        """Train to the end."""
        rank, operation = self.job.wrong
        with _wrong_device(operation if rank == dist.get_rank() else ""):
            return self._train()

    def _train(self) -> Outcome:
        for step in self.session.steps(self.job.steps, seed=11):
            if step.resumed and self.job.kind == "wrapped anew":
                self.wrapped = DistributedDataParallel(self.pair)
            with step:
                self.executed.append(int(step))
                where = self._flips(int(step))
                self.drawn.append(torch.rand(()).item() + random.random())
                self._compute(int(step), where)
                self._flip_after(where)
                if int(step) % self.job.gathers == 0:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad()
        problem = str(self.session.problem or "")
        state = [
            each.to_local() if isinstance(each, DTensor) else each
            for parameter in self.pair.parameters()
            for each in (parameter.detach(), *self.optimizer.state[parameter].values())
        ]
        self.session.close()
        return Outcome(
            found=self.found[-1] if self.found else None,
            problem=problem,
            state=[each.numpy().tobytes() for each in state],
            executed=self.executed,
            checked=self.checked,
            recorded=self.recorded,
            drawn=self.drawn,
        )

    def _flips(self, step: int) -> str:
        """Where a bit flips in this execution of `step`; empty for nowhere."""
        execution, checks, fault = self.executed.count(step), self.session._checks, self.fault
        if execution == 1 and checks is not None and checks.wants(step):
            self.checked.append(step)
        check = len(self.checked) if self.checked and self.checked[-1] == step else 0
        if fault is None or (check, execution) != (fault.check, fault.execution):
            return ""
        return fault.where

    def _compute(self, step: int, where: str) -> None:
        """Forward and backward passes."""
        batch = torch.rand(4, 8)
        if self.job.kind == "tp":  # all ranks have the same
            batch = torch.rand(4, 8, generator=torch.Generator().manual_seed(step))

        def between(hidden: torch.Tensor) -> torch.Tensor:
            if self.job.kind == "messages":
                hidden = _Passed.apply(hidden)
            if where == "activation":
                _flip(hidden)
            if where == "gradient":
                hidden.register_hook(on_gradient)
            return hidden

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            _flip(gradient)
            return gradient

        self.pair.between = between
        loss = self.wrapped(batch).square().sum()
        if self.job.noise:
            loss = loss * (1 + 1e-3 * torch.rand((), generator=_noise))
        self.scaler.scale(loss).backward()

    def _flip_after(self, where: str) -> None:
        """What happens between the gradients and the optimizer."""
        weight = self.pair.second.weight
        if self.job.writes or where == "written":
            with torch.no_grad():
                self.pair.first.bias.add_(1e-3)
        if where == "parameter":
            _flip(weight)
        elif where == "moment":
            _flip(self.optimizer.state[weight]["exp_avg"])
        elif where == "reduced gradient":
            assert weight.grad is not None
            _flip(weight.grad)
        if self.job.kind != "messages":
            torch.nn.utils.clip_grad_norm_(self.pair.parameters(), 1e6)


_noise = torch.Generator()
"""No session knows it, so each execution of a step draws other numbers."""


def train_all(rank: int, ranks: int, jobs: list[Job], directory: str) -> None:
    """Train each of `jobs` on this rank, and write its outcomes."""
    folder = Path(directory)
    _noise.manual_seed(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks
    )
    outcomes = [_Trainer(job, folder / str(at)).train() for at, job in enumerate(jobs)]
    (folder / f"outcomes-{rank}").write_bytes(pickle.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


def outcomes_of(directory: Path, ranks: int) -> list[list[Outcome]]:
    """The outcomes of each job, by rank."""
    texts = [(directory / f"outcomes-{rank}").read_bytes() for rank in range(ranks)]
    return [list(each) for each in zip(*(pickle.loads(text) for text in texts), strict=True)]
