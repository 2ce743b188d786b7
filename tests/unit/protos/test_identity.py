"""Who may talk to whom over gRPC: real handshakes on loopback, with certificates made here."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from certificate_makers import expired, made
from cryptography import x509

from holdfast_core.errors import InvalidJobError
from holdfast_operator.control.certificates import Certificates
from holdfast_protos import codec
from holdfast_protos.connections.identity import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    Identity,
    OnlyFor,
    Role,
    add_options,
    add_port,
    aio_channel,
    channel,
    choose,
    insist,
)

ASK = "/holdfast.test/Ask"
WAIT_S = 60.0


async def _answer(request: bytes, context: Any) -> bytes:
    del context
    return request


@asynccontextmanager
async def service(identity: Identity | None, answers: Role = Role.DAEMON) -> AsyncIterator[str]:
    """Something that answers one role only; its address."""
    server = grpc.aio.server(interceptors=[OnlyFor(identity, answers)])
    method = grpc.unary_unary_rpc_method_handler(_answer)
    handler = grpc.method_handlers_generic_handler("holdfast.test", {"Ask": method})
    server.add_generic_rpc_handlers((handler,))
    port = add_port(server, "127.0.0.1:0", identity)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(address: str, identity: Identity | None, role: Role = Role.DAEMON) -> bytes:
    async with aio_channel(address, identity, role) as opened:
        return await answer_of(opened)


async def answer_of(opened: grpc.aio.Channel) -> bytes:
    method: Any = opened.unary_unary
    answer: bytes = await method(ASK)(b"word", timeout=WAIT_S)
    return answer


def refused(address: str, identity: Identity | None, role: Role = Role.DAEMON) -> Any:
    async def asked() -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(address, identity, role)
        return caught.value

    return asked()


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


@pytest.fixture
def daemon(tmp_path: Path) -> Identity:
    return Identity(made(tmp_path / "tls", Role.DAEMON))


@pytest.fixture
def operator(tmp_path: Path) -> Identity:
    return Identity(made(tmp_path / "tls", Role.OPERATOR))


def test_a_daemon_is_answered_by_a_daemon(daemon: Identity) -> None:
    async def test() -> None:
        async with service(daemon) as address:
            assert await ask(address, daemon) == b"word"
            with channel(address, daemon, Role.DAEMON) as blocking:
                method: Any = blocking.unary_unary
                call = method(ASK)
                answer = await asyncio.to_thread(call, b"thread", timeout=WAIT_S)
                assert answer == b"thread"

    run(test)


def test_a_certificate_of_another_ca_is_refused(tmp_path: Path, daemon: Identity) -> None:
    async def test() -> None:
        stranger = Identity(made(tmp_path / "other", Role.DAEMON))
        async with service(daemon) as address:
            error = await refused(address, stranger)
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_a_client_without_a_certificate_is_refused(tmp_path: Path, daemon: Identity) -> None:
    async def test() -> None:
        async with service(daemon) as address:
            assert (await refused(address, None)).code() is grpc.StatusCode.UNAVAILABLE
            trusting = grpc.ssl_channel_credentials(
                (tmp_path / "tls" / AUTHORITY).read_bytes()
            )  # knows the CA, and shows nothing
            named = [("grpc.ssl_target_name_override", daemon.name(Role.DAEMON))]
            async with grpc.aio.secure_channel(address, trusting, options=named) as opened:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answer_of(opened)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_an_expired_certificate_is_refused_at_either_end(tmp_path: Path, daemon: Identity) -> None:
    async def test() -> None:
        old = Identity(expired(tmp_path / "tls", Role.DAEMON))
        async with service(daemon) as address:
            assert (await refused(address, old)).code() is grpc.StatusCode.UNAVAILABLE
        async with service(old) as address:
            assert (await refused(address, daemon)).code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_a_daemons_certificate_does_not_answer_for_the_operator(daemon: Identity) -> None:
    async def test() -> None:
        async with service(daemon) as address:
            error = await refused(address, daemon, Role.OPERATOR)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            # The words of a newer and of an older grpcio.
            assert re.search("Hostname Verification|not in peer cert", error.details() or "")

    run(test)


def test_the_operators_certificate_does_not_open_what_is_for_daemons(
    daemon: Identity, operator: Identity
) -> None:
    async def test() -> None:
        async with service(daemon) as address:
            error = await refused(address, operator)
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            ours = codec.error_from_metadata(error.trailing_metadata(), error.details())
            assert ours is not None
            assert ours.code == "access_denied"
            assert "operator.local.holdfast" in str(ours)

    run(test)


def test_another_installation_under_the_same_ca_is_a_stranger(
    tmp_path: Path, daemon: Identity
) -> None:
    async def test() -> None:
        neighbour = Identity(made(tmp_path / "tls", Role.DAEMON, domain="other"), "other")
        async with service(daemon) as address:
            assert (await refused(address, neighbour)).code() is grpc.StatusCode.UNAVAILABLE
        async with service(neighbour) as address:
            # Even if it does not insist on the name that it dials, it is not answered.
            careless = Identity(tmp_path / "tls" / "other-daemon", "local")
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(address, careless)

    run(test)


def test_certificates_are_replaced_without_a_restart(tmp_path: Path) -> None:
    """Another CA, too: processes with the new files are served, those with the old ones are not."""
    folder = tmp_path / "tls"
    identity = Identity(made(folder, Role.DAEMON))
    before = Identity(made(tmp_path / "copy", Role.DAEMON, authority=folder))

    async def test() -> None:
        async with service(identity) as address:
            assert await ask(address, before) == b"word"
            for name in (AUTHORITY, "ca.key"):
                (folder / name).unlink()
            Certificates(folder).make(time.time())
            assert identity.current().version == 2
            assert await ask(address, identity) == b"word"
            assert (await refused(address, before)).code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_files_that_do_not_fit_leave_the_certificate_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = made(tmp_path / "tls", Role.DAEMON)
    identity = Identity(directory)
    key = (directory / KEY).read_bytes()
    (made(tmp_path / "other", Role.DAEMON) / KEY).replace(directory / KEY)
    assert identity.current() is identity.current()
    assert identity.current().version == 1
    assert "the certificate in use is kept" in caplog.text
    # Another file, as some kernels give files of one moment the same time.
    (directory / "new").write_bytes(key)
    (directory / "new").replace(directory / KEY)
    assert identity.current().version == 2
    assert "PRIVATE" not in caplog.text


def test_missing_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"no usable tls\.crt, tls\.key and ca\.crt"):
        Identity(tmp_path)


def test_a_domain_that_is_no_dns_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match="no part of a DNS name"):
        Identity(made(tmp_path / "tls", Role.DAEMON), "a.b")


def test_doing_without_takes_the_one_switch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(made(tmp_path / "tls", Role.DAEMON))
    with pytest.raises(InvalidJobError, match="--insecure or HOLDFAST_INSECURE=1"):
        choose("", "", insecure=False)
    with pytest.raises(InvalidJobError, match="exclude each other"):
        choose(directory, "", insecure=True)
    assert choose(directory, "", insecure=False) is not None
    assert not caplog.records
    assert choose("", "", insecure=True) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ("", "local", False)),
        ({"HOLDFAST_TLS": "/tls", "HOLDFAST_TLS_DOMAIN": "team"}, ("/tls", "team", False)),
        ({"HOLDFAST_INSECURE": "1", "HOLDFAST_TLS": "/tls"}, ("", "local", True)),
        ({"HOLDFAST_INSECURE": "true"}, ("", "local", False)),
    ],
)
def test_options_have_variables(variables: dict[str, str], wanted: tuple[str, str, bool]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_options(parser.add_argument, variables)
    found = parser.parse_args([])
    assert (found.tls, found.tls_domain, found.insecure) == wanted


def test_certificates_and_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    Certificates(folder).make(time.time())
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {CERTIFICATE, KEY, AUTHORITY, "ca.key"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_certificates_are_made_anew_in_time_and_not_before(tmp_path: Path) -> None:
    certificates, day = Certificates(tmp_path / "tls"), 86400.0
    now = time.time()
    again = certificates.make(now)
    assert again == pytest.approx(now + day, abs=2)

    def shown() -> bytes:
        return (certificates.directory(Role.DAEMON) / CERTIFICATE).read_bytes()

    first, authority = shown(), (tmp_path / "tls" / AUTHORITY).read_bytes()
    assert certificates.make(now + day / 2) == again
    assert shown() == first
    assert certificates.make(again + 1) == pytest.approx(again + 1 + day, abs=2)
    assert shown() != first
    assert (tmp_path / "tls" / AUTHORITY).read_bytes() == authority
    certificates.make(now + 364 * day)
    assert (tmp_path / "tls" / AUTHORITY).read_bytes() != authority
    left = [path for path in (tmp_path / "tls").iterdir() if path.is_dir()]
    assert len(left) == 4, "two roles, and the folders that they link to"


def test_certificates_are_valid_when_the_clock_is_set_back_by_a_day(tmp_path: Path) -> None:
    certificates, now = Certificates(tmp_path / "tls"), time.time()
    certificates.make(now)
    files = [tmp_path / "tls" / AUTHORITY]
    files += [certificates.directory(role) / CERTIFICATE for role in Role]
    begins = [x509.load_pem_x509_certificate(file.read_bytes()) for file in files]
    assert max(one.not_valid_before_utc.timestamp() for one in begins) < now - 86400.0


def test_streams_insist_themselves(daemon: Identity, operator: Identity) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        await insist(context, operator, Role.DAEMON)
        yield request

    async def test() -> None:
        server = grpc.aio.server()
        method = grpc.unary_stream_rpc_method_handler(stream)
        handler = grpc.method_handlers_generic_handler("holdfast.test", {"Ask": method})
        server.add_generic_rpc_handlers((handler,))
        address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', operator)}"
        await server.start()
        codes = []
        for caller in (daemon, operator):
            async with aio_channel(address, caller, Role.OPERATOR) as opened:
                asked: Any = opened.unary_stream
                call = asked(ASK)(b"word", timeout=WAIT_S)
                with suppress(grpc.aio.AioRpcError):
                    assert [each async for each in call] == [b"word"]
                codes.append(await call.code())
        assert codes == [grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED]
        await server.stop(0)

    run(test)
