"""Part of `make chaos`: jobs that are held up or spoilt by one of their ranks. Is the right one
named?

Each fault is done to a job of its own, with the real control loop, launchers and daemons. What the
job's status and events then say of it is compared with what was done.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from local_jobs import make_job, short_folder

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase

RANKS = 4
WAIT_S = 90.0
"""Time in which a culprit is to be named."""
QUIET_STEPS = 120
"""Steps of a job to which nothing is done, after which no alarm was raised."""

Named = tuple[frozenset[int], str]
"""Ranks that are named, and the words in which they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CulpritKind:
    """One kind of fault of a rank."""

    name: str
    named: Callable[[Status], Named | None]
    """What a status says of it; None while it says nothing."""
    words: str = ""
    """What the text must contain as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CulpritFault:
    """One fault, and what was said of it."""

    kind: str
    rank: int
    outcome: str
    """`right`; `wrong`: another rank was named; `nobody` was; `unexplained`: the right one was, in
    words that do not say what was done to it."""
    seconds: float
    """Until it was named."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CulpritRow:
    """Summary of all faults of one kind."""

    kind: str
    count: int
    right: int
    wrong: int
    median_s: float


def _events(status: Status, reason: str) -> list[str]:
    return [event.message for event in status.local.events if event.reason == reason]


def _in_hang(status: Status) -> Named | None:
    texts = _events(status, "HangInspected")
    if not texts:
        return None
    text = texts[0].partition(": ")[2]
    found = re.match(r"ranks? ([\d, ]+) (?:is|are) ", text)
    return frozenset(map(int, found[1].split(","))) if found else frozenset(), text


def _in_opposite_order(status: Status) -> Named | None:
    """Who is in the function that differs. That ranks wait for each other blames none of them."""
    named = _in_hang(status)
    if named is None:
        return None
    _, text = named
    apart = re.search(r"rank (\d+) is waiting in [^;]*called from `add_up_backwards`", text)
    return frozenset([int(apart[1])] if apart else []), text


def _slow(status: Status) -> Named | None:
    slow = status.stragglers or ()
    return (frozenset(each.rank for each in slow), str(slow[0].text)) if slow else None


def _corrupt(status: Status) -> Named | None:
    last = status.last_corruption
    return None if last is None else (frozenset(last.ranks or ()), str(last.text))


def _any_alarm(status: Status) -> Named | None:
    """Whatever is said of a job to which nothing was done."""
    for look in (_in_hang, _slow, _corrupt):
        if (named := look(status)) is not None:
            return named
    if status.steps_not_repeated:
        return frozenset(), status.steps_not_repeated
    if status.phase is Phase.RUNNING and (status.step or 0) >= QUIET_STEPS:
        return frozenset([-1]), "nothing"
    return None


CULPRITS = (
    CulpritKind(name="stopped", named=_in_hang, words="is stopped (by SIGSTOP or a debugger)"),
    CulpritKind(name="data", named=_in_hang, words="in its data loader"),
    CulpritKind(name="storage", named=_in_hang, words="write_to_storage"),
    CulpritKind(name="leaves", named=_in_hang, words="waiting in barrier"),
    CulpritKind(name="order", named=_in_opposite_order),
    CulpritKind(name="slow", named=_slow),
    CulpritKind(name="flip", named=_corrupt, words="most of its replicas have others"),
    CulpritKind(name="wrong_activation", named=_corrupt, words="computed wrong gradients"),
    CulpritKind(name="nothing", named=_any_alarm),
)
"""All of them. `nothing` is a job that is left alone."""


def job_of(directory: Path) -> MoETrainingJob:
    """A job of two members with two ranks each."""
    script = Path(__file__).parents[1] / "trainers" / "culprit_trainer.py"
    return make_job(
        "culprits",
        [sys.executable, str(script), str(directory)],
        nodes=2,
        nproc=2,
        snapshot={"memoryPerNode": "64Mi", "compareReplicasEvery": 1},
        failurePolicy={
            "repeatStepsShare": 0.2,
            "detection": {"heartbeatSeconds": 0.5, "hangSeconds": 5},
        },
    )


async def suffer(kind: CulpritKind, rank: int, directory: Path) -> CulpritFault:
    """Let `rank` of a new job suffer a fault, and see who is named."""
    for name in ("data.fifo", "mount.fifo"):
        os.mkfifo(directory / name)
    settings = LocalSettings(directory=directory / "run")
    async with LocalCluster(job_of(directory), settings) as cluster:
        await cluster.wait_for(_trains, timeout_s=WAIT_S)
        began_s = time.monotonic()
        if kind.name == "nothing":
            rank = -1
        elif kind.name == "stopped":
            ranks = [each for member in cluster.status.local.members for each in member.ranks]
            pid = next(each.pid for each in ranks if each.rank == rank)
            os.kill(pid, signal.SIGSTOP)
        else:
            (directory / "fault").write_text(kind.name)
            (directory / "fault").rename(directory / f"fault-{rank}")
        try:
            await cluster.wait_for(lambda status: kind.named(status) is not None, timeout_s=WAIT_S)
        except UnreachableError:
            said = "nothing was said of it"
            return CulpritFault(
                kind=kind.name, rank=rank, outcome="nobody", seconds=WAIT_S, text=said
            )
        named = kind.named(cluster.status)
        assert named is not None
        ranks_named, text = named
        # Of a job that is left alone nothing is to be said.
        outcome = "nobody" if not ranks_named and kind.name != "nothing" else "wrong"
        if ranks_named == {rank}:
            outcome = "right" if kind.words in text else "unexplained"
        seconds = time.monotonic() - began_s
        return CulpritFault(
            kind=kind.name, rank=rank, outcome=outcome, seconds=round(seconds, 1), text=text
        )


def _trains(status: Status) -> bool:
    assert status.phase is not Phase.FAILED, status.last_failure
    return status.phase is Phase.RUNNING and (status.step or 0) >= 12


@dataclass(slots=True)
class Culprits:
    """A run of such jobs."""

    seed: int
    say: Callable[[str], None] = print
    kinds: Sequence[CulpritKind] = CULPRITS
    faults: list[CulpritFault] = field(default_factory=list)

    def draws(self) -> Iterator[tuple[CulpritKind, int]]:
        """Faults that follow from the seed: each kind equally often, in any order."""
        rng = random.Random(f"{self.seed} culprits")
        while True:
            for kind in rng.sample(self.kinds, len(self.kinds)):
                yield kind, rng.randrange(RANKS)

    def run(self, *, until: float) -> None:
        """Let jobs suffer faults until the monotonic time `until`."""
        for kind, rank in self.draws():
            if time.monotonic() > until:
                break
            with short_folder() as directory:
                try:
                    fault = asyncio.run(suffer(kind, rank, directory))
                except (AssertionError, HoldfastError) as error:
                    # The rest of the report says what there is; nobody was named here.
                    fault = CulpritFault(
                        kind=kind.name, rank=rank, outcome="nobody", seconds=0.0, text=str(error)
                    )
            self.faults.append(fault)
            self.say(
                f"culprit {fault.kind:<17} rank {fault.rank:>2} {fault.outcome:<7} "
                f"{fault.seconds:5.1f} s  {fault.text[:160]}"
            )

    @property
    def wrong(self) -> list[CulpritFault]:
        """Faults for which another rank was named."""
        return [fault for fault in self.faults if fault.outcome == "wrong"]

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        right = sum(fault.outcome == "right" for fault in self.faults)
        return f"culprits named rightly: {right} of {len(self.faults)}, {len(self.wrong)} wrongly"

    def rows(self) -> list[CulpritRow]:
        """One row for each kind, in alphabetical order."""
        rows = []
        for kind in sorted({fault.kind for fault in self.faults}):
            mine = [fault for fault in self.faults if fault.kind == kind]
            rows.append(
                CulpritRow(
                    kind=kind,
                    count=len(mine),
                    right=sum(fault.outcome == "right" for fault in mine),
                    wrong=sum(fault.outcome == "wrong" for fault in mine),
                    median_s=statistics.median(fault.seconds for fault in mine),
                )
            )
        return rows

    def document(self) -> dict[str, Any]:
        """All of it, for `report.json`."""
        return {
            "kinds": [asdict(row) for row in self.rows()],
            "faults": [asdict(fault) for fault in self.faults],
        }
