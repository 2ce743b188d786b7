"""A store that stops the forming of a gloo group when its world ends.

gloo forms a group in two steps. First, each rank writes its address into a store and reads the
addresses of all others. Then every two ranks connect; the one with the lower address waits for the
other. If a rank dies in the first step, the others wait for it as long as forming may take; if it
dies in the second step, five times as long. Torch has no call that ends either wait.

So gloo gets this store, which checks the world while it waits. And once the world has ended, this
process itself opens the connections that gloo still expects. That may complete a group, which is
useless; forming it then raises.

Groups of NCCL get this store only if they can stay; `SealedStore` says why. NCCL reads one id from
it, and connects by itself.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported by torch

from holdfast._daemon.sealed_store import SealedStore
from holdfast_core.errors import StaleEpochError, UnreachableError

_POLL_S, _POLL_S_MAX = 0.001, 0.05
_POLLS = 4
"""A wait checks again after its duration so far divided by this, which bounds its excess."""
_KNOCK_S = 1.0
"""Time for which a listener that no longer accepts connections is tried: forming waits for it."""
_SIZE = struct.Struct("@N")
_NUMBER = struct.Struct("@n")
_PORT = struct.Struct("!H")
_IP_AT = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Position of the address in a `sockaddr`, behind the family and the port."""


def wait_for_keys(
    store: Store, keys: list[str], timeout_s: float, check: Callable[[], None], late: str
) -> None:
    """Wait until `store` has all of `keys`, and check meanwhile whether the world still lasts.

    Args:
        check: raises StaleEpochError once the world has ended.
        late: message for the case that the keys do not come in time, without the time.

    Raises:
        StaleEpochError: the world ended first.
        UnreachableError: the keys did not come in time.
    """
    began_s = time.monotonic()
    while not store.check(keys):
        check()
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            raise UnreachableError(f"{late} within {timeout_s:.0f} s")
        time.sleep(min(max(waited_s / _POLLS, _POLL_S), _POLL_S_MAX))


class FormingStore(SealedStore):
    """The store of one world for its gloo groups.

    Args:
        store, prefix, key: as for every `SealedStore`.
        epoch: membership epoch of the world.
        ended: returns whether the world has ended. Any thread calls it.
        form_s: time within which each rank must write its address.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        key: str,
        *,
        epoch: int,
        ended: Callable[[], bool],
        form_s: float,
    ) -> None:
        super().__init__(store, prefix, key)
        self._epoch, self._ended, self._form_s = epoch, ended, form_s
        self._listeners: list[Listener] = []
        """This process's listeners for the groups that are being formed."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Form groups in the block; stop once the world has ended.

        Raises:
            StaleEpochError: the world has ended.
        """
        formed = threading.Event()
        watching = threading.Thread(target=self._watch, args=(formed,), name="holdfast-forming")
        watching.start()
        try:
            yield
        except RuntimeError:
            self._check_lasts()  # Raises if the end of the world is the cause.
            raise
        finally:
            formed.set()
            watching.join()
            self._listeners.clear()
        self._check_lasts()

    # --- called by gloo ---------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        listener = None if isinstance(value, str) else read_listener(value)
        if listener is not None:
            self._listeners.append(listener)
        # Check after the append: if the world ends later, `_watch` completes this listener as well.
        self._check_lasts()
        super().set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for `keys`, for the time of this store: gloo passes the timeout of the group."""
        del timeout
        late = f"epoch {self._epoch}: some rank did not come to its group"
        wait_for_keys(self, keys, self._form_s, self._check_lasts, late)

    # --- inside -----------------------------------------------------------------------------------

    def _check_lasts(self) -> None:
        if self._ended():
            raise StaleEpochError(f"epoch {self._epoch} ended while its groups were formed")

    def _watch(self, formed: threading.Event) -> None:
        while not formed.wait(_POLL_S_MAX):
            if self._ended():
                for listener in self._listeners:
                    listener.complete()
                return


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A socket at which gloo waits for the connections of a group."""

    host: str
    port: int
    family: int
    numbers: tuple[int, ...]
    """The number that each rank sends when it connects."""

    def complete(self) -> None:
        """Make every connection that may be missing, and close it."""
        for number in self.numbers:
            with suppress(OSError), socket.socket(self.family) as connection:
                connection.settimeout(_KNOCK_S)
                connection.connect((self.host, self.port))
                connection.sendall(_NUMBER.pack(number))


def read_listener(value: bytes) -> Listener | None:
    """Decode the value that gloo writes into its store: a host name, an address, and a number for
    each rank. Return None for any other value, such as another version of gloo may write."""
    with suppress(struct.error, KeyError, ValueError):
        _, address, numbers = _cut(value)
        [family] = struct.unpack_from("@H", address)
        [port] = _PORT.unpack_from(address, 2)
        host = socket.inet_ntop(family, address[_IP_AT[family]])
        return Listener(
            host=host,
            port=port,
            family=family,
            numbers=tuple(number for [number] in _NUMBER.iter_unpack(numbers)),
        )
    return None


def _cut(value: bytes) -> tuple[bytes, bytes, bytes]:
    """Split `value` into two parts that have their sizes before them, and the rest."""
    parts, at = [], 0
    for _ in range(2):
        [size] = _SIZE.unpack_from(value, at)
        at += _SIZE.size
        if at + size > len(value):
            raise ValueError(f"a part of {size} bytes in {len(value)}")
        parts.append(value[at : at + size])
        at += size
    return parts[0], parts[1], value[at:]
