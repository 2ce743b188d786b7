"""Volumes of pods: what they hold, whose they are, and what the kernel makes of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_daemon.csi.volumes import VolumePod, Volumes, pod_of_token
from holdfast_daemon.memory.kernel_mounts import current_mounts, mount_at, unmount

VOLUME, OTHER = f"csi-{'a' * 64}", f"csi-{'b' * 64}"
POD = VolumePod(namespace="team", name="moe-0-1", uid="uid-1")
OTHER_POD = VolumePod(namespace="other", name="moe-0-1", uid="uid-2")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts are made by root")


class Node:
    """A kubelet's directories, the daemon's sockets, and the volumes between them."""

    def __init__(self, directory: Path) -> None:
        self.records, self.sockets = directory / "records", directory / "sockets"
        self.pods = directory / "pods"
        self.sockets.mkdir()
        self.listen()
        self.volumes = self.again()

    def again(self) -> Volumes:
        """What another process of the driver has."""
        return Volumes(self.records, self.sockets, self.pods, os.geteuid())

    def listen(self) -> None:
        """Listen as a daemon that starts does."""
        path = self.sockets / "daemon.sock"
        path.unlink(missing_ok=True)
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()

    def target(self, pod: VolumePod) -> Path:
        """Where the kubelet wants the pod's volume; it makes the parent."""
        path = self.pods / pod.uid / "volumes" / "kubernetes.io~csi" / "holdfast" / "mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, volume: str = VOLUME, pod: VolumePod = POD) -> str:
        """Publish; returns the token that the pod sees."""
        self.volumes.publish(volume, self.target(pod), pod)
        return (self.target(pod) / "token").read_text()

    def connect(self, pod: VolumePod) -> None:
        """Connect to the daemon as the pod does; raises when it cannot."""
        place = os.open(self.target(pod) / "sockets", os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as trainer:
                trainer.connect(f"/proc/self/fd/{place}/daemon.sock")
        finally:
            os.close(place)

    def clear(self) -> None:
        for pod in (POD, OTHER_POD):
            for path in (self.target(pod) / "sockets", self.target(pod)):
                while mount_at(path, current_mounts()):
                    unmount(path)
        self.listening.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    try:
        yield made
    finally:
        made.clear()


def test_a_pod_finds_the_sockets_and_a_token_that_names_it(node: Node) -> None:
    token = node.publish()
    node.connect(POD)
    assert pod_of_token(node.records, token) == POD


def test_each_volume_has_a_token_of_its_own(node: Node) -> None:
    tokens = node.publish(), node.publish(OTHER, OTHER_POD)
    assert [pod_of_token(node.records, token) for token in tokens] == [POD, OTHER_POD]
    exchanged = tokens[0].replace(VOLUME, OTHER)
    assert pod_of_token(node.records, exchanged) is None


def test_a_pod_cannot_write_into_its_volume(node: Node) -> None:
    node.publish()
    for path in (node.target(POD) / "token", node.target(POD) / "sockets" / "daemon.sock"):
        with pytest.raises(OSError, match="Read-only file system"):
            path.unlink()


def test_a_volume_shows_the_sockets_of_a_daemon_that_started_again(node: Node) -> None:
    node.publish()
    node.listening.close()
    node.listen()
    node.connect(POD)


def test_a_call_that_is_repeated_changes_nothing(node: Node) -> None:
    token = node.publish()
    node.volumes = node.again()
    assert node.publish() == token
    points = [mount.point for mount in current_mounts()]
    assert points.count(node.target(POD)) == 1


@pytest.mark.parametrize("lost", ["record", "sockets"])
def test_what_a_driver_left_half_made_is_made_anew(node: Node, lost: str) -> None:
    before = node.publish()
    if lost == "record":
        (node.records / VOLUME).unlink()
    else:
        unmount(node.target(POD) / "sockets")
    token = node.publish()
    assert pod_of_token(node.records, token) == POD
    assert pod_of_token(node.records, before) is None
    assert (node.target(POD) / "sockets" / "daemon.sock").exists()


def test_the_token_of_a_removed_volume_proves_nothing(node: Node) -> None:
    token = node.publish()
    node.volumes.unpublish(VOLUME, node.target(POD))
    assert pod_of_token(node.records, token) is None
    assert not node.target(POD).exists()
    assert (node.sockets / "daemon.sock").exists()
    node.volumes.unpublish(VOLUME, node.target(POD))


def test_nothing_is_mounted_into_the_directory_of_the_sockets(node: Node, tmp_path: Path) -> None:
    before = {mount.point for mount in current_mounts()}
    node.publish()
    made = {mount.point for mount in current_mounts()} - before
    # Other processes mount as well, elsewhere; what is made here lies below this test's directory.
    assert {point for point in made if point.is_relative_to(tmp_path)} == {
        node.target(POD),
        node.target(POD) / "sockets",
    }


def test_records_are_the_daemons_alone_and_hold_no_token(node: Node) -> None:
    token = node.publish()
    assert node.records.stat().st_mode & 0o777 == 0o700
    assert token.encode() not in (node.records / VOLUME).read_bytes()


@pytest.mark.parametrize("volume", ["", "pvc-1", "csi-", f"../{VOLUME}", f"{VOLUME}/x"])
def test_an_id_that_the_kubelet_does_not_give_is_refused(node: Node, volume: str) -> None:
    with pytest.raises(InvalidJobError, match="volume id"):
        node.volumes.publish(volume, node.target(POD), POD)


def test_a_target_outside_the_pods_directory_is_refused(node: Node, tmp_path: Path) -> None:
    for target in (tmp_path / "etc", node.target(OTHER_POD), node.pods / POD.uid / ".." / "x"):
        with pytest.raises(InvalidJobError, match="target path"):
            node.volumes.publish(VOLUME, target, POD)
    with pytest.raises(InvalidJobError, match="target path"):
        node.volumes.unpublish(VOLUME, tmp_path / "etc")


@pytest.mark.parametrize(
    "token",
    ["", "volume", "volume.", f"volume.{VOLUME}", f"volume.{VOLUME}.", "a.b.c", "volume.../x.y"],
)
def test_made_up_tokens_name_no_pod(node: Node, token: str) -> None:
    node.publish()
    assert pod_of_token(node.records, token) is None


def test_a_record_that_cannot_be_read_names_no_pod(node: Node) -> None:
    token = node.publish()
    (node.records / VOLUME).write_bytes(b"{")
    assert pod_of_token(node.records, token) is None
