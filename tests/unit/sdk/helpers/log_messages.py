"""What a process logs, where no fixture of pytest reaches it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def messages_of(logger: str) -> Iterator[list[str]]:
    """The messages that a logger gets until the end of the block."""
    found: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    noting = Noting()
    logging.getLogger(logger).addHandler(noting)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(noting)
