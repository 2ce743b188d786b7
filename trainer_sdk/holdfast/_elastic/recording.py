"""Record what this rank gives to each communication of torch, as digests.

torch sends every collective and message of a script, of DistributedDataParallel, FSDP2 and DTensors
through its dispatcher, so a dispatch mode sees them all. Only steps that are checked run in it: it
looks at each operation, and reads what is sent once more. Within an operation of another library
it sees nothing, so a record with such an operation counts as one with gaps.

Code that torch has compiled is not used under a dispatch mode: such a step runs as it was written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast._digests import digest_of
from holdfast._state.dtensors import is_dtensor_type, local_of
from holdfast_core.reexecution import GIVEN_MAX, Given

_c10d: Any = c10d
"""Module whose stubs lack what is private."""
_log = logging.getLogger("holdfast")

_SPACES = frozenset({"c10d", "_c10d_functional"})
_SILENT = _SPACES | {"aten", "prim", "prims", "profiler", "fsdp", "mkldnn", "mkl", "debugprims"}
"""Namespaces of operations that communicate nothing else. Within an operation a mode sees nothing,
so any other one may communicate unseen, as those of `_dtensor` and `symm_mem` do."""
_UNSEEN = ("deep_ep", "pplx_kernels", "nvshmem", "mpi4py")
"""Modules that communicate apart from torch's dispatcher."""
_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list")
"""Arguments that hold what a rank gives, apart from `tensors`, which are overwritten."""
_NOTHING = frozenset({"barrier", "monitored_barrier_", "recv_"})
"""Operations to which a rank gives no bytes."""


class Recorder(TorchDispatchMode):
    """The record of one execution. It raises nothing, whatever the script does."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[Given] = []
        self.whole = not any(name in sys.modules for name in _UNSEEN)
        """Whether each communication is in it."""
        self._is_paused = False

    def begin(self) -> None:
        """Record from now on what the calling thread does, and its backward passes."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Record nothing more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within the block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor turns into operations on its local tensor, which come here next.
        if any(is_dtensor_type(kind) for kind in types):
            return NotImplemented
        # Operators of higher order have operations within them, and no namespace of their own.
        space = getattr(func, "namespace", "")
        if space not in _SILENT and not self._is_paused:
            self.whole = False
        if space in _SPACES and not self._is_paused:
            try:
                self._note(func, _named(func, args, kwargs or {}))
            except Exception:
                _log.debug("%s is not recorded", func, exc_info=True)
                self.whole = False
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, named: Mapping[str, Any]) -> None:
        """Note what this rank gives to one communication.

        Args:
            named: its arguments by name.
        """
        operation = func._schema.name.partition("::")[2]
        if "process_group" in named:
            group = dist.ProcessGroup.unbox(named["process_group"])
        elif "group_name" in named:
            group = _c10d._resolve_process_group(named["group_name"])
        else:
            return  # the wait for another operation
        if operation == "recv_any_source_" or len(self.given) >= GIVEN_MAX:
            self.whole = False
            return
        # Name it as all ranks of the group do: by the order of collectives, or of messages between
        # the same two ranks.
        name, rank = str(group.group_name), group.rank()
        if operation == "send":
            name += f":{rank}>{named['dst']}:{named['tag']}"
        elif operation == "recv_":
            name += f":{named['src']}>{rank}:{named['tag']}"
        root = named.get("root_rank", named.get("src"))
        gives = operation not in _NOTHING and (
            not operation.startswith("broadcast") or root == rank
        )
        digest = digest_of(_tensors_in(_inputs(named))) if gives else 0
        sums = "reduce" in operation and group.size() > 1
        self.given.append(Given(name, digest, sums))


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _inputs(named: Mapping[str, Any]) -> Any:
    return next((named[name] for name in _INPUTS if name in named), named.get("tensors"))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local_of(value).detach()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
