"""`holdfast profile` for a job in a cluster: from its status, and from the metrics of its daemons.

The API server forwards the requests to the daemons, with the user's own rights (to list pods and
to get `pods/proxy` in the namespace of the release). Without them the profile has what the status
shows.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast_cli.commands.catalogue_places import DAEMONS
from holdfast_cli.commands.cluster_calls import call_cluster
from holdfast_cli.commands.profile_figures import (
    NodeFigures,
    figures_in,
    measured_restart_s,
    measured_step_s,
    print_profile,
)
from holdfast_cli.commands.show import Object
from holdfast_cli.planner.profile import JobProfile
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.snapshots import PolicyType
from holdfast_core.job.status import Phase
from holdfast_operator.kube.client.resources import JOBS, PODS

if TYPE_CHECKING:
    from holdfast_operator.kube.client.api import Api

POLL_S = 1.0
METRICS_S = 10.0
"""Longest wait for the metrics of one daemon."""
AT_ONCE = 8
"""Daemons that are asked at the same time."""
PORT = "http"
"""Name of the port at which daemons expose metrics."""


def profile(options: argparse.Namespace) -> int:
    """Print the profile of a job in a cluster; returns the exit code.

    Raises:
        InvalidJobError: when the job does not train, or too few of its steps were seen.
        ApiError: when there is no such job, or the API server refuses to show it.
    """
    return call_cluster(options, _profile)


async def _profile(api: Api, options: argparse.Namespace) -> int:
    resource = await api.get(JOBS, options.namespace, options.job)
    status = resource.get("status") or {}
    name = f"{options.namespace}/{options.job}"
    if status.get("phase") != Phase.RUNNING:
        raise InvalidJobError(
            f"job {name} does not train ({status.get('phase', 'no operator has seen it yet')}); "
            f"profile it while it is Running"
        )
    job = parse_job({key: resource[key] for key in ("apiVersion", "kind", "metadata", "spec")})
    nodes = [str(each["node"]) for each in status.get("members") or [] if each.get("node")]
    daemons = await _daemons(api, options, nodes)
    step_s = measured_step_s(
        await _steps(api, options, job, daemons[nodes[0]] if daemons else None), options.seconds
    )
    figures = await _all_figures(api, options, job, list(daemons.values()))
    before, status = status, (await api.get(JOBS, options.namespace, options.job)).get("status")
    if not status or status.get("epoch") != before.get("epoch"):
        raise InvalidJobError(
            f"job {name} had to recover, or changed its nodes, while it was measured; profile it "
            f"again while it is Running"
        )
    print_profile(made_profile(job, status, step_s, figures), figures)
    return 0


def made_profile(
    job: MoETrainingJob, status: Object, step_s: float, figures: Sequence[NodeFigures]
) -> JobProfile:
    """The profile without rates.

    Args:
        status: the job's `.status`; a job that goes on with fewer nodes has fewer members.
        figures: of the daemons of all members; empty where they cannot be read.
    """
    model = job.spec.model
    expert_bytes = other_bytes = None
    captured = sum(each.expert_bytes + each.other_bytes for each in figures)
    if model is not None and captured:
        # Ranks divide the state among themselves: together they capture one copy of it.
        experts = sum(each.expert_bytes for each in figures)
        expert_bytes = experts // (model.num_experts * model.num_moe_layers)
        other_bytes = captured - experts
    return JobProfile(
        gpus=len(status.get("members") or ()) * job.spec.nproc_per_node or job.world_size,
        step_s=step_s,
        expert_bytes=expert_bytes,
        other_bytes=other_bytes,
        experts_per_layer=model.num_experts if model is not None else None,
        moe_layers=model.num_moe_layers if model is not None else None,
        restart_s=measured_restart_s(
            # From the decision to recover until all ranks were at work again.
            recovery["seconds"]
            for recovery in status.get("lastRecoveries") or []
            if recovery.get("seconds") is not None
        ),
    )


async def _daemons(
    api: Api, options: argparse.Namespace, nodes: Sequence[str]
) -> dict[str, tuple[str, int]]:
    """Node → its daemon's pod and the port of its metrics; empty where not all can be read, which
    is said."""
    from holdfast_operator.kube.client.api import ApiError  # noqa: PLC0415

    try:
        pods = (await api.list(PODS, options.system_namespace, labelSelector=DAEMONS))["items"]
        here = {
            str(pod["spec"]["nodeName"]): pod
            for pod in pods
            if pod["spec"].get("nodeName") in nodes and "deletionTimestamp" not in pod["metadata"]
        }
        without = sorted(set(nodes) - here.keys())
        if without or not nodes:
            raise ApiError(f"no daemon is on {', '.join(without) or 'any node'}", status=0)
        found = {
            node: (str(pod["metadata"]["name"]), port)
            for node, pod in here.items()
            for port in _ports(pod)
        }
        if closed := sorted(str(here[one]["metadata"]["name"]) for one in here.keys() - found):
            raise ApiError(f"pods {', '.join(closed)} have no port named {PORT}", status=0)
        # Learn now, rather than when the steps have been timed, that one of them cannot be reached.
        await _all_metrics(api, options, list(found.values()))
    except ApiError as error:
        print(
            f"holdfast: the daemons' metrics are left out, and steps are timed by the job's "
            f"status: {error}. They need the rights to list pods and to get pods/proxy in "
            f"namespace {options.system_namespace} (--system-namespace), and a network policy that "
            f"admits the API server (networkPolicy.metricsFrom)",
            file=sys.stderr,
        )
        return {}
    return found


def _ports(pod: Object) -> list[int]:
    return [
        int(port["containerPort"])
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or ()
        if port.get("name") == PORT
    ]


async def _steps(
    api: Api, options: argparse.Namespace, job: MoETrainingJob, daemon: tuple[str, int] | None
) -> Sequence[tuple[float, int]]:
    """Times at which a newer step was first seen, for `options.seconds`: of the snapshots of
    `daemon`, or of the job's status if there is none."""
    seen: list[tuple[float, int]] = []
    newest, until = -1, time.monotonic() + options.seconds
    while time.monotonic() < until:
        if daemon is not None:
            step = figures_in(await _metrics(api, options, *daemon), job.key, 0).committed_step
        else:
            resource = await api.get(JOBS, options.namespace, options.job)
            step = (resource.get("status") or {}).get("step", 0)
        if 0 <= newest < step:
            seen.append((time.monotonic(), step))
        newest = max(newest, step)
        await asyncio.sleep(POLL_S)
    return seen


async def _all_figures(
    api: Api,
    options: argparse.Namespace,
    job: MoETrainingJob,
    daemons: Sequence[tuple[str, int]],
) -> list[NodeFigures]:
    full = job.spec.snapshot.policy.type is PolicyType.FULL
    return [
        # The bytes that a daemon has fetched for protection are those of all its jobs.
        replace(figures_in(text, job.key, None if full else 0), protection_bytes=0, encode_s=0)
        for text in await _all_metrics(api, options, daemons)
    ]


async def _all_metrics(
    api: Api, options: argparse.Namespace, daemons: Sequence[tuple[str, int]]
) -> list[str]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def metrics(pod: str, port: int) -> str:
        async with limit:
            return await _metrics(api, options, pod, port)

    return list(await asyncio.gather(*(metrics(*daemon) for daemon in daemons)))


async def _metrics(api: Api, options: argparse.Namespace, pod: str, port: int) -> str:
    from holdfast_operator.kube.client.api import ApiError  # noqa: PLC0415

    lines = api.lines(PODS, options.system_namespace, f"{pod}:{port}", "proxy/metrics")
    try:
        async with asyncio.timeout(METRICS_S):
            return "\n".join([line async for line in lines]) + "\n"
    except TimeoutError as error:
        raise ApiError(f"{pod} has not sent its metrics in {METRICS_S:g} s", status=0) from error
