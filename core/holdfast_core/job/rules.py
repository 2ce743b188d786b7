"""Rules between the fields of a job's spec, beyond their types.

The schema of the API server has the same rules in its own language (`holdfast_operator.crd`), with
the same messages; `tests/cluster/invalid_jobs.py` lists documents that both must refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import MISSING, Problem
from holdfast_core.job.failures import FailureAction, FailureRule, On
from holdfast_core.job.intervals import AUTO, StepInterval
from holdfast_core.job.persistence import persistence_problems
from holdfast_core.job.schema import (
    MANAGER,
    PREBUILT_LABEL,
    QUEUE_LABEL,
    Gang,
    MoETrainingJob,
    Scheduling,
    Spec,
)
from holdfast_core.job.snapshots import (
    BANDWIDTH_BYTES_S_MIN,
    COMPARE_REPLICAS_EVERY,
    POLICY_FIELDS,
    ExpertOrder,
    PolicySpec,
    PolicyType,
    RedundancySpec,
    Repeats,
)
from holdfast_core.protection.intervals import STEPS_MAX
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN
from holdfast_core.snapshots.membership import Redundancy

NOT_FOR_EXTERNAL = "needs pods that Holdfast makes, and spec.trainer.external is true"
SUSPEND_THERE = "suspend what makes the pods"
IN_THE_SCRIPT = "pass holdfast.Settings in the script"

_DNS_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_MANAGER = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._~A-Za-z0-9]+")


def spec_problems(spec: Spec) -> Iterator[Problem]:
    """Problems of `spec`, each of whose fields is valid by itself."""
    if not _MANAGER.fullmatch(spec.managed_by):
        yield Problem(
            path="spec.managedBy",
            value=spec.managed_by,
            wrong="not a name with a domain",
            fix=f"write {MANAGER}, or another controller's name like example.com/controller",
        )
    yield from _parallelism_problems(spec)
    yield from _interval_problems(spec.snapshot.interval)
    yield from _policy_problems(spec.snapshot.policy)
    yield from _recompute_problems(spec)
    yield from _sparse_problems(spec)
    yield from _redundancy_problems(spec)
    yield from _limit_problems(spec)
    yield from _fewer_nodes_problems(spec)
    yield from _elastic_problems(spec)
    yield from _name_problems(spec)
    yield from _scheduling_problems(spec.scheduling)
    yield from persistence_problems(spec.persistence, spec.restore, spec.snapshot.policy)
    yield from _rule_problems(spec.failure_policy.rules)
    yield from _trainer_problems(spec)


def _parallelism_problems(spec: Spec) -> Iterator[Problem]:
    p = spec.parallelism
    world = spec.nodes * spec.nproc_per_node
    if p.dp * p.tp * p.pp != world:
        fits = (
            f"or set dp to {world // (p.tp * p.pp)}"
            if world % (p.tp * p.pp) == 0
            else f"for {world} processes tp·pp = {p.tp * p.pp} must divide {world}"
        )
        yield Problem(
            path="spec.parallelism",
            value={"dp": p.dp, "tp": p.tp, "pp": p.pp},
            wrong=f"dp·tp·pp = {p.dp * p.tp * p.pp}, but nodes·nprocPerNode = "
            f"{spec.nodes}·{spec.nproc_per_node} = {world}",
            fix=f"make them equal, {fits}",
        )
    if p.dp % p.ep:
        yield Problem(
            path="spec.parallelism.ep",
            value=p.ep,
            wrong=f"does not divide dp = {p.dp}",
            fix=f"use one of {[ep for ep in range(1, p.dp + 1) if p.dp % ep == 0]}",
        )
    if spec.model is not None and spec.model.num_experts % p.ep:
        yield Problem(
            path="spec.model.numExperts",
            value=spec.model.num_experts,
            wrong=f"cannot be divided by ep = {p.ep}",
            fix="change spec.parallelism.ep so that every rank holds the same number of experts",
        )


def _interval_problems(interval: StepInterval) -> Iterator[Problem]:
    steps = interval.steps
    if steps != AUTO if isinstance(steps, str) else not 1 <= steps <= STEPS_MAX:
        yield Problem(
            path="spec.snapshot.interval.steps",
            value=steps,
            wrong="not a number of steps",
            fix=f"write {AUTO}, or a number from 1 to {STEPS_MAX}",
        )


def _policy_problems(policy: PolicySpec) -> Iterator[Problem]:
    for kind in policy.given:
        if kind is not policy.type:
            yield Problem(
                path=f"spec.snapshot.policy.{POLICY_FIELDS[kind]}",
                value=MISSING,
                wrong=f"is given, but spec.snapshot.policy.type is {policy.type.value}",
                fix=f"remove it, or set the type to {kind.value}",
            )
    chosen = policy.selective
    if chosen is not None and chosen.experts is not None and chosen.budget is not None:
        yield Problem(
            path="spec.snapshot.policy.selective.budget",
            value=MISSING,
            wrong="is given, but spec.snapshot.policy.selective.experts already sets the number",
            fix="remove one of the two",
        )

    sparse = policy.sparse
    if sparse is not None and sparse.unused_decay:
        yield Problem(
            path="spec.snapshot.policy.sparse.decay",
            value=sparse.decay,
            wrong=f"is given, but spec.snapshot.policy.sparse.order is {sparse.order.value}",
            fix=f"remove it, or set the order to {ExpertOrder.TIME_DECAYED.value}",
        )
    if sparse is not None and sparse.unused_order:
        yield Problem(
            path="spec.snapshot.policy.sparse.order",
            value=sparse.order,
            wrong=f"makes no difference with spec.snapshot.policy.sparse.repeats "
            f"{Repeats.OPTIMIZER.value}, which freezes no expert",
            fix="remove one of the two",
        )


def _recompute_problems(spec: Spec) -> Iterator[Problem]:
    policy, steps = spec.snapshot.policy, spec.snapshot.interval.steps
    for kind, settings in policy.given.items():
        if not settings.recompute:
            continue
        path = f"spec.snapshot.policy.{POLICY_FIELDS[kind]}.recompute"
        if spec.redundancy.type is not Redundancy.REPLICATION:
            yield Problem(
                path=path,
                value=True,
                wrong=f"needs replicas, and spec.redundancy.type {spec.redundancy.type.value} "
                f"keeps none",
                fix="remove it, or set the type to Replication",
            )
        elif steps != 1:  # MoEtion algorithm 3, line 2
            yield Problem(
                path=path,
                value=True,
                wrong=f"a gradient covers one step, not spec.snapshot.interval.steps = {steps}",
                fix="remove it, or set the steps to 1",
            )


def _sparse_problems(spec: Spec) -> Iterator[Problem]:
    """Problems of sparse windows, which hold the weights of every step."""
    if spec.snapshot.policy.type is not PolicyType.SPARSE:
        return
    steps = spec.snapshot.interval.steps
    if steps != 1:
        yield Problem(
            path="spec.snapshot.interval.steps",
            value=steps,
            wrong="a window of snapshot.policy.type Sparse needs every step",
            fix="use 1, or another policy",
        )


def _redundancy_problems(spec: Spec) -> Iterator[Problem]:
    redundancy = spec.redundancy
    for kind, given in (
        (Redundancy.RAIM5, redundancy.raim5),
        (Redundancy.RAIM6, redundancy.raim6),
        (Redundancy.REPLICATION, redundancy.replication),
    ):
        if given is not None and redundancy.type is not kind:
            yield Problem(
                path=f"spec.redundancy.{kind.value.lower()}",
                value=MISSING,
                wrong=f"is given, but spec.redundancy.type is {redundancy.type.value}",
                fix=f"remove it, or set the type to {kind.value}",
            )
    yield from _bandwidth_problems(redundancy)
    if redundancy.type is Redundancy.NONE:
        return
    if spec.nodes == 1:
        yield Problem(
            path="spec.redundancy.type",
            value=redundancy.type,
            wrong="a job of one node has no other node for its parity",
            fix="use redundancy.type None, or at least 2 nodes",
        )
        return
    if spec.nodes <= redundancy.losses:
        yield Problem(
            path="spec.redundancy.type",
            value=redundancy.type,
            wrong=f"{redundancy.losses} losses need more than the job's {spec.nodes} nodes",
            fix=f"use at least {redundancy.losses + 1} nodes, or weaker redundancy",
        )
        return
    size = redundancy.group_size(spec.nodes)
    if size > spec.nodes:
        yield Problem(
            path=f"spec.redundancy.{redundancy.type.value.lower()}.groupSize",
            value=size,
            wrong=f"more members than the job's {spec.nodes} nodes",
            fix=f"use a number from {redundancy.losses + 1} to {spec.nodes}",
        )


def _bandwidth_problems(redundancy: RedundancySpec) -> Iterator[Problem]:
    path, given = "spec.redundancy.bandwidth", redundancy.bandwidth
    if given is None:
        return
    try:
        enough = redundancy.bandwidth_bytes_s >= BANDWIDTH_BYTES_S_MIN
    except InvalidJobError:
        yield Problem(
            path=path,
            value=given,
            wrong="not an amount of bytes",
            fix="write bytes or use Ki, Mi, Gi, k, M or G, like 500M",
        )
        return
    if not enough:
        yield Problem(
            path=path,
            value=given,
            wrong="too little to protect anything in time",
            fix="give 10M or more, or remove it",
        )


def _limit_problems(spec: Spec) -> Iterator[Problem]:
    if spec.min_nodes is not None and spec.min_nodes > spec.nodes:
        yield Problem(
            path="spec.minNodes",
            value=spec.min_nodes,
            wrong=f"more than spec.nodes = {spec.nodes}",
            fix=f"use a number from 1 to {spec.nodes}",
        )
    slots = spec.snapshot.slots
    if slots != AUTO if isinstance(slots, str) else not SLOTS_MIN <= slots <= SLOTS_MAX:
        yield Problem(
            path="spec.snapshot.slots",
            value=slots,
            wrong="not a number of slots",
            fix=f"write {AUTO}, {SLOTS_MIN} or {SLOTS_MAX}",
        )
    memory = spec.snapshot.memory_per_node
    if memory is not None:
        try:
            nbytes = parse_bytes(memory)
        except InvalidJobError:
            yield Problem(
                path="spec.snapshot.memoryPerNode",
                value=memory,
                wrong="not an amount of memory",
                fix="write bytes or use Ki, Mi, Gi, Ti, Pi, k, M, G, T or P, like 200Gi",
            )
        else:
            if nbytes == 0:
                yield Problem(
                    path="spec.snapshot.memoryPerNode",
                    value=memory,
                    wrong="leaves no memory for snapshots",
                    fix="give more, or remove the field to use the daemon's budget",
                )


def _fewer_nodes_problems(spec: Spec) -> Iterator[Problem]:
    """Problems of a job that may go on with fewer nodes, and of `Shrink` in one that may not."""
    if not spec.may_shrink:
        for i, rule in enumerate(spec.failure_policy.rules):
            if rule.action is FailureAction.SHRINK:
                yield Problem(
                    path=f"spec.failurePolicy.rules[{i}].action",
                    value=rule.action,
                    wrong=f"spec.minNodes allows no fewer than spec.nodes = {spec.nodes} nodes",
                    fix="give a smaller minNodes, or use another action",
                )
        return
    yield from _fewer_ranks_problems(spec)
    policy, gang = spec.snapshot.policy.type, spec.scheduling.gang
    if policy is PolicyType.SPARSE:
        yield Problem(
            path="spec.snapshot.policy.type",
            value=policy,
            wrong="steps of a sparse window are repeated only by the world that captured it",
            fix=f"use another policy, or minNodes = {spec.nodes}",
        )
    if gang in (Gang.VOLCANO, Gang.COSCHEDULING):
        yield Problem(
            path="spec.scheduling.gang",
            value=gang,
            wrong=f"schedules no pod while the job has fewer than {spec.nodes}",
            fix=f"use None, Kueue or KueuePodGroup, or minNodes = {spec.nodes}",
        )


def _fewer_ranks_problems(spec: Spec) -> Iterator[Problem]:
    """Problems of the sizes from `minNodes` to `nodes`: parallelism and redundancy."""
    nodes, nproc, p = spec.nodes, spec.nproc_per_node, spec.parallelism
    consistent = p.dp * p.tp * p.pp == nodes * nproc and p.dp % p.ep == 0
    copy = p.tp * p.pp * p.ep
    if consistent and nproc % copy:
        # What divides the ranks of all nodes, but not those of one, cannot divide those of all but
        # one: that size is always the first that does not fit.
        yield Problem(
            path="spec.minNodes",
            value=spec.least_nodes,
            wrong=f"tp·pp·ep = {copy} does not divide the {(nodes - 1) * nproc} ranks of "
            f"{nodes - 1} nodes",
            fix=f"use degrees whose product divides nprocPerNode = {nproc}, or minNodes = {nodes}",
        )
    redundancy = spec.redundancy
    if redundancy.type is Redundancy.NONE:
        yield Problem(
            path="spec.minNodes",
            value=spec.least_nodes,
            wrong="redundancy.type None loses the state of a lost node, without which the others "
            "cannot go on",
            fix=f"use RAIM5, RAIM6 or Replication, or minNodes = {nodes}",
        )
    elif spec.least_nodes <= redundancy.losses < nodes:
        needed = redundancy.losses + 1
        yield Problem(
            path="spec.minNodes",
            value=spec.least_nodes,
            wrong=f"redundancy.type {redundancy.type.value} needs at least {needed} nodes",
            fix=f"use a number from {needed} to {nodes}",
        )


def _elastic_problems(spec: Spec) -> Iterator[Problem]:
    """Problems of uneven copies of experts, which may lie on any rank."""
    elastic, nproc = spec.elastic, spec.nproc_per_node
    if elastic is None:
        return
    for name in ("tp", "pp", "ep"):
        degree = getattr(spec.parallelism, name)
        if degree > 1:
            yield Problem(
                path=f"spec.parallelism.{name}",
                value=degree,
                wrong="spec.elastic needs ranks that each hold whole experts, any of them",
                fix=f"use {name} = 1, or remove spec.elastic",
            )
    policy = spec.snapshot.policy.type
    if policy is PolicyType.SPARSE:
        yield Problem(
            path="spec.snapshot.policy.type",
            value=policy,
            wrong="spec.elastic moves experts between ranks, and only the ranks of a sparse window "
            "can repeat its steps",
            fix="use Full, PartialExperts or Selective, or remove spec.elastic",
        )
    seats = elastic.seats_per_rank * nproc * spec.least_nodes
    if spec.model is not None and spec.model.num_experts > seats:
        yield Problem(
            path="spec.elastic.seatsPerRank",
            value=elastic.seats_per_rank,
            wrong=f"{spec.least_nodes} nodes have {seats} seats in each layer, too few for "
            f"spec.model.numExperts = {spec.model.num_experts}",
            fix=f"use at least {-(-spec.model.num_experts // (nproc * spec.least_nodes))}, or a "
            f"greater minNodes",
        )


def _name_problems(spec: Spec) -> Iterator[Problem]:
    queue = spec.scheduling.queue
    if queue is not None and not _DNS_NAME.fullmatch(queue):
        yield Problem(
            path="spec.scheduling.queue",
            value=queue,
            wrong="not a DNS-1123 subdomain",
            fix="use lower-case letters, digits, '-' and '.', beginning and ending with a "
            "letter or a digit",
        )


def _scheduling_problems(scheduling: Scheduling) -> Iterator[Problem]:
    path, gang = "spec.scheduling.queue", scheduling.gang
    if gang in (Gang.KUEUE, Gang.KUEUE_POD_GROUP) and scheduling.queue is None:
        yield Problem(
            path=path,
            value=MISSING,
            wrong=f"gang: {gang.value} has no queue",
            fix="give the name of a LocalQueue in the job's namespace",
        )
    if gang in (Gang.NONE, Gang.COSCHEDULING) and scheduling.queue is not None:
        yield Problem(
            path=path,
            value=scheduling.queue,
            wrong=f"gang: {gang.value} has a queue",
            fix="remove it, or use gang: Kueue, KueuePodGroup or Volcano",
        )


def _trainer_problems(spec: Spec) -> Iterator[Problem]:
    """Problems of who makes the pods."""
    trainer, path = spec.trainer, "spec.trainer.template"
    if not trainer.external:
        if trainer.template is None:
            yield Problem(
                path=path,
                value=MISSING,
                wrong="is required",
                fix="give a pod template; its first container is the trainer. Or write "
                "spec.trainer.external: true for pods that another controller makes",
            )
        return
    if trainer.template is not None:
        yield Problem(
            path=path,
            value=MISSING,
            wrong="is given, but spec.trainer.external is true",
            fix="remove one of the two",
        )
    snapshot, policy = spec.snapshot, spec.failure_policy
    for path, value, usual, fix in (
        ("spec.suspend", spec.suspend, False, SUSPEND_THERE),
        ("spec.minNodes", spec.least_nodes, spec.nodes, "remove it"),
        ("spec.elastic", spec.elastic is not None, False, "remove it"),
        ("spec.scheduling.gang", spec.scheduling.gang, Gang.NONE, "remove it"),
        ("spec.failurePolicy.spares", policy.spares, 0, "remove it"),
        ("spec.snapshot.policy.type", snapshot.policy.type, PolicyType.FULL, IN_THE_SCRIPT),
        ("spec.snapshot.interval.steps", snapshot.interval.auto, False, IN_THE_SCRIPT),
        (
            "spec.snapshot.compareReplicasEvery",
            snapshot.compare_replicas_every,
            COMPARE_REPLICAS_EVERY,
            IN_THE_SCRIPT,
        ),
        (
            "spec.snapshot.storeComputeWeights",
            snapshot.store_compute_weights,
            True,
            IN_THE_SCRIPT,
        ),
    ):
        if value != usual:
            yield Problem(
                path=path, value=value, wrong=NOT_FOR_EXTERNAL, fix=f"{fix}, or give a template"
            )


def _rule_problems(rules: tuple[FailureRule, ...]) -> Iterator[Problem]:
    for i, rule in enumerate(rules):
        path = f"spec.failurePolicy.rules[{i}]"
        if (rule.on is On.EXIT_CODE) != bool(rule.values):
            found = "exit codes" if rule.values else "no exit code"
            yield Problem(
                path=f"{path}.values",
                value=list(rule.values),
                wrong=f"when: {rule.on.value} has {found}",
                fix="give exit codes with when: ExitCode, and only there",
            )
        if rule.after_seconds is not None and rule.on is not On.NO_REPLACEMENT:
            yield Problem(
                path=f"{path}.afterSeconds",
                value=rule.after_seconds,
                wrong=f"when: {rule.on.value} has a waiting time",
                fix="give afterSeconds with when: NoReplacement, and only there",
            )
        if rule.on is On.ANY and i != len(rules) - 1:
            yield Problem(
                path=path,
                value=MISSING,
                wrong="when: Any matches everything, so that later rules never apply",
                fix="move it to the end",
            )


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
    elif label is not None and not _DNS_NAME.fullmatch(label):
        yield Problem(
            path=path,
            value=label,
            wrong="not the name of a LocalQueue",
            fix="write the name of one in the job's namespace",
        )
    elif label is not None and job.spec.trainer.external:
        yield Problem(
            path=path, value=label, wrong=NOT_FOR_EXTERNAL, fix="queue what makes the pods"
        )
    if PREBUILT_LABEL in labels:
        yield Problem(
            path=f"metadata.labels.{PREBUILT_LABEL}",
            value=labels[PREBUILT_LABEL],
            wrong="Holdfast makes the Workload of a job itself",
            fix="remove the label",
        )
