"""A CUDA device whose tensors have no values, on a machine that has none: torch's fake tensors.

Whatever reads a value raises; `OnDevice` refuses the other ways to wait for a device.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("nonzero", "bincount", "unique", "_local_scalar_dense", "equal", "masked_select")
"""Operations that wait for the device by themselves."""


class OnDevice(TorchDispatchMode):
    """Refuses what waits for the device, or copies to it from pageable memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in WAITING, func
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            assert source.device == found.device or (kwargs or {}).get("non_blocking"), func
        return found


class Group:
    """All ranks of a world that is played, in place of a `WorldGroup`."""

    @property
    def now(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def finish(self) -> None: ...


class Stream:
    """The current stream of a device that is played; also its event."""

    def __init__(self) -> None:
        self.waits = 0

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.waits += 1
