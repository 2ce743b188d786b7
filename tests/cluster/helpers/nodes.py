"""A node: a network, a mount and a PID namespace with its own containerd, kubelet and kube-proxy.

SIGKILL of the first process in the PID namespace takes all of them, every pod and the node's memory
file systems, exactly as a power cut does. What is in `disk/` survives; nothing else does.
A node has its own /run/holdfast and /dev/shm; other host paths are those of the machine.
"""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cgroups
from binaries import Binaries
from machine import ClusterError, run, wait_for
from network import Network, inside
from processes import Processes, wait_end

from holdfast_cli.local.processes import ProcessId, identify, send

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"

_MEMORY_FOLDERS = ("/run/holdfast", "/run/containerd", "/run/netns")
_DISK_FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers")
_BOOT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of a cluster."""

    number: int
    home: Path
    """Its folder: configuration, and the disk."""
    network: Network
    binaries: Binaries
    processes: Processes
    kubeconfigs: Path
    """Folder with a kubeconfig for the kubelet, and one for kube-proxy."""
    pause_archive: Path

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def disk(self) -> Path:
        """What a reboot leaves it."""
        return self.home / "disk"

    @property
    def group(self) -> str:
        """The node's control group."""
        return f"{self.network.prefix}-n{self.number}"

    @property
    def first_process(self) -> ProcessId | None:
        """The first process in the node, as this host sees it; None when the power is off."""
        outer = self.processes.find(self.name)
        if outer is None:
            return None
        with suppress(OSError, IndexError):
            path = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            return identify(int(path.read_text().split()[0]))
        return None

    def boot(self) -> None:
        """Power on; returns when containerd can be used."""
        if self.first_process is not None:
            raise ClusterError(f"{self.name} is running already")
        self.processes.end(self.name)
        cgroups.remove(self.group)  # what a reboot forgets
        cgroups.create(self.group)
        self._write_files()
        space = ("--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc")
        init = ("unshare", *space, "--kill-child", "bash", str(self.home / "init.sh"))
        self.processes.start(self.name, inside(self.network.namespace_of(self.number), *init))
        wait_for(f"containerd of {self.name}", self._import_pause, _BOOT_S)

    def kill(self) -> None:
        """Cut the power: SIGKILL to the node's first process; returns when all of it is gone."""
        first = self.first_process
        outer = self.processes.find(self.name)
        if first is None or outer is None:
            raise ClusterError(f"{self.name} is off already")
        send(first, signal.SIGKILL)
        wait_end(outer)  # ends after the last process of the namespace

    def command(self, *words: str | Path) -> list[str]:
        """A command line that runs in the node's namespaces."""
        first = self.first_process
        if first is None:
            raise ClusterError(f"{self.name} is off")
        return ["nsenter", "-t", str(first.pid), "-n", "-m", "-p", *map(str, words)]

    def path(self, path: str) -> Path:
        """Where this host finds a file of the node's own file systems."""
        first = self.first_process
        if first is None:
            raise ClusterError(f"{self.name} is off")
        return Path(f"/proc/{first.pid}/root") / path.lstrip("/")

    def load(self, archive: Path) -> None:
        """Import an OCI archive's images, in the name space of Kubernetes."""
        ctr = (self.binaries.find("ctr"), "-a", CONTAINERD_SOCKET, "-n", "k8s.io")
        run(*self.command(*ctr, "images", "import", "--local", archive))

    def _import_pause(self) -> bool:
        with suppress(ClusterError):
            self.load(self.pause_archive)
            return True
        return False

    def _write_files(self) -> None:
        (self.home / "cni").mkdir(parents=True, exist_ok=True)
        (self.home / "cni/10-bridge.conflist").write_text(json.dumps(self._cni()))
        (self.home / "kubelet.json").write_text(json.dumps(self._kubelet()))
        (self.home / "containerd.toml").write_text(self._containerd())
        (self.home / "init.sh").write_text(self._init())

    def _cni(self) -> dict[str, object]:
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/containerd/addresses",  # in memory: a reboot forgets them
                "ranges": [[{"subnet": self.network.pods_of(self.number)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": self.name, "plugins": [bridge, ports]}

    def _kubelet(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "clusterDNS": [self.network.control_address],
            "clusterDomain": "cluster.local",
            "resolvConf": "",  # the machine's search domains are none of the pods' business
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "evictionHard": {"memory.available": "100Mi"},
            # Images come from nowhere but `load`: the kubelet must not delete them on a full disk.
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        }

    def _containerd(self) -> str:
        # restrict_oom_score_adj: where CAP_SYS_RESOURCE is missing, runc may not lower a score and
        # dies with "can't get final child's PID from pipe: EOF".
        return f"""\
version = 3
root = "{self.disk}/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "{self.home}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""

    def _init(self) -> str:
        find, logs = self.binaries.find, self.processes.logs
        proxy = "--conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 "
        proxy += "--conntrack-tcp-timeout-close-wait=0"  # the machine's limits are not ours to set
        return f"""\
# Restarts what ends, as an init system does, and reaps orphans.
keep() {{ local log=$1; shift; while :; do "$@" >> "$log" 2>&1; sleep 1; done; }}
mount --make-rshared /
for folder in {" ".join(_MEMORY_FOLDERS)}; do
  mkdir -p $folder; mount -t tmpfs -o mode=755 node $folder
done
mount -t tmpfs -o size=4g shm /dev/shm
for folder in {" ".join(_DISK_FOLDERS)}; do
  mkdir -p $folder {self.disk}$folder; mount --bind {self.disk}$folder $folder
done
nft flush ruleset
ip link del cni0 2> /dev/null
keep {logs}/{self.name}-containerd.log {find("containerd")} -c {self.home}/containerd.toml &
until [ -S {CONTAINERD_SOCKET} ]; do sleep 0.1; done
keep {logs}/{self.name}-kube-proxy.log {find("kube-proxy")} --proxy-mode=nftables \\
  --kubeconfig {self.kubeconfigs}/kube-proxy --hostname-override {self.name} \\
  --cluster-cidr {self.network.pods} {proxy} &
keep {logs}/{self.name}-kubelet.log {find("kubelet")} --config {self.home}/kubelet.json \\
  --kubeconfig {self.kubeconfigs}/{self.name} --hostname-override {self.name} \\
  --node-ip {self.network.address_of(self.number)} &
wait
"""

    def erase(self) -> None:
        """Delete what a node that is off leaves behind."""
        cgroups.remove(self.group)
        shutil.rmtree(self.home, ignore_errors=True)
