"""Key of a world's store, by which its ranks recognise what they wrote there themselves.

torch's store asks nobody who he is: whoever reaches its port reads, overwrites and deletes. But
what a rank states there decides what training goes on from, and the addresses there decide whom it
exchanges tensors with. So the agent that serves the store makes a key for each world. It reaches
the job's ranks only: over the daemons' sockets, which ask for the job's token, and between daemons
over TLS. With it, values carry a code (HMAC-SHA256) over the world, the key of the store under
which they stand, and themselves. A stranger can still disturb a world, which then ends; it cannot
have one go on from what no rank has stated.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from holdfast_core.errors import UnreachableError

_KEY_BYTES = 16
_CODE_BYTES = sha256().digest_size


def new_store_key() -> str:
    """Make the key of a world's store."""
    return secrets.token_hex(_KEY_BYTES)


class StoreSeal:
    """Seals values that the ranks of one world write into its store.

    Args:
        key: key of the store; empty where the daemons are too old to pass one on, so that values
            are neither sealed nor checked.
        epoch: membership epoch of the world.
    """

    def __init__(self, key: str, epoch: int) -> None:
        self._key, self._epoch = key.encode(), epoch

    def seal(self, name: str, value: bytes) -> bytes:
        """`value` as it is to be written under `name`."""
        return self._code(name, value) + value if self._key else value

    def open(self, name: str, sealed: bytes) -> bytes:
        """The value that a rank of this world has sealed under `name`.

        Raises:
            UnreachableError: none of them has.
        """
        if not self._key:
            return sealed
        code, value = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(name, value)):
            raise UnreachableError(
                f"epoch {self._epoch}: {name!r} in the world's store was not written by a rank of "
                f"this world: somebody else can reach the store (keep strangers from the ports of "
                f"trainers by a NetworkPolicy), or that rank's daemon is too old to pass on the "
                f"store's key (upgrade all daemons)"
            )
        return value

    def _code(self, name: str, value: bytes) -> bytes:
        # The lengths before them keep the three parts apart.
        parts = (str(self._epoch).encode(), name.encode(), value)
        return hmac.digest(
            self._key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), sha256
        )
