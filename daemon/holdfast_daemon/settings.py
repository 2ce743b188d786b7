"""The daemon's settings: validated on construction, given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import YEAR_S
from holdfast_core.job.locations import StorageLocation
from holdfast_core.job.snapshots import BANDWIDTH_BYTES_S_MIN
from holdfast_daemon.transport.tls import Protection
from holdfast_protos.connections.identity import Identity

SOCKET_PATH_BYTES_MAX = 107
IDLE_CHECK_S_MIN, IDLE_CHECK_S_MAX = 60.0, YEAR_S
"""Intervals at which a node without a job may be checked, as for launchers that wait."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory in which Kubernetes mounts a pod's token and the cluster's CA."""


class Auth(StrEnum):
    """How trainers prove who they are."""

    NONE = "none"
    """No proof: any process that can connect may do everything."""
    TOKEN_REVIEW = "token-review"
    """A service-account token, reviewed by the Kubernetes API server."""
    TOKEN_FILES = "token-files"
    """The token that the file named after the job holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonSettings:
    """The settings of one daemon, fixed when it starts."""

    root: Path
    """Directory on the node's dedicated tmpfs; everything the daemon keeps lies below it."""
    socket_dir: Path | None = None
    """Directory of the sockets for trainers; `root` when None. Trainers in pods mount this
    directory alone, at the same path."""
    socket_mode: int | None = None
    """Permissions of these sockets. None: open to all users with `Auth.TOKEN_REVIEW`, else to the
    daemon's own user."""
    auth: Auth = Auth.NONE
    """How trainers prove who they are."""
    api_server: str = ""
    """`host:port` of the Kubernetes API server; only for `Auth.TOKEN_REVIEW`."""
    service_account: Path = SERVICE_ACCOUNT
    """Directory with the daemon's own token and the cluster's CA; only for `Auth.TOKEN_REVIEW`."""
    volume_records: Path | None = None
    """Directory of the records of this node's volumes, whose tokens need no review; only for
    `Auth.TOKEN_REVIEW`. None: there is no driver of volumes."""
    token_directory: Path | None = None
    """One file per job, named after it, with its token; only for `Auth.TOKEN_FILES`."""
    identity: Identity | None = None
    """This daemon's identity, for mutual authentication with other daemons and the control loop.
    None: no authentication."""
    bulk: Protection = Protection.AUTHENTICATED
    """Protection of bytes between daemons."""
    node: str
    """Name of the node, unique in the cluster."""
    host: str = "127.0.0.1"
    """Address at which peers reach this node; the peer and bulk services listen on it."""
    peer_port: int = 0
    """Port of the peer service; 0 lets the kernel choose."""
    bulk_port: int = 0
    """Port of the bulk service; 0 lets the kernel choose."""
    control: str = ""
    """`host:port` of the control loop. Empty: the daemon serves only the jobs that it adopted."""
    budget_bytes: int = 4 << 30
    """Memory for arenas and parity."""
    metrics_host: str = ""
    """Address that /metrics and the health endpoints listen on; `host` when empty."""
    metrics_port: int | None = None
    """Port of these endpoints. None: no endpoints. 0 lets the kernel choose."""
    redis_url: str = ""
    """URL of the Redis with the shared catalogue. Empty: the catalogue is in this daemon's
    memory."""
    threads: int = 4
    """Threads of each job for background effects, and as many to persist."""
    scrub_interval_s: float = 600.0
    """Interval at which everything held is verified."""
    scrub_rate_bytes_s: float = 256e6
    """Bytes that the scrub verifies per second, at most."""
    protection_bytes_s: int = 0
    """Bytes that all jobs together may fetch per second for parity of new generations; 0: no
    limit."""
    storage_locations: tuple[StorageLocation, ...] | None = ()
    """Locations that jobs may persist to, by their namespaces. Empty: none; None: anywhere."""
    idle_check_s: float = 0.0
    """Interval at which the node is checked while no job is on it; 0: never."""
    persist_grace_s: float = 20.0
    """Time for which a stopping daemon waits until generations that are due soon are persisted."""

    def __post_init__(self) -> None:
        longest = len(str(self.socket).encode())
        if longest > SOCKET_PATH_BYTES_MAX:
            name = "--root" if self.socket_dir is None else "--socket-dir"
            raise InvalidJobError(
                f"{name} {self.socket.parent} is too long: {longest} bytes with its socket's name, "
                f"but a Unix socket's path has at most {SOCKET_PATH_BYTES_MAX}; choose a shorter "
                f"one"
            )
        if self.socket_mode is not None and not 0 <= self.socket_mode <= 0o777:
            raise InvalidJobError(
                f"--socket-mode {self.socket_mode:o} is not a set of permissions; give an octal "
                f"number such as 660"
            )
        if self.budget_bytes <= 0:
            raise InvalidJobError(f"--budget must be positive, not {self.budget_bytes}")
        if (self.auth is Auth.TOKEN_FILES) != (self.token_directory is not None):
            raise InvalidJobError("--auth token-files and --tokens DIR belong together: give both")
        if self.volume_records is not None and self.auth is not Auth.TOKEN_REVIEW:
            raise InvalidJobError("--volumes is for --auth token-review only; leave it out")
        if self.bulk is Protection.ENCRYPTED and self.identity is None:
            raise InvalidJobError(
                "--bulk encrypted needs certificates: give --tls DIR, not --insecure"
            )
        if not self.node:
            raise InvalidJobError("--node must name this node")
        if 0 != self.protection_bytes_s < BANDWIDTH_BYTES_S_MIN:
            raise InvalidJobError(
                f"--protection-bandwidth {self.protection_bytes_s} is too little to protect "
                f"anything in time; give {BANDWIDTH_BYTES_S_MIN} or more, or 0 for no limit"
            )
        if not (
            self.idle_check_s == 0 or IDLE_CHECK_S_MIN <= self.idle_check_s <= IDLE_CHECK_S_MAX
        ):
            raise InvalidJobError(
                f"--idle-checks {self.idle_check_s:g} is no interval at which a node can be "
                f"checked; give {IDLE_CHECK_S_MIN:g} to {IDLE_CHECK_S_MAX:g} seconds, or 0 for no "
                f"checks"
            )
        if not self.persist_grace_s >= 0:
            raise InvalidJobError(
                f"--persist-grace must be 0 seconds or more, not {self.persist_grace_s}"
            )
        if self.threads < 1:
            raise InvalidJobError(f"--threads must be at least 1, not {self.threads}")

    @property
    def security(self) -> str:
        """One word for status and logs: insecure, authenticated or encrypted."""
        return "insecure" if self.identity is None else self.bulk.value

    @property
    def socket(self) -> Path:
        """Path of the socket of the service for trainers."""
        return (self.socket_dir or self.root) / "daemon.sock"

    @property
    def arena_socket(self) -> Path:
        """Path of the socket that passes the descriptors of arenas to trainers."""
        return self.socket.with_name("arena.sock")

    @property
    def permissions(self) -> int:
        """Permissions of both sockets."""
        if self.socket_mode is not None:
            return self.socket_mode
        return 0o666 if self.auth is Auth.TOKEN_REVIEW else 0o600
