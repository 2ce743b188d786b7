"""Trains as train_moe.py does, in worlds of given sizes one after the other, without Holdfast.

    python examples/replay_moe.py --worlds 8x100 6x20 8x30 --ep 2 --hash-file replayed

repeats the training of a job that had 8 ranks for 100 steps, then 6 ranks, then 8 again. Its final
bytes are those that the job must have. A run whose world never changes cannot give them, because
batches and the order of sums depend on the number of ranks. No process is lost here, and nothing is
saved or restored: between two worlds all ranks leave torch's process groups and form new ones, and
ranks that join receive the state from the first ranks by broadcast. All other options are those of
train_moe.py.

Shape suffixes are those of train_moe.py.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import train_moe
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    FileStore,
    PrefixStore,
)
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader

import holdfast

Worlds = Sequence[tuple[int, int]]
"""(ranks, steps) of each world."""


class PlainGroup:
    """The part of a group that train_moe.py uses."""

    now: dist.ProcessGroup

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def form(self, parts: list[range]) -> None:
        """Form the groups of a new world; each rank is in one of them."""
        for part in parts:  # every rank takes part in forming each of them
            made = dist.new_group(list(part))
            if isinstance(made, dist.ProcessGroup):  # else this rank is not in it
                self.now = made


class PlainWorld:
    """The part of a world that train_moe.py uses."""

    def __init__(self, rank: int, size: int, store: PrefixStore) -> None:
        self.rank, self.size, self._store = rank, size, store
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def leave(self) -> None:
        """Leave the groups, once no rank needs this rank any more."""
        self._store.set(f"done-{self.rank}", "")
        self._store.wait([f"done-{rank}" for rank in range(self.size)])
        dist.destroy_process_group()


def hand_over(model: Any, optimizer: Any, replicas: PlainGroup, source: int) -> None:
    """Give all ranks of `replicas` the weights and optimizer states of rank `source`."""
    for p in model.parameters():
        for tensor in (p.detach(), *optimizer.state[p].values()):
            data = tensor.view(-1).view(torch.uint8)  # bytes: gloo does not know every type
            dist.broadcast(data, source, group=replicas.now)


def replay(rank: int, args: argparse.Namespace, worlds: Worlds, folder: str) -> None:
    """Train in each of `worlds` that has this rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = FileStore(f"{folder}/store", -1)
    ep = args.ep or worlds[0][0]
    sharing, replicas = PlainGroup(), PlainGroup()
    model, optimizer = train_moe.build(args, rank, sharing, ep, torch.device("cpu"))  # type: ignore[arg-type]
    data = train_moe.Passages(args.seq + 1, args.held_out)
    sampler = holdfast.RecoverableSampler(data, seed=args.seed)
    ended = list(itertools.accumulate(steps for _, steps in worlds))
    for number, ((size, steps), end) in enumerate(zip(worlds, ended, strict=True), start=1):
        sampler.split(rank=rank % size, replicas=size)
        if rank >= size:
            sampler.advance(steps * args.batch)
            continue
        world: Any = PlainWorld(rank, size, PrefixStore(f"world-{number}", store))
        sharing.form([range(at, at + ep) for at in range(0, size, ep)])
        replicas.form([range(at, size, ep) for at in range(ep)])
        hand_over(model, optimizer, replicas, rank % ep)
        batches = itertools.chain.from_iterable(
            itertools.repeat(DataLoader(data, args.batch, sampler=sampler))
        )
        for step in range(end - steps + 1, end + 1):
            bytes_BT = next(batches)
            loss = train_moe.train_step(world, model, optimizer, bytes_BT, replicas, ep)  # type: ignore[arg-type]
            sampler.advance(len(bytes_BT))
            if rank == 0:
                line = {"loss": loss, "time": time.time(), "epoch": number, "ranks": size}
                train_moe.report(args, step=step, **line)
        sha256 = train_moe.state_sha256(world, model, optimizer)
        if rank == 0 and args.hash_file and number == len(worlds):
            args.hash_file.write_text(sha256 + "\n")
        world.leave()


def parse_world(text: str) -> tuple[int, int]:
    ranks, _, steps = text.partition("x")
    return int(ranks), int(steps)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--worlds", type=parse_world, nargs="+", required=True, metavar="RANKSxSTEPS"
    )
    options, others = parser.parse_known_args(argv)
    args = train_moe.parse_args(others)
    with tempfile.TemporaryDirectory() as folder:
        ranks = max(size for size, _ in options.worlds)
        start_processes(replay, (args, options.worlds, folder), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
