"""Daemons of ranks that restore what another number of ranks has captured."""

from __future__ import annotations

from holdfast.testing import FakeDaemon


def daemon_of(directory: str, rank: int, world: int, *, epoch: int, old: int = 0) -> FakeDaemon:
    """The daemon of `rank` of `world` in an epoch.

    Args:
        old: number of ranks that captured the recovery line, whose snapshots the ranks of this
            world divide in turns; 0 if each restores its own.
    """
    return FakeDaemon(
        directory,
        rank=rank,
        world_size=world,
        epoch=epoch,
        captured_by=old,
        reads=[one for one in range(old) if one % world == rank],
    )
