"""Verdict on where training continues when processes have outlived their world: from their own
state, or from the recovery line.

Every rank of a new world states which part of the training state it has, and derives the same
verdict from all statements. The verdict relies on the vote before the optimizer: no rank completes
a step unless every rank of the old world had all its gradients. So processes that outlive a world
are at most one step apart, and those that are behind can finish the step alone. This module checks
that: if the vote cannot explain a statement, all ranks return to the recovery line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

import msgspec

from holdfast_core.errors import HoldfastError, ProtocolError
from holdfast_core.topology import Topology

NEW = -1
"""Step of a process that has no training state."""


class RankStanding(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of one rank of a new world."""

    step: int = NEW
    """Step whose complete state it has: the number of completed steps. `NEW` for none."""
    ready: bool = False
    """Whether it holds all gradients of the step after that, and can finish it without others."""
    torn: str = ""
    """Reason why its state does not belong to one step; empty if it does."""
    topology: str = ""
    """Topology of its script, in a world of any size; empty for a new process."""
    rank: int = 0
    """Its rank in the world in which it had that topology."""
    unshared: bool = False
    """Whether it has tensors that no other rank holds."""
    experts: bool = False
    """Whether it has experts, which only ranks of its expert coordinate hold."""
    held: tuple[tuple[int, ...], ...] = ()
    """Experts in its seats, for each layer whose experts have uneven copies."""
    layer_experts: int = 0
    """Experts of each such layer."""


_STANDING = msgspec.json.Decoder(RankStanding)


def read_standings(texts: Sequence[str]) -> list[RankStanding]:
    """The statements of all ranks of a world, in their order.

    Raises:
        ProtocolError: a rank's statement cannot be read.
    """
    statements = []
    for rank, text in enumerate(texts):
        try:
            statements.append(_STANDING.decode(text))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ProtocolError(
                f"cannot decode the statement of rank {rank} about its training state: {error}; "
                f"run the same version of holdfast on all ranks"
            ) from error
    return statements


class StandingAction(StrEnum):
    """Action that all ranks of a new world take."""

    LIVE = "live"
    """Continue after `step` from the state of the processes."""
    FORWARD = "forward"
    """First finish `step` on the ranks that have not; then all state again."""
    REPLAY = "replay"
    """Let the ranks whose state nobody else has restore the recovery line, and repeat the steps
    after it with the other ranks of their stages, if the evidence of all ranks allows it; new ranks
    of other stages get their state as for `LIVE`. Otherwise do as for `LINE`."""
    LINE = "line"
    """Restore the recovery line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingVerdict:
    """Conclusion from the statements of all ranks; equal on all of them."""

    action: StandingAction
    reason: str
    step: int = 0
    sources: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """New rank → pair of ranks: one gives it the non-expert state, the other experts. For `REPLAY`,
    of the new ranks whose state others have."""


def standing(ranks: Sequence[RankStanding]) -> StandingVerdict:
    """Conclude from the statements of all ranks of a new world, in their order."""
    live = {
        rank: statement
        for rank, statement in enumerate(ranks)
        if statement.step != NEW or statement.torn
    }
    if not live:
        return _back("no process has outlived its world")
    for rank, statement in live.items():
        if statement.torn:
            return _back(f"rank {rank}: {statement.torn}")
        if statement.step < NEW:
            return _back(f"rank {rank} states to have completed {statement.step} steps")
    topologies = sorted({statement.topology for statement in live.values()})
    if len(topologies) > 1:
        return _back(f"ranks state different topologies: {', '.join(topologies)}")
    try:
        before = Topology.parse(topologies[0])
        topology = before.resized(len(ranks))
        for rank, statement in live.items():
            here, there = topology.coordinates(rank), before.coordinates(statement.rank)
            if (here.tp, here.pp, here.ep) != (there.tp, there.pp, there.ep):
                return _back(f"rank {rank} holds the part of another rank")
    except HoldfastError as error:
        return _back(str(error))
    newest = max(statement.step for statement in live.values())
    behind = [rank for rank, statement in live.items() if statement.step < newest]
    for rank in behind:
        if live[rank].step != newest - 1 or not live[rank].ready:
            first = next(other for other, statement in live.items() if statement.step == newest)
            return _back(
                f"rank {first} has completed step {newest}, and rank {rank} step "
                f"{live[rank].step} without the vote on the next one"
            )
    wrong = _contradiction(live) or _without_copy([*live.values()])
    if wrong:
        return _back(wrong)
    lacking = [rank for rank in range(len(ranks)) if rank not in live]
    givers = {rank: _sources_of(rank, topology, live) for rank in lacking}
    sources = {rank: pair for rank, pair in givers.items() if not isinstance(pair, str)}
    lost = next((reason for reason in givers.values() if isinstance(reason, str)), "")
    # A line that can be restored on some ranks alone has their places in this world.
    if lost and (before != topology or any(live[rank].rank != rank for rank in live)):
        return _back(lost)
    if behind:
        return StandingVerdict(
            action=StandingAction.FORWARD,
            reason=f"ranks {behind} finish step {newest}, whose vote has passed",
            step=newest,
        )
    if lost:
        return StandingVerdict(
            action=StandingAction.REPLAY,
            reason=f"ranks {sorted(live)} have the state after step {newest}, and {lost}",
            step=newest,
            sources=sources,
        )
    given = f", and give ranks {lacking} theirs" if lacking else ""
    return StandingVerdict(
        action=StandingAction.LIVE,
        reason=f"ranks {sorted(live)} have the state after step {newest}{given}",
        step=newest,
        sources=sources,
    )


def can_lose_member(own: RankStanding, ranks: int, nproc: int) -> bool:
    """Whether other members hold all state of this rank's member, so that training could continue
    live without it.

    Args:
        own: statement of this rank, between two steps.
        ranks: number of ranks of the world.
        nproc: ranks of each member.
    """
    first = own.rank // nproc * nproc
    return _can_lose(own, ranks, range(first, first + nproc))


def can_lose_rank(own: RankStanding, ranks: int) -> bool:
    """Whether other ranks, perhaps of the same member, hold all state of this rank, so that
    training could continue live without it. Arguments as in `can_lose_member`."""
    return _can_lose(own, ranks, range(own.rank, own.rank + 1))


def _can_lose(own: RankStanding, ranks: int, lost: range) -> bool:
    """Whether the ranks of the world that are not `lost` hold the state of those that are."""
    if own.torn:
        return False
    if own.held:  # where copies of experts are, the plan says
        return True
    topology = Topology.parse(own.topology)
    live = {rank: own for rank in range(ranks) if rank not in lost}
    return not any(isinstance(_sources_of(rank, topology, live), str) for rank in lost)


def _back(reason: str) -> StandingVerdict:
    return StandingVerdict(action=StandingAction.LINE, reason=reason)


def _contradiction(live: Mapping[int, RankStanding]) -> str:
    """Reason why the statements about experts in seats contradict each other; empty if they do
    not."""
    first = min(live)
    layers, experts = len(live[first].held), live[first].layer_experts
    for rank, statement in live.items():
        if (len(statement.held), statement.layer_experts) != (layers, experts):
            return (
                f"rank {rank} states {len(statement.held)} layers of {statement.layer_experts} "
                f"experts, and rank {first} {layers} of {experts}"
            )
        for layer, held in enumerate(statement.held):
            for expert in held:
                if not 0 <= expert < experts:
                    return (
                        f"rank {rank} states to hold expert {expert} of layer {layer}, which has "
                        f"{experts}"
                    )
    return ""


def _without_copy(live: Sequence[RankStanding]) -> str:
    """Message about an expert that has lost all of its copies; empty if none has."""
    for layer, of_ranks in enumerate(zip(*(statement.held for statement in live), strict=True)):
        held = {expert for of_rank in of_ranks for expert in of_rank}
        if len(held) < live[0].layer_experts:
            expert = next(expert for expert in count() if expert not in held)
            return f"no rank is left that holds expert {expert} of layer {layer}"
    return ""


def _sources_of(
    rank: int, topology: Topology, live: Mapping[int, RankStanding]
) -> tuple[int, int] | str:
    """The lowest ranks that hold the state that `rank` needs, or the reason why there are none."""
    dense = next((replica for replica in topology.dense_replicas(rank) if replica in live), None)
    if dense is None:
        return f"nobody is left who holds what rank {rank} is to hold"
    if any(live[replica].unshared for replica in topology.dense_replicas(rank) if replica in live):
        return f"rank {rank} is to hold tensors that no other rank has"
    if not live[dense].experts:
        return dense, dense
    expert = next((replica for replica in topology.expert_replicas(rank) if replica in live), None)
    if expert is None:
        return f"nobody is left who holds the experts of rank {rank}"
    return dense, expert
