"""The agreement of all ranks before the first save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch

from holdfast._agree.exchange import Broadcast
from holdfast._agree.plan import NO_RULES
from holdfast._agree.replicas import ReplicaStatement, UnitDigests, agree
from holdfast_core.errors import ReplicaMismatchError
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.sharding import ShardStrategy
from holdfast_core.snapshots.units import TensorSize, UnitKey
from holdfast_core.topology import Topology

TOPOLOGY = Topology(dp=3)
GATE = UnitKey.parse("layer0/gate")
TABLE = (
    TensorSize(
        unit=GATE,
        tensor="gate.weight",
        role=TensorRole.COMPUTE,
        dtype="float32",
        shape=(8,),
        nbytes=32,
        private=False,
    ),
)


@dataclass
class PreparedExchange:
    """An exchange in which the other ranks have made these statements."""

    others: Sequence[ReplicaStatement]
    together: bool = True

    def gather(self, data: bytes) -> list[bytes]:
        return [data, *(msgspec.json.encode(other) for other in self.others)]

    def add(self, numbers: Sequence[int]) -> list[int]:
        raise AssertionError("no sum is expected")

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        raise AssertionError("no broadcast is expected")

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        raise AssertionError("no bytes of tensors are expected")


def statement(**digests: int) -> ReplicaStatement:
    by_gate = {str(GATE): digest for digest in digests.values()}
    found = UnitDigests(shared=by_gate) if digests else None
    return ReplicaStatement(step=1, table=TABLE, extras_bytes=10, digests=found)


def agreed(*others: ReplicaStatement) -> None:
    agree(
        PreparedExchange(others), statement(gate=5), TOPOLOGY, 0, ShardStrategy.ADAPTIVE, NO_RULES
    )


def test_ranks_that_hold_different_bytes_are_named_with_the_unit() -> None:
    agreed(statement(gate=5), statement(gate=5))
    with pytest.raises(ReplicaMismatchError, match=r"unit layer0/gate: .*ranks \[0, 2\]"):
        agreed(statement(gate=5), statement(gate=6))


def test_a_rank_that_could_not_read_its_tensors_does_not_count_as_different() -> None:
    agreed(statement(), statement(gate=5))
    with pytest.raises(ReplicaMismatchError, match=r"ranks \[0, 2\]"):
        agreed(statement(), statement(gate=6))
