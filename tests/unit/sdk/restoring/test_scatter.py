"""Bytes that one rank restored reach its replicas, also where a device is full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from meeting import Meeting, Seat
from on_device import OnDevice
from torch.overrides import TorchFunctionMode

from holdfast._agree.exchange import Broadcast
from holdfast._restoring.fit import Offer
from holdfast._restoring.scatter import scatter
from holdfast._state.capture import TensorSource
from holdfast._state.room import report_full
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import UnitKey, UnitKind

WORLD = 2
WAIT_S = 30.0


class Full(TorchFunctionMode):
    """Plays a device without memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.device((kwargs or {}).get("device", "cpu")).type != "cpu":
            raise torch.OutOfMemoryError("no memory left")
        return func(*args, **(kwargs or {}))


class Broadcasting(Seat):
    """Notes where the buffers of broadcasts are."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.buffers: set[str] = set()

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        def broadcast(buffer: torch.Tensor, source: int) -> None:
            self.buffers.add(buffer.device.type)
            buffer.copy_(self.meeting.gather(self.rank, buffer.clone())[source])

        for group in groups:
            yield group, broadcast


def source(tensor: torch.Tensor) -> TensorSource:
    unit = UnitKey(0, UnitKind.DENSE)
    return TensorSource(unit=unit, name="w", role=TensorRole.COMPUTE, tensor=tensor, private=False)


@pytest.mark.parametrize("full_rank", [0, 1])
def test_where_one_device_is_full_all_ranks_have_their_buffers_in_host_memory(
    full_rank: int,
) -> None:
    report_full.cache_clear()
    wanted, meeting = torch.arange(1000.0), Meeting(WORLD)
    found = [wanted.clone(), torch.zeros(1000)]
    offer = Offer(tensor="w", dtype="float32", shape=(1000,), start=0, nbytes=4000, replicas=(0, 1))
    exchanges = [Broadcasting(meeting, rank) for rank in range(WORLD)]

    def restore(rank: int) -> None:
        sources = {"w": source(OnDevice(found[rank]))}
        offers: Sequence[tuple[Offer, ...]] = ((offer,), ())
        with torch.no_grad():
            if rank == full_rank:
                with Full():
                    scatter(exchanges[rank], offers, sources, rank)
            else:
                scatter(exchanges[rank], offers, sources, rank)

    with ThreadPoolExecutor(WORLD) as threads:
        for done in [threads.submit(restore, rank) for rank in range(WORLD)]:
            done.result(WAIT_S)
    assert torch.equal(found[1], wanted)
    assert [exchange.buffers for exchange in exchanges] == [{"cpu"}, {"cpu"}]
