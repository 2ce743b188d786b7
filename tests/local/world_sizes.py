"""Worlds of a local run whose number of members changes."""

from __future__ import annotations

from holdfast_operator.local import Status


def is_protected(status: Status, size: int, after_epoch: int) -> bool:
    """Whether `size` members are in an epoch newer than `after_epoch`, and a generation of it is
    protected."""
    return (
        len(status.members) == size
        and status.epoch > after_epoch
        and status.protected.startswith(f"{status.epoch}.")
    )
