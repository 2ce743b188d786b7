"""Record what this rank gives to each communication of torch, and the sums that it takes from it,
as digests.

torch sends every collective and message of a script, of DistributedDataParallel, FSDP2 and DTensors
through its dispatcher, so a dispatch mode sees them all. Only steps that are checked run in it: it
looks at each operation, and reads what is sent once more. Within an operation of another library
it sees nothing, so a record with such an operation counts as one with gaps.

A sum is digested as soon as it is complete: after an operation that waits for it, or before the
first one that reads it.

Code that torch has compiled is not used under a dispatch mode: such a step runs as it was written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast._digests import digest_of
from holdfast._elastic.work_samples import Operations, span_bytes
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
_OUTPUTS = ("output_tensor", "output", "output_tensors", "outputs", "tensors")
"""Arguments that hold what a rank takes."""
_NOTHING = frozenset({"barrier", "monitored_barrier_", "recv_"})
"""Operations to which a rank gives no bytes."""


_WAITS = frozenset({"wait_tensor", "wait_tensors"})
"""Operations that wait for the results of others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """A sum that may not be complete yet."""

    number: int
    """Number of its communication in the record."""
    tensors: Sequence[torch.Tensor]
    work: Any
    """`torch.distributed.Work`; None where an operation waits for the sum."""

    def is_touched(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether one of the `spans` of memory has bytes of it."""
        own = map(_span_of, self.tensors)
        return any(a < end and first < b for a, b in own for first, end in spans)


class Recorder(TorchDispatchMode):
    """The record of one execution. It raises nothing, whatever the script does.

    Args:
        operations: notes the operations as well.
    """

    supports_higher_order_operators = True

    def __init__(self, operations: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self.given: list[Given] = []
        self.taken: dict[int, int] = {}
        """Number of a communication → digest of the sum that this rank took from it."""
        self._sums: list[_Sum] = []
        """Sums that are not digested yet."""
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
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        if space not in _SILENT:
            self.whole = False
        number: int | None = None
        named: dict[str, Any] = {}
        try:
            if self._sums and not getattr(func, "is_view", True):
                self._end_sums(_tensors_in([*args, *(kwargs or {}).values()]), func)
            if space == "aten":
                self.operations.note(func, args, kwargs or {})
            if space in _SPACES:
                named = _named(func, args, kwargs or {})
                number = self._note(func, named)
        except Exception:
            _log.debug("%s is not recorded", func, exc_info=True)
            self.whole = self.whole and space not in _SPACES
        result = func(*args, **(kwargs or {}))
        try:
            if number is not None:
                self._begin_sum(number, named, result)
            elif space in _SPACES and self._sums and _name_of(func) in _WAITS:
                self._end_sums(_tensors_in(result), None)
        except Exception:
            _log.debug("the sum of %s is not recorded", func, exc_info=True)
        return result

    def complete(self) -> None:
        """Digest the sums that nothing has read, once all communication is over."""
        for each in self._sums:
            self.taken[each.number] = digest_of(each.tensors)
        self._sums.clear()

    def _begin_sum(self, number: int, named: Mapping[str, Any], result: Any) -> None:
        """Note a sum that has begun. Digest it, if the script waits for it at once as well."""
        outputs = next((named[name] for name in _OUTPUTS if name in named), None)
        if "process_group" not in named:
            # Of several results, one may be waited for while others are not complete.
            if isinstance(result, torch.Tensor):
                self._sums.append(_Sum(number, list(_tensors_in(result)), None))
            return
        tensors = list(_tensors_in(outputs))
        work = result[-1] if isinstance(result, tuple) else result
        work = None if work is None else dist.Work.unbox(work)
        if not named.get("async_op", True):
            if work is not None:
                work.wait()
            self.taken[number] = digest_of(tensors)
        elif work is not None:
            self._sums.append(_Sum(number, tensors, work))

    def _end_sums(self, touched: Iterator[torch.Tensor], reader: Any) -> None:
        """Digest the sums of which an operation is about to read bytes, or for which one has
        waited.

        Args:
            reader: the operation; None after one that waited.
        """
        spans = [_span_of(tensor) for tensor in touched]
        waited = reader is None
        for each in [one for one in self._sums if one.is_touched(spans)]:
            # What an operation waits for is not read before that, but passed on.
            if each.work is None and not waited:
                continue
            self._sums.remove(each)
            # Work on a device is ordered by its streams; in host memory it must be over.
            on_device = any(tensor.device.type != "cpu" for tensor in each.tensors)
            if waited or on_device or each.work.is_completed():
                self.taken[each.number] = digest_of(each.tensors)

    def _note(self, func: Any, named: Mapping[str, Any]) -> int | None:
        """Note what this rank gives to one communication. Return its number if ranks take sums from
        it.

        Args:
            named: its arguments by name.
        """
        operation = _name_of(func)
        if "process_group" in named:
            group = dist.ProcessGroup.unbox(named["process_group"])
        elif "group_name" in named:
            group = _c10d._resolve_process_group(named["group_name"])
        else:
            return None  # the wait for another operation
        if operation == "recv_any_source_" or len(self.given) >= GIVEN_MAX:
            self.whole = False
            return None
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
        return len(self.given) - 1 if sums else None


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _name_of(operation: Any) -> str:
    return str(operation._schema.name).partition("::")[2]


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the memory that a tensor spans: the first one, and that behind it."""
    first = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return (first, first + span_bytes(tensor)) if first else (0, 0)


def _inputs(named: Mapping[str, Any]) -> Any:
    return next((named[name] for name in _INPUTS if name in named), named.get("tensors"))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local_of(value).detach()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
