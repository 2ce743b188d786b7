"""Choice of the experts that a snapshot captures, and count of the tokens that the others risk.

This is one rank's part of every policy that leaves experts out (`LossyPolicy`).
Where experts take turns, every rank makes the same choice from the number of the snapshot, without
a collective; where tokens decide, from the sum of all ranks' statements after the save before
(`_agree.expert_counts`). Each rank's ledger counts the tokens that it routed itself; lost tokens
are added up in a restore, where K is decided anew.

Where several ranks capture parts of one expert, its parts in a generation must be of one step. By
induction they are: a rank leaves its part out only where all ranks stated that they hold parts of
the same save, and only while it still holds what it stated. Otherwise all of them capture their
parts, or the rank skips its save and the generation never becomes complete (decision 0032).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from holdfast._agree.expert_counts import Chosen, ExpertCounts
from holdfast._agree.plan import BasePlan, CaptureRules, table_of
from holdfast._capture.gradients import ExpertGradients
from holdfast._capture.loss import Loss
from holdfast._capture.measuring import Durations
from holdfast._capture.partial_state import START, PartialState
from holdfast._capture.strategy import CaptureChoice, CaptureStrategy, SaveCall, SnapshotRecord
from holdfast._capture.turns import Chooser, Turns
from holdfast._capture.whole import WholeCapture
from holdfast._copying.placed import ExpertPieces
from holdfast._state.capture import TensorSource
from holdfast._state.extras import join_extras
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.experts.counts import NO_COUNTS, NONE_SPREAD, UNKNOWN, CountStatement, Mark
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.tables import NO_EXPERTS, ExpertTable
from holdfast_core.experts.token_loss import portion
from holdfast_core.job.policies.policy import LossyPolicy
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.units import UnitKey

STATEMENTS_KEPT = 8
"""Number of statements kept: more than the choices that a late save can still find."""

VERSIONS_KEPT = 4
"""Versions of each expert kept in the ledger: more than there are snapshots in memory."""


class PartialCapture(CaptureStrategy):
    """Strategy that leaves experts out.

    Args:
        counting: sums of what all ranks state, needed where tokens decide, and where experts are
            spread over ranks.
        wait_s: time that a save waits for the choice of all ranks.
        gradients: gradients to carry, where peers compute the state of experts that stay chosen.
    """

    leaves_out = True
    rules = CaptureRules(partial=True)

    def __init__(
        self,
        policy: LossyPolicy,
        counting: ExpertCounts,
        wait_s: float,
        gradients: ExpertGradients,
    ) -> None:
        super().__init__()
        self._gradients = gradients
        self._policy, self.chooses_by_tokens = policy, policy.needs_counts
        self._pieces = ExpertPieces()
        self._counting = counting
        self._chooser: Chooser = counting
        self._wait_s = wait_s
        self._measuring = Durations()
        self._table = NO_EXPERTS
        self._own: frozenset[UnitKey] = frozenset()
        """Experts that this rank captures, whole or in part."""
        self._parts: frozenset[UnitKey] = frozenset()
        """Experts of which this rank and others capture parts."""
        self._stated: dict[int, Mapping[UnitKey, Mark]] = {}
        """Number of each of the newest saves → marks of `_parts` stated after it."""
        self._ledger = START.ledger
        self._account = START.account
        self._recoveries, self._routed = START.recoveries, START.routed
        self._k = policy.first_k
        self._ranks = counting.ranks
        self._first = 0
        self._marks = START.marks
        """Newest captures that are committed."""
        self._trying = START.marks
        """Marks as they will be if the snapshot in progress is committed."""
        self._known: tuple[Mapping[UnitKey, int], Mapping[UnitKey, Mark]] = ({}, {})
        """Tokens and marks to state; replaced as a whole, because another thread reads it."""
        self._counts = NO_COUNTS
        """Counts by which the newest snapshot was chosen."""
        self._captured = 0
        """Number of experts in the newest choice."""
        self._state_bytes = 0
        """Room in the extras for the policy's state."""

    @property
    def gradients(self) -> ExpertGradients:
        return self._gradients

    def state_after_restore(
        self,
        state: PartialState,
        lost: Sequence[Mapping[str, int]],
        assigned: Sequence[Mapping[str, int]],
        *,
        epoch: int,
        line: Generation,
    ) -> PartialState:
        if state == START:  # the line is of snapshots that captured everything
            return state
        return state.recover(lost, assigned, self._policy, epoch=epoch, line=line)

    def resume(self, state: PartialState) -> None:
        self._ledger, self._account = state.ledger, state.account
        self._recoveries, self._routed = state.recoveries, state.routed
        self._k = max(state.k, self._policy.first_k)
        self._first = state.ledger.snapshots
        self._marks = self._trying = state.marks
        self._measuring = Durations(state.measures)

    def on_agreed(self, plan: BasePlan, sources: Sequence[TensorSource]) -> CaptureStrategy:
        if not plan.experts.units:
            return WholeCapture()
        self._state_bytes = plan.state_bytes
        own = plan.own_experts(table_of(sources))
        self.begin(plan.experts, plan.topology.world_size, own, plan.spread)
        return self

    def begin(
        self,
        table: ExpertTable,
        ranks: int,
        own: frozenset[UnitKey],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> None:
        """Begin with the experts that all `ranks` of the world have agreed on.

        Args:
            own: experts that this rank captures, whole or in part.
            spread: expert → number of ranks that capture parts of it, where more than one does.
        """
        self._table, self._ranks, self._own = table, ranks, own
        self._parts = own.intersection(spread)
        if set(self._ledger.tokens) != set(table.units):
            self._ledger, self._marks = ExpertLedger.start(table.units), {}
            self._routed = replace(self._routed, own=0)
        # Another rank now states the marks of experts that this one captured in an earlier epoch.
        self._marks = {unit: mark for unit, mark in self._marks.items() if unit in own}
        self._settle_marks()
        if not (spread or self._policy.needs_counts):
            self._take_turns()
            return
        together = self._counting.ranks
        self._counting.start(
            self._first,
            table.units,
            self._statement,
            lambda counts: self._policy.select(table, counts, self._k, together),
            spread,
        )

    def on_reseated(self, own: frozenset[UnitKey]) -> None:
        # Other ranks then still state their marks of before, or not: the sum is one for all, and
        # whoever captures an expert now captures it whatever was chosen.
        self._own = own
        self._ledger, self._marks = self._ledger.begun_anew(), {}
        self._settle_marks()
        if isinstance(self._chooser, Turns):
            self._take_turns()

    def _take_turns(self) -> None:
        self._chooser = Turns(self._table, self._own, self._k, lambda: self._ledger)

    def extras_bytes(self, of_save: int) -> int:
        return of_save + self._state_bytes

    def on_opened(
        self,
        layout: Layout,
        sources: Sequence[TensorSource],
        gradients: Sequence[TensorSource],
    ) -> None:
        super().on_opened(layout, sources, gradients)
        self._pieces = ExpertPieces(layout)

    def on_save_called(self, number: int, step: int, now_s: float) -> None:
        self._measuring.on_save_called(step, now_s)
        self._chooser.on_save_called(number)

    def count(self, counts: Mapping[UnitKey, int], assigned: Mapping[int, int]) -> None:
        ledger = self._ledger
        self._ledger = ledger.routed(
            {unit: n for unit, n in counts.items() if unit in ledger.tokens},
            {layer: n for layer, n in assigned.items() if layer in ledger.assignments},
        )

    def choose(self, call: SaveCall, newest: Generation | None) -> CaptureChoice:
        left_out = self._left_out(call.number)
        sent = self.gradients.ready(newest, self._own.difference(left_out))
        carried = self._pieces.left(left_out, sent)
        choice = replace(self._everything(call.step), left_out=left_out)
        if not carried.any():
            return choice
        nbytes = self._end - int(carried.sum()) * self._copies.piece_bytes
        return replace(choice, base=newest, skip=carried, nbytes=nbytes)

    def _left_out(self, number: int) -> frozenset[UnitKey]:
        """Choose the experts, of any rank, that snapshot `number` need not capture.

        Raises:
            SnapshotSkippedError: when this rank lacks a choice that other ranks may have, or has
                changed its marks since it stated them, and it holds parts of experts.
        """
        found = self._chooser.wait_choice(number, self._wait_s)
        if self._parts:
            self._check_choice(number, found)
        chosen: Collection[UnitKey] = self._own
        if found is not None:
            chosen, self._counts = found.units, found.counts
        self._captured = len(chosen)
        return frozenset(self._table.units).difference(chosen, self._ledger.uncaptured)

    def _check_choice(self, number: int, found: Chosen | None) -> None:
        """Raise SnapshotSkippedError when parts of one expert could end up from two saves."""
        if found is None:
            if not self._chooser.no_rank_chooses(number):
                raise SnapshotSkippedError(
                    "the common choice of the ranks did not arrive, and other ranks hold parts of "
                    "this rank's experts"
                )
        elif self._stated.get(number - 1) != self._held():
            raise SnapshotSkippedError(
                "the previous save ended after this rank had reported which versions of experts it "
                "holds, and other ranks hold parts of them"
            )

    def _held(self) -> Mapping[UnitKey, Mark]:
        return {unit: self._marks[unit] for unit in self._parts if unit in self._marks}

    def on_granted(self, number: int, choice: CaptureChoice, *, carried: bool) -> CaptureChoice:
        if not carried:
            left_out = self._not_carried(choice.left_out)
            choice = replace(self._everything(choice.last_step), left_out=left_out)
        taken = self._own.difference(choice.left_out)
        tokens = self._counts.tokens
        new = {unit: Mark(number, tokens.get(unit, 0)) for unit in taken}
        self._trying = {**self._marks, **new}
        self._note_known()
        # Parts are stated only when the save has ended, because other ranks choose by statements.
        if not self._parts:
            self._chooser.on_save_decided(number)
        return choice

    def _not_carried(self, left_out: frozenset[UnitKey]) -> frozenset[UnitKey]:
        """Experts that are left out even where the daemon carries nothing over: those of other
        ranks.

        Raises:
            SnapshotSkippedError: when this rank would capture parts of experts that other ranks
                leave out. It then states that it holds nothing, so the next save captures all
                parts.
        """
        if not self._parts.isdisjoint(left_out):
            self._marks = {u: m for u, m in self._marks.items() if u not in self._parts}
            raise SnapshotSkippedError(
                "nothing of the previous snapshot can be carried over, and other ranks leave out "
                "their parts of experts; the next save captures all of them"
            )
        return left_out - self._own

    def on_stalled(self, seconds: float) -> None:
        self._measuring.add_stall(seconds)

    def on_staged(
        self, generation: Generation, choice: CaptureChoice, began_s: float, now_s: float
    ) -> None:
        self.gradients.on_captured(generation, self._own.difference(choice.left_out))
        self._measuring.on_copied(generation, choice.nbytes, began_s, now_s)

    def record(
        self,
        generation: Generation,
        call: SaveCall,
        choice: CaptureChoice,
        digests: Mapping[UnitKey, int],
    ) -> SnapshotRecord:
        del digests
        taken = [unit for unit in self._ledger.tokens if unit not in choice.left_out]
        ledger = replace(self._ledger, snapshots=call.number)
        state = PartialState(
            ledger=ledger.captured(generation, taken, keep=VERSIONS_KEPT),
            account=self._account,
            k=self._k,
            recoveries=self._recoveries,
            marks=self._trying,
            measures=self._measuring.measures,
            replenishing=call.replenishing,
            routed=self._routed,
        )
        return SnapshotRecord(extras=join_extras(call.extras, state.encode()), state=state)

    def on_committed(self, record: SnapshotRecord) -> None:
        self._ledger, self._marks = record.state.ledger, record.state.marks

    def on_ended(self, number: int) -> None:
        self._settle_marks()
        self._chooser.on_save_decided(number)

    def on_protected(self, generation: Generation, now_s: float) -> None:
        self._measuring.on_protected(generation, now_s)

    def close(self, timeout_s: float) -> None:
        self._chooser.close(timeout_s)

    def leave(self, number: int, replenishing: Replenishing) -> PartialState:
        return PartialState(
            ledger=replace(self._ledger.begun_anew(), snapshots=number),
            account=self._account,
            k=self._k,
            recoveries=self._recoveries,
            marks={},
            measures=UNKNOWN,
            replenishing=replenishing,
            routed=self._routed,
        )

    def _settle_marks(self) -> None:
        """Note that no snapshot is in progress."""
        self._trying = self._marks
        self._note_known()

    def _note_known(self) -> None:
        """Set what the counting thread states, as of the save in progress, until the next call."""
        self._known = (self._ledger.tokens, self._trying)

    def _statement(self, number: int) -> CountStatement:
        tokens, marks = self._known
        self._stated[number] = {unit: marks[unit] for unit in self._parts if unit in marks}
        self._stated.pop(number - STATEMENTS_KEPT, None)
        measures = self._measuring.measures
        return CountStatement(number=number, tokens=tokens, marks=marks, measures=measures)

    @property
    def loss(self) -> Loss:
        ledger = self._ledger
        if not ledger.tokens:
            return Loss(k=self._k)
        k, experts_max = self._policy.shown_k(self._k, self._captured, ledger.tokens)
        report = LossReport.of_rank(
            ledger,
            self._account,
            self._recoveries,
            k=k,
            experts_max=experts_max,
            limit=self._policy.loss_limit,
        )
        return Loss(
            at_risk=report.risk.plt,
            at_risk_mlt=report.risk.mlt,
            lost=portion(sum(report.lost), self._routed.estimate(sum(report.routed), self._ranks)),
            lost_mlt=report.newest.total_mlt if report.newest else 0.0,
            k=k,
            report=report,
        )
