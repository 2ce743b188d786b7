"""NCCL, played by gloo on machines without devices: the name, the handles, the calls of the store
and the errors are those of torch's NCCL, and the messages are gloo's.

`play_nccl` registers it under the name `nccl` in this process. Then the code that is tested takes
exactly the way that it takes with NCCL; nothing in it knows of this.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ErrorType

from holdfast._elastic import groups

_played: list[PlayedNCCL] = []
"""All of this process: torch keeps no reference to what is written in Python."""


class PlayedNCCL(dist.ProcessGroupGloo):
    """Connections of one group, as NCCL has them.

    Attributes:
        calls: what was asked of it, in order.
        claims: the names under which it has claimed a world in the store.
    """

    def __init__(self, options: Any) -> None:
        made: Any = super()
        made.__init__(
            options.store,
            options.group_rank,
            options.group_size,
            timeout=options.timeout,
            enable_reconfigure=options.enable_reconfigure,
        )
        self.calls: list[str] = []
        self.claims: list[str] = []
        self._store, self._own_name = options.store, secrets.token_hex(8)
        self._used: set[int] = set()
        self._error = ErrorType.SUCCESS
        self._alone: Any = None
        _played.append(self)

    def name(self) -> str:
        return "nccl2"

    def get_error(self) -> Any:
        return self._error

    def fail(self) -> None:
        """Fail as when the watchdog of NCCL finds an error, perhaps before the world has ended."""
        self._error = ErrorType.COMM_ERROR

    def get_reconfigure_handle(self) -> str:
        plain: Any = super()
        return f"nccl2:{self._own_name}|{plain.get_reconfigure_handle()}"

    def abort(self) -> None:
        """Revoke the communicator: pending collectives end, and no others can begin."""
        self.calls.append("abort")
        self._error = ErrorType.COMM_ERROR
        groups.disconnect(_GroupOf(self))

    def reconfigure(self, options: Any) -> Any:
        """As torch's: claim the world in the store, hand out an id there, and connect."""
        assert len(set(options.handles)) == len(options.handles)
        assert all(each.startswith("nccl2:") for each in options.handles)
        assert options.uuid not in self._used, "a world connects a group once"
        self._used.add(options.uuid)
        self.calls.append(f"reconfigure {len(options.handles)}")
        # The calls of the store are those of torch, with names and values of the same forms.
        store: Any = dist.PrefixStore(f"nccl2_reconfigure/{options.uuid}", self._store)  # type: ignore[attr-defined]
        first, own = options.handles[0], self.get_reconfigure_handle()
        if first == own:
            claimed = store.compare_set("claimed", "", own)
            assert claimed == own.encode(), (claimed, own)
            store.set(f"unique_id/{first}", secrets.token_bytes(128))
            self.claims.append(f"{options.uuid}")
        else:
            store.wait([f"unique_id/{first}"], options.timeout)
            assert len(store.get(f"unique_id/{first}")) == 128
        passed: Any = c10d.ReconfigureOptions()  # type: ignore[attr-defined]  # torch 2.15
        passed.uuid, passed.timeout = options.uuid, options.timeout
        passed.handles = [each.partition("|")[2] for each in options.handles]
        plain: Any = super()
        work = plain.reconfigure(passed)
        work.wait()
        self._error = ErrorType.SUCCESS
        return work


class _GroupOf:
    """A group that has one backend, for host memory."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, backend: PlayedNCCL) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> PlayedNCCL:
        del device
        return self._backend

    def size(self) -> int:
        return self._backend.size()

    def rank(self) -> int:
        return self._backend.rank()


def play_nccl(device: str) -> None:
    """Let `nccl` be a backend for tensors on `device` in this process."""
    dist.Backend.register_backend(
        "nccl",
        lambda options, _: PlayedNCCL(options),
        extended_api=True,
        devices=[device],
        _backend_type=dist.ProcessGroup.BackendType.NCCL,
    )


def played() -> list[PlayedNCCL]:
    """All connections that this process has made, in order."""
    return _played
