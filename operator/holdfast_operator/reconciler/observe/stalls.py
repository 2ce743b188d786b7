"""What the start of training, or its end, waits for, and how long nothing of it has changed. Pure.

While training runs, ranks report steps, and their silence is a hang. Before they have sessions, and
after they have closed them, they report nothing: a rank that blocks while it loads its model, or a
process that never ends, would hold its nodes for ever. So the control loop looks for signs of
progress: launchers that run or have ended, ranks that follow their worlds or have sessions. Each
sign restarts the wait. So does work that launchers see: a process that uses the processor, reads or
writes may load for long, or train without a session, and nothing here can tell these apart. This
wait does not cover anything that has limits of its own: a launcher that does not run yet, snapshots
that are rebuilt or loaded.

`evidence`, not this module, makes a cause of a stall.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.lookups import agent_at, ranks_in
from holdfast_operator.reconciler.observe.text import listed, ranks_in_words, roughly
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    ClusterView,
    ControlState,
    RankView,
)

NOTICE_SHARE = 0.1
"""Part of a limit after which an event names what is waited for."""
WORK_S = 10.0
"""Age up to which a worker's last work shows that it works: launchers check every two seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A start of training, or its end, and how long nothing of it has changed."""

    ending: bool
    text: str
    """What the start or the end waits for."""
    member: int
    """A member that is waited for."""
    waited_s: float
    """Time since the last sign."""
    quiet_s: float
    """Time since the last sign or work."""
    limit_s: float
    """Silence that counts as a hang."""
    working: tuple[int, ...] = ()
    """Ranks that are waited for, and work."""

    @property
    def quiet_text(self) -> str:
        """The same, in the wording that the time of silence is added to."""
        return self.text if self.ending else f"{self.text}, and nothing has changed"

    @property
    def message(self) -> str:
        """What is waited for, for how long, and when it is over."""
        if not self.working or self.waited_s < WORK_S:
            quiet, limit = roughly(self.quiet_s), roughly(self.limit_s)
            return f"{self.quiet_text} for {quiet} (a hang after {limit})"
        work, what = ("works", "its") if len(self.working) == 1 else ("work", "their")
        why = (
            f"after {what} last save"
            if self.ending
            else "loading, or training without holdfast.init and session.save"
        )
        return (
            f"{self.text} for {roughly(self.waited_s)}; {ranks_in_words(self.working)} {work} "
            f"without protection, {why}"
        )


def stall_of(
    job: MoETrainingJob,
    membership: Membership,
    observed: ClusterView,
    state: ControlState,
    now: float,
) -> Stall | None:
    """What a start, or an end, waits for; None while training runs."""
    ranks = ranks_in(observed, membership)
    at_work = {rank.rank for rank in ranks if rank.at_work}
    stepped = any(rank.step > (state.started_from or 0) for rank in ranks)
    began = stepped or state.resumed_epoch == membership.epoch
    if began and at_work:
        return None
    detection = job.spec.failure_policy.detection
    waited_s = now - max(state.quiet_since, state.attentive_since) if state.signs else 0.0
    if began:
        return _ending(membership, observed, ranks, waited_s, detection.exit_seconds)
    members = [member.index for member in membership.members]
    lacking = [r for member in members for r in membership.ranks_of(member) if r not in at_work]
    if not lacking:
        return None
    who = ranks_in_words(lacking) if at_work else "all ranks"
    # Work of ranks that have sessions proves nothing: they may wait in a collective, and spin.
    without = [rank for rank in ranks if not rank.at_work]
    return Stall(
        ending=False,
        text=f"training waits for the sessions of {who}",
        member=membership.member_of(lacking[0]),
        waited_s=waited_s,
        quiet_s=_quiet_s(without, waited_s),
        limit_s=detection.start_limit_s,
        working=_working(without),
    )


def _quiet_s(ranks: Collection[RankView], waited_s: float) -> float:
    """Time since the last sign, or the last work of one of `ranks` if that came later."""
    since_s = [rank.since_work_s for rank in ranks if rank.since_work_s is not None]
    return min([waited_s, *since_s])


def _working(ranks: Collection[RankView]) -> tuple[int, ...]:
    return tuple(
        rank.rank for rank in ranks if rank.since_work_s is not None and rank.since_work_s < WORK_S
    )


def _ending(
    membership: Membership,
    observed: ClusterView,
    ranks: Collection[RankView],
    waited_s: float,
    limit_s: float,
) -> Stall:
    agents = [(member.index, agent_at(observed, member)) for member in membership.members]
    left = [index for index, agent in agents if not _has_ended(agent)]
    return Stall(
        ending=True,
        text=f"all ranks have closed their sessions, and the processes of members "
        f"[{listed(left)}] have not ended",
        member=left[0] if left else membership.members[0].index,
        waited_s=waited_s,
        quiet_s=_quiet_s(ranks, waited_s),
        limit_s=limit_s,
        working=_working(ranks),
    )


def signs_of(observed: ClusterView, state: ControlState, membership: Membership) -> tuple[int, ...]:
    """Progress of a start, or of an end, so far; empty while it waits for something that has limits
    of its own."""
    agents = [agent_at(observed, member) for member in membership.members]
    begun = (AgentState.RUNNING, AgentState.EXITED)
    if state.confirmed_epoch != membership.epoch:
        return ()
    if any(agent is None or agent.state not in begun for agent in agents):
        return ()
    views = [view for view in observed.views(membership) if view is not None]
    if len(views) < len(agents) or any(view.rebuilding or view.loading for view in views):
        return ()
    ranks = ranks_in(observed, membership)
    return (
        membership.epoch,
        sum(_has_ended(agent) for agent in agents),
        sum(view.line is not None for view in views),
        sum(rank.follows for rank in ranks),
        sum(rank.at_work for rank in ranks),
    )


def _has_ended(agent: AgentView | None) -> bool:
    return agent is not None and agent.state is AgentState.EXITED
