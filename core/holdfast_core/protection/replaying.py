"""Plan of how ranks whose state is lost reach the step of the others alone, while these keep their
state.

They restore the recovery line. If it is of the step that the others have, that is all: whichever
ranks are lost, such as those whose shards nobody else holds. If it is older, they have to repeat
the steps after it, which only whole pipeline stages can do alone, with what their neighbours have
logged at their boundaries (MoEvement §3.4). The plan follows from statements of all ranks, and is
the same on each of them. It relies only on what the statements show: if one is missing or
contradicts another, there is no plan, and all ranks restore the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.topology import Topology

NO_LINE = -1
"""Step of a line that does not exist, or from which no rank can be restored by itself."""


class ReplayEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of one rank of a world in which the state of some ranks is lost."""

    step: int | None = None
    """Step whose state it has, whole; None for a new process."""
    line: int = NO_LINE
    """Step that a restore of the line brings back which its daemon names: of a sparse window, the
    first."""
    whole: int = NO_LINE
    """Step after which the state is whole: of a sparse window, the last; otherwise as `line`."""
    logged_from: int = 1
    """First step whose boundary traffic it has logged."""
    logged_to: int = 0
    """Last of these steps; all in between are logged as well."""
    topology: str = ""
    """Topology of its script."""
    ring: bool = False
    """Whether its script's last stage may send to the first one."""
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
    """Ranks that restore the line and repeat steps, ascending: all ranks whose state is lost."""
    line: int
    """Step that they restore."""
    target: int
    """Last step that they repeat: the one whose state the other ranks have. If it is `line`, they
    repeat none."""
    sources: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank in the scope → its neighbours outside, whose logs it needs, ascending. Neighbours inside
    the scope compute again what they send."""
    shared_by: int = 0
    """Rank outside the scope that gives what all ranks have added up."""


def plan_replay(ranks: Sequence[ReplayEvidence]) -> ReplayPlan | str:
    """Plan from the statements of all ranks of the new world, in their order; or the reason why all
    ranks have to restore the line."""
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
    scope = tuple(rank for rank, evidence in enumerate(ranks) if evidence.step is None)
    kept = {evidence.step for evidence in ranks if evidence.step is not None}
    lines = {(evidence.line, evidence.whole) for evidence in ranks}
    if not scope or len(kept) != 1 or len(lines) != 1:
        return (
            f"lost ranks {list(scope)}, states of steps {sorted(kept)} and lines {sorted(lines)} "
            f"fit no recovery of some ranks alone"
        )
    [target], [(line, whole)] = kept, lines
    assert target is not None
    if not 0 <= line <= whole <= target:
        return f"from line {line}, whole after {whole}, no stage can repeat steps to {target}"
    shared_by = next(rank for rank in range(len(ranks)) if rank not in scope)
    if line == target:
        return ReplayPlan(scope=scope, line=line, target=target, shared_by=shared_by)
    if not stages_lost(scope, topology):
        return (
            f"the line is of step {line} and the others have step {target}, but lost ranks "
            f"{list(scope)} are not whole pipeline stages, which could repeat steps alone"
        )
    ring = any(evidence.ring for evidence in ranks)
    sources = {rank: _outside(rank, topology, scope, ring) for rank in scope}
    for giver in sorted({shared_by, *(rank for givers in sources.values() for rank in givers)}):
        evidence = ranks[giver]
        if not (evidence.logged_from <= line + 1 and target <= evidence.logged_to):
            return (
                f"rank {giver} has logged steps {evidence.logged_from} to {evidence.logged_to}, "
                f"and {line + 1} to {target} are needed"
            )
    return ReplayPlan(scope=scope, line=line, target=target, sources=sources, shared_by=shared_by)


def stages_lost(lacking: Sequence[int], topology: Topology) -> bool:
    """Whether the ranks that lack their state are all ranks of some stages, and not of all."""
    stages = {topology.coordinates(rank).pp for rank in lacking}
    whole = topology.dp * topology.tp * len(stages)
    return 0 < len(stages) < topology.pp and len(lacking) == whole


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
