"""The part of a `MoETrainingJob` about durable storage: where, how often, where from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from holdfast_core.job.documents import YEAR_S, Document
from holdfast_core.quantities import parse_bytes
from holdfast_core.snapshots.membership import Tier

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]

LATEST = "latest"


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
                    "more": "The experts whose stored versions are oldest go first; for the "
                    "others, the copy refers to older copies. Allowed only with "
                    "snapshot.policy.type PartialExperts, and at most the number that "
                    "snapshots capture. Without it, every copy holds all experts."
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
