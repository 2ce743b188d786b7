"""Plan of how lost ranks reach the step of the others, while as many ranks as possible keep their
state.

The lost ranks restore the recovery line. If it is of the step that the others have, that is all:
whichever ranks are lost, such as those whose shards nobody else holds. If it is older, the steps
after it have to be repeated, and a rank cannot repeat a step without the other ranks of its
pipeline stage: they add up gradients, and exchange tokens and parts of tensors. So the ranks of
their stages that still have their state go back with them, and the other stages give them what they
have logged at their boundaries (MoEvement §3.4). A stage whose log is needed and too short goes
back as well. This scope is the smallest one, because each of its stages has to be in any other.

A lost rank of another stage that has a live replica does not go back: the replica gives it the
newest state. What it had logged is lost, though, so its stage does go back if it is a neighbour of
one that repeats steps.

A replay that is cut off is followed by another one, whose scope also holds the newly lost ranks. As
long as the scopes grow, or replays come further than those before, losses are behind it. A replay
that does neither may itself be what ends the world, so after a few of them all ranks restore.

The plan follows from statements of all ranks, and is the same on each of them. It relies only on
what the statements show: if one is missing or contradicts another, there is no plan, and all ranks
restore the line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.topology import Topology

NO_LINE = -1
"""Step of a line that does not exist, or from which no rank can be restored by itself."""
FRUITLESS_MAX = 3
"""Replays of one step without progress, after which all ranks restore."""


class ReplayProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of the replays since the newest step of all ranks.

    All values only grow, and the greatest of each counts: a rank that was lost knows nothing, and
    one may have missed a plan, because the world ended while the ranks agreed on it.
    """

    fruitless: int = 0
    """Replays whose scope was followed by none that is wider, and that came no further than those
    before."""
    widest: int = 0
    """Number of ranks in the widest scope; 0 before a replay."""
    before: int = NO_LINE
    """Last step that had been repeated when the newest replay was planned."""
    reached: int = NO_LINE
    """Last step that has been repeated."""


class ReplayEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of one rank of a world in which the state of some ranks is lost."""

    step: int | None = None
    """Step whose state it has, whole; None for a new process."""
    line: int = NO_LINE
    """Step that a restore of the line brings back which its daemon names: of a sparse window, the
    first."""
    whole: int = NO_LINE
    """Step after which the state is whole: of a sparse window, the last; otherwise as `line`."""
    window: bool = False
    """Whether this line is a sparse window, in which units are of several steps."""
    logged_from: int = 1
    """First step whose boundary traffic it has logged."""
    logged_to: int = 0
    """Last of these steps; all in between are logged as well."""
    topology: str = ""
    """Topology of its script."""
    ring: bool = False
    """Whether its script's last stage may send to the first one."""
    progress: ReplayProgress = ReplayProgress()
    """What it knows of the replays before."""
    problem: str = ""
    """Why it cannot take part; empty when it can."""


_EVIDENCE = msgspec.json.Decoder(ReplayEvidence)


def encode_evidence(evidence: ReplayEvidence) -> bytes:
    """Encode a statement for the other ranks."""
    return msgspec.json.encode(evidence)


def decode_evidence(data: bytes) -> ReplayEvidence:
    """Decode the statement of a rank.

    Raises:
        CorruptError: `encode_evidence` cannot have written it.
    """
    try:
        return _EVIDENCE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"its statement for a replay cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """Recovery of the lost ranks alone; equal on all ranks."""

    scope: tuple[int, ...]
    """Ranks that restore the line and repeat steps, ascending: all ranks whose state is lost, and
    if there are steps to repeat, the other ranks of their stages, but none of `given`."""
    line: int
    """Step that they restore."""
    target: int
    """Last step that they repeat: the one whose state the other ranks have. If it is `line`, they
    repeat none."""
    sources: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank in the scope → its neighbours outside, whose logs it needs, ascending. Neighbours inside
    the scope compute again what they send."""
    shared_by: int = 0
    """Rank outside the scope that gives what all ranks have added up, if steps are repeated."""
    given: tuple[int, ...] = ()
    """Lost ranks outside the scope, ascending: live replicas give them the state after `target`."""
    progress: ReplayProgress = field(default_factory=ReplayProgress)
    """What all ranks know of the replays before, this one's scope included."""


def plan_replay(
    ranks: Sequence[ReplayEvidence], replicated: Collection[int] = ()
) -> ReplayPlan | str:
    """Plan the recovery of the lost ranks alone, or say why all ranks have to restore the line.

    Args:
        ranks: statements of all ranks of the new world, in their order.
        replicated: lost ranks whose state live ranks of their stages can give them.
    """
    for rank, evidence in enumerate(ranks):
        if evidence.problem:
            return f"rank {rank}: {evidence.problem}"
    topologies = sorted({evidence.topology for evidence in ranks})
    if len(topologies) != 1:
        return f"ranks state different topologies: {', '.join(topologies)}"
    try:
        topology = Topology.parse(topologies[0])
        topology.check_world(len(ranks))
    except HoldfastError as error:
        return str(error)
    lost = tuple(rank for rank, evidence in enumerate(ranks) if evidence.step is None)
    kept = {evidence.step for evidence in ranks if evidence.step is not None}
    lines = {(evidence.line, evidence.whole) for evidence in ranks}
    if not lost or len(kept) != 1 or len(lines) != 1:
        return (
            f"lost ranks {list(lost)}, states of steps {sorted(kept)} and lines {sorted(lines)} "
            f"fit no recovery of some ranks alone"
        )
    [target], [(line, whole)] = kept, lines
    assert target is not None
    if not 0 <= line <= whole <= target:
        return f"from line {line}, whole after {whole}, no stage can repeat steps to {target}"
    if line == target:
        if any(evidence.window for evidence in ranks):
            return "the line is a window, in which units are of several steps"
        shared_by = next(rank for rank in range(len(ranks)) if rank not in lost)
        return ReplayPlan(scope=lost, line=line, target=target, shared_by=shared_by)
    return _plan_repeated(ranks, topology, lost, replicated, line, target)


def _plan_repeated(
    ranks: Sequence[ReplayEvidence],
    topology: Topology,
    lost: Sequence[int],
    replicated: Collection[int],
    line: int,
    target: int,
) -> ReplayPlan | str:
    """Plan how the stages of the `lost` ranks repeat the steps from `line` to `target`; or the
    reason why all ranks have to restore the line."""
    ring = any(evidence.ring for evidence in ranks)
    stages = {topology.coordinates(rank).pp for rank in lost if rank not in replicated}
    short: set[int] = set()
    """Ranks whose logs are needed and too short."""
    while True:
        scope = [rank for rank in range(len(ranks)) if topology.coordinates(rank).pp in stages]
        sources = {rank: _outside(rank, topology, scope, ring) for rank in scope}
        givers = {giver for of_rank in sources.values() for giver in of_rank}
        lacking = {giver for giver in givers if not _has_logged(ranks[giver], line, target)}
        if not lacking:
            break
        short |= lacking
        stages |= {topology.coordinates(giver).pp for giver in lacking}
    if givers:
        progress = _progress(ranks, len(scope), line)
        if progress.fruitless >= FRUITLESS_MAX:
            return f"{progress.fruitless} replays after step {line} were cut off without progress"
        return ReplayPlan(
            scope=tuple(scope),
            line=line,
            target=target,
            sources=sources,
            shared_by=min(givers),
            given=tuple(rank for rank in lost if rank not in scope),
            progress=progress,
        )
    why = f"the line is of step {line} and the others have step {target}, but"
    if short:
        first = ranks[min(short)]
        return f"{why} rank {min(short)} has logged steps {first.logged_from} to {first.logged_to}"
    return f"{why} lost ranks {list(lost)} take part in the steps of all others"


def _progress(ranks: Sequence[ReplayEvidence], scope: int, line: int) -> ReplayProgress:
    """What is known of all replays once another one begins, in whose scope there are `scope` ranks,
    and whether the one before it was fruitless."""
    of_all = [evidence.progress for evidence in ranks]
    fruitless, widest = max(p.fruitless for p in of_all), max(p.widest for p in of_all)
    before, reached = max(p.before for p in of_all), max(line, *(p.reached for p in of_all))
    return ReplayProgress(
        fruitless=fruitless + (widest > 0 and scope <= widest and reached <= before),
        widest=max(widest, scope),
        before=reached,
        reached=reached,
    )


def _has_logged(evidence: ReplayEvidence, line: int, target: int) -> bool:
    """Whether a rank has its state, and has logged the steps after `line` up to `target`."""
    kept = evidence.step is not None
    return kept and evidence.logged_from <= line + 1 and target <= evidence.logged_to


def _outside(rank: int, topology: Topology, scope: Sequence[int], ring: bool) -> tuple[int, ...]:
    """Neighbours of `rank` in its pipeline that are not in the scope."""
    return tuple(
        neighbour
        for neighbour in pipeline_neighbours(rank, topology, ring)
        if neighbour not in scope
    )


def pipeline_neighbours(rank: int, topology: Topology, ring: bool = False) -> tuple[int, ...]:
    """Ranks of the stages before and after that of `rank`, in its pipeline, ascending.

    Args:
        ring: whether the first stage comes after the last one: where a rank holds several parts of
            the model, the last rank's first part is followed by the first rank's second one.
    """
    at, count = topology.coordinates(rank), topology.pp
    stages = {pp % count if ring else pp for pp in (at.pp - 1, at.pp + 1)}
    return tuple(
        topology.rank_at(dp=at.dp, tp=at.tp, pp=pp) for pp in sorted(stages) if 0 <= pp < count
    )
