"""Rules between the fields of a job, in CEL, for the API server.

`holdfast_core.job.rules` holds the same rules for a local run, with the same messages. A message
names the values wherever it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_core.job.intervals import AUTO
from holdfast_core.job.locations import HOW_TO_WRITE_A_STORAGE_URI, NOT_A_STORAGE_URI, URI_PATTERN
from holdfast_core.job.parsing import MAX_NAME_CHARACTERS
from holdfast_core.job.persistence import GENERATION_PATTERN, LATEST
from holdfast_core.job.rules import IN_THE_SCRIPT, NOT_FOR_EXTERNAL, SUSPEND_THERE
from holdfast_core.job.schema import MANAGER
from holdfast_core.job.snapshots import (
    BANDWIDTH_BYTES_S_MIN,
    COMPARE_REPLICAS_EVERY,
    POLICY_FIELDS,
    PolicyType,
)
from holdfast_core.protection.groups import MIN_GROUP_SIZE
from holdfast_core.protection.intervals import STEPS_MAX
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN
from holdfast_core.snapshots.membership import Redundancy


@dataclass(frozen=True, kw_only=True, slots=True)
class CelRule:
    """One entry of `x-kubernetes-validations`."""

    rule: str
    """CEL over `self` (and `oldSelf`), true when all is well."""
    says: str
    """Message: what is wrong; what to do. `%d` and `%s` stand for the values."""
    values: tuple[str, ...] = ()
    """CEL of each value. `format` inserts them: the API server assumes that the text of a number
    (`string(n)`) has no maximum length, and refuses to join such texts."""
    field: str = ""
    """Path below the schema that holds the rule, such as `.parallelism`; shown to people."""
    forbidden: bool = False
    """Whether the value is well-formed but must not be set now."""

    def to_schema(self) -> dict[str, Any]:
        """Entry without its empty parts."""
        text = self.says.replace("\\", "\\\\").replace("'", "\\'")
        entry = {
            "rule": self.rule,
            "message": "" if self.values else self.says,
            "messageExpression": f"'{text}'.format([{', '.join(self.values)}])"
            if self.values
            else "",
            "fieldPath": self.field,
            "reason": "FieldValueForbidden" if self.forbidden else "",
        }
        return {key: value for key, value in entry.items() if value}


_UNITS = "(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?"
_DNS_NAME = CelRule(
    rule="self.matches('^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$')",
    says="not a DNS-1123 subdomain; use lower-case letters, digits, '-' and '.', beginning and "
    "ending with a letter or a digit",
)


_LOSSY_FIELDS = [field for kind, field in POLICY_FIELDS.items() if kind is not PolicyType.SPARSE]
_SPARSE = (
    CelRule(
        rule="self.snapshot.policy.type != 'Sparse' || self.snapshot.interval.steps == 1",
        says="a window of snapshot.policy.type Sparse needs every step; use 1, or another policy",
        field=".snapshot.interval.steps",
    ),
)


def _recompute(field: str) -> tuple[CelRule, ...]:
    """Rules for the settings of one policy."""
    policy = "self.snapshot.policy"
    asked = f"has({policy}.{field}) && {policy}.{field}.recompute"
    return (
        CelRule(
            rule=f"!({asked}) || self.redundancy.type == 'Replication'",
            says="needs replicas, and spec.redundancy.type %s keeps none; remove it, or set the "
            "type to Replication",
            values=("self.redundancy.type",),
            field=f".snapshot.policy.{field}.recompute",
        ),
        CelRule(
            rule=f"!({asked}) || self.redundancy.type != 'Replication' || "
            "self.snapshot.interval.steps == 1",
            says="a gradient covers one step, not spec.snapshot.interval.steps = %s; remove it, "
            "or set the steps to 1",
            values=("self.snapshot.interval.steps",),
            field=f".snapshot.policy.{field}.recompute",
        ),
    )


def _only_with(path: str, kind: str, field: str) -> CelRule:
    """Rule of a union: `field` below `path` belongs to the type `kind` alone."""
    return CelRule(
        rule=f"self.type == '{kind}' || !has(self.{field})",
        says=f"is given, but {path}.type is %s; remove it, or set the type to {kind}",
        values=("self.type",),
        field=f".{field}",
    )


def _fixed(field: str) -> CelRule:
    """Rule against changing a field while the job runs: all members must agree on it, and running
    ones began with its old value."""
    return CelRule(
        rule=f"oldSelf.suspend || self.{field} == oldSelf.{field}",
        says="cannot be changed while the job runs; set spec.suspend to true first",
        field=f".{field}",
        forbidden=True,
    )


def _fixed_in_pods(field: str) -> CelRule:
    """Rule against changing a field while the job runs that its pods get when they start: those
    that start later would save otherwise than the others. Pods of other controllers do not get
    it."""
    return CelRule(
        rule=f"oldSelf.suspend || self.trainer.external || self.{field} == oldSelf.{field}",
        says="cannot be changed while the job runs; set spec.suspend to true first",
        field=f".{field}",
        forbidden=True,
    )


_FIXED_GANG = CelRule(
    rule="oldSelf.suspend || self.scheduling.gang == oldSelf.scheduling.gang || "
    "(self.scheduling.gang in ['None', 'Kueue'] && oldSelf.scheduling.gang in ['None', 'Kueue'])",
    says="cannot be changed while the job runs; set spec.suspend to true first",
    field=".scheduling.gang",
    forbidden=True,
)
"""Pods that start later would wait for a group in which the others are not. Kueue takes a job as a
whole."""
_NAME = (
    CelRule(
        rule=f"size(self.metadata.name) <= {MAX_NAME_CHARACTERS}",
        says=f"%d characters; use at most {MAX_NAME_CHARACTERS}",
        values=("size(self.metadata.name)",),
        field=".metadata.name",
    ),
    CelRule(
        rule="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        says="the job's Service cannot have this name; use lower-case letters, digits and '-', "
        "beginning with a letter and ending with a letter or a digit",
        field=".metadata.name",
    ),
)
_WORLD = (
    CelRule(
        rule="self.parallelism.dp * self.parallelism.tp * self.parallelism.pp == "
        "self.nodes * self.nprocPerNode",
        says="dp·tp·pp = %d, but nodes·nprocPerNode = %d·%d = %d; make them equal",
        values=(
            "self.parallelism.dp * self.parallelism.tp * self.parallelism.pp",
            "self.nodes",
            "self.nprocPerNode",
            "self.nodes * self.nprocPerNode",
        ),
        field=".parallelism",
    ),
    CelRule(
        rule="!has(self.model) || self.model.numExperts % self.parallelism.ep == 0",
        says="cannot be divided by ep = %d; change spec.parallelism.ep so that every rank holds "
        "the same number of experts",
        values=("self.parallelism.ep",),
        field=".model.numExperts",
    ),
    CelRule(
        rule="!has(self.minNodes) || self.minNodes <= self.nodes",
        says="more than spec.nodes = %d; use a number from 1 to %d",
        values=("self.nodes", "self.nodes"),
        field=".minNodes",
    ),
    CelRule(
        rule="self.redundancy.type == 'None' || self.nodes != 1",
        says="a job of one node has no other node for its parity; use redundancy.type None, or "
        "at least 2 nodes",
        field=".redundancy.type",
    ),
    CelRule(
        rule="self.nodes < 2 || !has(self.redundancy.raim5) || "
        "!has(self.redundancy.raim5.groupSize) || self.redundancy.raim5.groupSize <= self.nodes",
        says=f"more members than the job's %d nodes; use a number from {MIN_GROUP_SIZE} to %d",
        values=("self.nodes", "self.nodes"),
        field=".redundancy.raim5.groupSize",
    ),
    CelRule(
        rule="self.nodes < 3 || !has(self.redundancy.raim6) || "
        "!has(self.redundancy.raim6.groupSize) || self.redundancy.raim6.groupSize <= self.nodes",
        says="more members than the job's %d nodes; use a number from 3 to %d",
        values=("self.nodes", "self.nodes"),
        field=".redundancy.raim6.groupSize",
    ),
    CelRule(
        rule="self.nodes < 2 || self.redundancy.type != 'RAIM6' || self.nodes > 2",
        says="2 losses need more than the job's %d nodes; use at least 3 nodes, or weaker "
        "redundancy",
        values=("self.nodes",),
        field=".redundancy.type",
    ),
    CelRule(
        rule="self.nodes < 2 || self.redundancy.type != 'Replication' || "
        "!has(self.redundancy.replication) || "
        "self.redundancy.replication.replicas < self.nodes",
        says="%d losses need more than the job's %d nodes; use at least %d nodes, or weaker "
        "redundancy",
        values=(
            "self.redundancy.replication.replicas",
            "self.nodes",
            "self.redundancy.replication.replicas + 1",
        ),
        field=".redundancy.type",
    ),
)
_FEWER = "!has(self.minNodes) || self.minNodes >= self.nodes"
_COPY = "self.parallelism.tp * self.parallelism.pp * self.parallelism.ep"
_LOSSES = (
    "(self.redundancy.type == 'RAIM6' ? 2 : self.redundancy.type == 'Replication' && "
    "has(self.redundancy.replication) ? self.redundancy.replication.replicas : 1)"
)
_FEWER_NODES = (
    CelRule(
        rule=f"{_FEWER} || self.parallelism.dp * self.parallelism.tp * self.parallelism.pp != "
        "self.nodes * self.nprocPerNode || self.parallelism.dp % self.parallelism.ep != 0 || "
        f"self.nprocPerNode % ({_COPY}) == 0",
        says="tp·pp·ep = %d does not divide the %d ranks of %d nodes; use degrees whose product "
        "divides nprocPerNode = %d, or minNodes = %d",
        values=(
            _COPY,
            "(self.nodes - 1) * self.nprocPerNode",
            "self.nodes - 1",
            "self.nprocPerNode",
            "self.nodes",
        ),
        field=".minNodes",
    ),
    CelRule(
        rule=f"{_FEWER} || self.redundancy.type != 'None'",
        says="redundancy.type None loses the state of a lost node, without which the others cannot "
        "go on; use RAIM5, RAIM6 or Replication, or minNodes = %d",
        values=("self.nodes",),
        field=".minNodes",
    ),
    CelRule(
        rule=f"{_FEWER} || self.redundancy.type == 'None' || self.minNodes > {_LOSSES} || "
        f"self.nodes <= {_LOSSES}",
        says="redundancy.type %s needs at least %d nodes; use a number from %d to %d",
        values=("self.redundancy.type", f"{_LOSSES} + 1", f"{_LOSSES} + 1", "self.nodes"),
        field=".minNodes",
    ),
    CelRule(
        rule=f"{_FEWER} || self.snapshot.policy.type != 'Sparse'",
        says="steps of a sparse window are repeated only by the world that captured it; use "
        "another policy, or minNodes = %d",
        values=("self.nodes",),
        field=".snapshot.policy.type",
    ),
    CelRule(
        rule=f"{_FEWER} || !(self.scheduling.gang in ['Volcano', 'Coscheduling'])",
        says="schedules no pod while the job has fewer than %d; use None, Kueue or KueuePodGroup, "
        "or minNodes = %d",
        values=("self.nodes", "self.nodes"),
        field=".scheduling.gang",
    ),
    CelRule(
        rule="has(self.minNodes) && self.minNodes < self.nodes || "
        "!self.failurePolicy.rules.exists(r, r.action == 'Shrink')",
        says="spec.minNodes allows no fewer than spec.nodes = %d nodes; give a smaller minNodes, "
        "or use another action",
        values=("self.nodes",),
        field=".failurePolicy.rules",
    ),
)
_LEAST = "(has(self.minNodes) ? self.minNodes : self.nodes)"
_SEATS = f"(self.elastic.seatsPerRank * self.nprocPerNode * {_LEAST})"
_ELASTIC = (
    *(
        CelRule(
            rule=f"!has(self.elastic) || self.parallelism.{name} == 1",
            says="spec.elastic needs ranks that each hold whole experts, any of them; use "
            f"{name} = 1, or remove spec.elastic",
            field=f".parallelism.{name}",
        )
        for name in ("tp", "pp", "ep")
    ),
    CelRule(
        rule="!has(self.elastic) || self.snapshot.policy.type != 'Sparse'",
        says="spec.elastic moves experts between ranks, and only the ranks of a sparse window can "
        "repeat its steps; use Full, PartialExperts or Selective, or remove spec.elastic",
        field=".snapshot.policy.type",
    ),
    CelRule(
        rule=f"!has(self.elastic) || !has(self.model) || self.model.numExperts <= {_SEATS}",
        says="%d nodes have %d seats in each layer, too few for spec.model.numExperts = %d; use at "
        "least %d, or a greater minNodes",
        values=(
            _LEAST,
            _SEATS,
            "self.model.numExperts",
            f"(self.model.numExperts + self.nprocPerNode * {_LEAST} - 1) / "
            f"(self.nprocPerNode * {_LEAST})",
        ),
        field=".elastic.seatsPerRank",
    ),
    CelRule(
        rule="oldSelf.suspend || has(self.elastic) == has(oldSelf.elastic) && "
        "(!has(self.elastic) || self.elastic == oldSelf.elastic)",
        says="cannot be changed while the job runs; set spec.suspend to true first",
        field=".elastic",
        forbidden=True,
    ),
)
_MEMORY = (
    CelRule(
        rule=f"type(self) == int ? self >= 0 : self.matches('^[0-9]+([.][0-9]+)?{_UNITS}$')",
        says="not an amount of memory; write bytes or use Ki, Mi, Gi, Ti, Pi, k, M, G, T or P, "
        "like 200Gi",
    ),
    CelRule(
        rule=f"type(self) == int ? self != 0 : !self.matches('^0+([.]0+)?{_UNITS}$')",
        says="leaves no memory for snapshots; give more, or remove the field to use the "
        "daemon's budget",
    ),
)
_BANDWIDTH = (
    CelRule(
        rule=f"type(self) == int ? self >= 0 : self.matches('^[0-9]+([.][0-9]+)?{_UNITS}$')",
        says="not an amount of bytes; write bytes or use Ki, Mi, Gi, k, M or G, like 500M",
    ),
    CelRule(
        rule=f"type(self) == int ? self < 0 || self >= {BANDWIDTH_BYTES_S_MIN} : "
        f"!isQuantity(self) || quantity(self).compareTo(quantity('{BANDWIDTH_BYTES_S_MIN}')) >= 0",
        says="too little to protect anything in time; give 10M or more, or remove it",
    ),
)
_FAILURE_RULES = (
    CelRule(
        rule="size(self) == 0 || self.filter(r, r.when == 'Any').size() == "
        "(self[size(self) - 1].when == 'Any' ? 1 : 0)",
        says="when: Any matches everything, so that later rules never apply; move it to the end",
    ),
)
_FAILURE_RULE = (
    CelRule(
        rule="(self.when == 'ExitCode') == (size(self.values) > 0)",
        says="when: %s has %s; give exit codes with when: ExitCode, and only there",
        values=("self.when", "size(self.values) > 0 ? 'exit codes' : 'no exit code'"),
        field=".values",
    ),
    CelRule(
        rule="self.when == 'NoReplacement' || !has(self.afterSeconds)",
        says="when: %s has a waiting time; give afterSeconds with when: NoReplacement, and only "
        "there",
        values=("self.when",),
        field=".afterSeconds",
    ),
)
_SCHEDULING = (
    CelRule(
        rule="!(self.gang in ['Kueue', 'KueuePodGroup']) || has(self.queue)",
        says="gang: %s has no queue; give the name of a LocalQueue in the job's namespace",
        values=("self.gang",),
        field=".queue",
    ),
    CelRule(
        rule="!has(self.queue) || self.gang in ['Kueue', 'KueuePodGroup', 'Volcano']",
        says="gang: %s has a queue; remove it, or use gang: Kueue, KueuePodGroup or Volcano",
        values=("self.gang",),
        field=".queue",
    ),
)
_MANAGED_BY = (
    CelRule(
        rule="self.matches('^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._~A-Za-z0-9]+$')",
        says=f"not a name with a domain; write {MANAGER}, or another controller's name like "
        "example.com/controller",
    ),
    CelRule(
        rule="self == oldSelf",
        says="cannot be changed; delete the job and apply it again",
        forbidden=True,
    ),
)

_CAPTURED = (
    "(has(self.snapshot.policy.partialExperts) ? "
    "self.snapshot.policy.partialExperts.expertsPerLayer : 1)"
)
_NO_EXPERTS = "!has(self.persistence) || !has(self.persistence.experts)"
_PERSISTED_EXPERTS = (
    CelRule(
        rule=f"{_NO_EXPERTS} || self.snapshot.policy.type == 'PartialExperts'",
        says="the policy is %s; use snapshot.policy.type PartialExperts, or remove it",
        values=("self.snapshot.policy.type",),
        field=".persistence.experts",
    ),
    CelRule(
        rule=f"{_NO_EXPERTS} || self.snapshot.policy.type != 'PartialExperts' || "
        f"self.persistence.experts <= {_CAPTURED}",
        says="%d is more than the %d experts of each layer that a snapshot captures; persist no "
        "more than that, or raise snapshot.policy.partialExperts.expertsPerLayer",
        values=("self.persistence.experts", _CAPTURED),
        field=".persistence.experts",
    ),
)


def _not_for_external(path: str, refused: str, fix: str) -> CelRule:
    """Rule that what needs pods of ours is not asked for where another controller makes them."""
    return CelRule(
        rule=f"!self.trainer.external || !({refused})",
        says=f"{NOT_FOR_EXTERNAL}; {fix}, or give a template",
        field=path,
    )


_TRAINER = (
    CelRule(
        rule="self.trainer.external || has(self.trainer.template)",
        says="is required; give a pod template; its first container is the trainer. Or write "
        "spec.trainer.external: true for pods that another controller makes",
        field=".trainer.template",
    ),
    CelRule(
        rule="!self.trainer.external || !has(self.trainer.template)",
        says="is given, but spec.trainer.external is true; remove one of the two",
        field=".trainer.template",
    ),
    _not_for_external(".suspend", "self.suspend", SUSPEND_THERE),
    _not_for_external(".minNodes", "has(self.minNodes) && self.minNodes < self.nodes", "remove it"),
    _not_for_external(".elastic", "has(self.elastic)", "remove it"),
    _not_for_external(".scheduling.gang", "self.scheduling.gang != 'None'", "remove it"),
    _not_for_external(".failurePolicy.spares", "self.failurePolicy.spares != 0", "remove it"),
    _not_for_external(
        ".snapshot.policy.type", "self.snapshot.policy.type != 'Full'", IN_THE_SCRIPT
    ),
    _not_for_external(
        ".snapshot.interval.steps", f"self.snapshot.interval.steps == '{AUTO}'", IN_THE_SCRIPT
    ),
    _not_for_external(
        ".snapshot.compareReplicasEvery",
        f"self.snapshot.compareReplicasEvery != {COMPARE_REPLICAS_EVERY}",
        IN_THE_SCRIPT,
    ),
    _not_for_external(
        ".snapshot.storeComputeWeights", "!self.snapshot.storeComputeWeights", IN_THE_SCRIPT
    ),
)

RULES: dict[str, tuple[CelRule, ...]] = {
    "": _NAME,
    "spec": (
        *_WORLD,
        *_FEWER_NODES,
        *_ELASTIC,
        *(rule for field in _LOSSY_FIELDS for rule in _recompute(field)),
        *_SPARSE,
        *_PERSISTED_EXPERTS,
        *_TRAINER,
        *(_fixed(f) for f in ("nodes", "nprocPerNode", "parallelism", "redundancy", "trainer")),
        *(
            _fixed_in_pods(f"snapshot.{f}")
            for f in ("policy", "interval", "compareReplicasEvery", "storeComputeWeights")
        ),
        _FIXED_GANG,
    ),
    "spec.parallelism": (
        CelRule(
            rule="self.dp % self.ep == 0",
            says="does not divide dp = %d; use a divisor of it",
            values=("self.dp",),
            field=".ep",
        ),
    ),
    "spec.snapshot.memoryPerNode": _MEMORY,
    "spec.snapshot.slots": (
        CelRule(
            rule=f"type(self) == int ? self >= {SLOTS_MIN} && self <= {SLOTS_MAX} : "
            f"self == '{AUTO}'",
            says=f"not a number of slots; write {AUTO}, {SLOTS_MIN} or {SLOTS_MAX}",
        ),
    ),
    "spec.snapshot.policy": tuple(
        _only_with("spec.snapshot.policy", kind.value, field)
        for kind, field in POLICY_FIELDS.items()
    ),
    "spec.snapshot.interval.steps": (
        CelRule(
            rule=f"type(self) == int ? self >= 1 && self <= {STEPS_MAX} : self == '{AUTO}'",
            says=f"not a number of steps; write {AUTO}, or a number from 1 to {STEPS_MAX}",
        ),
    ),
    "spec.snapshot.policy.selective": (
        CelRule(
            rule="!has(self.experts) || !has(self.budget)",
            says="is given, but spec.snapshot.policy.selective.experts already sets the number; "
            "remove one of the two",
            field=".budget",
        ),
    ),
    "spec.snapshot.policy.sparse": (
        CelRule(
            rule="!has(self.decay) || self.order == 'TimeDecayed'",
            says="is given, but spec.snapshot.policy.sparse.order is %s; remove it, or set the "
            "order to TimeDecayed",
            values=("self.order",),
            field=".decay",
        ),
        CelRule(
            rule="self.order == 'Fixed' || self.repeats == 'Training'",
            says="makes no difference with spec.snapshot.policy.sparse.repeats Optimizer, which "
            "freezes no expert; remove one of the two",
            field=".order",
        ),
    ),
    "spec.redundancy": tuple(
        _only_with("spec.redundancy", kind.value, kind.value.lower())
        for kind in Redundancy
        if kind is not Redundancy.NONE
    ),
    "spec.redundancy.bandwidth": _BANDWIDTH,
    "spec.persistence.uri": (
        CelRule(
            rule=f"self.matches('^{URI_PATTERN}$') && !self.contains('::') && "
            "!self.split('/').exists(p, p == '.' || p == '..')",
            says=f"{NOT_A_STORAGE_URI}; {HOW_TO_WRITE_A_STORAGE_URI}",
        ),
    ),
    "spec.persistence.interval": (
        CelRule(
            rule="!has(self.minutes) || !has(self.steps)",
            says="is given together with minutes; remove one of the two",
            field=".steps",
        ),
    ),
    "spec.restore.from": (
        CelRule(
            rule=f"self == '{LATEST}' || self.matches('^{GENERATION_PATTERN}$')",
            says="not a generation; write latest, or epoch.step of a copy like 3.1200",
        ),
    ),
    "spec.failurePolicy.rules": _FAILURE_RULES,
    "spec.failurePolicy.rules[]": _FAILURE_RULE,
    "spec.scheduling": _SCHEDULING,
    "spec.scheduling.queue": (_DNS_NAME,),
    "spec.managedBy": _MANAGED_BY,
    "spec.trainer.template.spec.containers": (
        CelRule(rule="size(self) > 0", says="no container; give a list with the trainer"),
        CelRule(
            rule="size(self) == 0 || has(self[0].command) && size(self[0].command) > 0",
            says="the trainer has no command; give a list of words, for example "
            '["python", "train.py"]',
        ),
    ),
}
"""Path of the schema that holds the rules (`[]` for the entries of a list) → the rules."""
