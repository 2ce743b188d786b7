"""Selection within a budget: as many experts as the bandwidth hides in a step, most tokens first.

MoEtion §4.2 and §4.3, algorithm 1. The budget of a step gives a number of experts for the whole
model. Layers share it in proportion to their token risk. Within a layer, the experts that processed
the most tokens since their last capture go first.

The paper leaves some things open; they are defined here:

- Rounding ("adjust S[i]"): the largest remainder, ties to the lower layer. A layer gets no more
  than it has experts; what it cannot use is divided among the others by the same rule. Without any
  risk, a layer's weight is its number of experts.
- Every expert costs as much as the longest one, so that any choice keeps to the budget.
- A budget below one expert still gives one: otherwise tokens at risk would grow without end. The
  reason states this, and that the copy may delay the step.
- Experts that received no tokens are captured within a bounded number of snapshots,
  as in `experts.pec`: from a certain age on they go first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.ledger import TokenHistory
from holdfast_core.experts.pec import AGEING_ROUNDS
from holdfast_core.experts.tables import Expert, ExpertTable, Selection
from holdfast_core.quantities import format_bytes
from holdfast_core.snapshots.units import UnitKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Bytes that all ranks together may copy within one step without delaying it."""

    local_bytes: int
    """B_local: bytes from the accelerators into the memory of their nodes."""
    remote_bytes: int
    """B_remote: bytes to other nodes."""

    @classmethod
    def of(
        cls, *, host_bytes_s: float, network_bytes_s: float, step_s: float, links: int = 1
    ) -> Budgets:
        """B_local = BW_host · T_iter and B_remote = BW_net · T_iter (MoEtion §4.2).

        Args:
            host_bytes_s: measured bandwidth of one link.
            network_bytes_s: measured bandwidth of one link.
            step_s: measured duration of a step without snapshots.
            links: number of links that copy at the same time: the ranks, unless the bandwidths are
                those of the whole job.

        Raises:
            InvalidJobError: when a value is below 0 or there is no link.
        """
        if not (host_bytes_s >= 0 and network_bytes_s >= 0 and step_s >= 0 and links >= 1):
            raise InvalidJobError(
                f"host_bytes_s={host_bytes_s}, network_bytes_s={network_bytes_s}, "
                f"step_s={step_s}, links={links}: give values of at least 0, and at least 1 link"
            )
        return cls(
            local_bytes=int(host_bytes_s * step_s) * links,
            remote_bytes=int(network_bytes_s * step_s) * links,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCount:
    """S_total: the number of experts that one snapshot captures, and the reason."""

    experts: int
    reason: str


def experts_within(
    table: ExpertTable, budget_bytes: int, *, reserved_bytes: int = 0
) -> ExpertCount:
    """S_total = B / C_expert (MoEtion §4.3), at least 1 and at most all experts.

    Args:
        budget_bytes: B_local or B_remote.
        reserved_bytes: part of the budget that the non-expert part needs; the paper's formula
            leaves it out.

    Raises:
        InvalidJobError: when a number is below 0.
    """
    if budget_bytes < 0 or reserved_bytes < 0:
        raise InvalidJobError(
            f"budget_bytes={budget_bytes}, reserved_bytes={reserved_bytes}: give at least 0"
        )
    cost, total = table.expert_bytes_max, len(table.experts)
    if not total:
        return ExpertCount(experts=0, reason="the model has no experts")
    left = max(0, budget_bytes - reserved_bytes)
    within = min(total, left // cost if cost else total)
    reason = f"{format_bytes(left)} in a step hold {within} of {total} experts of up to " + (
        format_bytes(cost)
    )
    if within:
        return ExpertCount(experts=within, reason=reason)
    return ExpertCount(experts=1, reason=f"{reason}; 1 is captured, which may delay the step")


def allocate(risks: Mapping[int, int], sizes: Mapping[int, int], total: int) -> dict[int, int]:
    """S[i]: the number of experts that each layer captures (MoEtion §4.3 and algorithm 1, lines 3
    to 5).

    It is in proportion to the risks R[i], rounded by the largest remainder, and at most the number
    of the layer's experts.

    Args:
        risks: for each layer its tokens at risk.
        sizes: for each layer the number of experts that may be captured.
        total: S_total; where there are fewer experts, all are captured.
    """
    given = dict.fromkeys(sorted(sizes), 0)
    left = min(total, sum(sizes.values()))
    while left:
        open_layers = [m for m in given if given[m] < sizes[m]]
        risky = [m for m in open_layers if risks.get(m, 0) > 0]
        weights = {m: risks[m] for m in risky} or {m: sizes[m] for m in open_layers}
        whole = sum(weights.values())
        floors = {m: weight * left // whole for m, weight in weights.items()}
        capped = [m for m in weights if given[m] + floors[m] >= sizes[m]]
        if capped:
            # A layer that gets all of its experts is settled; the others share what is left.
            for m in capped:
                left -= sizes[m] - given[m]
                given[m] = sizes[m]
            continue
        remainders = sorted(weights, key=lambda m: (-(weights[m] * left % whole), m))
        spare = left - sum(floors.values())
        for m in weights:
            given[m] += floors[m] + (m in remainders[:spare])
        break
    return given


def select_local(
    table: ExpertTable,
    ledger: TokenHistory,
    total: int,
    *,
    uncaptured: Collection[UnitKey] = (),
) -> Selection:
    """The experts that the next snapshot captures (MoEtion algorithm 1, line 16).

    Args:
        ledger: the history up to the step of the snapshot, equal on all ranks.
        total: S_total of B_local.
        uncaptured: experts that must be captured, besides those that the ledger lists as
            uncaptured. All of them come on top of S_total.
    """
    missing = ledger.uncaptured.union(uncaptured)
    return select_by_risk(table.experts, ledger.unsaved, ledger.age, total, missing, "captured")


def selective_guard(experts: int, total: int) -> int:
    """The age, in snapshots, from which one of `experts` experts is overdue."""
    return AGEING_ROUNDS * -(-experts // max(1, total))


def select_by_risk(
    experts: Sequence[Expert],
    risk: Callable[[UnitKey], int],
    age: Callable[[UnitKey], int],
    total: int,
    missing: Collection[UnitKey],
    what: str,
) -> Selection:
    """Overdue experts, oldest first, then each layer's top S[i] (algorithm 1, lines 8 to 15).

    Args:
        experts: the candidates, in the order of units, which is how ties are broken.
        risk: an expert → its tokens that would be lost.
        age: an expert → the snapshots since it was last chosen.
        total: S_total.
        missing: experts that come on top of S_total.
        what: the verb that the reason uses for the chosen experts.

    Raises:
        InvalidJobError: when `total` is below 0.
    """
    if total < 0:
        raise InvalidJobError(f"S_total={total}: give the number of experts, at least 0")
    guard = selective_guard(len(experts), total)
    late = sorted(
        (e.unit for e in experts if e.unit not in missing and age(e.unit) >= guard),
        key=lambda unit: (-age(unit), -risk(unit)),
    )[: max(1, total)]
    chosen = {*missing, *late}
    layers: dict[int, list[UnitKey]] = {}
    for expert in experts:
        if expert.unit not in chosen:
            layers.setdefault(expert.layer, []).append(expert.unit)
    risks = {layer: sum(risk(unit) for unit in units) for layer, units in layers.items()}
    sizes = {layer: len(units) for layer, units in layers.items()}
    for layer, count in allocate(risks, sizes, max(0, total - len(late))).items():
        ranked = sorted(layers[layer], key=lambda unit: (-risk(unit), -age(unit)))
        chosen.update(ranked[:count])
    covered = sum(risk(unit) for unit in chosen)
    whole = sum(risk(expert.unit) for expert in experts)
    return Selection(
        units=tuple(sorted(chosen)),
        reason=f"{len(chosen)} of {len(experts)} experts {what}, with {covered} of {whole} "
        f"tokens at risk; {len(late)} overdue, {len(missing)} without any version",
    )
