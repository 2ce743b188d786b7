"""The cost of recoveries to the model: the portion of tokens whose updates of experts were lost.

PLT of PEC (eq. 4) and MLT of MoEtion (eq. 6), for one recovery, over the life of a job, and "at
risk now": what a recovery from the newest captured versions would lose.

Both papers divide by the tokens routed to experts, N_tokens · TopK, dropped ones included. PEC
takes those of a training epoch, MoEtion leaves the span open. Here the caller chooses: usually all
tokens of the job until now, which is more cautious early in a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.ledger import ExpertLedger, check_format
from holdfast_core.experts.tables import layer_of
from holdfast_core.snapshots.units import UnitKey

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """Lost tokens, and all the tokens that they are a portion of."""

    lost: Mapping[int, int]
    """Lost tokens by layer."""
    assignments: Mapping[int, int]
    """All tokens by layer: N_tokens · TopK."""

    @property
    def lost_tokens(self) -> int:
        return sum(self.lost.values())

    @property
    def plt(self) -> float:
        """Portion of lost tokens, L_total / T_total, over all layers (PEC eq. 4): 0 to 1."""
        return portion(self.lost_tokens, sum(self.assignments.values()))

    @property
    def mlt(self) -> float:
        """Momentary lost tokens (MoEtion eq. 6): the *sum* of the layers' portions, from 0 to the
        number of layers. The percentages of its table 1 are portions of each layer, so compare them
        with the mean."""
        return sum(portion(self.lost.get(m, 0), total) for m, total in self.assignments.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedTokens:
    """Tokens, times their experts, that all ranks had routed when they last added them up, and one
    rank's part of them.

    A rank's part says little about the whole: it may have taken over the counts of several ranks
    of another world, or of none.
    """

    of_all: int = 0
    own: int = 0

    def estimate(self, own: int, ranks: int) -> int:
        """Tokens of all ranks by now, if `ranks` ranks have each routed as many since then as this
        one, which has `own` altogether."""
        return self.of_all + (own - self.own) * ranks


NO_ROUTED_TOKENS = RoutedTokens()
"""The tokens of ranks that have never added them up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitCheck:
    """Result of comparing a loss with its limit."""

    passed: bool
    """True when the value is above the limit."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAccount:
    """All tokens that the recoveries of a job have lost (L_total of PEC eq. 4).

    It is a sum over faults, like eq. 4. When two recoveries go back to one step, only the second
    affects the model: an account that is kept outside the training state counts both, and one that
    is restored with it, like the ledger, counts one.
    """

    recoveries: int = 0
    lost: Mapping[int, int]
    """Lost tokens by layer."""
    lost_by_k: Mapping[int, int]
    """Lost tokens by the K in force when they were lost; see `experts.dynamic_k`."""

    @classmethod
    def start(cls) -> LossAccount:
        """The account of a job that has lost nothing yet."""
        return cls(lost={}, lost_by_k={})

    def after(self, lost: Mapping[UnitKey, int], k: int) -> LossAccount:
        """The account after a recovery.

        Args:
            lost: for each expert its lost tokens (`ExpertLedger.recovered`).
            k: the K in force until then; any number where the policy has none, always the same.

        Raises:
            InvalidJobError: when a loss is below 0.
        """
        by_layer = dict(self.lost)
        for layer, tokens in _by_layer(lost).items():
            by_layer[layer] = by_layer.get(layer, 0) + tokens
        by_k = {**self.lost_by_k, k: self.lost_by_k.get(k, 0) + sum(lost.values())}
        return replace(self, recoveries=self.recoveries + 1, lost=by_layer, lost_by_k=by_k)

    def loss(self, assignments: Mapping[int, int]) -> TokenLoss:
        """The loss as a portion of these assignments by layer: those of a training epoch, or
        `ExpertLedger.assignments`."""
        return TokenLoss(lost=self.lost, assignments=assignments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for catalogues and JSON."""
        return {
            "format": _FORMAT,
            "recoveries": self.recoveries,
            "lost": {str(layer): tokens for layer, tokens in self.lost.items()},
            "lost_by_k": {str(k): tokens for k, tokens in self.lost_by_k.items()},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> LossAccount:
        """The account that `to_dict` wrote.

        Raises:
            CorruptError: when it did not, or a different version of Holdfast did.
        """
        check_format("loss account", document, _FORMAT)
        try:
            return cls(
                recoveries=int(document["recoveries"]),
                lost={int(layer): int(n) for layer, n in document["lost"].items()},
                lost_by_k={int(k): int(n) for k, n in document["lost_by_k"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"the loss account cannot be read: {error!r}") from error


def recovery_loss(lost: Mapping[UnitKey, int], assignments: Mapping[int, int]) -> TokenLoss:
    """The loss of one recovery, as a portion of these assignments by layer.

    Raises:
        InvalidJobError: when a loss is below 0.
    """
    return TokenLoss(lost=_by_layer(lost), assignments=assignments)


def at_risk(ledger: ExpertLedger) -> TokenLoss:
    """The loss of a recovery to the ledger's step, each expert from its newest version."""
    return recovery_loss({unit: ledger.unsaved(unit) for unit in ledger.tokens}, ledger.assignments)


def check_limit(what: str, value: float, limit: float) -> LimitCheck:
    """Whether `value` is above `limit`, with a reason for a condition."""
    passed = value > limit
    return LimitCheck(
        passed=passed,
        reason=f"{what} is {value:.2%}, {'above' if passed else 'within'} the limit of {limit:.2%}"
        + ("; capture more experts in each snapshot" if passed else ""),
    )


def portion(lost: int, total: int) -> float:
    """`lost` / `total`; 0 when nothing was lost, and 1 when more was lost than `total`."""
    return min(1.0, lost / total) if total > 0 else float(lost > 0)


def _by_layer(lost: Mapping[UnitKey, int]) -> dict[int, int]:
    layers: dict[int, int] = {}
    for unit, tokens in lost.items():
        if tokens < 0:
            raise InvalidJobError(f"unit {unit} lost {tokens} tokens; a loss is at least 0")
        layers[layer_of(unit)] = layers.get(layer_of(unit), 0) + tokens
    return layers
