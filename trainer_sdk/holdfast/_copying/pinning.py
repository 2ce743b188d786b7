"""Pinned host memory, to and from which a device copies directly (REFT §4.1): arenas and buffers.

CUDA may refuse to pin memory: a sandbox forbids it for shared memory, a mapping is too large, or an
earlier mapping was never released. Then copies go through a buffer or through plain memory, which
is slower but equally correct; this is logged once.

CUDA's functions return codes. An error code also stays behind in the calling thread, and the next
kernel that the thread launches would raise it, wherever that is. So this module consumes it.
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
READ_ONLY_FLAGS = 8
"""The same for a mapping that this process may only read. CUDA grants it only with this flag."""


class HostRegistry(Protocol):
    """The functions of `torch.cuda.cudart()` that this module calls; they return error codes."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> SupportsInt: ...

    def cudaHostUnregister(self, address: int, /) -> SupportsInt: ...


class Buffers:
    """Buffers in host memory, pinned if CUDA allows it."""

    def __init__(self) -> None:
        self._reported = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate uint8 [nbytes]. If CUDA refuses to pin it, this is logged once, and the memory
        is not pinned."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            if not self._reported:
                self._reported = True
                _log.warning("CUDA refuses pinned buffers, so copies take longer: %s", error)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class PinnedMapping:
    """Pins one mapping at a time.

    Args:
        registry: CUDA's runtime.
        consume_error: clears the error that a refused call leaves in this thread.
        flags: `READ_ONLY_FLAGS` for mappings that this process may only read.
    """

    def __init__(
        self,
        registry: HostRegistry,
        consume_error: Callable[[], None],
        flags: int = _DEFAULT_FLAGS,
    ) -> None:
        self._registry, self._consume_error, self._flags = registry, consume_error, flags
        self._reported = False
        self.address = 0
        """Address of the pinned mapping; 0 for none."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin [address, address + nbytes). If CUDA refuses, this is logged once, and `address`
        stays 0."""
        code = self._register(address, nbytes)
        if code != _SUCCESS and self._unregister(address) == _SUCCESS:
            # An earlier mapping at this address is still registered, although it is gone; copies
            # would go to its old pages.
            code = self._register(address, nbytes)
        if code == _SUCCESS:
            self.address = address
        elif not self._reported:
            self._reported = True
            _log.warning(
                "CUDA does not pin %d bytes of the arena (error %d): they are copied through a "
                "buffer, which takes longer; look for a limit on locked memory or a sandbox",
                nbytes,
                code,
            )

    def release(self) -> None:
        """Unpin the mapping, if one is pinned. Called before it is unmapped."""
        if not self.address:
            return
        code = self._unregister(self.address)
        self.address = 0
        if code != _SUCCESS:
            _log.warning("CUDA does not release the arena's pinned memory (error %d)", code)

    def _register(self, address: int, nbytes: int) -> int:
        code = int(self._registry.cudaHostRegister(address, nbytes, self._flags))
        if code != _SUCCESS:
            self._consume_error()
        return code

    def _unregister(self, address: int) -> int:
        code = int(self._registry.cudaHostUnregister(address))
        if code != _SUCCESS:
            self._consume_error()
        return code
