"""The wires of a cluster: a bridge in a namespace of its own, a link to each node and to the host.

Addresses of cluster `slot`: nodes 10.99.<slot>.<node>, the control plane .254, this host .253; pods
10.<244+slot>.<node>.0/24; services 10.96.0.0/16, which exist inside the cluster only. The host has
a route to the nodes and the pods, so that tests and `kubectl` reach them from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from machine import run, wait_for

_GONE_S = 120.0
"""The kernel takes namespaces away one after the other, those of all clusters' pods too."""

SERVICES = "10.96.0.0/16"
SLOTS = 8
NODES_MAX = 100
_NAMESPACES = Path("/var/run/netns")


@dataclass(frozen=True, slots=True)
class Network:
    """Names and addresses of one cluster's network, and what makes and cuts it."""

    slot: int

    @property
    def prefix(self) -> str:
        """Begins the name of each namespace, link and control group of this cluster."""
        return f"hf{self.slot}"

    @property
    def control_plane(self) -> str:
        """The control plane's namespace."""
        return f"{self.prefix}-cp"

    @property
    def control_address(self) -> str:
        return f"10.99.{self.slot}.254"

    @property
    def host_address(self) -> str:
        return f"10.99.{self.slot}.253"

    @property
    def pods(self) -> str:
        """The network of all pods."""
        return f"10.{244 + self.slot}.0.0/16"

    def namespace_of(self, node: int) -> str:
        return f"{self.prefix}-n{node}"

    def address_of(self, node: int) -> str:
        return f"10.99.{self.slot}.{node}"

    def pods_of(self, node: int) -> str:
        """The network of the pods on a node."""
        return f"10.{244 + self.slot}.{node}.0/24"

    def create(self, nodes: int) -> None:
        """Make everything, for nodes 1 to `nodes`."""
        self._make_namespace(self.control_plane)
        run(*self._ip("link", "add", "br0", "type", "bridge"))
        run(*self._ip("addr", "add", f"{self.control_address}/24", "dev", "br0"))
        run(*self._ip("link", "set", "br0", "up"))
        self._connect_host()
        for node in range(1, nodes + 1):
            self._connect_node(node)
        for node in range(1, nodes + 1):
            via = ("via", self.address_of(node))
            run(*self._ip("route", "add", self.pods_of(node), *via))
            for other in range(1, nodes + 1):
                if other != node:
                    space = self.namespace_of(other)
                    run("ip", "-n", space, "route", "add", self.pods_of(node), *via)

    def destroy(self) -> None:
        """Delete everything; what is not there is no error."""
        for name in _namespaces():
            if name.startswith(f"{self.prefix}-"):
                run("ip", "netns", "del", name)
        # The kernel takes a namespace's links away some time after its name.
        wait_for(f"{self._host_link} to go", lambda: not _is_link(self._host_link), _GONE_S)

    def exists(self) -> bool:
        """Whether anything of it is there."""
        return any(name.startswith(f"{self.prefix}-") for name in _namespaces())

    def cut(self, node: int) -> None:
        """Take the node's link down: it reaches no node, and no node reaches it."""
        run(*self._ip("link", "set", self._link_of(node), "down"))

    def heal(self, node: int) -> None:
        """Take the node's link up again."""
        run(*self._ip("link", "set", self._link_of(node), "up"))

    def _make_namespace(self, name: str) -> None:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run(*inside(name, "sysctl", "-qw", "net.ipv4.ip_forward=1"))

    @property
    def _host_link(self) -> str:
        return f"{self.prefix}h"

    def _connect_host(self) -> None:
        link = self._host_link
        end = ("peer", "name", "host", "netns", self.control_plane)
        run("ip", "link", "add", link, "type", "veth", *end)
        run(*self._ip("link", "set", "host", "master", "br0", "up"))
        run("ip", "addr", "add", f"{self.host_address}/24", "dev", link)
        run("ip", "link", "set", link, "up")
        run("ip", "route", "add", self.pods, "via", self.control_address)

    def _connect_node(self, node: int) -> None:
        space = self.namespace_of(node)
        self._make_namespace(space)
        end = ("peer", "name", "eth0", "netns", space)
        run(*self._ip("link", "add", self._link_of(node), "type", "veth", *end))
        run(*self._ip("link", "set", self._link_of(node), "master", "br0", "up"))
        run("ip", "-n", space, "addr", "add", f"{self.address_of(node)}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "route", "add", "default", "via", self.control_address)

    def _link_of(self, node: int) -> str:
        return f"n{node}"

    def _ip(self, *words: str) -> tuple[str, ...]:
        return ("ip", "-n", self.control_plane, *words)


def inside(namespace: str, *command: str | Path) -> list[str]:
    """A command line that runs in a network namespace."""
    return ["nsenter", f"--net={_NAMESPACES / namespace}", *map(str, command)]


def _namespaces() -> list[str]:
    return sorted(p.name for p in _NAMESPACES.iterdir()) if _NAMESPACES.exists() else []


def _is_link(name: str) -> bool:
    return Path("/sys/class/net", name).exists()
