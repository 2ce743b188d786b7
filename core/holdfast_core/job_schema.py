"""What a `MoETrainingJob` document may say: its fields, their types and their defaults.

One form for Kubernetes and for a local run. Defaults are those of a small job; what a field means
is its description, which is also what people are told when they get it wrong. What must hold
between fields is checked by `holdfast_core.jobs.parse_job`: make jobs with it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from holdfast_core.quantities import parse_bytes
from holdfast_core.topology import Topology
from holdfast_core.values import Redundancy

API_VERSION = "holdfast.dev/v1alpha1"
KIND = "MoETrainingJob"
DEFAULT_GROUP_SIZE = 4

_Count = Annotated[int, Meta(ge=1)]
_YEAR_S = 365 * 86400


class PolicyType(StrEnum):
    """Which units a snapshot captures."""

    FULL = "Full"
    PARTIAL_EXPERTS = "PartialExperts"
    SELECTIVE = "Selective"
    SPARSE = "Sparse"


class On(StrEnum):
    """What a failure rule applies to."""

    EXIT_CODE = "ExitCode"
    HANG = "Hang"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    NO_REPLACEMENT = "NoReplacement"
    ANY = "Any"


class Action(StrEnum):
    """What is done about a failure."""

    RESTART_IN_PLACE = "RestartInPlace"
    REPLACE_NODE = "ReplaceNode"
    SHRINK = "Shrink"
    FAIL = "Fail"


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all parts of the document. Parts repeat `frozen` and `kw_only` for type checkers."""


class Metadata(_Document, frozen=True, kw_only=True):
    """Name, namespace and labels of the document."""

    name: Annotated[str, Meta(description="the name of the job", examples=["llm-8x7b"])]
    namespace: Annotated[str, Meta(description="the namespace", examples=["default"])] = "default"
    labels: Annotated[dict[str, str], Meta(description="text for each label")] = {}
    annotations: Annotated[dict[str, str], Meta(description="text for each annotation")] = {}
    uid: Annotated[str, Meta(description="the identity that the API server gave")] = ""
    generation: Annotated[int, Meta(description="the version of the spec")] = 0


class Parallelism(_Document, frozen=True, kw_only=True):
    """How the world is divided."""

    dp: Annotated[_Count, Meta(description="the degree of data parallelism", examples=[4])]
    tp: Annotated[_Count, Meta(description="the degree of tensor parallelism", examples=[1])] = 1
    pp: Annotated[_Count, Meta(description="the degree of pipeline parallelism", examples=[1])] = 1
    ep: Annotated[
        _Count,
        Meta(description="the degree of expert parallelism, which divides dp", examples=[4]),
    ] = 1


class Model(_Document, frozen=True, kw_only=True):
    """What the planner must know of the model."""

    num_experts: Annotated[
        _Count, Meta(description="the number of experts of a layer", examples=[8])
    ]
    num_moe_layers: Annotated[
        _Count, Meta(description="the number of layers with experts", examples=[4])
    ] = field(name="numMoELayers")


class Policy(_Document, frozen=True, kw_only=True):
    """What a snapshot contains."""

    type: PolicyType = PolicyType.FULL


class StepInterval(_Document, frozen=True, kw_only=True):
    """How often the trainer saves."""

    steps: Annotated[_Count, Meta(description="steps from snapshot to snapshot", examples=[1])] = 1


class Snapshot(_Document, frozen=True, kw_only=True):
    """What is captured, how often, and in how much memory."""

    policy: Policy = Policy()
    interval: StepInterval = StepInterval()
    memory_per_node: Annotated[
        str | int | None,
        Meta(description="memory for the job's snapshots on each node", examples=["200Gi"]),
    ] = None
    """None leaves the limit to the daemon's own budget."""


class Raim5(_Document, frozen=True, kw_only=True):
    """Parity groups and how they are spread."""

    group_size: Annotated[
        int | None, Meta(description="the members of a parity group", examples=[4])
    ] = None
    """None means 4, or all nodes when there are fewer."""
    spread_topology_key: Annotated[
        str,
        Meta(
            min_length=1,
            description="the node label whose values are failure domains",
            examples=["topology.kubernetes.io/rack"],
        ),
    ] = "kubernetes.io/hostname"


class RedundancySpec(_Document, frozen=True, kw_only=True):
    """How committed snapshots are protected."""

    type: Redundancy = Redundancy.RAIM5
    raim5: Raim5 | None = None


class MinuteInterval(_Document, frozen=True, kw_only=True):
    """How often a generation is persisted."""

    minutes: Annotated[
        float, Meta(gt=0, le=_YEAR_S / 60, description="minutes between copies", examples=[30])
    ] = 30.0


class SecretReference(_Document, frozen=True, kw_only=True):
    """Where credentials are."""

    name: Annotated[str, Meta(description="the name of a Secret", examples=["creds"])]


class Persistence(_Document, frozen=True, kw_only=True):
    """Where generations are kept for good."""

    uri: Annotated[str, Meta(description="where to keep copies", examples=["s3://bucket/run1"])]
    interval: MinuteInterval = MinuteInterval()
    keep: Annotated[_Count, Meta(description="the number of copies to keep", examples=[3])] = 3
    secret_ref: SecretReference | None = None


class Detection(_Document, frozen=True, kw_only=True):
    """When something silent counts as lost."""

    heartbeat_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="seconds between heartbeats", examples=[1])
    ] = 1.0
    missed_heartbeats: Annotated[
        _Count, Meta(description="heartbeats missed until a node is lost", examples=[5])
    ] = 5
    hang_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=_YEAR_S,
            description="seconds without progress that mean a hang",
            examples=[600],
        ),
    ] = 600.0
    replace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=_YEAR_S,
            description="seconds to wait for a lost node to come back",
            examples=[0],
        ),
    ] = 0.0


class Rule(_Document, frozen=True, kw_only=True):
    """What to do about one kind of failure; the first match wins."""

    on: On
    action: Action
    values: Annotated[
        tuple[int, ...], Meta(description="the exit codes as integers", examples=[[42]])
    ] = ()
    after_seconds: Annotated[
        float | None,
        Meta(description="seconds to wait for a replacement", examples=[300]),
    ] = None
    count_towards_max: Annotated[bool, Meta(description="true or false")] = True


DEFAULT_RULES = (
    Rule(on=On.EXIT_CODE, values=(42,), action=Action.RESTART_IN_PLACE),
    Rule(on=On.DISRUPTION, action=Action.REPLACE_NODE, count_towards_max=False),
    Rule(on=On.NODE_LOST, action=Action.REPLACE_NODE),
    Rule(on=On.ANY, action=Action.RESTART_IN_PLACE),
)


class FailurePolicy(_Document, frozen=True, kw_only=True):
    """How failures are met."""

    max_restarts: Annotated[
        int, Meta(ge=0, description="the restarts allowed within the window", examples=[20])
    ] = 20
    restart_window_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=_YEAR_S,
            description="the seconds in which restarts are counted",
            examples=[3600],
        ),
    ] = 3600.0
    spares: Annotated[
        int, Meta(ge=0, description="the number of nodes held ready", examples=[1])
    ] = 0
    detection: Detection = Detection()
    rules: tuple[Rule, ...] = DEFAULT_RULES
    """First match wins."""


class Trainer(_Document, frozen=True, kw_only=True):
    """The pod that trains."""

    template: Annotated[
        dict[str, Any],
        Meta(description="a pod template; its first container is the trainer"),
    ]


class Spec(_Document, frozen=True, kw_only=True):
    """What the job asks for."""

    suspend: Annotated[bool, Meta(description="true to hold the job back, or false")] = False
    nodes: Annotated[_Count, Meta(description="the number of nodes", examples=[4])]
    min_nodes: Annotated[
        int | None, Meta(description="the fewest nodes to train on", examples=[4])
    ] = None
    """None means all of `nodes`."""
    nproc_per_node: Annotated[
        _Count, Meta(description="the number of processes on each node", examples=[1])
    ] = 1
    parallelism: Parallelism
    model: Model | None = None
    snapshot: Snapshot = Snapshot()
    redundancy: RedundancySpec = RedundancySpec()
    persistence: Persistence | None = None
    failure_policy: FailurePolicy = FailurePolicy()
    trainer: Trainer


class MoETrainingJob(_Document, frozen=True, kw_only=True):
    """A valid job; `holdfast_core.jobs.parse_job` makes it."""

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
    def world_size(self) -> int:
        return self.spec.nodes * self.spec.nproc_per_node

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
        if self.spec.redundancy.type is Redundancy.NONE:
            return 1
        given = (
            None if self.spec.redundancy.raim5 is None else self.spec.redundancy.raim5.group_size
        )
        return min(DEFAULT_GROUP_SIZE, self.spec.nodes) if given is None else given

    @property
    def spread_topology_key(self) -> str:
        """The node label whose values are the failure domains of parity groups."""
        return (self.spec.redundancy.raim5 or Raim5()).spread_topology_key

    @property
    def memory_per_node_bytes(self) -> int | None:
        """The job's own limit for each node, None without one."""
        limit = self.spec.snapshot.memory_per_node
        return None if limit is None else parse_bytes(limit)

    @property
    def container(self) -> dict[str, Any]:
        """The trainer's container: the first of the template."""
        first: dict[str, Any] = self.spec.trainer.template["spec"]["containers"][0]
        return first

    @property
    def command(self) -> tuple[str, ...]:
        """The trainer's command line: `command`, then `args`."""
        return (*self.container["command"], *self.container.get("args", ()))

    @property
    def env(self) -> dict[str, str]:
        """The trainer's environment, as far as the document has the values (no `valueFrom`)."""
        return {
            entry["name"]: entry.get("value", "")
            for entry in self.container.get("env", ())
            if "valueFrom" not in entry
        }
