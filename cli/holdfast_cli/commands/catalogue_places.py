"""Finds the Redis that holds the catalogue of a local run, or of a cluster's daemons.

In a cluster the URL, with its password, is in the Secret to which the daemons' DaemonSet refers. So
only users who may read that Secret can read the history of all jobs; the API server refuses all
others.
"""

from __future__ import annotations

import argparse
import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from holdfast_cli.commands import kubectl
from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_cli.local.directory import RunDirectory
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_operator.kube.client.resources import DAEMON_SETS, SECRETS

VARIABLE = "HOLDFAST_REDIS_URL"
DAEMONS = "app.kubernetes.io/component=daemon"
REDIS_PORT = 6379


def of_run(directory: RunDirectory) -> str:
    """URL of the catalogue of a local run, even if the run has ended.

    Raises:
        StorageError: when it has none.
    """
    try:
        return directory.catalogue_file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StorageError(
            f"the run in {directory.path} keeps no history, because it has no catalogue: start it "
            f"with `holdfast run JOB.yaml --redis redis://localhost:6379/0` and a redis-server. "
            f"`holdfast status` shows its newest events"
        ) from error


@contextmanager
def of_cluster(options: argparse.Namespace) -> Iterator[str]:
    """URL at which this machine reaches the catalogue of a cluster until the context ends.

    Raises:
        StorageError: when its daemons have no catalogue.
        ApiError: when the user may not read where it is.
    """
    url = call_cluster(options, _url_in_secret)
    parts = urlsplit(url)
    service, _, rest = (parts.hostname or "").partition(".")
    namespace, _, suffix = rest.partition(".")
    if suffix.partition(".")[0] != "svc":
        yield url
        return
    if parts.scheme != "redis":
        raise InvalidJobError(
            f"the catalogue is at {parts.scheme}://{parts.hostname}, and its certificate is for "
            f"that host: forward a port yourself, and give --redis URL"
        )
    with kubectl.forward_port(options, namespace, service, parts.port or REDIS_PORT) as port:
        user, at, _ = parts.netloc.rpartition("@")
        yield parts._replace(netloc=f"{user}{at}127.0.0.1:{port}").geturl()


async def _url_in_secret(api: Any, options: argparse.Namespace) -> str:
    namespace = options.system_namespace
    daemon_sets = await api.list(DAEMON_SETS, namespace, labelSelector=DAEMONS)
    if not daemon_sets["items"]:
        raise StorageError(
            f"namespace {namespace} has no daemons of Holdfast: name the namespace of the "
            f"release with --system-namespace"
        )
    variables = [
        variable
        for each in daemon_sets["items"]
        for container in each["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env") or ()
    ]
    refers = next((each for each in variables if each["name"] == VARIABLE), None)
    if refers is None:
        raise StorageError(
            "this installation keeps no history, because it has no catalogue: install with "
            "redis.enabled=true, or redis.external.url. `holdfast status JOB` shows the newest ten "
            "recoveries without one"
        )
    key = refers["valueFrom"]["secretKeyRef"]
    secret = await api.get(SECRETS, namespace, key["name"])
    try:
        return base64.b64decode(secret["data"][key["key"]], validate=True).decode()
    except (KeyError, binascii.Error, UnicodeDecodeError) as error:
        raise StorageError(
            f"secret {namespace}/{key['name']} has no URL of Redis in its key {key['key']}"
        ) from error
