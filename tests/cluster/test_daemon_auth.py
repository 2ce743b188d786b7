"""A daemon before a real API server: real tokens, of real pods, that kubelets would mount.

The daemon runs on this host, as its service account; that its own pod may ask is the chart's part.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import Cluster
from daemons import DaemonProcess
from harness import RawCluster, RawJob
from machine import ClusterError
from waiting import WAIT_S, error_of, wait_for

from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    UnauthenticatedError,
    UnreachableError,
)
from holdfast_core.snapshots.membership import Redundancy
from holdfast_daemon.trainers.auth import AUDIENCE
from holdfast_protos import codec, trainer_pb2

TEAM, OTHER_TEAM = "auth-test", "auth-test-other"
REVIEWER = "auth-test-reviewer"
JOB = f"{TEAM}.moe"


class Api:
    """Pods that are never scheduled, and what the API server makes of them."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
        found = config["clusters"][0]["cluster"]
        self.address = found["server"].removeprefix("https://")
        authority = base64.b64decode(found["certificate-authority-data"])
        (directory / "ca.crt").write_bytes(authority)

    def prepare(self) -> None:
        for name in (TEAM, OTHER_TEAM):
            self.cluster.apply(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            )
            self.make_account("trainer", name)
        self.make_account("daemon", TEAM)
        self.allow_reviews()
        self.wait_allowed()
        token = self.cluster.kubectl("create", "token", "daemon", "-n", TEAM)
        (self.directory / "token").write_text(token)

    def clean(self) -> None:
        self.forbid_reviews()
        self.cluster.kubectl("delete", "namespace", TEAM, OTHER_TEAM, "--wait=false")

    def allow_reviews(self) -> None:
        """The one right that the chart gives the daemons."""
        role = "rbac.authorization.k8s.io"
        self.cluster.apply(
            {
                "apiVersion": f"{role}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": REVIEWER},
                "rules": [
                    {
                        "apiGroups": ["authentication.k8s.io"],
                        "resources": ["tokenreviews"],
                        "verbs": ["create"],
                    }
                ],
            },
            {
                "apiVersion": f"{role}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": REVIEWER},
                "roleRef": {"apiGroup": role, "kind": "ClusterRole", "name": REVIEWER},
                "subjects": [{"kind": "ServiceAccount", "name": "daemon", "namespace": TEAM}],
            },
        )

    def wait_allowed(self) -> None:
        """Return when the authorizer knows that right: roles reach it a moment later."""

        def is_allowed() -> bool:
            words = ("auth", "can-i", "create", "tokenreviews.authentication.k8s.io")
            with suppress(ClusterError):  # it may not
                self.cluster.kubectl(*words, "--as", f"system:serviceaccount:{TEAM}:daemon")
                return True
            return False

        wait_for("the right to review tokens", is_allowed, 30.0)

    def forbid_reviews(self) -> None:
        for kind in ("clusterrolebinding", "clusterrole"):
            self.cluster.kubectl("delete", kind, REVIEWER, "--ignore-not-found")

    def make_account(self, name: str, namespace: str) -> None:
        account = {"name": name, "namespace": namespace}
        self.cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})

    def make_pod(self, name: str, namespace: str = TEAM) -> None:
        spec: dict[str, Any] = {
            "serviceAccountName": "trainer",
            "nodeSelector": {"auth-test": "nowhere"},
            "containers": [{"name": "main", "image": "none"}],
        }
        metadata = {"name": name, "namespace": namespace}
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def token(self, pod: str, namespace: str = TEAM, audience: str = AUDIENCE) -> str:
        """As kubelet mounts it into `pod`; of no pod when that is empty."""
        bound = ("--bound-object-kind", "Pod", "--bound-object-name", pod) if pod else ()
        words = ("create", "token", "trainer", "-n", namespace, "--audience", audience)
        return self.cluster.kubectl(*words, *bound).strip()


@pytest.fixture(scope="module")
def api(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(cluster, tmp_path_factory.mktemp("service-account"))
    made.prepare()
    try:
        yield made
    finally:
        made.clean()


@pytest.fixture
def daemon(api: Api) -> Iterator[DaemonProcess]:
    """A daemon with the job on it, which remembers no token."""
    arguments = [
        *("--auth", "token-review"),
        *("--api-server", api.address),
        *("--service-account", str(api.directory)),
    ]
    with RawCluster(arguments=tuple(arguments)) as daemons:
        (node,) = daemons.start_nodes(1)
        job = RawJob(daemons, [node], name=JOB, redundancy=Redundancy.NONE)
        job.form()
        wait_for("the job on the node", lambda: daemons.control.state(node, JOB))
        yield daemons.daemons[node]


def hello(daemon: DaemonProcess, token: str, job: str = JOB) -> int:
    """The job's epoch, as the bearer learns it; raises the refusal."""
    daemon.token = token
    request = trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job=job)
    try:
        return int(daemon.stub().Hello(request, timeout=WAIT_S).epoch)
    except grpc.RpcError as error:
        raise error_of(error) from error


def test_a_pod_of_the_job_is_let_in(api: Api, daemon: DaemonProcess) -> None:
    api.make_pod("moe-0-1")
    assert hello(daemon, api.token("moe-0-1")) == 1


@pytest.mark.parametrize(
    ("pod", "namespace", "audience", "kind", "words"),
    [
        ("other-0-1", TEAM, AUDIENCE, AccessDeniedError, "pod other-0-1 of namespace auth-test"),
        ("moe-0-1", OTHER_TEAM, AUDIENCE, AccessDeniedError, "of namespace auth-test-other"),
        ("", TEAM, AUDIENCE, UnauthenticatedError, "not to a pod"),
        ("moe-7-7", TEAM, "another-service", UnauthenticatedError, "audience"),
    ],
)
def test_any_other_bearer_is_refused_with_the_reason(
    api: Api,
    daemon: DaemonProcess,
    pod: str,
    namespace: str,
    audience: str,
    kind: type[HoldfastError],
    words: str,
) -> None:
    if pod:
        api.make_pod(pod, namespace)
    with pytest.raises(HoldfastError, match=words) as refused:
        hello(daemon, api.token(pod, namespace, audience))
    assert type(refused.value) is kind


def test_the_token_of_a_pod_that_is_gone_and_one_that_was_changed_are_worth_nothing(
    api: Api, daemon: DaemonProcess
) -> None:
    api.make_pod("moe-1-1")
    token = api.token("moe-1-1")
    head, _, signature = token.rpartition(".")
    with pytest.raises(UnauthenticatedError):
        hello(daemon, f"{head}.{signature[::-1]}")
    api.cluster.kubectl("delete", "pod", "moe-1-1", "-n", TEAM, "--force")

    def refused() -> bool:
        # The API server looks at its own cache of pods.
        try:
            hello(daemon, token)
        except UnauthenticatedError:
            return True
        return False

    wait_for("the token to be refused", refused, 90.0)


def test_a_daemon_without_the_right_to_ask_blames_itself_and_denies_nobody(
    api: Api, daemon: DaemonProcess
) -> None:
    api.make_pod("moe-2-1")
    token = api.token("moe-2-1")
    api.forbid_reviews()
    try:

        def complaint() -> str:
            # Roles, too, reach the authorizer a moment later.
            try:
                hello(daemon, f"{token}x")
            except UnreachableError as error:
                return str(error)
            except UnauthenticatedError:
                return ""
            raise AssertionError("a token that was changed is good")

        words = wait_for("the right to be gone", complaint, 30.0)
        assert "let its service account create tokenreviews.authentication.k8s.io" in words
        with pytest.raises(UnreachableError):
            hello(daemon, token)
    finally:
        api.allow_reviews()
