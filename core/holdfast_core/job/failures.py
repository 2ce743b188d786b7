"""The part of a `MoETrainingJob` about failures: what counts as lost, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from holdfast_core.hang_limits import HANGING_S
from holdfast_core.job.documents import YEAR_S, Document

STARTING_S = 600.0
"""Least silence that counts as a hang before the first step of an epoch, however small
`hangSeconds` is, unless the job sets another: ranks may load, compile and warm up for this long."""
KEEP_FAILED_S = 3600.0
"""Seconds for which the snapshots of a failed job stay in memory, unless the job sets others."""
REFORM_S = 30.0
"""Seconds that a worker which stays has to join the new world, unless the job sets others."""
RECHECK_S = 1800.0
"""Seconds between two checks of a node where a launcher waits, unless the job sets others."""


class On(StrEnum):
    """Kind of failure that a rule applies to."""

    EXIT_CODE = "ExitCode"
    HANG = "Hang"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    NO_REPLACEMENT = "NoReplacement"
    ANY = "Any"


class FailureAction(StrEnum):
    """Response to a failure."""

    RESTART_IN_PLACE = "RestartInPlace"
    REPLACE_NODE = "ReplaceNode"
    SHRINK = "Shrink"
    FAIL = "Fail"


class OnStraggler(StrEnum):
    """Response to a rank that is slower than its peers, so that they wait for it in each step."""

    IGNORE = "Ignore"
    REPORT = "Report"
    REPLACE = "Replace"


class OnCorruption(StrEnum):
    """Response to a replica that has other bytes than the others."""

    REPORT = "Report"
    REPLACE = "Replace"


class Detection(Document, frozen=True, kw_only=True):
    """When something silent counts as lost."""

    heartbeat_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="seconds between heartbeats", examples=[1])
    ] = 1.0
    missed_heartbeats: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="missed heartbeats after which a node counts as lost",
            examples=[5],
        ),
    ] = 5
    hang_seconds: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=YEAR_S,
                description="seconds without progress after which the job counts as hung",
                examples=[600],
                extra={
                    "more": "Must be longer than the longest step; for the first, see "
                    "startSeconds. Without it, 600, or less while no process works: then the job's "
                    "own pauses between steps decide, and `.status.hangDetection` has the limit."
                },
            ),
        ]
        | None
    ) = None
    start_seconds: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=YEAR_S,
                description="seconds without progress after which a start counts as hung",
                examples=[1800],
                extra={
                    "more": "Without it, 600 or hangSeconds, whichever is longer. Processes that "
                    "use the processor, read or write count as progress."
                },
            ),
        ]
        | None
    ) = None
    exit_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=YEAR_S,
            description="seconds without progress after all sessions are closed",
            examples=[3600],
            extra={
                "more": "After that, processes that are still running count as hung, unless "
                "they use the processor, read or write."
            },
        ),
    ] = 3600.0
    replace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=YEAR_S,
            description="seconds to wait for a lost node to come back",
            examples=[0],
            extra={"more": "After that, another node replaces it. 0 replaces it at once."},
        ),
    ] = 0.0

    @property
    def hang_limit_s(self) -> float:
        """Seconds without a step after which a job that trains hangs, whatever its processes do."""
        return HANGING_S if self.hang_seconds is None else self.hang_seconds

    @property
    def start_limit_s(self) -> float:
        """Seconds without any sign of a start after which it counts as a hang."""
        if self.start_seconds is not None:
            return self.start_seconds
        return max(self.hang_limit_s, STARTING_S)


class FailureRule(Document, frozen=True, kw_only=True):
    """What to do about one kind of failure."""

    on: Annotated[
        On,
        Meta(
            description="what the rule applies to",
            extra={
                "more": "ExitCode: a process exits with one of `values`. Hang: no progress for "
                "detection.hangSeconds. "
                "Disruption: the cluster takes the pod away (preemption, drain, eviction). "
                "NodeLost: the node's daemon is silent, or the node is gone. "
                "NoReplacement: no node could replace a lost or drained one for `afterSeconds`; "
                "without a rule for it the job waits. Any: "
                "everything else; allowed only in the last rule."
            },
        ),
    ] = field(name="when")
    """A key `on` would be read as `true`: kubectl and PyYAML use YAML 1.1."""
    action: Annotated[
        FailureAction,
        Meta(
            description="what to do about it",
            extra={
                "more": "RestartInPlace: the same nodes begin a new epoch. ReplaceNode: a spare or "
                "another node replaces the lost one. Shrink: like ReplaceNode, but if no "
                "node is ready, the job continues with fewer: at once, or, with when: "
                "NoReplacement, after `afterSeconds`; requires minNodes below nodes. Fail: "
                "the job fails; with when: NoReplacement, after it could not continue for "
                "`afterSeconds`. If minNodes is below nodes, the job continues without a "
                "member whose trainer has yet to start, and the member joins when it has "
                "started."
            },
        ),
    ]
    values: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=255)], ...],
        Meta(
            max_length=255,
            description="the exit codes as integers from 1 to 255",
            examples=[[42]],
            extra={"more": "Required with when: ExitCode, and allowed only there."},
        ),
    ] = ()
    after_seconds: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=YEAR_S,
                description="seconds to wait for a replacement",
                examples=[300],
                extra={"more": "Allowed only with when: NoReplacement."},
            ),
        ]
        | None
    ) = None
    count_towards_max: Annotated[
        bool,
        Meta(
            description="true or false",
            extra={"title": "Whether such a recovery counts towards maxRestarts."},
        ),
    ] = True


DEFAULT_RULES = (
    FailureRule(on=On.EXIT_CODE, values=(42,), action=FailureAction.RESTART_IN_PLACE),
    FailureRule(on=On.DISRUPTION, action=FailureAction.REPLACE_NODE, count_towards_max=False),
    FailureRule(on=On.NODE_LOST, action=FailureAction.REPLACE_NODE),
    FailureRule(on=On.ANY, action=FailureAction.RESTART_IN_PLACE),
)


class FailurePolicy(Document, frozen=True, kw_only=True):
    """How failures are handled."""

    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="the number of restarts allowed within the window",
            examples=[20],
            extra={"more": "One more restart fails the job."},
        ),
    ] = 20
    restart_window_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=YEAR_S,
            description="the length of the window in which restarts are counted, in seconds",
            examples=[3600],
        ),
    ] = 3600.0
    spares: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="the number of nodes to hold ready",
            examples=[1],
            extra={"more": "A spare replaces a lost node at once."},
        ),
    ] = 0
    reform_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=YEAR_S,
            description="the seconds that a surviving worker has to join the new world",
            examples=[30],
            extra={
                "more": "Counted from when the store of the new world is available. A worker that "
                "has not joined by then is killed, and counts as a lost rank."
            },
        ),
    ] = REFORM_S
    join_wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=YEAR_S,
            description="seconds to wait for more nodes before the job grows",
            examples=[120],
            extra={
                "more": "Applies only if minNodes is below nodes, and only to nodes that appear "
                "after a member has left: a replacement on a node that was already there "
                "joins when its trainer is ready. The job waits so long after the last "
                "change of its members, and so long after a free node was first seen, so "
                "that several nodes join in one epoch; the second wait ends early when "
                "there are nodes for all missing members. Then the job grows as soon as a "
                "generation is protected."
            },
        ),
    ] = 120.0
    keep_failed_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=YEAR_S,
            description="seconds for which the snapshots of a failed job stay in memory",
            examples=[3600],
            extra={
                "more": "In that time `holdfast persist` can copy them to durable storage, and "
                "`holdfast resume` can continue the job from them. 0 frees them at once, "
                "as for a job that is complete or deleted. status.keptUntil shows when "
                "they are freed. A change takes effect at once, but brings nothing back "
                "that was freed."
            },
        ),
    ] = KEEP_FAILED_S
    check_nodes: Annotated[
        bool,
        Meta(
            description="true or false",
            extra={
                "title": "Whether a launcher checks its node before it takes part.",
                "more": "A few seconds, also on spares of `holdfast run` where a launcher waits: "
                "processors, memory, /dev/shm, disk, clock, GPUs and links to the job's other "
                "nodes, as `holdfast preflight` does by hand. A node that gives wrong bytes, or "
                "is slower than any healthy one, is replaced, and the failure counts against it in "
                "`holdfast nodes`. Applies to pods that start after an edit.",
            },
        ),
    ] = False
    recheck_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=YEAR_S,
            description="the seconds between two checks of a node where a launcher waits",
            examples=[1800],
            extra={
                "more": "With checkNodes. Checks are repeated, with the lowest priority and on "
                "idle GPUs only, while a launcher waits for its first world: that of a member "
                "that waits for other nodes, or to join, and on spares of `holdfast run`. On "
                "spares in Kubernetes no launcher waits; daemon.idleCheckSeconds of the chart has "
                "daemons check them. Each pause is up to a quarter shorter or longer. A node that "
                "fails one is treated as one that fails before it takes part; what is only slow is "
                "noticed in the launcher's log. Applies to pods that start after an edit."
            },
        ),
    ] = RECHECK_S
    on_straggler: Annotated[
        OnStraggler,
        Meta(
            description="what to do about a rank that is slower than its peers",
            examples=["Report"],
            extra={
                "more": "Report: an event and status.stragglers name a rank for which the others "
                "wait in each step, and its node is avoided later. Replace: besides, its member "
                "moves to a spare, if there is one and its parity group can rebuild its "
                "snapshots; at most once in 30 minutes, and each member once. "
                "Ignore: nothing is judged."
            },
        ),
    ] = OnStraggler.REPORT
    on_corruption: Annotated[
        OnCorruption,
        Meta(
            description="what to do when replicas hold different bytes",
            examples=["Report"],
            extra={
                "more": "Report: an event and status.lastCorruption name the rank that is wrong, "
                "where a majority of replicas shows it, and its node is avoided later. Replace: "
                "besides, all ranks go back to the newest generation, which is from before that, "
                "and its member moves to a spare. Of two replicas, both repeat the steps, and the "
                "one whose bytes do not come again moves. At most once in a day."
            },
        ),
    ] = OnCorruption.REPORT
    repeat_steps_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="the part of the training time in which steps are checked",
            examples=[0.01],
            extra={
                "more": "To find ranks that compute wrongly where no replica shows it: now and "
                "then, all ranks compute the gradients of a step twice, and a third time if they "
                "differ. Training goes on with what two executions agree on. Besides, other ranks "
                "of the same kind repeat some operations of that step, and the optimizer's step of "
                "some parameters, which finds a device that is wrong each time. Needs a loop of "
                "session.steps with world=, the policy Full, and training that is deterministic. "
                "0: never.",
                "setting": True,
            },
        ),
    ] = 0.0
    detection: Detection = Detection()
    rules: Annotated[
        tuple[FailureRule, ...],
        Meta(
            max_length=32,
            extra={
                "title": "What to do about each kind of failure; the first match wins.",
                "more": "If no rule matches, exit codes from 1 to 127, except 42, 69, 75, 79 "
                "and 80, fail the job; after any other failure the job restarts in place, a lost "
                "node is replaced, and the restart counts. Exit code 81 "
                "(snapshot.requireProtection) fails the job unless `values` of a rule name it. "
                "Exit code 82 of a launcher (checkNodes) replaces the node unless `values` name "
                "it.",
            },
        ),
    ] = DEFAULT_RULES
