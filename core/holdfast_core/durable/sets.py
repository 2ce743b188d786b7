"""A set of the durable tier: one generation of a job, as the files of all its ranks and a manifest.

The manifest is written last and carries its own checksum: its presence makes the set complete.
Names come from outside (job files, storage that other programs write to), so a name that does not
match a pattern here exactly is never opened. This module handles names and bytes;
`holdfast_storage` handles places.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from holdfast_core.durable.rank_files import HEADER_BYTES_MAX, file_name
from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.stored import RankFile, StoredUnit
from holdfast_core.snapshots.units import UnitKey, UnitKind

SET_FORMAT = "holdfast-set/1"
EXPERTS_FORMAT = "holdfast-set/2"
"""Format of a set that names, for each expert, the set whose file holds it."""
LATEST_FORMAT = "holdfast-latest/1"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest.json"

MANIFEST_BYTES_MAX = 64 * 1024 * 1024
"""Largest manifest that is written and read. That of 100,000 ranks is smaller, unless it names the
sets of their experts."""

FILE_BYTES_MAX = 1 << 50

_JOB = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,251}[A-Za-z0-9])?", re.ASCII)
_SET = re.compile(r"([0-9]{8})\.([0-9]{12})", re.ASCII)
_HEX64 = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LAYOUT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSet:
    """Contents of a set's manifest."""

    job: str
    generation: Generation
    topology: str
    """Canonical text of the parallel topology that its ranks were captured in."""
    created: float
    """Time at which the set was committed, in seconds since 1970."""
    files: tuple[RankFile, ...]
    """Files of all ranks of the world, by rank."""

    @property
    def world_size(self) -> int:
        return len(self.files)

    @property
    def needs(self) -> frozenset[Generation]:
        """Other sets, whose files hold experts that this one names."""
        held = {unit.held_in for file in self.files for unit in file.units}
        return frozenset(held - {self.generation})

    @property
    def bytes(self) -> int:
        """Bytes of all ranks' files."""
        return sum(file.bytes for file in self.files)


def checked_job(name: str) -> str:
    """`name`, if it may be a directory below the tier.

    Raises:
        InvalidJobError: when it is not one plain name.
    """
    if not _JOB.fullmatch(name):
        raise InvalidJobError(
            f"{name!r} cannot be a job's directory in storage: use letters, digits, '-', '_' and "
            f"'.', with a letter or digit at both ends, at most 253 of them"
        )
    return name


def set_name(generation: Generation) -> str:
    """Name of a generation's directory. Names sort as generations do.

    Raises:
        InvalidJobError: when the epoch or step has more digits than the name has room for.
    """
    name = f"{generation.epoch:08d}.{generation.step:012d}"
    if not _SET.fullmatch(name):
        raise InvalidJobError(f"generation {generation} cannot be the name of a set")
    return name


def parse_set_name(name: str) -> Generation | None:
    """The generation whose set is named `name`; None when that is not the name of a set."""
    match = _SET.fullmatch(name)
    return Generation(int(match[1]), int(match[2])) if match else None


class _File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`RankFile` in JSON: 64-bit numbers as hexadecimal text, which every reader keeps exact."""

    rank: int
    file: str
    bytes: int
    header_bytes: int
    header_xxh3: str
    payload_bytes: int
    layout_id: str
    manifest_digest: str
    experts: dict[str, tuple[str, str]] = {}


class _Set(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    job: str
    generation: str
    world_size: int
    topology: str
    created: float
    ranks: list[_File]
    xxh3: str = ""


_SET_DECODER = msgspec.json.Decoder(_Set)


class _Latest(msgspec.Struct):
    format: str
    generation: str


_LATEST_DECODER = msgspec.json.Decoder(_Latest)


def encode_set(stored: StoredSet) -> bytes:
    """The set's manifest: canonical JSON (sorted names, no spaces) with its own xxh3-64, which is
    computed over the same JSON without the member `xxh3`."""
    document = _Set(
        format=EXPERTS_FORMAT if any(file.units for file in stored.files) else SET_FORMAT,
        job=stored.job,
        generation=str(stored.generation),
        world_size=stored.world_size,
        topology=stored.topology,
        created=float(stored.created),
        ranks=[_to_json(file) for file in stored.files],
    )
    document.xxh3 = xxhash.xxh3_64_hexdigest(_canonical(document))
    return _canonical(document)


def decode_set(data: bytes, *, job: str, generation: Generation) -> StoredSet:
    """The set that `encode_set` wrote for this generation of `job`.

    Raises:
        CorruptError: when it is damaged, of another set, or impossible.
    """
    where = f"the manifest of generation {generation} of {job}"
    try:
        document = _SET_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptError(f"{where} cannot be read: {error}") from error
    digest, document.xxh3 = document.xxh3, ""
    if document.format not in (SET_FORMAT, EXPERTS_FORMAT):
        raise CorruptError(
            f"{where} is of format {document.format!r}; this version reads {SET_FORMAT} and "
            f"{EXPERTS_FORMAT}"
        )
    if xxhash.xxh3_64_hexdigest(_canonical(document)) != digest:
        raise CorruptError(f"{where} does not match its own checksum")
    if (document.job, document.generation) != (job, str(generation)):
        raise CorruptError(f"{where} is of {document.generation} of {document.job}")
    ranks = [file.rank for file in document.ranks]
    if not 0 < document.world_size == len(ranks) or ranks != list(range(len(ranks))):
        raise CorruptError(f"{where} does not name each of {document.world_size} ranks once")
    files = tuple(_from_json(file, where) for file in document.ranks)
    for file in files:
        check_units(file.units, generation, where)
    return StoredSet(
        job=job,
        generation=generation,
        topology=document.topology,
        created=document.created,
        files=files,
    )


def check_units(units: Collection[StoredUnit], generation: Generation, where: str) -> None:
    """Check a rank's experts in a set of `generation`; `where` begins the message.

    Raises:
        CorruptError: when the set cannot contain these.
    """
    names = [unit.unit for unit in units]
    try:
        kinds = {UnitKey.parse(name).kind for name in names}
    except InvalidJobError as error:
        raise CorruptError(f"{where}: {error}") from error
    ages = all(unit.version <= unit.held_in <= generation for unit in units)
    if names != sorted(set(names)) or not kinds <= {UnitKind.EXPERT} or not ages:
        raise CorruptError(
            f"{where} has an invalid list of experts (duplicates, disorder, other units, or "
            f"versions newer than the set): {names[:8]}"
        )


def checked_files(files: Sequence[RankFile], generation: Generation) -> tuple[RankFile, ...]:
    """`files` sorted by rank, if they have one file of each rank of a world.

    Raises:
        CorruptError: when a rank is missing, is there twice, or has a description that is
            impossible in a set of `generation`; or when ranks have different versions of parts of
            one expert.
    """
    ordered = tuple(sorted(files, key=lambda file: file.rank))
    ranks = [file.rank for file in ordered]
    if not ranks or ranks != list(range(len(ranks))):
        raise CorruptError(f"a set needs the file of each rank once; these are of ranks {ranks}")
    for file in ordered:
        _from_json(_to_json(file), "a report")
        check_units(file.units, generation, f"a report of rank {file.rank}")
    versions: dict[str, Generation] = {}
    for unit in (unit for file in ordered for unit in file.units):
        if versions.setdefault(unit.unit, unit.version) != unit.version:
            raise CorruptError(f"ranks hold different versions of parts of {unit.unit}")
    return ordered


def encode_latest(generation: Generation) -> bytes:
    """The hint beside the sets that names the newest complete one."""
    return _canonical(_Latest(format=LATEST_FORMAT, generation=str(generation)))


def decode_latest(data: bytes) -> Generation | None:
    """The generation that the hint names; None when it cannot be read. It is only a hint."""
    try:
        latest = _LATEST_DECODER.decode(data)
        generation = Generation.parse(latest.generation)
    except (ValueError, RecursionError):
        return None
    return generation if latest.format == LATEST_FORMAT else None


def _canonical(document: msgspec.Struct) -> bytes:
    return msgspec.json.encode(document, order="sorted")


def _to_json(file: RankFile) -> _File:
    return _File(
        rank=file.rank,
        file=file.file,
        bytes=file.bytes,
        header_bytes=file.header_bytes,
        header_xxh3=f"{file.header_xxh3:016x}",
        payload_bytes=file.payload_bytes,
        layout_id=file.layout_id,
        manifest_digest=f"{file.manifest_digest:016x}",
        experts={unit.unit: (str(unit.version), str(unit.held_in)) for unit in file.units},
    )


def _from_json(file: _File, where: str) -> RankFile:
    sound = (
        file.file == file_name(file.rank)
        and 8 <= file.header_bytes <= HEADER_BYTES_MAX
        and 0 <= file.payload_bytes <= FILE_BYTES_MAX
        and file.header_bytes <= file.bytes <= file.header_bytes + file.payload_bytes
        and (file.experts or file.bytes == file.header_bytes + file.payload_bytes)
        and _HEX64.fullmatch(file.header_xxh3)
        and _HEX64.fullmatch(file.manifest_digest)
        and _LAYOUT_ID.fullmatch(file.layout_id)
    )
    try:
        units = tuple(
            StoredUnit(
                unit=unit, version=Generation.parse(version), held_in=Generation.parse(held_in)
            )
            for unit, (version, held_in) in sorted(file.experts.items())
        )
    except ValueError as error:
        raise CorruptError(f"{where}: {error}") from error
    if not sound:
        raise CorruptError(
            f"{where} has impossible values for the file of rank {file.rank}: {file}"
        )
    return RankFile(
        rank=file.rank,
        file=file.file,
        bytes=file.bytes,
        header_bytes=file.header_bytes,
        header_xxh3=int(file.header_xxh3, 16),
        payload_bytes=file.payload_bytes,
        layout_id=file.layout_id,
        manifest_digest=int(file.manifest_digest, 16),
        units=units,
    )
