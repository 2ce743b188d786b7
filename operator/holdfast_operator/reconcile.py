"""The reconciler: from what is observed to what must be done, without I/O and without a clock.

One reconciler for every adapter. It is level-triggered: it may be called at any time, as often as
one likes, and after losing its memory; `ControlState` comes back from the daemons' heartbeats
(invariant 6). It must not know what an agent or a node is made of.

The rules, in order:

1. A recovery publishes a new epoch, one more than every epoch ever seen. Nothing else does, but the
   first placement and the end of a suspension. Addresses alone change the revision. An epoch that
   is known but not confirmed by all its daemons is published again as it is.
2. While a member's daemon is silent, but not long enough to be lost, nothing is begun: an epoch
   needs all its daemons, and what else failed is handled together with the loss. A node that may
   still live is waited for longer while its parity group could not bear its loss (`protection`).
3. Rank lost, agent failed, hang: the same members begin a new epoch where they are. Node lost: a
   spare takes its place; without one the job waits, then fails. A member that the cluster evicts,
   or finds no room for, moves to a spare while its parity group can rebuild it (`replacing`).
4. Failure rules: the first that matches a cause gives its action (`rules`). A lost node cannot be
   restarted in place, so it is replaced unless the rule says Fail. An epoch that fails before it
   ran is not followed by the next at once. A job that fails alike before its first step, again and
   again, has failed (`trainer_failures`).
5. A job does not start again from nothing once a generation was protected (without redundancy:
   complete). If no recovery line is left, in memory or in durable storage, it fails. Before that
   point a fresh start loses no promise, and happens; so it does when a person has changed the shape
   of a suspended job (`suspending`). An epoch that does not come after those in storage is followed
   by one that does (`persisted`).
6. For each notice that a member's node will be taken away, a copy in durable storage is asked for,
   whatever else is done about it (`notices`).
7. An ended job, well or not, frees its memory in the daemons, and is deleted when its time is over
   (`deadlines`).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.jobs import MoETrainingJob
from holdfast_core.states import RestoreSource
from holdfast_core.storage_locations import Locations
from holdfast_core.values import Generation, Membership, Redundancy
from holdfast_operator import conditions as judge
from holdfast_operator.deadlines import delete_when_due, is_overdue, note_activity
from holdfast_operator.draft import Draft
from holdfast_operator.evidence import is_left_over
from holdfast_operator.lookups import (
    agent_at,
    is_reachable,
    node_of,
    ranks_in,
)
from holdfast_operator.losses import note_losses
from holdfast_operator.notices import ask_for_copy
from holdfast_operator.persisted import note_copies, pass_stored_epochs, storage_conditions
from holdfast_operator.placement import form, refreshed
from holdfast_operator.recovering import recover
from holdfast_operator.suspending import free_earlier_shape, resume, shape_of, suspend
from holdfast_operator.trainer_failures import note_first_step
from holdfast_operator.unprotected import note_unprotected
from holdfast_operator.views import (
    AgentState,
    Condition,
    ControlState,
    Decision,
    DropJob,
    Observed,
    Outcome,
    PublishMembership,
    StartAgent,
)
from holdfast_operator.words import listed, ranks_in_words

PLACEMENT_S = 10.0
"""How long the first placement waits for nodes that it could do without."""


def reconcile(
    job: MoETrainingJob,
    observed: Observed,
    state: ControlState,
    now: float,
    locations: Locations = None,
) -> Decision:
    """What to do now, and the state to be given the next time. `locations`: where the job may
    persist to."""
    draft = Draft(job, observed, state, now, locations)
    waiting = _follow_rules(draft)
    ask_for_copy(draft, state.membership)
    return Decision(
        state=draft.state,
        actions=tuple(draft.actions),
        conditions=_conditions(draft, waiting),
        events=tuple(draft.events),
        reason=waiting or "all is as it should be",
    )


def _conditions(draft: Draft, waiting: str) -> tuple[Condition, ...]:
    found = judge.conditions(
        draft.job, draft.observed, draft.state, draft.now, waiting, draft.locations
    )
    refusal = draft.storage_refusal()
    return (*found, *storage_conditions(draft.observed, draft.state, refusal))


def _follow_rules(draft: Draft) -> str:
    """Go through the rules; returns what is waited for, empty when nothing is."""
    if draft.state.outcome is not None:
        _clear_away(draft)
        return ""
    _adopt(draft)
    if draft.job.spec.suspend:
        return suspend(draft)
    note_activity(draft)
    membership = draft.state.membership
    if membership is None:
        return "" if is_overdue(draft) else _place(draft)
    if judge.all_agents_succeeded(draft.observed, membership):
        draft.end(Outcome.COMPLETE, "all agents exited with code 0")
        return ""
    if draft.state.suspended:
        return "" if is_overdue(draft) else resume(draft, membership)
    _note_progress(draft, membership)
    if is_overdue(draft) or _line_is_missing(draft, membership):
        return ""
    if pass_stored_epochs(draft, membership):
        return ""
    waiting = recover(draft, membership)
    return _tend(draft, membership) if waiting is None else waiting


def _clear_away(draft: Draft) -> None:
    draft.stop(draft.observed.agents)
    if any(node.job is not None and node.connected for node in draft.observed.nodes.values()):
        draft.actions.append(DropJob())
    delete_when_due(draft)


def _adopt(draft: Draft) -> None:
    """Take the newest membership that any daemon reports, when it is newer than ours."""
    known = draft.state.membership
    views = (node.job for node in draft.observed.nodes.values())
    seen = [view.membership for view in views if view is not None and view.membership]
    newest = max(seen, key=lambda m: (m.epoch, m.revision), default=None)
    if newest is None or newest.job != draft.job.key or newest.epoch <= draft.state.void_epoch:
        return
    if known is None or newest.epoch > known.epoch:
        draft.tell("Adopted", f"epoch {newest.epoch} is known to the daemons and goes on")
        draft.state = replace(draft.state, membership=newest, started_from=None, resumed_epoch=0)
    elif newest.epoch == known.epoch and newest.revision > known.revision:
        draft.state = replace(draft.state, membership=replace(known, revision=newest.revision))


def _place(draft: Draft) -> str:
    """The first placement, once there are enough daemons; others get time to be seen, since
    one of them may know the job already."""
    refusal = judge.unsupported(draft.job, draft.locations)
    if refusal is not None:
        return refusal.message
    freeing = free_earlier_shape(draft)
    if freeing:
        return freeing
    nodes, ready = draft.observed.nodes.values(), draft.candidates()
    names = {node.name for node in ready}
    absent = sorted(n.name for n in nodes if n.name not in names and n.schedulable and not n.gone)
    need = draft.job.spec.nodes
    if len(ready) < need:
        return f"{len(ready)} of {need} nodes have a daemon{_missing(draft, absent)}"
    if absent and draft.now - draft.state.attentive_since < PLACEMENT_S:
        return f"waiting for the daemon on {listed(absent)}"
    try:
        membership = form(draft.job, ready, draft.state.epoch + 1)
    except InvalidJobError as error:
        draft.end(Outcome.FAILED, str(error), "CannotBePlaced")
        return ""
    draft.state = replace(draft.state, suspended=False, shape=shape_of(draft.job))
    draft.publish(membership)
    places = listed(f"{place.index} on {place.node}" for place in membership.members)
    draft.tell("Scheduled", f"members {places}; epoch {membership.epoch} begins")
    for place in membership.members:
        if agent_at(draft.observed, place) is None:
            draft.actions.append(StartAgent(member=place.index, node=place.node))
    return ""


def _missing(draft: Draft, absent: list[str]) -> str:
    """What keeps the other nodes from taking a member, in brackets; empty without other nodes."""
    nodes = draft.observed.nodes.values()
    closed = sorted(node.name for node in nodes if not node.schedulable and not node.gone)
    reasons = [f"waiting for {listed(absent)}"] if absent else []
    reasons += [f"not schedulable: {listed(closed)}"] if closed else []
    return f" ({'; '.join(reasons)})" if reasons else ""


def _note_progress(draft: Draft, membership: Membership) -> None:
    """Remember and tell what has become true without our doing."""
    _note_silence(draft, membership)
    views = draft.observed.views(membership)
    if all(view is not None for view in views):
        draft.state = replace(draft.state, confirmed_epoch=membership.epoch)
    if any(view is not None and view.protected is not None for view in views):
        draft.state = replace(draft.state, renewed=frozenset())
    if not draft.state.shape:
        draft.state = replace(draft.state, shape=shape_of(draft.job))
    lines = [view.line for view in views if view is not None and view.line is not None]
    if lines and draft.state.started_from is None:
        start = lines[0].generation
        draft.state = replace(draft.state, started_from=start.step if start else 0)
    if draft.job.spec.redundancy.type is Redundancy.NONE:
        saved = judge.newest_complete(draft.observed, membership)
    else:
        saved = judge.newest_protected(draft.observed)
    if saved is not None and (draft.state.saved is None or saved > draft.state.saved):
        draft.state = replace(draft.state, saved=saved)
    note_first_step(draft, membership)
    note_copies(draft, membership)
    note_losses(draft, membership)
    note_unprotected(draft, membership)
    resumed = judge.training_runs(draft.observed, membership)
    if resumed and draft.state.resumed_epoch < membership.epoch:
        draft.state = replace(
            draft.state, resumed_epoch=membership.epoch, ran=True, unfit=frozenset()
        )
        start = lines[0].generation if lines else None
        draft.tell("Running", _resumption(draft, membership, start))


def _resumption(draft: Draft, membership: Membership, start: Generation | None) -> str:
    who = f"{membership.world_size} ranks train in epoch {membership.epoch}"
    if start is None:
        return f"{who} from the beginning"
    ranks = ranks_in(draft.observed, membership)
    by_source = {
        source: [rank.rank for rank in ranks if rank.restored_from is source]
        for source in (RestoreSource.PARITY, RestoreSource.STORAGE)
    }
    parts = [f"{ranks_in_words(found)} from {kind}" for kind, found in by_source.items() if found]
    source = " and ".join(parts) or "all from local memory"
    return f"{who} from generation {start} (step {start.step}), {source}"


def _note_silence(draft: Draft, membership: Membership) -> None:
    silent = frozenset(
        place.node
        for place in membership.members
        if not is_reachable(draft.job, node_of(draft.observed, place), draft.state, draft.now)
    )
    if draft.state.confirmed_epoch != membership.epoch:
        return  # the loop has just begun to listen
    for name in sorted(silent - draft.state.silent):
        draft.tell("DaemonSilent", f"no heartbeat from the daemon on {name}", warning=True)
    back = draft.state.silent - silent
    for place in membership.members if back else ():
        node = node_of(draft.observed, place)
        if place.node in back and node.memory_id == place.memory_id:
            draft.tell("DaemonBack", f"the daemon on {place.node} is back with its memory")
    draft.state = replace(draft.state, silent=silent)


def _line_is_missing(draft: Draft, membership: Membership) -> bool:
    """Rule 5: fail when an epoch would start from nothing although there was something."""
    views = draft.observed.views(membership)
    line = next((v.line for v in views if v is not None and v.line is not None), None)
    saved = draft.state.saved
    if line is None or line.generation is not None or saved is None:
        return False
    if saved.epoch >= membership.epoch:
        return False
    draft.end(
        Outcome.FAILED,
        f"no recovery line: generation {saved} was the newest that was safe, and too much of "
        f"it is lost ({line.reason}); nothing was persisted. Run the job again to train from "
        f"the beginning",
        "NoRecoveryLine",
    )
    return True


def _tend(draft: Draft, membership: Membership) -> str:
    """Nothing failed: addresses, and agents that are missing or out of place."""
    if draft.state.confirmed_epoch != membership.epoch:
        # The control loop that published it may have died before it reached them all.
        draft.actions.append(PublishMembership(membership=membership))
        return f"waiting until all daemons are in epoch {membership.epoch}"
    current = refreshed(membership, draft.observed.nodes)
    if current is not membership:
        draft.publish(current)
        draft.tell("Readdressed", f"epoch {current.epoch}, revision {current.revision}")
    homes = {(place.index, place.node) for place in current.members}
    draft.stop([a for a in draft.observed.agents if (a.member, a.node) not in homes])
    left = [a for a in draft.observed.agents if is_left_over(a, draft.state, membership)]
    if left:
        draft.stop(a for a in left if (a.member, a.node) in homes)
        # The next of theirs that fails has failed in this epoch.
        carried = draft.state.carried.difference(agent.member for agent in left)
        draft.state = replace(draft.state, began_at=draft.now, carried=carried)
    for place in current.members:
        if agent_at(draft.observed, place) is None:
            draft.actions.append(StartAgent(member=place.index, node=place.node))
    if draft.state.resumed_epoch == membership.epoch:
        return ""
    ready = sum(r.state.at_work for r in ranks_in(draft.observed, membership))
    text = f"{ready} of {membership.world_size} ranks are at work in epoch {current.epoch}"
    return text + _agents_that_wait(draft, current)


def _agents_that_wait(draft: Draft, membership: Membership) -> str:
    """The first agent that has not started, and why."""
    for place in membership.members:
        agent = agent_at(draft.observed, place)
        if agent is not None and agent.state is AgentState.STARTING and agent.why:
            return f"; the agent of member {place.index} on {place.node} waits: {agent.why}"
    return ""
