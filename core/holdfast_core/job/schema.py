"""The fields of a `MoETrainingJob` document, their types and their defaults.

Kubernetes and a local run share one form; the schema that an API server gets and the reference are
generated from these types. Defaults are those of a small job. A field's description explains it and
is shown when its value is wrong. Rules between fields are checked by
`holdfast_core.job.parsing.parse_job`: make jobs with it.
"""

from __future__ import annotations

from enum import StrEnum
from math import gcd
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from holdfast_core.job.documents import YEAR_S, Document
from holdfast_core.job.elastic import ElasticExperts, ElasticVariable
from holdfast_core.job.failures import RECHECK_S, REFORM_S, FailurePolicy
from holdfast_core.job.persistence import Persistence, RestoreSpec
from holdfast_core.job.policies.registered import PolicyType
from holdfast_core.job.references import resolve_env
from holdfast_core.job.settings import settings_of, variables_of
from holdfast_core.job.snapshots import RedundancySpec, Snapshot
from holdfast_core.protection.intervals import recoveries_per_s
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.membership import Redundancy
from holdfast_core.topology import Topology

API_VERSION = "holdfast.dev/v1alpha1"
KIND = "MoETrainingJob"
MANAGER = "holdfast.dev/operator"
"""Controller of a job that does not name another."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a job that names a queue of Kueue."""
PREBUILT_LABEL = "kueue.x-k8s.io/prebuilt-workload-name"
"""Label of a job that names the Workload which another controller made for it."""

_NodeCount = Annotated[int, Meta(ge=1, le=100_000)]
_Degree = Annotated[int, Meta(ge=1, le=1_000_000)]
"""Degree of parallelism; the product of three stays below 2**63."""
_Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_Deadline = Annotated[int, Meta(ge=1, le=YEAR_S)]


class Gang(StrEnum):
    """Mechanism that places all pods of a job together, or none."""

    NONE = "None"
    KUEUE = "Kueue"
    KUEUE_POD_GROUP = "KueuePodGroup"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"


COPY_ANNOTATION = "holdfast.dev/persist"
"""Annotation of a job that asks for a copy of the newest generation in durable storage."""
RESUME_ANNOTATION = "holdfast.dev/resume"
"""Annotation of a failed job that asks for it to be resumed."""


class Metadata(Document, frozen=True, kw_only=True):
    """Name, namespace and labels of the document."""

    name: Annotated[str, Meta(description="the name of the job", examples=["llm-8x7b"])]
    namespace: Annotated[str, Meta(description="the namespace", examples=["default"])] = "default"
    labels: Annotated[dict[str, str], Meta(description="the text of each label")] = field(
        default_factory=dict
    )
    annotations: Annotated[dict[str, str], Meta(description="the text of each annotation")] = field(
        default_factory=dict
    )
    uid: Annotated[str, Meta(description="the identity given by the API server")] = ""
    generation: Annotated[int, Meta(description="the version of the spec")] = 0


class Parallelism(Document, frozen=True, kw_only=True):
    """How the training world is divided: dp·tp·pp = nodes·nprocPerNode."""

    dp: Annotated[
        _Degree,
        Meta(
            description="the degree of data parallelism",
            examples=[4],
            extra={
                "more": "Counted over all nodes. When the job runs on fewer, it shrinks in "
                "proportion."
            },
        ),
    ]
    tp: Annotated[_Degree, Meta(description="the degree of tensor parallelism", examples=[1])] = 1
    pp: Annotated[_Degree, Meta(description="the degree of pipeline parallelism", examples=[1])] = 1
    ep: Annotated[
        _Degree,
        Meta(
            description="the degree of expert parallelism, which divides dp",
            examples=[4],
            extra={
                "more": "When the job runs on fewer nodes than that takes, as many ranks share the "
                "experts as the script then chooses."
            },
        ),
    ] = 1


class Model(Document, frozen=True, kw_only=True):
    """Size of the model, for `holdfast plan`."""

    num_experts: Annotated[
        _Count,
        Meta(
            description="the number of experts in a layer",
            examples=[8],
            extra={"more": "Must be divisible by parallelism.ep."},
        ),
    ]
    num_moe_layers: Annotated[
        _Count, Meta(description="the number of layers with experts", examples=[4])
    ] = field(name="numMoELayers")


class Scheduling(Document, frozen=True, kw_only=True):
    """How the job's pods are scheduled together."""

    gang: Annotated[
        Gang,
        Meta(
            description="the scheduler that places the job's pods together",
            extra={
                "more": "None: each pod is placed by itself. Kueue: Kueue admits the job as a "
                "whole, and may suspend it; the label kueue.x-k8s.io/queue-name does the same. "
                "KueuePodGroup: Kueue admits the pods as one plain pod group. Volcano, "
                "Coscheduling: a PodGroup of that scheduler, which gets the pods unless the "
                "template has another schedulerName."
            },
        ),
    ] = Gang.NONE
    queue: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=63,
                description="the queue that admits the job",
                examples=["team-a"],
                extra={
                    "more": "Kueue and KueuePodGroup require one (a LocalQueue of the namespace). "
                    "Volcano uses its queue `default` without one. The others take none."
                },
            ),
        ]
        | None
    ) = None


class Trainer(Document, frozen=True, kw_only=True):
    """The pod that trains."""

    template: (
        Annotated[
            dict[str, Any],
            Meta(
                description="a pod template; its first container is the trainer",
                extra={
                    "more": "The trainer must have a command, which is started nprocPerNode times "
                    "on each node. All other fields are passed on to Kubernetes unchanged."
                },
            ),
        ]
        | None
    ) = None
    external: Annotated[
        bool,
        Meta(
            description="true where another controller makes the pods, or false",
            extra={
                "title": "Whether another controller makes the pods.",
                "more": "Then there is no template. Pods of the namespace with the label "
                "`holdfast.dev/job` belong to the job. The controller that made them "
                "restarts them; Holdfast holds, rebuilds and restores their state.",
            },
        ),
    ] = False


class Spec(Document, frozen=True, kw_only=True):
    """What the job asks for."""

    suspend: Annotated[
        bool,
        Meta(
            description="true to suspend the job, or false",
            extra={
                "title": "Whether the job is suspended.",
                "more": "Its pods are deleted; its snapshots stay in memory.",
            },
        ),
    ] = False
    nodes: Annotated[
        _NodeCount,
        Meta(
            description="the number of nodes",
            examples=[4],
            extra={"more": "Each runs one trainer pod."},
        ),
    ]
    min_nodes: (
        Annotated[
            _NodeCount,
            Meta(
                description="the smallest number of nodes to train on",
                examples=[3],
                extra={
                    "more": "When a member is lost and its ranks cannot restart at once, the job "
                    "continues with the other members, down to this number, in whole copies of "
                    "the model where a copy takes several nodes. It grows again "
                    "when a trainer is ready on the old node or on another. Without it, "
                    "the job always waits for all `nodes`."
                },
            ),
        ]
        | None
    ) = None
    nproc_per_node: Annotated[
        int,
        Meta(ge=1, le=1_024, description="the number of processes on each node", examples=[1]),
    ] = 1
    parallelism: Parallelism
    model: Model | None = None
    elastic: ElasticExperts | None = None
    snapshot: Snapshot = Snapshot()
    redundancy: RedundancySpec = RedundancySpec()
    persistence: Persistence | None = None
    restore: RestoreSpec = RestoreSpec()
    failure_policy: FailurePolicy = FailurePolicy()
    scheduling: Scheduling = Scheduling()
    pre_running_deadline_seconds: (
        Annotated[
            _Deadline,
            Meta(
                description="the seconds within which all ranks must be at work",
                examples=[1800],
                extra={
                    "more": "Counted from the start of the job, or from its last resumption. The "
                    "job fails once they have passed. Without it, the job waits forever."
                },
            ),
        ]
        | None
    ) = None
    active_deadline_seconds: (
        Annotated[
            _Deadline,
            Meta(
                description="the seconds that the job may take",
                examples=[86400],
                extra={
                    "more": "Counted from the start of the job, or from its last resumption. The "
                    "job fails once they have passed."
                },
            ),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=YEAR_S,
                description="the seconds from the end of the job until it is deleted",
                examples=[86400],
                extra={"more": "Without it, the job is kept until you delete it."},
            ),
        ]
        | None
    ) = None
    managed_by: Annotated[
        str,
        Meta(
            min_length=3,
            max_length=63,
            description="the controller that runs the job",
            examples=[MANAGER],
            extra={
                "more": "With any name but the default, such as kueue.x-k8s.io/multikueue, "
                "Holdfast's operator leaves the job alone. Cannot be changed."
            },
        ),
    ] = MANAGER
    trainer: Trainer

    @property
    def least_nodes(self) -> int:
        """The smallest number of nodes to train on; `nodes` where the document gives none."""
        return self.nodes if self.min_nodes is None else self.min_nodes

    @property
    def copy_nodes(self) -> int:
        """The nodes of the smallest part of the job that holds whole copies of the model: the
        number of nodes of any world is a multiple of it. 1 if the ranks of a copy, tp · pp, divide
        those of a node."""
        copy_ranks = self.parallelism.tp * self.parallelism.pp
        return copy_ranks // gcd(copy_ranks, self.nproc_per_node)

    @property
    def node_counts(self) -> range:
        """The numbers of nodes with which the job trains."""
        return range(self.least_nodes, self.nodes + 1, self.copy_nodes)

    @property
    def may_shrink(self) -> bool:
        """Whether the job may continue with fewer nodes than it begins with."""
        return self.least_nodes < self.nodes


SETTINGS = settings_of(Spec)
"""Fields that trainers get as settings."""


class MoETrainingJob(Document, frozen=True, kw_only=True):
    """A valid job; `holdfast_core.job.parsing.parse_job` makes it."""

    api_version: Annotated[str, Meta(description="the version", examples=[API_VERSION])]
    kind: Annotated[str, Meta(description="the kind", examples=[KIND])]
    metadata: Metadata
    spec: Spec

    @property
    def key(self) -> str:
        """The job's id in protocols and file names: `namespace.name`, unique and safe in a path
        because neither part may hold a dot."""
        return f"{self.metadata.namespace}.{self.metadata.name}"

    @property
    def kueue_queue(self) -> str | None:
        """The queue of Kueue that admits the job as a whole; None when none does."""
        given = self.spec.scheduling
        return given.queue if given.gang is Gang.KUEUE else self.metadata.labels.get(QUEUE_LABEL)

    @property
    def world_size(self) -> int:
        return self.spec.nodes * self.spec.nproc_per_node

    @property
    def copy_request(self) -> str:
        """Text of the annotation that asks for a copy in durable storage: each new text asks for
        one; empty when there is none."""
        return self.metadata.annotations.get(COPY_ANNOTATION, "")

    @property
    def resume_request(self) -> str:
        """Text of the annotation that asks for the job to be resumed after it has failed: each new
        text asks once; empty when there is none."""
        return self.metadata.annotations.get(RESUME_ANNOTATION, "")

    def topology(self) -> Topology:
        """The parallel topology of the whole job.

        Raises:
            InvalidJobError: when it contradicts itself; never for a parsed job.
        """
        p = self.spec.parallelism
        return Topology(dp=p.dp, ep=p.ep, tp=p.tp, pp=p.pp)

    @property
    def group_size(self) -> int:
        """Members of a parity group; 1 without redundancy."""
        return self.spec.redundancy.group_size(self.spec.nodes)

    @property
    def spread_topology_key(self) -> str:
        """The node label whose values are the failure domains of parity groups."""
        return self.spec.redundancy.spread_topology_key

    @property
    def memory_per_node_bytes(self) -> int | None:
        """The job's own limit for each node, None without one."""
        limit = self.spec.snapshot.memory_per_node
        return None if limit is None else parse_bytes(limit)

    @property
    def container(self) -> dict[str, Any]:
        """The trainer's container: the first of the template; empty where another controller makes
        the pods."""
        template = self.spec.trainer.template
        first: dict[str, Any] = {} if template is None else template["spec"]["containers"][0]
        return first

    @property
    def command(self) -> tuple[str, ...]:
        """The trainer's command line as it is written: `command`, then `args`. References to
        variables are for the kubelet, or a local run, to resolve."""
        return (*self.container.get("command", ()), *self.container.get("args", ()))

    @property
    def launcher_options(self) -> tuple[str, ...]:
        """Options of the launcher that are the same wherever it runs. A default is left out: the
        launcher in the job's image may be too old to know the option."""
        policy = self.spec.failure_policy
        options: list[str] = []
        if policy.reform_seconds != REFORM_S:
            options += ["--reform-s", str(policy.reform_seconds)]
        if policy.check_nodes:
            options.append("--check-node")
            if policy.recheck_seconds != RECHECK_S:
                options += ["--recheck-s", str(policy.recheck_seconds)]
        return tuple(options)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the trainer, except those that locate its daemon."""
        snapshot = self.spec.snapshot
        environment = {"HOLDFAST_JOB": self.key}
        if snapshot.policy.type is not PolicyType.FULL:
            # Without fields that are not given: the job's image may be too old to know them.
            given = _given(msgspec.to_builtins(snapshot.policy))
            text = msgspec.json.encode(given, order="deterministic").decode()
            environment["HOLDFAST_POLICY"] = text
        if snapshot.interval.auto:
            environment["HOLDFAST_RECOVERIES_PER_DAY"] = repr(self.recoveries_per_day)
        if self.elastic is not None:
            environment["HOLDFAST_ELASTIC"] = msgspec.json.encode(self.elastic).decode()
        return environment | variables_of(SETTINGS, self.spec)

    @property
    def elastic(self) -> ElasticVariable | None:
        """What the job says about uneven copies of experts, for those who make plans."""
        given = self.spec.elastic
        if given is None:
            return None
        days = self.spec.snapshot.interval.node_mtbf_days
        return ElasticVariable(**msgspec.structs.asdict(given), node_mtbf_days=days)

    @property
    def recoveries_per_day(self) -> float:
        """Expected returns of the job to a snapshot in memory, per day; above 0."""
        interval = self.spec.snapshot.interval
        return recoveries_per_s(  # with rates per day
            self.spec.nodes,
            node_losses_per_s=1 / interval.node_mtbf_days,
            process_failures_per_s=1 / interval.process_mtbf_days,
            redundant=self.spec.redundancy.type is not Redundancy.NONE,
        )

    @property
    def env(self) -> dict[str, str]:
        """The trainer's environment, as far as the document has the values (no `valueFrom`), with
        references to other variables resolved.

        Raises:
            InvalidJobError: that makes it too long; never after `check_local`.
        """
        return resolve_env(self.container.get("env") or ())


def _given(document: Any) -> Any:
    """`document` without fields that are None, at any depth."""
    if not isinstance(document, dict):
        return document
    return {name: _given(value) for name, value in document.items() if value is not None}
