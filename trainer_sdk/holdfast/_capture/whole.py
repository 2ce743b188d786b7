"""Strategy of snapshots that capture everything in one save: it counts and records nothing."""

from __future__ import annotations

from holdfast._capture.strategy import CaptureChoice, CaptureStrategy, SaveCall
from holdfast_core.snapshots.generations import Generation


class WholeCapture(CaptureStrategy):
    """Strategy that captures every unit in every save."""

    def choose(self, call: SaveCall, newest: Generation | None) -> CaptureChoice:
        del newest
        return self._everything(call.step)
