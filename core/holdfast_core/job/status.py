"""The status of a `MoETrainingJob`, which the operator writes for people and for itself.

Every field may be missing: a new job has none. The schema for the API server and the reference are
generated from these types.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field

_Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class Phase(StrEnum):
    """A job's state in one word."""

    SUSPENDED = "Suspended"
    WAITING = "Waiting"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether the job has ended, well or not."""
        return self in ENDED


ENDED = (Phase.COMPLETE, Phase.FAILED)
"""Phases that a job does not leave by itself; a person may resume a failed job."""


class RecoveryMode(StrEnum):
    """What a recovery does to the workers of members that have not failed."""

    IN_PLACE = "InPlace"
    """They stay in their processes, and restore there."""
    RESTART = "Restart"
    """They are started again."""


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class _Part(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Base of all parts of the status; what a newer operator wrote beside them is ignored."""


class JobCondition(_Part, frozen=True, kw_only=True):
    """One condition, in the standard form."""

    type: Annotated[str, Meta(description="the type of the condition")]
    status: Annotated[ConditionStatus, Meta(description="whether it holds")]
    last_transition_time: Annotated[_Time, Meta(description="when its status last changed")]
    reason: Annotated[str, Meta(description="why, in one word")]
    message: Annotated[str, Meta(description="why, in a sentence")]
    observed_generation: (
        Annotated[int, Meta(description="the generation of the spec that it applies to")] | None
    ) = None


class MemberStatus(_Part, frozen=True, kw_only=True):
    """One member of the job."""

    index: Annotated[int, Meta(description="the index of the member")]
    node: Annotated[str, Meta(description="its node")] | None = None
    pod: Annotated[str, Meta(description="its trainer pod")] | None = None
    state: Annotated[str, Meta(description="the state of that pod's trainer")] | None = None


class StrengthStatus(_Part, frozen=True, kw_only=True):
    """The number of members that the job has, wants and needs."""

    active: Annotated[int, Meta(description="the members of the present epoch")] | None = None
    desired: Annotated[int, Meta(description="all members: spec.nodes")] | None = None
    minimum: (
        Annotated[
            int, Meta(description="the fewest members that the job continues with: spec.minNodes")
        ]
        | None
    ) = None
    joining: (
        Annotated[
            int, Meta(description="missing members whose pods start or wait; left out when 0")
        ]
        | None
    ) = None


class RecoveryStatus(_Part, frozen=True, kw_only=True):
    """One recovery."""

    cause: Annotated[str, Meta(description="what was lost")]
    detected_at: Annotated[_Time, Meta(description="when the recovery was decided")] | None = None
    restored_step: (
        Annotated[int, Meta(description="the step that training continued from")] | None
    ) = None
    lost_steps: Annotated[int, Meta(description="steps that had to be repeated")] | None = None
    seconds: (
        Annotated[float, Meta(description="from the decision until all ranks were at work again")]
        | None
    ) = None
    source: (
        Annotated[
            str,
            Meta(
                description="where the state came from: `storage`, `parity` or `local` (the node's "
                "memory), the farthest of any rank that restored; `live` if none did"
            ),
        ]
        | None
    ) = None
    replay: (
        Annotated[
            str,
            Meta(
                description="which ranks restored and repeated which steps alone while the others "
                "kept their state, or why none did; empty where none were to"
            ),
        ]
        | None
    ) = None
    advice: (
        Annotated[str, Meta(description="what to do about the cause, where that is known")] | None
    ) = None
    left_nodes: (
        Annotated[
            tuple[str, ...], Meta(description="nodes that members have left with it, at most 16")
        ]
        | None
    ) = None


class TokenLossStatus(_Part, frozen=True, kw_only=True):
    """Tokens that recoveries cost; only for a job whose snapshots leave experts out."""

    lost: (
        Annotated[
            str,
            Meta(
                description="the tokens that recoveries have lost, as a percentage of all tokens",
                examples=["0.42%"],
            ),
        ]
        | None
    ) = None
    lost_tokens: Annotated[int, Meta(description="the number of these tokens")] | None = None
    lost_ratio: Annotated[float, Meta(description="PLT: their portion of all tokens")] | None = None
    lost_mlt: Annotated[float, Meta(description="MLT: the sum of the layers' portions")] | None = (
        field(default=None, name="lostMLT")
    )
    at_risk_ratio: (
        Annotated[float, Meta(description="the PLT that a recovery would add now")] | None
    ) = None
    at_risk_mlt: (
        Annotated[float, Meta(description="the MLT that a recovery would add now")] | None
    ) = field(default=None, name="atRiskMLT")
    limit: Annotated[float, Meta(description="the PLT that the job allows")] | None = None
    experts_per_layer: (
        Annotated[
            int,
            Meta(
                description="the number of experts in a snapshot, as the policy counts them: of "
                "each layer, or of all layers"
            ),
        ]
        | None
    ) = None
    text: Annotated[str, Meta(description="all of this in words")] | None = None


class ExpertsStatus(_Part, frozen=True, kw_only=True):
    """Expert plan of the job; only where experts have uneven copies."""

    least_nodes: (
        Annotated[
            int, Meta(description="the smallest number of nodes on which any expert has copies")
        ]
        | None
    ) = None
    ranks: Annotated[int, Meta(description="the ranks that the plan is for")] | None = None
    seats_per_rank: (
        Annotated[int, Meta(description="the seats of each rank in each layer")] | None
    ) = None
    busiest_node_ratio: (
        Annotated[
            float,
            Meta(
                description="planned tokens of the busiest node, divided by the mean of all nodes"
            ),
        ]
        | None
    ) = None
    epoch: Annotated[int, Meta(description="the epoch in which it was made")] | None = None
    step: Annotated[int, Meta(description="the step after which it was made")] | None = None
    cause: (
        Annotated[
            str,
            Meta(
                description="why it was made: start, world (members had changed) or loads",
                examples=["world"],
            ),
        ]
        | None
    ) = None
    text: Annotated[str, Meta(description="all of this in words")] | None = None


class ProtectionTrafficStatus(_Part, frozen=True, kw_only=True):
    """Network traffic between nodes for protection."""

    node_bytes_per_second: (
        Annotated[int, Meta(description="bytes per second that the busiest node fetched recently")]
        | None
    ) = None
    bytes_per_second: (
        Annotated[int, Meta(description="bytes per second that all nodes fetched recently")] | None
    ) = None
    limit: (
        Annotated[int, Meta(description="bytes per second that the job lets each node fetch")]
        | None
    ) = None
    text: Annotated[str, Meta(description="all of this in words")] | None = None


class StragglerStatus(_Part, frozen=True, kw_only=True):
    """A rank that is slower than its peers, so that they wait for it in each step."""

    rank: Annotated[int, Meta(description="the number of the rank")]
    member: Annotated[int, Meta(description="the index of its member")] | None = None
    node: Annotated[str, Meta(description="the node of that member")] | None = None
    cause: (
        Annotated[
            str,
            Meta(
                description="what takes it longer: Compute, Data or, if not known, Unknown; "
                "Network if it is not known and the links of its node are slow",
                examples=["Compute"],
            ),
        ]
        | None
    ) = None
    slower_ratio: (
        Annotated[
            float,
            Meta(description="how much longer than its peers it works, as a part of their time"),
        ]
        | None
    ) = None
    text: Annotated[str, Meta(description="all of this in words")] | None = None


class SlowLinksStatus(_Part, frozen=True, kw_only=True):
    """Links between nodes of the job that are slow beside its others."""

    node: (
        Annotated[
            str,
            Meta(
                description="the node of which most links are slow; missing for a single link, "
                "either of whose ends may be the cause"
            ),
        ]
        | None
    ) = None
    text: Annotated[str, Meta(description="all of this in words")]


class PaceStatus(_Part, frozen=True, kw_only=True):
    """How often snapshots are taken; only where the job leaves that to measurement (`auto`)."""

    interval_steps: (
        Annotated[int, Meta(description="the steps from one snapshot to the next")] | None
    ) = None
    window_steps: Annotated[int, Meta(description="the steps of a sparse window")] | None = None
    text: Annotated[str, Meta(description="all of this in words")] | None = None


class HangDetectionStatus(_Part, frozen=True, kw_only=True):
    """The silence of a job that trains which counts as a hang."""

    quiet_seconds: (
        Annotated[
            float,
            Meta(
                description="seconds without a step, and without a process that works: the job's "
                "hangSeconds or, without it, what was learned from its pauses"
            ),
        ]
        | None
    ) = None
    text: Annotated[str, Meta(description="all of this in words")] | None = None


class HungRankStatus(_Part, frozen=True, kw_only=True):
    """A rank of a job that hung, and where it was."""

    rank: Annotated[int, Meta(description="the number of the rank")]
    member: Annotated[int, Meta(description="the index of its member")] | None = None
    node: Annotated[str, Meta(description="the node of that member")] | None = None
    calls: (
        Annotated[
            tuple[str, ...],
            Meta(
                description="the calls in which its main thread was, the innermost first, at most "
                "8; whole stacks: `holdfast history --stacks`"
            ),
        ]
        | None
    ) = None


class HangStatus(_Part, frozen=True, kw_only=True):
    """The newest hang whose processes were inspected."""

    text: Annotated[str, Meta(description="who held up the others, and how")]
    kind: (
        Annotated[
            str,
            Meta(
                description="what held them up, in one word, as in the metric "
                "`holdfast_operator_hangs_total`",
                examples=["DataLoader"],
            ),
        ]
        | None
    ) = None
    epoch: Annotated[int, Meta(description="the epoch in which the job hung")] | None = None
    detected_at: Annotated[_Time, Meta(description="when the inspection was over")] | None = None
    ranks: (
        Annotated[
            tuple[HungRankStatus, ...],
            Meta(
                extra={
                    "title": "The first 4 ranks that held up the others, or one rank for each "
                    "place where ranks waited if none stood out."
                },
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None


class FailureStatus(_Part, frozen=True, kw_only=True):
    """The newest rank, or launcher, that ended with an error of its own."""

    text: Annotated[str, Meta(description="what failed, and how")] | None = None
    epoch: Annotated[int, Meta(description="the epoch in which it failed")] | None = None
    member: Annotated[int, Meta(description="the index of its member")] | None = None
    exit_code: Annotated[int, Meta(description="its exit code; 128 + n after signal n")] | None = (
        None
    )
    last_lines: (
        Annotated[
            str,
            Meta(
                description="the last lines that it wrote, without anything that "
                "looks like a secret"
            ),
        ]
        | None
    ) = None
    kernel_messages: (
        Annotated[
            str,
            Meta(
                description="what the kernel of its node wrote about it: a lack of memory, errors "
                "of GPUs (Xid), broken memory. Missing where the kernel's log cannot be read, as "
                "in most pods"
            ),
        ]
        | None
    ) = None


class CorruptionStatus(_Part, frozen=True, kw_only=True):
    """The newest comparison in which replicas held different bytes."""

    text: Annotated[str, Meta(description="what is wrong, and how that is known")] | None = None
    unit: Annotated[str, Meta(description="the first unit that differed")] | None = None
    step: Annotated[int, Meta(description="the step after which it differed")] | None = None
    equal_step: (
        Annotated[
            int,
            Meta(
                description="the newest step before that after which all were equal, or whose "
                "check found nothing"
            ),
        ]
        | None
    ) = None
    ranks: (
        Annotated[
            tuple[int, ...],
            Meta(
                extra={
                    "title": "The wrong ranks; with proof None or Undecided, those in question."
                },
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None
    member: (
        Annotated[int, Meta(description="the index of their member, if it is known and one")] | None
    ) = None
    node: Annotated[str, Meta(description="the node that this member had then")] | None = None
    proof: (
        Annotated[
            str,
            Meta(
                description="how the ranks are known: Majority, Repeated, Reexecuted, Changed, "
                "RepeatedElsewhere, None or Undecided",
                examples=["Majority"],
            ),
        ]
        | None
    ) = None
    epoch: Annotated[int, Meta(description="the epoch in which that was found")] | None = None


class JobStatus(_Part, frozen=True, kw_only=True):
    """What the operator sees of the job."""

    phase: Annotated[Phase, Meta(description="the job's state in one word")] | None = None
    epoch: Annotated[int, Meta(description="the membership epoch")] | None = None
    step: Annotated[int, Meta(description="the newest step that was completed")] | None = None
    ready: Annotated[int, Meta(description="the ranks that are at work")] | None = None
    desired: Annotated[int, Meta(description="all ranks of the job")] | None = None
    ready_text: (
        Annotated[str, Meta(description="ready ranks out of desired ranks", examples=["4/4"])]
        | None
    ) = None
    nodes_ready: Annotated[int, Meta(description="the nodes whose ranks are at work")] | None = None
    protected: (
        Annotated[
            str,
            Meta(description="the newest protected generation, as epoch.step", examples=["3.120"]),
        ]
        | None
    ) = None
    protected_step: Annotated[int, Meta(description="the step of that generation")] | None = None
    persisted: (
        Annotated[str, Meta(description="the newest generation known to be in durable storage")]
        | None
    ) = None
    restarts: (
        Annotated[int, Meta(description="recoveries that count towards maxRestarts")] | None
    ) = None
    recoveries: Annotated[int, Meta(description="all recoveries")] | None = None
    recovery_mode: (
        Annotated[
            RecoveryMode,
            Meta(
                description="what a recovery does to workers that have not failed",
                extra={
                    "more": "InPlace: their processes stay, because all ranks use "
                    "`holdfast.elastic`. Restart: they are started again. Missing until "
                    "all ranks are at work."
                },
            ),
        ]
        | None
    ) = None
    started_at: Annotated[_Time, Meta(description="when the job was first placed")] | None = None
    ended_at: Annotated[_Time, Meta(description="when the job ended")] | None = None
    kept_until: (
        Annotated[
            _Time,
            Meta(
                description="until when the snapshots of the failed job stay in memory; left out "
                "when they do not"
            ),
        ]
        | None
    ) = None
    problem: (
        Annotated[
            str,
            Meta(
                description="what keeps the job from running or its saves from succeeding, in words"
            ),
        ]
        | None
    ) = None
    observed_generation: (
        Annotated[int, Meta(description="the generation of the spec that this status applies to")]
        | None
    ) = None
    selector: (
        Annotated[str, Meta(description="the label selector of the job's trainer pods")] | None
    ) = None
    conditions: (
        Annotated[
            tuple[JobCondition, ...],
            Meta(
                extra={
                    "title": "Suspended, Scheduled, Running, Recovering, Protected, Degraded, "
                    "StorageReachable and Persisted (with durable storage), TokenLossWithinLimit "
                    "(where snapshots leave experts out), ExpertsReplicated (where experts have "
                    "uneven copies), Insecure (where identity is off), "
                    "DaemonsOutdated (until the daemons of its nodes are renewed), PodsRefused "
                    "(while the API server refuses pods, in its words), FullStrength "
                    "(where minNodes is below nodes), Complete and Failed."
                },
                extra_json_schema={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["type"],
                },
            ),
        ]
        | None
    ) = None
    last_failure: FailureStatus | None = None
    last_hang: HangStatus | None = None
    last_corruption: CorruptionStatus | None = None
    corruption_count: (
        Annotated[int, Meta(description="how often replicas have diverged, if they ever have")]
        | None
    ) = None
    steps_not_repeated: (
        Annotated[
            str,
            Meta(
                description="why no step is executed again any more to find ranks that compute "
                "wrongly, if failurePolicy.repeatStepsShare asks for it"
            ),
        ]
        | None
    ) = None
    strength: StrengthStatus | None = None
    members: (
        Annotated[
            tuple[MemberStatus, ...],
            Meta(
                extra={"title": "The members and their nodes."},
                # For a map, the API server would record a manager of each of thousands of fields.
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None
    joining: (
        Annotated[
            tuple[MemberStatus, ...],
            Meta(
                extra={
                    "title": "Missing members whose pods start (starting) or wait to join (ready)."
                },
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None
    last_recoveries: (
        Annotated[
            tuple[RecoveryStatus, ...],
            Meta(
                extra={"title": "The last ten recoveries, the newest last."},
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None
    stragglers: (
        Annotated[
            tuple[StragglerStatus, ...],
            Meta(
                extra={
                    "title": "The 16 slowest ranks for which the others wait in each step, the "
                    "slowest first."
                },
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None
    straggler_count: (
        Annotated[int, Meta(description="the number of all such ranks, if there are any")] | None
    ) = None
    slow_links: (
        Annotated[
            tuple[SlowLinksStatus, ...],
            Meta(
                extra={
                    "title": "Nodes whose links are slow beside those of the job's other nodes, "
                    "then single slow links; 16 at most."
                },
                extra_json_schema={"x-kubernetes-list-type": "atomic"},
            ),
        ]
        | None
    ) = None
    token_loss: TokenLossStatus | None = None
    experts: ExpertsStatus | None = None
    pace: PaceStatus | None = None
    hang_detection: HangDetectionStatus | None = None
    protection_traffic: ProtectionTrafficStatus | None = None
    slots: (
        Annotated[
            int,
            Meta(
                description="the snapshots of each rank that its node has room for, on the node "
                "with the least room; with auto, the number that was chosen"
            ),
        ]
        | None
    ) = None
    counters: (
        Annotated[
            dict[str, Any],
            Meta(description="the operator's own record, which other programs must not rely on"),
        ]
        | None
    ) = None
