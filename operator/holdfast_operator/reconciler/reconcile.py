"""The reconciler: from what is observed to what must be done, without I/O and without a clock.

One reconciler serves every adapter. It is level-triggered: it may be called at any time, any number
of times, and after it has lost its memory, since epoch and membership come back from the daemons'
heartbeats (invariant 6). It must not depend on what an agent or a node is made of.

Each rule is given the look and the state that the rule before returned. It returns a step: a state,
actions, events, and perhaps a text on what is waited for, which ends the look (`steps`). The rules
keep to this:

0. Absence of evidence is no evidence of absence (invariant 7): what was protected is given up only
   by a daemon's own word that it does not hold it, by the end of its node, or by a person. So a job
   that the status remembers as placed is not placed anew before each of its members' daemons has
   spoken, or its node is gone (`remembered`); until then its membership is adopted from the first
   daemon that reports it.
1. A recovery publishes a new epoch, one more than every epoch ever seen. So do the first
   placement, the end of a suspension and members that join, and nothing else but what rule 5 names.
   A change of addresses alone raises the revision. An epoch that is known but not confirmed by all
   its daemons is published again unchanged.
2. While a member's daemon is silent, but not long enough to be lost, nothing is begun: an epoch
   needs all its daemons, and other failures are handled together with the loss. A node that may
   still live gets more time while its parity group could not bear its loss (`protection`).
3. After a lost rank, a failed agent or a hang, the same members begin a new epoch where they are.
   When a node is lost, a spare takes its place. A member that the cluster evicts, or finds no room
   for, moves to a spare while its parity group can rebuild it (`replacing`). The job goes on
   without members that no spare is left for, or that could not start their ranks at once, down to
   `minNodes` (`shrinking`). Their agents get ready where they will be (`joining`), and then they
   join (`growing`). Below `minNodes` the job waits, until a rule of the user ends it (`waiting`).
4. Failure rules: the first that matches a cause gives its action (`failure_rules`). A lost node
   cannot be restarted in place, so it is replaced unless its rule is Fail. After an epoch that
   failed before it ran, the next one does not begin at once. A job that fails alike before its
   first step, again and again, has failed (`trainer_failures`).
5. A job does not start again from nothing once a generation was protected (without redundancy:
   complete). If no recovery line is left, in memory or in durable storage, it fails, unless
   processes that have outlived their world may have everything between them: only they know
   (`staying`). Before that point a fresh start breaks no promise, and happens; so it does when a
   person has changed the shape of a suspended job (`suspending`). An epoch that does not come after
   those in storage is followed by one that does (`stored_copies`).
6. For each notice that a member's node will be taken away, a copy in durable storage is requested,
   whatever else is done about it (`notices`).
7. On some spares an agent waits, and becomes that of the member that moves there (`standby`).
8. A job that is complete frees its memory in the daemons; one that has failed keeps it for a while,
   and goes on if a person asks for that (`keeping`). Both are deleted when their time is over
   (`deadlines`).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import Locations
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership, Redundancy
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.failures.deadlines import (
    delete_when_due,
    fail_when_overdue,
    note_activity,
)
from holdfast_operator.reconciler.failures.keeping import free_when_due, resume_failed
from holdfast_operator.reconciler.failures.notices import ask_for_copy
from holdfast_operator.reconciler.failures.replays import replay_in_words
from holdfast_operator.reconciler.failures.trainer_failures import note_first_step
from holdfast_operator.reconciler.failures.unprotected import note_unprotected
from holdfast_operator.reconciler.membership.external import homes, leave_pods, missing_homes
from holdfast_operator.reconciler.membership.growing import grow, strength_condition
from holdfast_operator.reconciler.membership.joining import absent_members
from holdfast_operator.reconciler.membership.recovering import recover, start_missing
from holdfast_operator.reconciler.membership.standby import keep_standbys
from holdfast_operator.reconciler.membership.staying import may_go_on_live
from holdfast_operator.reconciler.membership.stored_copies import (
    note_copies,
    pass_stored_epochs,
    storage_conditions,
)
from holdfast_operator.reconciler.membership.suspending import (
    forget_reshaped,
    free_earlier_shape,
    resume,
    suspend,
)
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import is_left_over
from holdfast_operator.reconciler.observe.lookups import (
    agent_at,
    is_reachable,
    live_step,
    node_of,
    ranks_in,
)
from holdfast_operator.reconciler.observe.remembered import awaited_in_words, unheard_homes
from holdfast_operator.reconciler.observe.shape import Shape
from holdfast_operator.reconciler.observe.stalls import NOTICE_SHARE, signs_of, stall_of
from holdfast_operator.reconciler.observe.text import listed, ranks_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    Condition,
    ControlState,
    Decision,
    EventReason,
    NodeView,
    Observed,
    PublishMembership,
)
from holdfast_operator.reconciler.placement import form, refreshed
from holdfast_operator.reconciler.report import conditions as judge
from holdfast_operator.reconciler.report.end_reasons import note_late_ends, note_shortages
from holdfast_operator.reconciler.report.losses import note_losses
from holdfast_operator.reconciler.report.seats import note_plan
from holdfast_operator.reconciler.report.shortage import shortage_of
from holdfast_operator.reconciler.steps import Look, Step, end, fold, publish, stop

_MAY_WAIT = (AgentState.STARTING, AgentState.RUNNING)
STALL_SHOWN_S = 10.0
"""Silence in a start after which the status names what is waited for."""
REFUSALS_SHOWN = 4
"""Number of reasons shown why nodes cannot take a member."""
PLACEMENT_S = 10.0
"""How long the first placement waits for nodes that it could do without."""


def reconcile(
    job: MoETrainingJob,
    observed: Observed,
    state: ControlState,
    now: float,
    locations: Locations = None,
    standbys: int = 0,
) -> Decision:
    """Decide what to do now, and the state to pass in the next time. `locations`: where the job may
    persist to. `standbys`: number of spares on which an agent shall wait."""
    look = Look(job=job, observed=observed, now=now, locations=locations, standbys=standbys)
    step = _follow_rules(look, look.begin(state))
    step = replace(step, state=_with_homes(step.state))
    waiting = step.waiting or ""
    step = step.then(ask_for_copy(look, step.state, state.membership))
    step = step.then(keep_standbys(look, step.state))
    if job.spec.trainer.external:
        step = replace(step, actions=leave_pods(step.actions))
    return Decision(
        state=step.state,
        actions=step.actions,
        conditions=_conditions(look, step.state, waiting),
        events=step.events,
        shortage=shortage_of(look, step.state),
        reason=waiting or "all is as it should be",
    )


def _with_homes(state: ControlState) -> ControlState:
    """The state, with the nodes of its membership for the next control loop."""
    if state.membership is None:
        return state
    homes = tuple(member.node for member in state.membership.members)
    return state if homes == state.homes else replace(state, homes=homes)


def _conditions(look: Look, state: ControlState, waiting: str) -> tuple[Condition, ...]:
    found = judge.conditions(look.job, look.observed, state, look.now, waiting, look.locations)
    found += strength_condition(look, state)
    return (*found, *storage_conditions(look.observed, state, look.storage_refusal()))


def _follow_rules(look: Look, state: ControlState) -> Step:
    step = fold((_clear_away, _adopt, suspend, note_activity, _place), look, state)
    if step.waiting is not None:
        return step
    membership = step.state.membership
    assert membership is not None
    return step.then(fold(_RULES, look, step.state, membership))


def _clear_away(look: Look, state: ControlState) -> Step:
    """Stop what an ended job still runs, and free what it does not keep; or have it go on."""
    step = resume_failed(look, _known(look, state) if state.kept else state)
    if step.state.outcome is None:
        # The rest follows at the next look: until then its queue has not been asked.
        return step if state.outcome is None else step.wait("a person has the failed job go on")
    step = step.then(stop(look, step.state, look.observed.agents))
    step = step.then(free_when_due(look, step.state))
    return step.then(delete_when_due(look, step.state)).wait()


def _known(look: Look, state: ControlState) -> ControlState:
    """`state` of a failed job, with what the daemons that keep its snapshots report."""
    known = _adopt(look, state).state
    return known if known.membership is None else note_copies(look, known, known.membership).state


def _adopt(look: Look, state: ControlState) -> Step:
    """Adopt the newest membership that any daemon reports, when it is newer than ours."""
    known = state.membership
    views = (node.job for node in look.observed.nodes.values())
    seen = [view.membership for view in views if view is not None and view.membership]
    newest = max(seen, key=lambda m: (m.epoch, m.revision), default=None)
    if newest is None or newest.job != look.job.key or newest.epoch <= state.void_epoch:
        return Step(state)
    if known is None and newest.epoch < state.epoch and unheard_homes(look.observed, state):
        return Step(state)  # they may hold a newer one, and what it has protected
    if known is None or newest.epoch > known.epoch:
        adopted = replace(state, membership=newest, started_from=None, resumed_epoch=0)
        text = f"epoch {newest.epoch} is adopted from the daemons and goes on"
        return Step(adopted).post(EventReason.ADOPTED, text)
    if newest.epoch == known.epoch and newest.revision > known.revision:
        return Step(replace(state, membership=replace(known, revision=newest.revision)))
    return Step(state)


def _place(look: Look, state: ControlState) -> Step:
    """Place the members for the first time, or anew when no daemon holds anything of the job any
    more, once there are enough daemons."""
    if state.membership is not None:
        return Step(state)
    rules = (
        fail_when_overdue,
        _refuse,
        forget_reshaped,
        free_earlier_shape,
        _await_homes,
        _choose_nodes,
    )
    return fold(rules, look, state)


def _await_homes(look: Look, state: ControlState) -> Step:
    """Rule 0: wait for the daemons that may hold what an earlier control loop has placed."""
    unheard = unheard_homes(look.observed, state)
    return Step(state, waiting=awaited_in_words(state, unheard) if unheard else None)


def _refuse(look: Look, state: ControlState) -> Step:
    """Wait while the job asks for something that cannot be done."""
    refusal = judge.unsupported(look.job, look.observed, look.locations)
    return Step(state, waiting=None if refusal is None else refusal.message)


def _choose_nodes(look: Look, state: ControlState) -> Step:
    """Form the first membership. Daemons get time to dial in, since one of them may hold the job
    already."""
    if look.job.spec.trainer.external:
        return _choose_homes(look, state)
    nodes, ready = look.observed.nodes.values(), look.candidates(state)
    names = {node.name for node in ready}
    absent = sorted(n.name for n in nodes if n.name not in names and n.schedulable and not n.gone)
    need = look.job.spec.nodes
    if len(ready) < need:
        return Step(
            state, waiting=f"{len(ready)} of {need} nodes have a daemon{_missing(look, absent)}"
        )
    if absent and look.now - state.attentive_since < PLACEMENT_S:
        return Step(state, waiting=f"waiting for the daemon on {listed(absent)}")
    return _place_on(look, state, _in_order(state, ready, need))


def _in_order(state: ControlState, ready: list[NodeView], need: int) -> list[NodeView]:
    """The nodes of the first `need` members. A member that was placed before stays where it was: a
    daemon that has lost its record of the epoch may still hold its snapshots."""
    there = {node.name: node for node in sorted(ready, key=lambda node: node.name)}
    homes = state.homes if len(state.homes) == need else ()
    others = iter([node for name, node in there.items() if name not in homes])
    return [there.get(home) or next(others) for home in homes] or list(there.values())[:need]


def _choose_homes(look: Look, state: ControlState) -> Step:
    """Form the first membership where the pods of another controller are."""
    found = homes(look, state)
    missing = missing_homes(look, found)
    if missing:
        return Step(state, waiting=missing)
    return _place_on(look, state, [node for _, node in sorted(found.items())])


def _place_on(look: Look, state: ControlState, nodes: list[NodeView]) -> Step:
    """Form the first membership, with a member on each of `nodes`, in their order."""
    try:
        membership = form(look.job, nodes, state.epoch + 1)
    except InvalidJobError as error:
        return end(look, state, Outcome.FAILED, str(error), "CannotBePlaced")
    placed = replace(state, suspended=False, shape=Shape.of(look.job))
    step = publish(look, placed, membership)
    members = listed(f"{member.index} on {member.node}" for member in membership.members)
    step = step.post(EventReason.SCHEDULED, f"members {members}; epoch {membership.epoch} begins")
    return step.then(start_missing(look, step.state, membership)).wait()


def _missing(look: Look, absent: list[str]) -> str:
    """Text on why the other nodes take no member, in brackets; empty without other nodes."""
    nodes = look.observed.nodes.values()
    closed = sorted(node.name for node in nodes if not node.schedulable and not node.gone)
    reasons = [f"waiting for {listed(absent)}"] if absent else []
    refusals = look.observed.refusals
    if refusals:
        reasons += [f"{count} of the cluster: {why}" for why, count in refusals[:REFUSALS_SHOWN]]
    elif closed:
        reasons.append(f"not schedulable: {listed(closed)}")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _complete(look: Look, state: ControlState, membership: Membership) -> Step:
    if not judge.all_agents_succeeded(look.observed, membership):
        return Step(state)
    return end(look, state, Outcome.COMPLETE, "all agents exited with code 0")


def _note_silence(look: Look, state: ControlState, membership: Membership) -> Step:
    """Emit an event for each daemon that has fallen silent or is back."""
    if state.confirmed_epoch != membership.epoch:
        return Step(state)  # the loop has just begun to listen
    silent = frozenset(
        member.node
        for member in membership.members
        if not is_reachable(look.job, node_of(look.observed, member), state, look.now)
    )
    step = Step(replace(state, silent=silent))
    for name in sorted(silent - state.silent):
        step = step.post(
            EventReason.DAEMON_SILENT, f"no heartbeat from the daemon on {name}", warning=True
        )
    back = state.silent - silent
    for member in membership.members if back else ():
        node = node_of(look.observed, member)
        if member.node in back and node.memory_id == member.memory_id:
            step = step.post(
                EventReason.DAEMON_BACK, f"the daemon on {member.node} is back with its memory"
            )
    return step


def _note_progress(look: Look, state: ControlState, membership: Membership) -> Step:
    """Remember the progress that daemons report of the epoch: who is in it, its line, what is
    safe."""
    views = look.observed.views(membership)
    known = [view for view in views if view is not None]
    line = _line_of(look, membership)
    start = line.generation.step if line is not None and line.generation is not None else 0
    if look.job.spec.redundancy.type is Redundancy.NONE:
        saved = judge.newest_complete(look.observed, membership)
        if saved is not None and not membership.is_present(saved):
            saved = None  # members that have left may have held it, or not
    else:
        saved = judge.newest_protected(look.observed)
    newer = saved is not None and (state.saved is None or saved > state.saved)
    started_from = state.started_from
    if line is not None and started_from is None:
        started_from = start
    live = live_step(look.observed, membership)
    if live is not None:
        started_from = live
    protected = [view.protected for view in known if view.protected is not None]
    whole = any(membership.is_present(generation) for generation in protected)
    return Step(
        replace(
            state,
            confirmed_epoch=membership.epoch if len(known) == len(views) else state.confirmed_epoch,
            renewed=frozenset() if whole else state.renewed,
            shape=state.shape or Shape.of(look.job),
            started_from=started_from,
            saved=saved if newer else state.saved,
            saved_at=look.now if newer else state.saved_at,
        )
    )


def _line_of(look: Look, membership: Membership) -> Line | None:
    """Recovery line of the epoch, once a daemon reports it."""
    views = look.observed.views(membership)
    return next((v.line for v in views if v is not None and v.line is not None), None)


def _note_signs(look: Look, state: ControlState, membership: Membership) -> Step:
    """Remember when a start, or an end, was last seen to get on; emit an event when that was long
    ago."""
    stall = stall_of(look.job, membership, look.observed, state, look.now)
    signs = signs_of(look.observed, state, membership) if stall is not None else ()
    if stall is None or not signs:
        return Step(replace(state, signs=()))
    if signs != state.signs:
        return Step(replace(state, signs=signs, quiet_since=look.now))
    slow = f"{membership.epoch} {'end' if stall.ending else 'start'}"
    if stall.working and stall.waited_s >= stall.limit_s and state.works != slow:
        reason = EventReason.WORKS_UNPROTECTED
        return Step(replace(state, works=slow)).post(reason, stall.message, warning=True)
    if stall.quiet_s < NOTICE_SHARE * stall.limit_s or state.slow == slow:
        return Step(state)
    reason = EventReason.SLOW_END if stall.ending else EventReason.SLOW_START
    return Step(replace(state, slow=slow)).post(reason, stall.message, warning=True)


def _note_resumption(look: Look, state: ControlState, membership: Membership) -> Step:
    """Emit one event in each epoch, when training runs."""
    if state.resumed_epoch >= membership.epoch:
        return Step(state)
    if not judge.training_runs(look.observed, membership):
        return Step(state)
    whole = len(membership.members) == look.job.spec.nodes
    unfit = frozenset[str]() if whole else state.unfit  # or members would leave and join for ever
    resumed = replace(
        state, resumed_epoch=membership.epoch, ran=True, recovering=False, unfit=unfit
    )
    line = _line_of(look, membership)
    start = line.generation if line is not None else None
    replay = replay_in_words(ranks_in(look.observed, membership)) if state.recoveries else ""
    came = _resumption(look, membership, start)
    return Step(resumed).post(EventReason.RUNNING, f"{came}; {replay}" if replay else came)


def _resumption(look: Look, membership: Membership, start: Generation | None) -> str:
    who = f"{membership.world_size} ranks train in epoch {membership.epoch}"
    live = live_step(look.observed, membership)
    if live is not None:
        return f"{who} from step {live}, live: no step was lost"
    if start is None:
        return f"{who} from the beginning"
    ranks = ranks_in(look.observed, membership)
    by_source = {
        source: [rank.rank for rank in ranks if rank.restored_from is source]
        for source in (RestoreSource.PARITY, RestoreSource.STORAGE)
    }
    parts = [f"{ranks_in_words(found)} from {kind}" for kind, found in by_source.items() if found]
    origin = " and ".join(parts) or "all from local memory"
    return f"{who} from generation {start} (step {start.step}), {origin}"


def _fail_when_overdue(look: Look, state: ControlState, _: Membership) -> Step:
    return fail_when_overdue(look, state)


def _fail_without_line(look: Look, state: ControlState, membership: Membership) -> Step:
    """Rule 5: fail when an epoch would start from nothing although a generation was safe."""
    line, saved = _line_of(look, membership), state.saved
    if line is None or line.generation is not None or saved is None:
        return Step(state)
    if saved.epoch >= membership.epoch or state.started_from:  # from such a line only live
        return Step(state)
    if may_go_on_live(look.observed, membership):
        return Step(state)
    return end(
        look,
        state,
        Outcome.FAILED,
        f"no recovery line: generation {saved} was the newest that was safe, and too much of "
        f"it is lost ({line.reason}); nothing was persisted, and no processes are left that have "
        f"everything. Run the job again to train from the beginning",
        "NoRecoveryLine",
    )


def _tend(look: Look, state: ControlState, membership: Membership) -> Step:
    """Tend a job in which nothing failed: its addresses, and agents that are missing or on a
    wrong node."""
    if state.confirmed_epoch != membership.epoch:
        # The control loop that published it may have died before it reached them all.
        text = f"waiting until all daemons are in epoch {membership.epoch}"
        return Step(state, (PublishMembership(membership=membership),), waiting=text)
    step = Step(state)
    current = refreshed(membership, look.observed.nodes)
    if current is not membership:
        step = publish(look, state, current)
        text = f"epoch {current.epoch}, revision {current.revision}"
        step = step.post(EventReason.READDRESSED, text)
    step = step.then(_stop_strays(look, step.state, membership, current))
    step = step.then(start_missing(look, step.state, current))
    if step.state.resumed_epoch == membership.epoch:
        return step.wait()
    ready = sum(r.at_work for r in ranks_in(look.observed, membership))
    text = f"{ready} of {membership.world_size} ranks are at work in epoch {current.epoch}"
    stall = stall_of(look.job, membership, look.observed, step.state, look.now)
    if stall is not None and stall.waited_s >= STALL_SHOWN_S:
        text += f"; {stall.message}"
    return step.wait(text + _agents_that_wait(look, current))


def _stop_strays(
    look: Look, state: ControlState, membership: Membership, current: Membership
) -> Step:
    """Stop agents that are on a wrong node, or have failed in an earlier epoch."""
    homes = {(member.index, member.node) for member in current.members}
    agents = look.observed.agents
    absent = absent_members(look.job, membership)  # whose agents get ready (`joining`)
    strays = [a for a in agents if (a.member, a.node) not in homes and a.member not in absent]
    step = stop(look, state, strays)
    left = [a for a in agents if is_left_over(a, state, membership)]
    if not left:
        return step
    step = step.then(stop(look, state, [a for a in left if (a.member, a.node) in homes]))
    # The next agent of these members that fails has failed in this epoch.
    carried = state.carried.difference(agent.member for agent in left)
    return replace(step, state=replace(state, began_at=look.now, carried=carried))


def _agents_that_wait(look: Look, membership: Membership) -> str:
    """The first agent that has not started, or cannot start its workers, and why."""
    for member in membership.members:
        agent = agent_at(look.observed, member)
        if agent is not None and agent.state in _MAY_WAIT and agent.why:
            return f"; the agent of member {member.index} on {member.node} waits: {agent.why}"
    return ""


_RULES = (
    _complete,
    resume,
    _note_silence,
    _note_progress,
    note_first_step,
    note_copies,
    note_losses,
    note_plan,
    note_unprotected,
    note_late_ends,
    note_shortages,
    _note_resumption,
    _note_signs,
    _fail_when_overdue,
    _fail_without_line,
    pass_stored_epochs,
    recover,
    grow,
    _tend,
)
"""Rules for a job whose members have nodes, in order."""
