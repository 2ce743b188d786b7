"""State of a policy that leaves experts out, as recorded in a snapshot and changed by a recovery.

All of it is training state: it travels in the extras of each snapshot, as of that snapshot, so
after a recovery it belongs to the restored step. Lost tokens are added up over all ranks in a
restore.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import msgspec

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.counts import UNKNOWN, Mark, Measures
from holdfast_core.experts.dynamic_k import next_k
from holdfast_core.experts.ledger import ExpertLedger, Version, merge_counts
from holdfast_core.experts.loss_reports import RECOVERIES_KEPT, RecoveryLoss
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.experts.token_loss import (
    NO_ROUTED_TOKENS,
    LossAccount,
    RoutedTokens,
    recovery_loss,
)
from holdfast_core.job.policies.policy import LossyPolicy
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.manifests import ExpertVersion
from holdfast_core.snapshots.units import UnitKey, UnitKind

_log = logging.getLogger("holdfast")

_UNREADABLE = (
    AttributeError,
    InvalidJobError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)
"""Errors that values of the wrong kind lead to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialState:
    """State of the policy as of one snapshot."""

    ledger: ExpertLedger
    account: LossAccount
    k: int
    marks: Mapping[UnitKey, Mark]
    """Marks of the experts that this rank captures; used by policies that choose by tokens."""
    measures: Measures
    replenishing: Replenishing
    """Lost tokens that this rank still makes up for."""
    recoveries: tuple[RecoveryLoss, ...] = ()
    """Newest recoveries of the job's life, oldest first."""
    routed: RoutedTokens = NO_ROUTED_TOKENS
    """Tokens that all ranks had routed as of the newest recovery."""

    def encode(self) -> bytes:
        """Encode the state for the extras, as MessagePack: plain values need no codec that keeps
        every type. Empty for `START`, so that the extras of such a snapshot have no such part."""
        if self == START:
            return b""
        return msgspec.msgpack.encode(self.to_dict())

    @classmethod
    def decode(cls, data: bytes) -> PartialState:
        """Decode what `encode` wrote. Raises CorruptError for other bytes."""
        if not data:
            return START
        try:
            found = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(f"the state of the experts cannot be read: {error}") from error
        return cls.from_dict(found)

    def to_dict(self) -> dict[str, Any]:
        """Convert the state to plain values."""
        return {
            "ledger": self.ledger.to_dict(),
            "account": self.account.to_dict(),
            "k": self.k,
            "recoveries": [each.to_dict() for each in self.recoveries],
            "marks": {str(unit): [m.number, m.tokens] for unit, m in self.marks.items()},
            "measures": list(astuple(self.measures)),
            "replenishing": self.replenishing.to_dict(),
            "routed": [self.routed.of_all, self.routed.own],
        }

    @classmethod
    def from_dict(cls, found: Any) -> PartialState:
        """Convert the result of `to_dict` back. Raises CorruptError for other values."""
        try:
            of_all, own = found.get("routed", (0, 0))
            return cls(
                ledger=ExpertLedger.from_dict(found["ledger"]),
                account=LossAccount.from_dict(found["account"]),
                k=int(found["k"]),
                recoveries=tuple(map(RecoveryLoss.from_dict, found.get("recoveries", ()))),
                marks={
                    UnitKey.parse(unit): Mark(int(number), int(tokens))
                    for unit, (number, tokens) in found.get("marks", {}).items()
                },
                measures=Measures(*map(int, found.get("measures", ()))),
                replenishing=Replenishing.from_dict(found["replenishing"]),
                routed=RoutedTokens(of_all=int(of_all), own=int(own)),
            )
        except _UNREADABLE as error:
            raise CorruptError(f"the state of the experts cannot be read: {error!r}") from error

    # --- a recovery, agreed by all ranks ----------------------------------------------------------

    @property
    def known_versions(self) -> tuple[ExpertVersion, ...]:
        """Newest version of each expert that this rank's ledger has."""
        return tuple(
            ExpertVersion(
                unit=str(unit),
                generation=held[-1].generation,
                number=held[-1].number,
                tokens=held[-1].tokens,
            )
            for unit, held in self.ledger.versions.items()
            if held
        )

    def with_versions(self, kept: Iterable[ExpertVersion]) -> PartialState:
        """Add versions that storage has kept and the ledger has forgotten."""
        found: dict[UnitKey, list[Version]] = {}
        for each in kept:
            version = Version(each.generation, each.number, each.tokens)
            found.setdefault(UnitKey.parse(each.unit), []).append(version)
        return replace(self, ledger=self.ledger.reminded(found))

    def own_versions(
        self, layout: Layout, recorded: Iterable[ExpertVersion] = ()
    ) -> dict[str, str]:
        """Version of each expert in this rank's snapshot.

        Args:
            recorded: versions in its manifest. A snapshot from storage may hold older ones than
                when it was captured, which the ledger records.
        """
        held = {each.unit: str(each.generation) for each in recorded}
        mine = {UnitKey.parse(unit) for unit in dict.fromkeys(e.unit for e in layout.entries)}
        return {
            str(unit): held.get(str(unit), str(self.ledger.versions[unit][-1].generation))
            for unit in sorted(mine)
            if unit.kind is UnitKind.EXPERT and self.ledger.versions.get(unit)
        }

    def return_experts(self, versions: Mapping[str, str]) -> tuple[PartialState, dict[str, int]]:
        """Return experts to these versions: the new state, and this rank's tokens lost by each.

        A rank whose save was skipped may lack a version that another rank captured; then the loss
        is counted from the newest older one in its ledger, which may be too much. Without one, all
        tokens of the expert count as lost.
        """
        restored: dict[UnitKey, Generation] = {}
        forgotten: dict[UnitKey, list[Version]] = {}
        for unit, held in self.ledger.versions.items():
            text = versions.get(str(unit))
            wanted = Generation.parse(text) if text else held[-1].generation
            known = [version.generation for version in held if version.generation <= wanted]
            if not known:
                forgotten[unit] = [Version(wanted, 0, 0)]
            restored[unit] = known[-1] if known else wanted
        ledger, lost = self.ledger.reminded(forgotten).recovered(restored)
        replenishing = self.replenishing.after_recovery(lost)
        # The tokens that all ranks had routed to an older version are unknown: these experts go
        # first.
        back = {u for u in self.marks if restored[u] < self.ledger.versions[u][-1].generation}
        older = {unit: Mark(ledger.versions[unit][-1].number, 0) for unit in back}
        marks = {**self.marks, **older}
        returned = replace(self, ledger=ledger, replenishing=replenishing, marks=marks)
        return returned, {str(unit): tokens for unit, tokens in lost.items() if tokens}

    def recover(
        self,
        lost: Sequence[Mapping[str, int]],
        assigned: Sequence[Mapping[str, int]],
        policy: LossyPolicy,
        *,
        epoch: int,
        line: Generation,
    ) -> PartialState:
        """State to continue with, once the losses and assignments of all ranks are known.

        `epoch` begins with this recovery, which goes back to `line`.
        """
        total = merge_counts(*(units_of(counts) for counts in lost))
        assignments = layers_of(assigned)
        routed = RoutedTokens(
            of_all=sum(assignments.values()), own=sum(self.ledger.assignments.values())
        )
        account = self.account.after(total, self.k)
        loss = recovery_loss(total, assignments)
        decision = next_k(
            max(self.k, policy.first_k),
            first_k=policy.first_k,
            experts_max=policy.k_for_all(self.ledger.tokens),
            lost_by_k=account.lost_by_k,
            total_tokens=routed.of_all,
            limit=policy.loss_limit,
        )
        _log.warning(
            "experts returned to older versions: %d tokens, %.2f %% of all, are lost to them; %s",
            loss.lost_tokens,
            100 * loss.plt,
            decision.reason,
        )
        record = RecoveryLoss.of(
            loss, account, epoch=epoch, line=line, k_before=self.k, k_after=decision.k
        )
        kept = [each for each in self.recoveries if each.epoch < epoch][1 - RECOVERIES_KEPT :]
        recoveries = (*kept, record)
        return replace(self, account=account, k=decision.k, recoveries=recoveries, routed=routed)


START = PartialState(
    ledger=ExpertLedger.start(()),
    account=LossAccount.start(),
    k=0,
    marks={},
    measures=UNKNOWN,
    replenishing=Replenishing.start(),
)
"""State before ranks have agreed on the experts, and that of snapshots that capture everything."""


def units_of(counts: Mapping[str, int]) -> dict[UnitKey, int]:
    """Counts of experts as ranks exchange them, by unit."""
    return {UnitKey.parse(unit): tokens for unit, tokens in counts.items()}


def layers_of(assigned: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """Sum of several ranks' counts of layers as ranks exchange them."""
    total: dict[int, int] = {}
    for of_rank in assigned:
        for layer, tokens in of_rank.items():
            total[int(layer)] = total.get(int(layer), 0) + tokens
    return total
