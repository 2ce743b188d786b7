"""Pinned host memory, which a device copies from and to directly (REFT §4.1): arenas and buffers.

CUDA may refuse it: a sandbox does not let a process pin shared memory, a mapping is too large, or
an earlier one was never released. Then copies go through a buffer or through plain memory, which
is slower and as correct; the log states it once.

CUDA's functions return codes, and a code that is not success stays behind in the calling thread:
the next kernel that it launches would raise it, wherever that is. So it is consumed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, SupportsInt

import torch

_log = logging.getLogger("holdfast")

_SUCCESS = 0
_DEFAULT_FLAGS = 0
"""Pinned for every device of the process, as all of them share one address space."""


class HostRegistry(Protocol):
    """Functions of CUDA's runtime, as `torch.cuda.cudart()` has them; they return error codes."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> SupportsInt: ...

    def cudaHostUnregister(self, address: int, /) -> SupportsInt: ...


class Buffers:
    """Buffers in host memory, pinned where CUDA grants it."""

    def __init__(self) -> None:
        self._reported = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate uint8 [nbytes]. A refusal is logged once, and the memory is not pinned then."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            if not self._reported:
                self._reported = True
                _log.warning("CUDA refuses pinned buffers, so copies take longer: %s", error)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class PinnedMapping:
    """Pinning of one mapping at a time.

    Args:
        registry: CUDA's runtime.
        consume_error: clears the error that a refused call leaves in this thread.
    """

    def __init__(self, registry: HostRegistry, consume_error: Callable[[], None]) -> None:
        self._registry, self._consume_error = registry, consume_error
        self._reported = False
        self.address = 0
        """Address of the pinned mapping; 0 for none."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin [address, address + nbytes). A refusal is logged once, and `address` stays 0."""
        code = self._register(address, nbytes)
        if code != _SUCCESS and self._unregister(address) == _SUCCESS:
            # A mapping that was here before and is gone: copies would go to the pages that it had.
            code = self._register(address, nbytes)
        if code == _SUCCESS:
            self.address = address
        elif not self._reported:
            self._reported = True
            _log.warning(
                "CUDA does not pin the arena's %d bytes (error %d): snapshots are copied through a "
                "buffer, which takes longer; look for a limit on locked memory or a sandbox",
                nbytes,
                code,
            )

    def release(self) -> None:
        """Release the mapping, if one is pinned; call it before it is unmapped."""
        if not self.address:
            return
        code = self._unregister(self.address)
        self.address = 0
        if code != _SUCCESS:
            _log.warning("CUDA does not release the arena's pinned memory (error %d)", code)

    def _register(self, address: int, nbytes: int) -> int:
        code = int(self._registry.cudaHostRegister(address, nbytes, _DEFAULT_FLAGS))
        if code != _SUCCESS:
            self._consume_error()
        return code

    def _unregister(self, address: int) -> int:
        code = int(self._registry.cudaHostUnregister(address))
        if code != _SUCCESS:
            self._consume_error()
        return code
