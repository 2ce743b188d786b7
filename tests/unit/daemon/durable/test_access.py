"""What a daemon opens for a job, wherever the URI comes from."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast_core.errors import CorruptError, InvalidJobError, StorageError
from holdfast_core.job.locations import StorageLocation
from holdfast_daemon.durable.access import NAMES, TierAccess, read_credentials
from holdfast_daemon.job.durable_tier import DurableTier
from holdfast_storage.roots import TierRoot

JOB = "a.run"
SECRET = "a-value-that-must-stay-secret"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A file system of two teams, each with a directory of its own."""
    for team in ("a", "b"):
        (tmp_path / "shared" / team / "run").mkdir(parents=True)
        (tmp_path / "shared" / team / "run" / "file").write_bytes(team.encode())
    return tmp_path / "shared"


def access(shared: Path) -> TierAccess:
    return TierAccess((StorageLocation(prefix=f"{shared}/{{namespace}}"),))


# --- which URIs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri",
    [
        *("s3://other/x", "memory://a", "ftp://host/x", "zip://x::file:///etc", "/etc", "gs://a"),
        *("http://169.254.169.254/latest", "{shared}/b", "{shared}/a/../b", "{shared}"),
        *("file://{shared}/b", "file://host{shared}/a", "FILE://{shared}/a", "{shared}/%61"),
    ],
)
def test_a_daemon_neither_writes_nor_reads_outside_its_locations(shared: Path, uri: str) -> None:
    tier = DurableTier(1, access(shared))
    with pytest.raises(
        InvalidJobError, match=r"no storage location|not a valid path or URI for copies"
    ):
        tier.open_sets(uri.format(shared=shared), JOB)
    with pytest.raises(
        InvalidJobError, match=r"no storage location|not a valid path or URI for copies"
    ):
        access(shared).root(uri.format(shared=shared), JOB)


def test_a_daemon_without_locations_opens_nothing(shared: Path) -> None:
    with pytest.raises(InvalidJobError, match="Namespace a has none: ask the platform team"):
        TierAccess(()).root(str(shared), JOB)


def test_without_a_list_anything_that_a_person_writes_is_opened_but_no_memory(
    tmp_path: Path,
) -> None:
    anywhere = TierAccess(None, tmp_path / "memory")
    anywhere.root(str(tmp_path / "copies"), "default.run").create("x", b"1")
    assert (tmp_path / "copies" / "x").read_bytes() == b"1"
    (tmp_path / "link").symlink_to(tmp_path / "memory")
    for uri in ("memory", "memory/jobs/x", "link/copies"):
        with pytest.raises(InvalidJobError, match="in the daemon's own memory"):
            anywhere.root(str(tmp_path / uri), "default.run")
    with pytest.raises(InvalidJobError, match="not a valid path or URI for copies"):
        anywhere.root("memory://x", "default.run")


@pytest.mark.parametrize(
    "prefix", ["memory", "memory/x", "memory/{namespace}", "", "link", "/{namespace}"]
)
def test_no_location_may_hold_the_daemons_memory(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "memory")
    location = StorageLocation(prefix=str(tmp_path / prefix))
    with pytest.raises(InvalidJobError, match=r"--storage-location .* the daemon's own memory"):
        TierAccess((location,), tmp_path / "memory")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--storage-location", "s3://b"], "give JSON like"),
        (
            ["--storage-anywhere", "--storage-location", '{"prefix": "s3://b"}'],
            "exclude each other",
        ),
        (
            ["--storage-location", '{"prefix": "/x", "credentials": "/y"}'],
            "only s3 locations can have",
        ),
    ],
)
def test_a_daemon_does_not_start_with_a_list_that_it_cannot_read(
    tmp_path: Path, arguments: list[str], word: str
) -> None:
    command = [sys.executable, "-m", "holdfast_daemon", "--root", str(tmp_path), "--node", "n"]
    done = subprocess.run(
        [*command, "--insecure", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert word in done.stderr


# --- links --------------------------------------------------------------------------------------

STEPS: list[tuple[str, Callable[[TierRoot], object]]] = [
    ("write", lambda root: root.write("run/file", 1, [memoryview(b"x")], threading.Event())),
    ("create", lambda root: root.create("run/new", b"x")),
    ("read", lambda root: root.read("run/file", 0, memoryview(bytearray(1)))),
    ("size", lambda root: root.size("run/file")),
    ("files", lambda root: root.files("run")),
    ("delete", lambda root: root.delete(["run/file"])),
]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("link", ["", "run"], ids=["of the URI", "of the job"])
@pytest.mark.parametrize("step", [step for _, step in STEPS], ids=[name for name, _ in STEPS])
def test_no_directory_that_is_a_link_leads_to_anothers_copies(
    shared: Path, step: Callable[[TierRoot], object], link: str
) -> None:
    root = access(shared).root(f"{shared}/a", JOB)
    step(access(shared).root(f"{shared}/b", "b.run"))  # it would work there
    before = contents(shared / "b")
    (shared / "a").rename(shared / "old")
    (shared / "a" / link).parent.mkdir(exist_ok=True)
    (shared / "a" / link).symlink_to(shared / "b" / link)
    with pytest.raises(StorageError, match="put no links into a storage location"):
        step(root)
    assert contents(shared / "b") == before


def test_no_file_that_is_a_link_is_read_or_written_through(shared: Path) -> None:
    root = access(shared).root(f"{shared}/a", JOB)
    (shared / "a" / "run" / "file").unlink()
    (shared / "a" / "run" / "file").symlink_to(shared / "b" / "run" / "file")
    with pytest.raises(StorageError, match="is a link, which is not followed"):
        root.read("run/file", 0, memoryview(bytearray(1)))
    assert root.size("run/file") is None
    root.write("run/file", 1, [memoryview(b"x")], threading.Event())
    assert contents(shared) == {"a/run/file": b"x", "b/run/file": b"b"}


def test_links_of_the_platform_team_are_followed(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "mount").symlink_to(shared)
    for prefix in (f"{tmp_path}/mount/a", f"{tmp_path}/mount/{{namespace}}"):
        root = TierAccess((StorageLocation(prefix=prefix),)).root(f"{tmp_path}/mount/a", JOB)
        data = bytearray(1)
        root.read("run/file", 0, memoryview(data))
        assert data == b"a"


def test_a_confined_place_leaves_no_descriptor_open(shared: Path) -> None:
    root = access(shared).root(f"{shared}/a/deep/er", JOB)
    before = _opened_below(shared)
    for _ in range(3):
        root.write("run/file", 1, [memoryview(b"x")], threading.Event())
        root.read("run/file", 0, memoryview(bytearray(1)))
        with pytest.raises(CorruptError):
            root.read("run/file", 0, memoryview(bytearray(2)))
        assert [item.path for item in root.files("run")] == ["run/file"]
        root.delete(["run/file"])
    assert _opened_below(shared) == before


def _opened_below(directory: Path) -> list[Path]:
    """What this process has open there; other threads open and close what is elsewhere."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of this look, or of another thread
            found.append(descriptor.readlink())
    return sorted(path for path in found if path.is_relative_to(directory))


# --- credentials --------------------------------------------------------------------------------


def secret(directory: Path, **files: str) -> Path:
    """As the kubelet mounts one: names are links into a directory that is replaced."""
    (directory / "..data").mkdir(parents=True)
    for name, value in files.items():
        (directory / "..data" / name).write_text(value)
        (directory / name).symlink_to(f"..data/{name}")
    return directory


def test_a_secret_with_the_names_of_an_environment_is_what_s3fs_is_given(tmp_path: Path) -> None:
    given = {name: f"value of {name}\n" for name in NAMES}
    assert read_credentials(secret(tmp_path / "s", **given)) == {
        "key": "value of AWS_ACCESS_KEY_ID",
        "secret": "value of AWS_SECRET_ACCESS_KEY",
        "token": "value of AWS_SESSION_TOKEN",
        "client_kwargs": {
            "endpoint_url": "value of AWS_ENDPOINT_URL",
            "region_name": "value of AWS_DEFAULT_REGION",
        },
    }


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "lacks AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY: give"),
        ({"AWS_SECRET_ACCESS_KEY": SECRET}, "lacks AWS_ACCESS_KEY_ID: give"),
        ({"AWS_ACCESS_KEY_ID": " \n", "AWS_SECRET_ACCESS_KEY": SECRET}, "lacks AWS_ACCESS_KEY_ID"),
        ({"AWS_ACCESS_KEY_ID": SECRET, "AWS_PROFILE": "x"}, "has the unknown keys AWS_PROFILE"),
        ({"AWS_ACCESS_KEY_ID": f"{SECRET}\udcff"}, "cannot be read: not text"),
    ],
)
def test_an_unusable_secret_is_an_error_with_its_cause_and_without_its_value(
    tmp_path: Path, files: dict[str, str], word: str
) -> None:
    directory = secret(tmp_path / "s")
    for name, value in files.items():
        (directory / name).write_bytes(value.encode(errors="surrogateescape"))
    with pytest.raises(StorageError, match=word) as caught:
        read_credentials(directory)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_missing_secret_is_an_error_that_names_what_to_create(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*create the Secret that"):
        read_credentials(tmp_path / "missing")
