"""Expiry of certificates, read from the files that TLS uses.

Python's `ssl` gives the expiry of a peer's certificate only. A whole X.509 library would be one
more dependency of every daemon for a single number, so this module reads the few fields before it
(RFC 5280, section 4.1) in DER, which has definite lengths only. It makes no decision about trust:
OpenSSL has already accepted the same bytes.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
# Base64 has no hyphen: text without an end is passed over once, not once for each beginning in it.
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----\s[^-]*-----END CERTIFICATE-----")
_CENTURY_YEAR = 50
"""First two-digit year of UTCTime that belongs to the last century."""


def ends_at(pem: bytes) -> list[float]:
    """Expiry of each certificate in `pem`, in their order, in seconds since the Unix epoch.

    Raises:
        ValueError: one of them is not a certificate.
    """
    certificates = _CERTIFICATE.findall(pem)
    try:
        return [_end_of(ssl.PEM_cert_to_DER_cert(each.decode("ascii"))) for each in certificates]
    except (IndexError, StopIteration) as error:
        raise ValueError("a certificate ends too early") from error


def _end_of(der: bytes) -> float:
    certificate = _content(der, _SEQUENCE)
    fields = _elements(_content(certificate, _SEQUENCE))
    tag, _ = next(fields)
    if tag == _VERSION:
        next(fields)  # the serial number
    next(fields)  # the algorithm of the signature
    next(fields)  # the issuer
    tag, validity = next(fields)
    _insist(tag == _SEQUENCE)
    times = _elements(validity)
    next(times)
    tag, text = next(times)
    return _moment(tag, text.decode("ascii"))


def _moment(tag: int, text: str) -> float:
    _insist(tag in (_UTC_TIME, _GENERALIZED_TIME))
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_YEAR else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _content(der: bytes, wanted: int) -> bytes:
    tag, content = next(_elements(der))
    _insist(tag == wanted)
    return content


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """(tag, content) of each element."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        _insist(at + length <= len(der))
        yield tag, der[at : at + length]
        at += length


def _insist(right: bool) -> None:
    if not right:
        raise ValueError("this is not a certificate as defined by RFC 5280")
