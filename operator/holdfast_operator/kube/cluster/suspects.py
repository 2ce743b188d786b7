"""Closes nodes that fail again and again to new pods, by a taint or a cordon, and opens them again.

Off unless the chart turns it on, because it changes nodes, and so needs a right that nothing else
here needs. Which nodes is decided in `holdfast_core.suspect_nodes`; this applies it. An annotation
says what was done, so that only that is taken back: also by another replica, and after a person has
opened a node, which then stays open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from holdfast_core.node_failures import CLEAN, Rating
from holdfast_core.suspect_nodes import (
    Mark,
    NodeState,
    SuspectPlan,
    SuspectPolicy,
    closed_max,
    plan,
)
from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import NODES, SUSPECT
from holdfast_operator.kube.cluster.node_record import NodeRecord
from holdfast_operator.kube.cluster.nodes import KubeNode, marked_in, read_node
from holdfast_operator.reconciler.observe.views import Event

_log = logging.getLogger(__name__)

ROUND_S = 10.0
"""Pause between two looks at all nodes."""
HINT = "`holdfast nodes` shows them, and `--forget` opens the node once it is repaired"
IN_WORDS: Mapping[SuspectPolicy, str] = {
    SuspectPolicy.TAINT: f"tainted {SUSPECT}:NoSchedule",
    SuspectPolicy.CORDON: "cordoned",
}


class SuspectNodes:
    """Applies a policy to the nodes that train. `run` it as a task while the operator leads.

    Args:
        nodes: all nodes of the cluster, as they are known now.
        training: names of the nodes that have a daemon, or should have.
        post: posts an event about an object.
    """

    def __init__(
        self,
        api: KubeApi,
        policy: SuspectPolicy,
        record: NodeRecord,
        *,
        nodes: Callable[[], Iterable[KubeNode]],
        training: Callable[[], Collection[str]],
        post: Callable[[Object, Event], None],
    ) -> None:
        self._api, self._policy, self._record = api, policy, record
        self._nodes, self._training, self._post = nodes, training, post
        self._left: frozenset[str] = frozenset()
        self._said = ""

    async def run(self) -> None:
        """Look at all nodes now and then, until cancelled."""
        while True:
            try:
                await self.apply()
            except Exception:  # what happens to suspect nodes must not end the operator
                _log.exception("suspect nodes are left as they are")
            await asyncio.sleep(ROUND_S)

    async def apply(self) -> None:
        """Close and open nodes. What the API server refuses is tried again the next time."""
        if not self._record.is_read:
            return  # not to open nodes of whose failures nothing is known yet
        training, suspected = self._training(), self._record.suspicions()
        nodes = {
            node.name: node
            for node in self._nodes()
            if node.name in training or node.marked is not Mark.NONE
        }
        states = [
            NodeState(name=node.name, marked=node.marked, intact=node.intact, closed=node.closed)
            for node in nodes.values()
        ]
        steps = plan(states, suspected, self._policy)
        self._tell_of_left(steps, nodes, suspected)
        problem = ""
        for name in (*steps.opened, *steps.open, *steps.close):
            rating = suspected.get(name, CLEAN)
            try:
                if name in steps.opened:
                    await self._note_opened(name)
                elif name in steps.open:
                    await self._open(nodes[name])
                else:
                    await self._close(nodes[name], rating)
            except ApiError as error:
                if error.status not in (CONFLICT, NOT_FOUND):  # it changed, or is gone
                    problem = str(error)
        if problem and problem != self._said:
            _log.warning("a suspect node is left as it is: %s", problem)
        self._said = problem

    async def _close(self, node: KubeNode, rating: Rating) -> None:
        body = await self._api.get(NODES, "", node.name)
        spec = body.get("spec") or {}
        taints: list[Any] = spec.get("taints") or []
        if marked_in(body["metadata"]) is not Mark.NONE or spec.get("unschedulable"):
            return
        if self._policy is SuspectPolicy.CORDON:
            change: Object = {"unschedulable": True}
        else:
            change = {"taints": [*taints, {"key": SUSPECT, "effect": "NoSchedule"}]}
        await self._change(body, self._policy.value, change)
        did = IN_WORDS[self._policy]
        self._say(node, "NodeSuspected", f"{did} after {rating.text}; {HINT}", warning=True)

    async def _open(self, node: KubeNode) -> None:
        body = await self._api.get(NODES, "", node.name)
        spec = body.get("spec") or {}
        taints: list[Any] = spec.get("taints") or []
        change: Object = {}
        mark = marked_in(body["metadata"])
        match mark:
            case Mark.NONE:
                return
            case Mark.OPENED:
                pass
            case Mark.CORDON:
                change = {"unschedulable": None}
            case Mark.TAINT:
                kept = [taint for taint in taints if taint.get("key") != SUSPECT]
                change = {"taints": kept or None}
        await self._change(body, None, change)
        if mark is not Mark.OPENED:
            self._say(node, "NodeOpened", "its failures have faded, or are forgotten")

    async def _note_opened(self, name: str) -> None:
        """Write down that somebody has opened a node, so that a cordon after that is theirs."""
        body = await self._api.get(NODES, "", name)
        if not read_node(body).intact and marked_in(body["metadata"]) is not Mark.NONE:
            await self._change(body, Mark.OPENED.value, {})

    async def _change(self, body: Object, mark: str | None, change: Object) -> None:
        """Change a node's spec and annotation, unless somebody has changed the node meanwhile."""
        metadata = {
            "resourceVersion": body["metadata"]["resourceVersion"],
            "annotations": {SUSPECT: mark},
        }
        await self._api.patch(
            NODES, "", body["metadata"]["name"], {"metadata": metadata, "spec": change}
        )

    def _tell_of_left(
        self, steps: SuspectPlan, nodes: Mapping[str, KubeNode], suspected: Mapping[str, Rating]
    ) -> None:
        """Report each suspect node that stays open, when that begins."""
        if self._policy is not SuspectPolicy.NONE:
            for name in steps.left:
                if name not in self._left:
                    limit = f"at most {closed_max(len(nodes))} of {len(nodes)} nodes may be closed"
                    text = f"left open in spite of {suspected[name].text}: {limit}"
                    self._say(nodes[name], "NodeSuspected", text, warning=True)
        self._left = frozenset(steps.left)

    def _say(self, node: KubeNode, reason: str, text: str, warning: bool = False) -> None:
        log = _log.warning if warning else _log.info
        log("node %s: %s", node.name, text)
        about = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node.name, "uid": node.uid, "namespace": ""},
        }
        self._post(about, Event(reason=reason, message=text, warning=warning))
