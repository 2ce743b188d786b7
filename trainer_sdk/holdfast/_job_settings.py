"""Settings that a job gives its trainers.

Generated from core/holdfast_core/job by `make crds`; not edited by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """Settings that a session takes from its job where the script leaves them at None. Each is
    equal on all ranks."""

    compare_replicas_every: int | None = None
    """Snapshots from one comparison of replicas to the next. Ranks that hold the same state compare
    its checksums before such a snapshot is committed. 1: before each snapshot. 0: only before the
    first of a run. None takes the job's `snapshot.compareReplicasEvery`, through
    `HOLDFAST_COMPARE_REPLICAS_EVERY`, or 10."""
    store_compute_weights: bool | None = None
    """Whether snapshots hold 16-bit weights that follow from float32 masters. false: a snapshot
    with Adam's state needs 12 bytes for each parameter instead of 14. A weight is left out only
    while it equals its rounded master, which every save verifies bit for bit. None takes the job's
    `snapshot.storeComputeWeights`, through `HOLDFAST_STORE_COMPUTE_WEIGHTS`, or True."""
