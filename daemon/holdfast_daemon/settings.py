"""The daemon's settings: validated on construction, given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import InvalidJobError

SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonSettings:
    """What one daemon is told when it starts."""

    root: Path
    """Directory on the node's dedicated tmpfs; everything the daemon keeps lies below it."""
    node: str
    """Name of the node, unique in the cluster."""
    host: str = "127.0.0.1"
    """Address that peers reach this node at; the peer and bulk services listen on it."""
    peer_port: int = 0
    """Port of the peer service; 0 lets the kernel choose."""
    bulk_port: int = 0
    """Port of the bulk service; 0 lets the kernel choose."""
    control: str = ""
    """`host:port` of the control loop. Empty: the daemon serves what it has, and waits."""
    budget_bytes: int = 4 << 30
    """Memory for arenas and parity."""
    metrics_host: str = ""
    """Where /metrics and the health endpoints listen; `host` when empty."""
    metrics_port: int | None = None
    """None: no endpoints. 0 lets the kernel choose."""
    redis_url: str = ""
    """Catalogue shared by many readers; in this daemon's memory when empty."""
    threads: int = 4
    """For background effects of all jobs together."""
    scrub_interval_s: float = 600.0
    """Everything held is verified this often."""
    scrub_rate_bytes_s: float = 256e6
    """Bytes that the scrub verifies in a second at most."""

    def __post_init__(self) -> None:
        longest = len(str(self.root / "daemon.sock").encode())
        if longest > SOCKET_PATH_BYTES_MAX:
            raise InvalidJobError(
                f"--root {self.root} is too long: {longest} bytes with its socket's name, and a "
                f"Unix socket's path has at most {SOCKET_PATH_BYTES_MAX}; choose a shorter one"
            )
        if self.budget_bytes <= 0:
            raise InvalidJobError(f"--budget must be positive, not {self.budget_bytes}")
        if not self.node:
            raise InvalidJobError("--node must name this node")
        if self.threads < 1:
            raise InvalidJobError(f"--threads must be at least 1, not {self.threads}")
