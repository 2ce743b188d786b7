"""The client with which a session calls its daemon: a Protocol, and its implementation over gRPC.

Every failure is raised as a HoldfastError. An error that the daemon raised keeps its class
(`holdfast-code`), and an unreachable daemon is an UnreachableError. No module above this one uses
gRPC. Tensors never pass through the calls: their bytes go into the arena, which `claim` maps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from holdfast._copying.arena import MappedArena, claim_arena, read_arena
from holdfast._daemon.token import Metadata, Token
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError, ProtocolError, UnreachableError
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, decode_layout, decode_manifest
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.states import RestoreProgress, RestoreSource
from holdfast_protos import codec, persisting, trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels
from holdfast_protos.expert_plans import plan_to_proto
from holdfast_protos.loading import progress_from_proto
from holdfast_protos.losses import loss_to_proto

_RECONNECT_MS_MAX = 1000
_T = TypeVar("_T")
_Request = TypeVar("_Request")
OnProgress = Callable[[RestoreProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The epoch of this worker, and the number of ranks in its world."""

    epoch: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSnapshot:
    """A snapshot in the memory of this node that this rank may read."""

    manifest: Manifest
    layout: Layout
    slot: int
    token: str
    """Token that entitles this process to read the arena."""
    arena_bytes: int
    places: bytes = b""
    """Slot of each piece; see `holdfast_core.snapshots.pieces`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreDecision:
    """The daemon's decision: the generation to restore, and the snapshots that this rank reads."""

    line: Line
    source: RestoreSource = RestoreSource.NONE
    captured_by: int = 0
    """Number of ranks of the world that captured the line; 0 if it is the present world."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    """This rank's own snapshot; none for a fresh start. If another world captured the line, the
    snapshots that this rank reads on behalf of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An opened session with the daemon."""

    session: str
    token: str
    arena_bytes: int
    slot_bytes: int
    slots: int
    """Number of slots in the arena."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """A granted slot, or the reason why there is none now."""

    slot: int = -1
    skipped: str = ""
    places: bytes = b""
    """Slot for each piece; see `holdfast_core.snapshots.pieces`."""
    carried: bool = False
    """Whether unchanged pieces are carried over. If not, every piece must be written."""


class Stage(StrEnum):
    """Kind of a `DaemonEvent`: a stage of a generation, or the epoch's end."""

    PROTECTED = "protected"
    DEAD = "dead"
    UNPROTECTABLE = "unprotectable"
    PERSISTED = "persisted"
    WHOLE_AFTER = "whole_after"
    """A set in durable storage waits until all units are captured in one step after the
    generation."""
    EPOCH_ENDED = "epoch_ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonEvent:
    """An event of a generation, or the end of the epoch (then `epoch` is the new one)."""

    stage: Stage
    generation: Generation | None = None
    epoch: int = 0
    ends_process: bool = False
    """Whether this process must end itself with the epoch, because no agent of Holdfast does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A staged snapshot to seal."""

    session: str
    epoch: int
    step: int
    slot: int
    payload_bytes: int
    extras_bytes: int
    digests: bytes
    nan_units: tuple[str, ...] = ()
    experts: tuple[ExpertVersion, ...] = ()
    """Versions of the experts in this snapshot, and the known versions of other ranks' experts;
    empty unless snapshots leave experts out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerReport:
    """The progress of training and of saves, as the SDK measures it."""

    session: str
    step: int
    skipped: int
    failed: int
    failure: str
    failure_code: str
    save_period_s: float
    staged_s: float
    interval_steps: int = 0
    loss: LossReport | None = None
    plan: PlanReport | None = None


class DaemonClient(Protocol):
    """Calls from a session to its node's daemon. Methods raise nothing but HoldfastError."""

    def hello(self) -> Hello:
        """Ask for the present epoch. Raises StaleEpochError if the training world of this worker
        has ended."""

    def restore(
        self, epoch: int, timeout_s: float, on_progress: OnProgress, no_replay: str = ""
    ) -> RestoreDecision:
        """Block until the recovery line of the epoch is decided and this rank's snapshot is ready.

        Args:
            on_progress: called with each report of the daemon's progress.
            no_replay: why no pipeline stage repeats steps alone, for the log and the status.
        """

    def go_on(self, epoch: int, step: int, repeated_after: int | None = None) -> None:
        """Report that this rank continues live after `step`, without a restore.

        Args:
            repeated_after: step from which it has repeated steps alone; None if it has not.
        """

    def open(self, epoch: int, layout: bytes, largest_slot_bytes: int, timeout_s: float) -> Opened:
        """Allocate the arena. Raises MemoryBudgetError, RankInUseError, StaleEpochError."""

    def claim(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        """Map the arena that the token from `open` allows this process to write."""

    def reader(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        """Map an arena that the token from `restore` allows this process to read."""

    def grant(
        self,
        session: str,
        epoch: int,
        step: int,
        base: Generation | None = None,
        unchanged: bytes = b"",
        first_step: int = 0,
    ) -> Grant:
        """Request a slot, and let the daemon carry over from `base` the pieces in the bit map
        `unchanged`.

        Args:
            first_step: first step of the window that ends with `step`; 0 if the snapshot captures
                one step.
        """

    def commit(self, commit: Commit) -> None:
        """Seal the manifest. Returns when it is sealed."""

    def abort(self, session: str, epoch: int, step: int, reason: str) -> None:
        """Give back a granted slot."""

    def watch(self, session: str) -> Iterator[DaemonEvent]:
        """Yield events until the session ends."""

    def progress(self, report: TrainerReport) -> None:
        """Report progress, for heartbeats and metrics."""

    def report_without_session(
        self, epoch: int, report: TrainerReport, *, closed: bool = False
    ) -> None:
        """Report the progress of this rank while it has no session because its saves are refused.

        Args:
            closed: whether the rank has stopped training.
        """

    def close_session(self, session: str) -> None:
        """End the session. The daemon keeps its snapshots."""

    def close(self) -> None:
        """Close the connection, and end all calls that wait on it."""


class GrpcClient:
    """Client of the daemon at the Unix socket `socket`. Calls carry the token in `token_file`.

    Args:
        world: name on which the ranks of this world have agreed; empty if an agent of Holdfast has
            formed the world.
    """

    def __init__(
        self,
        socket: Path,
        job: str,
        rank: int,
        store_address: str,
        timeout_s: float,
        token_file: Path | None = None,
        world: str = "",
    ) -> None:
        self._job = job
        self._rank = rank
        self._store_address = store_address
        self._world = world
        self._timeout_s = timeout_s
        self._socket = socket
        self._token = Token(token_file)
        self._arena_socket = socket.parent / "arena.sock"
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=channels.channel_options(reconnect_ms_max=_RECONNECT_MS_MAX),
        )
        self._stub = trainer_pb2_grpc.TrainerStub(self._channel)

    def hello(self) -> Hello:
        request = trainer_pb2.HelloRequest(
            protocol_version=codec.PROTOCOL_VERSION,
            job=self._job,
            rank=self._rank,
            store_address=self._store_address,
            world=self._world,
        )
        reply = self._ask(self._stub.Hello, request)
        codec.check_version(reply.protocol_version, f"the daemon at {self._socket}")
        if reply.arena_socket:
            self._arena_socket = Path(reply.arena_socket)
        return Hello(epoch=reply.epoch, world_size=reply.world_size)

    def restore(
        self, epoch: int, timeout_s: float, on_progress: OnProgress, no_replay: str = ""
    ) -> RestoreDecision:
        request = trainer_pb2.RestoreRequest(
            job=self._job, rank=self._rank, epoch=epoch, no_replay=no_replay
        )

        def run() -> RestoreDecision:
            for message in self._stub.Restore(
                request, timeout=timeout_s, metadata=self._token.metadata()
            ):
                if message.HasField("decision"):
                    return _decision(message.decision)
                on_progress(progress_from_proto(message))
            raise ProtocolError("the daemon ended a restore without a decision")

        return self._call(run)

    def go_on(self, epoch: int, step: int, repeated_after: int | None = None) -> None:
        request = trainer_pb2.RestoreRequest(
            job=self._job, rank=self._rank, epoch=epoch, live=step, repeated_after=repeated_after
        )

        def run() -> None:
            for _ in self._stub.Restore(
                request, timeout=self._timeout_s, metadata=self._token.metadata()
            ):
                pass

        self._call(run)

    def open(self, epoch: int, layout: bytes, largest_slot_bytes: int, timeout_s: float) -> Opened:
        request = trainer_pb2.OpenRequest(
            job=self._job,
            rank=self._rank,
            epoch=epoch,
            layout=layout,
            largest_slot_bytes=largest_slot_bytes,
            pid=os.getpid(),
        )
        reply = self._ask(self._stub.Open, request, timeout_s)
        return Opened(
            session=reply.session,
            token=reply.token,
            arena_bytes=reply.arena_bytes,
            slot_bytes=reply.slot_bytes,
            slots=reply.slots,
        )

    def claim(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        return claim_arena(self._arena_socket, token, nbytes, timeout_s=timeout_s)

    def reader(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        return read_arena(self._arena_socket, token, nbytes, timeout_s=timeout_s)

    def grant(
        self,
        session: str,
        epoch: int,
        step: int,
        base: Generation | None = None,
        unchanged: bytes = b"",
        first_step: int = 0,
    ) -> Grant:
        request = trainer_pb2.GrantRequest(
            session=session,
            epoch=epoch,
            step=step,
            base=codec.optional_generation_to_proto(base),
            unchanged=unchanged,
            first_step=first_step,
        )
        reply = self._ask(self._stub.Grant, request)
        if reply.WhichOneof("outcome") == "slot":
            return Grant(slot=reply.slot, places=reply.places, carried=reply.carried)
        return Grant(skipped=reply.skipped or "the daemon has no slot")

    def commit(self, commit: Commit) -> None:
        request = trainer_pb2.CommitRequest(
            session=commit.session,
            epoch=commit.epoch,
            step=commit.step,
            slot=commit.slot,
            payload_bytes=commit.payload_bytes,
            extras_bytes=commit.extras_bytes,
            digests=commit.digests,
            nan_units=commit.nan_units,
            experts=map(persisting.expert_to_proto, commit.experts),
        )
        self._ask(self._stub.Commit, request)

    def abort(self, session: str, epoch: int, step: int, reason: str) -> None:
        request = trainer_pb2.AbortRequest(session=session, epoch=epoch, step=step, reason=reason)
        self._ask(self._stub.Abort, request)

    def watch(self, session: str) -> Iterator[DaemonEvent]:
        try:
            request = trainer_pb2.WatchRequest(session=session)
            for message in self._stub.Watch(request, metadata=self._headers(request)):
                event = _event(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise self._translate(error) from error
        except ValueError as error:  # what gRPC raises on a channel that was closed
            raise UnreachableError(f"the connection to {self._socket} is closed") from error

    def progress(self, report: TrainerReport) -> None:
        request = trainer_pb2.ProgressReport(
            session=report.session,
            step=report.step,
            skipped=report.skipped,
            failed=report.failed,
            failure=report.failure,
            failure_code=report.failure_code,
            save_period_s=report.save_period_s,
            staged_s=report.staged_s,
            interval_steps=report.interval_steps,
            loss=loss_to_proto(report.loss) if report.loss else None,
            plan=plan_to_proto(report.plan) if report.plan else None,
        )
        self._ask(self._stub.Progress, request)

    def report_without_session(
        self, epoch: int, report: TrainerReport, *, closed: bool = False
    ) -> None:
        request = trainer_pb2.TrainedRequest(
            job=self._job,
            epoch=epoch,
            rank=self._rank,
            step=report.step,
            skipped=report.skipped,
            failed=report.failed,
            failure=report.failure,
            failure_code=report.failure_code,
            closed=closed,
        )
        self._ask(self._stub.Trained, request)

    def close_session(self, session: str) -> None:
        request = trainer_pb2.CloseRequest(session=session)
        self._ask(self._stub.Close, request)

    def close(self) -> None:
        self._channel.close()

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _T],
        request: _Request,
        timeout_s: float | None = None,
    ) -> _T:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._call(
            lambda: method(request, timeout=timeout_s, metadata=self._headers(request))
        )

    def _headers(self, request: object) -> Metadata:
        """Headers of a call: the token, and the session that the call belongs to."""
        session = getattr(request, "session", "")
        return (*self._token.metadata(), *([(channels.SESSION_HEADER, session)] * bool(session)))

    def _call(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except grpc.RpcError as error:
            raise self._translate(error) from error
        except ValueError as error:  # what gRPC raises on a channel that was closed
            raise UnreachableError(f"the connection to {self._socket} is closed") from error

    def _translate(self, error: grpc.RpcError) -> HoldfastError:
        metadata, details, code = None, str(error), None
        if isinstance(error, grpc.Call):
            with suppress(Exception):  # a call that never began has none of these
                metadata, details, code = (
                    error.trailing_metadata(),
                    error.details() or "",
                    error.code(),
                )
        ours = codec.error_from_metadata(metadata, details)
        if ours is not None:
            return ours
        name = code.name if code is not None else type(error).__name__
        if code in _UNREACHABLE:
            return UnreachableError(f"the daemon at {self._socket} does not answer: {name}")
        return ProtocolError(f"the daemon at {self._socket} failed a call: {name}: {details}")


_UNREACHABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
)


def _decision(message: trainer_pb2.RestoreDecision) -> RestoreDecision:
    line = codec.line_from_proto(message.line)
    if line.generation is None:
        return RestoreDecision(line=line)
    held = message.snapshots if message.captured_by else (message,)
    return RestoreDecision(
        line=line,
        source=RestoreSource.of(message.source),
        captured_by=message.captured_by,
        snapshots=tuple(map(_held_snapshot_of, held)),
    )


def _held_snapshot_of(
    message: trainer_pb2.RestoreDecision | trainer_pb2.HeldSnapshot,
) -> HeldSnapshot:
    return HeldSnapshot(
        manifest=decode_manifest(message.manifest),
        layout=decode_layout(message.layout),
        slot=message.slot,
        token=message.token,
        arena_bytes=message.arena_bytes,
        places=message.places,
    )


def _event(message: trainer_pb2.WatchEvent) -> DaemonEvent | None:
    match message.WhichOneof("event"):
        case "epoch_ended":
            return DaemonEvent(
                stage=Stage.EPOCH_ENDED,
                epoch=message.epoch_ended,
                ends_process=message.end_process,
            )
        case "protected" | "dead" | "unprotectable" | "persisted" | "whole_after" as name:
            generation = codec.generation_from_proto(getattr(message, name))
            return DaemonEvent(stage=Stage(name), generation=generation)
        case _:
            return None  # an event that only a newer daemon sends
