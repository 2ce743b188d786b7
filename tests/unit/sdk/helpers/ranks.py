"""Ranks of a job, each a process that finds torch imported: that takes longer than what they do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint"]


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Call `work(rank, *args)` in as many processes; raises what the first of them raises."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    start_processes(work, args=args, nprocs=ranks, start_method="forkserver")
