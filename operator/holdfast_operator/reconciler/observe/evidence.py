"""Derives causes from observations: what has failed, in the words of events and conditions.

Level-triggered: a cause is read from the present state, never remembered. Publishing a new epoch
voids the evidence from the old one, so that a cause leads to one recovery. `recovering`, not this
module, decides what follows from a cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast_core.corruption import Proof
from holdfast_core.exit_codes import BEGINS_ANEW, HOLDFAST_DECIDED
from holdfast_core.job.parsing import MoETrainingJob, On
from holdfast_core.kernel_messages import device_at_fault
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_core.states import EndReason
from holdfast_operator.reconciler.observe.corruption import members_to_move, to_undo
from holdfast_operator.reconciler.observe.inspections import diagnosis_of
from holdfast_operator.reconciler.observe.lookups import (
    agent_at,
    detection_s,
    is_reachable,
    node_of,
    ranks_in,
    silent_s,
)
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.silence import hang_limit
from holdfast_operator.reconciler.observe.stalls import stall_of
from holdfast_operator.reconciler.observe.stragglers import (
    member_to_move,
    named_stragglers,
    straggler_in_words,
)
from holdfast_operator.reconciler.observe.text import (
    NAMED_MAX,
    agent_exit_in_words,
    checked_device,
    exit_in_words,
    failed_check,
    ranks_in_words,
)
from holdfast_operator.reconciler.observe.views import (
    NEVER,
    AgentState,
    AgentView,
    ClusterView,
    ControlState,
    JobView,
    NodeView,
)

RETURN_S = 30.0
"""Additional wait for a daemon that is being ended on purpose, or was seen starting, on a living
node: moving its member would cost more than waiting for the memory that is still there."""

DIAL_S = 10.0
"""Additional wait for a daemon that has not connected to this control loop yet: it may first have
to notice that the last control loop is gone, and then connect again. It begins anew with each
daemon of the job that connects for the first time: what has kept that one away may keep others."""

PATIENCE_S = 60.0
"""Additional wait for a silent node that may still live, while its parity group could not rebuild
its snapshots: giving the node up loses the generation to which the job can go back. After this the
job starts from a copy in durable storage. Without one it waits, as for a node that nothing
replaces."""

UNSCHEDULABLE_S = 30.0
"""How long there may be no room for an agent on its node before another node is tried."""

UNSCHEDULABLE = "Unschedulable"
"""Reason of an agent for which the cluster finds no room: the word of Kubernetes' scheduler."""

FOLLOWING_CODE = 1
"""Exit code of a rank that Python ended with a traceback, such as a broken connection to a peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One failure, for one failure rule."""

    on: On
    """Name of the failure in rules; `Any` for failures that have no name there, such as a lost
    rank."""
    text: str
    member: int | None = None
    ranks: frozenset[int] = frozenset()
    """The ranks of the member that have failed, and are all that has to start again of it; empty
    where the whole member has to."""
    exit_code: int | None = None
    last_lines: str = ""
    """Last lines that the rank or agent wrote, when it ended by itself."""
    kernel_messages: str = ""
    """Lines that the kernel of its node wrote about the end of the rank."""
    hardware_fault: bool = False
    """Whether the kernel had reported a fault of the node's hardware before the rank ended, or held
    up the others."""
    device: str = ""
    """The GPU at fault, of a fault of hardware or a failed check; empty where none is known."""
    node_lost: bool = False
    """Whether the member's memory on its node is lost, so that the member cannot continue there."""
    presumed: bool = False
    """Whether only its daemon's silence tells that the node is lost: its memory may be there."""
    evicted: bool = False
    """Whether the member's node takes no agent, so that the member cannot continue there although
    its memory is there."""
    voluntary: bool = False
    """Whether the member works, or has nothing to lose: a recovery is worth it only if it finds a
    better node."""
    straggles: bool = False
    """Whether a rank of the member is slow, and its node may be the reason."""
    corrupts: bool = False
    """Whether replicas differ, so that no rank can keep the state that it has; the member is the
    one with wrong bytes, if that is known."""
    repeats: bool = False
    """Whether the steps are to be repeated in the same world, as only that may show which of the
    replicas is wrong."""
    was_corrupt: bool = False
    """Whether a rank of the member had wrong bytes on its node in an earlier epoch."""
    stuck: bool = False
    """Whether training waits for the member's agent, which finds no room on its node."""
    counted: bool = False
    """Whether an earlier recovery has counted this cause: it waits for it, or has led to it."""
    awaits_code: bool = False
    """Whether the agent may still report the rank's exit code."""
    failed_check: bool = False
    """Whether the member's agent does not take part, because a check of its node failed."""
    culprit: bool = False
    """Whether a hang is known to come from this member alone."""

    @property
    def ended_by_holdfast(self) -> bool:
        """Whether Holdfast, and nothing in the script, has decided that the rank ends."""
        return self.on is On.EXIT_CODE and self.exit_code in HOLDFAST_DECIDED

    @property
    def unfit_node(self) -> bool:
        """Whether the node, and nothing in the script, is at fault, although its daemon is
        there."""
        return self.failed_check or self.hardware_fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Causes of a recovery, and the daemons that must report before it begins."""

    causes: tuple[Cause, ...]
    suspects: tuple[str, ...]
    """Members' nodes that are silent, but not yet long enough to be lost."""
    groups: ParityGroups


def gather(
    job: MoETrainingJob,
    membership: Membership,
    observed: ClusterView,
    state: ControlState,
    now: float,
) -> Evidence:
    """Find everything that is wrong with the training world of `membership` now."""
    causes: list[Cause] = []
    suspects: list[str] = []
    groups = ParityGroups(job, membership, observed, state, now)
    strange: dict[int, bool] = {}
    dialling_s = _dialling_s(membership, observed, state)
    for member, view in zip(membership.members, observed.views(membership), strict=True):
        node = node_of(observed, member)
        loss = _node_loss(job, member, node, silent_s(node, state, now), dialling_s, groups)
        if loss is not None:
            causes.append(loss)
        elif not is_reachable(job, node, state, now):
            suspects.append(member.node)
        else:
            causes.extend(_contradiction(membership, member, view, strange))
            found = list(_member_causes(job, membership, member, view, observed, state, now))
            causes.extend(found or _awaited(job, membership, member, observed, state))
    if not suspects and (last := to_undo(job, membership, observed, state, now)) is not None:
        repeats = last.proof is Proof.NONE
        causes.append(
            Cause(on=On.ANY, text=last.text, member=last.member, corrupts=True, repeats=repeats)
        )
    if not suspects and not causes:
        causes.extend(_on_corrupt_nodes(job, membership, state, now))
        causes.extend(_straggler(job, membership, state, now))
    if not suspects and all(cause.voluntary for cause in causes):
        causes.extend(_hang(job, membership, observed, state, now))
    return Evidence(causes=tuple(causes), suspects=tuple(suspects), groups=groups)


def principal(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Drop the causes that others explain. When a node is lost or taken away, ranks elsewhere die
    as a result: they vanish, exit with a traceback (code 1) or are aborted (codes from 128 on).
    When a rank died of something else, code 1 and ranks without a code are its consequence. Codes
    with which Holdfast ends a rank are the consequence of any other. A fault of hardware explains
    the ends of ranks that say nothing themselves: others may have an error of their own. Replicas
    that differ are nobody's consequence."""
    found = tuple(causes)
    if any(not (c.ended_by_holdfast or c.voluntary) for c in found):
        found = tuple(c for c in found if not c.ended_by_holdfast)
    is_explained = _never
    if any(c.on in (On.NODE_LOST, On.DISRUPTION) and not c.voluntary for c in found):
        is_explained = _follows_a_loss
    elif any(c.on is On.EXIT_CODE and c.exit_code != FOLLOWING_CODE for c in found):
        is_explained = _follows_an_end
    elif any(c.on is On.EXIT_CODE and c.hardware_fault for c in found):
        is_explained = _follows_a_fault
    return tuple(c for c in found if c.corrupts or not is_explained(c))


def may_follow(cause: Cause) -> bool:
    """Whether the end of a rank may be the consequence of another's."""
    return cause.exit_code == FOLLOWING_CODE and not cause.hardware_fault


def _never(cause: Cause) -> bool:
    del cause
    return False


def _follows_an_end(cause: Cause) -> bool:
    return cause.on is On.ANY or may_follow(cause)


def _follows_a_fault(cause: Cause) -> bool:
    return cause.on is On.ANY or (may_follow(cause) and not cause.last_lines)


def _follows_a_loss(cause: Cause) -> bool:
    code = cause.exit_code
    died = code is None or code == FOLLOWING_CODE or code >= 128
    if cause.hardware_fault:
        return False
    return cause.on is On.ANY or (cause.on is On.EXIT_CODE and died)


def _node_loss(
    job: MoETrainingJob,
    member: Member,
    node: NodeView,
    silence_s: float,
    dialling_s: float,
    groups: ParityGroups,
) -> Cause | None:
    patience_s = detection_s(job)
    if silence_s >= patience_s and not node.gone:
        patience_s += max(
            job.spec.failure_policy.detection.replace_seconds,
            RETURN_S if node.returning else 0.0,
            dialling_s if node.heartbeat_at == NEVER else 0.0,
            0.0 if groups.bear_loss_of(member.index) else PATIENCE_S,
        )
    if silence_s >= patience_s:
        text = (
            f"member {member.index} lost with node {member.node} "
            f"(no heartbeat for {silence_s:.1f} s)"
        )
    elif node.connected and node.memory_id != member.memory_id:
        text = f"member {member.index} lost its memory: node {member.node} came back with another"
    else:
        return None
    return Cause(
        on=On.NODE_LOST,
        text=text,
        member=member.index,
        node_lost=True,
        presumed=not (node.gone or node.connected),
    )


def _dialling_s(membership: Membership, observed: ClusterView, state: ControlState) -> float:
    """Additional wait for a member's daemon that has not connected to this control loop yet."""
    newest = max(node_of(observed, member).first_heard_at for member in membership.members)
    return DIAL_S + max(0.0, newest - state.attentive_since)


def _member_causes(
    job: MoETrainingJob,
    membership: Membership,
    member: Member,
    view: JobView | None,
    observed: ClusterView,
    state: ControlState,
    now: float,
) -> Iterator[Cause]:
    """Find what is wrong with a member whose daemon is reachable."""
    agent, node = agent_at(observed, member), node_of(observed, member)
    ran = state.resumed_epoch == membership.epoch
    if agent is not None and is_left_over(agent, state, membership):
        yield from _rank_failures(member, view, agent)
        return
    failures = list(_failures(job, member, view, agent))
    if agent is None and state.confirmed_epoch == membership.epoch and not node.schedulable:
        text = f"member {member.index} has no agent, and node {member.node} accepts none"
        yield Cause(on=On.DISRUPTION, text=text, member=member.index, evicted=True)
    elif agent is not None and _is_taken_away(agent, ran or bool(failures)):
        how = "was taken away" if agent.state is AgentState.EXITED else "is being removed"
        text = f"the agent of member {member.index} on {member.node} {how}: "
        yield Cause(
            on=On.DISRUPTION,
            text=text + agent.disruption,
            member=member.index,
            evicted=not node.schedulable,
        )
    elif failures:
        yield from failures
    elif agent is None and ran:
        # Ranks that had closed their sessions ended with it, and the others need them.
        text = f"the agent of member {member.index} has vanished"
        yield Cause(on=On.ANY, text=text, member=member.index)
    else:
        yield from _reasons_to_move(
            member, node, agent, max(state.began_at, state.attentive_since), now
        )


def _awaited(
    job: MoETrainingJob,
    membership: Membership,
    member: Member,
    observed: ClusterView,
    state: ControlState,
) -> Iterator[Cause]:
    """Find a member that the epoch waits for, because its agent is missing. A job that may continue
    without the member does so."""
    forming = state.ran and membership.epoch == state.confirmed_epoch > state.resumed_epoch
    agent = agent_at(observed, member)
    if not job.spec.may_shrink or not forming:
        return
    if agent is None or (agent.state is not AgentState.RUNNING and agent.exit_code != 0):
        how = "is missing" if agent is None else f"is {agent.state.value}"
        text = f"training waits for the agent of member {member.index}, which {how}"
        yield Cause(on=On.ANY, text=text, member=member.index, voluntary=True, counted=True)


def is_left_over(agent: AgentView, state: ControlState, membership: Membership) -> bool:
    """Whether an agent may have failed in an earlier epoch: its daemon reports the ranks before the
    agent's own end is known, and a restarted control loop cannot find out when that was. If it took
    ranks with it in this epoch, its daemon reports them."""
    if agent.state is not AgentState.EXITED or agent.exit_code == 0:
        return False
    if state.resumed_epoch == membership.epoch:
        return False
    return state.began_at == NEVER or agent.member in state.carried


def _is_taken_away(agent: AgentView, worked: bool) -> bool:
    """Whether the cluster ends the agent, and training with it. An agent that is already ending was
    at work only if there was work: otherwise it belongs to the last epoch, which has ended."""
    if not agent.disruption or agent.state is AgentState.STARTING:
        return False
    if agent.state is AgentState.EXITED:
        return agent.exit_code != 0
    return agent.state is AgentState.RUNNING or worked


def _failures(
    job: MoETrainingJob, member: Member, view: JobView | None, agent: AgentView | None
) -> Iterator[Cause]:
    yield from _rank_failures(member, view, agent)
    if agent is not None and agent.state is AgentState.EXITED and agent.exit_code != 0:
        code = agent.exit_code
        how = (
            agent_exit_in_words(job, code, agent.reason, agent.message)
            if code is not None
            else agent.why or "ended"
        )
        yield Cause(
            on=On.EXIT_CODE,
            text=f"the agent of member {member.index} {how}",
            member=member.index,
            exit_code=code,
            failed_check=failed_check(job, code, agent.reason),
            device=checked_device(agent.last_lines),
            last_lines=agent.last_lines,
        )


def _rank_failures(
    member: Member, view: JobView | None, agent: AgentView | None
) -> Iterator[Cause]:
    """Find failed or lost ranks. An agent reports the exit codes of workers that failed; if the
    others cannot stay, it ends them, and reports only the first."""
    if view is None:
        return
    exits = [(rank, rank.exit_code) for rank in view.ranks if rank.exit_code]
    lost = [rank.rank for rank in view.ranks if rank.lost]
    for rank, code in exits:
        yield Cause(
            on=On.EXIT_CODE,
            text=f"rank {rank.rank} {exit_in_words(code, rank.exit_reason)}",
            member=member.index,
            ranks=frozenset({rank.rank}),
            exit_code=code,
            last_lines=rank.last_lines,
            kernel_messages=rank.kernel_messages,
            hardware_fault=rank.exit_reason is EndReason.HARDWARE_FAULT,
            device=device_at_fault(rank.kernel_messages),
            counted=code == BEGINS_ANEW,
        )
    if exits:
        return
    if lost:
        yield Cause(
            on=On.ANY,
            text=f"{ranks_in_words(lost)} lost",
            member=member.index,
            ranks=frozenset(lost),
            awaits_code=agent is not None
            and agent.state is AgentState.RUNNING
            and not view.agent_waiting,
        )
    elif view.agent_waiting:
        text = f"the agent of member {member.index} waits for a new epoch"
        yield Cause(on=On.ANY, text=text, member=member.index)


def _reasons_to_move(
    member: Member, node: NodeView, agent: AgentView | None, since: float, now: float
) -> Iterator[Cause]:
    """Reasons to move a member that has not failed."""
    if node.disruption:
        text = f"node {member.node} of member {member.index} will be taken away: {node.disruption}"
        yield Cause(on=On.DISRUPTION, text=text, member=member.index, voluntary=True)
    elif agent is not None and is_unschedulable(agent) and now - since >= UNSCHEDULABLE_S:
        text = f"there is no room for member {member.index} on node {member.node} ({agent.why})"
        yield Cause(on=On.DISRUPTION, text=text, member=member.index, voluntary=True, stuck=True)


def _on_corrupt_nodes(
    job: MoETrainingJob, membership: Membership, state: ControlState, now: float
) -> Iterator[Cause]:
    """Find members that work where a rank had wrong bytes."""
    for index in members_to_move(job, membership, state, now):
        node = membership.member(index).node
        text = f"member {index} is on {node}, where a rank had wrong bytes"
        yield Cause(on=On.ANY, text=text, member=index, voluntary=True, was_corrupt=True)


def _straggler(
    job: MoETrainingJob, membership: Membership, state: ControlState, now: float
) -> Iterator[Cause]:
    """Find a member that works, but slowly, and should move for that."""
    member = member_to_move(job, membership, state, now)
    if member is not None:
        text = "; ".join(
            straggler_in_words(membership, each)
            for each in named_stragglers(membership, state)[:NAMED_MAX]
        )
        yield Cause(on=On.ANY, text=text, member=member, voluntary=True, straggles=True)


def is_unschedulable(agent: AgentView) -> bool:
    """Whether an agent waits because the cluster finds no room for it."""
    return agent.state is AgentState.STARTING and agent.reason == UNSCHEDULABLE


def _contradiction(
    membership: Membership, member: Member, view: JobView | None, strange: dict[int, bool]
) -> Iterator[Cause]:
    """Find a daemon that holds another membership of the same epoch. `strange` caches comparisons
    by `id`: thousands of daemons mostly report one object, and it is long."""
    theirs = None if view is None else view.membership
    if theirs is None:
        return
    if id(theirs) not in strange:
        strange[id(theirs)] = theirs is not membership and _differ(theirs, membership)
    if strange[id(theirs)]:
        text = f"node {member.node} holds another membership of epoch {membership.epoch}"
        yield Cause(on=On.ANY, text=text, member=member.index)


def _differ(theirs: Membership, ours: Membership) -> bool:
    """Whether two memberships differ in more than addresses."""

    def identity(of: Membership) -> list[tuple[int, str, str]]:
        return [(member.index, member.node, member.memory_id) for member in of.members]

    return identity(theirs) != identity(ours)


def _hang(
    job: MoETrainingJob,
    membership: Membership,
    observed: ClusterView,
    state: ControlState,
    now: float,
) -> Iterator[Cause]:
    """Find out whether there has been no progress for too long: in a start or at the end, where no
    rank can report steps (`stalls`), or in training. In training, ranks wait for each other in
    collectives, so one that hangs stops all; the text names ranks that are a step behind, or idle
    for longest. If an inspection shows who holds up the others, these are the ranks that have
    failed."""
    diagnosis = diagnosis_of(observed, membership, state)
    found = f"; {diagnosis.text}" if diagnosis is not None else ""
    stall = stall_of(job, membership, observed, state, now)
    if stall is not None:
        if stall.quiet_s >= stall.limit_s:
            text = f"{stall.quiet_text} for {stall.quiet_s:.1f} s{found}"
            yield Cause(on=On.HANG, text=text, member=stall.member)
        return
    everyone = ranks_in(observed, membership)
    ranks = [r for r in everyone if r.at_work]
    if not ranks:
        return
    idle_s = min(r.idle_s for r in ranks)
    started = any(r.step > (state.started_from or 0) for r in ranks)
    if started and not hang_limit(job, state).is_passed(everyone, membership.world_size):
        return
    if not started and idle_s < job.spec.failure_policy.detection.start_limit_s:
        return
    behind_step = min(r.step for r in ranks)
    behind = [r for r in ranks if r.step == behind_step]
    longest_s = max(r.idle_s for r in behind)
    named = [r.rank for r in behind if r.idle_s == longest_s] if len(behind) > 1 else []
    named = named or [r.rank for r in behind]
    text = (
        f"no progress of any rank for {idle_s:.1f} s; {ranks_in_words(named)} idle for "
        f"{longest_s:.1f} s at step {behind_step}{found}"
    )
    # Ranks of one member that are a step behind hold the others up, if no inspection names any.
    homes = {membership.member_of(rank.rank) for rank in behind}
    culprit = len(homes) == 1 and len(behind) < len(ranks)
    if diagnosis is not None and diagnosis.culprits:
        culprit = len({*map(membership.member_of, diagnosis.culprits)}) == 1
        named = sorted(diagnosis.culprits) if culprit else named
    member = membership.member_of(named[0])
    hung = frozenset(named).intersection(membership.ranks_of(member))
    yield Cause(
        on=On.HANG,
        text=text,
        member=member,
        ranks=hung,
        culprit=culprit,
        hardware_fault=culprit and diagnosis is not None and diagnosis.hardware_fault,
        device=diagnosis.device if culprit and diagnosis is not None else "",
    )
