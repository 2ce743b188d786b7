"""Choice of the experts that a snapshot captures, and count of the tokens that the others risk.

This is one rank's part of the policies `PartialExperts` (PEC §3.1) and `Selective` (MoEtion §4).
Where experts take turns, every rank makes the same choice from the number of the snapshot, without
a collective; where tokens decide, from the sum of all ranks' statements after the save before
(`_experts.counting`). Each rank's ledger counts the tokens that it routed itself; lost tokens are
added up in a restore, where K is decided anew.

Where several ranks capture parts of one expert, its parts in a generation must be of one step. By
induction they are: a rank leaves its part out only where all ranks stated that they hold parts of
the same save, and only while it still holds what it stated. Otherwise all of them capture their
parts, or the rank skips its save and the generation never becomes complete (decision 0032).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from holdfast._copying.placed import ExpertPieces, Flags
from holdfast._exchange import Exchange
from holdfast._experts.counting import Chosen, Counting
from holdfast._experts.gradients import Gradients
from holdfast._experts.loss import Loss
from holdfast._experts.measuring import Measuring
from holdfast._experts.partial_state import PartialState
from holdfast._settings import Settings
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.experts.counts import NONE_SPREAD, UNKNOWN, AgreedCounts, CountStatement, Mark
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.loss_reports import LossReport, RecoveryLoss
from holdfast_core.experts.pec import select_sequential, sequential_bound
from holdfast_core.experts.policies import (
    ExpertPolicy,
    first_k,
    k_for_all,
    needs_counts,
    select_by_counts,
)
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.experts.token_loss import LossAccount
from holdfast_core.job.snapshots import Selective
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.units import UnitKey

STATEMENTS_KEPT = 8
"""Number of statements kept: more than the choices that a late save can still find."""

VERSIONS_KEPT = 4
"""Versions of each expert kept in the ledger: more than there are snapshots in memory."""


def partial_capture(
    settings: Settings,
    counting: Exchange | None,
    rank: int,
    ranks: int,
    gradients: Gradients | None = None,
) -> PartialCapture | None:
    """Make the capture for the settings' policy; None when every snapshot captures everything.

    Args:
        counting: exchange between all ranks, used for nothing else; needed where tokens decide, and
            where experts are spread over ranks.
        gradients: gradients to carry, where peers compute the state of experts that stay chosen.
    """
    policy = settings.experts
    if policy is None:
        return None
    # Half of it, because the training thread gives up a save that does not begin within all of it.
    wait_s = settings.start_wait_s / 2
    adds = Counting(counting, rank, ranks) if counting is not None else None
    return PartialCapture(policy, adds, wait_s, gradients)


class PartialCapture:
    """Policy of one rank on the saver's side: used by one thread after `agreed`, except where
    noted."""

    def __init__(
        self,
        policy: ExpertPolicy,
        counting: Counting | None,
        wait_s: float,
        gradients: Gradients | None = None,
    ) -> None:
        self._policy = policy
        self._gradients = gradients
        self._pieces = ExpertPieces()
        self._counting = counting
        """Thread that adds up counts; None when experts take turns and one rank captures each."""
        self._wait_s = wait_s
        self.measuring = Measuring()
        self._table: ExpertTable | None = None
        self.own: frozenset[UnitKey] = frozenset()
        """Experts that this rank captures, whole or in part."""
        self._parts: frozenset[UnitKey] = frozenset()
        """Experts of which this rank and others capture parts."""
        self._stated: dict[int, Mapping[UnitKey, Mark]] = {}
        """Number of each of the newest saves → marks of `_parts` stated after it."""
        self._ledger: ExpertLedger | None = None
        self._account = LossAccount.start()
        self._recoveries: tuple[RecoveryLoss, ...] = ()
        self._k = first_k(policy)
        self._ranks = 1
        self._first = 0
        self._marks: Mapping[UnitKey, Mark] = {}
        self._trying: Mapping[UnitKey, Mark] | None = None
        """Marks as they will be if the snapshot in progress is committed."""
        self._known: tuple[Mapping[UnitKey, int], Mapping[UnitKey, Mark]] = ({}, {})
        """Tokens and marks to state; replaced as a whole, because another thread reads it."""
        self._counts: AgreedCounts | None = None
        """Counts by which the newest snapshot was chosen."""
        self._captured = 0
        """Number of experts in the newest choice."""

    def agreed(
        self,
        table: ExpertTable,
        ranks: int,
        own: frozenset[UnitKey],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> None:
        """Begin the policy, once all `ranks` of the world have agreed on the experts.

        Args:
            own: experts that this rank captures, whole or in part.
            spread: expert → number of ranks that capture parts of it, where more than one does.
        """
        self._table, self._ranks, self.own = table, ranks, own
        self._parts = own.intersection(spread)
        if self._ledger is None or set(self._ledger.tokens) != set(table.units):
            self._ledger, self._marks = ExpertLedger.start(table.units), {}
        # Another rank now states the marks of experts that this one captured in an earlier epoch.
        self._marks = {unit: mark for unit, mark in self._marks.items() if unit in own}
        if not (spread or needs_counts(self._policy)):
            self._counting = None
        assert self._counting is not None or not spread
        self._know()
        if self._counting is not None:
            together = self._counting.ranks
            self._counting.start(
                self._first,
                table.units,
                self._statement,
                lambda counts: select_by_counts(self._policy, table, counts, self._k, together),
                spread,
            )

    def resume(self, state: PartialState | None) -> None:
        """Continue from the state of a restore; None for a fresh start."""
        self._ledger = state.ledger if state else None
        self._account = state.account if state else LossAccount.start()
        self._recoveries = state.recoveries if state else ()
        self._k = max(state.k if state else 0, first_k(self._policy))
        self._first = state.ledger.snapshots if state else 0
        self._marks = state.marks if state else {}
        self.measuring = Measuring(state.measures if state else UNKNOWN)

    def count(self, counts: Mapping[UnitKey, int], assignments: Mapping[int, int]) -> None:
        """Add the tokens that this rank routed since the last call; unknown experts are ignored."""
        if self._ledger is None:
            return
        ledger = self._ledger
        self._ledger = ledger.routed(
            {unit: n for unit, n in counts.items() if unit in ledger.tokens},
            {layer: n for layer, n in assignments.items() if layer in ledger.assignments},
        )

    def called(self, number: int, step: int, now_s: float) -> None:
        """Note that save `number` was called, whether or not it was skipped. For the training
        thread."""
        self.measuring.saved(step, now_s)
        if self._counting is not None:
            self._counting.called(number)

    def left_out(self, number: int) -> frozenset[UnitKey]:
        """Choose the experts, of any rank, that snapshot `number` need not capture.

        Raises:
            SnapshotSkippedError: when this rank lacks a choice that other ranks may have, or has
                changed its marks since it stated them, and it holds parts of experts.
        """
        assert self._table is not None and self._ledger is not None
        missing = self._ledger.uncaptured
        chosen: Collection[UnitKey]
        if self._counting is None:
            turn = select_sequential(self._table, self._k, number, uncaptured=missing).units
            chosen = self._overdue(self._table, self._ledger, number).union(turn)
        else:
            found = self._counting.chosen(number, self._wait_s)
            if self._parts:
                self._check_choice(number, self._counting, found)
            chosen = self.own if found is None else found.units
            self._counts = self._counts if found is None else found.counts
        self._captured = len(chosen)
        return frozenset(self._table.units).difference(chosen, missing)

    def _check_choice(self, number: int, counting: Counting, found: Chosen | None) -> None:
        """Raise SnapshotSkippedError when parts of one expert could end up from two saves."""
        if found is None:
            if not counting.nobody_chooses(number):
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

    def not_carried(self, left_out: frozenset[UnitKey]) -> frozenset[UnitKey]:
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
        return left_out - self.own

    def opened(self, layout: Layout) -> None:
        """Use `layout` for all snapshots from now on."""
        self._pieces = ExpertPieces(layout)

    def pieces(self, left_out: Collection[UnitKey], newest: Generation | None) -> Flags:
        """Flag the pieces that a snapshot without the `left_out` experts keeps as they are in
        `newest`: bool [pieces that hold nothing of the extras]."""
        wanted: Collection[UnitKey] = ()
        if self._gradients is not None:
            wanted = self._gradients.ready(newest, self.own.difference(left_out))
        return self._pieces.left(left_out, wanted)

    def staged(self, generation: Generation, left_out: Collection[UnitKey]) -> None:
        """Note that all bytes of a snapshot are copied; training has not gone on."""
        if self._gradients is not None:
            self._gradients.captured(generation, self.own.difference(left_out))

    def _overdue(self, table: ExpertTable, ledger: ExpertLedger, number: int) -> set[UnitKey]:
        """Experts of this rank whose turn was in a save that it skipped. Without them, experts
        whose turn is skipped again and again would never be captured."""
        return {
            expert.unit
            for layer in table.layers
            for expert in layer.experts
            if expert.unit in self.own
            and (held := ledger.versions[expert.unit])
            and number - held[-1].number > sequential_bound(layer, self._k)
        }

    def attempt(self, number: int, left_out: Collection[UnitKey]) -> None:
        """Note that snapshot `number` has a slot, and captures all experts of this rank but
        `left_out`."""
        known = self._counts.tokens if self._counts is not None else {}
        taken = self.own.difference(left_out)
        self._trying = {
            **self._marks,
            **{unit: Mark(number, known.get(unit, 0)) for unit in taken},
        }
        self._know()
        # Parts are stated only when the save has ended, because other ranks choose by statements.
        if self._counting is not None and not self._parts:
            self._counting.attempted(number)

    def ended(self, number: int) -> None:
        """Note that snapshot `number` is committed, or never will be."""
        self._trying = None
        self._know()
        if self._counting is not None:
            self._counting.attempted(number)

    def captured(
        self,
        generation: Generation,
        number: int,
        left_out: Collection[UnitKey],
        replenishing: Replenishing,
    ) -> PartialState:
        """State as of a snapshot that captures all experts but `left_out`; `keep` makes it
        current."""
        assert self._ledger is not None
        taken = [unit for unit in self._ledger.tokens if unit not in left_out]
        ledger = replace(self._ledger, snapshots=number)
        return PartialState(
            ledger=ledger.captured(generation, taken, keep=VERSIONS_KEPT),
            account=self._account,
            k=self._k,
            recoveries=self._recoveries,
            marks=self._marks if self._trying is None else self._trying,
            measures=self.measuring.measures,
            replenishing=replenishing,
        )

    def keep(self, state: PartialState) -> None:
        """Make `state` current, once its snapshot is committed."""
        self._ledger, self._marks = state.ledger, state.marks

    def close(self, timeout_s: float) -> None:
        """End the thread that counts, within about `timeout_s`."""
        if self._counting is not None:
            self._counting.close(timeout_s)

    def _know(self) -> None:
        """Set what the counting thread states, as of the save in progress, until the next call."""
        marks = self._marks if self._trying is None else self._trying
        self._known = (self._ledger.tokens if self._ledger else {}, marks)

    def _statement(self, number: int) -> CountStatement:
        tokens, marks = self._known
        self._stated[number] = {unit: marks[unit] for unit in self._parts if unit in marks}
        self._stated.pop(number - STATEMENTS_KEPT, None)
        measures = self.measuring.measures
        return CountStatement(number=number, tokens=tokens, marks=marks, measures=measures)

    @property
    def loss(self) -> Loss:
        ledger = self._ledger
        if ledger is None:
            return Loss(k=self._k)
        k, experts_max = self._k, k_for_all(self._policy, ledger.tokens)
        if isinstance(self._policy, Selective):  # K is a factor, which means little to people
            k, experts_max = max(self._captured, 1), len(ledger.tokens)
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
            lost=report.plt_of(self._ranks),
            lost_mlt=report.newest.total_mlt if report.newest else 0.0,
            k=k,
            report=report,
        )
