"""The limits of every gRPC server and channel, in one place.

gRPC's own defaults are meant for small messages between friends: four megabytes, any number of
calls at once, no look at whether the other end is still there. Ours are said here, for whoever
makes a server or a channel; `docs/limits.md` says what happens at each.
"""

from __future__ import annotations

MESSAGE_BYTES_MAX = 64 << 20
"""Of any message. The largest are layouts and manifests: some ten megabytes for a rank with a
hundred thousand tensors in a terabyte."""

METADATA_BYTES_MAX = 16 << 10
"""Of the headers of a call: a token and little else."""

TRAINER_STREAMS_MAX = 64
"""Calls at once on one connection of a trainer or an agent, which have a handful."""

PEER_STREAMS_MAX = 64
"""Likewise of another daemon, which sends one message after the other."""

CONTROL_STREAMS_MAX = 1024
"""Likewise to the control loop: one of each daemon; tests and benchmarks share connections."""

TRAINER_CALLS_MAX = 2048
"""Calls at once of all trainers of a node."""

PEER_CALLS_MAX = 2048
"""Likewise of all other daemons."""

CONTROL_CALLS_MAX = 20_000
"""Daemons that one control loop hears at once."""

TRAINER_CONNECTIONS_MAX = 4096
"""Connections to the trainers' socket of a node."""

HANDSHAKE_MS_MAX = 10_000
"""A connection that has not said that it speaks HTTP/2 by then is closed."""

IDLE_MS_MAX = 600_000
"""A connection without a call for this long is closed; the next call dials again."""

KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
"""A server asks a silent connection whether anybody is there, and closes it without an answer."""

PING_INTERVAL_MS_MIN = 2_000
"""A client that asks more often than this is cut off; daemons ask every five seconds."""

SESSION_HEADER = "holdfast-session"
"""In the headers of each call of a session: the session's id. By it, or by a good token, a daemon
knows before it reads a request that the caller has a right to talk."""

Options = list[tuple[str, int]]


def server_options(streams_max: int) -> Options:
    """Of a server that takes `streams_max` calls at once on one connection."""
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
    """Besides, of a server whose socket is open to others than its callers: no more connections
    than that, and no window that grows, so that a request that nobody reads takes 64 KiB."""
    return [
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.http2.bdp_probe", 0),
    ]


def channel_options(*, reconnect_ms_max: int = 1000, ping_ms: int = 0) -> Options:
    """Of a channel that dials again at least every `reconnect_ms_max`, and asks a silent server
    every `ping_ms` whether it is there (0: never)."""
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
