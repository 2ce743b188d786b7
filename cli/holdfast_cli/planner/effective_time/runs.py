"""Trainings simulated from failure to failure, and statistics over many of them.

Nothing happens between two events, so the cost of a run depends only on its number of failures,
whatever its length and its number of GPUs. Failures come at any time, also during a repair.

A job trains; a failure is detected; the job waits for a node if it needs one, and restarts. Then
all ranks go back and train on, or only the scope of the failure does: the failed stages, each with
all of its data-parallel ranks, which replay from the logs of their neighbours while the others wait
(MoEvement §3.4, appendix A). Failed stages that are neighbours replay together, others beside each
other. A failure in a replaying stage or beside one enlarges the scope: the joint one begins anew. A
failure elsewhere is detected and repaired while the replay goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from holdfast_cli.planner.effective_time.incidents import Draw, DrawOf, Incident, poisson
from holdfast_cli.planner.effective_time.policy_models import (
    AfterLoss,
    Cluster,
    PolicyModel,
    Workload,
)
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.dynamic_k import next_k

BAND = 0.9
"""Portion of the runs that lie within a band."""

_TOKENS = 1_000_000
"""Whole numbers of tokens of a step, for the rule of Dynamic-K."""


class Activity(StrEnum):
    """Activities that a job spends its time on."""

    TRAINING = "training"
    STALLED = "snapshots"
    REDOING = "doing steps again"
    DETECTING = "detection"
    RESTARTING = "restart"
    WAITING = "waiting for a node"
    SMALLER = "missing nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """One simulated training."""

    ettr: float
    seconds: Mapping[Activity, float]
    """Where the time went; together the length of the run."""
    steps: float
    """Steps that count."""
    failures: int
    restored: int
    """Recoveries that went back to a snapshot."""
    replayed_stages: int
    """Stages that those replayed, together; 0 where all ranks go back."""
    widest: int
    """Most stages that replayed at a time."""
    enlarged: int
    """Failures that enlarged the scope of a recovery in progress."""
    lost_tokens: float
    """Tokens that recoveries lost, as a portion of all."""
    experts: int
    """Experts in a snapshot at the end."""
    events: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Many simulated trainings of one kind."""

    ettr: float
    """Mean."""
    low: float
    high: float
    """Ends of the range that `BAND` of the runs are in."""
    portions: Mapping[Activity, float]
    """Where the time went, as portions of it."""
    failures: float
    """Mean number of a run."""
    replayed_stages: float
    """Mean number of stages that a recovery replays; 0 where all ranks go back."""
    widest: int
    """Most stages that replayed at a time, in any run."""
    enlarged: float
    """Mean number of failures of a run that enlarged the scope of a recovery in progress."""
    lost_tokens: float
    """Mean portion."""
    experts: int
    """Most experts that a snapshot held at the end of a run."""
    events: int
    """Number of simulated events, of all runs together."""


def simulate_run(
    model: PolicyModel,
    workload: Workload,
    cluster: Cluster,
    incidents: Iterable[Incident],
    *,
    length_s: float,
    draw: Draw,
) -> TrainingRun:
    """Simulate one training of `length_s`.

    Args:
        incidents: what happens to the job, by time; read up to `length_s`.
        draw: chooses the stage that a failure hits.

    Raises:
        InvalidJobError: when the length is not above 0.
    """
    if not 0 < length_s < inf:
        raise InvalidJobError(f"length_s={length_s}: give a time longer than 0")
    return _Training(model, workload, cluster, length_s, draw).run(iter(incidents))


def summarize(runs: Sequence[TrainingRun]) -> Runs:
    """Mean and band of the runs.

    Raises:
        InvalidJobError: when there are none.
    """
    if not runs:
        raise InvalidJobError("there is nothing to summarize; simulate at least one run")
    ratios = sorted(run.ettr for run in runs)
    outside = int(len(runs) * (1 - BAND) / 2)
    total_s = sum(sum(run.seconds.values()) for run in runs)
    restored = sum(run.restored for run in runs)
    return Runs(
        ettr=sum(ratios) / len(runs),
        low=ratios[outside],
        high=ratios[-1 - outside],
        portions={what: sum(run.seconds[what] for run in runs) / total_s for what in Activity},
        failures=sum(run.failures for run in runs) / len(runs),
        replayed_stages=sum(run.replayed_stages for run in runs) / max(1, restored),
        widest=max(run.widest for run in runs),
        enlarged=sum(run.enlarged for run in runs) / len(runs),
        lost_tokens=sum(run.lost_tokens for run in runs) / len(runs),
        experts=max(run.experts for run in runs),
        events=sum(run.events for run in runs),
    )


def simulate_many(
    policy: PolicyModel,
    workload: Workload,
    cluster: Cluster,
    mtbf_s: float,
    *,
    runs: int,
    length_s: float,
    draw_of: DrawOf,
    first_seed: int = 0,
) -> Runs:
    """Runs of `first_seed` and the seeds after it: the same failures for every policy."""
    return summarize(
        simulate_runs(
            policy,
            workload,
            cluster,
            mtbf_s,
            runs=runs,
            length_s=length_s,
            draw_of=draw_of,
            first_seed=first_seed,
        )
    )


def simulate_runs(
    policy: PolicyModel,
    workload: Workload,
    cluster: Cluster,
    mtbf_s: float,
    *,
    runs: int,
    length_s: float,
    draw_of: DrawOf,
    first_seed: int = 0,
) -> list[TrainingRun]:
    """The runs that `simulate_many` summarizes, by seed."""
    return [
        simulate_run(
            policy,
            workload,
            cluster,
            poisson(mtbf_s, cluster.node_losses, draw_of(2 * seed)),
            length_s=length_s,
            draw=draw_of(2 * seed + 1),
        )
        for seed in range(first_seed, first_seed + runs)
    ]


@dataclass(slots=True)
class _Scope:
    """Neighbouring stages that replay together."""

    stages: set[int]
    left_s: float
    """Time until they are back at the step of the others."""

    def touches(self, stages: set[int]) -> bool:
        """Whether any of `stages` is one of these, or a neighbour."""
        return any({stage - 1, stage, stage + 1} & self.stages for stage in stages)


class _Training:
    """The state of a simulated training between two events."""

    def __init__(
        self,
        model: PolicyModel,
        workload: Workload,
        cluster: Cluster,
        length_s: float,
        draw: Draw,
    ) -> None:
        self._model, self._workload, self._cluster = model, workload, cluster
        self._length_s, self._draw = length_s, draw
        self._now_s = 0.0
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._step = self._furthest = self._kept = 0.0
        """The step of training, the furthest step so far, and the step of the newest restore."""
        self._phase, self._ends_s = Activity.TRAINING, inf
        self._after: Callable[[], None] = self._train
        self._stages: set[int] = set()
        """Stages that have failed and do not replay yet; with `_scopes`, empty while training."""
        self._scopes: list[_Scope] = []
        """Stages that replay, also while other failures are being repaired."""
        self._replayed_stages = self._widest = self._enlarged = 0
        self._live = True
        """Whether the recovery in progress needs no snapshot."""
        self._lost_of_group: dict[int, int] = {}
        """Protection group → its nodes that were lost in the recovery in progress."""
        self._in_memory = True
        """Whether enough nodes are left in each group for the snapshots in memory."""
        self._missing, self._spares = 0, cluster.spares
        self._trained_on = cluster.nodes
        """Nodes of the world that trains, or that trained before the recovery in progress."""
        self._arriving: deque[float] = deque()
        self._joining: deque[float] = deque()
        self._level = 0
        self._lost_by_k: dict[int, float] = {}
        self._failures = self._restored = self._events = 0

    def run(self, incidents: Iterator[Incident]) -> TrainingRun:
        never = Incident(at_s=inf, nodes=0)
        coming = next(incidents, never)
        while True:
            arrives_s = self._arriving[0] if self._arriving else inf
            joins_s = self._joining[0] if self._joining else inf
            at_s = min(self._ends_s, coming.at_s, arrives_s, joins_s, self._length_s)
            self._advance(at_s)
            if at_s >= self._length_s:
                break
            self._events += 1
            if at_s == self._ends_s:
                self._after()
            elif at_s == coming.at_s:
                self._happen(coming)
                coming = next(incidents, never)
            elif at_s == arrives_s:
                self._arriving.popleft()
                self._arrive()
            else:
                self._joining.popleft()
                self._join()
        lost = sum(self._lost_by_k.values())
        return TrainingRun(
            ettr=self._seconds[Activity.TRAINING] / self._length_s,
            seconds=self._seconds,
            steps=self._furthest,
            failures=self._failures,
            restored=self._restored,
            replayed_stages=self._replayed_stages,
            widest=self._widest,
            enlarged=self._enlarged,
            lost_tokens=min(1.0, lost / self._furthest) if lost else 0.0,
            experts=self._model.levels[self._level].experts,
            events=self._events,
        )

    # --- time passes ------------------------------------------------------------------------------

    @property
    def _training(self) -> bool:
        """Whether all ranks are computing steps, for the first time or again."""
        return not self._stages and not self._scopes

    @property
    def _present(self) -> int:
        """Nodes that train, or could: others of those that are there are too few for a copy of the
        model."""
        present = self._cluster.nodes - self._missing
        return present - present % self._cluster.copy_nodes

    def _speed(self) -> tuple[float, float, float]:
        """Time of a step, the part of it that a step takes at full strength, and the part that
        snapshots add."""
        level = self._model.levels[self._level]
        stall_s = level.stall_s / level.interval_steps
        full_s = self._workload.step_s
        alive = max(self._present, 1)
        return full_s * self._cluster.nodes / alive + stall_s, full_s, stall_s

    def _advance(self, at_s: float) -> None:
        passed_s = at_s - self._now_s
        self._now_s = at_s
        if not self._training:
            self._seconds[self._phase] += passed_s
            for scope in self._scopes:
                scope.left_s = max(0.0, scope.left_s - passed_s)
            return
        step_s, full_s, stall_s = self._speed()
        steps = passed_s / step_s
        self._step += steps
        if self._phase is Activity.REDOING:
            self._seconds[Activity.REDOING] += passed_s
            return
        self._furthest = max(self._furthest, self._step)
        self._seconds[Activity.TRAINING] += steps * full_s
        self._seconds[Activity.STALLED] += steps * stall_s
        self._seconds[Activity.SMALLER] += max(0.0, passed_s - steps * (full_s + stall_s))

    def _enter(self, phase: Activity, lasts_s: float, after: Callable[[], None]) -> None:
        self._phase, self._ends_s, self._after = phase, self._now_s + lasts_s, after

    def _train(self) -> None:
        """All ranks compute; at first they repeat steps that they had computed before."""
        self._stages.clear()
        self._scopes.clear()
        self._live = True
        self._trained_on = self._present
        behind = self._furthest - self._step
        if behind > 0:
            lasts_s = self._model.repeated(behind) * self._speed()[0]
            self._enter(Activity.REDOING, lasts_s, self._caught_up)
        else:
            self._enter(Activity.TRAINING, inf, self._train)

    def _caught_up(self) -> None:
        self._step = self._furthest
        self._train()

    # --- failures ---------------------------------------------------------------------------------

    def _happen(self, incident: Incident) -> None:
        if incident.nodes > 0:
            for _ in range(incident.nodes):
                self._arrive()
            return
        self._failures += 1
        again, was_live = not self._training, self._live
        lost = -incident.nodes
        for _ in range(lost):
            self._lose_node()
        if (lost and again) or not self._lives_on(max(1, lost)):
            self._live = False
        if was_live and not self._live:
            self._lose_tokens()
        for _ in range(max(1, lost)):
            self._stages.add(int(self._draw() * self._workload.stages))
        self._enlarge_scope()
        self._enter(Activity.DETECTING, self._cluster.detect_s, self._on_detected)

    def _lives_on(self, lost: int) -> bool:
        """Whether copies of all state are left when so many nodes are lost at once. Those of a node
        on which only processes ended are gone, too."""
        if self._model.after_loss is not AfterLoss.LIVE:
            return False
        survives = self._model.survives(self._trained_on, lost)
        return survives >= 1 or (survives > 0 and self._draw() < survives)

    def _enlarge_scope(self) -> None:
        """Take replaying stages that have failed again, or have a failed neighbour, back into the
        repair: without that neighbour's logs they cannot go on (MoEvement appendix A)."""
        enlarged = False
        while touched := [scope for scope in self._scopes if scope.touches(self._stages)]:
            enlarged = True
            for scope in touched:
                self._stages |= scope.stages
                self._scopes.remove(scope)
        self._enlarged += enlarged

    def _lose_node(self) -> None:
        if self._cluster.replacement_s < inf:
            self._arriving.append(self._now_s + self._cluster.replacement_s)
        if self._spares:
            self._spares -= 1
        else:
            self._missing += 1
        covers = self._model.covers
        if covers is None:
            return
        group = int(self._draw() * max(1, self._cluster.nodes // self._model.group_nodes))
        lost = self._lost_of_group[group] = self._lost_of_group.get(group, 0) + 1
        self._in_memory &= lost <= covers

    def _lose_tokens(self) -> None:
        levels = self._model.levels
        level = levels[self._level]
        if not level.lost_tokens:
            return
        k, loss = level.experts, level.lost_tokens
        if level.losses:
            loss = level.losses[int(self._draw() * len(level.losses))]
        lost = self._lost_by_k.get(k, 0.0) + min(loss, self._step)
        self._lost_by_k[k] = lost
        decision = next_k(
            k,
            first_k=levels[0].experts,
            experts_max=levels[-1].experts,
            lost_by_k={k: round(lost * _TOKENS)},
            total_tokens=max(1, round(self._furthest * _TOKENS)),
            limit=self._model.loss_limit,
        )
        if decision.k > k:
            self._level = min(self._level + 1, len(levels) - 1)

    def _lacks_nodes(self) -> bool:
        if self._model.after_loss is AfterLoss.FIXED:
            return self._missing > 0
        return self._present < self._cluster.least_nodes

    def _on_detected(self) -> None:
        if self._lacks_nodes():
            self._enter(Activity.WAITING, inf, self._on_detected)
            return
        lasts_s = self._cluster.restart_s + self._model.load_s
        if self._live:
            lasts_s = self._cluster.reform_s
        elif not self._in_memory:
            lasts_s += self._model.stored_load_s
        self._enter(Activity.RESTARTING, lasts_s, self._on_restarted)

    def _on_restarted(self) -> None:
        in_memory = self._in_memory
        self._lost_of_group.clear()  # what the lost nodes held is there again
        self._in_memory = True
        if self._live:
            self._step = float(int(self._step))  # the work of the step in progress is lost
            self._train()
            return
        self._restored += 1
        model, step_s = self._model, self._workload.step_s
        at = self._restore_step(in_memory)
        self._kept = at
        if model.by_stage and in_memory:
            steps = model.repeated(self._step - at)
            for stages in _neighbours(self._stages):
                lasts_s = steps * step_s * self._workload.alone(len(stages))
                self._scopes.append(_Scope(stages, lasts_s))
                self._replayed_stages += len(stages)
            self._stages.clear()
            self._widest = max(self._widest, sum(len(scope.stages) for scope in self._scopes))
            # All wait for the slowest; some may have begun before the newest failure.
            lasts_s = max(scope.left_s for scope in self._scopes)
            self._enter(Activity.REDOING, lasts_s, self._train)
            return
        self._step = at
        if in_memory and model.catch_up_s:  # What is stored is of one step.
            self._enter(Activity.REDOING, model.catch_up_s, self._train)
        else:
            self._train()

    def _restore_step(self, in_memory: bool) -> float:
        """The newest step that can be restored: from snapshots in memory, or else from storage. If
        the training of a window is repeated, this is the step before its first."""
        if not in_memory:
            stored = self._model.stored_every_steps
            return self._step // stored * stored if stored else 0.0
        level = self._model.levels[self._level]
        late = level.usable_after_s / self._workload.step_s
        usable = max(0.0, self._step - late)
        window = self._model.window_steps
        every = window or level.interval_steps
        newest = usable // every - (1 if window and not self._model.catches_up else 0)
        return max(self._kept, newest * every)

    # --- nodes come -------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if not self._missing - len(self._joining):
            self._spares += 1
        elif self._model.after_loss is AfterLoss.FIXED or self._phase is Activity.WAITING:
            self._missing -= 1
            if self._phase is Activity.WAITING:
                self._on_detected()
        else:
            self._joining.append(self._now_s + self._cluster.join_wait_s)

    def _join(self) -> None:
        """Let a node that came while the job went on without it take part, once a step has
        ended."""
        before = self._present
        self._missing -= 1
        while self._joining and self._joining[0] <= self._now_s:
            self._joining.popleft()
            self._missing -= 1
        if self._phase is Activity.WAITING:
            self._on_detected()
        if not self._training or self._present == before:
            return  # the recovery in progress takes it in, or it waits for others of its copy
        live = self._model.after_loss is AfterLoss.LIVE
        lasts_s = self._cluster.reform_s if live else self._cluster.restart_s
        self._stages.add(0)
        self._enter(Activity.RESTARTING, lasts_s, self._train)


def _neighbours(stages: set[int]) -> list[set[int]]:
    """Rows of neighbouring stages."""
    rows: list[set[int]] = []
    for stage in sorted(stages):
        if rows and stage - 1 in rows[-1]:
            rows[-1].add(stage)
        else:
            rows.append({stage})
    return rows
