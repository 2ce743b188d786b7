"""Engines for the members of a job whose ranks do not run, one on each node."""

from __future__ import annotations

from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.engine import EngineSettings, JobEngine


def membership_of(*groups: tuple[int, ...], job: str = "job", epoch: int = 1) -> Membership:
    """A membership in these parity groups, with one member of one rank on each node n0, n1, …"""
    places = tuple(
        Member(index=i, node=f"n{i}", memory_id=f"m{i}", peer_address="", bulk_address="")
        for i in range(sum(map(len, groups)))
    )
    return Membership(job=job, epoch=epoch, members=places, nproc_per_node=1, groups=groups)


def engine_of(membership: Membership, member: int) -> JobEngine:
    """The engine of the member's daemon, once it has received the membership."""
    place = membership.member(member)
    engine = JobEngine(
        job=membership.job,
        node=place.node,
        memory_id=place.memory_id,
        incarnation=1,
        settings=EngineSettings(),
    )
    engine.set_membership(membership, 0.0)
    return engine
