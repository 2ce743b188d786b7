"""Agreement on a replay and the hand-over of logs, where what others state or give is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from holdfast._elastic.boundary_log import (
    EVERYONE,
    BoundaryLog,
    Crossing,
    Key,
    LogPart,
    Message,
    encode_part,
)
from holdfast._elastic.pipeline import BoundaryReplay
from holdfast._elastic.stage_replay import agree_on_replay, hand_over_logs
from holdfast_core.protection.replaying import (
    ReplayEvidence,
    ReplayPlan,
    ReplayProgress,
    encode_evidence,
)
from holdfast_core.topology import Topology

TOPOLOGY = Topology(dp=1, pp=2)
PLAN = ReplayPlan(
    scope=(0,),
    line=1,
    target=2,
    sources={0: (1,)},
    shared_by=1,
    progress=ReplayProgress(widest=1, before=1, reached=1),
)


class Pipeline:
    """Boundaries of a rank, as far as a replay needs them."""

    topology, is_ring = TOPOLOGY, False

    def __init__(self) -> None:
        self.log = BoundaryLog(1000)


class Session:
    holds = SimpleNamespace(topology=TOPOLOGY)

    def line(self) -> tuple[int, int, bool]:
        return 1, 1, False


class OneOther:
    """Exchange of rank 0 with rank 1, which states and gives what it is told to."""

    def __init__(self, stated: Sequence[bytes], given: bytes = b"") -> None:
        self._stated, self._given = list(stated), given

    def gather(self, data: bytes) -> list[bytes]:
        return [data, self._stated.pop(0)]

    def deal(
        self, sent: torch.Tensor, lengths: list[int], taken: torch.Tensor, taken_bytes: list[int]
    ) -> None:
        assert len(sent) == sum(lengths) == 0
        assert taken_bytes == [0, len(self._given)]
        taken.copy_(torch.tensor(list(self._given), dtype=torch.uint8))


def agreed(statement: bytes) -> ReplayPlan | str:
    """What rank 0, a new process, agrees on with the other one's statement."""
    session: Any = Session()
    pipeline: Any = Pipeline()
    exchange: Any = OneOther([statement])
    return agree_on_replay(session, pipeline, exchange, None, "", ReplayProgress())


def handed_over(given: bytes) -> BoundaryReplay | str:
    """What rank 0 has from a log that rank 1 gives."""
    pipeline: Any = Pipeline()
    exchange: Any = OneOther([json.dumps([len(given), 0]).encode(), b""], given)
    return hand_over_logs(PLAN, pipeline, exchange, rank=0)


def part(*, data: bytes = b"abcd", digest: int | None = None) -> LogPart:
    """Log of rank 1 of step 2."""
    return LogPart(
        sent=(
            Message(
                Key(2, Crossing.GRADIENT, 0),
                data,
                xxhash.xxh3_64_intdigest(data) if digest is None else digest,
            ),
            Message(Key(2, Crossing.SHARED, 0), b"sum", xxhash.xxh3_64_intdigest(b"sum")),
        ),
        received=((Key(2, Crossing.ACTIVATION, 0), 7),),
    )


def test_a_statement_that_cannot_be_read_leads_back_to_the_line() -> None:
    evidence = ReplayEvidence(step=2, line=1, whole=1, logged_to=2, topology=str(TOPOLOGY))
    whole = encode_evidence(evidence)
    assert agreed(whole) == PLAN
    for damaged in (whole[:-2], b"", b"[" * 9000, whole.replace(b'"step":2', b'"step":"2"')):
        found = agreed(damaged)
        assert isinstance(found, str)
        assert found.startswith("rank 1: its statement for a replay cannot be read")


def test_a_log_that_was_handed_over_answers() -> None:
    replay = handed_over(encode_part(part()))
    assert isinstance(replay, BoundaryReplay)
    into = torch.zeros(4, dtype=torch.uint8)
    replay.take(1, Key(2, Crossing.GRADIENT, 0), into)
    assert bytes(into.tolist()) == b"abcd"
    replay.compare(1, Key(2, Crossing.ACTIVATION, 0), 7)
    replay.take(EVERYONE, Key(2, Crossing.SHARED, 0), into[:3])
    replay.end()
    assert replay.divergence == ""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"", "ranks [] have handed over logs, but the logs of ranks [1] are needed"),
        (encode_part(part())[:-3], "the log of a neighbour cannot be read"),
        (msgspec.msgpack.encode([1, 2]), "the log of a neighbour cannot be read"),
        (encode_part(part(digest=1)), "the log of gradient 0 of step 2 does not match its"),
    ],
)
def test_a_log_that_is_not_what_was_stated_leads_back_to_the_line(
    given: bytes, reason: str
) -> None:
    found = handed_over(given)
    assert isinstance(found, str)
    assert found.startswith(f"rank 0: {reason}")


def test_a_log_that_lacks_what_was_stated_is_noticed_at_the_end_of_the_replay() -> None:
    """Messages and digests that it lacks are named where they are asked for; nothing of what memory
    held before comes into the step."""
    replay = handed_over(encode_part(LogPart()))
    assert isinstance(replay, BoundaryReplay)
    into = torch.full((4,), 9, dtype=torch.uint8)
    replay.take(1, Key(2, Crossing.GRADIENT, 0), into)
    assert not into.any()
    assert replay.divergence == "gradient 0 of step 2 has 4 bytes now, but 0 are logged"
    replay = handed_over(encode_part(LogPart(sent=part().sent)))
    assert isinstance(replay, BoundaryReplay)
    replay.compare(1, Key(2, Crossing.ACTIVATION, 0), 7)
    assert replay.divergence == "activation 0 of step 2 is not the message that rank 1 had received"
