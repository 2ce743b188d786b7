"""A trainer with experts whose processes stay; it may misuse what it is given.

Each rank appends a line for each step to `log-<rank>`, or `log-<process id>` with `--any-size`:
digests of everything that is not an expert, and of each expert, after the step; on the first step
after a restore also those that it found, and the steps of which the policy has the experts. Faults
are as in `staying_trainer`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from staying_trainer import PACE_S, Faults
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.elastic import World, WorldGroup
from holdfast_core.protection.standing import RankStanding

EXPERTS, WIDTH, TOKENS = 4, 8, 12
ASTRAY_FROM = 8
"""First step of epoch 1 in which a rank that changes parameters alone does so."""


class Layer(nn.Module):
    """A gate, and experts of which each token uses the best one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.counts = [0] * EXPERTS

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.gate(tokens).softmax(-1)
        best = scores.argmax(-1)
        self.counts = torch.bincount(best, minlength=EXPERTS).tolist()
        outputs = torch.stack([expert(tokens) for expert in self.experts], 1)
        chosen = outputs[torch.arange(len(tokens)), best]
        output: torch.Tensor = tokens + chosen * scores.gather(1, best[:, None])
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Layer()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layers[0](tokens))
        return output


def digest(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in parameters:
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in sorted(state))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.numpy().tobytes())
    return found.hexdigest()[:12]


def digests(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Digests of the state: of the experts, and of the rest."""
    layer: Any = model.layers[0]
    dense = [*layer.gate.parameters(), *model.head.parameters()]
    return {
        "dense": digest(dense, optimizer),
        "experts": [digest(expert.parameters(), optimizer) for expert in layer.experts],
    }


def versions(session: Any) -> list[int]:
    """For each expert, the step at which it was captured, as the policy recorded it; empty where
    snapshots have everything, and after a restore of what another world captured."""
    ledger = getattr(session._session._saver.strategy, "_ledger", None)
    if ledger is None:
        return []
    return [held[-1].generation.step for _, held in sorted(ledger.versions.items()) if held]


def shard(model: Model, ranks: int) -> None:
    """Divide the model, each expert of it too, over all ranks."""
    mesh = init_device_mesh("cpu", (ranks,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)


def average(parameters: Iterable[nn.Parameter], everyone: Any, group: dist.ProcessGroup) -> None:
    """Average gradients over all ranks, so that no order of adding them shows."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(2**12).round_().div_(2**12)
        everyone.wait(dist.all_reduce(parameter.grad, group=group, async_op=True))
        parameter.grad.div_(group.size())


class Misuse:
    """Things that a script must not do, each chosen by its name; `faults` strike where it has just
    changed a parameter."""

    def __init__(
        self,
        kind: str,
        world: World,
        everyone: WorldGroup,
        session: Any,
        model: Model,
        optimizer: torch.optim.Optimizer,
        faults: Faults,
        *,
        alone: bool,
    ) -> None:
        self._kind, self._world, self._session = kind, world, session
        self._group = everyone.now
        self._everyone = everyone
        self._weight, self._held = model.head.weight, model.head.weight.detach()
        self._faults, self._alone = faults, alone
        optimizer.register_step_pre_hook(self._after_vote)
        self.step = 0
        self.refused: set[str] = set()
        if kind == "claims-vote":
            self._stand = session._standing
            session._standing = self._claim
        if kind == "saves-elsewhere":
            threading.Thread(target=self._save_on_and_on, daemon=True).start()

    def _claim(self, voting: Any = None) -> RankStanding:
        """State that the vote of one more step has passed, and that it has been completed."""
        own: RankStanding = self._stand(voting)
        return own if own.step < 0 else msgspec.structs.replace(own, step=own.step + 1, torn="")

    def _save_on_and_on(self) -> None:
        while True:
            if self.step:  # the loop has begun
                error = self._session.save(self.step).error
                self.refused.add(f"{type(error).__name__}: {error}")
            time.sleep(PACE_S / 10)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group to reduce gradients in."""
        return self._group if self._kind == "keeps-group" else self._everyone.now

    def run(self, work: Callable[[], None]) -> None:
        """Do the work of a step."""
        while True:
            try:
                work()
                return
            except Exception:
                if self._kind not in ("swallows", "never-gives-up"):
                    raise
                if self._kind == "swallows":
                    return

    def before_vote(self) -> None:
        """Do what comes between the reduction of gradients and the vote."""
        # Not in each step: a save that such a change overtakes is dropped.
        if self._kind == "changes-before-vote" and self.step % 4 == 0:
            self._change()
        if self._kind == "holds-tensor":
            assert torch.equal(self._held, self._weight), "it is not the parameter any more"

    def _after_vote(self, *_: Any) -> None:
        astray = self._world.epoch == 1 and self.step >= ASTRAY_FROM
        if self._kind == "changes-after-vote" and (astray or not self._alone):
            self._change()

    @torch.no_grad()
    def _change(self) -> None:
        self._weight.add_(2**-6)
        self._faults.at("changed")

    @property
    def _changes(self) -> bool:
        # Not after each step: a save that such a change overtakes is dropped.
        return self._kind == "changes-outside" and self.step % 4 == 0

    @torch.no_grad()
    def dense_after(self, model: Model, optimizer: torch.optim.Optimizer) -> str:
        """Digest of what is no expert, as `after` will leave it; empty when it changes nothing."""
        if not self._changes:
            return ""
        weight = model.head.weight
        before = weight.clone()
        weight.neg_()
        after: str = digests(model, optimizer)["dense"]
        weight.copy_(before)
        return after

    def after(self, model: Model) -> None:
        """Do what comes between two steps."""
        if self._changes:
            with torch.no_grad():
                model.head.weight.neg_()
        if self._kind == "forks" and os.fork() == 0:
            time.sleep(4.0)  # holds every socket of its parent, which may be dead by then
            os._exit(0)
        if self._kind == "child-trains" and self.step == 8 and os.fork() == 0:
            return  # goes on with the loop, in its parent's place


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--misuse", default="")
    parser.add_argument("--misuser", type=int, default=-1, help="the only rank that does; -1: all")
    parser.add_argument("--any-size", action="store_true", help="go on in worlds of another size")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model over all ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # as sparse windows ask for
    rank = int(os.environ["RANK"])
    faults = Faults(args.directory, rank)
    world = holdfast.elastic.init("gloo", any_size=args.any_size)
    everyone = world.group(lambda size: [list(range(size))])
    model = Model()
    if args.fsdp2:
        shard(model, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    kind = args.misuse if args.misuser in (-1, rank) else ""
    alone = args.misuser != -1
    misuse = Misuse(kind, world, everyone, session, model, optimizer, faults, alone=alone)
    layer: Any = model.layers[0]

    def work(step: int) -> None:
        tokens = torch.randn(TOKENS, WIDTH + 1, generator=torch.Generator().manual_seed(step))
        mine = tokens[world.rank :: world.size]
        optimizer.zero_grad()
        (model(mine[:, :-1]).squeeze(1) - mine[:, -1]).square().mean().backward()
        faults.at("before-group")
        if not args.fsdp2:  # FSDP2 has done it
            average(model.parameters(), everyone, misuse.group)
        misuse.before_vote()
        faults.at("before-optimizer")
        optimizer.step()
        session.count_tokens(0, layer.counts)

    log_of = os.getpid() if args.any_size else rank
    with (args.directory / f"log-{log_of}").open("a", buffering=1) as log:
        for step in session.steps(10**6):
            misuse.step = step
            with step:
                line: dict[str, Any] = {"step": int(step), "epoch": world.epoch}
                line.update(pid=os.getpid(), size=world.size)
                if step.resumed and step > 1:
                    line["found"] = {**digests(model, optimizer), "versions": versions(session)}
                time.sleep(PACE_S)
                misuse.run(lambda step=int(step): work(step))  # type: ignore[misc]
                line.update(digests(model, optimizer), refused=sorted(misuse.refused))
                line["dense_after"] = misuse.dense_after(model, optimizer)
                log.write(json.dumps(line) + "\n")
            faults.at("after-save")
            misuse.after(model)


if __name__ == "__main__":
    main()
