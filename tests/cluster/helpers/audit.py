"""What service accounts asked of the API server, and what it answered: its audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """One thing that a rule of a role allows."""

    verb: str
    group: str
    resource: str
    """With its subresource, as in `pods/log`."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request that was answered."""

    account: str
    permission: Permission
    namespace: str
    name: str
    code: int

    @property
    def refused(self) -> bool:
        return self.code == HTTPStatus.FORBIDDEN


class Audit:
    """The requests that were logged since this was made.

    Args:
        path: the log, to which the API server appends a JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._from = path.stat().st_size

    def requests(self, account: str) -> list[Request]:
        """Those of a service account, `<namespace>:<name>`."""
        return [each for each in self._read() if each.account == account]

    def _read(self) -> Iterator[Request]:
        with self._path.open("rb") as file:
            file.seek(max(0, self._from - 1))
            file.readline()  # the rest of a line that was being written
            for line in file:
                if line.endswith(b"\n"):  # the last one may be half written
                    entry = json.loads(line)
                    if "objectRef" in entry and "responseStatus" in entry:
                        yield _request(entry)


def _request(entry: dict[str, object]) -> Request:
    target, user, answer = (entry[name] for name in ("objectRef", "user", "responseStatus"))
    assert isinstance(target, dict) and isinstance(user, dict) and isinstance(answer, dict)
    subresource = target.get("subresource", "")
    resource = target.get("resource", "")
    return Request(
        account=user["username"].removeprefix("system:serviceaccount:"),
        permission=Permission(
            verb=str(entry["verb"]),
            group=target.get("apiGroup", ""),
            resource=f"{resource}/{subresource}" if subresource else resource,
        ),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=int(answer.get("code", 0)),
    )
