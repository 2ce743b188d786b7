"""Memory that trainers need for the logs of what crosses the boundaries of pipeline stages.

A rank keeps everything that it has sent, and if the script asks for it also what it has received,
since the step that a restore of the newest protected generation brings back (MoEvement §3.4). This
module counts these bytes before a job runs; trainers keep the log itself
(`holdfast.elastic.Pipeline`).
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.snapshots import PolicyType, Repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryLogs:
    """Logs of a job's ranks."""

    steps: int
    """Most steps that a rank keeps."""
    step_bytes: tuple[int, ...]
    """For each stage, the bytes that one of its ranks logs in a step. Values that are summed over
    all stages have only a few bytes and are not counted."""
    node_bytes: int
    """Bytes of logs on the node that needs most."""

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """For each stage, the most bytes that one of its ranks keeps."""
        return tuple(nbytes * self.steps for nbytes in self.step_bytes)


def steps_kept(*, interval_steps: int, window: int, lag_steps: int) -> int:
    """Most steps that a rank keeps, which it does just before it learns that the next generation is
    protected.

    Args:
        interval_steps: steps from one snapshot to the next.
        window: steps of a sparse window, from whose first save on all are needed; 0 without one.
        lag_steps: steps that begin between a save and its protection.
    """
    # A save is skipped while the previous one is being protected.
    apart = max(window or interval_steps, lag_steps)
    return max(window - 1, 0) + apart + lag_steps


def plan_logs(
    job: MoETrainingJob,
    *,
    activation_bytes: int,
    micro_batches: int,
    interval_steps: int,
    lag_steps: int,
    log_received: bool = False,
) -> BoundaryLogs:
    """Plan the logs of `job`.

    Args:
        activation_bytes: of the output of a stage for one micro-batch, as one rank sends it. The
            gradient that comes back has as many.
        micro_batches: of a rank in a step.
        interval_steps, lag_steps: see `steps_kept`.
        log_received: whether a rank also logs what it receives, which is as much as it sends.

    Raises:
        InvalidJobError: no stage of the job could repeat steps alone.
    """
    topology, policy = job.topology(), job.spec.snapshot.policy.chosen
    if topology.pp == 1:
        raise InvalidJobError(
            f"{job.key} has one pipeline stage (spec.parallelism.pp), so nothing crosses a "
            f"boundary: leave out what is to be logged"
        )
    if policy.leaves_experts_out:
        whole = [kind.value for kind in PolicyType if not kind.policy.leaves_experts_out]
        raise InvalidJobError(
            f"with snapshot.policy.type {policy.type_name}, no stage repeats "
            f"steps alone, and logs are of no use: leave them out, or use {' or '.join(whole)}"
        )
    one = activation_bytes * micro_batches * (1 + log_received)
    sends = ((stage < topology.pp - 1) + (stage > 0) for stage in range(topology.pp))
    step_bytes = tuple(one * count for count in sends)
    window = policy.window_steps
    if window and policy.repeated is Repeats.OPTIMIZER:
        interval_steps, window = window, 0  # a line is the last step of its window
    steps = steps_kept(interval_steps=interval_steps, window=window, lag_steps=lag_steps)
    per_node = job.spec.nproc_per_node
    of_ranks = [step_bytes[topology.coordinates(rank).pp] for rank in range(topology.world_size)]
    node_bytes = max(
        sum(of_ranks[at : at + per_node]) for at in range(0, topology.world_size, per_node)
    )
    return BoundaryLogs(steps=steps, step_bytes=step_bytes, node_bytes=steps * node_bytes)
