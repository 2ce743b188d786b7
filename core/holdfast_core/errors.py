"""The one tree of errors.

Every error that Holdfast raises on purpose is a `HoldfastError`. Errors of other libraries are
translated where they enter (an adapter's boundary) and chained. A message states what was wrong,
with the value, and what to do about it.

`code` is the stable name of the kind of error: it crosses process boundaries in the protocol and
labels metrics, so it never changes once released.
"""

from __future__ import annotations

from typing import ClassVar


class HoldfastError(Exception):
    """Base of everything that Holdfast raises on purpose."""

    code: ClassVar[str] = "error"
    refuses_saves: ClassVar[bool] = False
    """Whether saves that end with it go on doing so until somebody changes something. After any
    other error the next save may succeed."""


class InvalidJobError(HoldfastError):
    """The job document, topology or settings contradict themselves or name something unknown."""

    code = "invalid_job"
    refuses_saves = True


class MissingPackageError(HoldfastError, ImportError):
    """A package of an optional group is not installed."""

    code = "missing_package"
    refuses_saves = True


class ProtocolError(HoldfastError):
    """A message violates the protocol: wrong version, unknown session, bad bytes."""

    code = "protocol"


class VersionMismatchError(ProtocolError):
    """The SDK and the daemon, or two daemons, speak different versions of the protocol."""

    code = "version_mismatch"
    refuses_saves = True


class UnknownSessionError(ProtocolError):
    """The daemon has no such session, usually because it restarted: open a new one."""

    code = "unknown_session"


class StaleEpochError(HoldfastError):
    """The sender acts in an epoch that has ended. It is fenced and must stop."""

    code = "stale_epoch"


class RankInUseError(HoldfastError):
    """Another live process holds this rank's arena."""

    code = "rank_in_use"


class StepOrderError(HoldfastError):
    """A save was called for a step that is not newer than the last saved step of this session."""

    code = "step_order"


class MemoryBudgetError(HoldfastError):
    """A session would not fit into the memory that the daemon may use.

    `needed_bytes` and `available_bytes` are the two numbers that an operator needs.
    """

    code = "memory_budget"
    refuses_saves = True

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class StorageError(HoldfastError):
    """The node's tmpfs is missing, unwritable, full, or failed an operation."""

    code = "storage"


class CorruptError(HoldfastError):
    """Bytes do not match their checksum, or a manifest does not match its own."""

    code = "corrupt"


class UnreachableError(HoldfastError):
    """A peer, daemon or service did not answer in time."""

    code = "unreachable"


class RateLimitedError(HoldfastError):
    """The caller sends more requests than it may."""

    code = "rate_limited"


class AccessDeniedError(HoldfastError):
    """The caller is known, but may not act for this job."""

    code = "access_denied"
    refuses_saves = True


class UnauthenticatedError(AccessDeniedError):
    """The caller did not prove its identity: its token is missing or not accepted."""

    code = "unauthenticated"


class NoRecoveryLineError(HoldfastError):
    """No generation can be restored on every rank."""

    code = "no_recovery_line"


class BeginsAnewError(NoRecoveryLineError):
    """Training starts from the beginning, because there is no state to continue from or to return
    to: a process that has trained must end, so that a new one can start."""

    code = "begins_anew"


class ReplicaMismatchError(HoldfastError):
    """Ranks that the topology declares to be replicas of a unit hold different bytes for it."""

    code = "replica_mismatch"
    refuses_saves = True


class ReplicasDivergedError(HoldfastError):
    """Ranks that held the same bytes of a unit no longer do; a snapshot would be a mixture."""

    code = "replicas_diverged"
    refuses_saves = True


class LayoutMismatchError(HoldfastError):
    """A snapshot's tensors differ in name, shape or dtype from the live ones."""

    code = "layout_mismatch"
    refuses_saves = True


class SnapshotSkippedError(HoldfastError):
    """A snapshot was not taken or did not survive; training continues without it."""

    code = "snapshot_skipped"


class SaveFailedError(HoldfastError):
    """A save ended with an error that Holdfast did not expect, such as one of the script's own
    `state_dict`."""

    code = "save_failed"
    refuses_saves = True


class UnsavedError(HoldfastError):
    """A process trains and has not called `save`: it has no session, or does not use it."""

    code = "unsaved"
    refuses_saves = True


class ProtectionRequiredError(HoldfastError):
    """Training would continue unprotected, and `require_protection` forbids that."""

    code = "protection_required"


def by_code(code: str, message: str) -> HoldfastError:
    """The error with `code` and `message`, as the other side of a connection raised it."""
    for kind in _kinds(HoldfastError):
        if kind.code == code:
            if kind is MemoryBudgetError:
                return MemoryBudgetError(message, needed_bytes=0, available_bytes=0)
            return kind(message)
    return HoldfastError(message)


def known_code(code: str) -> str:
    """`code` if it is the code of an error here; otherwise empty. Its sender may be a newer
    version, or send anything."""
    return code if code in _CODES else ""


def refuses_saves(code: str) -> bool:
    """Whether an error with `code` refuses saves until somebody changes something."""
    return code in _REFUSING


def _kinds(root: type[HoldfastError]) -> list[type[HoldfastError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _kinds(child))]


_CODES = frozenset(kind.code for kind in _kinds(HoldfastError))
_REFUSING = frozenset(kind.code for kind in _kinds(HoldfastError) if kind.refuses_saves)
