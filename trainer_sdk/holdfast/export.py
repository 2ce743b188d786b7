"""Export of a persisted set as a checkpoint of torch: `python -m holdfast.export`.

    python -m holdfast.export s3://bucket/tier --job default.moe --to checkpoint

One process writes the checkpoint tensor by tensor, so it never holds the whole model. The result
loads with `dcp.load(state_dict, checkpoint_id="checkpoint")`, without Holdfast installed.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast._dcp.reader import HoldfastReader
from holdfast._state.extras import dtype_of_name
from holdfast_core.durable.set_tensors import Reading
from holdfast_core.errors import HoldfastError, InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_storage.whole_sets import WholeSet


def export_dcp(reader: HoldfastReader, to: Path, *, model_only: bool = False) -> Generation:
    """Write the set of `reader` to the directory `to`, as a checkpoint of torch.

    Args:
        model_only: whether to leave out the optimizer.

    Returns:
        The generation of the set.

    Raises:
        CheckpointException: torch could not write; its `failures` has the causes.
        HoldfastError: the set cannot be opened.
    """
    source = reader.source
    state: dict[str, Any] = {}
    for name, path in reader.read_metadata().planner_data.items():
        if model_only and len(path) > 1:
            continue
        tensor = source.tensors.get(name)
        if tensor is None:
            _put(state, path, reader.values[name].value)
        else:
            meta = torch.empty(tensor.shape, dtype=dtype_of_name(tensor.dtype), device="meta")
            _put(state, path, meta)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(to), planner=_ReadingPlanner(source))
    return reader.generation


def _put(state: dict[str, Any], path: Sequence[str | int], value: object) -> None:
    """Put `value` at `path` in nested dicts and lists: numbers in the path are indices of lists."""
    at: Any = state
    for key, following in pairwise(path):
        made: Any = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            if key == len(at):
                at.append(made)
            at = at[key]
        else:
            at = at.setdefault(key, made)
    at[path[-1]] = value


class _ReadingPlanner(DefaultSavePlanner):
    """Planner that reads each tensor only when the writer is about to write it."""

    def __init__(self, source: WholeSet) -> None:
        super().__init__()
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> Any:
        tensor = self._source.tensors.get(write_item.index.fqn)
        if tensor is None:
            return super().resolve_data(write_item)
        array = self._source.array(tensor, (0,) * len(tensor.shape), tensor.shape)
        copy = torch.empty(tensor.shape, dtype=dtype_of_name(tensor.dtype), device="cpu")
        copy.reshape(-1).view(torch.uint8).numpy().data[:] = array.tobytes()
        return copy


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, or 2 if it has printed an error."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.export",
        description="Write a set of the durable tier as a checkpoint of "
        "torch.distributed.checkpoint.",
    )
    add = parser.add_argument
    add("uri", help="URI of the tier")
    add("--job", required=True, help="the job's directory below the tier")
    add(
        "--generation", metavar="EPOCH.STEP", help="set to write (default: the newest complete one)"
    )
    add("--to", type=Path, required=True, metavar="DIR", help="directory of the checkpoint")
    add("--model-only", action="store_true", help="leave out the optimizer")
    add(
        "--tensor-parallel",
        action="append",
        default=[],
        metavar="PATTERN=DIM",
        help="dimension along which tensors with matching names are split over tensor-parallel "
        "ranks, or -1 for whole copies; may be repeated, and the first match counts",
    )
    options = parser.parse_args(argv)
    try:
        cut = dict(_dimension(text) for text in options.tensor_parallel)
        reader = HoldfastReader(
            options.uri,
            job=options.job,
            generation=options.generation,
            reading=Reading(tensor_parallel=cut),
        )
        generation = export_dcp(reader, options.to, model_only=options.model_only)
    except HoldfastError as error:
        print(f"holdfast.export: {error}", file=sys.stderr)
        return 2
    print(f"wrote generation {generation} of {options.job} to {options.to}")
    return 0


def _dimension(text: str) -> tuple[str, int]:
    pattern, _, dim = text.rpartition("=")
    if not pattern or not re.fullmatch("-?[0-9]{1,9}", dim):
        raise InvalidJobError(f"--tensor-parallel {text!r}: write PATTERN=DIMENSION")
    return pattern, int(dim)


if __name__ == "__main__":
    raise SystemExit(main())
