"""Worlds of a local run, after a recovery or with another number of members."""

from __future__ import annotations

from holdfast_cli.local import Status


def is_protected(status: Status, size: int, after_epoch: int) -> bool:
    """Whether `size` members are in an epoch newer than `after_epoch`, and a generation of it is
    protected; what its recovery has cost is known then."""
    return (
        len(status.local.members) == size
        and status.epoch > after_epoch
        and status.protected.startswith(f"{status.epoch}.")
        and is_recovered(status)
    )


def is_recovered(status: Status) -> bool:
    """Whether all daemons have reported that their ranks are at work after the recovery that has
    led to the present epoch, if one has. That of a member reports for itself what is protected."""
    newest = status.local.recoveries[-1] if status.local.recoveries else None
    return newest is None or newest.epoch != status.epoch or newest.resumed_at is not None
