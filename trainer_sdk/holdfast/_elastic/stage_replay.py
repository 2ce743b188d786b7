"""The recovery of lost ranks alone: agreement on a plan, and hand-over of logs to lost pipeline
stages that repeat steps.

Every rank of the new world takes part. The surviving ranks hand over their logs and then wait;
their state does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import msgspec
import torch

from holdfast._agree.exchange import Exchange
from holdfast._elastic.boundary_log import EVERYONE, LogPart, decode_part, encode_part
from holdfast._elastic.pipeline import BoundaryReplay, Pipeline
from holdfast._session.interface import WorldSession
from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.protection.replaying import (
    NO_LINE,
    ReplayEvidence,
    ReplayPlan,
    ReplayProgress,
    decode_evidence,
    encode_evidence,
    pipeline_neighbours,
    plan_replay,
)

_log = logging.getLogger("holdfast")
_LENGTHS = msgspec.json.Decoder(list[int])


def agree_on_replay(
    session: WorldSession,
    pipeline: Pipeline | None,
    exchange: Exchange,
    step: int | None,
    torn: str,
    progress: ReplayProgress,
    replicated: Collection[int] = (),
) -> ReplayPlan | str:
    """Agree on a replay, or on the reason why all ranks must restore the line. Collective.

    Args:
        pipeline: holds the logs of this rank; None if it has none that could be used.
        step: step whose state this rank has; None for a new process.
        torn: why that state is not whole; empty if it is.
        progress: what this rank knows of the replays before.
        replicated: lost ranks whose state live ranks can give them; equal on all ranks.

    Raises:
        UnreachableError: a rank does not take part.
    """
    # Describe what this rank could contribute.
    line, whole, window, problem = NO_LINE, NO_LINE, False, ""
    try:
        line, whole, window = session.line()
    except HoldfastError as error:
        problem = str(error)
    own = ReplayEvidence(
        step=step,
        line=line,
        whole=whole,
        window=window,
        topology="" if session.holds is None else str(session.holds.topology),
        progress=progress,
        problem=torn or problem,
    )
    if pipeline is not None:
        own = msgspec.structs.replace(
            own,
            logged_from=pipeline.log.first,
            logged_to=pipeline.log.last,
            ring=pipeline.is_ring,
            topology=own.topology or str(pipeline.topology),
        )
    # Every rank computes the same plan from the evidence of all ranks.
    plan = _plan(exchange.gather(encode_evidence(own)), replicated)
    if isinstance(plan, str):
        _log.warning("the lost ranks cannot recover alone: %s", plan)
    elif plan.line == plan.target:
        _log.info("ranks %s restore step %d alone", plan.scope, plan.line)
    else:
        _log.info("ranks %s repeat steps %d to %d", plan.scope, plan.line + 1, plan.target)
        if plan.given:
            _log.info("ranks %s get the state after step %d live", plan.given, plan.target)
    return plan


def _plan(texts: Sequence[bytes], replicated: Collection[int]) -> ReplayPlan | str:
    """Return the plan that follows from the evidence of all ranks, or why there is none."""
    evidence = []
    for rank, text in enumerate(texts):
        try:
            evidence.append(decode_evidence(text))
        except CorruptError as error:
            return f"rank {rank}: {error}"
    return plan_replay(evidence, replicated)


def hand_over_logs(
    plan: ReplayPlan, pipeline: Pipeline, exchange: Exchange, rank: int
) -> BoundaryReplay | str:
    """Hand the parts of the logs that a replay needs to the ranks that repeat steps. Collective.

    Returns:
        The replay of this rank, which is empty if the rank repeats nothing. Or the reason why some
        rank cannot use the logs; then all ranks must restore the line.

    Raises:
        UnreachableError: a rank does not take part.
    """
    # Encode the part of this rank's log for each other rank.
    given = []
    for to in range(pipeline.topology.world_size):
        of = [to] if rank in plan.sources.get(to, ()) else []
        if rank == plan.shared_by and to in plan.scope:
            of.append(EVERYONE)
        part = pipeline.log.part_for(of, plan.line, plan.target) if of else LogPart()
        given.append(encode_part(part) if of else b"")
    taken = _deal(given, exchange, rank)
    # Decode the received parts, and check that they are those of the plan.
    replay, problem = BoundaryReplay(plan, {}), ""
    try:
        logs = {giver: decode_part(part) for giver, part in taken.items()}
        needed = {*plan.sources[rank], plan.shared_by} if rank in plan.scope else set()
        if logs.keys() != needed:
            raise CorruptError(
                f"ranks {sorted(logs)} have handed over logs, but the logs of ranks "
                f"{sorted(needed)} are needed"
            )
        replay = BoundaryReplay(plan, logs)
    except HoldfastError as error:
        problem = f"rank {rank}: {error}"
    # All ranks use the logs, or none does.
    problems = [text.decode() for text in exchange.gather(problem.encode()) if text]
    for text in problems:
        _log.warning("the lost ranks cannot recover alone: %s", text)
    return problems[0] if problems else replay


def return_logs(
    to_ranks: Collection[int],
    without: Collection[int],
    pipeline: Pipeline,
    exchange: Exchange,
    rank: int,
) -> None:
    """Return to ranks that have got their state from replicas what their logs had held, as far as
    their neighbours have kept it. If something is missing, such a log begins after their step.
    Collective.

    Args:
        to_ranks: the ranks that have lost their logs, but have the state of the others.
        without: all ranks that have no log.

    Raises:
        UnreachableError: a rank does not take part.
    """
    givers = {
        to: set(pipeline_neighbours(to, pipeline.topology, pipeline.is_ring)) for to in to_ranks
    }
    given = [b""] * pipeline.topology.world_size
    for to, of in givers.items():
        if rank in of and not of.intersection(without):
            given[to] = encode_part(pipeline.log.part_to_return(to))
    taken = _deal(given, exchange, rank)
    if not taken:
        return
    try:
        pipeline.log.refill({giver: decode_part(part) for giver, part in taken.items()})
    except CorruptError as error:
        _log.warning("this rank has no log of the steps before: %s", error)


def _deal(given: Sequence[bytes], exchange: Exchange, rank: int) -> dict[int, bytes]:
    """Send bytes to each other rank, and return those that came from each, unless it sent none.
    Collective."""
    # Exchange the lengths, and then the bytes themselves.
    lengths = [len(part) for part in given]
    of_all = [_LENGTHS.decode(each) for each in exchange.gather(msgspec.json.encode(lengths))]
    taken_bytes = [each[rank] for each in of_all]
    taken = torch.empty(sum(taken_bytes), dtype=torch.uint8, device="cpu")
    together = bytearray(b"".join(given)) or bytearray(1)
    sent = torch.frombuffer(together, dtype=torch.uint8)[: sum(lengths)]
    exchange.deal(sent, lengths, taken, taken_bytes)
    parts = enumerate(taken.split(taken_bytes))
    return {giver: part.numpy().tobytes() for giver, part in parts if len(part)}
