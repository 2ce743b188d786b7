"""Topology of a torch DeviceMesh, or of the degrees that a framework has computed.

Frameworks name the dimensions of a mesh in their own ways. For a snapshot, only four things matter:
the pipeline stage, the tensor-parallel rank, and, among the ranks that divide the data, who holds
the same experts. All names of dimensions that divide the data, replicate the model, shard it as
FSDP2 does, or divide sequences, mean data parallelism: the shards are DTensors, which know their
own place.
"""

from __future__ import annotations

import math
import warnings
from itertools import groupby, pairwise
from typing import Protocol, runtime_checkable

from torch.distributed.device_mesh import DeviceMesh

from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology

_DATA = (
    "dp",
    "dp_replicate",
    "replicate",
    "dp_shard",
    "shard",
    "fsdp",
    "hsdp",
    "batch",
    "cp",
    "dp_cp",
    "dp_shard_cp",
    "dp_shard_mod_ep",
    "efsdp",
)
"""Dimensions whose ranks hold the same experts as their neighbours in it."""
_EXPERTS = ("ep", "dp_shard_in_ep")
"""Dimensions, within data parallelism, over which experts are spread."""
_TENSORS = ("tp", "etp")
_PLACES = ("pp", "data", "ep", "tp")
"""Kinds of dimensions, outermost first, as `Topology` numbers the ranks."""


@runtime_checkable
class Degrees(Protocol):
    """Degrees of parallelism as attributes, as in torchtitan's `ParallelDims`."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int


def topology_from_device_mesh(mesh: DeviceMesh | Degrees, *, ep: int | None = None) -> Topology:
    """Topology of a device mesh, or of an object with torchtitan's degrees of parallelism.

    Dimensions of a mesh are, outermost first: `pp`; those that divide the data (`dp`,
    `dp_replicate`, `replicate`, `dp_shard`, `shard`, `fsdp`, `hsdp`, `batch`, `cp`, `dp_cp`,
    `dp_shard_cp`, `dp_shard_mod_ep`, `efsdp`); those over which experts are spread (`ep`,
    `dp_shard_in_ep`, and `cp` within the latter); and `tp`, or `etp` in a mesh of the experts. The
    degree dp is the product of all between `pp` and `tp`, as in `Topology`. Flattened dimensions
    may take the place of those that they span. If the mesh has a flattened dimension `ep`, it gives
    the degree.

    Args:
        mesh: a mesh of all ranks, or such an object; `etp` may be one of its attributes.
        ep: degree of expert parallelism, for a mesh that does not name it.

    Raises:
        InvalidJobError: when dimensions are unnamed or unknown, when the argument contradicts the
            mesh, or when the mesh numbers the ranks in another order than `Topology`.
    """
    if not isinstance(mesh, DeviceMesh):
        return _of_degrees(mesh, ep)
    names = mesh.mesh_dim_names or ()
    known = ("pp", *_DATA, *_EXPERTS, *_TENSORS)
    unknown = [name for name in names if name not in known]
    if not names or unknown:
        raise InvalidJobError(
            f"mesh dimensions {list(names)} must be named, and among {list(known)}; build a "
            f"Topology yourself for another mesh"
        )
    # Find the kind of each dimension. Each kind must be in one place.
    kinds = ["data" if name in _DATA else name for name in names]
    kinds = ["ep" if kind in _EXPERTS else "tp" if kind in _TENSORS else kind for kind in kinds]
    if "dp_shard_in_ep" in names:  # torchtitan's experts are also spread over these
        kinds = ["ep" if name == "cp" else kind for name, kind in zip(names, kinds, strict=True)]
    in_order = [kind for kind, _ in groupby(kinds)]
    if in_order != [kind for kind in _PLACES if kind in kinds] or kinds.count("tp") > 1:
        raise InvalidJobError(
            f"mesh dimensions are {list(names)}, but ranks are numbered by pipeline stage, then by "
            f"data, then by expert within the data, then by tensor (tp or etp); reorder the mesh, "
            f"or build a Topology yourself"
        )
    sizes = [(kind, mesh.size(dim)) for dim, kind in enumerate(kinds)]
    size = {kind: math.prod(n for of, n in sizes if of == kind) for kind in _PLACES}
    named = None if "ep" in names else _flattened_experts(mesh, size["tp"])
    if named is None and "ep" in kinds:
        named = size["ep"]
    if named is not None and ep not in (None, named):
        raise InvalidJobError(
            f"the mesh has ep={named}, but the argument is ep={ep}: leave the argument out"
        )
    topology = Topology(
        dp=size["data"] * size["ep"],
        ep=ep if ep is not None else named or 1,
        tp=size["tp"],
        pp=size["pp"],
    )
    if mesh.mesh.flatten().tolist() != list(range(topology.world_size)):
        raise InvalidJobError(
            "the mesh does not number all ranks in order; build a Topology yourself"
        )
    return topology


def _flattened_experts(mesh: DeviceMesh, tp: int) -> int | None:
    """Degree of the flattened dimension `ep` of a mesh; None if there is none. If it also spans
    tensor parallelism, the degree is 1: see `_of_degrees`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch warn of flattened dimensions
        try:
            ranks = mesh["ep"].mesh.flatten().tolist()
        except KeyError:
            return None
    steps = {after - rank for rank, after in pairwise(ranks)}
    if tp > 1 and steps == {1}:
        return 1
    if steps - {tp}:
        raise InvalidJobError(
            f"the dimension ep of the mesh has ranks {ranks}, but experts must be spread over the "
            f"innermost ranks of data parallelism; reorder the mesh, or build a Topology yourself"
        )
    return len(ranks)


def _of_degrees(dims: Degrees, ep: int | None) -> Topology:
    """Topology of torchtitan's degrees of parallelism.

    torchtitan numbers the ranks of its dense mesh as `Topology` does: pipeline stages outermost,
    then all that splits the data, then tensor parallelism. Its experts may also be spread over
    tensor-parallel ranks, which `Topology` cannot say. Then every rank counts as a holder of all
    experts. This only concerns policies that leave experts out, since the shards of experts are
    DTensors, of which each rank captures its own.
    """
    if not isinstance(dims, Degrees):
        raise InvalidJobError(
            f"a {type(dims).__qualname__} says nothing of parallelism: give a DeviceMesh, or an "
            f"object with the degrees dp_replicate, dp_shard, cp, tp, pp and ep, as torchtitan's "
            f"ParallelDims"
        )
    if dims.dp_shard < 1:
        raise InvalidJobError(
            f"dp_shard={dims.dp_shard} is not known yet: pass the ParallelDims once they are "
            f"built, or a Topology"
        )
    within = dims.tp == 1 or getattr(dims, "etp", 1) == dims.tp
    named = dims.ep if within else 1
    if ep not in (None, named):
        raise InvalidJobError(
            f"the degrees give ep={named}, but the argument is ep={ep}: leave the argument out"
        )
    return Topology(
        dp=dims.dp_replicate * dims.dp_shard * dims.cp, tp=dims.tp, pp=dims.pp, ep=named
    )
