"""What a new control loop may conclude about a job that an earlier control loop has placed. Pure.

Epoch and membership come back from the daemons, but not at once: a daemon first has to notice that
its control loop is gone, and to connect to the next one; or it is being replaced, or held up. A
daemon that has not reported proves nothing. If it counted as a daemon that holds nothing, the job
would be placed again, in an epoch of its own, and daemons that connect a moment later would learn
that they are no longer part of it, and free their snapshots.

So the status remembers the members' nodes (`Counters.homes`), which are stored before their epoch
is published. Protected state is given up only when a daemon reports that it does not hold it, when
its node has ended, or when a person decides so.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import NEVER, ClusterView, ControlState, NodeView


class Word(StrEnum):
    """Knowledge about the job's memory on one node."""

    NOT_HEARD = "NotHeard"
    """Its daemon has not spoken to this control loop yet."""
    HOLDS = "Holds"
    HOLDS_NOTHING = "HoldsNothing"
    GONE = "Gone"
    """The node has ended, and its memory with it."""


def word_of(node: NodeView | None, void_epoch: int) -> Word:
    """Knowledge about the job's memory on `node`; None stands for a node that was never seen.
    Anything of an epoch up to `void_epoch` was given up by a person, and counts as nothing."""
    if node is None:
        return Word.NOT_HEARD
    if node.gone and not node.connected:
        return Word.GONE
    if node.job is not None and not 0 < node.job.epoch <= void_epoch:
        return Word.HOLDS
    return Word.NOT_HEARD if node.heartbeat_at == NEVER else Word.HOLDS_NOTHING


def was_placed(state: ControlState) -> bool:
    """Whether daemons may hold snapshots of the job's present shape."""
    return bool(state.homes) or state.epoch > state.void_epoch


def unheard_homes(observed: ClusterView, state: ControlState) -> list[str]:
    """Nodes whose daemons have to report before the job is placed again, or before an epoch is
    adopted that is older than the newest one in the status. If the status does not name the
    members' nodes, as in early versions, any node counts.

    Nobody is waited for once a member of the newest epoch turns out to be in an earlier one: then
    not all of its members have entered the newest epoch, and no generation is of it.
    """
    if not was_placed(state):
        return []
    names = state.homes or tuple(sorted(observed.nodes))
    nodes = {name: observed.nodes.get(name) for name in names}
    for node in nodes.values() if state.homes else ():
        job = None if node is None else node.job
        if job is not None and state.void_epoch < job.epoch < state.epoch:
            return []
    return [name for name, node in nodes.items() if _must_speak(node, state.void_epoch)]


def _must_speak(node: NodeView | None, void_epoch: int) -> bool:
    """Whether the node's daemon has not spoken, or holds something and is away."""
    word = word_of(node, void_epoch)
    away = node is not None and not node.connected
    return word is Word.NOT_HEARD or (word is Word.HOLDS and away)


def awaited_in_words(state: ControlState, unheard: list[str]) -> str:
    """Text on the daemons that are waited for, and on what ends that."""
    where = f" on {listed(state.homes)}" if state.homes else ""
    what = f"epoch {state.epoch}" if state.epoch else "the job"
    return (
        f"{what} was placed{where}; waiting for the daemon on {listed(unheard)}, "
        f"whose memory may hold its snapshots, until it connects, or its node is deleted or out "
        f"of service"
    )
