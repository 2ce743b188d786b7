"""Tokens on the busiest rank: counted work, the same on every machine.

Of a fixed number of tokens, the experts' part of a step takes as long as the rank with most of
them. Expert parallelism (EP) gives each rank of a group as many experts, and uses whole groups
only; uneven copies use all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_cli.planner.models.expected_loss import shares_of
from holdfast_core.elastic_experts.plans import ExpertRoom, plan_experts
from holdfast_core.elastic_experts.rebalancing import busiest_ranks
from holdfast_core.snapshots.units import UnitKey, UnitKind

NODES = tuple(range(10, 4, -1))
SEATS = 6
"""Copies of each layer on a node (Lazarus §6.1)."""
TOKENS = 960_000
"""Tokens of a layer; only ratios matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of Lazarus, table 1."""

    name: str
    dim: int
    experts: int
    ep: int
    """Ranks of an expert-parallel group (§6.1)."""
    layers: int = 12

    @property
    def expert_parameters(self) -> int:
        """Two matrices with biases, four times as wide inside as outside."""
        return 2 * self.dim * 4 * self.dim + 4 * self.dim + self.dim


MODELS = (
    Model(name="GPT-S", dim=768, experts=8, ep=2),
    Model(name="GPT-M", dim=1024, experts=12, ep=2),
    Model(name="GPT-L", dim=1024, experts=16, ep=4),
)
SHAPES = ("1:1", "2:1", "4:1", "Zipf")
"""Loads: every other expert has once, twice or four times the tokens of the rest; or a power law
with exponent 1."""


def loads_of(model: Model, shape: str) -> list[list[int]]:
    """Tokens of each expert of each layer. Experts are as popular in each layer, but not the same
    ones: each layer begins with another expert, so that no rank holds the popular ones of all."""
    experts = range(model.experts)
    if shape == "Zipf":
        units = [UnitKey(0, UnitKind.EXPERT, expert) for expert in experts]
        shares = shares_of(units, 1.0)
        weights = [shares[unit] for unit in units]
    else:
        more = int(shape.partition(":")[0])
        weights = [more if expert < model.experts // 2 else 1 for expert in experts]
    total = sum(weights)
    tokens = [round(TOKENS * weight / total) for weight in weights]
    return [
        [tokens[(expert + layer) % model.experts] for expert in experts]
        for layer in range(model.layers)
    ]


def nodes_of_groups(nodes: int, ep: int) -> int:
    """Nodes that whole expert-parallel groups use, of `nodes`."""
    return nodes // ep * ep


def busiest_with_groups(loads: Sequence[Sequence[int]], nodes: int, ep: int) -> float:
    """Tokens of the busiest rank of each layer with expert parallelism, summed over layers."""
    groups, found = nodes // ep, 0.0
    for tokens in loads:
        each = len(tokens) // ep
        found += max(sum(tokens[at : at + each]) for at in range(0, len(tokens), each)) / groups
    return found


def busiest_with_copies(loads: Sequence[Sequence[int]], nodes: int) -> float:
    """The same with uneven copies, planned for these loads."""
    return busiest_ranks(plan_experts(loads, ExpertRoom(nodes=nodes, rank_seats=SEATS)), loads)


def ratios(model: Model, shape: str) -> dict[int, float]:
    """For each number of nodes, tokens of the busiest rank with expert parallelism over those with
    uneven copies."""
    loads = loads_of(model, shape)
    return {
        nodes: busiest_with_groups(loads, nodes, model.ep) / busiest_with_copies(loads, nodes)
        for nodes in NODES
    }
