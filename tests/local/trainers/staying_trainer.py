"""A small trainer whose processes stay, and which fails where a file tells it to.

Each rank appends a line for each step to `log-<rank>`. A file `fault-<rank>` holds the name of a
point and a signal, or a pid to kill: the rank that comes to the point takes the file away and
does it, so each fault happens once. Gradients are rounded so that their sum is exact, whatever
order the ranks are added in: `replay` in one process finds the same bytes. Each rank draws numbers
of its own in each step, and nothing that happened may show in them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import holdfast
from holdfast._agree.exchange import GlooExchange
from holdfast._daemon.client import GrpcClient
from holdfast._elastic import connections, groups
from holdfast._elastic.connections import why_not
from holdfast._elastic.staying_groups import StayingGroups
from holdfast._elastic.world import World
from holdfast._restoring import live
from holdfast._session.protected import ProtectedSession
from holdfast._state.collect import seed_generators

SAMPLES, BATCH, WIDTH, SEED = 48, 2, 8, 7
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class Faults:
    """The faults that a test has put into `directory` for `who`, such as a rank."""

    def __init__(self, directory: Path, who: int | str) -> None:
        self._file = directory / f"fault-{who}"

    def at(self, point: str) -> None:
        """Suffer the fault of `point`, if there is one."""
        try:
            wanted, kind, *pid = self._file.read_text().split()
        except FileNotFoundError:
            return
        if wanted == point:
            self._file.rename(self._file.with_name(f"suffered-{os.getpid()}"))
            if pid:
                os.kill(int(pid[0]), signal.Signals[kind])
            else:  # this thread goes no further, whichever would be stopped first
                signal.pthread_kill(threading.get_ident(), signal.Signals[kind])

    def before(self, owner: Any, name: str, point: str, after: str = "") -> None:
        """Make calls of `owner.name` points, before they begin and after they return."""
        inner: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(point)
            result = inner(*args, **kwargs)
            self.at(after)
            return result

        setattr(owner, name, call)


class Model(nn.Module):
    """Two layers; `at` is called in the middle of a forward pass."""

    def __init__(self, at: Callable[[str], None] = lambda point: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self._at = at

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = dropout(torch.tanh(self.first(inputs)), 0.25)
        self._at("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._at("backward"))
        output: torch.Tensor = self.second(hidden)
        return output


def samples() -> torch.Tensor:
    """The data set: inputs, and in the last column targets."""
    return torch.randn(SAMPLES, WIDTH + 1, generator=torch.Generator().manual_seed(2))


def backward(model: nn.Module, data: torch.Tensor, indices: list[int]) -> None:
    """Put the gradients of a batch into the parameters."""
    batch = data[indices]
    loss = (model(batch[:, :-1]).squeeze(1) - batch[:, -1]).square().mean()
    loss.backward()


def compute_gradients(model: nn.Module, data: torch.Tensor, indices: list[int]) -> None:
    """Put the rounded gradients of a batch into the parameters."""
    backward(model, data, indices)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2**12).round_().div_(2**12)


def make_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """One for each layer, so that a fault can come between them."""
    return [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (model.first, model.second)]


def state_hash(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                found.update(state[name].numpy().tobytes())
    return found.hexdigest()[:16]


def replay(ranks: int) -> Iterator[tuple[str, list[list[int]]]]:
    """For each step of an undisturbed run: the hash of the state after it, and each rank's
    samples."""
    model, data = Model(), samples()
    optimizers = make_optimizers(model)
    samplers = [holdfast.RecoverableSampler(data, rank=r, replicas=ranks) for r in range(ranks)]
    loaders = [batches_of(sampler) for sampler in samplers]
    for step in itertools.count(1):
        batches = [next(loader) for loader in loaders]
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank, indices in enumerate(batches):
            seed_generators(SEED, step, rank)
            model.zero_grad()
            compute_gradients(model, data, indices)
            for one, parameter in zip(total, model.parameters(), strict=True):
                assert parameter.grad is not None
                one.add_(parameter.grad)
        for one, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = one / ranks
        for optimizer in optimizers:
            optimizer.step()
        for sampler in samplers:
            sampler.advance(BATCH)
        yield state_hash(model, optimizers), batches


def batches_of(sampler: holdfast.RecoverableSampler) -> Iterator[list[int]]:
    loader: DataLoader[int] = DataLoader(
        range(SAMPLES),  # type: ignore[arg-type]
        BATCH,
        sampler=sampler,
        collate_fn=list,
        generator=torch.Generator(),  # the model draws from the default one
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def reduce_gradients(world: Any, everyone: Any, model: nn.Module, faults: Faults) -> None:
    """Average gradients by each kind of collective in turn."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    faults.at("before-plain")
    dist.all_reduce(gradients[0])
    faults.at("before-group")
    dist.all_reduce(gradients[1], group=everyone.now)
    faults.at("before-async")
    work = dist.all_reduce(gradients[2], async_op=True)
    faults.at("in-async")
    world.wait(work)
    faults.at("before-async-group")
    everyone.wait(dist.all_reduce(gradients[3], group=everyone.now, async_op=True))
    for gradient in gradients:
        gradient.div_(world.size)


def reduced_by_ddp(world: Any, model: nn.Module, faults: Faults) -> nn.Module:
    """Let a DDP round and average the gradients."""

    def prepare(ddp: DistributedDataParallel) -> None:
        points = itertools.chain(["in-first-pass"], itertools.repeat("before-bucket"))

        def reduce(group, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
            flat = bucket.buffer().mul_(2**12).round_().div_(2**12)
            faults.at(next(points))
            work = dist.all_reduce(flat, group=group, async_op=True)
            faults.at("in-bucket")
            return work.get_future().then(lambda done: done.value()[0].div_(world.size))

        ddp.register_comm_hook(ddp.process_group, reduce)

    made: nn.Module = world.ddp(model, prepare=prepare)
    return made


def save_every(steps: int) -> None:
    """Let only every n-th save be taken."""
    owner: Any = ProtectedSession
    save: Callable[..., Any] = owner.save

    def sometimes(session: ProtectedSession, step: int) -> Any:
        return None if step % steps else save(session, step)

    owner.save = sometimes


def watch_calls(faults: Faults) -> None:
    """Make the calls of a recovery and of a save points."""
    faults.before(GrpcClient, "grant", "before-grant", "after-grant")
    faults.before(GrpcClient, "commit", "before-commit", "after-commit")
    faults.before(GrpcClient, "restore", "before-restore", "after-restore")
    # Groups stay, or each world makes them again.
    for leaves in (groups, StayingGroups):
        faults.before(leaves, "leave", "before-leave", "after-leave")
    for forms in (groups.MeetingPoint, StayingGroups):
        faults.before(forms, "form", "before-form", "after-form")
    if why_not("gloo"):
        faults.before(dist, "init_process_group", "in-form")
    else:
        faults.before(connections, "connect", "in-form")
    faults.before(World, "stand", "before-stand", "after-stand")
    faults.before(live.HandOver, "run", "before-hand-over", "after-hand-over")
    faults.before(live, "scatter", "before-scatter", "after-scatter")
    faults.before(GlooExchange, "subgroups", "before-subgroups")
    faults.before(GlooExchange, "add", "", "after-vote")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="steps from one save to the next")
    parser.add_argument("--ddp", action="store_true", help="let a DDP reduce the gradients")
    parser.add_argument("--unlive", action="store_true", help="go back to the line always")
    parser.add_argument("--unshared", action="store_true", help="say that a tensor is not shared")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    faults = Faults(args.directory, rank)
    faults.at("start")
    watch_calls(faults)
    save_every(args.every)

    world = holdfast.elastic.init("gloo")
    assert world.rank == rank
    faults.at("joined")
    everyone = world.group([list(range(world.size))])
    model, data = Model(faults.at), samples()
    ddp = reduced_by_ddp(world, model, faults) if args.ddp else None
    optimizers = make_optimizers(model)
    sampler = holdfast.RecoverableSampler(data, rank=world.rank, replicas=world.size)
    faults.at("before-session")
    session = holdfast.init(
        model=ddp or model,
        optimizer=optimizers,
        stateful={"sampler": sampler},
        settings=holdfast.Settings(go_on_live=not args.unlive),
        private=["second.weight"] if args.unshared else [],
        world=world,
    )
    with (args.directory / f"log-{rank}").open("a", buffering=1) as log:
        for step in session.steps(args.steps, seed=SEED):
            with step:
                if step.resumed:
                    batches = batches_of(sampler)
                indices = next(batches)
                time.sleep(PACE_S)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                if ddp is not None:
                    backward(ddp, data, indices)
                else:
                    compute_gradients(model, data, indices)
                    reduce_gradients(world, everyone, model, faults)
                faults.at("before-optimizer")
                optimizers[0].step()
                faults.at("in-optimizer")
                optimizers[1].step()
                sampler.advance(BATCH)
                line = {
                    "step": int(step),
                    "epoch": world.epoch,
                    "pid": os.getpid(),
                    "samples": indices,
                    "hash": state_hash(model, optimizers),
                    "resumed": step.resumed,
                }
                log.write(json.dumps(line) + "\n")
                if step == args.steps:
                    faults.at("last-step")
            faults.at("after-save")
        faults.at("finished")
        log.write(
            json.dumps({"finished": state_hash(model, optimizers), "pid": os.getpid()}) + "\n"
        )
    session.close()
    world.close()


if __name__ == "__main__":
    main()
