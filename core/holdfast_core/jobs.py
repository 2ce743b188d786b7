"""From a `MoETrainingJob` document to a job that holds together, or one error with every problem.

`parse_job` checks what follows from the document alone; whether nodes, labels and memory are there
is for those to say who see them. `check_supported` names what this version accepts in a document
but cannot do yet. Reading YAML is the caller's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_core.documents import MISSING, Problem, at, convert, refuse
from holdfast_core.errors import InvalidJobError
from holdfast_core.groups import MIN_GROUP_SIZE
from holdfast_core.job_schema import (
    API_VERSION,
    DEFAULT_RULES,
    KIND,
    Action,
    Detection,
    FailurePolicy,
    MoETrainingJob,
    On,
    PolicyType,
    Rule,
    Spec,
)
from holdfast_core.job_templates import template_problems
from holdfast_core.quantities import parse_bytes
from holdfast_core.values import Redundancy

__all__ = [
    "API_VERSION",
    "DEFAULT_RULES",
    "KIND",
    "Action",
    "Detection",
    "FailurePolicy",
    "MoETrainingJob",
    "On",
    "PolicyType",
    "Rule",
    "Spec",
    "check_supported",
    "parse_job",
]

MAX_NAME_CHARACTERS = 52
"""Names of pods are the job's name and a suffix of up to 11 characters; 63 is their limit."""

MAX_NAMESPACE_CHARACTERS = 63
MAX_EXIT_CODE = 255

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

_SERVER_METADATA = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
    }
)
"""What an API server adds to metadata; of no meaning for the job."""


def parse_job(document: Mapping[str, Any]) -> MoETrainingJob:
    """The job that `document` describes.

    `document` holds plain values, as a YAML or JSON reader gives them. What an API server adds
    (`status`, server-side metadata) is ignored; everything else that is not known is refused.

    Raises:
        InvalidJobError: with one line for each problem: path, value, what is wrong, what to do.
            What must hold between fields of the spec is looked at once each of them is valid.
    """
    if not isinstance(document, Mapping):
        raise InvalidJobError(
            f"the job is not a mapping but {type(document).__name__}; give a document with "
            f"apiVersion, kind, metadata and spec"
        )
    known = {key: value for key, value in document.items() if key != "status"}
    metadata = known.get("metadata")
    if isinstance(metadata, Mapping):
        metadata = {key: value for key, value in metadata.items() if key not in _SERVER_METADATA}
        known["metadata"] = metadata
    problems = [*_identity_problems(known)]
    if not problems:
        problems.extend(_metadata_problems(metadata))
        job = convert(MoETrainingJob, known, "", problems)
        problems.extend(template_problems(at(known, "spec", "trainer", "template")))
        if job is not None:
            problems.extend(_parallelism_problems(job.spec))
            problems.extend(_redundancy_problems(job.spec))
            problems.extend(_limit_problems(job.spec))
            problems.extend(_rule_problems(job.spec.failure_policy.rules))
            if not problems:
                return job
    name = at(known, "metadata", "name")
    subject = f"job {name!r}" if isinstance(name, str) else "the job"
    refuse(f"{subject} is not valid", problems)
    raise AssertionError("a job that could not be converted has a problem")


def check_supported(job: MoETrainingJob) -> None:
    """Refuse what the document may say but this version of Holdfast cannot do.

    Raises:
        InvalidJobError: with one line for each feature.
    """
    spec = job.spec
    problems = []
    policy = spec.snapshot.policy.type
    if policy is not PolicyType.FULL:
        problems.append(
            Problem(
                path="spec.snapshot.policy.type",
                value=policy,
                wrong="this version captures every unit in every snapshot",
                fix="use Full",
            )
        )
    if spec.persistence is not None:
        problems.append(
            Problem(
                path="spec.persistence",
                value=spec.persistence.uri,
                wrong="this version keeps snapshots in memory only",
                fix="remove the field and save checkpoints from the trainer",
            )
        )
    if spec.min_nodes is not None and spec.min_nodes < spec.nodes:
        problems.append(
            Problem(
                path="spec.minNodes",
                value=spec.min_nodes,
                wrong="this version cannot train on fewer nodes than spec.nodes",
                fix=f"remove the field or give {spec.nodes}",
            )
        )
    for i, rule in enumerate(spec.failure_policy.rules):
        if rule.action is Action.SHRINK:
            problems.append(
                Problem(
                    path=f"spec.failurePolicy.rules[{i}].action",
                    value=rule.action,
                    wrong="this version cannot train on fewer nodes than spec.nodes",
                    fix="use Fail, or give the job spares",
                )
            )
    refuse(f"job {job.key} asks for what this version cannot do", problems)


def _identity_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Another kind of document is not worth a list of unknown fields."""
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        found = document.get(key, MISSING)
        if found != expected:
            wrong = "is required" if found is MISSING else "not a document of this version of ours"
            yield Problem(path=key, value=found, wrong=wrong, fix=f"write {key}: {expected}")


def _metadata_problems(metadata: object) -> Iterator[Problem]:
    for key, limit in (("name", MAX_NAME_CHARACTERS), ("namespace", MAX_NAMESPACE_CHARACTERS)):
        name = at(metadata, key)
        if not isinstance(name, str):
            continue
        if not _DNS_LABEL.fullmatch(name):
            yield Problem(
                path=f"metadata.{key}",
                value=name,
                wrong="not a DNS-1123 label",
                fix="use lower-case letters, digits and '-', beginning and ending with a letter or "
                "a digit",
            )
        elif len(name) > limit:
            yield Problem(
                path=f"metadata.{key}",
                value=name,
                wrong=f"{len(name)} characters",
                fix=f"use at most {limit}",
            )


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
            fix=f"make both equal, {fits}",
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
            fix="change spec.parallelism.ep so that every rank holds equally many experts",
        )


def _redundancy_problems(spec: Spec) -> Iterator[Problem]:
    redundancy = spec.redundancy
    if redundancy.type is Redundancy.NONE:
        if redundancy.raim5 is not None:
            yield Problem(
                path="spec.redundancy.raim5",
                value=MISSING,
                wrong="is given, but spec.redundancy.type is None",
                fix="remove it, or set the type to RAIM5",
            )
        return
    if spec.nodes == 1:
        yield Problem(
            path="spec.redundancy.type",
            value=redundancy.type,
            wrong="one node has no other node to keep its parity",
            fix="use redundancy.type None, or at least 2 nodes",
        )
        return
    size = None if redundancy.raim5 is None else redundancy.raim5.group_size
    if size is not None and not MIN_GROUP_SIZE <= size <= spec.nodes:
        yield Problem(
            path="spec.redundancy.raim5.groupSize",
            value=size,
            wrong=f"a parity group has 2 to {spec.nodes} members in a job of {spec.nodes} nodes",
            fix=f"use a number from 2 to {spec.nodes}",
        )


def _limit_problems(spec: Spec) -> Iterator[Problem]:
    if spec.min_nodes is not None and not 1 <= spec.min_nodes <= spec.nodes:
        yield Problem(
            path="spec.minNodes",
            value=spec.min_nodes,
            wrong=f"not between 1 and spec.nodes = {spec.nodes}",
            fix=f"use a number from 1 to {spec.nodes}",
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


def _rule_problems(rules: tuple[Rule, ...]) -> Iterator[Problem]:
    for i, rule in enumerate(rules):
        path = f"spec.failurePolicy.rules[{i}]"
        if (rule.on is On.EXIT_CODE) != bool(rule.values):
            yield Problem(
                path=f"{path}.values",
                value=list(rule.values),
                wrong=f"on: {rule.on.value} has {'exit codes' if rule.values else 'no exit code'}",
                fix="give exit codes with on: ExitCode, and only there",
            )
        if any(not 1 <= code <= MAX_EXIT_CODE for code in rule.values):
            yield Problem(
                path=f"{path}.values",
                value=list(rule.values),
                wrong="failing processes exit with codes from 1 to 255",
                fix="remove the others",
            )
        if rule.after_seconds is not None and (
            rule.on is not On.NO_REPLACEMENT or not 0 <= rule.after_seconds < float("inf")
        ):
            yield Problem(
                path=f"{path}.afterSeconds",
                value=rule.after_seconds,
                wrong=f"not a waiting time for on: {rule.on.value}",
                fix="give seconds of at least 0 with on: NoReplacement, and only there",
            )
        if rule.on is On.ANY and i != len(rules) - 1:
            yield Problem(
                path=path,
                value=MISSING,
                wrong="on: Any matches everything, so that later rules never apply",
                fix="move it to the end",
            )
