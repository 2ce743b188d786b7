"""One scenario: jobs start, run undisturbed, lose pods one by one and then together, and end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.operator_scale.figures import Exposition, halves, spread
from benchmarks.operator_scale.world import NAMESPACE, World
from holdfast_operator.kube.client.api import Object

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Parameters of a scenario."""

    name: str
    jobs: int
    members: int
    """Number of members of each job."""
    heartbeat_s: float
    calm_s: float
    fraction: float
    """Portion of all pods that fail: one half one after another, the other half at once."""

    @property
    def failures(self) -> int:
        return max(2, round(self.fraction * self.jobs * self.members))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failed pod: when it failed, and how long the reactions took, in seconds."""

    decision_s: float
    replacement_s: float
    everywhere_s: float | None
    """Time until the last daemon had the new membership."""
    running_s: float
    """Time until the job's status was Running again."""


async def carry_out(world: World, plan: Plan) -> Report:
    """Run the scenario and return its figures."""
    phases: Report = {}
    start, sampled, played_s = world.metrics(), len(world.samples), world.players_cpu_s()
    began = time.monotonic()
    await world.create([_job(plan, f"{plan.name}-{n}") for n in range(plan.jobs)])
    pods = plan.jobs * plan.members
    await world.until(
        f"{pods} pods to run",
        lambda: len(world.jobs.all()) == plan.jobs and world.running(pods),
    )
    up_s = time.monotonic() - began
    up = world.metrics()
    phases["start"] = _figures(up.since(start)) | {"seconds": up_s}
    await asyncio.sleep(plan.calm_s)
    calm = world.metrics()
    phases["calm"] = _figures(calm.since(up)) | {"seconds": plan.calm_s}
    steady = len(world.samples)
    victims = list(_victims(plan))
    half = len(victims) // 2
    failures = []
    for victim in victims[:half]:
        failures += await _fail(world, plan, [victim])
    singly = world.metrics()
    phases["one_after_another"] = _figures(singly.since(calm)) | _times(failures)
    burst = await _fail(world, plan, victims[half:])
    done = world.metrics()
    phases["burst"] = _figures(done.since(singly)) | _times(burst)
    after = done.since(up)
    await world.delete_jobs()
    used = world.samples[sampled:]
    restarts = after.by("watch_restarts_total", "resource")
    listed = after.total("api_requests_total", verb="list")
    return {
        "jobs": plan.jobs,
        "members": plan.members,
        "heartbeat_s": plan.heartbeat_s,
        "pods_failed": len(victims),
        "reconcile_p50_s": after.quantile("reconcile_seconds", 0.5),
        "reconcile_p99_s": after.quantile("reconcile_seconds", 0.99),
        "reconcile_p99_with_start_s": done.since(start).quantile("reconcile_seconds", 0.99),
        "lists_after_start": listed,
        "watch_restarts_after_start": restarts,
        "no_list_polling": listed <= sum(restarts.values()),
        "requests_of_failures": done.since(calm).by("api_requests_total", "verb", "resource"),
        "pods_replaced": done.since(calm).total("pods_created_total"),
        "seconds": used[-1].at - used[0].at,
        "cpu_s": used[-1].cpu_s - used[0].cpu_s,
        "players_cpu_s": world.players_cpu_s() - played_s,
        "rss_bytes_max": max(each.rss_bytes for each in used),
        "steady": halves(world.samples[steady:]),
        "phases": phases,
    }


async def _fail(world: World, plan: Plan, victims: list[tuple[str, str]]) -> list[Failure]:
    """Fail the newest pods of (job, member) pairs together; returns when all jobs run again."""
    names = [world.placed[victim] for victim in victims]
    epochs = {job: world.jobs.all()[NAMESPACE, job].epoch for job, _ in victims}
    times = await asyncio.gather(*map(world.fail, names))
    pods = plan.jobs * plan.members

    def again() -> bool:
        jobs = world.jobs.all()
        replaced = all(world.placed[v] != name for v, name in zip(victims, names, strict=True))
        newer = all(jobs[NAMESPACE, job].epoch > epoch for job, epoch in epochs.items())
        return replaced and newer and bool(world.running(pods))

    await world.until("all jobs to run again", again)
    ended = time.monotonic()
    found = []
    for victim, at in zip(victims, times, strict=True):
        job = victim[0]
        key, epoch = f"{NAMESPACE}.{job}", epochs[job] + 1
        last = world.epochs.get((key, epoch, "everywhere"))
        found.append(
            Failure(
                decision_s=world.epochs[key, epoch, "published"] - at,
                replacement_s=world.created_at[world.placed[victim]] - at,
                everywhere_s=None if last is None else last - at,
                running_s=ended - at,
            )
        )
    return found


def _victims(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pods to fail, spread evenly over jobs and members, so that a parity group loses a second one
    as late as possible."""
    for number in range(plan.failures):
        job = number * plan.jobs // plan.failures
        member = number * plan.members // plan.failures if plan.jobs == 1 else number % plan.members
        yield f"{plan.name}-{job}", str(member)


def _figures(added: Exposition) -> Report:
    return {
        "reconcile_p50_s": added.quantile("reconcile_seconds", 0.5),
        "reconcile_p99_s": added.quantile("reconcile_seconds", 0.99),
        "act_p99_s": added.quantile("act_seconds", 0.99),
        "looks": added.total("reconcile_seconds_count"),
        "recoveries": added.total("recoveries_total"),
        "requests": added.by("api_requests_total", "verb", "resource", "code"),
        "pods_created": added.total("pods_created_total"),
        "pods_deleted": added.total("pods_deleted_total"),
        "status_writes": added.by("status_writes_total", "result"),
    }


def _times(failures: list[Failure]) -> Report:
    return {
        "failure_to_decision_s": spread([f.decision_s for f in failures]),
        "failure_to_replacement_s": spread([f.replacement_s for f in failures]),
        "failure_to_membership_everywhere_s": spread(
            [f.everywhere_s for f in failures if f.everywhere_s is not None]
        ),
        "failure_to_running_s": spread([f.running_s for f in failures]),
    }


def _job(plan: Plan, name: str) -> Object:
    container = {"name": "trainer", "image": "none", "command": ["train"]}
    template = {
        "spec": {
            "containers": [container],
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"kwok.x-k8s.io/node": "fake"},
        }
    }
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodes": plan.members,
            "parallelism": {"dp": plan.members, "ep": math.gcd(8, plan.members)},
            "redundancy": {"type": "RAIM5", "raim5": {"groupSize": 4}},
            "failurePolicy": {
                "maxRestarts": 1000,
                "spares": 0,
                "detection": {"heartbeatSeconds": plan.heartbeat_s, "missedHeartbeats": 20},
            },
            "trainer": {"template": template},
        },
    }
