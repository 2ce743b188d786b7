"""`holdfast export`: writes a persisted set in another format.

This module writes plain safetensors files, as model hubs and inference servers expect them: whole
tensors under chosen names, in one file or in several with an index. That takes about `BLOCK_BYTES`
of memory, and needs neither torch nor the safetensors package. DCP checkpoints are written by a
process that has torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from holdfast_cli.commands.export_names import (
    HUGGING_FACE,
    Exported,
    NameRule,
    decode_rules,
    tensors_to_export,
)
from holdfast_core.durable.rank_files import safetensors_dtype
from holdfast_core.durable.set_tensors import Reading
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_storage.whole_sets import WholeSet, open_set

SHARD_BYTES = 5_000_000_000
"""Largest file, as in Hugging Face's libraries; a larger tensor gets a file of its own."""

BLOCK_BYTES = 256 * 1024 * 1024


def export(options: argparse.Namespace) -> int:
    """Carry out `holdfast export`; returns the exit code."""
    uri, job = _tier_and_job(options)
    if options.format == "dcp":
        # Its files are torch's, so a process that has torch writes them.
        command = [sys.executable, "-m", "holdfast.export", uri, "--job", job, "--to", options.to]
        command += ["--generation", options.generation] if options.generation else []
        command += [f"--tensor-parallel={text}" for text in options.tensor_parallel]
        command += [] if options.optimizer else ["--model-only"]
        return subprocess.run(list(map(str, command)), check=False).returncode
    reading = Reading(
        by_expert=options.names is not None,
        tensor_parallel=dict(map(_dimension, options.tensor_parallel)),
    )
    source = open_set(uri, job, options.generation or "", reading=reading)
    wanted = tensors_to_export(
        source.tensors.values(), _rules(options.names), optimizer=options.optimizer
    )
    files = export_safetensors(source, wanted, options.to, shard_bytes=options.shard_size)
    generation = source.manifests[0].generation
    print(f"wrote generation {generation} of {job}: {len(wanted)} tensors, to {options.to}:")
    for file in files:
        print(f"  {file.name}  {file.stat().st_size:,} bytes")
    return 0


def _tier_and_job(options: argparse.Namespace) -> tuple[str, str]:
    """URI of the durable tier, and the job's key."""
    if options.job:
        return options.uri, options.job
    uri, _, job = options.uri.rstrip("/").rpartition("/")
    if not uri or not job:
        raise InvalidJobError(f"{options.uri!r} names no job: give --job, or the URI of its sets")
    return uri, job


def _rules(names: str | None) -> tuple[NameRule, ...] | None:
    if names is None:
        return None
    if names == "hf":
        return HUGGING_FACE
    try:
        return decode_rules(Path(names).read_bytes())
    except OSError as error:
        raise StorageError(f"--names {names}: {error}; give 'hf' or a file") from error


def _dimension(text: str) -> tuple[str, int]:
    pattern, _, dim = text.rpartition("=")
    try:
        return pattern, int(dim)
    except ValueError as error:
        raise InvalidJobError(
            f"--tensor-parallel {text!r}: write PATTERN=DIMENSION, -1 for whole copies"
        ) from error


def export_safetensors(
    source: WholeSet, wanted: Sequence[Exported], to: Path, *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write `wanted` into the directory `to`: `model.safetensors`, or several
    `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.

    A file appears when it is complete, the index last.

    Returns:
        The files, the index last.

    Raises:
        InvalidJobError: safetensors cannot hold a tensor's dtype.
        CorruptError: the set's bytes do not match their digests.
        StorageError: `to` cannot be written, or the set cannot be read.
    """
    shards = _shards(wanted, shard_bytes)
    count, files = len(shards), []
    where: dict[str, str] = {}
    try:
        to.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(shards, start=1):
            single = "model.safetensors"
            name = single if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            _write(source, shard, to / name)
            files.append(to / name)
            where.update(dict.fromkeys((item.name for item in shard), name))
        if count > 1:
            index = to / "model.safetensors.index.json"
            total = sum(item.nbytes for item in wanted)
            document = {"metadata": {"total_size": total}, "weight_map": where}
            _replace(index, [msgspec.json.format(msgspec.json.encode(document), indent=2)])
            files.append(index)
    except OSError as error:
        raise StorageError(f"the export to {to} failed: {error}") from error
    return files


def _shards(wanted: Sequence[Exported], shard_bytes: int) -> list[list[Exported]]:
    shards: list[list[Exported]] = [[]]
    size = 0
    for item in wanted:
        if shards[-1] and size + item.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def _write(source: WholeSet, shard: Sequence[Exported], path: Path) -> None:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item in shard:
        dtype = safetensors_dtype(item.tensor.dtype)
        if dtype is None:
            raise InvalidJobError(
                f"safetensors cannot hold {item.tensor.dtype}, which {item.name} is; export to dcp"
            )
        end = at + item.nbytes
        table[item.name] = {"dtype": dtype, "shape": item.new_shape, "data_offsets": [at, end]}
        at = end
    body = msgspec.json.encode(table)
    body = body.ljust(-(-len(body) // 8) * 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(body).to_bytes(8, "little")
        yield body
        for item in shard:
            yield from _blocks(source, item)

    _replace(path, parts())


def _blocks(source: WholeSet, item: Exported) -> Iterator[memoryview]:
    """The bytes of an exported tensor, in order."""
    shape, tensor = item.shape, item.tensor
    if not shape or item.transpose:
        offsets = (item.first, *([0] * (len(shape) - 1)))[: len(shape)]
        block = source.array(tensor, offsets, shape)
        block = block.swapaxes(-1, -2) if item.transpose else block
        yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        return
    rows = max(BLOCK_BYTES // max(item.nbytes // max(shape[0], 1), 1), 1)
    for row in range(0, shape[0], rows):
        offsets = (item.first + row, *([0] * (len(shape) - 1)))
        lengths = (min(rows, shape[0] - row), *shape[1:])
        yield source.array(tensor, offsets, lengths).reshape(-1).view(np.uint8).data


def _replace(path: Path, parts: Iterator[bytes | memoryview] | Sequence[bytes]) -> None:
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        for part in parts:
            file.write(part)
    new.replace(path)
