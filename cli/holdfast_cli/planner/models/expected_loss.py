"""How many tokens a recovery is expected to lose under a policy, before any are routed.

`experts.token_loss` counts these tokens while a job runs; this module estimates them beforehand. An
expert that the restored snapshot did not capture lacks the tokens since its last capture (`L_i` of
PEC eq. 4, TokensLost of MoEtion eq. 6). Losses are in steps' worth of tokens at one snapshot for
each step, which makes them independent of the size of a batch: 1.5 means that all experts together
lack the tokens of one and a half steps.

It must not choose experts: the selections that trainers use do that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd

import xxhash

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.budgeted import selective_guard
from holdfast_core.experts.pec import select_sequential
from holdfast_core.experts.tables import ExpertTable, MoeLayer
from holdfast_core.snapshots.units import UnitKey

_BISECTIONS = 100


def popularity(layer: MoeLayer, skew: float) -> dict[UnitKey, float]:
    """The share of the layer's tokens that each expert receives; see `shares_of`.

    Raises:
        InvalidJobError: when `skew` is below 0.
    """
    return shares_of((expert.unit for expert in layer.experts), skew)


def shares_of(experts: Iterable[UnitKey], skew: float) -> dict[UnitKey, float]:
    """The share of a layer's tokens that each of its experts receives, by a power law (MoEtion
    §3.1).

    A hash of an expert's name decides how popular it is, so that the popular experts of a layer are
    not all on one rank.

    Args:
        skew: exponent; 0 gives all experts equal shares, with 2, two of 16 receive 79 %.

    Raises:
        InvalidJobError: when `skew` is below 0.
    """
    if not skew >= 0:
        raise InvalidJobError(f"skew={skew}: give a number of at least 0")
    units = sorted(experts, key=lambda unit: xxhash.xxh3_64_intdigest(str(unit).encode()))
    weights = [(place + 1) ** -skew for place in range(len(units))]
    return {unit: weight / sum(weights) for unit, weight in zip(units, weights, strict=True)}


def sequential_loss(table: ExpertTable, k: int) -> float:
    """Average loss of a recovery when K experts of each layer take turns (PEC §3.1).

    Every expert waits equally long on average, so that popularity does not matter. Each layer
    routes equally many tokens.

    Raises:
        InvalidJobError: when `k` is below 1.
    """
    by_size = {len(layer.experts): layer for layer in table.layers}
    ages = {size: _mean_age(layer, k) for size, layer in by_size.items()}
    return _mean([ages[len(layer.experts)] for layer in table.layers])


def _mean_age(layer: MoeLayer, k: int) -> float:
    """Mean age of the layer's experts, in snapshots, right after a snapshot and over a whole
    round."""
    alone = ExpertTable(layers=(layer,), dense_bytes=0)
    n = len(layer.experts)
    period = n // gcd(n, k)
    newest: dict[UnitKey, int] = {}
    total = 0
    for number in range(2 * period):
        newest.update(dict.fromkeys(select_sequential(alone, k, number).units, number))
        if number >= period:
            total += sum(number - at for at in newest.values())
    return total / (period * n)


def selective_loss(table: ExpertTable, total: int, skew: float) -> float:
    """Average loss of a recovery when the experts with most tokens at risk are captured.

    This is the state that algorithm 1 of MoEtion settles in under constant popularity: an expert is
    captured whenever its unsaved tokens reach a threshold that is the same for all, or when it is
    old enough to be overdue; the threshold is such that S_total experts are captured each time.
    Within about 15 % of the selection itself, and usually above it.

    Args:
        total: S_total.
        skew: see `popularity`.
    """
    if total >= len(table.experts):
        return 0.0
    layers = [popularity(layer, skew) for layer in table.layers]
    shares = [share for layer in layers for share in layer.values()]
    overdue = selective_guard(len(shares), total)
    low, high = 0.0, max(shares) * overdue
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        captured = sum(1 / _gap(share, middle, overdue) for share in shares)
        low, high = (middle, high) if captured > total else (low, middle)
    return sum(share * (_gap(share, high, overdue) - 1) / 2 for share in shares) / len(layers)


def _gap(share: float, threshold: float, overdue: int) -> float:
    """Snapshots from one capture of an expert to the next."""
    return min(max(threshold / share, 1.0), overdue)


def routed_tokens(table: ExpertTable, skew: float, tokens: int) -> Mapping[UnitKey, int]:
    """Tokens that each expert receives in a step that routes `tokens` in each layer, at least 1
    each.

    Even without skew, shares differ slightly, so that ties between experts are not broken by their
    number, which would have neighbours on one rank captured together.
    """
    return {
        unit: max(1, round(tokens * share))
        for layer in table.layers
        for unit, share in popularity(layer, max(skew, 1e-3)).items()
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
