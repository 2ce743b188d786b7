"""Logs: one JSON object a line, for machines; or one readable line, for people.

It exists so that every line of every process has the same field names (job, epoch, rank,
generation) and can be joined with the metrics. The message of a record is the name of an event
(`job_dropped`); details go into fields, never into the text:

    log = bind(logging.getLogger(__name__), job="moe", rank=3)
    log.warning("save_skipped", cause="no_free_slot", generation=generation)

Must not: print secrets (callers pass fields, not settings), or repeat one cause endlessly
(`OncePerCause`).
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Literal

LogFormat = Literal["json", "text"]

_FIELDS = "holdfast_fields"
"""Attribute of a log record that holds its fields."""

_RESERVED = frozenset({"time", "level", "event", "logger", "error"})
_OWN_ARGUMENTS = frozenset({"exc_info", "stack_info", "stacklevel", "extra"})


class BoundLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines all carry the same fields; keyword arguments of a call add to them."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        fields = dict(self.extra or {})
        for name in [name for name in kwargs if name not in _OWN_ARGUMENTS]:
            fields[name] = kwargs.pop(name)
        kwargs["extra"] = {**(kwargs.get("extra") or {}), _FIELDS: fields}
        return msg, kwargs


def bind(logger: logging.Logger | BoundLogger, **fields: object) -> BoundLogger:
    """A logger whose lines carry `fields`, and those of `logger` if it is bound already."""
    if isinstance(logger, BoundLogger):
        return BoundLogger(logger.logger, {**(logger.extra or {}), **fields})
    return BoundLogger(logger, fields)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `event`, `logger`, then the fields.
    A field with one of these names is written with a trailing underscore."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        for name, value in _fields_of(record).items():
            line[f"{name}_" if name in _RESERVED else name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """One line for people: time, level, event, then `field=value`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields_of(record).items())
        clock = _rfc3339(record.created)[11:-1]
        line = f"{clock} {record.levelname.lower():<8} {record.getMessage()} {fields}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(
    level: str = "info", file: Path | None = None, *, format: LogFormat = "json"
) -> logging.Handler:
    """Send the logs of this process to `file`, or to stderr; replaces an earlier configuration.

    Returns the handler, so that the caller can remove it again.

    Raises:
        ValueError: `level` or `format` is not known.
    """
    formatters = {"json": JsonFormatter, "text": TextFormatter}
    if format not in formatters:
        raise ValueError(f"log format {format!r} is not one of {', '.join(sorted(formatters))}")
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"log level {level!r} is not one of debug, info, warning, error")
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in [handler for handler in root.handlers if isinstance(handler, _OwnHandler)]:
        root.removeHandler(old)
        old.close()
    handler = _OwnHandler(sys.stderr if file is None else file.open("a", encoding="utf-8"))
    handler.owns_stream = file is not None
    handler.setFormatter(formatters[format]())
    root.addHandler(handler)
    return handler


CAUSES_MAX = 1000
"""Causes that are counted; beyond that, the oldest is forgotten, and is logged as new if it
returns."""


class OncePerCause:
    """Logs a cause when it first appears, then each time its count has grown tenfold, so that a
    failure in every step is not hidden, and does not fill the disk."""

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._counts: dict[tuple[str, str], int] = {}

    def warning(self, event: str, *, cause: str, **fields: object) -> int:
        """Count, and log if it is time to; returns how often `cause` was seen for `event`."""
        count = self._counts.get((event, cause), 0) + 1
        if count == 1 and len(self._counts) >= CAUSES_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[event, cause] = count
        if _is_power_of_ten(count):
            bind(self._log, cause=cause, count=count, **fields).warning(event)
        return count

    def forget(self, event: str) -> None:
        """Forget the causes of `event`: the trouble is over, and the next one is logged as new."""
        self._counts = {key: count for key, count in self._counts.items() if key[0] != event}


class _OwnHandler(logging.StreamHandler[Any]):
    """The handler that `configure` installs; closes the stream if `configure` opened it."""

    owns_stream = False

    def close(self) -> None:
        if self.owns_stream:
            self.stream.close()
            self.owns_stream = False
        super().close()


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


def _rfc3339(created_s: float) -> str:
    moment = datetime.datetime.fromtimestamp(created_s, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"
