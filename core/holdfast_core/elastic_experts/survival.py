"""Probability that a copy of every expert is left after some nodes are lost.

A set of nodes is fatal to an expert whose copies all lie on them. The model cannot do without any
expert of any layer, so the probability is computed for all layers together. Every set of lost nodes
is equally likely (Lazarus §4.1, objective (3)).

Where there are few sets of each size, all are enumerated. Otherwise a fixed sample of the orders in
which nodes are lost stands for all. Each order serves every number of lost nodes and every plan, so
that plans are compared on equal samples. All machines draw the same sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

NODES_MAX = 1024
"""Most nodes for which survival is evaluated."""
CASES_MAX = 200_000
"""Most sets of one size that `loss_cases` enumerates."""
SAMPLES = 20_000
_SAMPLE_BYTES_MAX = 1 << 24

NodeSet = Collection[int]


@dataclass(frozen=True, slots=True)
class Survival:
    """How often something outlives the loss of k nodes, for k = 0 … nodes."""

    cases: tuple[int, ...]
    """Sets of k lost nodes that were looked at."""
    fatal: tuple[int, ...]
    """Those of them that it does not outlive."""
    exact_up_to: int
    """Largest k up to which all sets were looked at."""

    def probability(self, lost: int) -> float:
        """Probability of outliving the loss of `lost` nodes, all sets being equally likely."""
        return 1 - self.fatal[lost] / self.cases[lost]


@dataclass(frozen=True, slots=True)
class Fatal:
    """Cases of `LossCases` that something does not outlive."""

    listed: NDArray[np.bool_]
    """The fatal sets among those that were enumerated."""
    at: NDArray[np.int16]
    """Number of lost nodes from which on each sampled order is fatal."""

    def both(self, other: Fatal) -> Fatal:
        """The cases that are fatal to either of two things of which one is enough."""
        return Fatal(self.listed & other.listed, np.maximum(self.at, other.at))


class LossCases:
    """Sets of lost nodes among `nodes` nodes, at most `NODES_MAX`.

    Args:
        listed_max: most sets of one size that are enumerated.
    """

    def __init__(self, nodes: int, listed_max: int = CASES_MAX) -> None:
        assert 1 <= nodes <= NODES_MAX
        self.nodes = nodes
        sizes = [k for k in range(nodes + 1) if comb(nodes, k) <= listed_max]
        self._listed_of = {k: comb(nodes, k) for k in sizes}
        whole = len(sizes) > nodes
        listed = _all_sets(nodes) if whole else [_sets_of(nodes, k) for k in sizes]
        self._lost = np.concatenate(listed, axis=1)
        samples = min(SAMPLES, _SAMPLE_BYTES_MAX // nodes) if not whole else 0
        self._place = _orders(nodes, samples)

    def fatal(self, holders: Iterable[NodeSet]) -> Fatal:
        """The cases in which all nodes of any of the sets `holders` are lost."""
        listed = np.zeros(self._lost.shape[1], dtype=np.bool_)
        at = np.full(self._place.shape[1], NODES_MAX + 1, dtype=np.int16)
        for nodes in _needed(holders):
            listed |= np.logical_and.reduce(self._lost[nodes], axis=0)
            if at.size:
                # An order loses its first node when one is lost, not none.
                np.minimum(at, self._place[nodes].max(axis=0) + np.int16(1), out=at)
        return Fatal(listed, at)

    def fatal_to_groups(self, groups: Iterable[Sequence[int]], losses: int) -> Fatal:
        """The cases in which any of `groups` loses more than `losses` of its nodes."""
        listed = np.zeros(self._lost.shape[1], dtype=np.bool_)
        at = np.full(self._place.shape[1], NODES_MAX + 1, dtype=np.int16)
        for group in map(list, groups):
            listed |= self._lost[group].sum(axis=0) > losses
            if at.size and len(group) > losses:
                # One more than the place at which it loses one node too many.
                last = np.partition(self._place[group], losses, axis=0)[losses]
                np.minimum(at, last + np.int16(1), out=at)
        return Fatal(listed, at)

    def survival(self, fatal: Fatal) -> Survival:
        """Count the fatal cases for each number of lost nodes."""
        cases, found, start = [], [], 0
        for k in range(self.nodes + 1):
            if (count := self._listed_of.get(k)) is not None:
                cases.append(count)
                found.append(int(fatal.listed[start : start + count].sum()))
                start += count
            else:
                cases.append(fatal.at.size)
                found.append(int((fatal.at <= k).sum()))
        exact = next((k - 1 for k in range(self.nodes + 1) if k not in self._listed_of), self.nodes)
        return Survival(tuple(cases), tuple(found), exact)


@lru_cache(maxsize=4)
def loss_cases(nodes: int) -> LossCases:
    """The cases for `nodes` nodes, made once."""
    return LossCases(nodes)


def _all_sets(nodes: int) -> list[NDArray[np.bool_]]:
    """A column for each set of nodes, by size; True where a node is in it."""
    lost = (np.arange(1 << nodes) >> np.arange(nodes)[:, None] & 1).astype(np.bool_)
    return [lost[:, lost.sum(axis=0, dtype=np.int8).argsort(kind="stable")]]


def _sets_of(nodes: int, size: int) -> NDArray[np.bool_]:
    """A column for each set of `size` nodes."""
    if 2 * size > nodes:
        complement: NDArray[np.bool_] = ~_sets_of(nodes, nodes - size)
        return complement
    count = comb(nodes, size)
    members = np.fromiter(chain.from_iterable(combinations(range(nodes), size)), dtype=np.int64)
    lost = np.zeros((nodes, count), dtype=np.bool_)
    lost[members.reshape(count, size), np.arange(count)[:, None]] = True
    return lost


def _orders(nodes: int, samples: int) -> NDArray[np.int16]:
    """Place of each node (row) in each of `samples` orders (column) in which nodes are lost."""
    keys = np.arange(nodes * samples, dtype=np.uint64)
    # SplitMix64: numpy's own generators may draw other numbers in another version.
    keys *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    order = keys.reshape(samples, nodes).argsort(axis=1, kind="stable")
    places = np.empty((nodes, samples), dtype=np.int16)
    places[order.T, np.arange(samples)] = np.arange(nodes, dtype=np.int16)[:, None]
    return places


def _needed(holders: Iterable[NodeSet]) -> list[Sequence[int]]:
    """The different sets, without those that contain another one of at most two nodes: they are
    lost only when that one is lost as well."""
    different = {tuple(sorted(nodes)) for nodes in holders}
    single = {nodes[0] for nodes in different if len(nodes) == 1}
    beside: dict[int, set[int]] = {}
    for nodes in different:
        if len(nodes) == 2:
            beside.setdefault(nodes[0], set()).add(nodes[1])
    return [
        list(nodes)
        for nodes in sorted(different)
        if len(nodes) == 1
        or not (
            any(node in single for node in nodes)
            or (
                len(nodes) > 2
                and any(not beside.get(node, set()).isdisjoint(nodes) for node in nodes)
            )
        )
    ]
