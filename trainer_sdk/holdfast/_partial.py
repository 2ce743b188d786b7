"""Which experts a snapshot captures, and what is known of the tokens that the others would lose.

One rank's part of the policies `PartialExperts` (PEC §3.1) and `Selective` (MoEtion §4). Where
experts take turns, every rank chooses alike from the number of the snapshot, without a collective;
where tokens decide, from the sum of what all ranks stated after the save before (`_counting`). Each
rank's ledger counts the tokens that it routed itself; lost tokens are added up in a restore, where
K is decided anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from holdfast._counting import Counting
from holdfast._exchange import Exchange
from holdfast._gradients import Gradients
from holdfast._measuring import Measuring
from holdfast._partial_state import PartialState
from holdfast._placed import Flags
from holdfast._settings import Settings
from holdfast_core.agreed_counts import UNKNOWN, AgreedCounts, Mark, Statement
from holdfast_core.expert_ledger import ExpertLedger
from holdfast_core.expert_policies import ExpertPolicy, first_k, k_for_all, select_by_tokens
from holdfast_core.experts import ExpertTable
from holdfast_core.job_snapshots import Selective
from holdfast_core.layouts import Layout
from holdfast_core.loss_reports import LossReport, RecoveryLoss
from holdfast_core.persisted import Run
from holdfast_core.recompute import gradient_pieces
from holdfast_core.replenish import Replenishing
from holdfast_core.selection_pec import select_sequential, sequential_bound
from holdfast_core.sparse_files import runs_of_pieces
from holdfast_core.token_loss import LossAccount
from holdfast_core.units import UnitKey, UnitKind
from holdfast_core.values import Generation

VERSIONS_KEPT = 4
"""Of each expert, in the ledger: more than there are snapshots in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the policy costs in tokens, as fractions of all that were routed."""

    at_risk: float = 0.0
    """What a recovery of the newest snapshot would lose (of this rank's tokens)."""
    at_risk_mlt: float = 0.0
    """The same as MLT (MoEtion eq. 6): the sum of the layers' portions."""
    lost: float = 0.0
    """What recoveries have lost in the job's life (PLT, PEC eq. 4)."""
    lost_mlt: float = 0.0
    """The same as MLT, as of the newest recovery."""
    k: int = 0
    """Experts of each layer in a snapshot; with the policy Selective, of all layers together."""
    report: LossReport | None = None
    """The sums behind these fractions, for the daemon, which adds up those of all ranks."""


NO_LOSS = Loss()


def partial_capture(
    settings: Settings,
    counting: Exchange | None,
    rank: int,
    ranks: int,
    gradients: Gradients | None = None,
) -> PartialCapture | None:
    """What the settings' policy needs; None when every snapshot captures everything.

    Args:
        counting: between all ranks, for nothing else; needed where tokens decide.
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
        self._pieces = Pieces()
        self._counting = counting
        """None when experts take turns."""
        self._wait_s = wait_s
        self.measuring = Measuring()
        self._table: ExpertTable | None = None
        self.own: frozenset[UnitKey] = frozenset()
        """The experts that this rank captures."""
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

    def agreed(self, table: ExpertTable, ranks: int, own: frozenset[UnitKey]) -> None:
        """All `ranks` of the world know what experts there are; this one captures `own`."""
        self._table, self._ranks, self.own = table, ranks, own
        if self._ledger is None or set(self._ledger.tokens) != set(table.units):
            self._ledger = ExpertLedger.start(table.units)
        self._know()
        if self._counting is not None:
            together = self._counting.ranks
            self._counting.start(
                self._first,
                table.units,
                self._statement,
                lambda counts: select_by_tokens(self._policy, table, counts, self._k, together),
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
        """The experts, of any rank, that snapshot `number` need not capture."""
        assert self._table is not None and self._ledger is not None
        missing = self._ledger.uncaptured
        chosen: Collection[UnitKey]
        if self._counting is None:
            turn = select_sequential(self._table, self._k, number, uncaptured=missing).units
            chosen = self._overdue(self._table, self._ledger, number).union(turn)
        else:
            found = self._counting.chosen(number, self._wait_s)
            chosen = self.own if found is None else found.units
            self._counts = self._counts if found is None else found.counts
        self._captured = len(chosen)
        return frozenset(self._table.units).difference(chosen, missing)

    def opened(self, layout: Layout) -> None:
        """Snapshots have this layout from now on."""
        self._pieces = Pieces(layout)

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
        if self._counting is not None:
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

    def _statement(self, number: int) -> Statement:
        tokens, marks = self._known
        measures = self.measuring.measures
        return Statement(number=number, tokens=tokens, marks=marks, measures=measures)

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


class Pieces:
    """The pieces that a snapshot may leave as they are."""

    def __init__(self, layout: Layout | None = None) -> None:
        """None where every snapshot captures everything."""
        self._count = 0 if layout is None else layout.extras_offset // layout.piece_bytes
        self._of = {} if layout is None else _runs(expert_pieces(layout))
        self._gradients = {} if layout is None else _runs(gradient_pieces(layout))

    def left(self, left_out: Collection[UnitKey], with_gradients: Collection[UnitKey]) -> Flags:
        """Those of the experts that are left out, and of gradients that are not wanted."""
        flags = np.zeros(self._count, dtype=bool)
        for unit in left_out:
            for first, end in self._of.get(unit, ()):
                flags[first:end] = True
        for unit, runs in self._gradients.items():
            if unit not in with_gradients:
                for first, end in runs:
                    flags[first:end] = True
        return flags


def _runs(pieces_of: Mapping[UnitKey, frozenset[int]]) -> dict[UnitKey, tuple[Run, ...]]:
    return {unit: runs_of_pieces(pieces) for unit, pieces in pieces_of.items()}


def expert_pieces(layout: Layout) -> dict[UnitKey, frozenset[int]]:
    """For each expert the pieces that hold nothing else."""
    size = layout.piece_bytes
    holds: dict[int, set[str]] = {}
    for entry in layout.entries:
        if entry.nbytes:
            for piece in range(entry.offset // size, (entry.offset + entry.nbytes - 1) // size + 1):
                holds.setdefault(piece, set()).add(entry.unit)
    found: dict[str, set[int]] = {}
    for piece in range(layout.extras_offset // size):
        units = holds.get(piece, ())
        if len(units) == 1:
            found.setdefault(next(iter(units)), set()).add(piece)
    keys = {UnitKey.parse(unit): frozenset(pieces) for unit, pieces in found.items()}
    return {unit: pieces for unit, pieces in keys.items() if unit.kind is UnitKind.EXPERT}
