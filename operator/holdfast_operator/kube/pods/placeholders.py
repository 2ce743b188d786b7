"""Placeholder pods that wait for the nodes a job lacks, so that autoscalers add them.

A member's own pod is made for a node. If the cluster has none, no pod waits, and no autoscaler
learns of the need. So a placeholder waits for each missing node (`reconciler.report.shortage`),
with the requests of a member's pod. It runs nothing of the job, and is deleted as soon as the
member has a node.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.client.amounts import Amounts, amounts
from holdfast_operator.kube.client.api import NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import GROUP, PODS
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.pods.manifests import keep_off, owner_reference, template_of
from holdfast_operator.kube.pods.shared_objects import EXISTS, controller_of
from holdfast_operator.reconciler.observe.views import Shortage

_log = logging.getLogger(__name__)

PLACEHOLDER_LABEL = f"{GROUP}/placeholder"
"""Label of these pods; its value is the name of the job."""
HOSTNAME = "kubernetes.io/hostname"
_KEPT = (
    *("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "schedulerName"),
    *("priorityClassName", "runtimeClassName", "imagePullSecrets", "securityContext"),
)
"""Fields of the template that decide where a pod may run, and whether."""
REFUSED_S = 60.0
"""Seconds until a placeholder that the API server refused is tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placeholder:
    """A pod that waits for a node."""

    namespace: str
    name: str
    uid: str
    owner: str
    """Uid of the job."""
    node: str = ""
    """Node that has taken it; empty while it waits."""


def read_placeholder(raw: Object) -> Placeholder:
    """Read a pod from the API's form."""
    metadata = raw["metadata"]
    return Placeholder(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner=controller_of(raw).get("uid", ""),
        node=(raw.get("spec") or {}).get("nodeName") or "",
    )


class Placeholders:
    """Makes and deletes the placeholders of all jobs.

    Args:
        cache: the watch's copy of these pods.
        are_known: whether the watch has its first list; before that, nothing is done.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache[Placeholder],
        are_known: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._api, self._cache, self._are_known, self._clock = api, cache, are_known, clock
        self._refused_at: dict[str, float] = {}

    async def keep(self, job: MoETrainingJob, shortage: Shortage) -> None:
        """Have a placeholder wait for each node of `shortage`, which each turn of the job's control
        loop computes. A placeholder on a node that the job now has is replaced. A refusal by the
        API server is only logged: the job does not depend on placeholders."""
        if not self._are_known():
            return
        there = {
            each.name: each for each in self._cache.all().values() if each.owner == job.metadata.uid
        }
        wanted = [f"{job.metadata.name}-placeholder-{number}" for number in range(shortage.count)]
        kept = {
            name for name in wanted if name in there and there[name].node not in shortage.beside
        }
        missing = [name for name in wanted if name not in there]
        if self._clock() - self._refused_at.get(job.metadata.uid, -math.inf) < REFUSED_S:
            missing = []
        try:
            await asyncio.gather(
                *(self._delete(there[name]) for name in there if name not in kept),
                *(self._create(job, name, shortage.beside) for name in missing),
            )
        except ApiError as error:
            self._refused_at[job.metadata.uid] = self._clock()
            _log.warning("%s: no pod waits for the nodes that are missing: %s", job.key, error)

    async def _create(self, job: MoETrainingJob, name: str, beside: Sequence[str]) -> None:
        try:
            pod = placeholder(job, name, beside)
            body = await self._api.create(PODS, job.metadata.namespace, pod)
        except ApiError as error:
            if error.reason != EXISTS:
                raise
        else:
            self._cache.put_written(body)

    async def _delete(self, pod: Placeholder) -> None:
        try:
            await self._api.delete(PODS, pod.namespace, pod.name, uid=pod.uid, grace_s=0)
        except ApiError as error:
            if error.status != NOT_FOUND and error.reason != "Conflict":
                raise
        self._cache.remove(pod.namespace, pod.name)


def placeholder(job: MoETrainingJob, name: str, beside: Sequence[str]) -> Object:
    """A pod that asks of a node what a member's pod asks, and only waits: for a node that is not
    among `beside`. At most one of them is on a node.

    They do not keep off the job's trainers by a term of their own: such a term also keeps trainers
    off them, and the scheduler tries a trainer that it kept off a node so only minutes after the
    placeholder has gone.
    """
    given: Object = deepcopy(template_of(job)["spec"])
    trainer = given["containers"][0]
    spec = {field: given[field] for field in _KEPT if field in given}
    keep_off(spec, beside)
    apart = spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
    terms = apart.setdefault("requiredDuringSchedulingIgnoredDuringExecution", [])
    others = {"matchLabels": {PLACEHOLDER_LABEL: job.metadata.name}}
    terms.append({"topologyKey": HOSTNAME, "labelSelector": others})
    container = {
        "name": "placeholder",
        "image": trainer["image"],
        # It does not heed SIGTERM, and is deleted without grace.
        "command": ["python", "-c", "import signal; signal.pause()"],
        "resources": _resources(amounts(given)),
    }
    if "securityContext" in trainer:
        container["securityContext"] = trainer["securityContext"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": {
                PLACEHOLDER_LABEL: job.metadata.name,
                "app.kubernetes.io/managed-by": "holdfast-operator",
            },
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
        },
    }


def _resources(wanted: Amounts) -> Object:
    """Requests of these amounts. Resources that cannot be overcommitted are limits too."""
    texts = {
        name: f"{math.ceil(1000 * value)}m" if name == "cpu" else str(math.ceil(value))
        for name, value in wanted
    }
    strict = {k: v for k, v in texts.items() if "/" in k or k.startswith("hugepages-")}
    return {"requests": texts, "limits": strict} if strict else {"requests": texts}
