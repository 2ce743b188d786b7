"""The daemon's settings: validated on construction, given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import StorageLocation
from holdfast_core.job.snapshots import BANDWIDTH_BYTES_S_MIN
from holdfast_daemon.transport.tls import Protection
from holdfast_protos.identity import Identity

SOCKET_PATH_BYTES_MAX = 107
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the token of a pod, and the CA of the cluster."""


class Auth(StrEnum):
    """How trainers prove who they are."""

    NONE = "none"
    """They do not: whoever may connect may do everything."""
    TOKEN_REVIEW = "token-review"
    """By a service-account token that the Kubernetes API server knows."""
    TOKEN_FILES = "token-files"
    """By the token that a file of the job's name holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonSettings:
    """What one daemon is told when it starts."""

    root: Path
    """Directory on the node's dedicated tmpfs; everything the daemon keeps lies below it."""
    socket_dir: Path | None = None
    """Where the sockets for trainers lie, `root` when None. Trainers in pods mount this directory
    alone, at the same path."""
    socket_mode: int | None = None
    """Permissions of these sockets. None: everybody's where the API server says who trainers are,
    else the daemon's own user's."""
    auth: Auth = Auth.NONE
    """How trainers prove who they are."""
    api_server: str = ""
    """`host:port` of the Kubernetes API server; only for `Auth.TOKEN_REVIEW`."""
    service_account: Path = SERVICE_ACCOUNT
    """Directory with the daemon's own token and the cluster's CA; only for `Auth.TOKEN_REVIEW`."""
    token_directory: Path | None = None
    """One file per job, named after it, with its token; only for `Auth.TOKEN_FILES`."""
    identity: Identity | None = None
    """What this daemon shows to other daemons and the control loop, and by which it knows them.
    None: nobody shows anything."""
    bulk: Protection = Protection.AUTHENTICATED
    """What protects bytes between daemons."""
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
    protection_bytes_s: int = 0
    """What all jobs may fetch for parity of new generations in a second; 0: no limit."""
    storage_locations: tuple[StorageLocation, ...] | None = ()
    """Where jobs may persist to, by their namespaces: nowhere when empty; None: anywhere."""
    persist_grace_s: float = 20.0
    """How long a daemon that is told to end waits for what is due soon to be persisted."""

    def __post_init__(self) -> None:
        longest = len(str(self.socket).encode())
        if longest > SOCKET_PATH_BYTES_MAX:
            name = "--root" if self.socket_dir is None else "--socket-dir"
            raise InvalidJobError(
                f"{name} {self.socket.parent} is too long: {longest} bytes with its socket's name, "
                f"and a Unix socket's path has at most {SOCKET_PATH_BYTES_MAX}; choose a shorter "
                f"one"
            )
        if self.socket_mode is not None and not 0 <= self.socket_mode <= 0o777:
            raise InvalidJobError(
                f"--socket-mode {self.socket_mode:o} is no set of permissions; give an octal "
                f"number such as 660"
            )
        if self.budget_bytes <= 0:
            raise InvalidJobError(f"--budget must be positive, not {self.budget_bytes}")
        if (self.auth is Auth.TOKEN_FILES) != (self.token_directory is not None):
            raise InvalidJobError("--auth token-files and --tokens DIR belong together: give both")
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
        """Where trainers talk to the daemon."""
        return (self.socket_dir or self.root) / "daemon.sock"

    @property
    def arena_socket(self) -> Path:
        """Where trainers get the descriptors of arenas."""
        return self.socket.with_name("arena.sock")

    @property
    def permissions(self) -> int:
        """Of both sockets."""
        if self.socket_mode is not None:
            return self.socket_mode
        return 0o666 if self.auth is Auth.TOKEN_REVIEW else 0o600
