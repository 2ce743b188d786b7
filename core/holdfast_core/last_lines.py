"""The last lines that a process wrote before it failed, made fit to show to people.

A job's status shows why its script ended: most often, the end of a traceback. The text comes from a
trainer and may hold anything, so it is cut to a bounded size, stripped of terminal control
sequences, and its secrets are replaced by `***`. What a secret looks like is a guess: values of
variables with telling names, and the forms of well-known keys. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LINES_MAX = 20
"""Number of lines that are kept, from the end."""
CHARACTERS_MAX = 2000
"""Number of characters that are kept of those lines, from the end."""
WINDOW_BYTES = 16_384
"""Bytes of the output's end that are examined: more than is kept, so that no secret is cut in
two."""
SECRET_CHARACTERS_MIN = 6
"""Length from which the value of a variable is hidden; shorter ones protect nothing and would match
inside ordinary words."""
HIDDEN = "***"

_STEERING = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_NAMES = r"password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key"
_SECRET_NAME = re.compile(rf"(?:{_NAMES}|credential|auth)(?![a-z])|_key$", re.IGNORECASE)
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.S),
        HIDDEN,
    ),
    (re.compile(r"://[^/\s@]+@"), f"://{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (
        re.compile(
            rf"((?:{_NAMES}|credential)(?![a-z])[\w-]{{0,40}}[\"']?\s{{0,4}}[=:]\s{{0,4}})"
            r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;&]+)",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), HIDDEN),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|xox[abprs]-)[\w-]{16,}"), HIDDEN),
    (re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), HIDDEN),
)
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def secrets_among(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Values of environment variables whose names suggest that they are secret."""
    return tuple(
        value
        for name, value in variables.items()
        if len(value) >= SECRET_CHARACTERS_MIN and _SECRET_NAME.search(name)
    )


def last_lines(text: str, secrets: Iterable[str] = ()) -> str:
    """The end of `text`: at most `LINES_MAX` lines and `CHARACTERS_MAX` characters of printable
    text, in which `secrets`, and anything that looks like one, are replaced."""
    text = _as_shown(text[-WINDOW_BYTES:])
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for shape, shown in _SHAPES:
        text = shape.sub(shown, text)
    lines = text.rstrip().splitlines()[-LINES_MAX:]
    return "\n".join(lines)[-CHARACTERS_MAX:].lstrip("\n")


def decoded_end(data: bytes) -> str:
    """The end of an output as text, without a first line that the window cuts."""
    if len(data) > WINDOW_BYTES:
        data = data[-WINDOW_BYTES:]
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")


def essence_of(lines: str) -> str:
    """What two failures of one kind have in common: the last line, with its numbers masked."""
    return _VARYING.sub("#", lines.rpartition("\n")[2]).strip()


def printable(text: str) -> str:
    """`text` with `?` for each character that cannot be printed, line ends among them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def within_bytes(text: str, bytes_max: int) -> str:
    """The beginning of `text` that takes at most `bytes_max` bytes of UTF-8, with `…` for what is
    left out."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - len("…".encode())].decode(errors="ignore") + "…"


def _as_shown(text: str) -> str:
    """Printable `text` without terminal control sequences; of an overwritten line, what it showed
    last."""
    lines = (_STEERING.sub("", line).rstrip("\r") for line in text.split("\n"))
    shown = (line.rpartition("\r")[2].expandtabs(4) for line in lines)
    return "\n".join(map(printable, shown))
