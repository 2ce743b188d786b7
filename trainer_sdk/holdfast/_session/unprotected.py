"""Session without a daemon: training runs as before, and nothing is protected."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from holdfast._daemon.handles import SaveHandle
from holdfast._save.tally import SaveCounters
from holdfast._session.interface import WorldSession
from holdfast_core.errors import HoldfastError, SnapshotSkippedError

_log = logging.getLogger("holdfast")

_WHY = "HOLDFAST_SOCKET is not set: no daemon protects this process"


class UnprotectedSession(WorldSession):
    """Session that skips every save, and warns once that nothing is protected."""

    def __init__(self) -> None:
        self._counters = SaveCounters()
        _log.warning("%s; training runs without snapshots", _WHY)

    @property
    def epoch(self) -> int:
        return 0

    @property
    def problem(self) -> HoldfastError | None:
        return SnapshotSkippedError(_WHY)

    @property
    def counters(self) -> SaveCounters:
        return self._counters

    def restore(self, no_replay: str = "") -> int | None:
        del no_replay
        return None

    def save(self, step: int) -> SaveHandle:
        handle = SaveHandle(step)
        handle._fail(SnapshotSkippedError(_WHY))
        self._counters.skipped += 1
        return handle

    def count_tokens(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        del layer, counts, assignments

    def bubble(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        del layer
        return [1.0] * experts

    @property
    def capacity_room(self) -> float:
        return 1.0

    def prepare(self) -> None:
        return None

    def wait_staged(self) -> None:
        return None

    def close(self) -> None:
        return None
