"""Places for copies: the form of a URI, and the list of locations that a platform team allows.

Daemons reach storage with rights that no job has by itself. So a job's URI is checked against a
list, by the control loop before the job is placed and by each daemon before it opens anything. The
comparison must hold for what will be opened: a URI that could be read in two ways
(percent-encoding, `..`, empty parts, chains of file systems, a scheme in capitals) is refused,
never corrected. Pure: links of a file system are checked where it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import Document, Problem, convert, refuse

SCHEMES = ("s3", "gs", "abfs")
"""Kinds of object storage, besides paths. Their URIs name a bucket, never a host."""

NAMESPACE = "{namespace}"
"""Placeholder for the job's namespace in a location's prefix."""

_BUCKET = "[A-Za-z0-9][-A-Za-z0-9._]*"
_PART = "[-A-Za-z0-9._~=+,:@ ]+"
URI_PATTERN = f"((file://)?(/{_PART})+|({'|'.join(SCHEMES)})://{_BUCKET}(/{_PART})*)/?"
"""Pattern of a URI, for Python and RE2; parts that are dots, and `::`, are refused separately."""

NOT_A_STORAGE_URI = "not a valid path or URI for copies"
HOW_TO_WRITE_A_STORAGE_URI = (
    "write an absolute path, or a URI of scheme file, s3, gs or abfs like s3://bucket/run1, of "
    "letters, digits, spaces and -._~=+,:@ only, without empty parts, '.', '..' and '::'"
)

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageUri:
    """Place that a URI names."""

    scheme: str
    """Scheme: `file`, or one of `SCHEMES`."""
    bucket: str
    """Name of the bucket; empty for `file`."""
    parts: tuple[str, ...]

    def __str__(self) -> str:
        path = "".join(f"/{part}" for part in self.parts)
        return path or "/" if self.scheme == "file" else f"{self.scheme}://{self.bucket}{path}"

    def is_within(self, other: StorageUri) -> bool:
        """Whether this is `other` or lies below it; names are compared whole."""
        return (self.scheme, self.bucket) == (other.scheme, other.bucket) and self.parts[
            : len(other.parts)
        ] == other.parts


class StorageLocation(Document, frozen=True, kw_only=True):
    """A place that jobs may persist to, with all that is below it."""

    prefix: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            description="where copies may be stored",
            examples=["s3://copies/{namespace}"],
        ),
    ]
    namespaces: Annotated[
        tuple[str, ...],
        Meta(
            description="the namespaces whose jobs may persist there; all when empty",
            examples=[["team-a"]],
        ),
    ] = ()
    credentials: Annotated[
        str,
        Meta(description="a directory with credentials", examples=["/etc/holdfast/storage/a"]),
    ] = ""

    def uri(self, namespace: str) -> StorageUri:
        """The URI that the prefix gives for jobs of `namespace`."""
        return parse_storage_uri(self.prefix.replace(NAMESPACE, namespace))

    @property
    def fixed(self) -> StorageUri:
        """The part that is the same for all namespaces; only the platform team creates it."""
        whole = self.uri("x")
        written = self.prefix.rpartition("://")[2].split("/")[1 : len(whole.parts) + 1]
        parts = tuple(takewhile(lambda part: NAMESPACE not in part, written))
        return StorageUri(scheme=whole.scheme, bucket=whole.bucket, parts=parts)


def is_storage_uri(uri: str) -> bool:
    """Whether `uri` names one place, in one way only."""
    return (
        re.fullmatch(URI_PATTERN, uri) is not None
        and "::" not in uri
        and not {".", ".."}.intersection(uri.split("/"))
    )


def parse_storage_uri(uri: str) -> StorageUri:
    """Parts of `uri`.

    Raises:
        InvalidJobError: it names none, or could be understood in more than one way.
    """
    if not is_storage_uri(uri):
        raise InvalidJobError(f"{uri!r} is {NOT_A_STORAGE_URI}: {HOW_TO_WRITE_A_STORAGE_URI}")
    scheme, _, rest = uri.rstrip("/").rpartition("://")
    bucket, *parts = rest.split("/")
    return StorageUri(scheme=scheme or "file", bucket=bucket, parts=tuple(parts))


def read_location(text: str) -> StorageLocation:
    """A location from JSON: `{"prefix": "s3://copies/{namespace}", "namespaces": ["team-a"]}`.

    Raises:
        InvalidJobError: it is not a valid location.
    """
    verdict = f"the storage location {text[:200]!r} is not valid"
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidJobError(
            f'{verdict}: {error}; give JSON like {{"prefix": "s3://copies/{NAMESPACE}"}}'
        ) from error
    problems: list[Problem] = []
    location = convert(StorageLocation, value, "location", problems)
    if location is not None:
        problems.extend(_problems(location))
    refuse(verdict, problems)
    assert location is not None, "a location that could not be converted has a problem"
    return location


Locations = Sequence[StorageLocation] | None
"""Locations that jobs may persist to; None where there is no list, as in a local run."""


def location_of(uri: str, job: str, locations: Sequence[StorageLocation]) -> StorageLocation:
    """The first of `locations` that lets `job` persist to `uri`.

    Args:
        job: the job's key, `namespace.name`.

    Raises:
        InvalidJobError: none does; the message names those that the job may use.
    """
    parsed, namespace = parse_storage_uri(uri), job.partition(".")[0]
    if not _LABEL.fullmatch(namespace):
        raise InvalidJobError(
            f"job {job!r} has no namespace, so no storage location is open to it; submit it to "
            f"Kubernetes"
        )
    open_to_it = [one for one in locations if not one.namespaces or namespace in one.namespaces]
    for location in open_to_it:
        if parsed.is_within(location.uri(namespace)):
            return location
    names = [str(location.uri(namespace)) for location in open_to_it]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    allowed = f"may use {', '.join(names[:_SHOWN])}{more}: choose one, or" if names else "has none:"
    raise InvalidJobError(
        f"spec.persistence.uri = {uri!r} is in no storage location that the platform team allows. "
        f"Namespace {namespace} {allowed} ask the platform team to add it to persistence.locations "
        f"of Holdfast's chart"
    )


def _problems(location: StorageLocation) -> list[Problem]:
    problems = []
    if not is_storage_uri(location.prefix.replace(NAMESPACE, "x")):
        fix = f"{HOW_TO_WRITE_A_STORAGE_URI}; {NAMESPACE} stands for the job's namespace"
        problems.append(
            Problem(path="location.prefix", value=location.prefix, wrong=NOT_A_STORAGE_URI, fix=fix)
        )
    elif location.credentials and location.uri("x").scheme != "s3":
        problems.append(
            Problem(
                path="location.credentials",
                value=location.credentials,
                wrong="only s3 locations can have their own credentials",
                fix="remove them, and give credentials to all daemons (daemon.storage)",
            )
        )
    for namespace in location.namespaces:
        if not _LABEL.fullmatch(namespace):
            problems.append(
                Problem(
                    path="location.namespaces",
                    value=namespace,
                    wrong="not the name of a namespace",
                    fix="write lower-case letters, digits and '-'",
                )
            )
    return problems
