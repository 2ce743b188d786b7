"""The part of a `MoETrainingJob` about durable storage: where, how often, where from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, field

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import YEAR_S, Document, Problem
from holdfast_core.job.locations import (
    HOW_TO_WRITE_A_STORAGE_URI,
    NOT_A_STORAGE_URI,
    is_storage_uri,
)
from holdfast_core.job.snapshots import PartialExperts, PolicySpec, PolicyType
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.membership import Tier

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]

LATEST = "latest"

GENERATION_PATTERN = r"[0-9]{1,18}[.][0-9]{1,18}"


class PersistInterval(Document, frozen=True, kw_only=True):
    """How often a generation is persisted; by default, as measured costs and failures suggest."""

    minutes: (
        Annotated[
            float,
            Meta(gt=0, le=YEAR_S / 60, description="minutes between copies", examples=[30]),
        ]
        | None
    ) = None
    steps: Annotated[_Count, Meta(description="steps between copies", examples=[500])] | None = None


class Persistence(Document, frozen=True, kw_only=True):
    """Durable storage for generations."""

    uri: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=2048,
            description="the directory or URI to keep copies in",
            examples=["s3://bucket/run1"],
            extra={
                "more": "Every daemon must reach it: an absolute path on a file system that all "
                "nodes share, or an s3, gs or abfs URI. In Kubernetes, it must be in one of the "
                "storage locations that the platform team allows. Each job has its own directory "
                "below it."
            },
        ),
    ]
    interval: PersistInterval = PersistInterval()
    keep: Annotated[
        _Count, Meta(description="the number of newest copies to keep", examples=[3])
    ] = 3
    keep_every: (
        Annotated[
            _Count,
            Meta(
                description="the interval, in steps, of the copies to keep for good",
                examples=[10000],
            ),
        ]
        | None
    ) = None
    bandwidth: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="bytes per second that each node may write",
                examples=["500M"],
                extra={"more": "In bytes, or with Ki, Mi, Gi, k, M or G. Without it, no limit."},
            ),
        ]
        | int
        | None
    ) = None
    experts: (
        Annotated[
            _Count,
            Meta(
                description="the number of experts of each layer that a copy writes",
                examples=[1],
                extra={
                    "more": "Those that are oldest in storage go first; for the others, the copy "
                    "refers to older copies. At most the number that snapshots capture, and only "
                    "with snapshot.policy.type PartialExperts. Without it, every copy holds all "
                    "experts."
                },
            ),
        ]
        | None
    ) = None


class RestoreSpec(Document, frozen=True, kw_only=True):
    """What the job starts from when its daemons' memory holds no snapshot to restore."""

    source: Annotated[
        str,
        Meta(
            max_length=37,
            description="the copy to start from",
            examples=["3.1200"],
            extra={
                "more": "`latest` for the newest complete copy, or the generation of a copy as "
                "`epoch.step`. Remove a generation once the job trains: otherwise the job "
                "returns to it whenever all memory is lost."
            },
        ),
    ] = field(name="from", default=LATEST)


def persistence_problems(
    persistence: Persistence | None, restore: RestoreSpec, policy: PolicySpec
) -> Iterator[Problem]:
    """Problems of these sections, each of whose fields is valid by itself."""
    source = restore.source
    if source != LATEST and not re.fullmatch(GENERATION_PATTERN, source):
        yield Problem(
            path="spec.restore.from",
            value=source,
            wrong="not a generation",
            fix="write latest, or epoch.step of a copy like 3.1200",
        )
    if persistence is None:
        if source != LATEST:
            yield Problem(
                path="spec.restore.from",
                value=source,
                wrong="there is no spec.persistence to restore from",
                fix="give spec.persistence.uri, or remove spec.restore",
            )
        return
    yield from _expert_problems(persistence.experts, policy)
    if not is_storage_uri(persistence.uri):
        yield Problem(
            path="spec.persistence.uri",
            value=persistence.uri,
            wrong=NOT_A_STORAGE_URI,
            fix=HOW_TO_WRITE_A_STORAGE_URI,
        )
    if persistence.interval.minutes is not None and persistence.interval.steps is not None:
        yield Problem(
            path="spec.persistence.interval.steps",
            value=persistence.interval.steps,
            wrong="is given together with minutes",
            fix="remove one of the two",
        )
    if persistence.bandwidth is not None and not _is_amount(persistence.bandwidth):
        yield Problem(
            path="spec.persistence.bandwidth",
            value=persistence.bandwidth,
            wrong="not an amount of bytes above 0",
            fix="write bytes or use Ki, Mi, Gi, k, M or G, like 500M",
        )


def _expert_problems(experts: int | None, policy: PolicySpec) -> Iterator[Problem]:
    """Problems of `spec.persistence.experts` (PEC §3.2): what was not captured cannot be persisted,
    and what a recovery loses by it is counted only where a policy counts tokens."""
    if experts is None:
        return
    if policy.type is not PolicyType.PARTIAL_EXPERTS:
        yield Problem(
            path="spec.persistence.experts",
            value=experts,
            wrong=f"the policy is {policy.type.value}",
            fix="use snapshot.policy.type PartialExperts, or remove it",
        )
        return
    captured = (policy.partial_experts or PartialExperts()).experts_per_layer
    if experts > captured:
        yield Problem(
            path="spec.persistence.experts",
            value=experts,
            wrong=f"{experts} is more than the {captured} experts of each layer that a snapshot "
            f"captures",
            fix="persist no more than that, or raise "
            "snapshot.policy.partialExperts.expertsPerLayer",
        )


def tier_of(persistence: Persistence | None, restore: RestoreSpec) -> Tier | None:
    """The tier that daemons work with; None without persistence."""
    if persistence is None:
        return None
    interval = persistence.interval
    return Tier(
        uri=persistence.uri,
        every_steps=interval.steps or 0,
        every_s=60.0 * (interval.minutes or 0.0),
        keep=persistence.keep,
        keep_every=persistence.keep_every or 0,
        bytes_per_s=0 if persistence.bandwidth is None else parse_bytes(persistence.bandwidth),
        experts=persistence.experts or 0,
        restore_from="" if restore.source == LATEST else restore.source,
    )


def _is_amount(text: str | int) -> bool:
    try:
        return parse_bytes(text) > 0
    except InvalidJobError:
        return False
