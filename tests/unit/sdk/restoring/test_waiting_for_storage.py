"""A trainer gives up on a daemon that is silent, and not on one that waits for storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._daemon.client import RestoreDecision, RestoreRequest
from holdfast.testing import FakeDaemon
from holdfast_core.errors import UnreachableError
from holdfast_core.states import RestorePhase, RestoreProgress


class Busy(FakeDaemon):
    """Says what it does, and the call ends; the third one is answered."""

    phase = RestorePhase.UNKNOWN
    asked = 0

    def restore(
        self,
        request: RestoreRequest,
        timeout_s: float,
        on_progress: Callable[[RestoreProgress], None],
    ) -> RestoreDecision:
        self.asked += 1
        if self.asked < 3:
            on_progress(RestoreProgress(phase=self.phase, detail="in words"))
            raise UnreachableError("the call took too long")
        return super().restore(request, timeout_s, on_progress)


@pytest.mark.parametrize("phase", [RestorePhase.STORAGE, RestorePhase.LOAD])
def test_a_daemon_that_waits_for_storage_is_asked_again(
    phase: RestorePhase, tmp_path: Path, trainer: Any, open_session: Any
) -> None:
    daemon = Busy(tmp_path)
    daemon.phase = phase
    session = open_session(trainer, daemon, restore_timeout_s=0.1)
    assert session.restore() is None
    assert daemon.asked == 3


def test_any_other_daemon_is_given_up_after_the_timeout(
    tmp_path: Path, trainer: Any, open_session: Any
) -> None:
    daemon = Busy(tmp_path)
    daemon.phase = RestorePhase.INVENTORIES
    session = open_session(trainer, daemon, restore_timeout_s=0.1)
    with pytest.raises(UnreachableError):
        session.restore()
