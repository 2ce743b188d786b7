"""The reconciler: from the observation to the actions, without I/O and without a clock.

One reconciler serves every adapter. It is level-triggered: it may be called at any time, any number
of times, and after it has lost its memory, since epoch and membership come back from the daemons'
heartbeats (invariant 6). It must not depend on what an agent or a node is made of.

Each rule receives the observation and the previous rule's state. It returns a `RuleResult`: a
state, actions, events, and perhaps a text on what the job waits for, which ends the turn (`rules`).
The rules keep to this:

0. Absence of evidence is no evidence of absence (invariant 7): protected state is given up only
   when a daemon reports that it does not hold it, when its node has ended, or when a person decides
   so. So a job that the status remembers as placed is placed again only when each of its members'
   daemons has reported, or its node is gone (`remembered`); until then its membership is adopted
   from the first daemon that reports it.
1. A recovery publishes a new epoch, one more than every epoch ever seen. So do the first placement,
   the end of a suspension and members that join, and otherwise only what rule 5 names. A change of
   addresses alone raises the revision. An epoch that is known but not confirmed by all its daemons
   is published again unchanged.
2. While a member's daemon is silent, but not long enough to be lost, nothing begins: an epoch needs
   all its daemons, and other failures are handled together with the loss. A node that may still
   live gets more time while its parity group could not bear its loss (`protection`).
3. After a lost rank, a failed agent or a hang, the same members begin a new epoch where they are.
   When a node is lost, a spare takes its place. A member that the cluster evicts, or finds no room
   for, moves to a spare while its parity group can rebuild it (`replacing`). The job continues
   without members for which no spare is left, or that could not start their ranks at once, down to
   `minNodes` (`shrinking`). Their agents get ready on their future nodes (`joining`), and then they
   join (`growing`). Below `minNodes` the job waits, until a rule of the user ends it (`waiting`).
4. Failure rules: the first that matches a cause gives its action (`failure_rules`). A lost node
   cannot be restarted in place, so it is replaced unless its rule is Fail. After an epoch that
   failed before it ran, the next one does not begin at once. A job that fails alike before its
   first step, again and again, has failed (`trainer_failures`).
5. A job does not start again from nothing once a generation was protected (without redundancy:
   complete). If no recovery line is left, in memory or in durable storage, it fails, unless
   processes that have outlived their world may have the whole state between them: only they know
   (`staying`). Before that point a fresh start breaks no promise, and happens; so it does when a
   person has changed the shape of a suspended job (`suspending`). An epoch that does not come after
   those in storage is followed by one that does (`stored_copies`).
6. For each notice that a member's node will be taken away, a copy in durable storage is requested,
   whatever else happens (`notices`).
7. On some spares an agent waits, ready for a member that moves there (`standby`).
8. A job that is complete frees its memory in the daemons; a failed job keeps it for a while, and
   continues if a person resumes it (`keeping`). Both are deleted when their time is over
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
from holdfast_operator.reconciler.failures.corruption import note_corruption
from holdfast_operator.reconciler.failures.deadlines import (
    delete_when_due,
    fail_when_overdue,
    note_activity,
)
from holdfast_operator.reconciler.failures.keeping import free_when_due, resume_failed
from holdfast_operator.reconciler.failures.notices import ask_for_copy
from holdfast_operator.reconciler.failures.replays import replay_in_words
from holdfast_operator.reconciler.failures.slow_links import note_links
from holdfast_operator.reconciler.failures.straggling import note_stragglers
from holdfast_operator.reconciler.failures.trainer_failures import note_first_step
from holdfast_operator.reconciler.failures.unprotected import note_unprotected
from holdfast_operator.reconciler.membership.followed_pods import FollowedPods
from holdfast_operator.reconciler.membership.growing import grow, strength_condition
from holdfast_operator.reconciler.membership.joining import absent_members
from holdfast_operator.reconciler.membership.own_pods import OwnPods
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
from holdfast_operator.reconciler.observe.corruption import with_corrupt_nodes
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
from holdfast_operator.reconciler.observe.silence import with_pauses
from holdfast_operator.reconciler.observe.stalls import NOTICE_SHARE, signs_of, stall_of
from holdfast_operator.reconciler.observe.text import listed, ranks_in_words
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    ClusterView,
    Condition,
    ControlState,
    Decision,
    EventReason,
    PublishMembership,
)
from holdfast_operator.reconciler.placement import form, refreshed
from holdfast_operator.reconciler.report import conditions as judge
from holdfast_operator.reconciler.report.end_reasons import note_late_ends, note_shortages
from holdfast_operator.reconciler.report.losses import note_losses
from holdfast_operator.reconciler.report.seats import note_plan
from holdfast_operator.reconciler.report.shortage import shortage_of
from holdfast_operator.reconciler.rules import (
    Observation,
    RuleResult,
    end,
    note_avoided,
    publish,
    run_rules,
    stop,
)

_MAY_WAIT = (AgentState.STARTING, AgentState.RUNNING)
STALL_SHOWN_S = 10.0
"""Silence in a start after which the status names what is waited for."""


def reconcile(
    job: MoETrainingJob,
    observed: ClusterView,
    state: ControlState,
    now: float,
    locations: Locations = None,
    standbys: int = 0,
) -> Decision:
    """Decide what to do now. Every adapter calls it once a turn, stores the state of the decision,
    carries out its actions in order, and passes the state in the next time.

    Args:
        locations: where the job may persist to.
        standbys: number of spares on which an agent shall wait.
    """
    observation = Observation(
        job=job,
        cluster=with_corrupt_nodes(observed, state),
        now=now,
        locations=locations,
        standbys=standbys,
        pods=FollowedPods() if job.spec.trainer.external else OwnPods(),
    )
    # The rules for members decide first, and may end the turn.
    result = _follow_rules(observation, observation.begin(state))
    result = replace(result, state=_with_homes(result.state))
    waiting = result.waiting or ""
    # Copies and standby agents follow from their decision, whatever it is.
    result = result.then(ask_for_copy(observation, result.state, state.membership))
    result = result.then(keep_standbys(observation, result.state))
    return Decision(
        state=result.state,
        actions=observation.pods.select_actions(result.actions),
        conditions=_conditions(observation, result.state, waiting),
        blamed=result.blamed,
        events=result.events,
        shortage=shortage_of(observation, result.state),
        reason=waiting or "all is as it should be",
    )


def _with_homes(state: ControlState) -> ControlState:
    """The state, with the nodes of its membership for the next control loop."""
    if state.membership is None:
        return state
    homes = tuple(member.node for member in state.membership.members)
    return state if homes == state.homes else replace(state, homes=homes)


def _conditions(
    observation: Observation, state: ControlState, waiting: str
) -> tuple[Condition, ...]:
    found = judge.conditions(
        observation.job, observation.cluster, state, observation.now, waiting, observation.locations
    )
    found += strength_condition(observation, state)
    return (*found, *storage_conditions(observation.cluster, state, observation.storage_refusal()))


def _follow_rules(observation: Observation, state: ControlState) -> RuleResult:
    result = run_rules((_clear_away, _adopt, suspend, note_activity, _place), observation, state)
    if result.waiting is not None:
        return result
    membership = result.state.membership
    assert membership is not None
    return result.then(run_rules(_RULES, observation, result.state, membership))


def _clear_away(observation: Observation, state: ControlState) -> RuleResult:
    """Stop what an ended job still runs, and free what it does not keep; or resume it."""
    result = resume_failed(observation, _known(observation, state) if state.kept else state)
    if result.state.outcome is None:
        # The rest follows in the next turn: until then its queue has not been asked.
        return result if state.outcome is None else result.wait("a person resumes the failed job")
    result = result.then(stop(observation, result.state, observation.cluster.agents))
    result = result.then(free_when_due(observation, result.state))
    return result.then(delete_when_due(observation, result.state)).wait()


def _known(observation: Observation, state: ControlState) -> ControlState:
    """`state` of a failed job, with what the daemons that keep its snapshots report."""
    known = _adopt(observation, state).state
    return (
        known
        if known.membership is None
        else note_copies(observation, known, known.membership).state
    )


def _adopt(observation: Observation, state: ControlState) -> RuleResult:
    """Adopt the newest membership that any daemon reports, when it is newer than ours."""
    known = state.membership
    views = (node.job for node in observation.cluster.nodes.values())
    seen = [view.membership for view in views if view is not None and view.membership]
    newest = max(seen, key=lambda m: (m.epoch, m.revision), default=None)
    if newest is None or newest.job != observation.job.key or newest.epoch <= state.void_epoch:
        return RuleResult(state)
    if known is None and newest.epoch < state.epoch and unheard_homes(observation.cluster, state):
        return RuleResult(state)  # they may hold a newer one, and what it has protected
    if known is None or newest.epoch > known.epoch:
        adopted = replace(state, membership=newest, started_from=None, resumed_epoch=0)
        text = f"epoch {newest.epoch} is adopted from the daemons and continues"
        return RuleResult(adopted).post(EventReason.ADOPTED, text)
    if newest.epoch == known.epoch and newest.revision > known.revision:
        return RuleResult(replace(state, membership=replace(known, revision=newest.revision)))
    return RuleResult(state)


def _place(observation: Observation, state: ControlState) -> RuleResult:
    """Place the members for the first time, or again when no daemon holds anything of the job any
    more, once there are enough daemons."""
    if state.membership is not None:
        return RuleResult(state)
    rules = (
        fail_when_overdue,
        _refuse,
        forget_reshaped,
        free_earlier_shape,
        _await_homes,
        _form_first,
    )
    return run_rules(rules, observation, state)


def _await_homes(observation: Observation, state: ControlState) -> RuleResult:
    """Rule 0: wait for the daemons that may hold what an earlier control loop has placed."""
    unheard = unheard_homes(observation.cluster, state)
    return RuleResult(state, waiting=awaited_in_words(state, unheard) if unheard else None)


def _refuse(observation: Observation, state: ControlState) -> RuleResult:
    """Wait while the job asks for something that cannot be done."""
    refusal = judge.unsupported(observation.job, observation.cluster, observation.locations)
    return RuleResult(state, waiting=None if refusal is None else refusal.message)


def _form_first(observation: Observation, state: ControlState) -> RuleResult:
    """Form the first membership, once there is a node for every member."""
    nodes, waiting = observation.pods.choose_nodes(observation, state)
    if waiting:
        return RuleResult(state, waiting=waiting)
    try:
        membership = form(observation.job, nodes, state.epoch + 1)
    except InvalidJobError as error:
        return end(observation, state, Outcome.FAILED, str(error), "CannotBePlaced")
    placed = replace(state, suspended=False, shape=Shape.of(observation.job))
    result = publish(observation, placed, membership)
    members = listed(f"{member.index} on {member.node}" for member in membership.members)
    result = result.post(
        EventReason.SCHEDULED, f"members {members}; epoch {membership.epoch} begins"
    )
    by_name, _ = observation.pods.choose_nodes(observation.unrated(), state)
    result = result.then(note_avoided(observation, result.state, nodes, by_name))
    return result.then(start_missing(observation, result.state, membership)).wait()


def _complete(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    if not judge.all_agents_succeeded(observation.cluster, membership):
        return RuleResult(state)
    return end(observation, state, Outcome.COMPLETE, "all agents exited with code 0")


def _note_silence(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Emit an event for each daemon that has fallen silent or is back."""
    if state.confirmed_epoch != membership.epoch:
        return RuleResult(state)  # the loop has just begun to listen
    silent = frozenset(
        member.node
        for member in membership.members
        if not is_reachable(
            observation.job, node_of(observation.cluster, member), state, observation.now
        )
    )
    result = RuleResult(replace(state, silent=silent))
    for name in sorted(silent - state.silent):
        result = result.post(
            EventReason.DAEMON_SILENT, f"no heartbeat from the daemon on {name}", warning=True
        )
    back = state.silent - silent
    for member in membership.members if back else ():
        node = node_of(observation.cluster, member)
        if member.node in back and node.memory_id == member.memory_id:
            result = result.post(
                EventReason.DAEMON_BACK, f"the daemon on {member.node} is back with its memory"
            )
    return result


def _note_pauses(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Learn after what silence the job hangs."""
    state = with_pauses(observation.job, observation.cluster, membership, state, observation.now)
    return RuleResult(state)


def _note_progress(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Remember the progress that daemons report of the epoch: who is in it, its line, what is
    safe."""
    views = observation.cluster.views(membership)
    known = [view for view in views if view is not None]
    line = _line_of(observation, membership)
    start = line.generation.step if line is not None and line.generation is not None else 0
    if observation.job.spec.redundancy.type is Redundancy.NONE:
        saved = judge.newest_complete(observation.cluster, membership)
        if saved is not None and not membership.is_present(saved):
            saved = None  # members that have left may have held it, or not
    else:
        saved = judge.newest_protected(observation.cluster)
    newer = saved is not None and (state.saved is None or saved > state.saved)
    started_from = state.started_from
    if line is not None and started_from is None:
        started_from = start
    live = live_step(observation.cluster, membership)
    if live is not None:
        started_from = live
    protected = [view.protected for view in known if view.protected is not None]
    whole = any(membership.is_present(generation) for generation in protected)
    return RuleResult(
        replace(
            state,
            confirmed_epoch=membership.epoch if len(known) == len(views) else state.confirmed_epoch,
            renewed=frozenset() if whole else state.renewed,
            shape=state.shape or Shape.of(observation.job),
            started_from=started_from,
            saved=saved if newer else state.saved,
            saved_at=observation.now if newer else state.saved_at,
        )
    )


def _line_of(observation: Observation, membership: Membership) -> Line | None:
    """Recovery line of the epoch, once a daemon reports it."""
    views = observation.cluster.views(membership)
    return next((v.line for v in views if v is not None and v.line is not None), None)


def _note_signs(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Remember when a start, or an end, was last seen to get on; emit an event when that was long
    ago."""
    stall = stall_of(observation.job, membership, observation.cluster, state, observation.now)
    signs = signs_of(observation.cluster, state, membership) if stall is not None else ()
    if stall is None or not signs:
        return RuleResult(replace(state, signs=()))
    if signs != state.signs:
        return RuleResult(replace(state, signs=signs, quiet_since=observation.now))
    slow = f"{membership.epoch} {'end' if stall.ending else 'start'}"
    if stall.working and stall.waited_s >= stall.limit_s and state.works != slow:
        reason = EventReason.WORKS_UNPROTECTED
        return RuleResult(replace(state, works=slow)).post(reason, stall.message, warning=True)
    if stall.quiet_s < NOTICE_SHARE * stall.limit_s or state.slow == slow:
        return RuleResult(state)
    reason = EventReason.SLOW_END if stall.ending else EventReason.SLOW_START
    return RuleResult(replace(state, slow=slow)).post(reason, stall.message, warning=True)


def _note_resumption(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Emit one event in each epoch, when training runs."""
    if state.resumed_epoch >= membership.epoch:
        return RuleResult(state)
    if not judge.training_runs(observation.cluster, membership):
        return RuleResult(state)
    whole = len(membership.members) == observation.job.spec.nodes
    unfit = frozenset[str]() if whole else state.unfit  # or members would leave and join for ever
    resumed = replace(
        state, resumed_epoch=membership.epoch, ran=True, recovering=False, unfit=unfit
    )
    line = _line_of(observation, membership)
    start = line.generation if line is not None else None
    replay = replay_in_words(ranks_in(observation.cluster, membership)) if state.recoveries else ""
    came = _resumption(observation, membership, start)
    return RuleResult(resumed).post(EventReason.RUNNING, f"{came}; {replay}" if replay else came)


def _resumption(observation: Observation, membership: Membership, start: Generation | None) -> str:
    who = f"{membership.world_size} ranks train in epoch {membership.epoch}"
    live = live_step(observation.cluster, membership)
    ranks = ranks_in(observation.cluster, membership)
    by_source = {
        source: [rank.rank for rank in ranks if rank.restored_from is source]
        for source in (RestoreSource.PARITY, RestoreSource.STORAGE)
    }
    parts = [f"{ranks_in_words(found)} from {kind}" for kind, found in by_source.items() if found]
    if live is not None:
        return ", ".join([f"{who} from step {live}", *parts, "live: no step was lost"])
    if start is None:
        return f"{who} from the beginning"
    origin = " and ".join(parts) or "all from local memory"
    return f"{who} from generation {start} (step {start.step}), {origin}"


def _fail_when_overdue(observation: Observation, state: ControlState, _: Membership) -> RuleResult:
    return fail_when_overdue(observation, state)


def _fail_without_line(
    observation: Observation, state: ControlState, membership: Membership
) -> RuleResult:
    """Rule 5: fail when an epoch would start from nothing although a generation was safe."""
    line, saved = _line_of(observation, membership), state.saved
    if line is None or line.generation is not None or saved is None:
        return RuleResult(state)
    if saved.epoch >= membership.epoch or state.started_from:  # from such a line only live
        return RuleResult(state)
    if may_go_on_live(observation.cluster, membership):
        return RuleResult(state)
    return end(
        observation,
        state,
        Outcome.FAILED,
        f"no recovery line: generation {saved} was the newest that was safe, and too much of "
        f"it is lost ({line.reason}); nothing was persisted, and no processes are left that have "
        f"everything. Run the job again to train from the beginning",
        "NoRecoveryLine",
    )


def _tend(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Tend a job in which nothing failed: its addresses, and agents that are missing or on a
    wrong node."""
    if state.confirmed_epoch != membership.epoch:
        # The control loop that published it may have died before it reached them all.
        text = f"waiting until all daemons are in epoch {membership.epoch}"
        return RuleResult(state, (PublishMembership(membership=membership),), waiting=text)
    result = RuleResult(state)
    current = refreshed(membership, observation.cluster.nodes)
    if current is not membership:
        result = publish(observation, state, current)
        text = f"epoch {current.epoch}, revision {current.revision}"
        result = result.post(EventReason.READDRESSED, text)
    result = result.then(_stop_strays(observation, result.state, membership, current))
    result = result.then(start_missing(observation, result.state, current))
    if result.state.resumed_epoch == membership.epoch:
        return result.wait()
    ready = sum(r.at_work for r in ranks_in(observation.cluster, membership))
    text = f"{ready} of {membership.world_size} ranks are at work in epoch {current.epoch}"
    stall = stall_of(
        observation.job, membership, observation.cluster, result.state, observation.now
    )
    if stall is not None and stall.waited_s >= STALL_SHOWN_S:
        text += f"; {stall.message}"
    return result.wait(text + _agents_that_wait(observation, current))


def _stop_strays(
    observation: Observation, state: ControlState, membership: Membership, current: Membership
) -> RuleResult:
    """Stop agents that are on a wrong node, or have failed in an earlier epoch."""
    homes = {(member.index, member.node) for member in current.members}
    agents = observation.cluster.agents
    absent = absent_members(observation.job, membership)  # whose agents get ready (`joining`)
    strays = [a for a in agents if (a.member, a.node) not in homes and a.member not in absent]
    result = stop(observation, state, strays)
    left = [a for a in agents if is_left_over(a, state, membership)]
    if not left:
        return result
    result = result.then(stop(observation, state, [a for a in left if (a.member, a.node) in homes]))
    # The next agent of these members that fails has failed in this epoch.
    carried = state.carried.difference(agent.member for agent in left)
    return replace(result, state=replace(state, began_at=observation.now, carried=carried))


def _agents_that_wait(observation: Observation, membership: Membership) -> str:
    """The first agent that has not started, or cannot start its workers, and why."""
    for member in membership.members:
        agent = agent_at(observation.cluster, member)
        if agent is not None and agent.state in _MAY_WAIT and agent.why:
            return f"; the agent of member {member.index} on {member.node} waits: {agent.why}"
    return ""


_RULES = (
    _complete,
    resume,
    _note_silence,
    _note_progress,
    note_first_step,
    _note_pauses,
    note_copies,
    note_losses,
    note_plan,
    note_unprotected,
    note_corruption,
    note_late_ends,
    note_shortages,
    _note_resumption,
    _note_signs,
    _fail_when_overdue,
    _fail_without_line,
    pass_stored_epochs,
    note_links,
    note_stragglers,  # whose cause may be the links of their node
    recover,
    grow,
    _tend,
)
"""Rules for a job whose members have nodes, in order."""
