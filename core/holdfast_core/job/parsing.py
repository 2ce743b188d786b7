"""A `MoETrainingJob` document, parsed to a consistent job or refused with every problem at once.

`parse_job` checks what follows from the document alone; the components that see nodes, labels and
memory check those. `check_local` refuses what must not run without Kubernetes, and
`ignored_locally` lists what has no effect there. Reading YAML is left to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import (
    MISSING,
    Problem,
    at,
    check_plain,
    convert,
    refuse,
    without_nulls,
)
from holdfast_core.job.failures import (
    DEFAULT_RULES,
    KEEP_FAILED_S,
    Detection,
    FailureAction,
    FailurePolicy,
    FailureRule,
    On,
    OnCorruption,
    OnStraggler,
)
from holdfast_core.job.local_differences import local_differences
from holdfast_core.job.locations import Locations, location_of
from holdfast_core.job.policies.registered import PolicyType
from holdfast_core.job.references import resolve_words
from holdfast_core.job.rules import RULES, queue_problems, rule_problems
from holdfast_core.job.schema import (
    API_VERSION,
    KIND,
    MANAGER,
    QUEUE_LABEL,
    Gang,
    MoETrainingJob,
    Scheduling,
    Spec,
)
from holdfast_core.job.templates import TEMPLATE, template_problems

__all__ = [
    "API_VERSION",
    "DEFAULT_RULES",
    "KIND",
    "MANAGER",
    "Detection",
    "FailureAction",
    "FailurePolicy",
    "FailureRule",
    "Gang",
    "MoETrainingJob",
    "On",
    "OnCorruption",
    "OnStraggler",
    "PolicyType",
    "Scheduling",
    "Spec",
    "check_local",
    "check_storage",
    "ignored_locally",
    "parse_job",
]

MAX_NAMESPACE_CHARACTERS = 63

_TEMPLATE_RULES = [path for path in RULES if path.startswith(TEMPLATE)]
_SPEC_RULES = [path for path in RULES if path and path not in _TEMPLATE_RULES]
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
"""Metadata that an API server adds; of no meaning for the job."""


def parse_job(document: Mapping[str, Any]) -> MoETrainingJob:
    """The job that `document` describes.

    `document` holds plain values, as a YAML or JSON reader returns them. What an API server adds
    (`status`, server-side metadata) is ignored; every other unknown field is refused.

    Raises:
        InvalidJobError: with one line for each problem: path, value, what is wrong, what to do. If
            the document holds anything but plain values (`check_plain`), that alone is reported.
            Rules between fields of the spec are checked once each of them is valid.
    """
    if not isinstance(document, Mapping):
        raise InvalidJobError(
            f"the job must be a mapping, not {type(document).__name__}; give a document with "
            f"apiVersion, kind, metadata and spec"
        )
    known = {key: value for key, value in document.items() if key != "status"}
    check_plain(known)
    metadata = known.get("metadata")
    if isinstance(metadata, Mapping):
        metadata = {key: value for key, value in metadata.items() if key not in _SERVER_METADATA}
        known["metadata"] = metadata
    problems = [*_identity_problems(known)]
    if not problems:
        problems.extend(_metadata_problems(metadata))
        job = convert(MoETrainingJob, known, "", problems)
        problems.extend(_template_problems(known))
        if job is not None:
            problems.extend(rule_problems(without_nulls(msgspec.to_builtins(job)), _SPEC_RULES))
            problems.extend(queue_problems(job))
            if not problems:
                return job
    name = at(known, "metadata", "name")
    subject = f"job {name[:MAX_NAMESPACE_CHARACTERS]!r}" if isinstance(name, str) else "the job"
    refuse(f"{subject} is not valid", problems)
    raise AssertionError("a job that could not be converted has a problem")


def check_storage(job: MoETrainingJob, locations: Locations) -> None:
    """Refuse storage outside the locations that the platform team allows.

    Raises:
        InvalidJobError: it is outside; the message names the locations that the job may use.
    """
    if job.spec.persistence is not None and locations is not None:
        location_of(job.spec.persistence.uri, job.key, locations)


def check_local(job: MoETrainingJob) -> None:
    """Refuse what must not run without Kubernetes.

    Raises:
        InvalidJobError: the job, or its pods, belong to another controller; or its references to
            variables make more text than a program can get.
    """
    resolve_words(job.command, job.env)
    problems = []
    if job.spec.managed_by != MANAGER:
        problems.append(
            Problem(
                path="spec.managedBy",
                value=job.spec.managed_by,
                wrong="the job belongs to another controller",
                fix=f"remove the field, or write {MANAGER}, to run it here",
            )
        )
    if job.spec.trainer.external:
        problems.append(
            Problem(
                path="spec.trainer.external",
                value=True,
                wrong="another controller makes the pods, and there is none here",
                fix="give a template with the trainer's command to run it here",
            )
        )
    refuse(f"job {job.key} cannot run on this machine alone", problems)


def ignored_locally(job: MoETrainingJob) -> tuple[str, ...]:
    """One sentence for each field whose value has no effect without Kubernetes."""
    spec = job.spec
    notes = []
    if spec.scheduling.gang is not Gang.NONE:
        notes.append(
            f"spec.scheduling.gang = {spec.scheduling.gang.value} is ignored here: all nodes of a "
            f"local run start together"
        )
    elif job.kueue_queue is not None:
        notes.append(
            f"the label {QUEUE_LABEL} = {job.kueue_queue} is ignored here: a local run has no queue"
        )
    if spec.ttl_seconds_after_finished is not None:
        notes.append(
            f"spec.ttlSecondsAfterFinished = {spec.ttl_seconds_after_finished} is ignored here: "
            f"a local run leaves only its directory"
        )
    if spec.trainer.template is not None:
        notes.extend(local_differences(spec.trainer.template, job.container))
    if spec.failure_policy.keep_failed_seconds != KEEP_FAILED_S:
        notes.append(
            f"spec.failurePolicy.keepFailedSeconds = {spec.failure_policy.keep_failed_seconds:g} "
            f"is ignored here: a local run ends with its job, and its memory with it"
        )
    return tuple(notes)


def _identity_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of `apiVersion` and `kind`: in a document of another kind, unknown fields are not
    worth listing."""
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        given = document.get(key, MISSING)
        if given != expected:
            wrong = (
                "is required" if given is MISSING else ("not a document that this version reads")
            )
            yield Problem(path=key, value=given, wrong=wrong, fix=f"write {key}: {expected}")


def _template_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the pod template, as far as Holdfast reads it."""
    wrong = [*template_problems(at(document, *TEMPLATE.split(".")))]
    yield from wrong or rule_problems(document, _TEMPLATE_RULES)


def _metadata_problems(metadata: object) -> Iterator[Problem]:
    if isinstance(at(metadata, "name"), str):
        yield from rule_problems({"metadata": metadata}, [""])
    namespace = at(metadata, "namespace")
    if isinstance(namespace, str) and not _DNS_LABEL.fullmatch(namespace):
        yield Problem(
            path="metadata.namespace",
            value=namespace,
            wrong="not a DNS-1123 label",
            fix="use lower-case letters, digits and '-', beginning and ending with a letter or a "
            "digit",
        )
    if isinstance(namespace, str) and len(namespace) > MAX_NAMESPACE_CHARACTERS:
        yield Problem(
            path="metadata.namespace",
            value=namespace,
            wrong=f"{len(namespace)} characters",
            fix=f"use at most {MAX_NAMESPACE_CHARACTERS}",
        )
