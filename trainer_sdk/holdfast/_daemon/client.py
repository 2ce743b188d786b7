"""Client of the daemon for a session: requests, replies, a Protocol, and its implementation.

Every failure is raised as a HoldfastError. An error that the daemon raised keeps its class
(`holdfast-code`), and an unreachable daemon is an UnreachableError. No module above this one uses
gRPC. Tensors never pass through the calls: their bytes go into the arena, which `claim` maps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from holdfast._copying.arena import MappedArena, claim_arena, read_arena
from holdfast._daemon.token import Metadata, Token
from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError, ProtocolError, UnreachableError
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.protection.codes import Code
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import Layout, decode_layout, decode_manifest
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest
from holdfast_core.states import RestoreProgress, RestoreSource
from holdfast_core.stragglers import StepTimes
from holdfast_protos import codec, persisting, trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels
from holdfast_protos.divergences import divergence_from_proto, divergence_to_proto
from holdfast_protos.expert_plans import plan_to_proto
from holdfast_protos.loading import progress_from_proto
from holdfast_protos.losses import loss_to_proto
from holdfast_protos.step_times import times_to_proto

_RECONNECT_MS_MAX = 1000
_T = TypeVar("_T")
_Message = TypeVar("_Message", bound=Message)
OnProgress = Callable[[RestoreProgress], None]


# --- replies and events ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityGroup:
    """The ranks that protect this one, and how."""

    ranks: tuple[int, ...]
    """World ranks of this rank's lane, by their position in the group."""
    code: Code


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The epoch of this worker, and the number of ranks in its world."""

    epoch: int
    world_size: int
    parity_group: ParityGroup | None = None
    """None without redundancy, or if the daemon is too old to say."""
    external: bool = False
    """Whether another controller makes the pods, so that ranks may change places."""


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
    """Number of ranks of the world that captured the line, if that is not the present world; else
    0."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    """This rank's own snapshot; none for a fresh start. If another world captured the line: the
    snapshots, perhaps none, that this rank reads for all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An opened session with the daemon."""

    session: str
    token: str
    arena_bytes: int
    slot_bytes: int
    slots: int
    """Number of slots in the arena."""
    earlier: Divergence | None = None
    """Divergence in which this rank took part in an earlier epoch, if no rank was named."""


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


# --- requests -------------------------------------------------------------------------------------
#
# One value for each call that takes more than a session. Its fields have the names of the message's
# fields in trainer.proto. A new parameter is a field here and in that file; `GrpcClient` sends it.


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreRequest:
    """Request for this rank's snapshot of the epoch's line."""

    epoch: int
    no_replay: str = ""
    """Why lost ranks do not recover alone, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRequest:
    """Notice that this rank continues live from the state that it has."""

    epoch: int
    live: int
    """Step after which the rank has that state."""
    repeated_after: int | None = None
    """Step that it restored alone, and after which it repeated steps; None if it kept its
    state."""
    restored_from: RestoreSource = RestoreSource.LIVE
    """Source of what it restored alone; LIVE if it kept its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRequest:
    """Request for a session with an arena."""

    epoch: int
    layout: bytes
    """The encoded layout."""
    largest_slot_bytes: int
    """Largest slot of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantRequest:
    """Request for a slot to write into."""

    session: str
    epoch: int
    step: int
    base: Generation | None = None
    """Snapshot from which to carry pieces over; None: everything will be written."""
    unchanged: bytes = b""
    """Bit map of the pieces to carry over."""
    first_step: int = 0
    """First step of the window that ends with `step`; 0 for a snapshot of one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRequest:
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
class AbortRequest:
    """A granted slot to give back."""

    session: str
    epoch: int
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTotals:
    """Progress of training, and the outcome of its saves so far."""

    step: int
    skipped: int
    failed: int
    failure: str
    failure_code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerReport(SaveTotals):
    """Progress of training and of saves, as measured by the SDK."""

    session: str
    save_period_s: float
    staged_s: float
    interval_steps: int = 0
    window_steps: int = 0
    bubble_s: float = 0.0
    bubble_bytes: int = 0
    loss: LossReport | None = None
    plan: PlanReport | None = None
    times: StepTimes | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRequest(SaveTotals):
    """Progress of a rank that has no session, because its saves are refused."""

    epoch: int
    closed: bool = False
    """Whether the rank trains no more."""

    @classmethod
    def of(cls, report: SaveTotals, *, epoch: int, closed: bool) -> TrainedRequest:
        """The request with the totals of `report`."""
        totals = {field.name: getattr(report, field.name) for field in fields(SaveTotals)}
        return cls(epoch=epoch, closed=closed, **totals)


_Request = (
    RestoreRequest
    | LiveRequest
    | OpenRequest
    | GrantRequest
    | CommitRequest
    | AbortRequest
    | TrainerReport
    | TrainedRequest
)


class DaemonClient(Protocol):
    """Calls from a session to its node's daemon. Methods raise nothing but HoldfastError."""

    def hello(self) -> Hello:
        """Ask for the present epoch. Raises StaleEpochError if the training world of this worker
        has ended."""

    def restore(
        self, request: RestoreRequest, timeout_s: float, on_progress: OnProgress
    ) -> RestoreDecision:
        """Block until the epoch's line is decided and this rank's snapshot is ready."""

    def go_live(self, request: LiveRequest) -> None:
        """Report that this rank keeps the state that it has. Raises StaleEpochError."""

    def open(self, request: OpenRequest, timeout_s: float) -> Opened:
        """Allocate the arena. Raises MemoryBudgetError, RankInUseError, StaleEpochError."""

    def claim(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        """Map the arena that the token from `open` allows this process to write."""

    def reader(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        """Map an arena that the token from `restore` allows this process to read."""

    def grant(self, request: GrantRequest) -> Grant:
        """Request a slot. The slot of an earlier grant that was not committed is taken back."""

    def commit(self, request: CommitRequest) -> None:
        """Seal the manifest; return when it is sealed."""

    def abort(self, request: AbortRequest) -> None:
        """Give a granted slot back."""

    def watch(self, session: str) -> Iterator[DaemonEvent]:
        """Yield events until the session ends."""

    def progress(self, report: TrainerReport) -> None:
        """Report progress, for heartbeats and metrics."""

    def report_without_session(self, request: TrainedRequest) -> None:
        """Report the progress of this rank while it has no session."""

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
        self._caller: dict[str, Any] = {"job": job, "rank": rank}
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
            **self._caller,
            store_address=self._store_address,
            world=self._world,
        )
        reply = self._ask(self._stub.Hello, request)
        codec.check_version(reply.protocol_version, f"the daemon at {self._socket}")
        if reply.arena_socket:
            self._arena_socket = Path(reply.arena_socket)
        ranks, group = tuple(reply.parity_group), None
        if ranks:
            code = Code(len(ranks), reply.parity_chunks, reply.parity_rows)
            group = ParityGroup(ranks=ranks, code=code)
        return Hello(
            epoch=reply.epoch,
            world_size=reply.world_size,
            parity_group=group,
            external=reply.external,
        )

    def restore(
        self, request: RestoreRequest, timeout_s: float, on_progress: OnProgress
    ) -> RestoreDecision:
        message = _message(trainer_pb2.RestoreRequest, request, **self._caller)

        def run() -> RestoreDecision:
            for reply in self._stub.Restore(
                message, timeout=timeout_s, metadata=self._token.metadata()
            ):
                if reply.HasField("decision"):
                    return _decision(reply.decision)
                on_progress(progress_from_proto(reply))
            raise ProtocolError("the daemon ended a restore without a decision")

        return self._call(run)

    def go_live(self, request: LiveRequest) -> None:
        message = _message(trainer_pb2.RestoreRequest, request, **self._caller)

        def run() -> None:
            for _ in self._stub.Restore(
                message, timeout=self._timeout_s, metadata=self._token.metadata()
            ):
                pass

        self._call(run)

    def open(self, request: OpenRequest, timeout_s: float) -> Opened:
        message = _message(trainer_pb2.OpenRequest, request, pid=os.getpid(), **self._caller)
        reply = self._ask(self._stub.Open, message, timeout_s)
        return Opened(
            session=reply.session,
            token=reply.token,
            arena_bytes=reply.arena_bytes,
            slot_bytes=reply.slot_bytes,
            slots=reply.slots,
            earlier=divergence_from_proto(reply.earlier) if reply.HasField("earlier") else None,
        )

    def claim(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        return claim_arena(self._arena_socket, token, nbytes, timeout_s=timeout_s)

    def reader(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        return read_arena(self._arena_socket, token, nbytes, timeout_s=timeout_s)

    def grant(self, request: GrantRequest) -> Grant:
        reply = self._ask(self._stub.Grant, _message(trainer_pb2.GrantRequest, request))
        if reply.WhichOneof("outcome") == "slot":
            return Grant(slot=reply.slot, places=reply.places, carried=reply.carried)
        return Grant(skipped=reply.skipped or "the daemon has no slot")

    def commit(self, request: CommitRequest) -> None:
        self._ask(self._stub.Commit, _message(trainer_pb2.CommitRequest, request))

    def abort(self, request: AbortRequest) -> None:
        self._ask(self._stub.Abort, _message(trainer_pb2.AbortRequest, request))

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
        self._ask(self._stub.Progress, _message(trainer_pb2.ProgressReport, report))

    def report_without_session(self, request: TrainedRequest) -> None:
        message = _message(trainer_pb2.TrainedRequest, request, **self._caller)
        self._ask(self._stub.Trained, message)

    def close_session(self, session: str) -> None:
        request = trainer_pb2.CloseRequest(session=session)
        self._ask(self._stub.Close, request)

    def close(self) -> None:
        self._channel.close()

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Message, _T],
        request: _Message,
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


def _message(kind: type[_Message], request: _Request, **more: Any) -> _Message:
    """The message with the fields of `request`, and those in `more`."""
    given = {field.name: _plain(getattr(request, field.name)) for field in fields(request)}
    return kind(**given, **more)


def _plain(value: object) -> Any:
    """`value` for a message's constructor, where None leaves a field absent."""
    match value:
        case Generation():
            return codec.generation_to_proto(value)
        case ExpertVersion():
            return persisting.expert_to_proto(value)
        case LossReport():
            return loss_to_proto(value)
        case PlanReport():
            return plan_to_proto(value)
        case StepTimes():
            return times_to_proto(value)
        case Divergence():
            return divergence_to_proto(value)
        case tuple():
            return [_plain(item) for item in value]
        case _:
            return value


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
