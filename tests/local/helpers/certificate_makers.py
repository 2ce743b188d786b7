"""Certificates for tests, good and bad."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_operator.control.certificates import (
    AUTHORITY_KEY,
    Certificates,
    certify,
    write_private,
)
from holdfast_protos.connections.identity import AUTHORITY, CERTIFICATE, DOMAIN, KEY, Role

DAY_S = 86400.0


def made(folder: Path, role: Role, *, domain: str = DOMAIN, authority: Path | None = None) -> Path:
    """Directory of a role's files, issued by the CA in `folder` or in `authority`."""
    if authority is not None:
        folder.mkdir()
        for name in (AUTHORITY, AUTHORITY_KEY):
            shutil.copy(authority / name, folder)
    if domain == DOMAIN:
        certificates = Certificates(folder)
        certificates.make(time.time())
        return certificates.directory(role)
    return _shown(folder, f"{domain}-{role}", f"{role}.{domain}.holdfast", time.time())


def expired(folder: Path, role: Role) -> Path:
    """Directory of a role's files, issued by the CA in `folder`; the certificate expired
    yesterday."""
    then = time.time() - 2 * DAY_S
    return _shown(folder, f"expired-{role}", f"{role}.{DOMAIN}.holdfast", then)


def _shown(folder: Path, name: str, dns: str, moment: float) -> Path:
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    signer = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    begins = datetime.fromtimestamp(moment, UTC)
    certificate = certify(dns, key, authority, signer, begins, timedelta(days=1))
    directory = folder / name
    directory.mkdir()
    pem = serialization.Encoding.PEM
    write_private(directory / CERTIFICATE, certificate.public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(directory / KEY, secret)
    shutil.copy(folder / AUTHORITY, directory)
    return directory
