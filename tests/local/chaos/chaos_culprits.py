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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import control_groups
import private_network
from benchmarks.detectors import ALARMS
from local_jobs import make_job, short_folder

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_cli.local.commands import Commands
from holdfast_core import links as slow_links
from holdfast_core import stragglers
from holdfast_core.errors import UnreachableError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import Phase
from holdfast_operator.reconciler.observe.views import ControlState

RANKS = 4
WAIT_S = 90.0
"""Time in which a culprit is to be named."""
TRAINED_STEPS = 12
"""Steps of a job before something is done to it."""
QUIET_STEPS = 120
"""Steps of a job to which nothing is done, after which no alarm was raised."""
PACE_S, STEP_S_MAX = 0.03, 0.3
"""Least duration of a step, and the most of it on a busy machine."""
FAILURES = 3
"""Times that a node fails until another one shall be taken."""
LEFT_SHARE = 0.1
"""Part of a processor that is left to a rank that is throttled."""
NARROW = "40mbit"
"""What a node with a slow link sends."""
PROBING = """
import sys
from holdfast_daemon import __main__ as daemon
from holdfast_daemon.net import links
links.PERIOD_S = 5.0
sys.exit(daemon.main())
"""
"""A daemon that measures its links more often than once a minute."""

Named = tuple[frozenset[str], str]
"""Ranks or nodes that are named, and the words in which they are."""
NOBODY = "nobody"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One job to which something is done."""

    cluster: LocalCluster
    rank: int
    node: str
    """Node of the rank."""
    directory: Path
    after: ExitStack
    """Left when the job's processes have ended."""

    @property
    def pid(self) -> int:
        """The rank's process."""
        found = self.cluster.status.local.rank(self.rank)
        assert found is not None
        return found.pid


Done = Callable[[Case], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CulpritKind:
    """One kind of fault of a rank or its node."""

    name: str
    named: Callable[[Status], Named | None]
    """What a status says of it; None while it says nothing."""
    words: str = ""
    """What the text must contain as well."""
    done: Done | None = None
    """What is done to the rank from outside; None if its script does it itself."""
    of_node: bool = False
    """Whether the node is to be named, and not the rank."""
    nodes: int = 2
    spares: int = 0
    narrow: bool = False
    """Whether it needs a network of its own."""
    why_not: Callable[[], str] = lambda: ""
    """Says why this machine does not let it happen; nothing if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CulpritFault:
    """One fault, and what was said of it."""

    kind: str
    culprit: str
    """The rank or node to which it was done."""
    outcome: str
    """`right`; `wrong`: another one was named; `nobody` was; `unexplained`: the right one was, in
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


# --- what is done ---------------------------------------------------------------------------------


async def _stop(case: Case) -> None:
    os.kill(case.pid, signal.SIGSTOP)


async def _throttle(case: Case) -> None:
    group = case.after.enter_context(control_groups.control_group(LEFT_SHARE))
    (group / "cgroup.procs").write_text(str(case.pid))


async def _narrow(case: Case) -> None:
    node = case.cluster.status.local.node(case.node)
    assert node is not None
    private_network.slow_down(node.host, NARROW)


async def _fail_again(case: Case) -> None:
    """Let a rank of the node fail some times, lose the node, and let it come back as the spare that
    would be taken first. Then lose the other one."""
    cluster = case.cluster
    for _ in range(FAILURES):
        before = cluster.status.recoveries
        await cluster.kill_rank(case.rank)
        await _recovered(cluster, before)
    before = cluster.status.recoveries
    await cluster.kill_node(case.node)
    await _recovered(cluster, before)
    await cluster.start_node(case.node)
    await cluster.wait_for(
        lambda status: _is_spare(status, case.node), timeout_s=WAIT_S, what="the node as a spare"
    )
    left = next(m.node for m in cluster.status.members if m.index != case.rank // 2)
    await cluster.kill_node(left or "")


async def _recovered(cluster: LocalCluster, before: int) -> None:
    """Wait until the job has recovered more often than `before`, and can lose a node."""

    def has(status: Status) -> bool:
        began = status.local.recoveries[-1].epoch if status.local.recoveries else 0
        protected = (status.protected or "0").partition(".")[0]
        return status.recoveries > before and _trains(status) and int(protected) >= began

    await cluster.wait_for(has, timeout_s=WAIT_S, what="a recovery")


def _is_spare(status: Status, name: str) -> bool:
    node = status.local.node(name)
    return node is not None and node.role == "spare" and node.connected


# --- what is said ---------------------------------------------------------------------------------


def _events(status: Status, reason: str) -> list[str]:
    return [event.message for event in status.local.events if event.reason == reason]


def _ranks(numbers: Sequence[int | str]) -> frozenset[str]:
    return frozenset(f"rank {int(number)}" for number in numbers)


def _in_hang(status: Status) -> Named | None:
    texts = _events(status, "HangInspected")
    if not texts:
        return None
    text = texts[0].partition(": ")[2]
    found = re.match(r"ranks? ([\d, ]+) (?:is|are) ", text)
    return _ranks(found[1].split(",") if found else []), text


def _in_opposite_order(status: Status) -> Named | None:
    """Who is in the function that differs. That ranks wait for each other blames none of them."""
    named = _in_hang(status)
    if named is None:
        return None
    _, text = named
    apart = re.search(r"rank (\d+) is waiting in [^;]*called from `add_up_backwards`", text)
    return _ranks([apart[1]] if apart else []), text


def _slow(status: Status) -> Named | None:
    slow = status.stragglers or ()
    return (_ranks([each.rank for each in slow]), str(slow[0].text)) if slow else None


def _narrow_links(status: Status) -> Named | None:
    slow = status.slow_links or ()
    nodes = frozenset(each.node or "a link" for each in slow)
    return (nodes, "; ".join(str(each.text) for each in slow)) if slow else None


def _avoided(status: Status) -> Named | None:
    texts = _events(status, "NodeAvoided")
    found = re.search(r" instead of (n\d+) \(", texts[-1]) if texts else None
    return (frozenset([found[1]]), texts[-1]) if found else None


def _corrupt(status: Status) -> Named | None:
    last = status.last_corruption
    return None if last is None else (_ranks(last.ranks or ()), str(last.text))


def _alarm(status: Status) -> str:
    """What was said of a job to which nothing was done, as far as it was not to be said."""
    said = [event.message for event in status.local.events if event.reason in ALARMS]
    if status.recoveries:
        said.append(f"{status.recoveries} recoveries")
    return "; ".join(said)


def _any_alarm(status: Status) -> Named | None:
    if alarm := _alarm(status):
        return frozenset(), alarm
    if status.phase is Phase.RUNNING and (status.step or 0) >= QUIET_STEPS:
        return frozenset([NOBODY]), "nothing"
    return None


def _has_judged(cluster: LocalCluster) -> bool:
    """Whether the times of all ranks, and the links of all nodes, were judged in more rounds than
    it takes to name one of them."""
    state = cluster._control._state if cluster._control is not None else ControlState()
    windows, links = state.straggling.windows, state.links.numbers
    return (
        len(windows) == RANKS
        and min(windows.values()) > stragglers.ROUNDS
        and len(links) == len(cluster.status.members)
        and min(links.values()) > slow_links.ROUNDS
    )


_BY_REPLICAS, _BY_REPEATING = "most of its replicas have others", "computed wrong gradients"
CULPRITS = (
    CulpritKind(
        name="stopped", named=_in_hang, words="is stopped (by SIGSTOP or a debugger)", done=_stop
    ),
    CulpritKind(name="data", named=_in_hang, words="in its data loader"),
    CulpritKind(name="storage", named=_in_hang, words="write_to_storage"),
    CulpritKind(name="leaves", named=_in_hang, words="waiting in barrier"),
    CulpritKind(name="order", named=_in_opposite_order),
    CulpritKind(name="slow", named=_slow, words="it computes for longer"),
    CulpritKind(
        name="throttled",
        named=_slow,
        words="it computes for longer",
        done=_throttle,
        why_not=control_groups.why_not,
    ),
    CulpritKind(
        name="narrow_link",
        named=_narrow_links,
        words="links of ",
        done=_narrow,
        of_node=True,
        nodes=RANKS,
        narrow=True,
        why_not=private_network.why_not,
    ),
    CulpritKind(
        name="fails_again",
        named=_avoided,
        words=f"({FAILURES + 1} failures in ",
        done=_fail_again,
        of_node=True,
        spares=2,
    ),
    CulpritKind(name="flip", named=_corrupt, words=_BY_REPLICAS),
    CulpritKind(name="moment", named=_corrupt, words=_BY_REPLICAS),
    CulpritKind(name="wrong_activation", named=_corrupt, words=_BY_REPEATING),
    CulpritKind(name="wrong_gradient", named=_corrupt, words=_BY_REPEATING),
    CulpritKind(name="nothing", named=_any_alarm, nodes=RANKS),
)
"""All of them. `nothing` is a job that is left alone."""


def job_of(kind: CulpritKind, directory: Path, pace_s: float) -> MoETrainingJob:
    """A job of four ranks."""
    script = Path(__file__).parents[1] / "trainers" / "culprit_trainer.py"
    return make_job(
        "culprits",
        [sys.executable, str(script), str(directory), str(pace_s)],
        nodes=kind.nodes,
        nproc=RANKS // kind.nodes,
        snapshot={"memoryPerNode": "64Mi", "compareReplicasEvery": 1},
        failurePolicy={
            "repeatStepsShare": 0.2,
            "spares": kind.spares,
            "detection": {"heartbeatSeconds": 0.5, "hangSeconds": 5},
        },
    )


async def suffer(
    kind: CulpritKind,
    rank: int,
    directory: Path,
    *,
    trained_steps: int = TRAINED_STEPS,
    pace_s: float = PACE_S,
) -> CulpritFault:
    """Let `rank` of a new job, or its node, suffer a fault, and see who is named.

    Args:
        trained_steps: steps before that, in which nobody may be named.
        pace_s: for which each step sleeps.
    """
    for name in ("data.fifo", "mount.fifo"):
        os.mkfifo(directory / name)
    commands = Commands(daemon_program=(sys.executable, "-c", PROBING))
    settings = LocalSettings(directory=directory / "run", commands=commands)
    culprit, began_s = NOBODY, time.monotonic()

    def fault(outcome: str, text: str) -> CulpritFault:
        took_s = round(time.monotonic() - began_s, 1)
        return CulpritFault(
            kind=kind.name, culprit=culprit, outcome=outcome, seconds=took_s, text=text
        )

    with ExitStack() as after:
        async with LocalCluster(job_of(kind, directory, pace_s), settings) as cluster:

            def ready(status: Status) -> bool:
                trains = _trains(status, trained_steps)
                return trains and (kind.name != "nothing" or _has_judged(cluster))

            await cluster.wait_for(
                lambda status: bool(_alarm(status)) or ready(status),
                timeout_s=WAIT_S + trained_steps * STEP_S_MAX,
            )
            if alarm := _alarm(cluster.status):
                return fault("wrong", f"before anything was done: {alarm}")
            member = cluster.status.members[rank * kind.nodes // RANKS]
            node = member.node or ""
            case = Case(cluster=cluster, rank=rank, node=node, directory=directory, after=after)
            if kind.name != "nothing":
                culprit = node if kind.of_node else f"rank {rank}"
            began_s = time.monotonic()
            if kind.done is not None:
                await kind.done(case)
            else:
                (directory / "fault").write_text(kind.name)
                (directory / "fault").rename(directory / f"fault-{rank}")
            try:
                await cluster.wait_for(
                    lambda status: kind.named(status) is not None, timeout_s=WAIT_S
                )
            except UnreachableError:
                return fault("nobody", "nothing was said of it")
            named = kind.named(cluster.status)
            assert named is not None
            names, text = named
            if names == {culprit}:
                return fault("right" if kind.words in text else "unexplained", text)
            # Of a job that is left alone nothing is to be said.
            return fault("nobody" if not names and culprit != NOBODY else "wrong", text)


def _trains(status: Status, steps: int = TRAINED_STEPS) -> bool:
    assert status.phase is not Phase.FAILED, status.last_failure
    return status.phase is Phase.RUNNING and (status.step or 0) >= steps


def suffer_alone(kind: str, rank: int, directory: Path) -> CulpritFault:
    """The same in a process of its own."""
    return asyncio.run(suffer(next(k for k in CULPRITS if k.name == kind), rank, directory))


def present(say: Callable[[str], None]) -> list[CulpritKind]:
    """The kinds that this machine lets happen; says which it does not."""
    kinds = []
    for kind in CULPRITS:
        if reason := kind.why_not():
            say(f"no rank or node suffers `{kind.name}`: {reason}")
        else:
            kinds.append(kind)
    return kinds


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
                    if kind.narrow:
                        work = private_network.run_in_private_network
                        fault = work(suffer_alone, kind.name, rank, directory)
                    else:
                        fault = asyncio.run(suffer(kind, rank, directory))
                except Exception as error:
                    # The rest of the report says what there is; nobody was named here.
                    fault = CulpritFault(
                        kind=kind.name,
                        culprit=f"rank {rank}",
                        outcome="nobody",
                        seconds=0.0,
                        text=f"{type(error).__name__}: {error}",
                    )
            self.faults.append(fault)
            self.say(
                f"culprit {fault.kind:<17} {fault.culprit:<7} {fault.outcome:<11} "
                f"{fault.seconds:5.1f} s  {fault.text[:160]}"
            )

    @property
    def missed(self) -> list[CulpritFault]:
        """Faults whose culprit was not named, or without what was done to it."""
        return [fault for fault in self.faults if fault.outcome != "right"]

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        right = len(self.faults) - len(self.missed)
        wrong = sum(fault.outcome == "wrong" for fault in self.faults)
        return f"culprits named rightly: {right} of {len(self.faults)}, {wrong} wrongly"

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
