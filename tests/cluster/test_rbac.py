"""Every permission of the chart is needed and none is missing: each is taken from the running
system, which then fails to do what it is for, and given back.

What is asked and refused is read from the API server's audit log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from audit import Audit, Permission
from cluster import Cluster
from holdfast_system import CHART, NAMESPACE, Holdfast
from machine import wait_for
from rbac_checks import CHECKS, DAEMON, OPERATOR, TEAM, WAIT_S, Scene, suspended_job

Document = dict[str, Any]


def _rules() -> dict[str, Document]:
    """Name → rule, as the chart has them before they are rendered."""
    text = (CHART / "files" / "rbac.yaml").read_text(encoding="utf-8")
    groups = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "", text))
    return {rule["name"]: rule for rules in groups.values() for rule in rules}


RULES = _rules()


def _permissions(rule: Document) -> set[Permission]:
    return {
        Permission(verb=verb, group=group, resource=resource)
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


# --- taking permissions away --------------------------------------------------------------------


def _roles(cluster: Cluster) -> list[Document]:
    """The roles that operator and daemon have."""
    label = (
        "-l",
        "app.kubernetes.io/name=holdfast,app.kubernetes.io/component in (operator,daemon)",
    )
    found: list[Document] = cluster.get("clusterroles,roles", "-A", *label)["items"]
    return found


def _same(one: Document, other: Document) -> bool:
    return all(one[name] == other[name] for name in ("apiGroups", "resources", "verbs"))


def _may(cluster: Cluster, account: str, permission: Permission, role: Document) -> bool:
    """Whether the API server knows that a service account has a permission of a role."""
    resource, _, subresource = permission.resource.partition("/")
    namespace = role["metadata"].get("namespace", "")
    (rule,) = (r for r in role["rules"] if permission in _permissions(r))
    attributes = {
        **{"verb": permission.verb, "group": permission.group, "resource": resource},
        **{"subresource": subresource, "namespace": namespace},
        "name": rule.get("resourceNames", [""])[0],
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{account}", "resourceAttributes": attributes},
    }
    words = ("create", "-f", "-", "-o", "json")
    return bool(json.loads(cluster.kubectl(*words, stdin=json.dumps(review)))["status"]["allowed"])


@contextmanager
def without(cluster: Cluster, name: str, account: str) -> Iterator[None]:
    """While it lasts, one rule is missing, and the API server knows it."""
    rule = RULES[name]
    roles = [r for r in _roles(cluster) if any(_same(rule, each) for each in r["rules"])]
    # With an operator of one namespace, one rule is there twice: for jobs and for daemons.
    role = max(roles, key=lambda r: r["metadata"].get("namespace") == NAMESPACE)
    known = _permissions(rule)
    kept = [each for each in role["rules"] if not _same(rule, each)]
    metadata = {key: role["metadata"].get(key) for key in ("name", "namespace", "labels")}

    def write(rules: list[Document], allowed: bool) -> None:
        # In the name of helm, which would find another owner of the rules at its next upgrade.
        words = ("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", "-")
        document = {"apiVersion": role["apiVersion"], "kind": role["kind"]}
        cluster.kubectl(
            *words, stdin=json.dumps({**document, "metadata": metadata, "rules": rules})
        )
        what = f"{name} to be {'given' if allowed else 'taken'}"
        permission = min(known, key=str)
        wait_for(what, lambda: _may(cluster, account, permission, role) is allowed, WAIT_S)

    write(kept, allowed=False)
    try:
        yield
    finally:
        write(role["rules"], allowed=True)


# --- tests --------------------------------------------------------------------------------------


def _definition(
    group: str, version: str, kind: str, plural: str, scope: str = "Namespaced"
) -> Document:
    """A resource that a scheduler or Kueue brings."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "names": names,
            "scope": scope,
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }


@pytest.fixture(scope="module")
def team(cluster: Cluster, holdfast: Holdfast) -> Iterator[None]:
    cluster.kubectl("create", "namespace", TEAM)
    kueue = ("kueue.x-k8s.io", "v1beta2")
    classes = ("WorkloadPriorityClass", "workloadpriorityclasses")
    resources = [
        _definition("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups"),
        _definition("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups"),
        _definition(*kueue, "Workload", "workloads"),
        _definition(*kueue, "ResourceFlavor", "resourceflavors", "Cluster"),
        _definition(*kueue, *classes, "Cluster"),
    ]
    cluster.apply(*resources)
    cluster.wait_served()
    Scene(holdfast, "ready").wait_standby()
    yield
    Scene(holdfast, "opened").open_nodes()
    cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")
    cluster.kubectl("delete", "namespace", TEAM, "--wait=false")
    cluster.kubectl("delete", "crd", *(each["metadata"]["name"] for each in resources))


@pytest.fixture(scope="module")
def installed(holdfast: Holdfast) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Installs the chart with these values and no others, if it is not; at last without any."""
    there: dict[str, str] = {}

    def install(values: Mapping[str, str]) -> None:
        if values != there:
            holdfast.install(CHART, timeout_s=180.0, **values)
            there.clear()
            there.update(values)

    yield install
    install({})
    for node in holdfast.cluster.nodes:
        holdfast.wait_daemon(node)


def test_every_permission_has_a_check() -> None:
    assert set(CHECKS) == set(RULES), "say in CHECKS what is done by each rule of files/rbac.yaml"


def test_the_service_accounts_have_the_known_permissions_and_no_others(
    cluster: Cluster, holdfast: Holdfast
) -> None:
    optional = {name for name, check in CHECKS.items() if check.values}
    known = [rule for name, rule in RULES.items() if name not in optional]
    assert {p for role in _roles(cluster) for r in role["rules"] for p in _permissions(r)} == {
        p for rule in known for p in _permissions(rule)
    }
    bindings = cluster.get("clusterrolebindings,rolebindings", "-A")["items"]
    bound = {
        binding["roleRef"]["name"]
        for binding in bindings
        for subject in binding.get("subjects") or []
        if subject.get("namespace") == NAMESPACE and subject["kind"] == "ServiceAccount"
    }
    assert bound == {role["metadata"]["name"] for role in _roles(cluster)}


LONG = {
    "daemons-delete",
    "daemons-events",
    "daemons-watch",
    "endpoints-create",
    "endpoints-renew",
    "lease-create",
    "lease-renew",
    "node-record",
    "nodes-events",
    "nodes-patch",
    "nodes-watch",
    "coscheduling-watch",
    "revisions-watch",
    "shared-roles-watch",
    "volcano-watch",
    "workloads-watch",
}
"""Rules whose absence takes long to show: their rows are most of the time of this file."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if name in LONG else name for name in RULES],
)
def test_without_one_permission_something_is_not_done(
    holdfast: Holdfast, team: None, installed: Callable[[Mapping[str, str]], None], name: str
) -> None:
    """And every verb of it is used."""
    check, permissions = CHECKS[name], _permissions(RULES[name])
    installed(check.values)
    scene = Scene(holdfast, name)
    if check.changes_leader or check.values:
        scene.wait_standby()
    scene.audit = Audit(holdfast.cluster.audit_log)
    refusals = permissions if check.refusal is None else {check.refusal}
    with without(holdfast.cluster, name, check.account):
        check.provoke(scene)
        wait_for("the refusal", lambda: refusals & scene.refused(check.account), WAIT_S)
        assert not check.done(scene)
    if check.again:
        scene.name = f"{name}-again"
        check.provoke(scene)
    wait_for("it to be done after all", lambda: check.done(scene), WAIT_S)
    if check.refusal is None:
        what = f"all of {', '.join(sorted(map(str, permissions)))} to be used"
        wait_for(what, lambda: permissions <= scene.used(check.account), WAIT_S)
    holdfast.cluster.kubectl("delete", "moejob", "--all", "-n", TEAM, "--timeout=120s")


def test_nothing_is_refused_in_the_life_of_a_job(
    holdfast: Holdfast, team: None, installed: Callable[[Mapping[str, str]], None]
) -> None:
    installed({})
    scene = Scene(holdfast, "whole-life")
    scene.wait_standby()
    scene.audit = Audit(holdfast.cluster.audit_log)
    suspended_job(scene)
    wait_for("the pod to go", lambda: not scene.pods(), WAIT_S)
    scene.change_leader()
    scene.job(suspend=False)
    wait_for("the pod to come back", scene.pods, WAIT_S)
    holdfast.cluster.kubectl("delete", "moejob", scene.name, "-n", TEAM, "--timeout=120s")
    allowed = {p for rule in RULES.values() for p in _permissions(rule)}
    for account in (OPERATOR, DAEMON):
        assert scene.refused(account) == set()
        assert {p for p in scene.used(account) if p.resource} <= allowed
