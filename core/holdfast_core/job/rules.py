"""Rules of a job that the types of its fields cannot express, such as those between fields.

`RULES` has each rule once; those about a policy come from the policy's module
(`holdfast_core.job.policies`). The API server evaluates them from the generated resource
(`holdfast_operator.crd`); where there is no API server, `rule_problems` does. Both show the rule's
message. Labels, which no rule of an API server sees, are checked by `queue_problems`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from holdfast_core.job.documents import MISSING, Problem, at, convert, refuse, without_nulls
from holdfast_core.job.intervals import AUTO
from holdfast_core.job.locations import HOW_TO_WRITE_A_STORAGE_URI, NOT_A_STORAGE_URI, URI_PATTERN
from holdfast_core.job.persistence import LATEST
from holdfast_core.job.policies.policy import Policy
from holdfast_core.job.policies.registered import PolicyType
from holdfast_core.job.rule import Rule
from holdfast_core.job.schema import (
    MANAGER,
    PREBUILT_LABEL,
    QUEUE_LABEL,
    SETTINGS,
    Gang,
    MoETrainingJob,
)
from holdfast_core.job.settings import JobSetting
from holdfast_core.job.snapshots import (
    BANDWIDTH_BYTES_S_MIN,
    DEFAULT_GROUP_SIZE,
    DEFAULT_LARGE_GROUP_SIZE,
)
from holdfast_core.protection.groups import MIN_GROUP_SIZE
from holdfast_core.protection.intervals import STEPS_MAX
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN
from holdfast_core.snapshots.membership import Redundancy

MAX_NAME_CHARACTERS = 52
"""Longest name of a job: the name of a pod adds a suffix of up to 11 characters, and 63 is its
limit."""

_NOT_FOR_EXTERNAL = "needs pods that Holdfast makes, and spec.trainer.external is true"
_IN_THE_SCRIPT = "pass holdfast.Settings in the script"
_DNS_PATTERN = "[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
_GENERATION_PATTERN = "[0-9]{1,18}[.][0-9]{1,18}"


def rule_problems(document: Any, paths: Iterable[str]) -> Iterator[Problem]:
    """Problems of a document by the rules at `paths` of `RULES`. The types of what these read are
    valid, defaults are filled in, and a null counts as absent."""
    for path in paths:
        for where, value in _values_at(document, path):
            yield from _problems(RULES[path], value, where)


def check_policy(policy: Policy) -> None:
    """Check a policy that a script makes itself as one that a job asks for.

    Raises:
        InvalidJobError: it has a value out of its limits, or breaks a rule between its settings.
    """
    problems: list[Problem] = []
    plain = without_nulls(msgspec.to_builtins(policy))
    if convert(type(policy), plain, "policy", problems) is not None:
        problems.extend(_problems(policy.field_rules(), plain, "policy"))
    refuse(f"policy={policy} is not valid", problems)


def _problems(rules: Iterable[Rule], value: Any, path: str) -> Iterator[Problem]:
    problems = (rule.problem(value, path) for rule in rules if not rule.changes)
    return (problem for problem in problems if problem is not None)


def _values_at(value: Any, path: str, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of what is at a path like `spec.failurePolicy.rules[]`."""
    name, _, rest = path.partition(".")
    if not name:
        yield before, value
        return
    child: Any = at(value, name.removesuffix("[]"))
    here = f"{before}.{name.removesuffix('[]')}".removeprefix(".")
    if child is None or child is MISSING:
        return
    if not name.endswith("[]"):
        yield from _values_at(child, rest, here)
        return
    for i, entry in enumerate(child):
        yield from _values_at(entry, rest, f"{here}[{i}]")


def queue_problems(job: MoETrainingJob) -> Iterator[Problem]:
    """Problems of the labels by which Kueue knows a job, which no rule of an API server sees."""
    labels, scheduling = job.metadata.labels, job.spec.scheduling
    label, gang = labels.get(QUEUE_LABEL), scheduling.gang
    path = f"metadata.labels.{QUEUE_LABEL}"
    if label is not None and gang not in (Gang.NONE, Gang.KUEUE):
        yield Problem(
            path=path,
            value=label,
            wrong=f"queues the job as a whole, and spec.scheduling.gang is {gang.value}",
            fix="remove the label, or use gang: Kueue",
        )
    elif label is not None and gang is Gang.KUEUE and label != scheduling.queue:
        yield Problem(
            path=path,
            value=label,
            wrong=f"another queue than spec.scheduling.queue = {scheduling.queue}",
            fix="remove one of the two",
        )
    elif label is not None and not re.fullmatch(_DNS_PATTERN, label):
        yield Problem(
            path=path,
            value=label,
            wrong="not the name of a LocalQueue",
            fix="write the name of one in the job's namespace",
        )
    elif label is not None and job.spec.trainer.external:
        yield Problem(
            path=path, value=label, wrong=_NOT_FOR_EXTERNAL, fix="queue what makes the pods"
        )
    if PREBUILT_LABEL in labels:
        yield Problem(
            path=f"metadata.labels.{PREBUILT_LABEL}",
            value=labels[PREBUILT_LABEL],
            wrong="Holdfast makes the Workload of a job itself",
            fix="remove the label",
        )


_UNITS = "(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?"
_DNS_NAME = Rule(
    rule=f"self.matches('^{_DNS_PATTERN}$')",
    says="not a DNS-1123 subdomain; use lower-case letters, digits, '-' and '.', beginning and "
    "ending with a letter or a digit",
)


def _only_with(path: str, kind: str, field: str) -> Rule:
    """Rule of a union: `field` below `path` belongs to the type `kind` alone."""
    return Rule(
        rule=f"self.type == '{kind}' || !has(self.{field})",
        says=f"is given, but {path}.type is %s; remove it, or set the type to {kind}",
        values=("self.type",),
        field=f".{field}",
    )


def _fixed(field: str, same: str = "") -> Rule:
    """Rule against changing a field while the job runs: all members must agree on it, and running
    ones began with its old value.

    Args:
        same: CEL for whether it is the same in all that matters; equality without it.
    """
    return Rule(
        rule=f"oldSelf.suspend || {same or f'self.{field} == oldSelf.{field}'}",
        says="cannot be changed while the job runs; set spec.suspend to true first",
        field=f".{field}",
        forbidden=True,
    )


def _fixed_in_pods(field: str) -> Rule:
    """Rule against changing a field while the job runs that its pods get when they start: those
    that start later would save otherwise than the others. Pods of other controllers do not get
    it."""
    return _fixed(field, f"self.trainer.external || self.{field} == oldSelf.{field}")


_FIXED_GANG = _fixed(
    "scheduling.gang",
    "self.scheduling.gang == oldSelf.scheduling.gang || "
    "(self.scheduling.gang in ['None', 'Kueue'] && oldSelf.scheduling.gang in ['None', 'Kueue'])",
)
"""Pods that start later would wait for a group in which the others are not. Kueue takes a job as a
whole."""
_NAME = (
    Rule(
        rule=f"size(self.metadata.name) <= {MAX_NAME_CHARACTERS}",
        says=f"%d characters; use at most {MAX_NAME_CHARACTERS}",
        values=("size(self.metadata.name)",),
        field=".metadata.name",
    ),
    Rule(
        rule="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        says="the job's Service cannot have this name; use lower-case letters, digits and '-', "
        "beginning with a letter and ending with a letter or a digit",
        field=".metadata.name",
    ),
)
_WORLD = (
    Rule(
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
    Rule(
        rule="!has(self.model) || self.model.numExperts % self.parallelism.ep == 0",
        says="cannot be divided by ep = %d; change spec.parallelism.ep so that every rank holds "
        "the same number of experts",
        values=("self.parallelism.ep",),
        field=".model.numExperts",
    ),
    Rule(
        rule="!has(self.minNodes) || self.minNodes <= self.nodes",
        says="more than spec.nodes = %d; use a number from 1 to %d",
        values=("self.nodes", "self.nodes"),
        field=".minNodes",
    ),
    Rule(
        rule="!self.redundancy.mirrorReplicas || self.redundancy.type != 'None'",
        says="there is no parity to make with redundancy.type None; remove it, or choose another "
        "type",
        field=".redundancy.mirrorReplicas",
    ),
    Rule(
        rule="!self.redundancy.mirrorReplicas || self.snapshot.policy.type == 'Full'",
        says="the policy is %s, whose snapshots hold state that no replica has any more; remove "
        "it, or set snapshot.policy.type to Full",
        values=("self.snapshot.policy.type",),
        field=".redundancy.mirrorReplicas",
    ),
    Rule(
        rule="self.redundancy.type != 'None' || self.failurePolicy.onStraggler != 'Replace'",
        says="Replace moves a member away from its memory, which nothing rebuilds with "
        "redundancy.type None; use Report, or choose another redundancy.type",
        field=".failurePolicy.onStraggler",
    ),
    Rule(
        rule="self.redundancy.type != 'None' || self.failurePolicy.onCorruption != 'Replace'",
        says="Replace moves a member away from its memory, which nothing rebuilds with "
        "redundancy.type None; use Report, or choose another redundancy.type",
        field=".failurePolicy.onCorruption",
    ),
    Rule(
        rule="self.snapshot.compareReplicasEvery == 1 || "
        "self.failurePolicy.onCorruption != 'Replace'",
        says="Replace goes back to the newest generation, which may itself hold wrong bytes "
        "unless every save is compared; use Report, or set snapshot.compareReplicasEvery to 1",
        field=".failurePolicy.onCorruption",
    ),
    Rule(
        rule="self.failurePolicy.repeatStepsShare == 0.0 || self.snapshot.policy.type == 'Full'",
        says="the policy is %s, which counts the tokens of each step, and those of a step that is "
        "executed twice would count twice; remove it, or set snapshot.policy.type to Full",
        values=("self.snapshot.policy.type",),
        field=".failurePolicy.repeatStepsShare",
    ),
    Rule(
        rule="self.redundancy.type == 'None' || self.nodes != 1",
        says="a job of one node has no other node for its parity; use redundancy.type None, or "
        "at least 2 nodes",
        field=".redundancy.type",
    ),
    Rule(
        rule="self.nodes < 2 || !has(self.redundancy.raim5) || "
        "!has(self.redundancy.raim5.groupSize) || self.redundancy.raim5.groupSize <= self.nodes",
        says=f"more members than the job's %d nodes; use a number from {MIN_GROUP_SIZE} to %d",
        values=("self.nodes", "self.nodes"),
        field=".redundancy.raim5.groupSize",
    ),
    Rule(
        rule="self.nodes < 3 || !has(self.redundancy.raim6) || "
        "!has(self.redundancy.raim6.groupSize) || self.redundancy.raim6.groupSize <= self.nodes",
        says="more members than the job's %d nodes; use a number from 3 to %d",
        values=("self.nodes", "self.nodes"),
        field=".redundancy.raim6.groupSize",
    ),
    Rule(
        rule="self.nodes < 2 || self.redundancy.type != 'RAIM6' || self.nodes > 2",
        says="2 losses need more than the job's %d nodes; use at least 3 nodes, or weaker "
        "redundancy",
        values=("self.nodes",),
        field=".redundancy.type",
    ),
    Rule(
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
_COPY = "self.parallelism.tp * self.parallelism.pp"
_LOSSES = (
    "(self.redundancy.type == 'RAIM6' ? 2 : self.redundancy.type == 'Replication' && "
    "has(self.redundancy.replication) ? self.redundancy.replication.replicas : 1)"
)
_COPY_NODES = f"(({_COPY}) / self.nprocPerNode)"
_IN_A_NODE = (
    f"{_FEWER} || self.parallelism.dp * self.parallelism.tp * self.parallelism.pp != "
    f"self.nodes * self.nprocPerNode || self.nprocPerNode % ({_COPY}) == 0"
)
_WHOLE_NODES = f"({_COPY}) % self.nprocPerNode == 0"
_GROUP_SIZE = (
    "(self.redundancy.type == 'RAIM5' ? (has(self.redundancy.raim5) && "
    "has(self.redundancy.raim5.groupSize) ? self.redundancy.raim5.groupSize : "
    f"{DEFAULT_GROUP_SIZE}) : self.redundancy.type == 'RAIM6' ? (has(self.redundancy.raim6) && "
    "has(self.redundancy.raim6.groupSize) ? self.redundancy.raim6.groupSize : "
    f"{DEFAULT_LARGE_GROUP_SIZE}) : {_LOSSES} + 1)"
)
_SHRINKING = f"(self.minNodes + {_COPY_NODES})"
"""The smallest number of nodes from which a job shrinks: with the fewest parity groups."""
_GROUPS = (
    f"({_SHRINKING} / ({_LOSSES} + 1) < ({_SHRINKING} - 1) / {_GROUP_SIZE} + 1 ? "
    f"{_SHRINKING} / ({_LOSSES} + 1) : ({_SHRINKING} - 1) / {_GROUP_SIZE} + 1)"
)
"""Their number, as `holdfast_core.protection.groups` forms them."""
_FEWER_NODES = (
    Rule(
        rule=f"{_IN_A_NODE} || {_WHOLE_NODES}",
        says="tp·pp = %d neither divides nprocPerNode = %d nor is a multiple of it, so fewer nodes "
        "have no whole copies of the model; use other degrees, or minNodes = %d",
        values=(_COPY, "self.nprocPerNode", "self.nodes"),
        field=".minNodes",
    ),
    Rule(
        rule=f"{_IN_A_NODE} || !({_WHOLE_NODES}) || self.minNodes % {_COPY_NODES} == 0",
        says="minNodes = %d is no whole number of copies of the model, each of which takes tp·pp / "
        "nprocPerNode = %d nodes; use a multiple of %d",
        values=("self.minNodes", _COPY_NODES, _COPY_NODES),
        field=".minNodes",
    ),
    Rule(
        rule=f"{_IN_A_NODE} || !({_WHOLE_NODES}) || self.minNodes % {_COPY_NODES} != 0 || "
        f"self.redundancy.type == 'None' || self.minNodes <= {_LOSSES} || "
        f"{_LOSSES} * {_GROUPS} >= {_COPY_NODES}",
        says="with a lost node all %d leave that a copy of the model takes, and the parity groups "
        "of %d nodes can rebuild the state of only %d; use smaller groups, stronger redundancy, or "
        "a greater minNodes",
        values=(_COPY_NODES, _SHRINKING, f"{_LOSSES} * {_GROUPS}"),
        field=".minNodes",
    ),
    Rule(
        rule=f"{_FEWER} || self.redundancy.type != 'None'",
        says="redundancy.type None loses the state of a lost node, without which the others cannot "
        "continue; use RAIM5, RAIM6 or Replication, or minNodes = %d",
        values=("self.nodes",),
        field=".minNodes",
    ),
    Rule(
        rule=f"{_FEWER} || self.redundancy.type == 'None' || self.minNodes > {_LOSSES} || "
        f"self.nodes <= {_LOSSES}",
        says="redundancy.type %s needs at least %d nodes; use a number from %d to %d",
        values=("self.redundancy.type", f"{_LOSSES} + 1", f"{_LOSSES} + 1", "self.nodes"),
        field=".minNodes",
    ),
    Rule(
        rule=f"{_FEWER} || !(self.scheduling.gang in ['Volcano', 'Coscheduling'])",
        says="schedules no pod while the job has fewer than %d; use None, Kueue or KueuePodGroup, "
        "or minNodes = %d",
        values=("self.nodes", "self.nodes"),
        field=".scheduling.gang",
    ),
    Rule(
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
_WITHOUT_SEATS = " and let the script divide the experts by the ep of Topology.fitted"
_ELASTIC = (
    *(
        Rule(
            rule=f"!has(self.elastic) || self.parallelism.{name} == 1",
            says="spec.elastic needs ranks that each hold whole experts, any of them; use "
            f"{name} = 1, or remove spec.elastic{instead}",
            field=f".parallelism.{name}",
        )
        for name, instead in (
            ("tp", _WITHOUT_SEATS),
            ("pp", _WITHOUT_SEATS),
            ("ep", ""),
        )
    ),
    Rule(
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
    _fixed(
        "elastic",
        "has(self.elastic) == has(oldSelf.elastic) && "
        "(!has(self.elastic) || self.elastic == oldSelf.elastic)",
    ),
)
_AMOUNT = f"self.matches('^[0-9]+([.][0-9]+)?{_UNITS}$')"
_NOTHING = f"self.matches('^0+([.]0+)?{_UNITS}$')"
_MEMORY = (
    Rule(
        rule=f"type(self) == int ? self >= 0 : {_AMOUNT}",
        says="not an amount of memory; write bytes or use Ki, Mi, Gi, Ti, Pi, k, M, G, T or P, "
        "like 200Gi",
    ),
    Rule(
        rule=f"type(self) == int ? self != 0 : !{_NOTHING}",
        says="leaves no memory for snapshots; give more, or remove the field to use the "
        "daemon's budget",
    ),
)
_BANDWIDTH = (
    Rule(
        rule=f"type(self) == int ? self >= 0 : {_AMOUNT}",
        says="not an amount of bytes; write bytes or use Ki, Mi, Gi, k, M or G, like 500M",
    ),
    Rule(
        rule=f"type(self) == int ? self < 0 || self >= {BANDWIDTH_BYTES_S_MIN} : "
        f"!isQuantity(self) || quantity(self).compareTo(quantity('{BANDWIDTH_BYTES_S_MIN}')) >= 0",
        says="too little to protect anything in time; give 10M or more, or remove it",
    ),
)
_FAILURE_RULES = (
    Rule(
        rule="size(self) == 0 || self.filter(r, r.when == 'Any').size() == "
        "(self[size(self) - 1].when == 'Any' ? 1 : 0)",
        says="when: Any matches everything, so that later rules never apply; move it to the end",
    ),
)
_FAILURE_RULE = (
    Rule(
        rule="(self.when == 'ExitCode') == (size(self.values) > 0)",
        says="when: %s has %s; give exit codes with when: ExitCode, and only there",
        values=("self.when", "size(self.values) > 0 ? 'exit codes' : 'no exit code'"),
        field=".values",
    ),
    Rule(
        rule="self.when == 'NoReplacement' || !has(self.afterSeconds)",
        says="when: %s has a waiting time; give afterSeconds with when: NoReplacement, and only "
        "there",
        values=("self.when",),
        field=".afterSeconds",
    ),
)
_SCHEDULING = (
    Rule(
        rule="!(self.gang in ['Kueue', 'KueuePodGroup']) || has(self.queue)",
        says="gang: %s has no queue; give the name of a LocalQueue in the job's namespace",
        values=("self.gang",),
        field=".queue",
    ),
    Rule(
        rule="!has(self.queue) || self.gang in ['Kueue', 'KueuePodGroup', 'Volcano']",
        says="gang: %s has a queue; remove it, or use gang: Kueue, KueuePodGroup or Volcano",
        values=("self.gang",),
        field=".queue",
    ),
)
_MANAGED_BY = (
    Rule(
        rule="self.matches('^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._~A-Za-z0-9]+$')",
        says=f"not a name with a domain; write {MANAGER}, or another controller's name like "
        "example.com/controller",
    ),
    Rule(
        rule="self == oldSelf",
        says="cannot be changed; delete the job and apply it again",
        forbidden=True,
    ),
)

_RESTORED = Rule(
    rule=f"self.restore.from == '{LATEST}' || has(self.persistence)",
    says="there is no spec.persistence to restore from; give spec.persistence.uri, or remove "
    "spec.restore",
    field=".restore.from",
)


def _not_for_external(path: str, refused: str, fix: str) -> Rule:
    """Rule that what needs pods of ours is not asked for where another controller makes them."""
    return Rule(
        rule=f"!self.trainer.external || !({refused})",
        says=f"{_NOT_FOR_EXTERNAL}; {fix}, or give a template",
        field=path,
    )


def _is_set(setting: JobSetting) -> str:
    """CEL for whether a job gives a setting another value than the default."""
    path, default = f"self.{setting.path}", setting.default
    match default:
        case None:
            return f"has({path})"
        case bool():
            return f"!{path}" if default else path
        case str():
            return f"{path} != '{setting.to_text(default)}'"
        case _:
            return f"{path} != {default!r}"


_TRAINER = (
    Rule(
        rule="self.trainer.external || has(self.trainer.template)",
        says="is required; give a pod template; its first container is the trainer. Or write "
        "spec.trainer.external: true for pods that another controller makes",
        field=".trainer.template",
    ),
    Rule(
        rule="!self.trainer.external || !has(self.trainer.template)",
        says="is given, but spec.trainer.external is true; remove one of the two",
        field=".trainer.template",
    ),
    _not_for_external(".suspend", "self.suspend", "suspend what makes the pods"),
    _not_for_external(".minNodes", "has(self.minNodes) && self.minNodes < self.nodes", "remove it"),
    _not_for_external(".elastic", "has(self.elastic)", "remove it"),
    _not_for_external(".scheduling.gang", "self.scheduling.gang != 'None'", "remove it"),
    _not_for_external(
        ".failurePolicy.onStraggler",
        "self.failurePolicy.onStraggler == 'Replace'",
        "use Report",
    ),
    _not_for_external(
        ".failurePolicy.onCorruption",
        "self.failurePolicy.onCorruption == 'Replace'",
        "use Report",
    ),
    _not_for_external(".failurePolicy.spares", "self.failurePolicy.spares != 0", "remove it"),
    _not_for_external(
        ".failurePolicy.checkNodes",
        "self.failurePolicy.checkNodes",
        "remove it, and run `python -m holdfast.node_checks` before the script",
    ),
    _not_for_external(
        ".snapshot.policy.type",
        f"self.snapshot.policy.type != '{PolicyType.FULL}'",
        _IN_THE_SCRIPT,
    ),
    _not_for_external(
        ".snapshot.interval.steps", f"self.snapshot.interval.steps == '{AUTO}'", _IN_THE_SCRIPT
    ),
    *(
        _not_for_external(f".{setting.path}", _is_set(setting), _IN_THE_SCRIPT)
        for setting in SETTINGS
    ),
)

RULES: dict[str, tuple[Rule, ...]] = {
    "": _NAME,
    "spec": (
        *_WORLD,
        *_FEWER_NODES,
        *_ELASTIC,
        *(rule for kind in PolicyType for rule in kind.policy.job_rules()),
        _RESTORED,
        *_TRAINER,
        *(_fixed(f) for f in ("nodes", "nprocPerNode", "parallelism", "redundancy", "trainer")),
        *(_fixed_in_pods(f) for f in ("snapshot.policy", "snapshot.interval")),
        *(_fixed_in_pods(setting.path) for setting in SETTINGS),
        _FIXED_GANG,
    ),
    "spec.parallelism": (
        Rule(
            rule="self.dp % self.ep == 0",
            says="does not divide dp = %d; use a divisor of it",
            values=("self.dp",),
            field=".ep",
        ),
    ),
    "spec.snapshot.memoryPerNode": _MEMORY,
    "spec.snapshot.slots": (
        Rule(
            rule=f"type(self) == int ? self >= {SLOTS_MIN} && self <= {SLOTS_MAX} : "
            f"self == '{AUTO}'",
            says=f"not a number of slots; write {AUTO}, {SLOTS_MIN} or {SLOTS_MAX}",
        ),
    ),
    "spec.snapshot.policy": tuple(
        _only_with("spec.snapshot.policy", kind.value, kind.policy.field_name())
        for kind in PolicyType
        if kind.policy.has_fields()
    ),
    **{
        f"spec.snapshot.policy.{kind.policy.field_name()}": kind.policy.field_rules()
        for kind in PolicyType
        if kind.policy.field_rules()
    },
    "spec.snapshot.interval.steps": (
        Rule(
            rule=f"type(self) == int ? self >= 1 && self <= {STEPS_MAX} : self == '{AUTO}'",
            says=f"not a number of steps; write {AUTO}, or a number from 1 to {STEPS_MAX}",
        ),
    ),
    "spec.redundancy": tuple(
        _only_with("spec.redundancy", kind.value, kind.value.lower())
        for kind in Redundancy
        if kind is not Redundancy.NONE
    ),
    "spec.redundancy.bandwidth": _BANDWIDTH,
    "spec.persistence.uri": (
        Rule(
            rule=f"self.matches('^{URI_PATTERN}$') && !self.contains('::') && "
            "!self.split('/').exists(p, p == '.' || p == '..')",
            says=f"{NOT_A_STORAGE_URI}; {HOW_TO_WRITE_A_STORAGE_URI}",
        ),
    ),
    "spec.persistence.interval": (
        Rule(
            rule="!has(self.minutes) || !has(self.steps)",
            says="is given together with minutes; remove one of the two",
            field=".steps",
        ),
    ),
    "spec.restore.from": (
        Rule(
            rule=f"self == '{LATEST}' || self.matches('^{_GENERATION_PATTERN}$')",
            says="not a generation; write latest, or epoch.step of a copy like 3.1200",
        ),
    ),
    "spec.failurePolicy.rules": _FAILURE_RULES,
    "spec.failurePolicy.rules[]": _FAILURE_RULE,
    "spec.persistence.bandwidth": (
        Rule(
            rule=f"type(self) == int ? self > 0 : {_AMOUNT} && !{_NOTHING}",
            says="not an amount of bytes above 0; write bytes or use Ki, Mi, Gi, k, M or G, like "
            "500M",
        ),
    ),
    "spec.scheduling": _SCHEDULING,
    "spec.scheduling.queue": (_DNS_NAME,),
    "spec.managedBy": _MANAGED_BY,
    "spec.trainer.template.spec.containers": (
        Rule(rule="size(self) > 0", says="no container; give a list with the trainer"),
        Rule(
            rule="size(self) == 0 || has(self[0].command) && size(self[0].command) > 0",
            says="the trainer has no command; give a list of words, for example "
            '["python", "train.py"]',
        ),
    ),
}
"""Path of the schema that holds the rules (`[]` for the entries of a list) → the rules."""
