"""The driver as a process, with this test in the place of the kubelet."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from holdfast_daemon.csi import command
from holdfast_daemon.csi.driver import CSI_VERSION
from holdfast_daemon.csi.volumes import VolumePod, pod_of_token
from holdfast_protos import csi_pb2, csi_pb2_grpc
from holdfast_protos import plugin_registration_pb2 as registration_pb2
from holdfast_protos import plugin_registration_pb2_grpc as registration_pb2_grpc

WAIT_S = 60.0
VOLUME = f"csi-{'a' * 64}"
POD = {
    "csi.storage.k8s.io/pod.name": "moe-0-1",
    "csi.storage.k8s.io/pod.namespace": "team",
    "csi.storage.k8s.io/pod.uid": "uid-1",
    "csi.storage.k8s.io/ephemeral": "true",
}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the driver runs as root")


class Kubelet:
    """The kubelet's directory, and its calls to the driver."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registry = directory / "plugins_registry" / "holdfast.dev-reg.sock"
        self.records = directory / "records"
        self.target = directory / "pods" / "uid-1" / "volumes" / "holdfast" / "mount"
        self.target.parent.mkdir(parents=True)
        (directory / "sockets").mkdir()
        self.start()

    def start(self) -> None:
        self.driver = subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast_daemon", "csi", "--node", "n1"),
                *("--kubelet", str(self.directory), "--sockets", str(self.directory / "sockets")),
                *("--volumes", str(self.records), "--owner", str(os.geteuid())),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )

    def find(self) -> registration_pb2.PluginInfo:
        """What the driver answers at the socket that the kubelet watches for."""
        with grpc.insecure_channel(f"unix:{self.registry}") as channel:
            stub = registration_pb2_grpc.RegistrationStub(channel)
            request = registration_pb2.InfoRequest()
            return stub.GetInfo(request, timeout=WAIT_S, wait_for_ready=True)

    def register(self, error: str = "") -> None:
        with grpc.insecure_channel(f"unix:{self.registry}") as channel:
            status = registration_pb2.RegistrationStatus(plugin_registered=not error, error=error)
            stub = registration_pb2_grpc.RegistrationStub(channel)
            stub.NotifyRegistrationStatus(status, timeout=WAIT_S)

    def publish(self, context: dict[str, str], target: Path | None = None) -> None:
        with grpc.insecure_channel(f"unix:{self.find().endpoint}") as channel:
            csi_pb2_grpc.NodeStub(channel).NodePublishVolume(
                csi_pb2.NodePublishVolumeRequest(
                    volume_id=VOLUME, target_path=str(target or self.target), volume_context=context
                ),
                timeout=WAIT_S,
            )

    def unpublish(self) -> None:
        with grpc.insecure_channel(f"unix:{self.find().endpoint}") as channel:
            csi_pb2_grpc.NodeStub(channel).NodeUnpublishVolume(
                csi_pb2.NodeUnpublishVolumeRequest(volume_id=VOLUME, target_path=str(self.target)),
                timeout=WAIT_S,
            )

    def end(self, number: int) -> tuple[int, str]:
        """Exit code and last words of the driver after a signal; 0 for none."""
        if number:
            self.driver.send_signal(number)
        _, words = self.driver.communicate(timeout=WAIT_S)
        return self.driver.returncode, words


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    # Below /tmp, because the path of a socket is short.
    with tempfile.TemporaryDirectory() as directory:
        made = Kubelet(Path(directory))
        try:
            yield made
            if made.driver.poll() is None:
                made.unpublish()
        finally:
            if made.driver.poll() is None:
                made.end(signal.SIGKILL)


def test_the_kubelet_finds_the_driver_and_its_node(kubelet: Kubelet) -> None:
    found = kubelet.find()
    assert (found.type, found.name) == ("CSIPlugin", "holdfast.dev")
    assert list(found.supported_versions) == [CSI_VERSION]
    kubelet.register()
    with grpc.insecure_channel(f"unix:{found.endpoint}") as channel:
        node, who = csi_pb2_grpc.NodeStub(channel), csi_pb2_grpc.IdentityStub(channel)
        info = who.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=WAIT_S)
        assert info.name == "holdfast.dev"
        assert node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=WAIT_S).node_id == "n1"
        who.Probe(csi_pb2.ProbeRequest(), timeout=WAIT_S)
        who.GetPluginCapabilities(csi_pb2.GetPluginCapabilitiesRequest(), timeout=WAIT_S)
        node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), timeout=WAIT_S)


def test_a_pods_volume_outlives_the_driver_and_goes_when_the_kubelet_says_so(
    kubelet: Kubelet,
) -> None:
    kubelet.publish(POD)
    token = (kubelet.target / "token").read_text()
    wanted = VolumePod(namespace="team", name="moe-0-1", uid="uid-1")
    assert pod_of_token(kubelet.records, token) == wanted
    kubelet.end(signal.SIGKILL)
    kubelet.start()
    kubelet.publish(POD)
    assert (kubelet.target / "token").read_text() == token
    kubelet.unpublish()
    assert pod_of_token(kubelet.records, token) is None
    assert not kubelet.target.exists()


def test_a_volume_without_the_name_of_its_pod_is_refused(kubelet: Kubelet) -> None:
    for missing in POD:
        with pytest.raises(grpc.RpcError) as refused:
            kubelet.publish({key: value for key, value in POD.items() if key != missing})
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, missing
        assert "podInfoOnMount: true" in str(refused.value.details())


def test_a_target_that_cannot_be_made_is_an_error_with_its_reason(kubelet: Kubelet) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        kubelet.publish(POD, kubelet.target.parent / "missing" / "mount")
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "No such file or directory" in str(failed.value.details())


def test_a_driver_that_stops_takes_its_socket_from_the_kubelet(kubelet: Kubelet) -> None:
    kubelet.find()
    assert kubelet.end(signal.SIGTERM)[0] == 0
    assert not kubelet.registry.exists()


def test_a_driver_that_the_kubelet_refuses_ends_with_its_reason(kubelet: Kubelet) -> None:
    kubelet.find()
    kubelet.register("no such version")
    code, words = kubelet.end(0)
    assert code == 2
    assert "the kubelet refuses the driver: no such version" in words


@pytest.fixture
def process_untouched() -> Iterator[None]:
    """`main` sets the logs of its process and what signals do."""
    root, ending = logging.getLogger(), (signal.SIGTERM, signal.SIGINT)
    level, handlers = root.level, list(root.handlers)
    before = [signal.getsignal(number) for number in ending]
    yield
    for number, action in zip(ending, before, strict=True):
        signal.signal(number, action)
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.usefixtures("process_untouched")
def test_a_driver_that_cannot_listen_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins").touch()
    arguments = ["--node", "n1", "--kubelet", str(tmp_path), "--owner", str(os.geteuid())]
    assert command.main([*arguments, "--volumes", str(tmp_path / "records")]) == 2
    assert "plugins" in capsys.readouterr().err
