"""Where the daemon finds the URL of Redis."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_daemon.__main__ import main
from holdfast_daemon.node import Node
from holdfast_daemon.settings import DaemonSettings

GIVEN, IN_ENVIRONMENT = "redis://given:6379/0", "redis://:secret@environment:6379/0"


@pytest.fixture(autouse=True)
def process_untouched() -> Iterator[None]:
    """`main` sets the umask and the logs of its process."""
    mask, root = os.umask(0), logging.getLogger()
    os.umask(mask)
    level, handlers = root.level, list(root.handlers)
    yield
    os.umask(mask)
    root.setLevel(level)
    root.handlers[:] = handlers


def redis_url(*arguments: str) -> str:
    """What the daemon makes of `arguments`; it is not started."""
    seen: list[str] = []

    def make_node(settings: DaemonSettings) -> Node:
        seen.append(settings.redis_url)
        raise InvalidJobError("seen enough")

    assert main(["--root", "/run/x", "--node", "a", "--insecure", *arguments], make_node) == 2
    return seen[0]


def test_by_default_the_catalogue_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_REDIS_URL", raising=False)
    assert redis_url() == ""


def test_the_environment_can_give_the_url_of_redis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", IN_ENVIRONMENT)
    assert redis_url() == IN_ENVIRONMENT


def test_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", IN_ENVIRONMENT)
    assert redis_url("--redis", GIVEN) == GIVEN
