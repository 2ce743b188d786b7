"""Runs of DeepSpeed's engines whose ranks are killed, and the runs that come back."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from devices_of_ranks import backend_of, use_device
from restoring_daemons import daemon_of

import holdfast

WAIT_S = 120.0
KILLED, STEPS = 4, 6


def open_session(
    engine: Any, directory: str, rank: int, world: int, epoch: int, old: int = 0, **more: Any
) -> holdfast.Session:
    from holdfast.integrations.deepspeed import protect

    daemon = daemon_of(directory, rank, world, epoch=epoch, old=old)
    settings = holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, **more)
    return protect(engine, daemon=daemon, settings=settings)


def train(
    engine: Any, rank: int, last: int, session: holdfast.Session | None = None
) -> list[float]:
    from deepspeed_model import train_step

    losses = []
    while engine.global_steps < last:
        losses.append(train_step(engine, rank))
        if session is not None:
            session.save(engine.global_steps).committed.result(WAIT_S)
    return losses


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Weights, masters and moments by parameter, as DeepSpeed's own functions return them.
    Collective."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        # DeepSpeed links states in the first step, when only those of the first group exist.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in engine.module.named_parameters():
        with GatheredParameters([p]):
            found[name] = p.detach().clone()
        found[f"{name}.master"] = safe_get_full_fp32_param(p)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(p, key)
    return found


def is_killed(rank: int, world: int, directory: str, case: dict[str, Any]) -> None:
    from deepspeed_model import digests_of, make_engine

    engine = make_engine(1, **case)
    losses = train(engine, rank, STEPS)
    torch.save((losses, digests_of(engine)), f"{directory}-{rank}")
    engine = make_engine(1, **case)
    session = open_session(engine, directory, rank, world, epoch=1)
    assert session.restore() is None
    assert train(engine, rank, KILLED, session) == losses[:KILLED]
    if engine.zero_optimization_stage() and not case["ep"]:
        state = full_state(engine)
        if rank == 0:
            torch.save(state, f"{directory}-full")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def comes_back(rank: int, world: int, directory: str, case: dict[str, Any]) -> None:
    from deepspeed_model import digests_of, make_engine

    engine = make_engine(2, **case)
    session = open_session(engine, directory, rank, world, epoch=2)
    assert session.restore() == KILLED
    losses = train(engine, rank, STEPS, session)
    session.close()
    expected, digests = torch.load(f"{directory}-{rank}")
    assert losses == expected[KILLED:]
    found = digests_of(engine)
    assert found.keys() == digests.keys()
    assert [name for name in found if found[name] != digests[name]] == []
    if case["dtype"] == "fp16":
        assert engine.skipped_steps > 0


def in_world(
    rank: int, world: int, work: Callable[..., None], store: str, *more: Any, device: str = "cpu"
) -> None:
    """Call `work(rank, world, *more)` in a rank of DeepSpeed.

    Args:
        device: the accelerator: `cpu`, or `cuda`, of which all ranks have the first one.
    """
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["DS_ACCELERATOR"] = device
    torch.set_num_threads(1)
    use_device(device)
    from deepspeed_model import use_groups

    dist.init_process_group(
        backend_of(device), init_method=f"file://{store}", rank=rank, world_size=world
    )
    use_groups(backend_of(device))
    try:
        work(rank, world, *more)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
