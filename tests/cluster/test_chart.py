"""The chart before a real Helm and a real API server: what is rendered, refused, and kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart_rendering import DRY, URL, VALUE_SETS, Document, Renderer
from cluster import Cluster
from holdfast_system import CHART, NAMESPACE, RELEASE, VALUES, Holdfast
from machine import ROOT, ClusterError, wait_for
from msgspec.structs import replace

from holdfast_core.job.locations import StorageLocation, read_location

RESOURCE = "holdfast.dev_moetrainingjobs.yaml"
MONITORING = Path(__file__).with_name("monitoring_resources.yaml")
MIB, GIB = 2**20, 2**30

WAIT = ("--wait=legacy", "--timeout=180s")
"""Helm's newer way to wait takes a DaemonSet with OnDelete for one that never gets ready."""

MONITORING_KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


@pytest.fixture
def render(cluster: Cluster, tmp_path: Path) -> Renderer:
    return Renderer(cluster, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def dry_namespace(cluster: Cluster) -> Iterator[None]:
    """Where everything could be made, and the kinds of the Prometheus operator."""
    cluster.kubectl("create", "namespace", DRY)
    for release in (RELEASE, "other"):
        cluster.kubectl("create", "serviceaccount", f"{release}-test", "-n", DRY)
    cluster.kubectl("apply", "-f", MONITORING)
    cluster.wait_served()
    yield
    cluster.kubectl("delete", "-f", MONITORING)
    cluster.kubectl("delete", "namespace", DRY, "--wait=false")


# --- what is rendered ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUE_SETS)
def test_helm_finds_nothing_to_complain_about(render: Renderer, name: str) -> None:
    render.cluster.helm("lint", "--strict", CHART, "--values", render.values(VALUE_SETS[name]))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_api_server_takes_every_document_strictly(render: Renderer, name: str) -> None:
    values = VALUE_SETS[name]
    kinds = {each["kind"] for each in render.documents(values)}
    assert (name in ("monitoring", "everything")) == (kinds >= MONITORING_KINDS)
    text = "\n---\n".join(map(json.dumps, (_in_dry(each) for each in render.documents(values))))
    words = ("apply", "--dry-run=server", "--validate=strict", "-f", "-")
    render.cluster.kubectl(*words, stdin=text)


def _in_dry(document: Document) -> Document:
    """Roles for another namespace are looked at in ours, which exists."""
    if document["metadata"].get("namespace"):
        document["metadata"]["namespace"] = DRY
    return document


@pytest.mark.parametrize("name", VALUE_SETS)
def test_only_what_mounts_has_privileges(render: Renderer, name: str) -> None:
    privileged = []
    for document in render.documents(VALUE_SETS[name]):
        pod = document if document["kind"] == "Pod" else document.get("spec", {}).get("template")
        if not pod or "containers" not in pod["spec"]:
            continue
        spec = pod["spec"]
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            merged = {**spec["securityContext"], **container["securityContext"]}
            if merged.get("privileged"):
                privileged.append(container["name"])
                continue
            assert merged["runAsNonRoot"], container["name"]
            chosen = name == "users that the cluster chooses"
            by_hand = 1000900001 if container["name"] == "daemon" else None
            assert merged.get("runAsUser") == (by_hand if chosen else 65532)
            assert merged["allowPrivilegeEscalation"] is False
            assert merged["readOnlyRootFilesystem"] is True
            assert merged["capabilities"] == {"drop": ["ALL"]}
            assert merged["seccompProfile"] == {"type": "RuntimeDefault"}
    assert privileged == ["mount-memory", "csi-driver"]


def test_with_host_paths_nothing_that_goes_on_has_privileges(render: Renderer) -> None:
    values = {"daemon": {"trainerVolume": "host-path"}}
    pod = render.one("DaemonSet", "holdfast-daemon", values)["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["daemon"]
    assert not any(argument.startswith("--volumes") for argument in pod["containers"][0]["args"])
    assert not [d for d in render.documents(values) if d["kind"] == "CSIDriver"]
    operator = render.one("Deployment", "holdfast-operator", values)["spec"]["template"]["spec"]
    assert "--trainer-volume=host-path" in operator["containers"][0]["args"]


def test_the_resource_is_the_one_of_the_repository_and_outlives_the_release(
    render: Renderer,
) -> None:
    source = yaml.safe_load((ROOT / "crds" / RESOURCE).read_text(encoding="utf-8"))
    rendered = render.one("CustomResourceDefinition", "moetrainingjobs.holdfast.dev")
    assert rendered["spec"] == source["spec"]
    assert source["metadata"]["labels"].items() <= rendered["metadata"]["labels"].items()
    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize(
    ("budget", "overhead", "wanted"),
    [
        ("4Gi", "512Mi", (4 * GIB, 512 * MIB)),
        ("1.5Gi", "100Ki", (3 * GIB // 2, 100 * 2**10)),
        ("2Ti", "1Gi", (2 * 2**40, GIB)),
        ("1T", "1G", (10**12, 10**9)),
        ("300M", "3k", (300 * 10**6, 3000)),
        (200 * GIB, GIB + 1, (200 * GIB, GIB + 1)),
        ("214748364801", "1", (214748364801, 1)),
        ("0.7Gi", "1", (751619276, 1)),
    ],
)
def test_the_limit_is_the_budget_and_the_overhead(
    render: Renderer, budget: str | int, overhead: str | int, wanted: tuple[int, int]
) -> None:
    values = {"daemon": {"memory": {"budget": budget, "overhead": overhead}}}
    pod = render.one("DaemonSet", "holdfast-daemon", values)["spec"]["template"]["spec"]
    (mount,), (daemon, _) = pod["initContainers"], pod["containers"]
    assert f"--budget={wanted[0]}" in daemon["args"]
    assert f"--size={sum(wanted)}" in mount["command"]
    memory = daemon["resources"]["requests"]["memory"]
    assert memory == daemon["resources"]["limits"]["memory"] == str(sum(wanted))


@pytest.mark.parametrize("name", ["redis", "external Redis"])
def test_no_password_is_outside_of_its_secret(render: Renderer, name: str) -> None:
    documents = render.documents(VALUE_SETS[name])
    (secret,) = (
        each
        for each in documents
        if each["kind"] == "Secret" and "url" in each.get("stringData", {})
    )
    found = re.search(r":([^:@]+)@", secret["stringData"]["url"])
    assert found is not None
    assert len(found[1]) >= 10
    documents.remove(secret)
    assert found[1] not in json.dumps(documents)


def test_daemons_read_the_url_of_redis_from_its_secret(render: Renderer) -> None:
    wanted = {
        "redis": "holdfast-redis",
        "external Redis": "holdfast-redis",
        "Redis of a secret": "redis-url",
    }
    for name in ("defaults", *wanted):
        daemon = render.one("DaemonSet", "holdfast-daemon", VALUE_SETS[name])
        container = daemon["spec"]["template"]["spec"]["containers"][0]
        found = [
            each["valueFrom"]["secretKeyRef"]["name"]
            for each in container["env"]
            if each["name"] == "HOLDFAST_REDIS_URL"
        ]
        assert found == ([wanted[name]] if name in wanted else [])


def test_kubernetes_leaves_daemons_to_the_operator_or_renews_them_itself(render: Renderer) -> None:
    """And the operator only does where it is asked to, with the permission that it needs."""
    for chosen, known in (
        ("Protected", "OnDelete"),
        ("OnDelete", "OnDelete"),
        ("RollingUpdate", "RollingUpdate"),
    ):
        values = {} if chosen == "Protected" else {"daemon": {"updateStrategy": {"type": chosen}}}
        daemons = render.one("DaemonSet", "holdfast-daemon", values)
        assert daemons["spec"]["updateStrategy"]["type"] == known
        operator = render.one("Deployment", "holdfast-operator", values)
        (container,) = operator["spec"]["template"]["spec"]["containers"]
        assert ("--renew-daemons" in container["args"]) == (chosen == "Protected")
        role = render.one("Role", "holdfast-operator", values)
        allowed = {resource for rule in role["rules"] for resource in rule["resources"]}
        assert ("controllerrevisions" in allowed) == (chosen == "Protected")


def test_one_namespace_needs_no_permission_in_any_other(render: Renderer) -> None:
    roles = [
        each
        for each in render.documents(VALUE_SETS["one namespace"])
        if each["kind"] == "ClusterRole" and "aggregate" not in json.dumps(each["metadata"])
    ]
    allowed = {
        resource for role in roles for rule in role["rules"] for resource in rule["resources"]
    }
    assert allowed == {"nodes", "tokenreviews"}
    role = render.one("Role", "holdfast-operator-jobs", VALUE_SETS["one namespace"])
    assert role["metadata"]["namespace"] == "team-a"


def test_each_watched_namespace_gets_a_role_and_the_operator_watches_them_all(
    render: Renderer,
) -> None:
    documents = render.documents(VALUE_SETS["two namespaces"])
    for kind in ("Role", "RoleBinding"):
        named = [
            each["metadata"]["namespace"]
            for each in documents
            if each["kind"] == kind and each["metadata"]["name"] == "holdfast-operator-jobs"
        ]
        assert named == ["team-a", "holdfast-system"]
    operator = render.one("Deployment", "holdfast-operator", VALUE_SETS["two namespaces"])
    args = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    watched = [each for each in args if each.startswith("--watch-namespace=")]
    assert watched == ["--watch-namespace=team-a", "--watch-namespace=holdfast-system"]


def test_accounts_and_roles_may_be_those_of_others(render: Renderer) -> None:
    """Whoever may not grant rights installs the chart without them."""
    values = VALUE_SETS["accounts and roles of others"]
    documents = render.documents(values)
    assert not [each for each in documents if "rbac" in each["apiVersion"]]
    accounts = {d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"}
    assert accounts == {"holdfast-test"}
    for kind, name in (("DaemonSet", "daemon"), ("Deployment", "operator")):
        pod = render.one(kind, f"holdfast-{name}", values)["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == f"their-{name}"
    job = render.one("Job", "holdfast-release-finalizers", values)["spec"]["template"]["spec"]
    assert job["serviceAccountName"] == "their-operator"


def test_a_role_is_granted_to_the_account_that_was_named(render: Renderer) -> None:
    values = {"operator": {"serviceAccount": {"name": "runner"}}}
    documents = render.documents(values)
    assert "runner" in {d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"}
    bindings = [d for d in documents if d["kind"].endswith("Binding")]
    subjects = {
        each["metadata"]["name"]: [subject["name"] for subject in each["subjects"]]
        for each in bindings
    }
    assert subjects["holdfast-operator"] == ["runner"]
    assert subjects["holdfast-daemon"] == ["holdfast-daemon"]


def test_the_memory_belongs_to_the_daemons_user(render: Renderer) -> None:
    values = VALUE_SETS["users that the cluster chooses"]
    pod = render.one("DaemonSet", "holdfast-daemon", values)["spec"]["template"]["spec"]
    (mount,), (daemon, csi) = pod["initContainers"], pod["containers"]
    assert daemon["securityContext"]["runAsUser"] == 1000900001
    for container in (mount, csi):
        assert "--owner=1000900001" in container["command"]
    env = render.one(
        "DaemonSet", "holdfast-daemon", VALUE_SETS["everything"] | {"fullnameOverride": ""}
    )
    names = {each["name"] for each in env["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert {"HTTPS_PROXY", "NODE_NAME"} <= names


def test_operator_and_daemons_have_the_same_list_and_daemons_alone_have_credentials(
    render: Renderer,
) -> None:
    values = VALUE_SETS["everything"] | {"fullnameOverride": "holdfast"}
    mount = "/etc/holdfast/storage/s3.keys"
    expected = [
        StorageLocation(prefix="s3://team-{namespace}", credentials=mount),
        StorageLocation(prefix="s3://old/copies", namespaces=("a", "b"), credentials=mount),
        StorageLocation(prefix="file:///mnt/training/{namespace}/"),
    ]
    daemon = render.one("DaemonSet", "holdfast-daemon", values)["spec"]["template"]["spec"]
    operator = render.one("Deployment", "holdfast-operator", values)["spec"]["template"]["spec"]
    assert _locations(daemon) == expected
    assert _locations(operator) == [replace(one, credentials="") for one in expected]
    secret = {"secretName": "s3.keys", "optional": True}
    assert [v["secret"] for v in daemon["volumes"] if v["name"] == "location-0"] == [secret]
    mounts = [m for m in daemon["containers"][0]["volumeMounts"] if "location" in m["name"]]
    assert mounts == [{"name": "location-0", "mountPath": mount, "readOnly": True}]
    assert not [v for v in operator["volumes"] if "location" in v["name"]]


def test_without_a_record_of_nodes_nothing_mentions_config_maps(render: Renderer) -> None:
    documents = {name: json.dumps(render.documents(VALUE_SETS[name])) for name in VALUE_SETS}
    assert '"configmaps"' in documents["defaults"] and "--node-record" in documents["defaults"]
    for word in ('"configmaps"', "node-record"):
        assert word not in documents["minimal"]


@pytest.mark.parametrize(
    ("name", "may"), [("defaults", False), ("everything", True), ("one namespace", False)]
)
def test_only_on_request_may_the_operator_change_nodes(
    render: Renderer, name: str, may: bool
) -> None:
    roles = [each for each in render.documents(VALUE_SETS[name]) if each["kind"] == "ClusterRole"]
    rules = [rule for role in roles for rule in role["rules"] if "nodes" in rule["resources"]]
    verbs = {verb for rule in rules for verb in rule["verbs"]}
    assert verbs == {"list", "watch"} | ({"get", "patch"} if may else set())


def test_by_default_no_job_may_persist(render: Renderer) -> None:
    for kind, name in (("DaemonSet", "holdfast-daemon"), ("Deployment", "holdfast-operator")):
        assert _locations(render.one(kind, name)["spec"]["template"]["spec"]) == []


def _locations(pod: Document) -> list[StorageLocation]:
    flag = "--storage-location="
    given = pod["containers"][0]["args"]
    assert "--storage-anywhere" not in given
    return [read_location(each.removeprefix(flag)) for each in given if each.startswith(flag)]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"daemons": {}}, "additional properties 'daemons' not allowed"),
        ({"daemon": {"memory": {"bugdet": "1Gi"}}}, "additional properties 'bugdet' not allowed"),
        ({"daemon": {"memory": {"budget": "1 GB"}}}, "'/daemon/memory/budget': '1 GB' does not"),
        ({"daemon": {"memory": {"budget": "-1"}}}, "'/daemon/memory/budget': '-1' does not match"),
        ({"daemon": {"memory": {"overhead": 0}}}, "'/daemon/memory/overhead': minimum"),
        (
            {"daemon": {"updateStrategy": {"type": "Recreate"}}},
            "must be one of 'Protected', 'OnDelete', 'RollingUpdate'",
        ),
        ({"daemon": {"idleCheckSeconds": 9}}, "'/daemon/idleCheckSeconds'"),
        ({"daemon": {"protectionBandwidth": "9M"}}, "9M is too little to protect anything in time"),
        ({"daemon": {"protectionBandwidth": 9}}, "'/daemon/protectionBandwidth': minimum"),
        ({"operator": {"watchNamespaces": "a"}}, "'/operator/watchNamespaces': got string"),
        (
            {"operator": {"serviceAccount": {"create": False}}},
            "operator.serviceAccount.name names no account, and operator.serviceAccount.create is",
        ),
        ({"daemon": {"user": 0}}, "'/daemon/user': minimum"),
        ({"daemon": {"auth": "token"}}, "must be one of 'token-review', 'none'"),
        ({"operator": {"suspectNodes": "Drain"}}, "must be one of 'None', 'Taint', 'Cordon'"),
        (
            {"operator": {"suspectNodes": "Taint", "nodeRecord": {"enabled": False}}},
            "operator.suspectNodes needs the record of nodes",
        ),
        ({"operator": {"replicas": "two"}}, "'/operator/replicas': got string, want integer"),
        ({"operator": {"replicas": 0}}, "'/operator/replicas': minimum"),
        ({"crds": {"enabled": "yes"}}, "'/crds/enabled': got string, want boolean"),
        ({"redis": {"external": {"url": "redis.example"}}}, "'/redis/external/url'"),
        (
            {"persistence": {"locations": [{"prefix": "memory://x"}]}},
            "'/persistence/locations/0/prefix': 'memory://x' does not match",
        ),
        (
            {"persistence": {"locations": [{"prefix": "/mnt/../x"}]}},
            "/mnt/../x can be read in more than one way",
        ),
        (
            {"persistence": {"locations": [{"prefix": "/mnt", "secretName": "s3"}]}},
            "/mnt has a secretName, and only s3 locations can have their own credentials",
        ),
        ({"security": {"bulk": "none"}}, "must be one of 'authenticated', 'encrypted'"),
        (
            {"security": {"certificates": {"source": "existing", "daemonSecret": "d"}}},
            "security.certificates.operatorSecret names no secret",
        ),
        (
            {"redis": {"enabled": True, "external": {"url": URL}}},
            "redis.enabled and redis.external exclude each other: choose one",
        ),
        (
            {"monitoring": {"rules": {"enabled": True, "disabled": ["HoldfastNothing"]}}},
            "monitoring.rules.disabled: there is no alert HoldfastNothing",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_these_words(
    render: Renderer, values: Document, message: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        render.text(values)
    assert message in str(caught.value)


# --- what is installed --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def holdfast(cluster: Cluster, dry_namespace: None) -> Iterator[Holdfast]:
    """Installed as a person would; a resource that another test applied is taken over. The release
    that other tests share, if it is there already, is put back afterwards."""
    system, shared = Holdfast(cluster), _is_installed(cluster)
    if shared:
        system.uninstall()
    _release(cluster, "install", "--create-namespace", "--take-ownership", *WAIT)
    yield system
    if _is_installed(cluster):
        system.uninstall()
    if shared:
        system.install()


def _is_installed(cluster: Cluster) -> bool:
    return RELEASE in cluster.helm("list", "--short", "--namespace", NAMESPACE).split()


def _release(cluster: Cluster, verb: str, *words: str, **values: str) -> None:
    """Run helm with the settings of this machine; `values` are more, with "__" for a dot."""
    given = {**VALUES, **{name.replace("__", "."): value for name, value in values.items()}}
    settings = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    cluster.helm(verb, RELEASE, CHART, "--namespace", NAMESPACE, *words, *settings)


def test_the_test_of_the_chart_passes(holdfast: Holdfast) -> None:
    log = holdfast.cluster.helm("test", RELEASE, "--namespace", NAMESPACE, "--logs")
    assert "The operator leads, MoETrainingJob is served, and every daemon is healthy." in log


def _daemons(cluster: Cluster) -> dict[str, str]:
    """Name → uid of each daemon's pod that is not being removed."""
    label = "app.kubernetes.io/component=daemon"
    found = cluster.get("pods", "-n", NAMESPACE, "-l", label)["items"]
    there = [pod["metadata"] for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return {metadata["name"]: metadata["uid"] for metadata in there}


def _secret(cluster: Cluster) -> list[Document]:
    """Passwords and certificates."""
    names = ("holdfast-redis", "holdfast-daemon-tls", "holdfast-operator-tls")
    return [cluster.get("secret", name, "-n", NAMESPACE)["data"] for name in names]


def test_an_upgrade_leaves_daemons_passwords_and_the_record_of_nodes_alone(
    holdfast: Holdfast,
) -> None:
    cluster = holdfast.cluster
    wait_for("the pod of an earlier Redis to go", lambda: len(holdfast.redis()) == 1, 60.0)
    before, secret, redis = _daemons(cluster), _secret(cluster), holdfast.redis()
    record = ("configmap", "holdfast-node-record", "-n", NAMESPACE)
    cluster.kubectl("patch", *record, "--type=merge", "-p", '{"data": {"a-node": "[]"}}')
    half_life = {"operator__nodeRecord__halfLifeHours": "12"}
    _release(cluster, "upgrade", *WAIT, daemon__threads="3", **half_life)
    there = cluster.get(*record)
    assert there["data"] == {"a-node": "[]"}
    assert there["metadata"]["annotations"]["holdfast.dev/half-life-hours"] == "12"
    assert _secret(cluster) == secret
    assert _daemons(cluster) == before
    assert holdfast.redis() == redis
    _release(cluster, "upgrade", *WAIT, redis__enabled="false")
    assert _daemons(cluster) == before
    wait_for("the pod of Redis to go", lambda: not holdfast.redis(), 60.0)


def test_a_job_can_be_deleted_when_the_release_is_gone(holdfast: Holdfast) -> None:
    cluster = holdfast.cluster
    cluster.apply(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "left-behind", "namespace": DRY},
            "spec": {
                "nodes": 2,
                "parallelism": {"dp": 2},
                "redundancy": {"raim5": {"groupSize": 2}},
                "trainer": {
                    "template": {
                        "spec": {
                            "containers": [
                                {"name": "t", "image": "localhost/none:dev", "command": ["train"]}
                            ]
                        }
                    }
                },
            },
        }
    )

    def finalizers() -> list[str]:
        found = cluster.get("moejob", "left-behind", "-n", DRY)["metadata"]
        return list(found.get("finalizers", ()))

    wait_for("the operator to take the job in", finalizers, 90.0)
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--timeout", "120s")
    assert finalizers() == []
    cluster.kubectl("delete", "moejob", "left-behind", "-n", DRY, "--timeout=60s")
    left = cluster.get("clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/name=holdfast")
    assert left["items"] == []
