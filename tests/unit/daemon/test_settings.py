"""Settings of a daemon, and the paths of its sockets that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_daemon.settings import Auth, DaemonSettings

ROOT = Path("/run/holdfast/memory")


def test_sockets_lie_in_the_root_and_are_the_daemons_own() -> None:
    settings = DaemonSettings(root=ROOT, node="a")
    assert (settings.socket, settings.arena_socket) == (ROOT / "daemon.sock", ROOT / "arena.sock")
    assert settings.permissions == 0o600


def test_sockets_lie_where_pods_mount_them_and_are_open_to_all_users_with_a_token() -> None:
    sockets = Path("/run/holdfast/sockets")
    settings = DaemonSettings(root=ROOT, node="a", socket_dir=sockets, auth=Auth.TOKEN_REVIEW)
    assert (settings.socket, settings.arena_socket) == (
        sockets / "daemon.sock",
        sockets / "arena.sock",
    )
    assert settings.permissions == 0o666
    narrower = DaemonSettings(root=ROOT, node="a", auth=Auth.TOKEN_REVIEW, socket_mode=0o660)
    assert narrower.permissions == 0o660


@pytest.mark.parametrize(
    ("root", "socket_dir", "words"),
    [("/" + 100 * "r", None, "--root"), ("/r", "/" + 100 * "s", "--socket-dir")],
)
def test_a_path_too_long_for_a_socket_is_refused(
    root: str, socket_dir: str | None, words: str
) -> None:
    directory = Path(socket_dir) if socket_dir else None
    with pytest.raises(InvalidJobError, match=f"{words} .* at most 107"):
        DaemonSettings(root=Path(root), node="a", socket_dir=directory)
    DaemonSettings(root=Path("/" + 100 * "r"), node="a", socket_dir=Path("/s"))


def test_impossible_permissions_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="--socket-mode 1777"):
        DaemonSettings(root=ROOT, node="a", socket_mode=0o1777)


@pytest.mark.parametrize("interval_s", [-1.0, 1.0, 59.9, 4e7, float("nan"), float("inf")])
def test_an_interval_of_checks_that_is_none_is_refused(interval_s: float) -> None:
    with pytest.raises(InvalidJobError, match=r"--idle-checks .* or 0 for no checks"):
        DaemonSettings(root=ROOT, node="a", idle_check_s=interval_s)
    for allowed_s in (0.0, 60.0, 1800.0):
        DaemonSettings(root=ROOT, node="a", idle_check_s=allowed_s)


def test_a_limit_that_leaves_protection_no_time_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="--protection-bandwidth 9999999 is too little"):
        DaemonSettings(root=ROOT, node="a", protection_bytes_s=9_999_999)
    DaemonSettings(root=ROOT, node="a", protection_bytes_s=10_000_000)
