"""Cluster of a chaos run: daemons on small tmpfs, and servers beside them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from daemons import DaemonProcess
from faulty_storage import Access
from harness import RawCluster
from redis_process import RedisServer
from versitygw import S3Server

TMPFS_BYTES = 24 << 20


@dataclass(kw_only=True, slots=True)
class Surroundings:
    """Things that a run can break besides the processes that it starts."""

    mounts: bool = False
    """Whether small tmpfs can be mounted."""
    redis: RedisServer | None = None
    objects: S3Server | None = None
    certificates: Path | None = None
    """Directory of a CA, with a directory of each role's files."""
    wrong: dict[str, Path] = field(default_factory=dict)
    """Directories of certificates of daemons that must be refused, by why."""

    @property
    def present(self) -> frozenset[str]:
        """Requirements of kinds of faults that are met here; see `chaos_kinds.Kind.needs`."""
        there = {"mount": self.mounts, "redis": self.redis, "identity": self.certificates}
        return frozenset(name for name, found in there.items() if found)

    def end(self) -> None:
        """Stop the servers."""
        if self.redis is not None:
            self.redis.kill()
        if self.objects is not None:
            self.objects.stop()


def may_mount(directory: Path) -> bool:
    """Whether small tmpfs can be mounted here."""
    return _mount(directory) and _umount(directory)


def _mount(directory: Path) -> bool:
    directory.mkdir(parents=True, exist_ok=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
    return subprocess.run(mounting, check=False, capture_output=True).returncode == 0


def _umount(directory: Path) -> bool:
    return subprocess.run(["umount", "--lazy", str(directory)], check=False).returncode == 0


@dataclass(slots=True)
class SmallCluster(RawCluster):
    """A cluster in which each node's memory is a tmpfs of its own, where one can be mounted."""

    mounts: bool = False
    access: Access | None = None
    """How daemons reach the durable tier."""
    mounted: list[Path] = field(default_factory=list)

    def make_node(self, *arguments: str, root: Path | None = None) -> DaemonProcess:
        daemon = RawCluster.make_node(self, *arguments, root=root)
        daemon.access = self.access
        self.mount(daemon.root)
        return daemon

    def mount(self, root: Path) -> None:
        """Mount a small tmpfs at `root`, where that is possible."""
        if self.mounts and _mount(root):
            self.mounted.append(root)

    def unmount(self, root: Path) -> None:
        if root in self.mounted:
            self.mounted.remove(root)
            _umount(root)

    def __exit__(self, *exception: object) -> None:
        for daemon in self.daemons.values():
            daemon.end()
        for root in list(self.mounted):
            self.unmount(root)
        RawCluster.__exit__(self, *exception)
