"""Fault tolerance for Mixture-of-Experts training.

    session = holdfast.init(model=model, optimizer=optimizer,
                            stateful={"sampler": sampler}, topology=holdfast.Topology(dp=4, ep=4))
    start = session.restore()                # last completed step; None for a fresh start
    for step in range((start or 0) + 1, steps + 1):
        train_one_step()
        handle = session.save(step)          # futures: .staged, .committed, .protected, .persisted
    session.close()

The names below are the public API. In addition, `holdfast.testing` provides a daemon for tests, and
`holdfast.dcp` reads and writes checkpoints through torch.distributed.checkpoint.
"""

from holdfast import _packages as _packages
from holdfast import elastic
from holdfast._daemon.handles import SaveHandle
from holdfast._elastic.sampler import ElasticSampler
from holdfast._init import init
from holdfast._mesh import topology_from_device_mesh
from holdfast._sampler import RecoverableSampler
from holdfast._session.interface import Session
from holdfast._settings import Settings
from holdfast._state.extras import UnsupportedValueError
from holdfast._state.flat import FlatRange, FlatTensor
from holdfast_core.errors import (
    AccessDeniedError,
    CorruptError,
    HoldfastError,
    InvalidJobError,
    LayoutMismatchError,
    MemoryBudgetError,
    NoRecoveryLineError,
    ProtocolError,
    RankInUseError,
    ReplicaMismatchError,
    ReplicasDivergedError,
    SnapshotSkippedError,
    StaleEpochError,
    StepOrderError,
    StorageError,
    UnauthenticatedError,
    UnknownSessionError,
    UnreachableError,
    VersionMismatchError,
)
from holdfast_core.snapshots.sharding import ShardStrategy
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

__all__ = [
    "AccessDeniedError",
    "CorruptError",
    "ElasticSampler",
    "FlatRange",
    "FlatTensor",
    "HoldfastError",
    "InvalidJobError",
    "LayoutMismatchError",
    "MemoryBudgetError",
    "NoRecoveryLineError",
    "ProtocolError",
    "RankInUseError",
    "RecoverableSampler",
    "ReplicaMismatchError",
    "ReplicasDivergedError",
    "SaveHandle",
    "Session",
    "Settings",
    "ShardStrategy",
    "SnapshotSkippedError",
    "StaleEpochError",
    "StepOrderError",
    "StorageError",
    "Topology",
    "UnauthenticatedError",
    "UnitKey",
    "UnitKind",
    "UnknownSessionError",
    "UnreachableError",
    "UnsupportedValueError",
    "VersionMismatchError",
    "elastic",
    "init",
    "topology_from_device_mesh",
]
