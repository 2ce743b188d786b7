"""The token file: read when it changed, and named when it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._daemon.token import Token
from holdfast._environment import read_environment
from holdfast_core.errors import UnauthenticatedError


def test_without_a_file_calls_carry_nothing() -> None:
    assert Token(None).metadata() == ()


def test_a_renewed_file_is_read_again(tmp_path: Path) -> None:
    link, old, new = tmp_path / "token", tmp_path / "old", tmp_path / "new"
    old.write_text("first\n")
    link.symlink_to(old)
    token = Token(link)
    assert token.metadata() == (("authorization", "Bearer first"),)
    assert token.metadata() is token.metadata(), "an unchanged file is not read"
    # As kubelet does: a link that is swapped, and files of one age.
    new.write_text("second\n")
    swapped = tmp_path / "swapped"
    swapped.symlink_to(new)
    swapped.rename(link)
    assert token.metadata() == (("authorization", "Bearer second"),)


def test_a_file_that_cannot_be_read_is_named_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = Token(file)
    with pytest.raises(UnauthenticatedError, match=r"HOLDFAST_TOKEN_FILE=.*No such file"):
        token.metadata()
    file.write_bytes(b"\xff")
    with pytest.raises(UnauthenticatedError, match="it is not text"):
        token.metadata()
    file.write_text("good")
    assert token.metadata() == (("authorization", "Bearer good"),)


def test_the_environment_names_the_file() -> None:
    named = read_environment({"HOLDFAST_TOKEN_FILE": "/var/run/token"})
    assert named.token_file == Path("/var/run/token")
    assert read_environment({}).token_file is None
