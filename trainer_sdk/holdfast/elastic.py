"""Training worlds that change while the surviving processes stay.

    world = holdfast.elastic.init("nccl")
    model, optimizer = build(world)
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    for step in session.steps(total):        # the next step to run, also after a recovery
        with step:                           # a failure elsewhere unwinds to here
            train_one_step(world, model, optimizer)

When a rank or a node is lost, the other processes stay: they form new process groups, continue from
their own state or restore the recovery line into their tensors, and run the next step. Only the
lost ranks start again. In a script without `world`, all processes start again.
"""

from __future__ import annotations

import torch

from holdfast._daemon.following import WorldFollower
from holdfast._elastic.ddp import WorldDDP
from holdfast._elastic.pipeline import Pipeline
from holdfast._elastic.sharded import WorldSharded
from holdfast._elastic.world import World, WorldGroup
from holdfast._environment import read_environment
from holdfast._exits import set_exit_codes
from holdfast_core.batches import BatchPlan, MicroBatch

__all__ = [
    "BatchPlan",
    "MicroBatch",
    "Pipeline",
    "World",
    "WorldDDP",
    "WorldGroup",
    "WorldSharded",
    "init",
]

TIMEOUT_S = 600.0


def init(
    backend: str | None = None,
    *,
    stay: bool = True,
    any_size: bool = False,
    timeout_s: float = TIMEOUT_S,
    nccl_stays: bool | None = None,
) -> World:
    """Form the process groups of this worker's world, and return the world.

    Every rank calls it once, instead of `torch.distributed.init_process_group`. Collectives then
    work as usual.

    Between this call and `session.steps`, call no collective except `world.group`: a process that
    joins later runs this part alone, while the processes that stay do not run it again. So each
    rank must build its model from the seed.

    Args:
        backend: "gloo", "nccl", or both for different devices: "cpu:gloo,cuda:nccl". None: both if
            there is a CUDA device, and otherwise gloo.
        stay: False lets this process end with its world, as it does without a daemon.
        any_size: True if the script can continue in a world of any size. It must then read
            `world.rank` and `world.size` again after each recovery (`step.resumed`). If False,
            this process ends when the number of ranks changes, and a new one starts.
        timeout_s: seconds that each collective may take.
        nccl_stays: True lets process groups of NCCL stay as objects when their world changes, as
            those of gloo do, so that sharded models train on with the same processes. It has not
            been tried on several devices yet. None: `HOLDFAST_NCCL_STAYS`, which is off by default.
            Equal on all ranks. Call `torch.cuda.set_device` first, unless the device of this
            process is the one with the number `LOCAL_RANK`; device 0 counts as not chosen.

    Raises:
        InvalidJobError: `nccl_stays`, and this version or setting of torch cannot do it.
        UnreachableError: the world could not be formed.
        HoldfastError: the daemon refuses this process.
    """
    environment = read_environment()
    set_exit_codes()
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    following = None
    if stay and environment.socket is not None:
        following = WorldFollower(
            environment.socket,
            environment.job,
            environment.rank,
            environment.token_file,
            size=0 if any_size else environment.world_size,
        )
    world = World(
        backend,
        following,
        any_size=any_size,
        store_address=environment.store_address,
        local_rank=environment.local_rank,
        nproc=environment.local_world_size,
        timeout_s=timeout_s,
        reform_s=environment.reform_s,
        nccl_stays=environment.nccl_stays if nccl_stays is None else nccl_stays,
    )
    world.join()
    return world
