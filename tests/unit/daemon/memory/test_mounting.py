"""The tmpfs of a node: what is decided, and what the kernel makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_core.errors import StorageError
from holdfast_daemon.memory.kernel_mounts import Mount, parse_mounts
from holdfast_daemon.memory.mounting import MountAction, MountedMemory, decide, main

MIB = 1 << 20
PATH = Path("/run/holdfast/memory")
ROOT = Mount(point=Path("/"), file_system="overlay", shared=False)
VOLUME = Mount(point=Path("/run/holdfast"), file_system="ext4", shared=True)
PRIVATE = Mount(point=Path("/run/holdfast"), file_system="ext4", shared=False)
THERE = Mount(point=PATH, file_system="tmpfs", shared=True)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Where the kernel has huge pages for a tmpfs."""
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts are made by root")


def test_mountinfo_is_read_with_its_optional_fields_and_escapes() -> None:
    text = (
        "22 1 0:20 / / rw,relatime - overlay overlay rw,lowerdir=a\n"
        "23 22 0:21 / /run/a\\040b rw shared:5 master:2 - tmpfs holdfast rw,size=8k\n"
        "24 22 0:22 / /slave rw master:7 - ext4 /dev/sda1 rw\n"
    )
    assert parse_mounts(text) == [
        ROOT,
        Mount(point=Path("/run/a b"), file_system="tmpfs", shared=True),
        Mount(point=Path("/slave"), file_system="ext4", shared=False),
    ]


@pytest.mark.parametrize(
    ("held", "wanted", "action", "warning"),
    [
        (None, 8 * MIB, MountAction.MOUNT, False),
        (MountedMemory(size_bytes=8 * MIB, used_bytes=MIB), 8 * MIB, MountAction.KEEP, False),
        (MountedMemory(size_bytes=8 * MIB, used_bytes=MIB), 8 * MIB - 1, MountAction.KEEP, False),
        (MountedMemory(size_bytes=8 * MIB, used_bytes=MIB), 9 * MIB, MountAction.REMOUNT, False),
        (MountedMemory(size_bytes=8 * MIB, used_bytes=MIB), MIB, MountAction.REMOUNT, False),
        (MountedMemory(size_bytes=8 * MIB, used_bytes=2 * MIB), MIB, MountAction.KEEP, True),
    ],
)
def test_what_is_held_is_never_given_up_for_a_size(
    held: MountedMemory | None, wanted: int, action: MountAction, warning: bool
) -> None:
    mounts = [ROOT, VOLUME, *([THERE] if held else [])]
    decision = decide(PATH, mounts, held, wanted)
    assert (decision.action, decision.warning) == (action, warning)


def test_a_refusal_to_shrink_names_both_numbers() -> None:
    held = MountedMemory(size_bytes=8 * MIB, used_bytes=2 * MIB)
    reason = decide(PATH, [ROOT, VOLUME, THERE], held, MIB).reason
    assert f"{2 * MIB} are in use, more than the {MIB} of --size" in reason


@pytest.mark.parametrize("mounts", [[ROOT], [ROOT, PRIVATE]])
def test_a_mount_that_would_stay_in_the_container_is_refused(mounts: list[Mount]) -> None:
    with pytest.raises(StorageError, match=r"is not shared; .* mountPropagation: Bidirectional"):
        decide(PATH, mounts, None, MIB)


def test_another_file_system_is_not_taken_for_memory() -> None:
    disk = Mount(point=PATH, file_system="xfs", shared=True)
    with pytest.raises(StorageError, match="is a xfs, not a tmpfs"):
        decide(PATH, [ROOT, VOLUME, disk], MountedMemory(size_bytes=MIB, used_bytes=0), MIB)


class Namespace:
    """A mount namespace, held open by a process, with a shared mount at `volume`."""

    def __init__(self, volume: Path, propagation: str = "shared") -> None:
        self.volume, self.memory = volume, volume / "memory"
        script = f"mount -t tmpfs volume {volume} && mount --make-{propagation} {volume}"
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"{script} && echo up && cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", *command],
            check=False,
            capture_output=True,
            text=True,
        )

    def mount(self, *arguments: str, drop: str = "") -> subprocess.CompletedProcess[str]:
        """The command, without the capabilities in `drop`."""
        command = [sys.executable, "-m", "holdfast_daemon", "mount", "--path", str(self.memory)]
        prefix = ["setpriv", f"--bounding-set=-{drop}", f"--inh-caps=-{drop}"] if drop else []
        return self.run(*prefix, *command, *arguments)

    def shown(self, what: str) -> str:
        return self.run("findmnt", "-n", "-o", what, str(self.memory)).stdout.strip()

    def size_bytes(self) -> int:
        return int(self.run("stat", "-f", "-c", "%b", str(self.memory)).stdout) * 4096

    def close(self) -> None:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(10)
        self._holder.stdout.close()


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    made = Namespace(tmp_path)
    yield made
    made.close()


@root_only
def test_memory_is_mounted_once_and_belongs_to_the_daemon_alone(namespace: Namespace) -> None:
    sockets = namespace.volume / "sockets"
    first = namespace.mount("--size", str(8 * MIB), "--sockets", str(sockets))
    assert (first.returncode, "nothing is mounted" in first.stderr) == (0, True), first.stderr
    options = set(namespace.shown("OPTIONS").split(","))
    wanted = {"nosuid", "nodev", "noexec", "rw"}
    assert wanted | ({"huge=within_size"} if HUGE_PAGES.exists() else set()) <= options
    assert namespace.shown("FSTYPE") == "tmpfs"
    owners = namespace.run("stat", "-c", "%u:%g %a", str(namespace.memory), str(sockets)).stdout
    assert owners.split("\n")[:2] == ["65532:65532 700", "65532:65532 755"]
    namespace.run("sh", "-c", f"echo kept > {namespace.memory}/file")

    again = namespace.mount("--size", str(8 * MIB), "--sockets", str(sockets))
    assert (again.returncode, "already" in again.stderr) == (0, True), again.stderr
    assert namespace.run("cat", f"{namespace.memory}/file").stdout == "kept\n"
    mounts = namespace.run("cat", "/proc/self/mountinfo").stdout
    assert mounts.count(f" {namespace.memory} ") == 1


@root_only
def test_the_size_follows_what_is_asked_for_as_far_as_what_is_held_allows(
    namespace: Namespace,
) -> None:
    namespace.mount("--size", str(8 * MIB))
    namespace.run("dd", "if=/dev/zero", f"of={namespace.memory}/arena", "bs=1M", "count=4")
    assert namespace.mount("--size", str(16 * MIB)).returncode == 0
    assert namespace.size_bytes() == 16 * MIB
    assert {"nosuid", "nodev", "noexec"} <= set(namespace.shown("OPTIONS").split(","))
    assert namespace.mount("--size", str(6 * MIB)).returncode == 0
    assert namespace.size_bytes() == 6 * MIB
    refused = namespace.mount("--size", str(2 * MIB))
    assert (refused.returncode, "warning" in refused.stderr) == (0, True)
    assert namespace.size_bytes() == 6 * MIB


@root_only
def test_what_another_user_left_is_given_to_the_daemon(namespace: Namespace) -> None:
    namespace.mount("--size", str(MIB), "--owner", "0")
    namespace.run("mkdir", "-p", f"{namespace.memory}/jobs/a")
    namespace.run("touch", f"{namespace.memory}/jobs/a/arena")
    assert namespace.mount("--size", str(MIB)).returncode == 0
    listed = namespace.run("find", str(namespace.memory), "-printf", "%U\n").stdout.split()
    assert listed == ["65532"] * 4


@root_only
def test_without_the_right_to_mount_the_error_names_what_to_grant(namespace: Namespace) -> None:
    failed = namespace.mount("--size", str(MIB), drop="sys_admin")
    assert failed.returncode == 2
    assert "privileged container" in failed.stderr


@root_only
def test_without_propagation_the_error_names_what_to_set(tmp_path: Path) -> None:
    namespace = Namespace(tmp_path, "private")
    try:
        failed = namespace.mount("--size", str(MIB))
        assert failed.returncode == 2
        assert "mountPropagation: Bidirectional" in failed.stderr
    finally:
        namespace.close()


def test_a_path_that_cannot_be_made_is_an_error_and_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--path", str(tmp_path / "file" / "memory"), "--size", "4096"]) == 2
    assert "Not a directory" in capsys.readouterr().err
