"""The limits of every gRPC server and channel, in one place.

gRPC's own defaults suit small messages between trusted processes: four megabytes, any number of
concurrent calls, no check whether the other end is still alive. Every server and channel takes
Holdfast's limits from here; `docs/limits.md` describes what happens at each.
"""

from __future__ import annotations

MESSAGE_BYTES_MAX = 64 << 20
"""Size of any message. The largest are layouts and manifests: some ten megabytes for a rank with a
hundred thousand tensors in a terabyte."""

METADATA_BYTES_MAX = 16 << 10
"""Size of a call's headers: a token and little else."""

TRAINER_STREAMS_MAX = 64
"""Concurrent calls on one connection of a trainer or an agent, each of which needs a handful."""

PEER_STREAMS_MAX = 64
"""Concurrent calls on one connection of another daemon, which sends one message after another."""

CONTROL_STREAMS_MAX = 1024
"""Concurrent calls on one connection to the control loop: one for each daemon; tests and benchmarks
share connections."""

TRAINER_CALLS_MAX = 2048
"""Concurrent calls of all trainers of a node."""

PEER_CALLS_MAX = 2048
"""Concurrent calls of all other daemons."""

CONTROL_CALLS_MAX = 20_000
"""Number of daemons that one control loop serves at once."""

TRAINER_CONNECTIONS_MAX = 4096
"""Number of connections to a node's socket for trainers."""

HANDSHAKE_MS_MAX = 10_000
"""Time within which a connection must complete its HTTP/2 handshake; after that it is closed."""

IDLE_MS_MAX = 600_000
"""Time without a call after which a connection is closed; the next call dials again."""

KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
"""Time within which a silent connection must answer a server's ping; after that it is closed."""

PING_INTERVAL_MS_MIN = 2_000
"""Shortest time between a client's pings; a client that pings more often is cut off. Daemons ping
every five seconds."""

SESSION_HEADER = "holdfast-session"
"""Header of each call of a session: the session's id. By it, or by a valid token, a daemon
authenticates the caller before it reads a request."""

Options = list[tuple[str, int]]


def server_options(streams_max: int) -> Options:
    """Options of a server that accepts `streams_max` concurrent calls on one connection."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", streams_max),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        ("grpc.max_connection_idle_ms", IDLE_MS_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS_MIN),
    ]


def open_to_strangers(connections_max: int) -> Options:
    """Further options of a server whose socket strangers can reach: at most `connections_max`
    connections, and a fixed window, so that an unread request takes only 64 KiB."""
    return [
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.http2.bdp_probe", 0),
    ]


def channel_options(*, reconnect_ms_max: int = 1000, ping_ms: int = 0) -> Options:
    """Options of a channel that dials again at least every `reconnect_ms_max`, and pings a silent
    server every `ping_ms` (0: never)."""
    options = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", reconnect_ms_max),
        ("grpc.enable_http_proxy", 0),
    ]
    if ping_ms:
        options += [("grpc.keepalive_time_ms", ping_ms), ("grpc.keepalive_timeout_ms", 5000)]
    return options
