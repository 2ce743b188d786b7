"""Identity of a process: its certificate, read from files, and the checks of others' certificates.

Daemons and the control loop talk over mutual TLS: both sides show a certificate. A certificate
gives its owner's role by a DNS name, `<role>.<domain>.holdfast`. A client insists on the role that
it dials, and a service answers only the roles that it is for. So no daemon can give orders as the
operator, and a process that the CA has not certified cannot connect at all.

A directory has the three files of a Kubernetes TLS secret: `tls.crt`, `tls.key`, `ca.crt`. They are
checked again for each new connection, so they may be replaced while the process runs. With no
`Identity` (None), connections are plain and nothing is checked: that takes an explicit switch.

Must not: put a key into an error or a log.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import nan
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from holdfast_core.errors import AccessDeniedError, InvalidJobError, UnauthenticatedError
from holdfast_protos import codec
from holdfast_protos.connections.validity import ends_at

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
DOMAIN = "local"
"""Domain of processes that are given no other."""
ENDS = ("own", "authority")
"""Keys of `Loaded.ends_at`: the parts of an identity that expire."""
READS_MAX = 3
"""Number of attempts to read files that change while they are read."""

_log = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]]


class Role(StrEnum):
    """Role of a process towards others."""

    DAEMON = "daemon"
    OPERATOR = "operator"
    """The control loop of the operator, or of a local run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Content of the files at one moment."""

    version: int
    """Number that changes when the files do."""
    configuration: Any
    """Configuration of gRPC servers."""
    credentials: grpc.ChannelCredentials
    """Credentials of gRPC channels."""
    server: ssl.SSLContext
    """Context of servers on plain sockets; requires a certificate."""
    client: ssl.SSLContext
    """Context of clients on plain sockets; requires a certificate and checks its name."""
    ends_at: Mapping[str, float]
    """Expiry as Unix time in seconds: `own`, the earliest in this process's own chain, and
    `authority`, the latest of the CA certificates by which others are verified; NaN while
    unknown."""


class Identity:
    """The certificate of this process. Thread-safe.

    Args:
        directory: holds `tls.crt`, `tls.key` and `ca.crt`, in PEM.
        domain: common part of the names of all certificates of this installation.

    Raises (on construction):
        InvalidJobError: a file cannot be read, or does not fit the others.
    """

    def __init__(self, directory: Path, domain: str = DOMAIN) -> None:
        self._directory, self._domain = directory, domain
        self._lock = threading.Lock()
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", domain):
            raise InvalidJobError(
                f"--tls-domain {domain!r} is no part of a DNS name: use lower-case letters, digits "
                f"and -"
            )
        self._seen = _seen(directory)
        self._loaded = _load(directory, 1)

    def name(self, role: Role) -> str:
        """DNS name in a certificate of `role`."""
        return f"{role}.{self._domain}.holdfast"

    def ends_at(self) -> Mapping[str, float]:
        """Expiry of the certificates in use, as in `Loaded.ends_at`. Callable from any thread."""
        return self.current().ends_at

    def current(self) -> Loaded:
        """Content of the files, or their last good content while they do not fit together."""
        with self._lock:
            seen = _seen(self._directory)
            if seen != self._seen:
                self._seen = seen
                try:
                    self._loaded = _load(self._directory, self._loaded.version + 1)
                    _log.info("certificate in %s read again", self._directory)
                except InvalidJobError as error:
                    _log.error("the certificate in use is kept: %s", error)
            return self._loaded


def choose(directory: str, domain: str, *, insecure: bool) -> Identity | None:
    """The identity in `directory`, or None if `insecure`.

    Raises:
        InvalidJobError: when neither is given, or both are.
    """
    if insecure and directory:
        raise InvalidJobError("--tls and --insecure exclude each other: choose one")
    if insecure:
        _log.warning(
            "insecure: connections between daemons and the control loop are not encrypted, and "
            "any process that reaches them can read and change training state"
        )
        return None
    if not directory:
        raise InvalidJobError(
            "no certificate: name the directory of tls.crt, tls.key and ca.crt with --tls DIR or "
            "HOLDFAST_TLS (`holdfast certificates` makes them), or turn identity off with "
            "--insecure or HOLDFAST_INSECURE=1 on a network that only you can reach"
        )
    return Identity(Path(directory), domain or DOMAIN)


def add_options(add: Callable[..., Any], environment: Mapping[str, str]) -> None:
    """Add the options of `choose` through an argument parser's `add_argument`; `environment` has
    their defaults: HOLDFAST_TLS, HOLDFAST_TLS_DOMAIN, HOLDFAST_INSECURE."""
    insecure = is_insecure(environment)
    add(
        "--tls",
        default="" if insecure else environment.get("HOLDFAST_TLS", ""),
        metavar="DIR",
        help="directory of tls.crt, tls.key and ca.crt, which may be replaced at any time "
        "(or HOLDFAST_TLS)",
    )
    add(
        "--tls-domain",
        default=environment.get("HOLDFAST_TLS_DOMAIN", DOMAIN),
        metavar="NAME",
        help="domain of the certificates, which name daemon.NAME.holdfast and "
        "operator.NAME.holdfast (default: %(default)s, or HOLDFAST_TLS_DOMAIN)",
    )
    add(
        "--insecure",
        action="store_true",
        default=insecure,
        help="use plain connections and trust every caller (or HOLDFAST_INSECURE=1)",
    )


def is_insecure(environment: Mapping[str, str]) -> bool:
    """Whether HOLDFAST_INSECURE turns identity off: only the value 1 does."""
    return environment.get("HOLDFAST_INSECURE", "") == "1"


# --- gRPC -----------------------------------------------------------------------------------------


def add_port(server: grpc.aio.Server, address: str, identity: Identity | None) -> int:
    """Let `server` listen on `address`, and return the port. Raises RuntimeError as gRPC does."""
    if identity is None:
        return server.add_insecure_port(address)
    given = identity.current()

    def renewed() -> Any:
        """New configuration for a handshake; None if nothing has changed."""
        nonlocal given
        loaded = identity.current()
        if loaded.version == given.version:
            return None
        given = loaded
        return loaded.configuration

    credentials = grpc.dynamic_ssl_server_credentials(
        given.configuration, renewed, require_client_authentication=True
    )
    return server.add_secure_port(address, credentials)


def aio_channel(
    address: str, identity: Identity | None, role: Role, options: Options = ()
) -> grpc.aio.Channel:
    """A channel to the process at `address`, which must prove that it is a `role`."""
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, ("grpc.ssl_target_name_override", identity.name(role))]
    return grpc.aio.secure_channel(address, identity.current().credentials, options=named)


def channel(
    address: str, identity: Identity | None, role: Role, options: Options = ()
) -> grpc.Channel:
    """A channel as from `aio_channel`, for use by threads."""
    if identity is None:
        return grpc.insecure_channel(address, options=options)
    named = [*options, ("grpc.ssl_target_name_override", identity.name(role))]
    return grpc.secure_channel(address, identity.current().credentials, options=named)


async def insist(
    context: grpc.aio.ServicerContext[Any, Any], identity: Identity | None, role: Role
) -> None:
    """Return if the caller is a `role`; otherwise end the call."""
    if identity is None:
        return
    names = context.auth_context().get("x509_subject_alternative_name", ())
    wanted = identity.name(role)
    if wanted.encode() in names:
        return
    shown = ", ".join(name.decode(errors="replace") for name in names) or "no name"
    error: UnauthenticatedError | AccessDeniedError
    if names:
        code = grpc.StatusCode.PERMISSION_DENIED
        error = AccessDeniedError(f"only {wanted} may call this; the certificate shows {shown}")
    else:
        code = grpc.StatusCode.UNAUTHENTICATED
        error = UnauthenticatedError(f"only {wanted} may call this; the caller shows {shown}")
    await context.abort(code, str(error), trailing_metadata=codec.error_to_metadata(error))


class OnlyFor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only its stub has some
    """Admission of callers of one role only, to all methods of a server.

    For services without streams: their methods cannot forget the check.
    """

    def __init__(self, identity: Identity | None, role: Role) -> None:
        self._identity, self._role = identity, role

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        answer = handler.unary_unary
        assert answer is not None, "streams must call insist() themselves"

        async def checked(request: Any, context: Any) -> Any:
            await insist(context, self._identity, self._role)
            return await answer(request, context)

        return grpc.unary_unary_rpc_method_handler(
            checked, handler.request_deserializer, handler.response_serializer
        )


# --- files ----------------------------------------------------------------------------------------


def _seen(directory: Path) -> tuple[object, ...]:
    """Value that changes when the files do."""
    versions: list[object] = []
    for name in (CERTIFICATE, KEY, AUTHORITY):
        try:
            status = (directory / name).stat()
        except OSError as error:
            versions.append(error.errno)
        else:
            versions.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(versions)


def _load(directory: Path, version: int) -> Loaded:
    """Read the files until they are stable.

    Raises:
        InvalidJobError: they are unusable, or keep changing.
    """
    for _ in range(READS_MAX):
        before = _seen(directory)
        try:
            loaded = _read(directory, version)
        except OSError as error:  # ssl.SSLError is one
            if _seen(directory) == before:
                raise InvalidJobError(
                    f"{directory} holds no usable {CERTIFICATE}, {KEY} and {AUTHORITY}: "
                    f"{error.strerror or error}; put a certificate, its key and the CA's "
                    f"certificate there, PEM, readable for this user"
                ) from error
        else:
            if _seen(directory) == before:
                return loaded
    raise InvalidJobError(f"the files in {directory} change while they are read")


def _read(directory: Path, version: int) -> Loaded:
    """Read the files once. Raises OSError for files that are missing, not PEM, or do not match."""
    certificate, key, authority = (
        (directory / name).read_bytes() for name in (CERTIFICATE, KEY, AUTHORITY)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # Without a password, OpenSSL would prompt on the terminal for an encrypted key's.
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password="")
        context.load_verify_locations(directory / AUTHORITY)
    server.num_tickets = 0  # sessions are never resumed: a ticket would outlive the check
    return Loaded(
        version=version,
        configuration=grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=authority
        ),
        credentials=grpc.ssl_channel_credentials(authority, key, certificate),
        server=server,
        client=client,
        ends_at={"own": _end(certificate, min), "authority": _end(authority, max)},
    )


def _end(pem: bytes, choose_end: Callable[[list[float]], float]) -> float:
    """Chosen expiry in `pem`; NaN if unreadable: OpenSSL accepts more than `ends_at` can parse."""
    try:
        return choose_end(ends_at(pem))
    except ValueError:
        return nan
