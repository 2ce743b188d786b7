"""Process groups that are formed, left and formed again in one process.

Facts of torch behind this module, on gloo: `abort()` wakes nobody; a group's sockets close only
with the last reference to it; and dropping that reference waits for collectives that are still
pending. So groups are dropped on a thread of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    PrefixStore,
    TCPStore,
)

from holdfast._causes import chain_of
from holdfast_core.errors import StaleEpochError, UnreachableError

_log = logging.getLogger("holdfast")

FORM_S = 15.0
"""Time to form a group once all of its ranks are there. A rank that dies in between takes it."""
CONNECT_S = 10.0
"""Time to reach the store of an epoch."""
_POLL_S, _POLL_S_MAX = 0.002, 0.05


def form(
    backend: str,
    store_address: str,
    epoch: int,
    rank: int,
    size: int,
    ended: Callable[[], bool],
) -> None:
    """Form the default process group of an epoch, once all ranks are at its store.

    Raises:
        StaleEpochError: the epoch ended first.
        RuntimeError: the store or a rank was lost.
    """
    host, _, port = store_address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S))
    own = PrefixStore(f"world-{epoch}", store)
    if own.add("here", 1) == size:
        own.set("complete", "")
    pause_s = _POLL_S
    while not own.check(["complete"]):
        if ended():
            raise StaleEpochError(f"epoch {epoch} ended before its ranks had met")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S_MAX)
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", own),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=FORM_S),
    )


def split(partition: Sequence[Sequence[int]], rank: int, timeout_s: float) -> dist.ProcessGroup:
    """Form one group for each part, on all ranks alike; return the one that has `rank`."""
    mine: Any = None
    for part in partition:
        group: Any = dist.new_group(list(part), timeout=timedelta(seconds=FORM_S))
        if rank in part:
            mine = group
    assert mine is not None
    set_timeout(mine, timeout_s)
    found: dist.ProcessGroup = mine
    return found


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set the time that each collective of `group` may take from now on."""
    set_it: Any = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # its name before
    set_it(timedelta(seconds=timeout_s), group)


def leave() -> None:
    """Destroy all process groups. Their sockets close as soon as nothing else refers to them,
    which wakes the ranks that wait for this one."""
    if not dist.is_initialized():
        return
    if "nccl" in dist.get_backend():
        _abort()
    held: list[Any] = [*c10d._world.pg_map]
    dist.destroy_process_group()
    threading.Thread(target=held.clear, name="holdfast-leave", daemon=True).start()


def wake() -> None:
    """Wake collectives of this process that are blocked on a device. Any thread."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        _abort()


def _abort() -> None:
    try:
        c10d._abort_process_group()
    except Exception as error:
        # Nothing but a machine with several devices can show how NCCL ends under every failure.
        _log.warning(
            "NCCL's groups could not be aborted (%s: %s); if this process hangs, its launcher ends "
            "it after reformSeconds",
            type(error).__name__,
            error,
        )


def is_of_group(error: BaseException) -> bool:
    """Whether `error`, or what caused it, comes from a collective or a store."""
    return any(
        isinstance(one, dist.DistError | UnreachableError | StaleEpochError)
        or (isinstance(one, RuntimeError) and any(name in str(one) for name in ("gloo", "NCCL")))
        for one in chain_of(error)
    )
