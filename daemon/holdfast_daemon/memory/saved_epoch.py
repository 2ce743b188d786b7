"""The newest membership of a job as saved in the node's memory: `epoch.json`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership
from holdfast_daemon.memory.files import sign, signed_body

EPOCH_FILE = "epoch.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedEpoch:
    """Content of epoch.json: fencing must survive a restart of the daemon."""

    membership: Membership
    line: Line | None
    retained: Generation | None


_SAVED_EPOCH = msgspec.json.Decoder(SavedEpoch)


def encode_epoch(saved: SavedEpoch) -> bytes:
    """Content of the file."""
    return sign(msgspec.json.encode(saved, order="deterministic"))


def decode_epoch(data: bytes) -> SavedEpoch:
    """Decode an epoch.json; raises CorruptError for anything else."""
    body = signed_body(data, EPOCH_FILE)
    try:
        return _SAVED_EPOCH.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidJobError) as error:
        raise CorruptError(f"{EPOCH_FILE} cannot be read: {error}") from error
