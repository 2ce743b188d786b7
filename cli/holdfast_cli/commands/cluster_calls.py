"""Calls to the API server by a command. The client is imported when a call is made: most commands
do not need it, and not every installation has it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from holdfast_core import packages

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api

T = TypeVar("T")


def call_cluster(
    options: argparse.Namespace, call: Callable[[Api, argparse.Namespace], Awaitable[T]]
) -> T:
    """Run `call` with a connection to the cluster that `options` choose.

    Raises:
        MissingPackageError: when this installation cannot talk to a cluster.
        UnreachableError: when no cluster is known.
        ApiError: when the API server refuses.
    """
    return asyncio.run(_call(options, call))


async def _call(
    options: argparse.Namespace, call: Callable[[Api, argparse.Namespace], Awaitable[T]]
) -> T:
    with packages.needing("a cluster", packages.PackageGroup.OPERATOR):
        from holdfast_operator.kube.client.api import connect  # noqa: PLC0415
    api = await connect(_Uncounted(), options.kubeconfig or "", options.context or "")
    try:
        return await call(api, options)
    finally:
        await api.close()


class _Uncounted:
    """Request counter of a command, which counts nothing."""

    def request(self, verb: str, resource: str, code: str) -> None:
        return
