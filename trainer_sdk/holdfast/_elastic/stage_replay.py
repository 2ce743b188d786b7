"""Recovery of lost pipeline stages by themselves: agreement on a plan, and hand-over of logs.

Every rank of the new world takes part; the ranks of surviving stages give what they have logged,
and wait. Nothing of their state changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import torch

from holdfast._agree.exchange import Exchange
from holdfast._elastic.boundary_log import LogPart, decode_part, encode_part
from holdfast._elastic.pipeline import EVERYONE, BoundaryReplay, Pipeline
from holdfast._session.interface import WorldSession
from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.protection.replaying import (
    NO_LINE,
    ReplayEvidence,
    ReplayPlan,
    decode_evidence,
    encode_evidence,
    plan_replay,
)

_log = logging.getLogger("holdfast")
_LENGTHS = msgspec.json.Decoder(list[int])


def agree_on_replay(
    session: WorldSession, pipeline: Pipeline, exchange: Exchange, step: int | None, torn: str
) -> ReplayPlan | str:
    """Agree on a replay, or on the reason why all ranks have to restore the line. Collective.

    Args:
        step: step whose state this rank has; None for a new process.
        torn: why it is not whole; empty when it is.

    Raises:
        UnreachableError: a rank does not take part.
    """
    line, whole, problem = NO_LINE, NO_LINE, ""
    try:
        line, whole = session.line()
    except HoldfastError as error:
        problem = str(error)
    own = ReplayEvidence(
        step=step,
        line=line,
        whole=whole,
        logged_from=pipeline.log.first,
        logged_to=pipeline.log.last,
        topology=str(pipeline.topology if session.holds is None else session.holds.topology),
        ring=pipeline.is_ring,
        problem=torn or problem,
    )
    plan = _plan(exchange.gather(encode_evidence(own)))
    if isinstance(plan, str):
        _log.warning("no stage repeats steps alone: %s", plan)
        return plan
    _log.info("ranks %s repeat steps %d to %d", plan.scope, plan.line + 1, plan.target)
    return plan


def _plan(texts: Sequence[bytes]) -> ReplayPlan | str:
    """Plan from what all ranks have stated, or find the reason why there is no plan."""
    evidence = []
    for rank, text in enumerate(texts):
        try:
            evidence.append(decode_evidence(text))
        except CorruptError as error:
            return f"rank {rank}: {error}"
    return plan_replay(evidence)


def hand_over_logs(
    plan: ReplayPlan, pipeline: Pipeline, exchange: Exchange, rank: int
) -> BoundaryReplay | str:
    """Give the ranks of the plan's scope what they need of the logs. Collective.

    Returns:
        The replay of this rank; an empty one outside the scope. The reason when a rank cannot use
        what it was given: then all ranks have to restore the line.

    Raises:
        UnreachableError: a rank does not take part.
    """
    given = []
    for to in range(pipeline.topology.world_size):
        of = [to] if rank in plan.sources.get(to, ()) else []
        if rank == plan.shared_by and to in plan.scope:
            of.append(EVERYONE)
        part = pipeline.log.part_for(of, plan.line, plan.target) if of else LogPart()
        given.append(encode_part(part) if of else b"")
    lengths = [len(part) for part in given]
    of_all = [_LENGTHS.decode(each) for each in exchange.gather(msgspec.json.encode(lengths))]
    taken_bytes = [each[rank] for each in of_all]
    taken = torch.empty(sum(taken_bytes), dtype=torch.uint8, device="cpu")
    together = bytearray(b"".join(given)) or bytearray(1)
    sent = torch.frombuffer(together, dtype=torch.uint8)[: sum(lengths)]
    exchange.deal(sent, lengths, taken, taken_bytes)
    replay, problem = BoundaryReplay(plan, {}), ""
    try:
        parts = enumerate(taken.split(taken_bytes))
        found = {one: decode_part(part.numpy().tobytes()) for one, part in parts if len(part)}
        wanted = {*plan.sources[rank], plan.shared_by} if rank in plan.scope else set()
        if found.keys() != wanted:
            raise CorruptError(
                f"ranks {sorted(found)} have handed over logs, and those of {sorted(wanted)} are "
                f"needed"
            )
        replay = BoundaryReplay(plan, found)
    except HoldfastError as error:
        problem = f"rank {rank}: {error}"
    problems = [text.decode() for text in exchange.gather(problem.encode()) if text]
    for text in problems:
        _log.warning("no stage repeats steps alone: %s", text)
    return problems[0] if problems else replay
