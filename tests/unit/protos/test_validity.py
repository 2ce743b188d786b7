"""When certificates end, against what a library for X.509 says."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from math import isnan
from pathlib import Path

import pytest
from certificate_makers import expired, made
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from holdfast_protos.connections.identity import AUTHORITY, CERTIFICATE, Identity, Role, _end
from holdfast_protos.connections.validity import ends_at

KEY = ec.generate_private_key(ec.SECP256R1())
FIRST, LAST = datetime(1950, 1, 2), datetime(2120, 1, 1)  # UTC, for hypothesis


def pem(end: datetime, *, serial: int = 1, name: str = "n") -> bytes:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(KEY.public_key())
        .serial_number(serial)
        .not_valid_before(end - timedelta(seconds=1))
        .not_valid_after(end)
        .sign(KEY, hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM)


@given(
    end=st.datetimes(FIRST, LAST),
    serial=st.integers(1, 2**158),
    name=st.text(min_size=1, max_size=64),
)
def test_it_is_what_was_signed(end: datetime, serial: int, name: str) -> None:
    end = end.replace(microsecond=0)  # both forms of time, short and long lengths
    assert ends_at(pem(end, serial=serial, name=name)) == [end.replace(tzinfo=UTC).timestamp()]


def test_each_certificate_of_a_file_is_read_and_nothing_else(tmp_path: Path) -> None:
    years = [datetime(2031, 5, 6), datetime(2051, 1, 1)]
    key = (made(tmp_path / "ca", Role.DAEMON) / "tls.key").read_bytes()
    text = b"some words\n" + pem(years[0]) + key + pem(years[1])
    assert ends_at(text) == [each.replace(tzinfo=UTC).timestamp() for each in years]
    assert ends_at(key) == []


def test_what_is_no_certificate_is_refused() -> None:
    lines = pem(datetime(2031, 5, 6)).splitlines()
    for cut in (lines[:1] + lines[3:], lines[:3] + lines[-1:], lines[:2] + lines[-1:]):
        with pytest.raises(ValueError):
            ends_at(b"\n".join(cut))


def test_an_identity_knows_its_expiry_and_reads_it_again(tmp_path: Path) -> None:
    directory = made(tmp_path / "ca", Role.DAEMON)
    identity = Identity(directory)
    own, authority = (
        ends_at((directory / CERTIFICATE).read_bytes()),
        ends_at((directory / AUTHORITY).read_bytes()),
    )
    assert identity.ends_at() == {"own": own[0], "authority": authority[0]}
    assert 6 * 86400 < identity.ends_at()["own"] - time.time() <= 7 * 86400
    old = expired(tmp_path / "ca", Role.DAEMON)
    for name in (CERTIFICATE, "tls.key"):
        (directory / name).unlink()
        (directory / name).write_bytes((old / name).read_bytes())
    assert identity.ends_at()["own"] < time.time()


def test_an_end_that_cannot_be_read_is_not_known_and_nothing_else_suffers(tmp_path: Path) -> None:
    directory = made(tmp_path / "ca", Role.DAEMON)
    with (directory / AUTHORITY).open("ab") as file:
        file.write(b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n")
    assert isnan(_end((directory / AUTHORITY).read_bytes(), max))
    assert isnan(_end(b"", min))


def test_the_first_of_a_chain_and_the_last_of_the_authorities_count(tmp_path: Path) -> None:
    directory = made(tmp_path / "ca", Role.DAEMON)
    sooner, later = datetime(2020, 1, 1), datetime(2099, 1, 1)
    for name in (CERTIFICATE, AUTHORITY):
        with (directory / name).open("ab") as file:
            file.write(pem(sooner) + pem(later))
    ends = Identity(directory).ends_at()
    assert ends == {
        "own": sooner.replace(tzinfo=UTC).timestamp(),
        "authority": later.replace(tzinfo=UTC).timestamp(),
    }
