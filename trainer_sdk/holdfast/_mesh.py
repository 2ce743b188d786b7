"""Topology of a torch DeviceMesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology

_KNOWN = ("dp", "ep", "tp", "pp")


def topology_from_device_mesh(mesh: DeviceMesh, *, ep: int | None = None) -> Topology:
    """Topology of a mesh with dimensions named `pp`, `dp`, `ep`, `tp`, outermost first.

    A dimension `ep` within `dp` (the mesh `(dp, ep)`) means that data parallelism spans both, as in
    `Topology`: dp is the product. For a mesh without `ep`, the argument gives the degree.

    Raises:
        InvalidJobError: when dimensions are unnamed or unknown, when the argument contradicts the
            mesh, or when the mesh numbers the ranks in another order than `Topology`.
    """
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in _KNOWN]
    if not names or unknown:
        raise InvalidJobError(
            f"mesh dimensions {list(names)} must be named, and among {list(_KNOWN)}; build a "
            f"Topology yourself for another mesh"
        )
    order = [name for name in ("pp", "dp", "ep", "tp") if name in names]
    if list(names) != order:
        raise InvalidJobError(
            f"mesh dimensions are {list(names)}, but ranks are numbered as in {order}; reorder the "
            f"mesh"
        )
    size = {name: mesh.size(dim) for dim, name in enumerate(names)}
    if "ep" in size and ep not in (None, size["ep"]):
        raise InvalidJobError(f"the mesh has ep={size['ep']}, but the argument is ep={ep}")
    inner = size.get("ep", 1)
    topology = Topology(
        dp=size.get("dp", 1) * inner,
        ep=ep if ep is not None else inner,
        tp=size.get("tp", 1),
        pp=size.get("pp", 1),
    )
    if mesh.mesh.flatten().tolist() != list(range(topology.world_size)):
        raise InvalidJobError(
            "the mesh does not number all ranks in order; build a Topology yourself"
        )
    return topology
