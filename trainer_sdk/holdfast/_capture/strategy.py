"""One rank's part of a snapshot policy: what the session, the saver and the restore ask.

They hold a policy always, and never ask which one it is. `FullCapture` is the policy of a job whose
snapshots capture everything; `_capture.partial` has the part of those that leave experts out. What
differs between the latter, which experts they choose, is in `holdfast_core.experts.policies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast._capture.gradients import NO_GRADIENTS, ExpertGradients
from holdfast._capture.loss import NO_LOSS, Loss
from holdfast._capture.partial_state import START, PartialState
from holdfast._copying.placed import Flags
from holdfast_core.experts.counts import NONE_SPREAD
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.pieces import packed
from holdfast_core.snapshots.units import UnitKey


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaptureChoice:
    """What a snapshot does not capture."""

    left_out: frozenset[UnitKey] = frozenset()
    """Experts of any rank that need not be captured."""
    base: Generation | None = None
    """Snapshot to carry pieces over from; None when all pieces are written."""
    carried: Flags | None = None
    """Pieces to carry over: bool [pieces that hold nothing of the extras]; None for none."""

    @property
    def unchanged(self) -> bytes:
        """`carried` in the form of a request for a slot."""
        return b"" if self.carried is None else packed(self.carried)

    @property
    def carried_pieces(self) -> int:
        """Number of pieces to carry over."""
        return 0 if self.carried is None else int(self.carried.sum())


EVERYTHING = CaptureChoice()


class CapturePolicy(Protocol):
    """One rank's part of a policy. The saver's thread calls it, except where noted."""

    @property
    def leaves_out(self) -> bool:
        """Whether snapshots may leave experts out, so that tokens are counted. Any thread."""

    @property
    def gradients(self) -> ExpertGradients:
        """Gradients that snapshots carry. Any thread."""

    @property
    def loss(self) -> Loss:
        """Cost of the policy in tokens."""

    # --- before the first save --------------------------------------------------------------------

    def recovered(
        self,
        state: PartialState,
        lost: Sequence[Mapping[str, int]],
        assigned: Sequence[Mapping[str, int]],
        *,
        epoch: int,
        line: Generation,
    ) -> PartialState:
        """State to continue with after a restore; see `PartialState.recovered`. For the training
        thread."""

    def resume(self, state: PartialState) -> None:
        """Continue from the state of a restore. For the training thread."""

    def agreed(
        self,
        table: ExpertTable,
        ranks: int,
        own: frozenset[UnitKey],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> CapturePolicy:
        """Begin, once all `ranks` of the world have agreed on the experts that may be left out.
        Return the policy to go on with: another one where there are no such experts.

        Args:
            own: experts that this rank captures, whole or in part.
            spread: expert → number of ranks that capture parts of it, where more than one does.
        """

    def reseated(self, own: frozenset[UnitKey]) -> None:
        """Note that experts have changed ranks, on all ranks before the same save, and that this
        rank captures `own` from now on: no snapshot of before holds pieces for the next one."""

    # --- a save, in this order --------------------------------------------------------------------

    def called(self, number: int, step: int, now_s: float) -> None:
        """Note that save `number` was called, whether or not it was skipped. For the training
        thread."""

    def count(self, counts: Mapping[UnitKey, int], assignments: Mapping[int, int]) -> None:
        """Add the tokens that this rank routed since the last call; unknown experts are ignored."""

    def opened(self, layout: Layout) -> None:
        """Use `layout` for all snapshots from now on."""

    def choose(self, number: int, newest: Generation | None) -> CaptureChoice:
        """Choose what snapshot `number` need not capture, with `newest` as the newest committed
        snapshot.

        Raises:
            SnapshotSkippedError: when parts of one expert could end up from two saves.
        """

    def granted(self, number: int, choice: CaptureChoice, *, carried: bool) -> CaptureChoice:
        """Note that snapshot `number` has a slot. Return what it really leaves out.

        Args:
            carried: whether the daemon carries the pieces over.

        Raises:
            SnapshotSkippedError: when parts of one expert could end up from two saves.
        """

    def stalled(self, seconds: float) -> None:
        """Add time that training waited for a snapshot. For the training thread."""

    def staged(self, generation: Generation, choice: CaptureChoice) -> None:
        """Note that all bytes of a snapshot are copied; training has not gone on."""

    def copied(self, generation: Generation, nbytes: int, began_s: float, now_s: float) -> None:
        """Note the bytes of a snapshot that were copied, and when."""

    def captured(
        self,
        generation: Generation,
        number: int,
        choice: CaptureChoice,
        replenishing: Replenishing,
    ) -> PartialState:
        """State as of this snapshot, to be recorded in it; `keep` makes it current."""

    def keep(self, state: PartialState) -> None:
        """Make `state` current, once its snapshot is committed."""

    def ended(self, number: int) -> None:
        """Note that snapshot `number` is committed, or never will be."""

    def protected(self, generation: Generation, now_s: float) -> None:
        """Note that a snapshot is protected. Any thread."""

    def close(self, timeout_s: float) -> None:
        """End what runs beside the saves, within about `timeout_s`. For the training thread."""

    def kept(self, number: int, replenishing: Replenishing) -> PartialState:
        """State with which this rank goes on in another world, without a restore, after `number`
        calls of save. After `close`; for the training thread."""


class FullCapture:
    """Policy of snapshots that capture everything: it chooses, counts and records nothing."""

    leaves_out = False
    gradients: ExpertGradients = NO_GRADIENTS
    loss = NO_LOSS

    def recovered(
        self,
        state: PartialState,
        lost: Sequence[Mapping[str, int]],
        assigned: Sequence[Mapping[str, int]],
        *,
        epoch: int,
        line: Generation,
    ) -> PartialState:
        return START

    def resume(self, state: PartialState) -> None:
        pass

    def agreed(
        self,
        table: ExpertTable,
        ranks: int,
        own: frozenset[UnitKey],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> CapturePolicy:
        return self

    def reseated(self, own: frozenset[UnitKey]) -> None:
        pass

    def called(self, number: int, step: int, now_s: float) -> None:
        pass

    def count(self, counts: Mapping[UnitKey, int], assignments: Mapping[int, int]) -> None:
        pass

    def opened(self, layout: Layout) -> None:
        pass

    def choose(self, number: int, newest: Generation | None) -> CaptureChoice:
        return EVERYTHING

    def granted(self, number: int, choice: CaptureChoice, *, carried: bool) -> CaptureChoice:
        return EVERYTHING

    def stalled(self, seconds: float) -> None:
        pass

    def staged(self, generation: Generation, choice: CaptureChoice) -> None:
        pass

    def copied(self, generation: Generation, nbytes: int, began_s: float, now_s: float) -> None:
        pass

    def captured(
        self,
        generation: Generation,
        number: int,
        choice: CaptureChoice,
        replenishing: Replenishing,
    ) -> PartialState:
        return START

    def keep(self, state: PartialState) -> None:
        pass

    def ended(self, number: int) -> None:
        pass

    def protected(self, generation: Generation, now_s: float) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass

    def kept(self, number: int, replenishing: Replenishing) -> PartialState:
        return START
