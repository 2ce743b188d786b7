"""Make a CA, and the certificates that it issues to daemons and the control loop.

Local runs use this, so that users need not think of certificates. `holdfast certificates` uses it
to make files for a cluster; otherwise the chart or cert-manager makes a cluster's certificates.

A folder holds `ca.crt` and `ca.key`, and for each role a folder with the three files that
`holdfast_protos.connections.identity` reads. A role's folder is a link, so that all three change at
once. Keys are readable only by their owner.
"""

from __future__ import annotations

import os
import secrets
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_core.errors import StorageError
from holdfast_protos.connections.identity import AUTHORITY, CERTIFICATE, DOMAIN, KEY, Role

AUTHORITY_KEY = "ca.key"
AUTHORITY_LIFE = timedelta(days=365)
LIFE = timedelta(days=7)
"""Life of the certificates of a local run."""
RENEWED_AFTER = 1 / 7
"""Part of its life after which a certificate is renewed. It is small, so that daemons keep their
connections when the control loop is away for some days."""
CLOCK_ERROR = timedelta(days=7)
"""Certificates are valid from this long before they are made: for clocks that are behind, and for a
clock that is set back while processes run, which must not separate them."""


class Certificates:
    """CA in `folder`, and the certificates that it has issued.

    Args:
        domain: part of the name in certificates, `ROLE.DOMAIN.holdfast`.
        life: life of certificates that are made from now on.
    """

    def __init__(self, folder: Path, *, domain: str = DOMAIN, life: timedelta = LIFE) -> None:
        self._folder, self._domain, self._life = folder, domain, life

    def directory(self, role: Role) -> Path:
        """Folder with the files of a role."""
        return self._folder / role

    def make(self, now: float) -> float:
        """Make what is missing or about to end; returns the Unix time to call this again.

        Args:
            now: Unix time in seconds.

        Raises:
            StorageError: when the folder cannot be written.
        """
        moment = datetime.fromtimestamp(now, UTC)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            again = self._make(moment)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"cannot make certificates in {self._folder}: {error}; make the folder writable, "
                f"or remove what is in it"
            ) from error
        return again.timestamp()

    def _make(self, moment: datetime) -> datetime:
        margin = self._life * (1 - RENEWED_AFTER)
        authority = self._authority(moment)
        ends = []
        for role in Role:
            path = self.directory(role) / CERTIFICATE
            end = _end(path) if path.exists() else moment
            if end - moment < margin or not self._is_ours(role):
                end = self._certify(role, *authority, moment)
            ends.append(end)
        return min(ends) - margin

    def _authority(self, moment: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        certificate_file, key_file = self._folder / AUTHORITY, self._folder / AUTHORITY_KEY
        if certificate_file.exists() and key_file.exists():
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError(f"{key_file} was not made by Holdfast")
            if certificate.not_valid_after_utc - moment > self._life:
                return certificate, key
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Holdfast CA {secrets.token_hex(4)}")
        certificate = (
            _builder(name, name, key, moment, max(AUTHORITY_LIFE, 2 * self._life))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_private(key_file, _key_bytes(key))
        write_private(certificate_file, _bytes(certificate))
        return certificate, key

    def _is_ours(self, role: Role) -> bool:
        """Whether the present CA issued the role's certificate."""
        return (self.directory(role) / AUTHORITY).read_bytes() == (
            self._folder / AUTHORITY
        ).read_bytes()

    def _certify(
        self,
        role: Role,
        authority: x509.Certificate,
        authority_key: ec.EllipticCurvePrivateKey,
        moment: datetime,
    ) -> datetime:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = certify(
            f"{role}.{self._domain}.holdfast", key, authority, authority_key, moment, self._life
        )
        link = self.directory(role)
        folder = self._folder / f".{role}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        write_private(folder / CERTIFICATE, _bytes(certificate))
        write_private(folder / KEY, _key_bytes(key))
        write_private(folder / AUTHORITY, _bytes(authority))
        before = link.resolve() if link.is_symlink() else None
        temporary = link.with_name(f".{role}.tmp")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.name)
        temporary.replace(link)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return certificate.not_valid_after_utc


def certify(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    moment: datetime,
    life: timedelta,
) -> x509.Certificate:
    """Certify `key` for the DNS name `name`, for use at both ends of a connection."""
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_key = authority_key.public_key()
    return (
        _builder(_name(name), authority.subject, key, moment, life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path`, readable only by its owner from the first moment on."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    moment: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - CLOCK_ERROR)
        .not_valid_after(moment + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _bytes(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _end(path: Path) -> datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
