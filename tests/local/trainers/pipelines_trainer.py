"""A trainer of pipelines, as many as a world of any size has room for, with the same batch in each
step of any world.

Gradients of single samples are added up in the order of the samples, so that a step has the same
bytes whatever the ranks: `reference` finds them in one process. Each process appends a line for
each step to `log-<pid>`, with the digest of its stage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast
from holdfast import elastic

BATCH, WIDTH = 6, 8
PACE_S = 0.03
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


def make(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(stage)
    model = nn.ModuleDict({f"layer{stage}": nn.Linear(WIDTH, WIDTH)})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(model: nn.Module, x: Tensor) -> Tensor:
    [layer] = model.children()
    out: Tensor = layer(x).tanh()
    return out


def inputs_of(step: int) -> Tensor:
    """All samples of a step, [BATCH, 1, WIDTH]."""
    return torch.randn(BATCH, 1, WIDTH, generator=torch.Generator().manual_seed(1000 + step))


def backward(model: nn.Module, out: Tensor, grad: Tensor) -> Tensor:
    """The gradients of one sample for all parameters, flat, without negative zeros: sums with the
    zeros of other ranks have none."""
    grads = torch.autograd.grad(out, [*model.parameters()], grad, retain_graph=True)
    return torch.cat([each.reshape(-1) for each in grads]) + 0.0


def update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    """Step with the sum of the samples' gradients, [BATCH, parameters]."""
    parameters = [*model.parameters()]
    parts = rows.sum(0).split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)
    optimizer.step()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for p in model.parameters():
        state = optimizer.state[p]
        for tensor in (p, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:12]


def reference(stages: int) -> Iterator[list[str]]:
    """The digests of all stages after each step, from the first on, in one process."""
    torch.set_num_threads(1)
    parts = [make(stage) for stage in range(stages)]
    step = 0
    while True:
        step += 1
        rows: list[list[Tensor]] = [[] for _ in parts]
        for x in inputs_of(step):
            entered, outs = [x], list[Tensor]()
            for model, _ in parts:
                outs.append(run(model, entered[-1]))
                entered.append(outs[-1].detach().requires_grad_())
            grad = 2 * (outs[-1].detach() - x.roll(1, 1))
            for stage in reversed(range(stages)):
                rows[stage].append(backward(parts[stage][0], outs[stage], grad))
                if stage:
                    [grad] = torch.autograd.grad(outs[stage], [entered[stage]], grad)
        for (model, optimizer), of_stage in zip(parts, rows, strict=True):
            update(model, optimizer, torch.stack(of_stage))
        yield [digest(*part) for part in parts]


def train(
    pipeline: elastic.Pipeline,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    samples: range,
) -> None:
    """Train one step, in which this rank's pipeline has these samples."""
    inputs, passed = inputs_of(step), []
    for sample in samples:
        x = inputs[sample]
        if not pipeline.is_first:
            x = pipeline.receive_activation(sample, torch.empty(1, WIDTH)).requires_grad_()
        out = run(model, x)
        if not pipeline.is_last:
            pipeline.send_activation(sample, out)
        passed.append((x, out))
    rows = torch.zeros(BATCH, sum(p.numel() for p in model.parameters()))
    for sample, (x, out) in zip(samples, passed, strict=True):
        if pipeline.is_last:
            grad = 2 * (out.detach() - inputs[sample].roll(1, 1))
        else:
            grad = pipeline.receive_gradient(sample, torch.empty_like(out))
        rows[sample] = backward(model, out, grad)
        if not pipeline.is_first:
            pipeline.send_gradient(sample, *torch.autograd.grad(out, [x], grad))
    pipeline.group.wait(dist.all_reduce(rows, group=pipeline.group.now, async_op=True))
    update(model, optimizer, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--stages", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = elastic.init("gloo")
    topology = holdfast.Topology(dp=world.size // args.stages, pp=args.stages)
    pipeline = elastic.Pipeline(world, topology, log_bytes=2**20)
    model, optimizer = make(pipeline.stage)
    session = holdfast.init(
        model=model, optimizer=optimizer, topology=topology, world=world, pipeline=pipeline
    )
    with (args.directory / f"log-{os.getpid()}").open("a", buffering=1) as log:
        for step in session.steps(10**6):
            with step:
                if step.resumed:
                    plan = world.batch_plan(BATCH, topology=topology)
                time.sleep(PACE_S)
                train(pipeline, model, optimizer, int(step), range(plan.start, plan.end))
                line = {"step": int(step), "epoch": session.epoch, "size": world.size}
                state = {"stage": pipeline.stage, "state": digest(model, optimizer)}
                log.write(json.dumps({**line, **state}) + "\n")


if __name__ == "__main__":
    main()
