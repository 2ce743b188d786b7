"""Barrier at which the agents of a world wait until the workers of all nodes have finished.

Each agent states in the world's store that its workers have finished. Node 0 reads these statements
and states that all are there, so each of the others asks for one. A statement that is overwritten
is made again with the next question: whoever changes one delays the barrier, and opens none.
"""

from __future__ import annotations

from holdfast._daemon.sealed_store import SealedStore
from holdfast_core.errors import UnreachableError

FINISHED, LEFT = "holdfast/finished", "holdfast/left"


class ExitBarrier:
    """One agent's part in the barrier of one world. All methods raise DistError when the store is
    gone.

    Args:
        store: store of the world.
        node: number of the agent's node in the world.
        nodes: number of nodes.
    """

    def __init__(self, store: SealedStore, node: int, nodes: int) -> None:
        self._store, self._node, self._nodes = store, node, nodes

    def all_finished(self) -> bool:
        """State that the workers of this node have finished; return whether those of all have."""
        self._store.set(f"{FINISHED}-{self._node}", "")
        return self._all_state(FINISHED) if self._node == 0 else self._have_stated([FINISHED])

    def leave(self) -> None:
        """State that this agent knows that all have finished, and needs the store no more. Called
        once `all_finished` has said so."""
        self._store.set(f"{LEFT}-{self._node}", "")
        if self._node == 0:
            self._store.set(FINISHED, "")

    def all_left(self) -> bool:
        """State once more what `leave` does; return whether all agents have."""
        self.leave()
        return self._all_state(LEFT)

    def _all_state(self, what: str) -> bool:
        return self._have_stated([f"{what}-{node}" for node in range(self._nodes)])

    def _have_stated(self, names: list[str]) -> bool:
        """Whether agents have written all of `names`. A stranger's value is none of theirs."""
        if not self._store.check(names):
            return False
        try:
            self._store.multi_get(names)
        except UnreachableError:
            return False
        return True
