"""The settings of a session that a user may tune. The defaults suit most jobs.

The daemon's socket and the rank of this process are not settings; `_environment` reads them.
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
    """How a session captures, copies, waits and checks.

    Raises:
        InvalidJobError: a value is out of its range, or two values contradict each other.
    """

    copy_threads: int = 2
    """Threads that copy and hash. Two of them reach the speed of a plain memcpy on most machines. A
    GPU copies by itself, and beside an H100 two threads hash 18 GB/s. A save lasts as long as its
    hashing, but training only waits for the copying."""
    device_checksums: bool = False
    """Whether CUDA devices compute the checksums of the tensors that they hold, with Triton, and
    copy what they restore out of the arena by themselves. Threads compute all others, and all
    where that does not work: see `session.counters.hashing`. Off as long as its kernel has not
    been measured on a device."""
    start_wait_s: float = 1.0
    """Time that the optimizer hook waits for the daemon to grant a slot before it abandons the
    save. Once copying has begun, the hook waits for its end, however long that takes: tensors must
    not change meanwhile."""
    rpc_timeout_s: float = 10.0
    """Deadline of a control call."""
    open_timeout_s: float = 600.0
    """Deadline of the call that allocates the arena."""
    restore_timeout_s: float = 600.0
    """Time that `restore` waits for the daemon to appear, and to decide what to restore."""
    exchange_timeout_s: float = 300.0
    """Deadline of the collectives of the session's own gloo group."""
    reopen_backoff_s: float = 1.0
    """First pause before a lost session is opened again; doubles up to `reopen_backoff_max_s`."""
    reopen_backoff_max_s: float = 30.0
    """Longest pause between two attempts to open a lost session again."""
    report_interval_s: float = 1.0
    """Shortest time between two progress reports to the daemon."""
    nan_check_every: int = 50
    """Number of saves from one check of all units for NaN to the next, starting with the second
    save; 0 for no checks."""
    check_replicas: bool = True
    """Whether the first save compares the units that the topology declares to be replicas."""
    recoveries_per_day: float | None = None
    """Expected number of recoveries a day. The session then takes only those of the loop's saves
    that cost the least time at this rate (REFT appendix A, eq. 9); None takes every save. Equal on
    all ranks. A job with `snapshot.interval.steps: auto` sets it through
    `HOLDFAST_RECOVERIES_PER_DAY`."""
    strategy: ShardStrategy = ShardStrategy.ADAPTIVE
    """How replicas divide the capture of the state that they share (PEC §3.2)."""
    policy: Policy | None = None
    """What a snapshot captures: a policy of `holdfast_core.job.snapshots`, such as `Full()` for
    everything. Equal on all ranks. None takes the job's `snapshot.policy`, through
    `HOLDFAST_POLICY`, or `Full()`."""

    go_on_live: bool = True
    """Whether processes that stay (`holdfast.elastic`) vote before each optimizer step, so that
    training can continue from their live state when others are lost. Without the vote, all ranks
    return to the recovery line. Equal on all ranks."""

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
                    f"{type(self.policy).__name__} and recoveries_per_day exclude each other: a "
                    f"window needs the save of every step; give only one of them"
                )
            if self.policy is not None and self.policy.recompute:
                raise InvalidJobError(
                    "recompute and recoveries_per_day exclude each other: a gradient makes up for "
                    "one step, so every save has to be taken; give only one of them"
                )
        if self.mirror_replicas and not isinstance(self.policy or Full(), Full):
            raise InvalidJobError(
                f"mirror_replicas and {type(self.policy).__name__} exclude each other: no replica "
                f"has the older state in its snapshots any more; give only one of them"
            )
        if self.repeat_steps_share and not isinstance(self.policy or Full(), Full):
            raise InvalidJobError(
                f"repeat_steps_share and {type(self.policy).__name__} exclude each other: tokens "
                f"of a step that is executed twice would count twice; give only one of them"
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
