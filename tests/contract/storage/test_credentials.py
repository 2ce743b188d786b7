"""Two teams before a real S3 server: each location has its own credentials, and no other's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import versitygw
from stored_snapshots import JOB, check_set, store_set

from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.job.locations import StorageLocation
from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.durable.access import TierAccess
from holdfast_storage.roots import TierRoot
from holdfast_storage.sets import SetStore

pytestmark = pytest.mark.s3

SECRETS = {"team-a": "the-secret-of-team-a", "team-b": "the-secret-of-team-b"}
NEW = Generation(1, 7)


class Teams:
    """A server with two users, and a Secret of each as a daemon has it mounted."""

    def __init__(self, directory: Path) -> None:
        self.server = versitygw.S3Server(directory / "server", SECRETS)
        self.mounts = {team: directory / team for team in SECRETS}
        for team, secret in SECRETS.items():
            self.mounts[team].mkdir()
            self.mount(team, secret)

    def mount(self, team: str, secret: str, user: str = "") -> None:
        values = {
            "AWS_ACCESS_KEY_ID": user or team,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in values.items():
            (self.mounts[team] / name).write_text(value)

    def access(self, prefix: str = "s3://{team}") -> TierAccess:
        return TierAccess(
            [
                StorageLocation(
                    prefix=prefix.format(team=team),
                    namespaces=(team,),
                    credentials=str(self.mounts[team]),
                )
                for team in SECRETS
            ]
        )


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[Teams]:
    made = Teams(tmp_path)
    yield made
    made.server.stop()


def root(access: TierAccess, team: str, bucket: str = "") -> TierRoot:
    return access.root(f"s3://{bucket or team}/run1", f"{team}.job")


def test_two_teams_persist_each_with_its_own_credentials(teams: Teams) -> None:
    access, made = teams.access(), {}
    for team in SECRETS:
        store = SetStore(f"s3://{team}/run1", JOB, root=root(access, team))
        store_set(store, NEW)
        made[team] = store
    for store in made.values():
        check_set(store, store.complete()[0])
    with pytest.raises(InvalidJobError, match="Namespace team-a may use s3://team-a:"):
        root(access, "team-a", "team-b")


def test_the_server_keeps_a_team_out_even_where_a_list_is_too_wide(teams: Teams) -> None:
    wide = teams.access("s3://team-b")  # a slip of the platform team
    root(teams.access(), "team-b").create("file", b"of team-b")
    theirs = root(wide, "team-a", "team-b")
    for attempt in (
        lambda: theirs.read("file", 0, memoryview(bytearray(9))),
        lambda: theirs.create("other", b"x"),
        lambda: theirs.files(""),
        lambda: theirs.delete(["file"]),
    ):
        with pytest.raises(StorageError, match="AccessDenied; check"):
            attempt()
    data = bytearray(9)
    root(teams.access(), "team-b").read("file", 0, memoryview(data))
    assert data == b"of team-b"


def test_credentials_that_are_replaced_are_used_at_once_by_what_is_open(teams: Teams) -> None:
    there = root(teams.access(), "team-a")
    there.create("file", b"1")
    teams.server.set_user("team-a", "another-secret")
    with pytest.raises(StorageError, match="403; check the daemon's credentials"):
        there.size("file")
    teams.mount("team-a", "another-secret")
    assert there.size("file") == 1


def test_a_secret_that_is_gone_is_not_replaced_by_the_daemons_own_credentials(
    teams: Teams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", versitygw.ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", versitygw.SECRET)
    there = root(teams.access(), "team-a")
    there.create("file", b"1")
    (teams.mounts["team-a"] / "AWS_SECRET_ACCESS_KEY").unlink()
    with pytest.raises(StorageError, match="lacks AWS_SECRET_ACCESS_KEY"):
        there.size("file")


def test_no_secret_gets_into_logs_messages_or_the_environment(
    teams: Teams, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast_daemon")
    caplog.set_level(logging.DEBUG, "holdfast_storage")
    there = root(teams.access(), "team-a")
    there.create("file", b"1")
    wrong = "a-secret-that-is-wrong"
    teams.mount("team-a", wrong)
    with pytest.raises(StorageError) as caught:
        there.size("file")
    shown = f"{caught.value} {there!r} {caplog.text} {dict(os.environ)}"
    assert not [value for value in (*SECRETS.values(), wrong) if value in shown]
