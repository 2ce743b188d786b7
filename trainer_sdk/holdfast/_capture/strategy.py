"""Strategy of a job's snapshots: what each save captures, and what it records beside the tensors.

The session, the pipeline of a save and the restore hold a strategy always, and never ask which one
it is. `whole` captures everything in each save, `partial` leaves experts out, and `windows` spreads
a snapshot over several saves. The base class captures whatever its subclass chooses, and does
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast._agree.plan import NO_RULES, BasePlan, CaptureRules, moves_of
from holdfast._capture.gradients import NO_GRADIENTS, ExpertGradients
from holdfast._capture.loss import NO_LOSS, Loss
from holdfast._capture.optimizer_steps import NO_STEPS, StepsTaken
from holdfast._capture.partial_state import START, PartialState
from holdfast._copying.engine import CopyPlan
from holdfast._copying.placed import Flags
from holdfast._state.capture import TensorSource
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES, Layout
from holdfast_core.snapshots.manifests import ExpertVersion
from holdfast_core.snapshots.pieces import packed
from holdfast_core.snapshots.units import UnitKey


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCall:
    """A call of `save`, and what its snapshot holds beside tensors."""

    number: int = 0
    """Number of the save among those that the training loop called, equal on all ranks."""
    step: int
    extras: bytes = b""
    optimizer_steps: StepsTaken = NO_STEPS
    """What the optimizers have done since the last save, where a recovery repeats it."""
    replenishing: Replenishing = field(default_factory=Replenishing.start)
    """Lost tokens that this rank still makes up for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaptureChoice:
    """What a save captures, and of which snapshot it is a part."""

    copies: CopyPlan
    nbytes: int
    """Bytes of tensors that it copies."""
    first_step: int = 0
    """Step of the snapshot's first save; 0 where the snapshot is of one step."""
    last_step: int
    """Step of the snapshot's last save, which commits it."""
    resume_step: int
    """Step after which training goes on from the snapshot."""
    left_out: frozenset[UnitKey] = frozenset()
    """Units, of any rank, that it need not capture."""
    base: Generation | None = None
    """Snapshot to carry the pieces of `skip` over from; None where they are just left alone."""
    skip: Flags | None = None
    """Pieces that it does not write: bool [pieces that hold nothing of the extras]; None for
    none."""
    digested: frozenset[UnitKey] = frozenset()
    """Units whose live state is digested, for `record`."""

    @property
    def unchanged(self) -> bytes:
        """Pieces to carry over, in the form of a request for a slot."""
        return b"" if self.base is None or self.skip is None else packed(self.skip)


class CapturedBeforeError(Exception):
    """A save has nothing to capture, because an earlier one has it: it is not taken, and does not
    count as skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRecord:
    """What a complete snapshot holds beside tensors."""

    extras: bytes
    state: PartialState = START
    """State of the policy, behind the extras."""

    @property
    def experts(self) -> tuple[ExpertVersion, ...]:
        """Versions of the experts in the snapshot, for its manifest."""
        return self.state.known_versions


class CaptureStrategy:
    """One rank's strategy. The saver's thread calls it, except where noted."""

    leaves_out = False
    """Whether snapshots may leave experts out, so that tokens are counted."""
    chooses_by_tokens = False
    """Whether which experts a snapshot holds, or in which order, depends on tokens."""
    token_parts = 1
    """Parts of one in which the script's counts are added up."""
    rules: CaptureRules = NO_RULES
    """What the ranks' common plan has to allow for."""

    def __init__(self) -> None:
        self._copies = CopyPlan(piece_bytes=PIECE_BYTES, host_moves=())
        """Copies of all tensors."""
        self._end = 0
        """First byte in the slot behind the state of all units."""

    @property
    def window_steps(self) -> int:
        """Steps of the newest window; 0 where snapshots are of one step. Any thread."""
        return 0

    @property
    def gradients(self) -> ExpertGradients:
        """Gradients that snapshots carry. Any thread."""
        return NO_GRADIENTS

    @property
    def loss(self) -> Loss:
        """Cost of the policy in tokens."""
        return NO_LOSS

    # --- a world ----------------------------------------------------------------------------------

    def state_after_restore(
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
        del state, lost, assigned, epoch, line
        return START

    def resume(self, state: PartialState) -> None:
        """Continue from the state of a restore. For the training thread."""

    def on_agreed(self, plan: BasePlan, sources: Sequence[TensorSource]) -> CaptureStrategy:
        """Begin, once all ranks have agreed on `plan`, by which this rank captures `sources`.
        Return the strategy to continue with: another one where the model has nothing that this one
        is for.

        Raises:
            InvalidJobError: `sources` cannot be captured like this.
        """
        del plan, sources
        return self

    def on_reseated(self, own: frozenset[UnitKey]) -> None:
        """Note that experts have changed ranks, on all ranks before the same save, and that this
        rank captures `own` from now on: no earlier snapshot holds pieces for the next one."""

    def leave(self, number: int, replenishing: Replenishing) -> PartialState:
        """State with which this rank goes on in another world, without a restore, after `number`
        calls of save. After `close`; for the training thread."""
        del number, replenishing
        return START

    def close(self, timeout_s: float) -> None:
        """End what runs beside the saves, within about `timeout_s`. For the training thread."""

    # --- a layout ---------------------------------------------------------------------------------

    def extras_bytes(self, of_save: int) -> int:
        """Room for the extras of a snapshot whose saves have `of_save` bytes each."""
        return of_save

    def shape(self, layout: Layout, sources: Sequence[TensorSource]) -> Layout:
        """`layout` of the tensors and extras, with room for what else snapshots hold."""
        del sources
        self._end = layout.extras_offset
        return layout

    def on_opened(
        self,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        """Use `layout`, which `shape` returned, for all saves from now on."""
        del gradients
        self._copies = moves_of(layout, sources)

    # --- a save, in this order --------------------------------------------------------------------

    def on_save_called(self, number: int, step: int, now_s: float) -> None:
        """Note that save `number` was called, whether or not it is skipped. For the training
        thread."""

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        """Add the tokens that this rank routed since the last call; unknown experts are ignored."""

    def choose(self, call: SaveCall, newest: Generation | None) -> CaptureChoice:
        """Choose what a save captures, with `newest` as the newest committed snapshot.

        Raises:
            CapturedBeforeError: an earlier save has captured everything in place of this one.
            SnapshotSkippedError: when parts of one unit could end up from two saves.
            InvalidJobError: no save can hold what the optimizers do.
        """
        raise NotImplementedError

    def on_granted(self, number: int, choice: CaptureChoice, *, carried: bool) -> CaptureChoice:
        """Note that save `number` has its slot. Return what it really captures.

        Args:
            carried: whether the daemon carries pieces over.

        Raises:
            SnapshotSkippedError: when parts of one unit could end up from two saves.
        """
        del number, carried
        return choice

    def on_staged(
        self, generation: Generation, choice: CaptureChoice, began_s: float, now_s: float
    ) -> None:
        """Note that all bytes of a save are copied, and when; training has not gone on."""

    def record(
        self,
        generation: Generation,
        call: SaveCall,
        choice: CaptureChoice,
        digests: Mapping[UnitKey, int],
    ) -> SnapshotRecord | None:
        """What the snapshot holds beside tensors; None while it takes further saves.

        Args:
            digests: of the units of `choice.digested`.
        """
        del generation, choice, digests
        return SnapshotRecord(extras=call.extras)

    def on_committed(self, record: SnapshotRecord) -> None:
        """Note that the snapshot of `record` is committed."""

    def on_dropped(self) -> None:
        """Note that the snapshot in progress will not be committed."""

    def on_ended(self, number: int) -> None:
        """Note that save `number` is over, however it ended."""

    # --- beside the saves -------------------------------------------------------------------------

    def gradients_due(self, step: int) -> tuple[Schedule, int] | None:
        """Schedule and slot of the save of `step`, when it needs the gradients of that step. For
        the training thread, before the step."""
        del step
        return None

    def on_stalled(self, seconds: float) -> None:
        """Add time that training waited for a snapshot. For the training thread."""

    def on_protected(self, generation: Generation, now_s: float) -> None:
        """Note that a snapshot is protected. Any thread."""

    def want_whole(self, after: int) -> None:
        """Ask that all units be captured in one step after step `after`. Any thread."""

    def _everything(self, step: int) -> CaptureChoice:
        """The choice of all tensors in one save."""
        return CaptureChoice(
            copies=self._copies, nbytes=self._end, last_step=step, resume_step=step
        )
