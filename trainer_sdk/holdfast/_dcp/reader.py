"""Reader of a persisted set as a checkpoint of torch.distributed.checkpoint: `HoldfastReader`.

The set's tensors are offered in their full shapes, in the boxes in which the ranks captured them;
torch's planner then requests the boxes that the loading ranks need, in any parallelism. Numbers and
other plain values of the optimizer come from the extras. The reader must not write, or load a
pickle from the set. torch's interface requires plain values pickled, so they are pickled in memory
after they were decoded.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast._state.extras import decode_extras, dtype_of_name, split_extras
from holdfast_core.durable.set_tensors import OPTIMIZER_PREFIX, Reading, SetTensor
from holdfast_core.errors import HoldfastError, InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.names import TensorName
from holdfast_storage.whole_sets import Want, WholeSet, open_set

_log = logging.getLogger("holdfast")

BATCH_BYTES = 256 * 1024 * 1024
"""Approximate size of a batch, which bounds the buffers for tensors that are not contiguous on the
CPU."""

_THREADS = 8
_OUTER = OPTIMIZER_PREFIX.removesuffix(".")


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A value that is not a tensor, and its path in a nested state dict."""

    path: tuple[str | int, ...]
    value: object


class HoldfastReader(StorageReader):
    """Reader of a persisted set, for `dcp.load`:
    `dcp.load(state_dict, storage_reader=HoldfastReader(uri, job="moe"))`.

    Parameters and buffers are under their names in the model, optimizer states under
    `optim.state.<parameter>.<key>`, hyperparameters under `optim.param_groups`, as in a state dict
    `{**get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}`. Experts
    are numbered over all ranks; stacked expert weights have all experts in their first dimension.

    Args:
        uri: location of the tier, as in the job file: `file:///checkpoints`, `s3://bucket/prefix`.
        job: the job's directory below the tier.
        generation: `epoch.step`; by default the newest complete set. `checkpoint_id` of `dcp.load`
            also selects it.
        reading: see `Reading`: facts of tensor and pipeline parallelism that layouts lack.
        options: options of the file system, as fsspec takes them.
        source: a set to read instead of `uri`.

    Nothing is read before `dcp.load`, which raises errors of any rank as its own
    `CheckpointException`, whose `failures` has these errors by rank:

    Raises:
        StorageError: when there is no such set, or the storage cannot be read.
        CorruptError: when bytes do not match their digests.
        LayoutMismatchError: when the tensors cannot be assembled whole.
        InvalidJobError: when `reading` lacks something.
    """

    def __init__(
        self,
        uri: str = "",
        *,
        job: str = "",
        generation: Generation | str | None = None,
        reading: Reading | None = None,
        options: Mapping[str, Any] | None = None,
        source: WholeSet | None = None,
    ) -> None:
        if source is None and not (uri and job):
            raise InvalidJobError("name the set to read: HoldfastReader(uri, job=...)")
        self._uri, self._job = uri, job
        self._wanted = str(generation) if generation is not None else ""
        self._reading, self._options = reading, options
        self._source = source
        self._values: Mapping[str, PlainValue] | None = None

    @property
    def source(self) -> WholeSet:
        """Set to read, opened on first use."""
        if self._source is None:
            self._source = open_set(
                self._uri, self._job, self._wanted, reading=self._reading, options=self._options
            )
        return self._source

    @property
    def values(self) -> Mapping[str, PlainValue]:
        """Values that are not tensors, by name."""
        if self._values is None:
            self._values = plain_values(self.source)
        return self._values

    @property
    def generation(self) -> Generation:
        """Generation of the set that is read."""
        return self.source.manifests[0].generation

    def extras(self, rank: int = 0) -> dict[str, Any]:
        """Read a rank's extras: `step`, `stateful` (by the names given to `holdfast.init`), `rng`
        and more. They restore a scheduler, a sampler, and the step to continue from."""
        return extras_of(self.source, rank)

    # --- torch's interface ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and str(checkpoint_id) != self._wanted:
            if not self._uri:
                raise InvalidJobError(f"this reader has one set; it cannot open {checkpoint_id}")
            self._wanted, self._source, self._values = str(checkpoint_id), None, None

    def read_metadata(self) -> Metadata:
        try:
            return self._metadata()
        except HoldfastError as error:
            # Torch 2.11 raises "metadata is None" in its place, without the cause.
            _log.error("cannot load from the durable tier: %s", error)
            raise

    def _metadata(self) -> Metadata:
        entries: dict[str, Any] = {
            name: _metadata_of(tensor) for name, tensor in self.source.tensors.items()
        }
        paths: dict[str, tuple[str | int, ...]] = {
            name: _path_of(tensor) for name, tensor in self.source.tensors.items()
        }
        for name, plain in self.values.items():
            entries[name] = BytesStorageMetadata()
            paths[name] = plain.path
        return Metadata(state_dict_metadata=entries, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: list[tuple[Want, ReadItem]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self.values[item.storage_index.fqn].value, data)
                data.seek(0)
                planner.load_bytes(item, data)
            else:
                wanted.append((self._want(item), item))
        wanted.sort(key=lambda pair: pair[0].order)
        for batch in _batches(wanted):
            self._read(batch, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        epoch, _, step = str(checkpoint_id).partition(".")
        return f"{epoch}{step}".isascii() and epoch.isdigit() and step.isdigit()

    def _want(self, item: ReadItem) -> Want:
        index = item.storage_index
        tensor = self.source.tensors[index.fqn]
        at = tuple(index.offset) if index.offset is not None else tensor.boxes[0].offsets
        return Want(
            tensor=tensor,
            box=next(box for box in tensor.boxes if box.offsets == at),
            offsets=tuple(item.storage_offsets),
            lengths=tuple(item.lengths),
            into=memoryview(b""),
        )

    def _read(self, batch: Sequence[tuple[Want, ReadItem]], planner: LoadPlanner) -> None:
        wants, after = [], []
        for want, item in batch:
            target = planner.resolve_tensor(item).detach()
            dtype = dtype_of_name(want.tensor.dtype)
            # Read directly into the tensor where its form is the set's.
            straight = (
                target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
            )
            part = target if straight else torch.empty(want.lengths, dtype=dtype, device="cpu")
            into = part.reshape(-1).view(torch.uint8).numpy().data
            wants.append(replace(want, into=into))
            after.append((item, target, part))
        self.source.read(wants)
        for item, target, part in after:
            if part is not target:
                target.copy_(part)
            planner.commit_tensor(item, target)


def _metadata_of(tensor: SetTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of_name(tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
            for box in tensor.boxes
        ],
    )


def _path_of(tensor: SetTensor) -> tuple[str, ...]:
    """Path of the tensor in a nested state dict."""
    if not tensor.key or tensor.own:
        return (tensor.name,)
    return (OPTIMIZER_PREFIX.removesuffix("."), "state", tensor.shown, tensor.key)


def _batches(
    wanted: Sequence[tuple[Want, ReadItem]],
) -> Iterator[list[tuple[Want, ReadItem]]]:
    """Yield batches in order, each of about `BATCH_BYTES`."""
    batch: list[tuple[Want, ReadItem]] = []
    size = 0
    for want, item in wanted:
        batch.append((want, item))
        size += want.tensor.item_bytes * math.prod(want.lengths)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def extras_of(source: WholeSet, rank: int) -> dict[str, Any]:
    """Read the extras of a rank: `step`, `stateful`, `optimizers`, `modules`, `rng`.

    Raises:
        CorruptError: when they cannot be decoded.
    """
    raw, _ = split_extras(source.extras(rank))
    decoded: dict[str, Any] = decode_extras(raw)
    return decoded


def plain_values(source: WholeSet) -> dict[str, PlainValue]:
    """Collect the plain values by name.

    Hyperparameters (rank 0's) appear by group, `optim.param_groups.0.lr`, as torch nests them, and
    by parameter, `optim.param_groups.<parameter>.lr`, as torch flattens them. Plain numbers of
    optimizer states appear as `optim.state.<parameter>.<key>`.
    """
    found: dict[str, PlainValue] = {}
    members = _members(source)
    with ThreadPoolExecutor(_THREADS) as pool:
        of_ranks = list(pool.map(lambda rank: extras_of(source, rank), source.manifests))
    for rank, extras in enumerate(of_ranks):
        optimizers = extras["optimizers"]
        if rank == 0:
            groups = [group for state in optimizers for group in state["groups"]]
            for index, group in enumerate(groups):
                params = [name for name, of in members.items() if of == index]
                for key, value in {**group, "params": params}.items():
                    path = (_OUTER, "param_groups", index, key)
                    found[".".join(map(str, path))] = PlainValue(path, value)
            for name, index in members.items():
                for key, value in groups[index].items():
                    flat = f"param_groups.{name}.{key}"
                    found[f"{_OUTER}.{flat}"] = PlainValue((_OUTER, flat), value)
        for state in (one for outer in optimizers for one in (outer, *outer.get("within", ()))):
            for name, values in state["scalars"].items():
                _add_scalars(found, TensorName.parse(name).path, values)
    return found


def _add_scalars(found: dict[str, PlainValue], name: str, values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        path = (_OUTER, "state", name, str(key))
        found.setdefault(".".join(path), PlainValue(path, value))


def _members(source: WholeSet) -> dict[str, int]:
    """Map each parameter to its group, in the set's order of names."""
    members: dict[str, int] = {}
    for tensor in source.tensors.values():
        if not tensor.key and tensor.role is TensorRole.COMPUTE:
            members[tensor.name] = tensor.param_group
    for tensor in source.tensors.values():
        # Masters that are the optimizer's parameters, in place of the model's.
        if tensor.key == "master" and members.get(tensor.parameter) == -1:
            members[tensor.parameter] = tensor.param_group
    return {name: group for name, group in members.items() if group >= 0}
