"""The store of a training world, with values that strangers cannot forge.

torch's store authenticates nobody: whoever reaches its port can read, overwrite and delete. But the
statements of ranks there decide from which state training continues, the statements of launchers
decide which ranks their workers get, and the addresses decide with whom a rank exchanges tensors.

So the launcher that serves the store makes a key for each world. Only the job's ranks and launchers
get the key: through the daemons' sockets, which require the job's token, and between daemons over
TLS. Each value carries a code (HMAC-SHA256), computed with the key over the prefix, the name and
the value. A stranger can still disturb a world, which then ends. But no stranger can make training
continue from a state that no rank has stated.

torch calls this class from C++, and each call takes the interpreter's lock. gloo calls it while it
forms a group, and so does NCCL where its groups can stay. The monitor of its older groups would
call it every second as long as its process lives. It would do so while the interpreter is stuck,
which the monitor must notice, and while the interpreter ends, which kills such a thread. So this
store is not for those (decision 0090).
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
    "this image; upgrade all daemons before the images of trainers"
)


def new_store_key() -> str:
    """Make a random key for the store of a world."""
    return secrets.token_hex(_KEY_BYTES)


class SealedStore(Store):
    """The values below one prefix of a world's store that ranks and launchers of the world wrote.
    Safe from any thread.

    `check` and `wait` also count the values of strangers, so only reading a value proves that it
    exists. A counter has no room for a code, so nothing may depend on one; `add` is only for
    torch's own barriers.

    Keep a reference to this object as long as torch uses it, because torch keeps none.

    Args:
        store: torch's store of the world.
        prefix: name of the world, which is put before each key.
        key: secret key of the store.

    Raises:
        ProtocolError: `key` is empty, because a daemon is too old to pass it on.
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
        """Set the values of all `keys` in one call."""
        pairs = zip(keys, values, strict=True)
        store: Any = self._store
        store.multi_set(keys, [self._seal(key, value) for key, value in pairs])

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set `key` if it has the expected value, or if it has no value and none is expected.
        Return its value afterwards, or `expected_value` if it has none.

        Raises:
            UnreachableError: a stranger wrote its value.
        """
        expected = self._seal(key, expected_value) if expected_value else b""
        store: Any = self._store
        return self._open(key, store.compare_set(key, expected, self._seal(key, desired_value)))

    def get(self, key: str) -> bytes:
        """Wait for the value of `key`, and return it.

        Raises:
            UnreachableError: a stranger wrote the value.
        """
        return self._open(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for the values of all `keys`, and return them. Raises as `get`."""
        sealed = self._store.multi_get(keys)
        return [self._open(key, one) for key, one in zip(keys, sealed, strict=True)]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, self.timeout if timeout is None else timeout)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that each wait may take, here and in torch's store."""
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
        # Put the length before each part, so that no two triples give the same bytes.
        parts = (self._prefix.encode(), name.encode(), value)
        return hmac.digest(
            self._key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), sha256
        )
