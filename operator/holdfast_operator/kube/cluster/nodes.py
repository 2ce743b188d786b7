"""Views of nodes for the reconciler: a node's API object, joined with its daemon's reports.

Pure. It judges as the scheduler would whether a pod of the job could run on a node, from the node's
own object and the trainers' pods; the scheduler has the last word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.node_failures import CLEAN, Rating, with_problem
from holdfast_core.suspect_nodes import Mark
from holdfast_operator.kube.client.amounts import Amounts, amount, amounts, lacking
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import SUSPECT, TOLERATION
from holdfast_operator.kube.cluster.notices import NOTICES, notice_of, problem_of
from holdfast_operator.reconciler.observe.views import NodeView

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator declares that the node is down for good."""

_REPELLING = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Taint:
    """A taint, which repels pods that do not tolerate it."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, kw_only=True)
class KubeNode:
    """The relevant part of a node's object."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ready: bool = True
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, float] = field(default_factory=dict)
    leaving: str = ""
    """Reason why the node will be taken away soon; empty when none was announced."""
    problem: str = ""
    """What its conditions say is wrong with it, in words; empty when nothing is."""
    marked: Mark = Mark.NONE
    """What Holdfast has done to it because it fails again and again, as its annotation says."""
    uid: str = ""

    @property
    def closed(self) -> bool:
        """Whether it takes no new pods of most jobs, for whatever reason."""
        return self.cordoned or self.suspect or not self.ready or self.out_of_service

    @property
    def intact(self) -> bool:
        """Whether it still has the taint or the cordon that its mark says."""
        is_tainted = self.marked is Mark.TAINT and self.suspect
        return is_tainted or (self.marked is Mark.CORDON and self.cordoned)

    @property
    def suspect(self) -> bool:
        """Whether it has the taint of suspect nodes."""
        return any(taint.key == SUSPECT for taint in self.taints)

    @cached_property
    def out_of_service(self) -> bool:
        return any(taint.key == OUT_OF_SERVICE for taint in self.taints)


@dataclass(frozen=True, kw_only=True)
class Wants:
    """Requirements of a job's pods on a node; made once for each version of the job."""

    selector: Mapping[str, str]
    terms: tuple[Object, ...]
    """Terms of the required node affinity, of which one must match; empty for any node."""
    tolerations: tuple[Object, ...]
    requests: Amounts
    domain_label: str
    memory_bytes: int
    """Memory for snapshots, within the daemon's budget."""


def read_node(raw: Object, notices: Collection[str] = NOTICES) -> KubeNode:
    """Read a node from the API's form. Taints and conditions of `notices` announce its end."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    conditions = status.get("conditions") or []
    return KubeNode(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        cordoned=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(key=t.get("key", ""), value=t.get("value", ""), effect=t.get("effect", ""))
            for t in spec.get("taints") or []
        ),
        allocatable={
            name: amount(text) for name, text in (status.get("allocatable") or {}).items()
        },
        leaving=notice_of(raw, notices),
        problem=problem_of(raw),
        marked=marked_in(metadata),
        uid=metadata.get("uid", ""),
    )


def marked_in(metadata: Object) -> Mark:
    """What Holdfast has done to a node because it fails again and again."""
    try:
        return Mark((metadata.get("annotations") or {}).get(SUSPECT, Mark.NONE))
    except ValueError:  # somebody else's annotation
        return Mark.NONE


def wants_of(job: MoETrainingJob) -> Wants:
    """Requirements of the job's template; none where another controller makes the pods."""
    spec = (job.spec.trainer.template or {}).get("spec") or {}
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return Wants(
        selector=spec.get("nodeSelector") or {},
        terms=tuple(required.get("nodeSelectorTerms") or ()),
        tolerations=tuple(spec.get("tolerations") or ()),
        requests=amounts(spec),
        domain_label=job.spread_topology_key,
        memory_bytes=job.memory_per_node_bytes or 0,
    )


def unfit(node: KubeNode, wants: Wants, taken: Amounts) -> str:
    """Reason why a pod cannot run on the node, in words; empty when it can. `taken` is what pods
    of others request there."""
    if not node.ready:
        return "not ready"
    if node.cordoned:
        return "cordoned"
    tolerations = (*wants.tolerations, TOLERATION)
    for taint in node.taints:
        if taint.effect in _REPELLING and not any(_tolerates(t, taint) for t in tolerations):
            return f"taint {taint.key}"
    for key, value in wants.selector.items():
        if node.labels.get(key) != value:
            return f"label {key} is not {value}"
    if wants.terms and not any(_matches(term, node.labels) for term in wants.terms):
        return "node affinity"
    missing = lacking(wants.requests, node.allocatable, taken)
    return f"not enough {missing}" if missing else ""


def node_view(
    name: str,
    node: KubeNode | None,
    reported: NodeView | None,
    wants: Wants,
    *,
    taken: Amounts = (),
    returning: bool = False,
    rating: Rating = CLEAN,
) -> NodeView:
    """View of the node for the reconciler. `node` is None when the API has no such object (any
    more). `reported` is None when no daemon has connected to this process yet: then nothing is
    known of the node's memory, and only its object is judged."""
    view = reported or NodeView(name=name)
    if node is None:
        return replace(view, gone=True, schedulable=False)
    return replace(
        view,
        gone=node.out_of_service,
        returning=returning and node.ready,
        disruption=node.leaving,
        rating=with_problem(rating, node.problem),
        domain=node.labels.get(wants.domain_label, ""),
        schedulable=(reported is None or has_memory(reported, wants))
        and not unfit(node, wants, taken),
    )


def has_memory(reported: NodeView, wants: Wants) -> bool:
    """Whether the daemon has said that it has memory for the job."""
    free_bytes = reported.memory_budget_bytes - reported.memory_used_bytes
    return reported.job is not None or free_bytes >= wants.memory_bytes


def _tolerates(toleration: Object, taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    key: str = toleration.get("key", "")
    if toleration.get("operator", "Equal") == "Exists":
        return key in ("", taint.key)
    return key == taint.key and str(toleration.get("value", "")) == taint.value


def _matches(term: Object, labels: Mapping[str, str]) -> bool:
    return all(_holds(each, labels) for each in term.get("matchExpressions") or [])


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    found, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt":
            return found is not None and amount(found) > amount(values[0])
        case "Lt":
            return found is not None and amount(found) < amount(values[0])
        case _:
            return True  # unknown to this version; the scheduler judges it
