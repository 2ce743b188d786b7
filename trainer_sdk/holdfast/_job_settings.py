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
    require_protection: bool | None = None
    """Whether training ends rather than continues while its saves are refused. true: a trainer
    whose saves are refused, or whose script opens no session, raises ProtectionRequiredError and
    exits with code 81. The job then fails with the refusal as its reason, unless a failure rule
    names this code. A save that is only skipped ends nothing. None takes the job's
    `snapshot.requireProtection`, through `HOLDFAST_REQUIRE_PROTECTION`, or False."""
