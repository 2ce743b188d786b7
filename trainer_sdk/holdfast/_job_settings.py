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
    mirror_replicas: bool | None = None
    """Whether parity takes what a node's own ranks hold replicas of from there. true: after its own
    bytes, a rank also copies those that its node needs from other nodes and that it holds as well,
    until training needs the tensors. What was copied, and is proved by its digest, does not cross
    the network. Pays where nothing is sharded over replicas; takes memory for as many bytes as a
    snapshot has, with RAIM6 or two replicas for twice as many. Needs the policy Full. None takes
    the job's `redundancy.mirrorReplicas`, through `HOLDFAST_MIRROR_REPLICAS`, or False."""
    repeat_steps_share: float | None = None
    """The part of the training time in which steps are checked. To find ranks that compute wrongly
    where no replica shows it: now and then, all ranks compute the gradients of a step twice, and a
    third time if they differ. Training goes on with what two executions agree on. Besides, other
    ranks of the same kind repeat some operations of that step, and the optimizer's step of some
    parameters, which finds a device that is wrong each time. Needs a loop of session.steps with
    world=, the policy Full, and training that is deterministic. 0: never. None takes the job's
    `failurePolicy.repeatStepsShare`, through `HOLDFAST_REPEAT_STEPS_SHARE`, or 0.0."""
