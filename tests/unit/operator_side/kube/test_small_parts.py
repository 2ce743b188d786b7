"""Options, metrics, health, endpoints, daemons' pods and times."""

from __future__ import annotations

import asyncio

import pytest
from fake_api import FakeApi

from holdfast_core.suspect_nodes import SuspectPolicy
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.endpoints import Endpoints, endpoint_slice
from holdfast_operator.kube.client.resources import ENDPOINT_SLICES, JOBS, NODES, PODS
from holdfast_operator.kube.cluster.daemons import DaemonPod, Daemons, read_daemon, without_daemon
from holdfast_operator.kube.cluster.nodes import KubeNode
from holdfast_operator.kube.health import LOOK_S_MAX, WATCH_S_MAX, Health
from holdfast_operator.kube.metrics import DEFINITIONS, OperatorMetrics
from holdfast_operator.kube.options import parse
from holdfast_operator.reconciler.observe.timestamps import micro_timestamp, seconds_of, timestamp
from holdfast_operator.reconciler.observe.views import NodeView

POD = {"POD_NAME": "op-1", "POD_NAMESPACE": "hf", "POD_IP": "10.0.0.1"}


def test_options_default_to_the_pods_environment_and_flags_override_it() -> None:
    options = parse([], POD)
    assert (options.identity, options.namespace, options.address) == ("op-1", "hf", "10.0.0.1")
    assert options.control_port == 7700
    assert options.notice == ()
    assert parse(["--notice", "a/b", "--notice", "C"], POD).notice == ("a/b", "C")
    assert parse(["--address", "10.0.0.2"], POD).address == "10.0.0.2"


def test_storage_locations_are_parsed_and_an_invalid_one_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse([], POD).storage_locations == ()
    given = ["--storage-location", '{"prefix": "s3://team-{namespace}"}']
    (location,) = parse(given, POD).storage_locations
    assert location.prefix == "s3://team-{namespace}"
    with pytest.raises(SystemExit):
        parse(["--storage-location", '{"prefix": "memory://x"}'], POD)
    assert "not a valid path or URI for copies" in capsys.readouterr().err


def test_suspect_nodes_need_their_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--node-record", "r"], POD).suspect_nodes is SuspectPolicy.NONE
    given = ["--suspect-nodes", "Cordon"]
    assert parse([*given, "--node-record", "r"], POD).suspect_nodes is SuspectPolicy.CORDON
    with pytest.raises(SystemExit):
        parse(given, POD)
    assert "give --node-record as well" in capsys.readouterr().err


def test_a_missing_option_is_an_error_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([], {"POD_NAME": "op-1"})
    assert "--address is missing: give it, or set POD_IP" in capsys.readouterr().err


def test_paths_of_resources_are_those_of_the_api() -> None:
    assert PODS.path("ns", "p") == "/api/v1/namespaces/ns/pods/p"
    assert PODS.path() == "/api/v1/pods"
    assert NODES.path("ignored", "n0") == "/api/v1/nodes/n0"
    group = "/apis/holdfast.dev/v1alpha1/namespaces/ns/moetrainingjobs"
    assert JOBS.path("ns", "j", "status") == f"{group}/j/status"


def test_every_defined_metric_can_be_written_and_is_exposed_by_its_name() -> None:
    metrics = OperatorMetrics()
    for each in DEFINITIONS:
        labels = dict.fromkeys(each.labels, "x")
        match each.type.value:
            case "counter":
                metrics.add(each.name, **labels)
            case "gauge":
                metrics.set(each.name, 1.0, **labels)
            case _:
                metrics.observe(each.name, 1.0)
        suffix = "_count" if each.buckets else ""
        found = metrics.registry.get_sample_value(f"{each.exposed_name}{suffix}", labels)
        assert found == 1.0, each.name


def test_series_of_jobs_end_with_them_and_those_that_stay_have_no_gap() -> None:
    metrics = OperatorMetrics()

    def shown() -> dict[tuple[str, ...], float]:
        (found,) = (each for each in metrics.registry.collect() if each.name.endswith("job_phase"))
        return {tuple(each.labels.values()): each.value for each in found.samples}

    first, second = ("a", "llm", "Running"), ("a", "other", "Waiting")
    metrics.replace_all("job_phase", {first: 1.0, second: 1.0})
    kept = metrics._collectors["job_phase"].labels(*second)
    metrics.replace_all("job_phase", {("a", "llm", "Failed"): 1.0, second: 1.0})
    assert shown() == {("a", "llm", "Failed"): 1.0, second: 1.0}
    assert metrics._collectors["job_phase"].labels(*second) is kept
    metrics.replace_all("job_phase", {})
    assert shown() == {}


def daemon_pod(node: str) -> DaemonPod:
    return DaemonPod(node=node, uid=node, containers=(("c", True),), ending=False)


@pytest.mark.parametrize(
    ("pods", "connected", "gone", "missing"),
    [
        ("abc", "abc", "", ""),
        ("abc", "ab", "", "c"),  # its image cannot be pulled, or it does not reach the operator
        ("ab", "ab", "c", "c"),  # it was connected, and its pod has been deleted
        ("ab", "ab", "", ""),  # no daemon is wanted on c
        ("abd", "ab", "", ""),  # d has left the cluster
        ("", "", "d", ""),
        ("", "abc", "", ""),
    ],
)
def test_a_node_lacks_a_daemon_that_it_should_have(
    pods: str, connected: str, gone: str, missing: str
) -> None:
    known = {name: NodeView(name=name, connected=True) for name in connected}
    known |= {name: NodeView(name=name, connected=False) for name in gone}
    nodes = [KubeNode(name=name) for name in "abc"]
    assert without_daemon(nodes, map(daemon_pod, pods), known) == set(missing)


def test_a_replica_that_waits_for_the_lease_is_well_and_ready() -> None:
    waiting = Health(leads=False, ready=False, oldest_look_s=1e6)
    assert (waiting.unwell(), waiting.not_ready()) == ("", "")


def test_a_leader_is_ready_once_its_first_lists_have_arrived() -> None:
    assert "have not arrived yet" in Health(leads=True, ready=False).not_ready()
    assert Health(leads=True, ready=True).not_ready() == ""


def test_a_hanging_job_or_watch_makes_a_leader_unwell() -> None:
    assert "looked at" in Health(leads=True, ready=True, oldest_look_s=LOOK_S_MAX + 1).unwell()
    silent = Health(leads=True, ready=True, watches_s=(("pods", WATCH_S_MAX + 1),))
    assert "watch of pods" in silent.unwell()


def test_the_endpoints_are_written_only_when_they_do_not_name_the_leader() -> None:
    api = FakeApi()

    def point(address: str) -> None:
        wanted = endpoint_slice("holdfast-control", "hf", address, 7700)
        asyncio.run(Endpoints(api, wanted).point_here())

    point("10.0.0.1")
    point("10.0.0.1")
    found: Object = api.objects[(ENDPOINT_SLICES.plural, "hf", "holdfast-control")]
    assert found["metadata"]["labels"]["kubernetes.io/service-name"] == "holdfast-control"
    assert found["endpoints"][0]["addresses"] == ["10.0.0.1"]
    point("10.0.0.2")
    found = api.objects[(ENDPOINT_SLICES.plural, "hf", "holdfast-control")]
    assert found["endpoints"][0]["addresses"] == ["10.0.0.2"]
    verbs = [verb for verb, _, _ in api.requests]
    assert verbs == ["get", "create", "get", "get", "update"]


def test_an_ipv6_address_gets_an_ipv6_slice() -> None:
    assert endpoint_slice("s", "hf", "fd00::1", 7700)["addressType"] == "IPv6"


def daemon(
    container: str, *, running: bool = True, uid: str = "u", ending: bool = False
) -> DaemonPod:
    state: Object = {"running": {}} if running else {"terminated": {}}
    metadata = {"name": "d", "namespace": "hf", "uid": uid}
    if ending:
        metadata["deletionTimestamp"] = "2023-11-14T22:13:20Z"
    return read_daemon(
        {
            "metadata": metadata,
            "spec": {"nodeName": "n0"},
            "status": {"containerStatuses": [{"containerID": container, "state": state}]},
        }
    )


def test_a_restarted_daemon_is_about_to_return_and_a_running_one_is_not() -> None:
    now = [1.0]
    daemons = Daemons(lambda: now[0])
    first = daemon("c1")
    daemons.change(None, first)
    assert daemon("c1") == first
    assert not daemons.returns("n0", heartbeat_at=0.0)  # it may have run for long
    now[0] = 5.0
    daemons.change(first, daemon("c1", running=False))
    assert daemons.returns("n0", heartbeat_at=4.9)
    assert not daemons.returns("n0", heartbeat_at=5.1)
    assert not daemons.returns("n1", heartbeat_at=0.0)


def test_a_daemon_with_a_new_pod_is_about_to_return() -> None:
    daemons = Daemons(lambda: 3.0)
    daemons.change(None, daemon("c1", running=False))
    assert daemons.returns("n0", heartbeat_at=2.0)


def test_a_daemon_whose_pod_is_being_ended_returns_even_if_its_end_is_reported_late() -> None:
    now = [1.0]
    daemons = Daemons(lambda: now[0])
    first, ending = daemon("c1"), daemon("c1", ending=True)
    daemons.change(first, ending)
    now[0] = 2.0  # it beats once more, and ends; the kubelet has not reported it yet
    assert daemons.returns("n0", heartbeat_at=2.0)
    now[0] = 9.0
    daemons.change(ending, None)
    assert daemons.returns("n0", heartbeat_at=2.0)
    assert not daemons.returns("n0", heartbeat_at=9.5)


def test_a_daemon_is_about_to_return_while_one_of_its_pods_is_being_ended() -> None:
    daemons = Daemons(lambda: 0.0)
    first, second = daemon("c1", ending=True), daemon("c2", uid="v", ending=True)
    daemons.change(None, first)
    daemons.change(None, second)
    daemons.change(first, None)
    assert daemons.returns("n0", heartbeat_at=1.0)
    daemons.change(second, None)
    assert not daemons.returns("n0", heartbeat_at=1.0)


def test_times_are_written_in_the_apis_format_and_read_back() -> None:
    assert timestamp(1_700_000_000.9) == "2023-11-14T22:13:20Z"
    assert micro_timestamp(1_700_000_000.0) == "2023-11-14T22:13:20.000000Z"
    assert seconds_of("2023-11-14T22:13:20Z") == 1_700_000_000.0
    assert seconds_of("soon") is None
