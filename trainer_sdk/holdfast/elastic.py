"""Training worlds that change while their processes stay.

    world = holdfast.elastic.init("nccl")
    model, optimizer = build(world)
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    for step in session.steps(total):        # the step to run now, after whatever happened
        with step:                           # the end of a world unwinds to here
            train_one_step(world, model, optimizer)

When a rank or a node is lost, the other processes stay: they form their process groups anew,
restore the recovery line into the tensors that they have, and go on with the step after it. Only
the lost ranks start again. A script without `world` goes on as before: all processes start again.
"""

from __future__ import annotations

from holdfast._daemon.following import WorldFollower
from holdfast._elastic.pipeline import Pipeline
from holdfast._elastic.world import World, WorldGroup
from holdfast._environment import read_environment
from holdfast._exits import set_exit_codes

__all__ = ["Pipeline", "World", "WorldGroup", "init"]

TIMEOUT_S = 600.0


def init(
    backend: str, *, stay: bool = True, any_size: bool = False, timeout_s: float = TIMEOUT_S
) -> World:
    """Form the process groups of this worker's world. Every rank calls it, once, instead of
    `torch.distributed.init_process_group`; collectives then work as usual.

    Until `session.steps`, make no collective call but `world.group`: a process that stays does not
    repeat what a new one does here. So each rank builds its model from the seed.

    Args:
        backend: "gloo" or "nccl".
        stay: False for a process that ends with its world, as without a daemon.
        any_size: True for a script that works on in a world of any size: it reads `world.rank` and
            `world.size` anew after each restore (`step.resumed`). Other processes end when the
            number of ranks changes, and new ones start.
        timeout_s: seconds that one collective may take.

    Raises:
        UnreachableError: when the world could not be formed.
        HoldfastError: when the daemon refuses this process.
    """
    environment = read_environment()
    set_exit_codes()
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
    )
    world.join()
    return world
