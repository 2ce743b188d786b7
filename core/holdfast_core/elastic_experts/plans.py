"""Expert plans: the copies of all layers, chosen for survival or for balance.

The numbering of nodes makes no difference to a plan, so all layers are placed in one order of the
nodes. A set of lost nodes that is fatal to one layer is then mostly fatal to others too, so that
fewer sets are fatal to the model. If each layer had an order of its own, each would add its own
fatal sets.

Placements for survival put rarely used experts on the same nodes. Those nodes have less work than
others, so every step takes longer. `Placement.AUTO` weighs this against the cost of a loss that no
live copy covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, factorial

import numpy as np

from holdfast_core.elastic_experts.allocation import allocate, least_copies
from holdfast_core.elastic_experts.placement import (
    CLIMB_NODES_MAX,
    Counts,
    climb,
    fatal_sets,
    groups_of,
    place_groups,
    repair,
    spread,
)
from holdfast_core.elastic_experts.survival import (
    NODES_MAX,
    Fatal,
    Survival,
    loss_cases,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.elastic import (
    FALLBACK_S,
    MIN_COPIES,
    REPLACE_S,
    Allocation,
    ElasticVariable,
    Placement,
)

PLANNED_MAX = 1 << 24
"""Most numbers in a plan: for each layer one for each expert on each node, and one for each
seat."""
_EXCHANGES_MAX = 200_000
"""Exchanges of copies that a plan looks at, over all layers."""
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRoom:
    """Where a layer's copies can lie."""

    nodes: int
    rank_seats: int
    """Seats on each rank; each holds one copy of an expert of this layer."""
    nproc: int = 1
    """Ranks of each node."""

    @property
    def node_seats(self) -> int:
        return self.nproc * self.rank_seats

    @property
    def ranks(self) -> int:
        return self.nodes * self.nproc


def seats_needed(experts: int, nodes: int, nproc: int, min_copies: int) -> int:
    """The fewest seats of a rank with which every expert of a layer has `min_copies` copies, or as
    many as there are nodes."""
    return -(-experts * min(min_copies, nodes) // (nodes * nproc))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCost:
    """What lost nodes cost, for `Placement.AUTO`."""

    node_losses_per_s: float
    """Losses of one node per second."""
    together_s: float
    """Time in which further losses count as simultaneous: until a lost node has been replaced."""
    fallback_s: float
    """Time that is lost when an expert has no live copy, beyond what a loss costs otherwise."""

    def rate_per_s(self, lost: int, nodes: int) -> float:
        """Rate at which `lost` of `nodes` nodes are lost together: one, and the others in the time
        that begins with it."""
        rate = nodes * self.node_losses_per_s
        more = rate * self.together_s
        return rate * exp(-more) * more ** (lost - 1) / factorial(lost - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """What plans are made by, whatever the number of nodes; see `plan_experts`."""

    min_copies: int = MIN_COPIES
    allocation: Allocation = Allocation.MIN_MAX
    placement: Placement = Placement.AUTO
    cost: LossCost | None = None

    @classmethod
    def of_job(cls, given: ElasticVariable) -> PlanRules:
        """The rules of a job's `spec.elastic`."""
        return cls(
            min_copies=given.min_copies,
            allocation=given.allocation,
            placement=given.placement,
            cost=LossCost(
                node_losses_per_s=1 / (given.node_mtbf_days * _DAY_S),
                together_s=REPLACE_S,
                fallback_s=FALLBACK_S,
            ),
        )

    def plan(self, loads: Sequence[Sequence[int]], room: ExpertRoom) -> ExpertPlan:
        """Plan by these rules; see `plan_experts`."""
        return _plan(loads, room, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """The copies of one layer's experts."""

    copies: tuple[tuple[tuple[int, int], ...], ...]
    """For each expert the ranks that hold it, ascending, each with the number of its copies there.
    They lie in one seat and have one state; their number is the share of tokens that they take."""
    tokens: tuple[int, ...]
    """For each expert the tokens that the plan was made for."""

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Experts of which `rank` holds a copy, ascending: those in its seats."""
        return tuple(
            expert
            for expert, held in enumerate(self.copies)
            if any(holder == rank for holder, _ in held)
        )

    def counts(self) -> tuple[int, ...]:
        """Number of copies of each expert."""
        return tuple(sum(count for _, count in held) for held in self.copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModel:
    """One way to place all layers."""

    name: str
    fatal: Fatal
    """Sets of lost nodes that leave some expert without a copy."""
    survival: Survival
    imbalance: float
    """Time of the busiest nodes over that of nodes with equal loads, less 1; summed over layers."""
    counts: tuple[Counts, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlan:
    """Who holds what, in all layers."""

    room: ExpertRoom
    layers: tuple[LayerPlan, ...]
    least_nodes: int
    """Every expert lies on so many nodes at least: it outlives the loss of all of them but one."""
    chosen: PlacedModel
    recovery: PlacedModel
    """The placement with the fewest fatal sets; may be the chosen one."""
    balance: PlacedModel
    """The placement that loads nodes evenly; may be the chosen one."""
    node_loads: tuple[tuple[float, ...], ...]
    """For each layer the tokens of each node."""
    reason: str
    rules: PlanRules
    capturers: tuple[tuple[int, ...], ...]
    """For each layer and expert the holder that captures it in snapshots."""

    def renewed(self, ranks: int, loads: Sequence[Sequence[int]]) -> ExpertPlan:
        """Plan by the same rules for another number of ranks, and other loads.

        Raises:
            InvalidJobError: as `plan_experts`, and when `ranks` do not make whole nodes.
        """
        nodes, left = divmod(ranks, self.room.nproc)
        if left:
            raise InvalidJobError(
                f"{ranks} ranks are no whole nodes of {self.room.nproc}, for which the expert plan "
                f"was made; give each node as many"
            )
        return self.rules.plan(loads, replace(self.room, nodes=nodes))

    def moved_to(self, rank_of: Sequence[int]) -> ExpertPlan:
        """The same plan with other ranks: what was meant for rank i goes to `rank_of[i]`. Ranks of
        one node stay together."""
        layers = tuple(
            replace(
                layer,
                copies=tuple(
                    tuple(sorted((rank_of[rank], count) for rank, count in held))
                    for held in layer.copies
                ),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, capturers=choose_capturers(layers, self.room.ranks))


def choose_capturers(layers: Sequence[LayerPlan], ranks: int) -> tuple[tuple[int, ...], ...]:
    """For each layer and expert the holder that captures it: experts with fewest holders choose
    first, and take the holder with fewest so far, or the lowest."""
    captured = [0] * ranks
    chosen = [[0] * len(layer.copies) for layer in layers]
    experts = [(at, e) for at, layer in enumerate(layers) for e in range(len(layer.copies))]
    for at, expert in sorted(experts, key=lambda one: (len(layers[one[0]].copies[one[1]]), one)):
        holders = (rank for rank, _ in layers[at].copies[expert])
        chosen[at][expert] = min(holders, key=lambda rank: (captured[rank], rank))
        captured[chosen[at][expert]] += 1
    return tuple(map(tuple, chosen))


def plan_experts(
    loads: Sequence[Sequence[int]],
    room: ExpertRoom,
    *,
    min_copies: int = MIN_COPIES,
    allocation: Allocation = Allocation.MIN_MAX,
    placement: Placement = Placement.AUTO,
    cost: LossCost | None = None,
) -> ExpertPlan:
    """Plan the copies of all layers. Pure: equal arguments give equal plans everywhere.

    Args:
        loads: for each layer the tokens that each expert receives; only their ratios matter.
        min_copies: copies that every expert has at least, if they fit.
        cost: weighed by `Placement.AUTO`; without it, single losses are all that counts.

    Raises:
        InvalidJobError: when experts do not fit, layers differ in their number of experts, or the
            plan would be too large.
    """
    rules = PlanRules(min_copies=min_copies, allocation=allocation, placement=placement, cost=cost)
    return rules.plan(loads, room)


def _plan(loads: Sequence[Sequence[int]], room: ExpertRoom, rules: PlanRules) -> ExpertPlan:
    sizes = sorted({len(layer) for layer in loads})
    if len(sizes) != 1:
        raise InvalidJobError(
            f"layers of {sizes} experts: an expert plan needs at least one layer, and equally many "
            f"experts in each"
        )
    if room.nodes > NODES_MAX:
        raise InvalidJobError(
            f"{room.nodes} nodes: expert plans are made for at most {NODES_MAX} nodes"
        )
    planned = len(loads) * room.nodes * (sizes[0] + room.node_seats)
    if planned > PLANNED_MAX:
        raise InvalidJobError(
            f"{len(loads)} layers of {sizes[0]} experts on {room.nodes} nodes with "
            f"{room.node_seats} seats: layers · nodes · (experts + seats) is {planned}, and expert "
            f"plans are made up to {PLANNED_MAX}"
        )
    min_copies = rules.min_copies
    least = least_copies(sizes[0], room.nodes, room.node_seats, min_copies)
    layers = [
        _Layer.of(
            tokens, allocate(rules.allocation, tokens, room.nodes, room.node_seats, min_copies)
        )
        for tokens in loads
    ]
    even = _placed("spread", _spread(layers, room, least), layers)
    safe = min((even, *_for_recovery(layers, room, least)), key=lambda model: model.survival.fatal)
    chosen, reason = _choose(rules.placement, safe, even, rules.cost)
    if least < min_copies:
        reason += f"; nodes and seats allow {least} instead of {min_copies} copies of every expert"
    planned_layers = tuple(
        LayerPlan(copies=_on_ranks(counts, layer, room), tokens=layer.tokens)
        for counts, layer in zip(chosen.counts, layers, strict=True)
    )
    return ExpertPlan(
        room=room,
        layers=planned_layers,
        least_nodes=min(int((counts > 0).sum(axis=1).min()) for counts in chosen.counts),
        chosen=chosen,
        recovery=safe,
        balance=even,
        node_loads=tuple(
            tuple(_node_loads(counts, layer))
            for counts, layer in zip(chosen.counts, layers, strict=True)
        ),
        reason=reason,
        rules=rules,
        capturers=choose_capturers(planned_layers, room.ranks),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    tokens: tuple[int, ...]
    copies: list[int]
    order: list[int]
    """Experts by number of copies, fewest first, and then by their tokens."""

    @classmethod
    def of(cls, tokens: Sequence[int], copies: list[int]) -> _Layer:
        order = sorted(range(len(copies)), key=lambda e: (copies[e], tokens[e], e))
        return cls(tuple(tokens), copies, order)

    @property
    def ascending(self) -> tuple[int, ...]:
        return tuple(self.copies[expert] for expert in self.order)


def _each(layers: Sequence[_Layer], place: Callable[[tuple[int, ...]], Counts]) -> list[Counts]:
    """Place each layer by its ascending numbers of copies, which many layers have in common."""
    placed = {
        copies: place(copies) for copies in dict.fromkeys(layer.ascending for layer in layers)
    }
    placed_counts = []
    for layer in layers:
        counts = np.empty_like(placed[layer.ascending])
        counts[layer.order] = placed[layer.ascending]
        placed_counts.append(counts)
    return placed_counts


def _node_loads(counts: Counts, layer: _Layer) -> list[float]:
    """Tokens of each node: L_j = Σ_e t_e / r_e · R_{e,j}."""
    share = np.array(layer.tokens, dtype=np.float64) / np.array(layer.copies)
    loads: list[float] = (share[:, None] * counts).sum(axis=0).tolist()
    return loads


def _placed(name: str, counts: Sequence[Counts], layers: Sequence[_Layer]) -> PlacedModel:
    nodes = counts[0].shape[1]
    cases = loss_cases(nodes)
    holds = np.unique(np.concatenate(counts) > 0, axis=0)
    fatal = cases.fatal(np.flatnonzero(row).tolist() for row in holds)
    loads = [_node_loads(placed, layer) for placed, layer in zip(counts, layers, strict=True)]
    even = sum(sum(of_layer) for of_layer in loads) / nodes
    return PlacedModel(
        name=name,
        fatal=fatal,
        survival=cases.survival(fatal),
        imbalance=sum(max(of_layer) for of_layer in loads) / even - 1 if even else 0.0,
        counts=tuple(counts),
    )


def _spread(layers: Sequence[_Layer], room: ExpertRoom, least: int) -> list[Counts]:
    return _each(layers, lambda each: repair(spread(each, room.nodes, room.node_seats), least))


def _for_recovery(layers: Sequence[_Layer], room: ExpertRoom, least: int) -> list[PlacedModel]:
    """Placements that may have the fewest fatal sets."""
    nodes, seats = room.nodes, room.node_seats
    groups = {layer.ascending: groups_of(layer.ascending, nodes, seats) for layer in layers}
    core = [
        min(of_group) for of_group in zip(*(group.nodes for group in groups.values()), strict=True)
    ]
    proven = sum(groups[layer.ascending].optimal for layer in layers)
    name = f"MRO, optimal by itself in {proven} of {len(layers)} layers"

    def aligned(copies: tuple[int, ...]) -> Counts:
        own = groups[copies]
        return repair(place_groups(own, copies, nodes, seats, own.nodes), least)

    def around_core(copies: tuple[int, ...]) -> Counts:
        return repair(place_groups(groups[copies], copies, nodes, seats, core), least)

    def exchanged(copies: tuple[int, ...]) -> Counts:
        if groups[copies].optimal:
            return aligned(copies)
        return repair(_climbed(aligned(copies), spread(copies, nodes, seats), budget), least)

    candidates = [_placed(f"{name}, all in one order of nodes", _each(layers, aligned), layers)]
    if len(groups) > 1:
        candidates.append(
            _placed(f"{name}, around common nodes", _each(layers, around_core), layers)
        )
    if proven < len(layers) and nodes <= CLIMB_NODES_MAX:
        budget = _EXCHANGES_MAX // (2 * sum(not group.optimal for group in groups.values()))
        more = f"{name}, exchanged copies in the others"
        candidates.append(_placed(more, _each(layers, exchanged), layers))
    return candidates


def _climbed(grouped: Counts, spread_out: Counts, budget: int) -> Counts:
    """The better of both, after exchanges."""
    return min((climb(grouped, budget), climb(spread_out, budget)), key=fatal_sets)


def _choose(
    placement: Placement, safe: PlacedModel, even: PlacedModel, cost: LossCost | None
) -> tuple[PlacedModel, str]:
    if placement is Placement.RECOVERY:
        return safe, f"Recovery: {safe.name}"
    if placement is Placement.BALANCE:
        return even, f"Balance: {even.name}"
    nodes = range(1, len(safe.survival.cases))
    if safe is even:
        return even, "Auto: spread, which outlives as many losses as any placement that was found"
    if cost is None:
        if safe.survival.fatal[1] < even.survival.fatal[1]:
            return safe, f"Auto: {safe.name}; spread does not outlive every single loss"
        return even, "Auto: spread, which outlives single losses as often as any placement"
    gain = cost.fallback_s * sum(
        cost.rate_per_s(k, nodes[-1])
        * (safe.survival.probability(k) - even.survival.probability(k))
        for k in nodes
    )
    price = safe.imbalance - even.imbalance
    better = safe if gain > price else even
    return better, (
        f"Auto: {better.name}; placing for recovery saves {gain:.1e} of the time in fallbacks of "
        f"{cost.fallback_s:g} s, and its uneven load costs {price:.1e}"
    )


def _on_ranks(
    counts: Counts, layer: _Layer, room: ExpertRoom
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Divide each node's copies among its ranks: the most tokens first, to the rank with fewest
    tokens and a free seat. Copies of one expert stay together, up to as many as a rank has seats:
    with more, other ranks would have nothing to do."""
    here: list[list[tuple[float, int, int]]] = [[] for _ in range(room.nodes)]
    for expert, node in np.argwhere(counts).tolist():
        left = int(counts[expert, node])
        while left:
            count = min(left, room.rank_seats)
            tokens = layer.tokens[expert] / layer.copies[expert] * count
            here[node].append((-tokens, expert, count))
            left -= count
    held: list[dict[int, int]] = [{} for _ in layer.copies]
    for node, most_first in enumerate(map(sorted, here)):
        tokens_of, seats_of = [0.0] * room.nproc, [0] * room.nproc
        for tokens, expert, count in most_first:
            lanes = [at for at, taken in enumerate(seats_of) if taken < room.rank_seats]
            lane = min(lanes, key=lambda at: (tokens_of[at], seats_of[at]))
            rank = node * room.nproc + lane
            tokens_of[lane] -= tokens
            seats_of[lane] += rank not in held[expert]
            held[expert][rank] = held[expert].get(rank, 0) + count
    return tuple(tuple(sorted(ranks.items())) for ranks in held)
