"""Chooses the nodes that one job considers: its own, and enough others to take its members.

A job sees no more of the cluster than it can use, so that its cost grows only with its own size.
Nodes that have failed less come first; among these the least used, so that jobs placed at the same
time choose different ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from holdfast_core.node_failures import Rating, with_problem
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.amounts import Amounts, total
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.cluster.nodes import KubeNode, Wants, has_memory, node_view, unfit
from holdfast_operator.kube.cluster.room import Room
from holdfast_operator.reconciler.observe.views import NodeView

SETTLE_S = 10.0
"""Time after a start in which nodes whose daemons have not connected yet are offered too, so that
the reconciler waits for their reports."""
SORTED_S = 0.25
"""Longest age of the order of nodes by use."""


class CandidateNodes:
    """The nodes of the cluster, as each job sees them.

    Args:
        nodes: the watch's copy of the nodes.
        room: what pods that are no trainers take from nodes.
        daemon_returns: whether the daemon of a node is about to come back; gets the node's name and
            the time of the newest heartbeat.
        requests_of: amounts that a member of a job requests, by the job's key.
        rating_of: how a node has done lately.
    """

    def __init__(
        self,
        server: ControlServer,
        nodes: Cache[KubeNode],
        room: Room,
        *,
        daemon_returns: Callable[[str, float], bool],
        requests_of: Callable[[str], Amounts],
        rating_of: Callable[[str], Rating],
        clock: Callable[[], float],
    ) -> None:
        self._server, self._nodes, self._room, self._clock = server, nodes, room, clock
        self._daemon_returns, self._requests_of = daemon_returns, requests_of
        self._rating_of = rating_of
        self._started_at = clock()
        self._order: list[str] = []
        self._sorted_at = float("-inf")

    def views(
        self, key: str, wants: Wants, near: Iterable[str], others: int
    ) -> dict[str, NodeView]:
        """Views of the nodes `near`, of all that hold something of the job, and of up to `others`
        that could take a member."""
        names = self._server.holders(key).union(near)
        views = {name: self._view(name, key, wants) for name in names}
        found = 0
        for name in self._by_use():
            if found >= others:
                break
            if name not in views:
                view = self._view(name, key, wants)
                if view.schedulable and not view.gone:
                    views[name] = view
                    found += 1
        if self._clock() - self._started_at < SETTLE_S:
            views |= self._unconnected(key, wants, views.keys())
        return views

    def refusals(self, key: str, wants: Wants) -> tuple[tuple[str, int], ...]:
        """Reasons why nodes of the cluster cannot take a member of the job, the most frequent
        first, each with the number of nodes. A job that waits for nodes shows them."""
        reasons = Counter(
            self._refusal(node, key, wants) for node in list(self._nodes.all().values())
        )
        del reasons[""]
        return tuple(sorted(reasons.items(), key=lambda each: (-each[1], each[0])))

    def _refusal(self, node: KubeNode, key: str, wants: Wants) -> str:
        why = unfit(node, wants, self._taken(node.name, key, wants))
        if why:
            return why
        reported = self._server.view(node.name, key)
        if reported is None:
            return "no daemon"
        return "" if has_memory(reported, wants) else "not enough memory for snapshots"

    def _unconnected(self, key: str, wants: Wants, known: Iterable[str]) -> dict[str, NodeView]:
        names = {name for _, name in self._nodes.all()}.difference(known, self._server.nodes())
        views = {name: self._view(name, key, wants) for name in names}
        return {name: view for name, view in views.items() if view.schedulable}

    def _view(self, name: str, key: str, wants: Wants) -> NodeView:
        reported = self._server.view(name, key)
        heartbeat_at = reported.heartbeat_at if reported is not None else float("-inf")
        return node_view(
            name,
            self._nodes.get("", name),
            reported,
            wants,
            taken=self._taken(name, key, wants),
            returning=self._daemon_returns(name, heartbeat_at),
            rating=self._rating_of(name),
        )

    def _taken(self, name: str, key: str, wants: Wants) -> Amounts:
        """What others request on the node."""
        if not wants.requests:
            return ()
        there = self._server.jobs_on(name) | self._server.awaited_on(name)
        return total([self._room.taken(name), *map(self._requests_of, there - {key})])

    def _by_use(self) -> list[str]:
        """Nodes whose daemons are connected: first those that have failed less, then those with
        fewer jobs."""
        if self._clock() - self._sorted_at >= SORTED_S:
            self._sorted_at = self._clock()
            connected = [name for name, view in self._server.nodes().items() if view.connected]
            self._order = sorted(
                connected, key=lambda n: (self._score(n), len(self._server.jobs_on(n)), n)
            )
        return self._order

    def _score(self, name: str) -> float:
        node = self._nodes.get("", name)
        return with_problem(self._rating_of(name), "" if node is None else node.problem).score
