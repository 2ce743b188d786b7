"""Store of a training world in which nothing that a stranger wrote is read.

torch's store asks nobody who he is: whoever reaches its port reads, overwrites and deletes. But
what a rank states there decides what training goes on from, what a launcher states which rank its
workers get, and the addresses there whom a rank exchanges tensors with. So the launcher that serves
the store makes a key for each world. It reaches the job's ranks and launchers only: over the
daemons' sockets, which ask for the job's token, and between daemons over TLS. With it, each value
carries a code (HMAC-SHA256) over the prefix and the name under which it stands, and itself. A
stranger can still disturb a world, which then ends; it cannot have one go on from what no rank has
stated.

torch calls this class from C++, and each call then takes the interpreter's lock. gloo does so while
it forms a group. NCCL's monitor would do so every second as long as its process lives, also while
the interpreter is stuck, which it is to notice, and while it ends, which ends such a thread by
force: this store is not for NCCL (decision 0090).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    PrefixStore,
    Store,
)

from holdfast_core.errors import ProtocolError, UnreachableError

_KEY_BYTES = 16
_CODE_BYTES = sha256().digest_size
NO_KEY = (
    "the daemons hand out no key for the store of this training world: one of them is older than "
    "this image; renew all daemons before images of trainers"
)


def new_store_key() -> str:
    """Make the key of a world's store."""
    return secrets.token_hex(_KEY_BYTES)


class SealedStore(Store):
    """The values below one prefix of a world's store, each of them written by one of its ranks or
    launchers. Safe from any thread.

    Whether there is a value is known for certain only once it was read: `check` and `wait` answer
    for a stranger's values too. A counter has no room for a code, so nothing may follow from one;
    `add` is for torch's own barriers.

    Keep a reference to it for as long as torch uses it: torch keeps none.

    Args:
        store: torch's store of the world.
        prefix: put before each name; it names the world.
        key: key of the store.

    Raises:
        ProtocolError: `key` is empty, since a daemon is too old to pass it on.
    """

    def __init__(self, store: Store, prefix: str, key: str) -> None:
        if not key:
            raise ProtocolError(NO_KEY)
        super().__init__()
        super().set_timeout(store.timeout)  # type: ignore[attr-defined]  # torch's stub lacks it
        self._store, self._prefix, self._key = PrefixStore(prefix, store), prefix, key.encode()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))  # type: ignore[arg-type]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set all of `keys` at once."""
        pairs = zip(keys, values, strict=True)
        store: Any = self._store
        store.multi_set(keys, [self._seal(key, value) for key, value in pairs])

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set `key` if it has the expected value, or none and none is expected; return its value
        after that, or `expected_value` where it has none.

        Raises:
            UnreachableError: its value is none of this world's.
        """
        expected = self._seal(key, expected_value) if expected_value else b""
        store: Any = self._store
        return self._open(key, store.compare_set(key, expected, self._seal(key, desired_value)))

    def get(self, key: str) -> bytes:
        """Wait for the value of `key`.

        Raises:
            UnreachableError: it is none of this world's.
        """
        return self._open(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for the values of all `keys`; raises as `get`."""
        sealed = self._store.multi_get(keys)
        return [self._open(key, one) for key, one in zip(keys, sealed, strict=True)]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, self.timeout if timeout is None else timeout)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that a wait may take, here and in the store behind this one."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    # --- inside -----------------------------------------------------------------------------------

    def _seal(self, name: str, value: str | bytes) -> bytes:
        given = value.encode() if isinstance(value, str) else bytes(value)
        return self._code(name, given) + given

    def _open(self, name: str, sealed: bytes) -> bytes:
        code, value = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(name, value)):
            raise UnreachableError(
                f"{self._prefix}/{name} in the store of this training world was not written by one "
                f"of its ranks: somebody else reaches the store (keep strangers from the ports of "
                f"trainers by a NetworkPolicy)"
            )
        return value

    def _code(self, name: str, value: bytes) -> bytes:
        # The lengths before them keep the three parts apart.
        parts = (self._prefix.encode(), name.encode(), value)
        return hmac.digest(
            self._key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), sha256
        )
