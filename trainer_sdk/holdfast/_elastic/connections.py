"""Connections of torch's process groups: giving a group new ones, closing them, and what a device
has computed through them.

The private parts of torch for that are used here and nowhere else. `enable_reconfigure=True` makes
a group without connections, and `reconfigure` gives a backend of it connections to ranks that each
state a handle. torch has one call for a whole group, but refuses groups of several backends, such
as `cpu:gloo,cuda:nccl`. So each backend of a group is treated by itself.

gloo and NCCL end differently. A gloo collective blocks its thread, fails when its connections
close, and has a result when it returns. A collective of NCCL returns when the device has it in its
queue. To abort its communicator ends it on the device, with whatever bytes are there, and the
thread learns of that only if it asks. So before a result may count, `finish` waits for the devices
and asks. Communicators that can be reconfigured are revoked by an abort and kept until the next
`reconfigure`; torch's watchdog does no more than that to them, whatever
`TORCH_NCCL_ASYNC_ERROR_HANDLING` says, so it never ends this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from holdfast._elastic import groups as gloo_groups
from holdfast_core.errors import InvalidJobError, ProtocolError, UnreachableError

_log = logging.getLogger("holdfast")
_GLOO, _NCCL = frozenset({"gloo"}), frozenset({"nccl", "nccl2"})
_LEGACY = "nccl"
"""Name under which torch can also make the older implementation of NCCL's groups."""
_REVOKES = (2, 28)
"""First version of NCCL that can revoke a communicator."""
_REVOKES_ON_ROCM = (2, 30, 7)


def kinds_of(backend: str) -> frozenset[str]:
    """The names in torch's `backend`, which are one for all devices or one for each."""
    return frozenset(each.rpartition(":")[2] for each in backend.lower().split(","))


def why_not(backend: str, *, nccl_stays: bool = False) -> str:
    """Why groups of `backend` cannot get new connections in this process, and what to change; empty
    if they can.

    Args:
        nccl_stays: whether those of NCCL may.
    """
    torchcomms: Any = getattr(c10d, "_use_torchcomms_enabled", None)
    others = kinds_of(backend) - _GLOO - _NCCL
    if not hasattr(dist, "_reconfigure"):
        return f"that needs torch 2.15, and this is torch {torch.__version__}"
    if others:
        return f"backend {', '.join(sorted(others))} cannot do it; use gloo or NCCL"
    if c10d.get_debug_level() is c10d.DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each group in another one; leave it out"
    if torchcomms is not None and torchcomms():
        return "torchcomms replaces the backends; leave TORCH_DISTRIBUTED_USE_TORCHCOMMS out"
    return "" if kinds_of(backend) <= _GLOO else _why_not_nccl(backend, nccl_stays)


def _why_not_nccl(backend: str, nccl_stays: bool) -> str:
    if not nccl_stays:
        return (
            "those of NCCL do so only on request, because it has not been tried on several devices "
            "yet: give holdfast.elastic.init(…, nccl_stays=True), or set HOLDFAST_NCCL_STAYS=1 in "
            "the environment of all ranks"
        )
    if _LEGACY in kinds_of(backend) and _LEGACY in c10d._FR_SELF_RECORDING_BACKENDS:
        return (
            "TORCH_DIST_USE_NCCL2=0 chooses an implementation of NCCL's groups that cannot do it, "
            "and whose watchdog ends the process; leave it out"
        )
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else _REVOKES_ON_ROCM
    needed = _REVOKES_ON_ROCM if torch.version.hip else _REVOKES
    if version < needed:
        found, least = ".".join(map(str, version)), ".".join(map(str, needed))
        return f"that needs NCCL {least}, and this is NCCL {found}: install a newer torch"
    return ""


def handles_of(group: Any) -> list[str]:
    """What this rank states of `group` so that others can connect to it, for each backend."""
    return [backend.get_reconfigure_handle() for backend in _backends(group)]


def connect(
    group: Any,
    handles: Sequence[Sequence[str]],
    *,
    epoch: int,
    timeout_s: float,
    local_rank: int = 0,
) -> None:
    """Give `group` connections to the ranks that stated `handles`, in their order. Collective.

    Args:
        handles: what `handles_of` returned on each rank of the group.
        epoch: membership epoch, by which torch tells the connections of one world from those of
            another: it names the key of NCCL's id in the store.
        timeout_s: time that each backend may take.
        local_rank: number of the device on which NCCL connects, unless the script has chosen one
            other than the first, which is also the present one where none was chosen.

    Raises:
        ProtocolError: ranks have different backends.
        RuntimeError: a rank was lost meanwhile.
    """
    backends = _backends(group)
    if any(len(each) != len(backends) for each in handles):
        raise ProtocolError(
            f"ranks made a group with {sorted({len(each) for each in handles})} backends: run the "
            f"same script on all ranks, with the same devices"
        )
    for at, backend in enumerate(backends):
        options: Any = c10d.ReconfigureOptions()  # type: ignore[attr-defined]  # torch 2.15
        options.uuid, options.timeout = epoch, timedelta(seconds=timeout_s)
        options.handles = [each[at] for each in handles]
        with _on_own_device(local_rank) if _is_nccl(backend) else nullcontext():
            backend.reconfigure(options).wait()


def close(closed: Sequence[Any]) -> None:
    """Close all connections of groups, which ends their pending collectives. Any thread.

    All communicators are revoked before anything waits: a collective of one may be queued behind a
    collective of another.
    """
    for backend in _nccl_backends(closed):
        try:
            backend.abort()
        except RuntimeError as error:
            _log.warning(
                "a communicator of NCCL could not be aborted (%s); if this process hangs, its "
                "launcher ends it after reformSeconds",
                error,
            )
    for group in closed:
        with suppress(RuntimeError):  # another thread is destroying it
            gloo_groups.disconnect(group)


def close_for_good(
    closed: Iterable[Any], *, epoch: int, timeout_s: float, local_rank: int = 0
) -> None:
    """Make groups that are closed safe to destroy: torch destroys a communicator together with all
    of its ranks, some of which are gone. So each one of NCCL becomes a group of this rank alone.
    """
    for group in closed:
        if any(_nccl_backends([group])):
            alone = [handles_of(group)]
            try:
                connect(group, alone, epoch=epoch, timeout_s=timeout_s, local_rank=local_rank)
            except RuntimeError as error:
                _log.warning("a communicator of NCCL could not be left: %s", error)


def settle() -> None:
    """Wait until the devices of this process have nothing more to do, so that no collective that
    was ended writes into a tensor from then on."""
    for index in _used_devices():
        torch.cuda.synchronize(index)


def finish(finished: Iterable[Any]) -> None:
    """Wait until the devices of this process have computed all that is queued, on any stream, and
    check that no collective of NCCL in these groups was ended before it had its result.

    Raises:
        InvalidJobError: a CUDA graph is being captured, so nothing is computed.
        UnreachableError: a collective was ended.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise InvalidJobError(
            "an optimizer steps while a CUDA graph is captured, and no rank votes when the graph "
            "is replayed: capture the forward and backward passes only, or give holdfast.init "
            "Settings(go_on_live=False)"
        )
    settle()
    for backend in _nccl_backends(finished):
        ask = getattr(backend, "get_error", None)  # older versions of torch lack it
        error = ask().name if ask is not None else "SUCCESS"
        if error != "SUCCESS":
            raise UnreachableError(
                f"a collective of NCCL was ended before it had a result ({error})"
            )


class Begun:
    """The collectives of NCCL that this process has begun in some groups until now.

    Args:
        messages: number of messages that it has begun to send or to receive, which NCCL's groups
            need not count.
    """

    def __init__(self, begun: Iterable[Any] = (), messages: int = 0) -> None:
        self.messages = messages
        self._numbers = _numbers_of(begun)

    def more(self, begun: Iterable[Any]) -> bool:
        """Whether it has begun others since, now that `begun` are its groups. Messages do not count
        where torch numbers only collectives."""
        return _numbers_of(begun) != self._numbers

    def is_like(self, other: Begun) -> bool:
        """Whether it had begun the same when `other` was made, messages included."""
        return (self._numbers, self.messages) == (other._numbers, other.messages)


def _numbers_of(begun: Iterable[Any]) -> dict[str, list[int]]:
    """Number of the newest collective of each communicator, by the name of its group. It keeps no
    group alive."""
    numbers: dict[str, list[int]] = {}
    for group in begun:
        for backend in _nccl_backends([group]):
            number = backend._get_sequence_number_for_group()
            numbers.setdefault(group.group_name, []).append(number)
    return numbers


def _used_devices() -> list[int]:
    """Indices of the devices on which this process computes, whichever of them is the present one.
    To wait for another one would make a context there."""
    if not torch.cuda.is_initialized():
        return []
    return [
        one for one in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(one)
    ]


def _backends(group: Any) -> list[Any]:
    """The backends of a group, in an order that is the same on all ranks."""
    found: list[Any] = []
    for device in sorted(group._device_types, key=lambda one: str(one.type)):
        backend = group._get_backend(device)
        if not any(backend is one for one in found):
            found.append(backend)
    return found


def _nccl_backends(of_groups: Iterable[Any]) -> Iterator[Any]:
    for group in of_groups:
        with suppress(RuntimeError):  # it was destroyed meanwhile
            yield from filter(_is_nccl, _backends(group))


def _is_nccl(backend: Any) -> bool:
    return backend.name() in _NCCL


@contextmanager
def _on_own_device(local_rank: int) -> Iterator[None]:
    """Make the device that the script has chosen for this process the present one, or else the one
    with its number, as torchrun's workers do."""
    if not torch.cuda.is_available() or torch.cuda.current_device():
        yield
        return
    with torch.cuda.device(local_rank % torch.cuda.device_count()):
        yield
