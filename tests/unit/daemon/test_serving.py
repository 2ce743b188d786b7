"""Where a socket is to be: what a killed daemon left goes, a living one stays."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_core.errors import StorageError
from holdfast_daemon.net.serving import clear_socket


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(tmp_path / "daemon.sock"))
        made.listen(0)
        yield made


def test_a_directory_is_made_and_a_stale_socket_removed(
    tmp_path: Path, listener: socket.socket
) -> None:
    clear_socket(tmp_path / "new" / "daemon.sock")
    assert (tmp_path / "new").is_dir()
    listener.close()
    clear_socket(tmp_path / "daemon.sock")
    assert not (tmp_path / "daemon.sock").exists()


def test_a_living_daemons_socket_is_not_taken_away(tmp_path: Path, listener: socket.socket) -> None:
    path = tmp_path / "daemon.sock"
    with pytest.raises(StorageError, match="another daemon serves at"):
        clear_socket(path)
    # The first connection has not been accepted: the queue is full now.
    with pytest.raises(StorageError, match="its own --socket-dir"):
        clear_socket(path)
    assert path.is_socket()


def test_an_unusable_directory_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="make it writable"):
        clear_socket(tmp_path / "file" / "daemon.sock")
