"""What a URI may name, and whether a job may persist there."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import (
    StorageLocation,
    is_storage_uri,
    location_of,
    parse_storage_uri,
    read_location,
)

CHART = json.loads((Path(__file__).parents[4] / "charts/holdfast/values.schema.json").read_text())
LOCATIONS = CHART["properties"]["persistence"]["properties"]["locations"]["items"]["properties"]
PREFIX_PATTERN: str = LOCATIONS["prefix"]["pattern"].removesuffix("$") + r"\Z"
"""As Helm reads it: `$` is the end of the text, and not a newline before it."""

TEAMS = (
    StorageLocation(prefix="s3://team-{namespace}"),
    StorageLocation(prefix="s3://shared/{namespace}/copies/"),
    StorageLocation(prefix="/mnt/shared/{namespace}"),
    StorageLocation(prefix="gs://old", namespaces=("a", "b")),
)

ADMITTED = [
    *("s3://team-a", "s3://team-a/", "s3://team-a/run1/x", "s3://shared/a/copies"),
    *("/mnt/shared/a", "file:///mnt/shared/a/run1", "gs://old/run1"),
]

TRICKS = [
    # Another's bucket, prefix or path, also where names begin alike.
    *("s3://team-b", "s3://team-a-evil", "s3://team-", "s3://other", "s3://shared/b/copies"),
    *("s3://shared/a/copies-of-b", "s3://shared", "/mnt/shared/ab", "/mnt/shared", "/mnt"),
    *("gs://team-a", "abfs://team-a", "S3://team-a", "s3://TEAM-A", "s3://team-a:80", "/"),
    # What leads out of a prefix, or is read differently by some tool.
    *("s3://team-a/../team-b", "/mnt/shared/a/../b", "/mnt/shared/a/./../b", "/mnt/shared//a"),
    *("s3://team-a/%2e%2e/team-b", "/mnt/shared/a/%2e%2e/b", "s3://team%2da", "s3://team-a//x"),
    *("s3://team-a?versionId=1", "s3://team-a/x#y", "s3://team-a/*", "s3://team-a/[b]"),
    *("s3://team-a\\..\\b", "s3://team-a/x\n", "s3://team-a\0", "s3://team-{namespace}"),
    *("s3:/team-a", "s3:team-a", "//mnt/shared/a", "mnt/shared/a", "file:/mnt/shared/a", ""),
    *("file://mnt/shared/a", "file://localhost/mnt/shared/a", "FILE:///mnt/shared/a"),
    *("file:////mnt/shared/a", "local:///mnt/shared/a", "s3a://team-a", "s3://@team-a"),
    # Others' addresses, and other kinds of file systems.
    *("http://169.254.169.254/latest", "s3://169.254.169.254/latest", "s3://[fd00::1]/x"),
    *("s3://key:secret@team-a/x", "https://team-a/x", "abfs://c@169.254.169.254/x"),
    *("memory://team-a", "ftp://team-a/x", "sftp://team-a/x", "hdfs://team-a/x", "data:,x"),
    *("zip://x::s3://team-a/y.zip", "simplecache::s3://team-a", "s3://team-a::file:///etc"),
    *("reference://", "github://team-a:x@main/", "dir://x::s3://team-a", "s3://team-a/x::/etc"),
]


@pytest.mark.parametrize("uri", ADMITTED)
def test_what_lies_within_a_location_is_admitted(uri: str) -> None:
    location = location_of(uri, "a.run", TEAMS)
    assert parse_storage_uri(uri).is_within(location.uri("a"))


@pytest.mark.parametrize("uri", TRICKS)
def test_what_lies_outside_all_locations_is_refused(uri: str) -> None:
    with pytest.raises(
        InvalidJobError, match=r"no storage location|not a valid path or URI for copies"
    ):
        location_of(uri, "a.run", TEAMS)


def test_the_refusal_names_what_the_job_may_use_and_whom_to_ask() -> None:
    with pytest.raises(InvalidJobError) as caught:
        location_of("s3://other/run", "a.run", TEAMS)
    assert str(caught.value) == (
        "spec.persistence.uri = 's3://other/run' is in no storage location that the platform team "
        "allows. Namespace a may use s3://team-a, s3://shared/a/copies, /mnt/shared/a, gs://old: "
        "choose one, or ask the platform team to add it to persistence.locations of Holdfast's "
        "chart"
    )
    with pytest.raises(InvalidJobError, match="Namespace a has none: ask the platform team"):
        location_of("s3://other/run", "a.run", [StorageLocation(prefix="/x", namespaces=("b",))])


def test_a_long_list_of_locations_is_cut() -> None:
    many = [StorageLocation(prefix=f"s3://b{number}") for number in range(30)]
    with pytest.raises(InvalidJobError, match=r"s3://b4 and 25 more: choose"):
        location_of("s3://other", "a.run", many)


def test_a_location_of_some_namespaces_is_for_their_jobs_alone() -> None:
    location_of("gs://old/x", "b.run", TEAMS)
    with pytest.raises(InvalidJobError, match="Namespace c may use s3://team-c,"):
        location_of("gs://old/x", "c.run", TEAMS)


def test_the_first_location_that_fits_is_taken() -> None:
    first = StorageLocation(prefix="s3://b/x", credentials="/one")
    second = StorageLocation(prefix="s3://b", credentials="/two")
    assert location_of("s3://b/x/y", "a.run", (first, second)) is first
    assert location_of("s3://b/y", "a.run", (first, second)) is second


@pytest.mark.parametrize("job", ["", "run", ".run", "../b.run", "a/b.run", "A.run", "{x}.run"])
def test_a_job_without_a_namespace_is_in_no_location(job: str) -> None:
    with pytest.raises(InvalidJobError, match=r"no namespace|no storage location"):
        location_of("s3://team-a", job, (StorageLocation(prefix="s3://team-{namespace}"),))


@pytest.mark.parametrize(
    ("prefix", "fixed"),
    [
        ("/mnt/shared", "/mnt/shared"),
        ("file:///mnt/shared/{namespace}/copies", "/mnt/shared"),
        ("/mnt/team-{namespace}/", "/mnt"),
        ("/{namespace}/copies", "/"),
        ("s3://b/x/", "s3://b/x"),
    ],
)
def test_the_part_of_a_location_that_all_namespaces_share(prefix: str, fixed: str) -> None:
    assert str(StorageLocation(prefix=prefix).fixed) == fixed


def test_a_location_is_read_from_json() -> None:
    text = '{"prefix": "s3://b/{namespace}", "namespaces": ["a"], "credentials": "/etc/x"}'
    assert read_location(text) == StorageLocation(
        prefix="s3://b/{namespace}", namespaces=("a",), credentials="/etc/x"
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("s3://bucket", "give JSON like"),
        ("[]", "expected a mapping"),
        ("{}", "location.prefix: is required"),
        ('{"prefix": "s3://b", "secret": "x"}', "unknown field"),
        ('{"prefix": "s3://b/.."}', "not a valid path or URI for copies"),
        ('{"prefix": "s3://b/{name}"}', "not a valid path or URI for copies"),
        ('{"prefix": "memory://b"}', "not a valid path or URI for copies"),
        ('{"prefix": "/"}', "not a valid path or URI for copies"),
        ('{"prefix": "s3://b", "namespaces": ["A"]}', "not the name of a namespace"),
        (
            '{"prefix": "/mnt", "credentials": "/etc/x"}',
            "only s3 locations can have their own credentials",
        ),
    ],
)
def test_an_invalid_location_is_refused_with_what_to_do(text: str, word: str) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(word)):
        read_location(text)


# --- any text -----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *("/:.%@?#*\\ \n\0{}~+"),
        *("..", "//", "::", "s3", "file", "s3://", "file://", "team-a", "team-b", "shared", "mnt"),
        *("a", "b", "copies", "%2e", "memory://", "S3://", "{namespace}", "localhost"),
    ]
)
ROOTS = st.sampled_from([*ADMITTED, "/mnt/shared", "s3://team-b", "s3://shared/b", "gs://new"])
PARTS = st.sampled_from(["a", "b", "run 1", "x=1,y", "copies", "{namespace}", "..", ".", "", "%2e"])
GOOD_PARTS = st.sampled_from(["a", "b", "run 1", "x=1,y", "12:30", "copies", "..."])
URIS = st.one_of(
    *(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=40)),
    st.builds(lambda root, parts: "/".join([root, *parts]), ROOTS, st.lists(PARTS, max_size=3)),
    st.builds(lambda root, tail: f"{root}{''.join(tail)}", ROOTS, st.lists(PIECES, max_size=3)),
)
PLACES = st.builds(
    lambda root, parts: "/".join([root, *parts]), ROOTS, st.lists(GOOD_PARTS, max_size=4)
).filter(is_storage_uri)
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)


@given(URIS)
def test_what_is_admitted_begins_with_a_location_and_stays_in_it(uri: str) -> None:
    """Said once more, in other words: by the text itself, and as a file system would read it."""
    try:
        location = location_of(uri, "a.run", TEAMS)
    except InvalidJobError:
        return
    root = location.prefix.replace("{namespace}", "a").rstrip("/")
    text = uri.removeprefix("file://")
    assert text == root or text.startswith(f"{root}/")
    rest = text[len(root) :]
    assert not {"", ".", ".."}.intersection(PurePosixPath(rest.strip("/")).parts)
    assert not set("%?#*\\{}[]\n\0") & set(uri)
    assert "::" not in uri


@given(NAMES, NAMES, URIS)
def test_no_job_reaches_the_copies_of_another_namespace(one: str, other: str, tail: str) -> None:
    assume(one != other)
    for location in TEAMS[:3]:
        theirs = location.prefix.replace("{namespace}", other).rstrip("/") + tail
        try:
            found = location_of(theirs, f"{one}.run", TEAMS[:3])
        except InvalidJobError:
            continue
        assert not parse_storage_uri(theirs).is_within(found.uri(other))


@given(PLACES)
def test_a_place_that_is_written_out_is_read_as_the_same_place(uri: str) -> None:
    place = parse_storage_uri(uri)
    assert parse_storage_uri(str(place)) == place


@given(URIS)
@example("s3://0\n")
def test_the_charts_pattern_admits_the_prefixes_that_can_be_read(prefix: str) -> None:
    matches = re.search(PREFIX_PATTERN, prefix) is not None
    if is_storage_uri(prefix.replace("{namespace}", "x")):
        assert matches
    elif matches:
        assert "::" in prefix or {".", ".."}.intersection(prefix.split("/"))
