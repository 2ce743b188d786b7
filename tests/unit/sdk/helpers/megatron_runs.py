"""Runs of Megatron-Core whose ranks are killed, and the runs that come back."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from devices_of_ranks import backend_of, use_device
from restoring_daemons import daemon_of

import holdfast
from holdfast_core.job.snapshots import Policy

if TYPE_CHECKING:
    from megatron_model import Trained

WAIT_S = 120.0
KILLED, STEPS = 4, 6


def open_session(
    trained: Trained,
    directory: str,
    rank: int,
    world: int,
    epoch: int,
    old: int = 0,
    policy: Policy | None = None,
    **more: Any,
) -> holdfast.Session:
    from holdfast.integrations.megatron import protect

    daemon = daemon_of(directory, rank, world, epoch=epoch, old=old)
    settings = holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, policy=policy)
    return protect(
        trained.chunks,
        trained.optimizer,
        trained.scheduler,
        daemon=daemon,
        settings=settings,
        **more,
    )


def train(
    trained: Trained, first: int, last: int, session: holdfast.Session | None = None
) -> list[float]:
    losses = []
    for iteration in range(first, last + 1):
        losses.append(trained.step(iteration))
        if session is not None:
            session.save(iteration).committed.result(WAIT_S)
    return losses


def full_state(trained: Trained) -> dict[str, torch.Tensor]:
    """Weights, and on rank 0 masters and moments by parameter, as Megatron's own function gathers
    them. Collective."""
    from megatron.core.utils import unwrap_model

    found = {name: p.detach().clone() for name, p in unwrap_model(trained.model).named_parameters()}
    names = {id(p): name for name, p in unwrap_model(trained.model).named_parameters()}
    for one in trained.inner():
        gathered = one.get_parameter_state_dp_zero()
        for index, buffer in enumerate(one.buffers if dist.get_rank() == 0 else ()):
            states = gathered[index][buffer.param_dtype, buffer.grad_dtype]
            for p, (start, end, _) in buffer.param_index_map.items():
                for key, ours in (("param", "master"), ("exp_avg",) * 2, ("exp_avg_sq",) * 2):
                    part = states[key][start:end].view(p.shape).clone()
                    found[f"{names[id(p)]}.{ours}"] = part
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def is_killed(rank: int, world: int, directory: str, case: dict[str, Any]) -> None:
    from megatron_model import LOSS_SCALE, Case, Trained

    trained = Trained(1, Case(**case))
    before = trained.digests()
    losses = train(trained, 1, STEPS)
    after = trained.digests()
    weights = [name for name in trained.weights() if before[name] == after[name]]
    assert not weights, f"they are not trained; scale {trained.optimizer.get_loss_scale()}"
    if trained.config.fp16:
        assert trained.optimizer.get_loss_scale() < LOSS_SCALE
    torch.save((losses, trained.digests()), f"{directory}-{rank}")
    trained = Trained(1, Case(**case))
    session = open_session(trained, directory, rank, world, epoch=1)
    assert session.restore() is None
    assert train(trained, 1, KILLED, session) == losses[:KILLED]
    if not case:
        torch.save(full_state(trained), f"{directory}-full{rank}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def comes_back(rank: int, world: int, directory: str, case: dict[str, Any]) -> None:
    from megatron_model import Case, Trained

    trained = Trained(2, Case(**case))
    session = open_session(trained, directory, rank, world, epoch=2)
    assert session.restore() == KILLED
    losses = train(trained, KILLED + 1, STEPS, session)
    session.close()
    expected, digests = torch.load(f"{directory}-{rank}")
    assert losses == expected[KILLED:]
    found = trained.digests()
    assert found.keys() == digests.keys()
    assert [name for name in found if found[name] != digests[name]] == []


def in_world(
    rank: int,
    world: int,
    work: Callable[..., None],
    store: str,
    directory: str,
    *more: Any,
    device: str = "cpu",
) -> None:
    """Call `work(rank, world, directory, *more)` in a rank of Megatron.

    Args:
        more: settings of `megatron_model.Case` first, if any.
        device: `cpu`, or `cuda`, of which all ranks have the first one.
    """
    os.environ["MEGATRON_DEVICE"] = device
    torch.set_num_threads(1)
    use_device(device)
    from megatron_model import Case, use_groups

    dist.init_process_group(
        backend_of(device), init_method=f"file://{store}", rank=rank, world_size=world
    )
    use_groups(Case(**more[0]) if more else Case())
    try:
        work(rank, world, directory, *more)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
