"""Settings of a session that a user may tune.

Defaults suit most jobs. `_environment` has the daemon's socket and this process's rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from holdfast._job_settings import JobSettings
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.rules import check_policy
from holdfast_core.job.schema import SETTINGS
from holdfast_core.job.snapshots import Full, Policy, PolicyType, Repeats
from holdfast_core.snapshots.sharding import ShardStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(JobSettings):
    """Settings for how a session copies, waits and checks.

    Raises:
        InvalidJobError: when a value is out of its range.
    """

    copy_threads: int = 2
    """Threads that copy and hash. Two reach the speed of a plain memcpy on most machines. A GPU
    copies by itself, beside an H100 they hash 18 GB/s: a save takes as long as its hashes, but
    training waits for its copies only."""
    start_wait_s: float = 1.0
    """Time that the optimizer hook gives the daemon to grant a slot before it gives the save up.
    Once copying has begun the hook waits for its end, because tensors must not change under it."""
    rpc_timeout_s: float = 10.0
    """Deadline of a control call."""
    open_timeout_s: float = 600.0
    """Deadline of the call that allocates and pre-faults the arena."""
    restore_timeout_s: float = 600.0
    """Time that `restore` waits for the daemon to appear and to decide."""
    exchange_timeout_s: float = 300.0
    """Deadline of the collectives of the session's own gloo group."""
    reopen_backoff_s: float = 1.0
    """First pause after the daemon was lost; doubles up to `reopen_backoff_max_s`."""
    reopen_backoff_max_s: float = 30.0
    report_interval_s: float = 1.0
    """Least time between two progress reports."""
    nan_check_every: int = 50
    """Saves between two checks of all units for NaN, from the second save on; 0 for never."""
    check_replicas: bool = True
    """Whether the first save compares the units that the topology declares to be replicas."""
    recoveries_per_day: float | None = None
    """Expected recoveries a day: of the saves that the loop calls, take those that lose the least
    time at this rate (REFT appendix A, eq. 9); None takes all of them. Equal on all ranks. A job
    with `snapshot.interval.steps: auto` sets it through `HOLDFAST_RECOVERIES_PER_DAY`."""
    strategy: ShardStrategy = ShardStrategy.ADAPTIVE
    """Strategy by which replicas divide the capture of shared state (PEC §3.2)."""
    policy: Policy | None = None
    """What a snapshot captures: a policy of `holdfast_core.job.snapshots`, such as `Full()` for
    everything. Equal on all ranks. None takes the job's `snapshot.policy`, through
    `HOLDFAST_POLICY`, or `Full()`."""

    go_on_live: bool = True
    """Whether processes that stay (`holdfast.elastic`) vote before each step of the optimizer, so
    that training can go on from what they have when others are lost; if not, there is no vote, and
    all go back to the recovery line. Equal on all ranks."""

    @property
    def window(self) -> int:
        """Most steps of a sparse window; 0 where snapshots are of one step."""
        return (self.policy or Full()).window_steps

    @property
    def leaves_experts_out(self) -> bool:
        """Whether recoveries can lose tokens."""
        return (self.policy or Full()).leaves_experts_out

    @property
    def repeats(self) -> Repeats:
        """What a recovery repeats of a sparse window."""
        return (self.policy or Full()).repeated

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy | None):
            *others, last = (
                f"{kind.policy.__name__}({'...' if kind.policy.has_fields() else ''})"
                for kind in PolicyType
            )
            raise InvalidJobError(f"policy={self.policy!r}: give {', '.join(others)} or {last}")
        if self.policy is not None:
            check_policy(self.policy)
        if self.recoveries_per_day is not None:
            if not 0 < self.recoveries_per_day < inf:
                raise InvalidJobError(
                    f"recoveries_per_day={self.recoveries_per_day}: give a number above 0"
                )
            if self.window:
                raise InvalidJobError(
                    f"{type(self.policy).__name__} and recoveries_per_day are given; a window "
                    f"needs every step, so that every save has to be taken"
                )
            if self.policy is not None and self.policy.recompute:
                raise InvalidJobError(
                    "recompute and recoveries_per_day are given; a gradient makes up for one step, "
                    "so that every save has to be taken"
                )
        if self.copy_threads < 1:
            raise InvalidJobError(f"copy_threads={self.copy_threads}: give at least 1")
        if self.nan_check_every < 0:
            raise InvalidJobError(f"nan_check_every={self.nan_check_every}: give 0 or more")
        for setting in SETTINGS:
            if (value := getattr(self, setting.name)) is not None:
                setting.check(value)
        for name in (
            "start_wait_s",
            "rpc_timeout_s",
            "open_timeout_s",
            "restore_timeout_s",
            "exchange_timeout_s",
            "reopen_backoff_s",
            "reopen_backoff_max_s",
            "report_interval_s",
        ):
            if getattr(self, name) < 0:
                raise InvalidJobError(f"{name}={getattr(self, name)}: give 0 or more seconds")
