"""`holdfast export`: opens a persisted set and has it written in another format."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from holdfast_cli.commands.export_names import HUGGING_FACE, NameRule, decode_rules, exported
from holdfast_cli.commands.exporting import export_safetensors
from holdfast_core.durable.set_tensors import Reading
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_storage.whole_sets import open_set


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
    wanted = exported(source.tensors.values(), _rules(options.names), optimizer=options.optimizer)
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
