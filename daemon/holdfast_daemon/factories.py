"""Makes the parts that the settings select: the authenticator of trainers, and the catalogue."""

from __future__ import annotations

import time
from collections.abc import Mapping

from holdfast_core.packages import PackageGroup, needing
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing import status
from holdfast_daemon.observing.catalogue import Catalogue, MemoryCatalogue
from holdfast_daemon.settings import Auth, DaemonSettings
from holdfast_daemon.trainers.auth import (
    Authenticator,
    Pods,
    Reviewer,
    TokenAuthenticator,
    TrustingAuthenticator,
)
from holdfast_daemon.trainers.token_files import FileAuthenticator
from holdfast_daemon.trainers.token_review import TokenReviewApi
from holdfast_daemon.trainers.volume_tokens import VolumeTokenReviewer


def make_authenticator(
    settings: DaemonSettings, metrics: DaemonMetrics, hosts: Mapping[str, JobHost]
) -> Authenticator:
    """The authenticator of trainers that the settings select."""
    if settings.auth is Auth.NONE:
        return TrustingAuthenticator()
    if settings.token_directory is not None:
        return FileAuthenticator(settings.token_directory)
    reviewer: Reviewer = TokenReviewApi(settings.api_server, settings.service_account)
    if settings.volume_records is not None:
        reviewer = VolumeTokenReviewer(settings.volume_records, reviewer)
    return TokenAuthenticator(
        reviewer,
        time.monotonic,
        time.time,
        lambda outcome: metrics.add("token_reviews", outcome=outcome),
        lambda job: _pods_of(hosts.get(job)),
    )


def _pods_of(host: JobHost | None) -> Pods:
    membership = None if host is None else host.engine.membership
    if membership is None:
        return Pods.UNKNOWN
    return Pods.ANY if membership.external else Pods.NAMED


def make_catalogue(
    settings: DaemonSettings, metrics: DaemonMetrics, hosts: Mapping[str, JobHost]
) -> Catalogue:
    """The catalogue: in Redis if the settings name one, else in this process."""
    if not settings.redis_url:
        return MemoryCatalogue(settings.node, time.monotonic)
    with needing("a catalogue in Redis", PackageGroup.CATALOGUE):
        from holdfast_daemon.observing.catalogue_redis import RedisCatalogue, RedisSettings
    return RedisCatalogue(
        RedisSettings(url=settings.redis_url),
        node=settings.node,
        source=lambda: {
            job: status.as_json(host, host.engine.overview()) for job, host in hosts.items()
        },
        dropped=lambda count: metrics.add("catalogue_dropped", count),
    )
