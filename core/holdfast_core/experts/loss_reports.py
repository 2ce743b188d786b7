"""Reports of lost tokens from ranks, and how they become one figure for the job.

Each rank counts the tokens that it routed itself. The tokens that recoveries have lost are counted
for the whole job on every rank, because a restore adds them up. So figures of several ranks are
sums over sums: tokens at risk and routed tokens are added by layer, and only then divided; lost
tokens are taken once and divided by what all ranks together have routed. A mean of the ranks'
ratios would give a rank that routed few tokens the weight of one that routed many.

Each rank of a tensor-parallel group counts the same tokens: portions stay right, but absolute
numbers count such a token once for each rank.

Pure values; they decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.token_loss import LossAccount, TokenLoss, at_risk, portion
from holdfast_core.snapshots.generations import Generation

RECOVERIES_KEPT = 16
"""Newest recoveries kept in snapshots and reports; a catalogue keeps all that it receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryLoss:
    """Tokens that one recovery lost, and the job's total with it."""

    epoch: int
    """The epoch that began with the recovery; it identifies the recovery."""
    step: int
    """The step that all ranks were restored to."""
    lost_tokens: int
    plt: float
    """PLT of this recovery alone (PEC eq. 4), as a portion of all tokens until then."""
    mlt: float
    """MLT of this recovery alone (MoEtion eq. 6): the sum over layers."""
    k_before: int
    k_after: int
    total_tokens: int
    """Tokens lost in the job's life, including this recovery."""
    total_plt: float
    total_mlt: float

    def __post_init__(self) -> None:
        for name in _FRACTIONS:
            if not 0 <= getattr(self, name) < math.inf:  # NaN is not
                raise InvalidJobError(
                    f"{name}={getattr(self, name)} of the recovery of epoch {self.epoch}: a "
                    f"portion of lost tokens is at least 0"
                )

    @classmethod
    def of(
        cls,
        loss: TokenLoss,
        account: LossAccount,
        *,
        epoch: int,
        line: Generation,
        k_before: int,
        k_after: int,
    ) -> RecoveryLoss:
        """The record of a recovery to `line`; `account` includes its `loss`."""
        total = account.loss(loss.assignments)
        return cls(
            epoch=epoch,
            step=line.step,
            lost_tokens=loss.lost_tokens,
            plt=loss.plt,
            mlt=loss.mlt,
            k_before=k_before,
            k_after=k_after,
            total_tokens=total.lost_tokens,
            total_plt=total.plt,
            total_mlt=total.mlt,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for extras, catalogues and JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RecoveryLoss:
        """The record that `to_dict` wrote.

        Raises:
            CorruptError: when it did not.
        """
        try:
            return msgspec.convert(found, cls)
        except (msgspec.ValidationError, UnicodeEncodeError, InvalidJobError) as error:
            raise CorruptError(f"the loss of a recovery cannot be read: {error!r}") from error


msgspec.json.Decoder(RecoveryLoss)  # prepares the type for `convert`, before there are threads

_FRACTIONS = ("plt", "mlt", "total_plt", "total_mlt")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReport:
    """Report of one or several ranks of a job whose snapshots leave experts out."""

    ranks: int
    """Number of ranks whose tokens these are."""
    k: int
    """Experts in a snapshot, as the policy counts them: of each layer, or of all layers."""
    experts_max: int
    """Experts of the layer that has most, or of all layers together: this K captures all."""
    limit: float
    """PLT that recoveries may reach."""
    layers: tuple[int, ...]
    at_risk: tuple[int, ...]
    """For each layer, tokens of these ranks that a recovery would lose now."""
    routed: tuple[int, ...]
    """For each layer, tokens of these ranks times their experts (N_tokens · TopK)."""
    lost: tuple[int, ...]
    """For each layer, tokens of *all* ranks that recoveries have lost."""
    recoveries: tuple[RecoveryLoss, ...] = ()
    """The newest recoveries, oldest first."""

    def __post_init__(self) -> None:
        if {len(self.at_risk), len(self.routed), len(self.lost)} != {len(self.layers)}:
            raise InvalidJobError(
                f"a report of lost tokens has {len(self.layers)} layers, but {len(self.at_risk)}, "
                f"{len(self.routed)} and {len(self.lost)} numbers for them"
            )
        if not 0 <= self.limit <= 1:
            raise InvalidJobError(
                f"limit={self.limit}: a portion of lost tokens lies between 0 and 1"
            )

    @classmethod
    def of_rank(
        cls,
        ledger: ExpertLedger,
        account: LossAccount,
        recoveries: Iterable[RecoveryLoss],
        *,
        k: int,
        experts_max: int,
        limit: float,
    ) -> LossReport:
        """The report of a rank that holds `ledger`."""
        layers = tuple(sorted(ledger.assignments))
        risk = at_risk(ledger).lost
        return cls(
            ranks=1,
            k=k,
            experts_max=experts_max,
            limit=limit,
            layers=layers,
            at_risk=tuple(risk.get(layer, 0) for layer in layers),
            routed=tuple(ledger.assignments[layer] for layer in layers),
            lost=tuple(account.lost.get(layer, 0) for layer in layers),
            recoveries=tuple(recoveries),
        )

    @property
    def newest(self) -> RecoveryLoss | None:
        return self.recoveries[-1] if self.recoveries else None

    @property
    def risk(self) -> TokenLoss:
        """Tokens at risk now, of those that these ranks routed."""
        return TokenLoss(lost=self._by_layer(self.at_risk), assignments=self._by_layer(self.routed))

    @property
    def life(self) -> TokenLoss:
        """Tokens lost in the job's life; only right in a report of all ranks."""
        return TokenLoss(lost=self._by_layer(self.lost), assignments=self._by_layer(self.routed))

    def plt_of(self, world_size: int) -> float:
        """PLT of the job's life, as if all ranks of the world had routed like these."""
        return portion(sum(self.lost) * self.ranks, sum(self.routed) * world_size)

    def _by_layer(self, numbers: tuple[int, ...]) -> dict[int, int]:
        return dict(zip(self.layers, numbers, strict=True))


def merged(reports: Iterable[LossReport]) -> LossReport | None:
    """One report for all these ranks together; None without any. Values that should be equal on
    all ranks are taken from the report with the newest recovery."""
    given = list(reports)
    if not given:
        return None
    leading = max(given, key=lambda report: report.newest.epoch if report.newest else 0)
    alike: dict[tuple[int, ...], list[LossReport]] = {}
    for report in given:
        alike.setdefault(report.layers, []).append(report)
    risk: dict[int, int] = dict.fromkeys(leading.layers, 0)
    routed = dict(risk)
    for layers, group in alike.items():  # by columns: there may be thousands
        _add(risk, layers, [report.at_risk for report in group])
        _add(routed, layers, [report.routed for report in group])
    lost = dict(zip(leading.layers, leading.lost, strict=True))
    every = tuple(sorted(routed))
    return LossReport(
        ranks=sum(report.ranks for report in given),
        k=leading.k,
        experts_max=leading.experts_max,
        limit=leading.limit,
        layers=every,
        at_risk=tuple(risk[layer] for layer in every),
        routed=tuple(routed[layer] for layer in every),
        lost=tuple(lost.get(layer, 0) for layer in every),
        recoveries=leading.recoveries,
    )


def _add(sums: dict[int, int], layers: tuple[int, ...], rows: list[tuple[int, ...]]) -> None:
    for layer, column in zip(layers, zip(*rows, strict=True), strict=True):
        sums[layer] = sums.get(layer, 0) + sum(column)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLoss:
    """The figures of a whole job, for a condition, a status and people."""

    k: int
    experts_max: int
    limit: float
    routed_tokens: int
    """Tokens of all ranks times their experts."""
    at_risk: float
    """PLT that a recovery would add now."""
    at_risk_mlt: float
    lost: float
    """PLT of the job's life."""
    lost_mlt: float
    lost_tokens: int
    newest: RecoveryLoss | None = None
    """The newest recovery; None when there was none."""

    @classmethod
    def of(cls, report: LossReport) -> JobLoss:
        """The figures in a report of all ranks."""
        risk, life = report.risk, report.life
        return cls(
            k=report.k,
            experts_max=report.experts_max,
            limit=report.limit,
            routed_tokens=sum(report.routed),
            at_risk=risk.plt,
            at_risk_mlt=risk.mlt,
            lost=life.plt,
            lost_mlt=life.mlt,
            lost_tokens=life.lost_tokens,
            newest=report.newest,
        )

    @property
    def passed(self) -> bool:
        """Whether more tokens are lost than the job allows."""
        return self.lost > self.limit

    @property
    def captures_all(self) -> bool:
        """Whether snapshots no longer leave out any expert."""
        return self.k >= self.experts_max
