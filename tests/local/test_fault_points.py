"""A daemon is killed at every point of a snapshot's life, and every point of a recovery.

One cluster serves all cases: replacement nodes are new daemons on fresh memory. In each case a trap
kills one daemon exactly at a point; then the daemon comes back, or its node is lost and a spare
takes over; and the job must restore one generation, not older than the newest that was seen to be
protected, with exactly the bytes of that generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import pytest
from daemons import wait_until_dead
from faulty_daemon import Trap
from harness import RawCluster, RawJob
from waiting import wait_for

from holdfast_core.values import Generation

MEMBERS = 4
LEADER, OTHER = 0, 2
SAVES_MAX = 6
"""A trap that is not met within so many saves is not where it is said to be."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a daemon dies, and what makes it pass there."""

    name: str
    during: str
    """`saves`, `epoch` (a new one begins), `rebuild` (a fresh node takes over), `adoption`."""
    traps: tuple[Trap, ...]
    victims: tuple[int, ...] = (LEADER, OTHER)


def _points() -> Iterator[Point]:
    def at(name: str, during: str, *traps: Trap, leads: bool = False) -> Point:
        return Point(name, during, traps, (LEADER,) if leads else (LEADER, OTHER))

    for when in ("before", "after"):
        yield at(f"seal-{when}", "saves", Trap(at="Seal", when=when))
        yield at(f"parity-{when}", "saves", Trap(at="BuildParity", when=when))
        yield at(f"locate-{when}", "saves", Trap(at="locate", when=when))
        for effect in ("FreeSlot", "FreeParity", "ForgetPeers", "SaveEpoch"):
            yield at(f"{effect}-{when}", "saves", Trap(at=effect, when=when))
        for news in ("parity", "snapshot"):
            yield at(f"report-{news}-{when}", "saves", Trap(at=f"SendReport:{news}", when=when))
        yield at(
            f"announce-protected-{when}",
            "saves",
            Trap(at="SendDirective:protected", when=when),
            leads=True,
        )
        yield at(
            f"announce-line-{when}", "epoch", Trap(at="SendDirective:line", when=when), leads=True
        )
        yield at(f"inventory-{when}", "epoch", Trap(at="SendReport:epoch", when=when))
        yield at(f"epoch-saved-{when}", "epoch", Trap(at="SaveEpoch", when=when))
        yield at(f"verify-{when}", "epoch", Trap(at="VerifySnapshot", when=when))
        yield at(f"verify-parity-{when}", "epoch", Trap(at="VerifyParity", when=when))
        for effect in ("FetchManifest", "AllocateArena", "Rebuild"):
            yield at(f"{effect}-{when}", "rebuild", Trap(at=effect, when=when))
        yield at(f"adopt-{when}", "adoption", Trap(at="VerifySnapshot", when=when))
        yield at(f"adopt-parity-{when}", "adoption", Trap(at="VerifyParity", when=when))
    for name, pattern in (
        ("manifest", "slot-*.manifest*"),
        ("entry", "*.entry*"),
        ("kept", "*-*.manifest.tmp"),
        ("epoch", "epoch.json*"),
    ):
        torn = Trap(at="write", when="during", match=pattern)
        yield at(f"torn-{name}", "saves", torn)
        if name != "kept":
            pattern = pattern.removesuffix("*")
            yield at(f"renamed-{name}", "saves", Trap(at="rename", when="after", match=pattern))
    yield at("torn-rebuilt-manifest", "rebuild", torn_manifest := Trap(
        at="write", when="during", match="slot-*.manifest*"
    ))
    yield at("torn-then-killed-adopting", "saves", torn_manifest, Trap(at="VerifySnapshot"))
    yield at("parity-half-received", "saves", Trap(at="BuildParity", when="during"))
    yield at("chunk-half-sent", "saves", Trap(at="send", when="during"))
    yield at("chunk-sent", "saves", Trap(at="send", when="after"))
    yield at("second-parity", "saves", Trap(at="BuildParity", when="during", count=5))
    yield at("rebuild-first-chunk", "rebuild", Trap(at="Rebuild", when="during"))
    yield at("rebuild-late-chunk", "rebuild", Trap(at="Rebuild", when="during", count=7))
    yield at("rebuild-source-half-sent", "rebuild-source", Trap(at="send", when="during"))
    yield at("rebuild-source-locates", "rebuild-source", Trap(at="locate"))
    yield at("adopt-epoch", "adoption", Trap(at="SaveEpoch"))
    yield at(
        "adopt-twice", "adoption", Trap(at="VerifySnapshot"), Trap(at="VerifyParity", when="after")
    )
    yield at("unlinked-slot", "saves", Trap(at="unlink", when="after", match="slot-*.manifest"))
    yield at("unlinked-entry", "saves", Trap(at="unlink", when="after", match="*.entry"))


CASES = [
    pytest.param(point, victim, loss, id=f"{point.name}-member{victim}-{loss}")
    for point in _points()
    for victim in point.victims
    for loss in ("daemon", "node", "addresses")
    if not (loss == "node" and point.during == "rebuild-source")  # two lost nodes in one group
]


class Running:
    """The cluster that the cases share; made anew after a case that failed."""

    def __init__(self) -> None:
        self.cluster: RawCluster | None = None
        self.job: RawJob | None = None

    @contextmanager
    def case(self) -> Iterator[tuple[RawCluster, RawJob]]:
        if self.cluster is None or self.job is None:
            self.cluster = RawCluster().__enter__()
            self.job = RawJob(self.cluster, self.cluster.start_nodes(MEMBERS))
            self.job.form()
            self.job.start_trainers()
        try:
            yield self.cluster, self.job
        except BaseException:
            print(self.cluster.story())
            self.close()
            raise

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.__exit__()
        self.cluster = self.job = None


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    shared = Running()
    yield shared
    shared.close()


def _save_until(job: RawJob, newest: Generation, dead: Callable[[], bool]) -> Generation:
    """Train until the victim dies; the newest generation that was seen to be protected."""
    for _ in range(SAVES_MAX):
        saved = job.try_save()

        def protected_or_dead(saved: Generation = saved) -> bool:
            seen = [job.protected(member) for member in range(job.size)]
            return dead() or all(generation == saved for generation in seen)

        wait_for(f"{saved} to be protected, or the victim to die", protected_or_dead)
        if dead():
            return newest
        newest = saved
    raise AssertionError("the trap was not met")


def _strike(cluster: RawCluster, job: RawJob, point: Point, victim: int) -> Generation:
    """Let the victim die at the point; the newest generation that was seen to be protected."""
    newest = job.train(2)
    daemon = job.daemon(victim)
    match point.during:
        case "saves":
            daemon.arm(*point.traps)
            newest = _save_until(job, newest, lambda: not daemon.alive)
        case "epoch":
            daemon.arm(*point.traps)
            job.form()
        case "rebuild":
            daemon.lose()
            job.nodes[victim] = cluster.start_nodes(1)[0]
            daemon = job.daemon(victim)
            daemon.arm(*point.traps)
            job.form()
        case "rebuild-source":
            other = (victim + 1) % job.size
            job.daemon(other).lose()
            job.nodes[other] = cluster.start_nodes(1)[0]
            daemon.arm(*point.traps)
            job.form()
        case "adoption":
            daemon.kill()
            daemon.arm(*point.traps)
            for _ in point.traps[1:]:
                daemon.start()
                wait_until_dead(daemon)
            daemon.start()
    wait_until_dead(daemon)
    return newest


def _recover(cluster: RawCluster, job: RawJob, victim: int, loss: str) -> None:
    """Bring the member back: its daemon, or a spare node in a new epoch."""
    daemon = job.daemon(victim)
    if loss == "node":
        daemon.lose()
        job.nodes[victim] = cluster.start_nodes(1)[0]
    else:
        while daemon.trap.exists():
            daemon.start()
            wait_until_dead(daemon)
        cluster.restart(daemon.node)
    if loss == "addresses":
        job.readdress()
    else:
        job.form()


def _train_on(job: RawJob, victim: int, newest: Generation) -> Generation:
    """The epoch goes on after its daemon came back: the ranks reopen, or start if they had not."""
    if job.trainers[0].epoch == job.epoch:
        job.trainers[victim].reopen()
        return job.train(2)
    job.check_restored(job.start_trainers(), newest)
    return job.train()


@pytest.mark.parametrize(("point", "victim", "loss"), CASES)
def test_a_protected_generation_survives(
    running: Running, point: Point, victim: int, loss: str
) -> None:
    with running.case() as (cluster, job):
        newest = _strike(cluster, job, point, victim)
        _recover(cluster, job, victim, loss)
        if loss == "addresses":
            newest = _train_on(job, victim, newest)
            job.form()
        job.check_restored(job.start_trainers(), newest)
        job.train(2)
        assert not any(job.daemon(m).trap.exists() for m in range(job.size))


def test_the_cluster_of_the_cases_serves_a_last_restore(running: Running) -> None:
    with running.case() as (_, job):
        newest = job.train()
        job.form()
        assert job.check_restored(job.start_trainers(), newest) == newest
        with pytest.raises(grpc.RpcError):
            job.trainers[0].grant(0)
