"""Which experts a snapshot captures, and what is known of the tokens that the others would lose.

One rank's part of the policies `PartialExperts` (PEC §3.1) and `Selective` (MoEtion §4). Where
experts take turns, every rank chooses alike from the number of the snapshot, without a collective;
where tokens decide, from the sum of what all ranks stated after the save before (`_counting`). Each
rank's ledger counts the tokens that it routed itself; lost tokens are added up in a restore, where
K is decided anew.

Where several ranks capture parts of one expert, its parts in a snapshot of all ranks must be of one
step. By induction they are: a rank leaves its part out only where all ranks stated that they hold
parts of the same save, and only while it still holds what it stated; otherwise all of them capture
their parts, or the rank skips its save, and no snapshot of all ranks comes of it (decision 0032).
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
"""More than there are choices that a late save can still find."""


VERSIONS_KEPT = 4
"""Of each expert, in the ledger: more than there are snapshots in memory."""


def partial_capture(
    settings: Settings,
    counting: Exchange | None,
    rank: int,
    ranks: int,
    gradients: Gradients | None = None,
) -> PartialCapture | None:
    """What the settings' policy needs; None when every snapshot captures everything.

    Args:
        counting: between all ranks, for nothing else; needed where tokens decide, and where
            experts are spread over ranks.
        gradients: where peers compute the state of experts that stay chosen.
    """
    policy = settings.experts
    if policy is None:
        return None
    # No longer: the training thread gives up a save that does not begin in the whole of it.
    wait_s = settings.start_wait_s / 2
    adds = Counting(counting, rank, ranks) if counting is not None else None
    return PartialCapture(policy, adds, wait_s, gradients)


class PartialCapture:
    """The saver's side: used by one thread after `agreed`, except where noted."""

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
        """None when experts take turns and one rank captures each."""
        self._wait_s = wait_s
        self.measuring = Measuring()
        self._table: ExpertTable | None = None
        self.own: frozenset[UnitKey] = frozenset()
        """The experts that this rank captures."""
        self._parts: frozenset[UnitKey] = frozenset()
        """Those of them that other ranks capture parts of as well."""
        self._stated: dict[int, Mapping[UnitKey, Mark]] = {}
        """What was said of `_parts` after each of the newest saves."""
        self._ledger: ExpertLedger | None = None
        self._account = LossAccount.start()
        self._recoveries: tuple[RecoveryLoss, ...] = ()
        self._k = first_k(policy)
        self._ranks = 1
        self._first = 0
        self._marks: Mapping[UnitKey, Mark] = {}
        self._trying: Mapping[UnitKey, Mark] | None = None
        """The marks as they will be if the snapshot in progress is committed."""
        self._known: tuple[Mapping[UnitKey, int], Mapping[UnitKey, Mark]] = ({}, {})
        """Tokens and marks to state; replaced as a whole, because another thread reads it."""
        self._counts: AgreedCounts | None = None
        """What the newest snapshot was chosen by."""
        self._captured = 0
        """Experts of the newest choice."""

    def agreed(
        self,
        table: ExpertTable,
        ranks: int,
        own: frozenset[UnitKey],
        spread: Mapping[UnitKey, int] = NONE_SPREAD,
    ) -> None:
        """All `ranks` of the world know what experts there are; this one captures `own`, or parts
        of them.

        Args:
            spread: how many ranks capture a part, of each expert of which more than one does.
        """
        self._table, self._ranks, self.own = table, ranks, own
        self._parts = own.intersection(spread)
        if self._ledger is None or set(self._ledger.tokens) != set(table.units):
            self._ledger, self._marks = ExpertLedger.start(table.units), {}
        # Of one that it captured in an earlier epoch, another rank speaks now.
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
        """Go on from what a restore found; None for a fresh start."""
        self._ledger = state.ledger if state else None
        self._account = state.account if state else LossAccount.start()
        self._recoveries = state.recoveries if state else ()
        self._k = max(state.k if state else 0, first_k(self._policy))
        self._first = state.ledger.snapshots if state else 0
        self._marks = state.marks if state else {}
        self.measuring = Measuring(state.measures if state else UNKNOWN)

    def count(self, counts: Mapping[UnitKey, int], assignments: Mapping[int, int]) -> None:
        """Tokens that this rank routed since the last call; unknown experts are left out."""
        if self._ledger is None:
            return
        ledger = self._ledger
        self._ledger = ledger.routed(
            {unit: n for unit, n in counts.items() if unit in ledger.tokens},
            {layer: n for layer, n in assignments.items() if layer in ledger.assignments},
        )

    def called(self, number: int, step: int, now_s: float) -> None:
        """Save `number` was called, skipped or not. For the training thread."""
        self.measuring.saved(step, now_s)
        if self._counting is not None:
            self._counting.called(number)

    def left_out(self, number: int) -> frozenset[UnitKey]:
        """The experts, of any rank, that snapshot `number` need not capture.

        Raises:
            SnapshotSkippedError: this rank cannot choose as others may, and holds parts of experts.
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
        """Raises SnapshotSkippedError when parts of one expert could come to be of two saves."""
        if found is None:
            if not counting.nobody_chooses(number):
                raise SnapshotSkippedError(
                    "the choice of all ranks is not there, and other ranks hold parts of this "
                    "rank's experts"
                )
        elif self._stated.get(number - 1) != self._held():
            raise SnapshotSkippedError(
                "the save before ended after this rank had said which versions of experts it "
                "holds, and other ranks hold parts of them"
            )

    def _held(self) -> Mapping[UnitKey, Mark]:
        return {unit: self._marks[unit] for unit in self._parts if unit in self._marks}

    def not_carried(self, left_out: frozenset[UnitKey]) -> frozenset[UnitKey]:
        """What is left out all the same where the daemon carries nothing over.

        Raises:
            SnapshotSkippedError: this rank would capture parts of experts that others leave out.
                They learn that it holds nothing, and the next save captures all parts.
        """
        if not self._parts.isdisjoint(left_out):
            self._marks = {u: m for u, m in self._marks.items() if u not in self._parts}
            raise SnapshotSkippedError(
                "nothing of the snapshot before can be carried over, and other ranks leave out "
                "their parts of experts; the next save captures all of them"
            )
        return left_out - self.own

    def opened(self, layout: Layout) -> None:
        """Snapshots have this layout from now on."""
        self._pieces = ExpertPieces(layout)

    def pieces(self, left_out: Collection[UnitKey], newest: Generation | None) -> Flags:
        """What a snapshot that captures all experts but these leaves as it is in `newest`: bool
        [pieces that hold nothing of the extras]."""
        wanted: Collection[UnitKey] = ()
        if self._gradients is not None:
            wanted = self._gradients.ready(newest, self.own.difference(left_out))
        return self._pieces.left(left_out, wanted)

    def staged(self, generation: Generation, left_out: Collection[UnitKey]) -> None:
        """All bytes of a snapshot are copied; training has not gone on."""
        if self._gradients is not None:
            self._gradients.captured(generation, self.own.difference(left_out))

    def _overdue(self, table: ExpertTable, ledger: ExpertLedger, number: int) -> set[UnitKey]:
        """The experts of this rank whose turn was in a save that it skipped. Saves that are skipped
        again and again in the same turn would starve them."""
        return {
            expert.unit
            for layer in table.layers
            for expert in layer.experts
            if expert.unit in self.own
            and (held := ledger.versions[expert.unit])
            and number - held[-1].number > sequential_bound(layer, self._k)
        }

    def attempt(self, number: int, left_out: Collection[UnitKey]) -> None:
        """Snapshot `number` has a place, and captures all experts of this rank but these."""
        known = self._counts.tokens if self._counts is not None else {}
        taken = self.own.difference(left_out)
        self._trying = {
            **self._marks,
            **{unit: Mark(number, known.get(unit, 0)) for unit in taken},
        }
        self._know()
        # Of parts it is said only when the save has ended: by what was said, others choose theirs.
        if self._counting is not None and not self._parts:
            self._counting.attempted(number)

    def ended(self, number: int) -> None:
        """Snapshot `number` is committed, or never will be."""
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
        """The state as of a snapshot that captures all experts but these; `keep` makes it ours."""
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
        """The snapshot of `state` is committed."""
        self._ledger, self._marks = state.ledger, state.marks

    def close(self, timeout_s: float) -> None:
        """End the thread that counts, within about `timeout_s`."""
        if self._counting is not None:
            self._counting.close(timeout_s)

    def _know(self) -> None:
        """Let the counting thread state what is known of the save in progress, and no more until
        that is known of the next one."""
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
        if isinstance(self._policy, Selective):  # K is a factor, which says little to people
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
