"""The trainer-facing service: maps requests to the engine's inputs and questions.

A request that must wait asks the engine again after each change. It holds no state of its own, so a
client may repeat any call. A `HoldfastError` becomes an aborted call that carries the error's code.

A call that names a job is authorized by its token; a call that names a session, by the session's
id, which only an authorized call returns (`claims`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    SnapshotSkippedError,
    StaleEpochError,
    UnknownSessionError,
    UnreachableError,
    known_code,
)
from holdfast_core.links import LinkVerdict
from holdfast_core.protection.codes import code_of
from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import EndReason, RestorePhase, RestoreSource
from holdfast_daemon.engine import RestoreState, SavePace, WorldState
from holdfast_daemon.engine.slots import ArenaView, Slot
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.limits.rates import Accounts
from holdfast_daemon.limits.refusals import Context, refuse
from holdfast_daemon.logs import OncePerCause, bind
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.trainers import request_limits
from holdfast_daemon.trainers.admission import Admission, bearer_token
from holdfast_daemon.trainers.auth import Authenticator
from holdfast_daemon.trainers.claims import Claims, SessionSeal
from holdfast_daemon.trainers.waiting_agents import WaitingAgents
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc
from holdfast_protos.divergences import divergence_from_proto, divergence_to_proto
from holdfast_protos.expert_plans import plan_from_proto
from holdfast_protos.inspections import processes_from_proto
from holdfast_protos.losses import rank_loss_from_proto
from holdfast_protos.step_times import times_from_proto

ASK_AGAIN_S = 1.0
WORLD_WAIT_S_MAX = 30.0
DETAIL_CHARACTERS_MAX = 500
"""Characters that are logged of the reason why a call was denied: the text contains the job's name,
which a stranger chose."""

_log = bind(logging.getLogger(__name__))


def _translating(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(handler)
    async def translated(self: TrainerService, request: Any, context: Context) -> Any:
        try:
            await self.admit(request, context)
            return await handler(self, request, context)
        except HoldfastError as error:
            await self.refuse(request, context, error)

    return translated


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """Serves the trainers and agents of this node."""

    def __init__(
        self,
        *,
        agents: WaitingAgents,
        host_of: Callable[[str], JobHost | None],
        hosts: Callable[[], dict[str, JobHost]],
        ended: Callable[[str], bool],
        claims: Claims,
        arena_socket: Path,
        node_host: str,
        status: Callable[[], dict[str, Any]],
        authenticator: Authenticator,
        metrics: DaemonMetrics,
        check_links: Callable[[str], Awaitable[LinkVerdict]],
    ) -> None:
        self._check_links = check_links
        self._host_of, self._hosts, self._ended = host_of, hosts, ended
        self._agents = agents
        self._claims = claims
        self._arena_socket = arena_socket
        self._node_host = node_host
        self._status = status
        self._metrics = metrics
        self._complaints = OncePerCause(_log)
        self._seal = SessionSeal()
        limited = functools.partial(metrics.add, "rate_limited", service="trainers")
        self._admission = Admission(
            authenticator,
            Accounts(time.monotonic, limited),
            lambda job: host_of(job) is not None,
            limited,
        )

    @_translating
    async def Hello(self, request: trainer_pb2.HelloRequest, context: Any) -> Any:
        codec.check_version(request.protocol_version, f"the SDK of rank {request.rank}")
        host = self._placed(request.job)
        request_limits.check_address(request.store_address)
        rank = host.engine.rank_in_world(request.rank)
        request_limits.check_address(request.world)
        membership = host.hello(rank, request.store_address, request.world)
        if request.began_alone:
            host.engine.begins_alone(rank, held_beside=request.held_beside)
        member, lane = membership.member_of(rank), membership.lane_of(rank)
        group = membership.group_of(member)
        code = code_of(membership, group)
        members = group if code is not None else ()
        world = membership.world
        return trainer_pb2.HelloReply(
            protocol_version=codec.PROTOCOL_VERSION,
            epoch=membership.epoch,
            world_size=membership.world_size,
            arena_socket=str(self._arena_socket),
            parity_group=[world.world_rank(membership.rank_at(m, lane)) for m in members],
            parity_chunks=code.chunks if code is not None else 0,
            parity_rows=code.rows if code is not None else 0,
            external=membership.external,
        )

    async def Restore(
        self, request: trainer_pb2.RestoreRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.RestoreProgress]:
        try:
            await self.admit(request, context)
            host = self._placed(request.job)
            if request.HasField("live"):
                yield self._record_live(host, request)
                return
            sent = ""
            if request.no_replay:
                rank = host.engine.rank_in_world(request.rank, request.epoch)
                host.engine.no_replay(rank, request_limits.shortened(request.no_replay))
            while True:
                rank = host.engine.rank_in_world(request.rank, request.epoch)
                state = host.engine.restore_state(rank, request.epoch)
                if state.ready:
                    yield self._decision(host, request.rank, state)
                    return
                loader = host.worker.loader
                loads = state.phase is RestorePhase.LOAD and loader is not None
                done = loader.read_bytes(rank) if loader and loads else state.done
                shown = f"{state.phase} {done} {state.detail}"
                if shown != sent:
                    sent = shown
                    yield trainer_pb2.RestoreProgress(
                        phase=state.phase, done=done, total=state.total, detail=state.detail
                    )
                await host.changed(ASK_AGAIN_S)
        except HoldfastError as error:
            await self.refuse(request, context, error)

    def _record_live(
        self, host: JobHost, request: trainer_pb2.RestoreRequest
    ) -> trainer_pb2.RestoreProgress:
        rank = host.engine.rank_in_world(request.rank, request.epoch)
        after = request.repeated_after if request.HasField("repeated_after") else None
        source = RestoreSource.of(request.restored_from) or RestoreSource.LIVE
        host.carry_out(
            host.engine.went_live(rank, request.epoch, request.live, after, host.now, source)
        )
        if after is not None:
            steps = request_limits.counted(max(0, request.live - after))
            self._metrics.add("steps_repeated", steps, job=host.job)
        else:
            self._metrics.add("restores", job=host.job, source=RestoreSource.LIVE)
        return trainer_pb2.RestoreProgress(
            phase=RestorePhase.READY,
            decision=trainer_pb2.RestoreDecision(source=RestoreSource.LIVE),
        )

    def _decision(
        self, host: JobHost, rank: int, state: RestoreState
    ) -> trainer_pb2.RestoreProgress:
        assert state.line is not None
        decision = trainer_pb2.RestoreDecision(
            line=codec.line_to_proto(state.line),
            source=state.source,
            captured_by=state.captured_by,
            snapshots=[self._held(host, arena, slot) for arena, slot in state.read_for_all],
        )
        if state.arena is not None and state.slot is not None:
            snapshot = self._held(host, state.arena, state.slot)
            decision.manifest, decision.layout = snapshot.manifest, snapshot.layout
            decision.slot, decision.places = snapshot.slot, snapshot.places
            decision.token, decision.arena_bytes = snapshot.token, snapshot.arena_bytes
        if state.line.generation is not None:
            host.engine.restore_given(rank, state)
        self._metrics.add("restores", job=host.job, source=state.source)
        return trainer_pb2.RestoreProgress(
            phase=state.phase, detail=state.detail, decision=decision
        )

    def _held(self, host: JobHost, arena: ArenaView, slot: Slot) -> trainer_pb2.HeldSnapshot:
        """A snapshot for a trainer to read."""
        file = host.storage.arena(arena.rank, arena.layout_id)
        return trainer_pb2.HeldSnapshot(
            manifest=slot.manifest_for_trainer,
            layout=arena.encoded,
            slot=slot.index,
            places=slot.places,
            token=self._claims.issue(file.path, None),
            arena_bytes=file.nbytes,
        )

    @_translating
    async def Open(self, request: trainer_pb2.OpenRequest, context: Any) -> Any:
        host = self._placed(request.job)
        session, effects = host.writer.open(
            rank=host.engine.rank_in_world(request.rank, request.epoch),
            epoch=request.epoch,
            layout=request.layout,
            largest_slot_bytes=request.largest_slot_bytes,
            pid=request.pid,
            now=host.now,
        )
        host.carry_out(effects)
        while (opened := host.engine.opened(session)) is None:
            await host.changed(ASK_AGAIN_S)
        arena = host.storage.arena(opened.arena.rank, opened.arena.layout_id)
        return trainer_pb2.OpenReply(
            session=self._seal.seal(session),
            token=self._claims.issue(arena.path, (host, session)),
            arena_bytes=arena.nbytes,
            slot_bytes=opened.arena.layout.slot_bytes,
            slots=arena.slots,
            earlier=None if opened.earlier is None else divergence_to_proto(opened.earlier),
        )

    @_translating
    async def Grant(self, request: trainer_pb2.GrantRequest, context: Any) -> Any:
        host, session = self._of_session(request.session)
        try:
            granted, effects = host.writer.grant(
                session,
                epoch=request.epoch,
                step=request.step,
                now=host.now,
                base=codec.generation_from_proto(request.base)
                if request.HasField("base")
                else None,
                unchanged=request.unchanged,
                first_step=request.first_step,
            )
        except SnapshotSkippedError as skipped:
            host.carry_out(host.engine.tick(host.now))
            return trainer_pb2.GrantReply(skipped=str(skipped))
        host.carry_out(effects)
        return trainer_pb2.GrantReply(
            slot=granted.slot, places=granted.places, carried=granted.carried
        )

    @_translating
    async def Commit(self, request: trainer_pb2.CommitRequest, context: Any) -> Any:
        host, session = self._of_session(request.session)
        host.carry_out(
            host.writer.commit(
                session,
                epoch=request.epoch,
                step=request.step,
                slot=request.slot,
                payload_bytes=request.payload_bytes,
                extras_bytes=request.extras_bytes,
                digests=request.digests,
                nan_units=request_limits.check_units(request.nan_units),
                experts=request_limits.check_experts(request.experts),
                now=host.now,
            )
        )
        while True:
            digest = host.engine.committed(session, epoch=request.epoch, step=request.step)
            if digest is not None:
                return trainer_pb2.CommitReply(manifest_digest=digest)
            await host.changed(ASK_AGAIN_S)

    @_translating
    async def Abort(self, request: trainer_pb2.AbortRequest, context: Any) -> Any:
        host, session = self._of_session(request.session)
        host.carry_out(
            host.engine.abort(session, epoch=request.epoch, step=request.step, now=host.now)
        )
        return trainer_pb2.AbortReply()

    async def Watch(
        self, request: trainer_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.WatchEvent]:
        try:
            await self.admit(request, context)
            host, name = self._of_session(request.session)
        except HoldfastError as error:
            await refuse(context, error)
            return
        sent: Generation | None = None
        sent_dead: set[Generation] = set()
        sent_stored: Generation | None = None
        sent_whole: Generation | None = None
        while (now := host.engine.watched(name)) is not None and not host.dropped:
            if now.epoch_ended:
                yield trainer_pb2.WatchEvent(
                    epoch_ended=now.epoch_ended, end_process=now.ends_process
                )
                return
            if now.newest is not None and now.newest != sent:
                sent, message = now.newest, codec.generation_to_proto(now.newest)
                if now.redundant:
                    yield trainer_pb2.WatchEvent(protected=message)
                else:
                    yield trainer_pb2.WatchEvent(unprotectable=message)
            for generation in sorted(set(now.dead) - sent_dead):
                sent_dead.add(generation)
                yield trainer_pb2.WatchEvent(dead=codec.generation_to_proto(generation))
            if now.persisted is not None and now.persisted != sent_stored:
                sent_stored = now.persisted
                yield trainer_pb2.WatchEvent(persisted=codec.generation_to_proto(now.persisted))
            if now.whole_after is not None and now.whole_after != sent_whole:
                sent_whole = now.whole_after
                yield trainer_pb2.WatchEvent(whole_after=codec.generation_to_proto(sent_whole))
            await host.changed(ASK_AGAIN_S)

    @_translating
    async def Close(self, request: trainer_pb2.CloseRequest, context: Any) -> Any:
        host, session = self._of_session(request.session)
        host.carry_out(host.engine.session_ended(session, clean=True, now=host.now))
        return trainer_pb2.CloseReply()

    @_translating
    async def Progress(self, request: trainer_pb2.ProgressReport, context: Any) -> Any:
        host, session = self._of_session(request.session)
        host.engine.progress(
            session,
            step=request.step,
            skipped=request_limits.counted(request.skipped),
            failed=request_limits.counted(request.failed),
            failure=request_limits.shortened(request.failure),
            failure_code=known_code(request.failure_code),
            pace=SavePace(
                period_s=request_limits.duration_s(request.save_period_s),
                staged_s=request_limits.duration_s(request.staged_s),
                interval_steps=request.interval_steps,
                window_steps=request.window_steps,
                bubble_s=request_limits.duration_s(request.bubble_s),
                bubble_bytes=request.bubble_bytes,
            ),
            loss=rank_loss_from_proto(request.loss) if request.HasField("loss") else None,
            plan=plan_from_proto(request.plan) if request.HasField("plan") else None,
            times=times_from_proto(request.times) if request.HasField("times") else None,
            divergence=(
                divergence_from_proto(request.divergence)
                if request.HasField("divergence")
                else None
            ),
            now=host.now,
        )
        return trainer_pb2.ProgressReply()

    @_translating
    async def JoinWorld(self, request: trainer_pb2.JoinWorldRequest, context: Any) -> Any:
        codec.check_version(request.protocol_version, "the agent")
        if request.peek:
            return await self._await_world(request)
        with self._agents.waiting(request.job):
            return await self._await_world(request)

    async def _await_world(self, request: trainer_pb2.JoinWorldRequest) -> trainer_pb2.World:
        """The world that the agent asks for, as soon as there is one, or an empty one in time."""
        loop = asyncio.get_running_loop()
        # min() alone is not enough: a NaN from the agent would pass it and break the loop's timers.
        until = loop.time() + (min(request.wait_s, WORLD_WAIT_S_MAX) if request.wait_s > 0 else 0)
        while True:
            world = self._world(request)
            left = until - loop.time()
            if world.ready or world.finished or left <= 0:
                return world
            host = self._host_of(request.job)
            if host is None:
                await asyncio.sleep(min(left, 0.1))
            else:
                await host.changed(min(left, ASK_AGAIN_S))

    def _world(self, request: trainer_pb2.JoinWorldRequest) -> trainer_pb2.World:
        host = self._host_of(request.job)
        if host is None:
            # An agent that has had no world of the job waits for one of a new job of its name.
            finished = self._ended(request.job) and request.after_epoch > 0
            return trainer_pb2.World(finished=finished)
        if not request.peek:
            host.agent_waits(request.after_epoch)
        state = host.engine.world_state(request.after_epoch)
        if state is None:
            return trainer_pb2.World()
        ready = request.peek or state.serves_store or bool(state.store_address)
        return self._message_of(state, ready, keep=state.keep)

    def _message_of(self, state: WorldState, ready: bool, *, keep: bool) -> trainer_pb2.World:
        return trainer_pb2.World(
            ready=ready,
            epoch=state.epoch,
            node_rank=state.node_rank,
            nodes=state.nodes,
            store_address=state.store_address,
            store_key=state.store_key,
            serves_store=state.serves_store,
            node_host=self._node_host,
            keep=keep,
            arrived=state.arrived,
            kept_lanes=sorted(state.kept),
            arrived_lanes=sorted(state.arrived_lanes),
        )

    async def Follow(
        self, request: trainer_pb2.FollowRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.World]:
        try:
            await self.admit(request, context)
            codec.check_version(request.protocol_version, f"the SDK of rank {request.rank}")
            if self._host_of(request.job) is not None or not self._ended(request.job):
                host = self._placed(request.job)
                async for world in self._followed_worlds(host, request):
                    yield world
            if self._ended(request.job):
                yield trainer_pb2.World(finished=True)
        except HoldfastError as error:
            await self.refuse(request, context, error)

    async def _followed_worlds(
        self, host: JobHost, request: trainer_pb2.FollowRequest
    ) -> AsyncIterator[trainer_pb2.World]:
        """The worlds of a rank, until its job is dropped here. Raises as `followed_world` does."""
        rank = host.engine.rank_of_lane(request.rank)  # the stream outlives the world of its number
        lane = host.engine.ranks.index(rank)
        number = host.follows(rank, request.pid, request.size)
        sent: tuple[int, str] | None = None
        try:
            while not host.dropped:
                state = host.engine.followed_world(rank, number)
                if state is not None and (state.epoch, state.store_address) != sent:
                    sent = state.epoch, state.store_address
                    yield self._message_of(
                        state, ready=bool(state.store_address), keep=lane in state.kept
                    )
                await host.changed(ASK_AGAIN_S)
        finally:
            host.engine.unfollows(rank, number)

    @_translating
    async def PublishStore(self, request: trainer_pb2.PublishStoreRequest, context: Any) -> Any:
        host = self._placed(request.job)
        request_limits.check_address(request.store_address)
        request_limits.check_store_key(request.store_key)
        host.carry_out(
            host.engine.publish_store(
                request.epoch, request.store_address, host.now, request.store_key
            )
        )
        return trainer_pb2.PublishStoreReply()

    @_translating
    async def WorkerExited(self, request: trainer_pb2.WorkerExitedRequest, context: Any) -> Any:
        host = self._placed(request.job)
        host.worker_exited(
            request.epoch,
            request.rank,
            request.exit_code,
            request.last_lines,
            EndReason.of(request.reason),
            request.kernel_messages,
        )
        return trainer_pb2.WorkerExitedReply(following_lanes=host.engine.following_lanes)

    @_translating
    async def Worked(self, request: trainer_pb2.WorkedRequest, context: Any) -> Any:
        host = self._placed(request.job)
        host.engine.worked(request.epoch, request.ranks, host.now)
        return trainer_pb2.WorkedReply(inspect=host.engine.awaited_inspection)

    @_translating
    async def Inspected(self, request: trainer_pb2.InspectedRequest, context: Any) -> Any:
        host = self._placed(request.job)
        processes = processes_from_proto(request.processes)
        host.carry_out(host.engine.inspected(request.epoch, request.number, processes, host.now))
        return trainer_pb2.InspectedReply()

    @_translating
    async def Trained(self, request: trainer_pb2.TrainedRequest, context: Any) -> Any:
        host = self._placed(request.job)
        effects = host.engine.trained(
            host.engine.rank_in_world(request.rank, request.epoch),
            epoch=request.epoch,
            step=request.step,
            skipped=request_limits.counted(request.skipped),
            failed=request_limits.counted(request.failed),
            failure=request_limits.shortened(request.failure),
            failure_code=known_code(request.failure_code),
            closed=request.closed,
            now=host.now,
        )
        host.carry_out(effects)
        return trainer_pb2.TrainedReply()

    @_translating
    async def CheckLinks(self, request: trainer_pb2.CheckLinksRequest, context: Any) -> Any:
        found = await self._check_links(request.job)
        return trainer_pb2.CheckLinksReply(
            failure=found.failure,
            notice=found.notice,
            not_checked=found.not_checked,
            found=found.found,
        )

    @_translating
    async def Persist(self, request: trainer_pb2.PersistRequest, context: Any) -> Any:
        host = self._placed(request.job)
        host.carry_out(host.engine.request_persist(host.now))
        return trainer_pb2.PersistReply()

    @_translating
    async def Status(self, request: trainer_pb2.StatusRequest, context: Context) -> Any:
        status = self._status()
        seen = await self._admission.visible(bearer_token(context), status["jobs"])
        status["jobs"] = {job: status["jobs"][job] for job in seen}
        return trainer_pb2.StatusReply(json=msgspec.json.encode(status).decode())

    async def share_of(self, headers: dict[str, str], of_session: bool) -> str:
        """The job in whose share a call is counted; see `receiving`."""
        return await self._admission.share_of(headers, of_session, self._of_session)

    async def refuse(self, request: Any, context: Context, error: HoldfastError) -> None:
        """Count the refusal, then end the call with it."""
        job = getattr(request, "job", "")
        if isinstance(error, AccessDeniedError):
            self._metrics.add("auth_denials", cause=error.code)
            detail = str(error)[:DETAIL_CHARACTERS_MAX]
            self._complaints.warning("call_denied", cause=error.code, detail=detail)
        elif isinstance(error, StaleEpochError) and self._host_of(job) is not None:
            self._metrics.add("stale_epoch_refusals", job=job)
        await refuse(context, error)

    async def admit(self, request: Any, context: Context) -> None:
        """Return when it is this call's turn. Raises the error that the call is refused with."""
        fields = request.DESCRIPTOR.fields_by_name
        if "job" in fields:
            await self._admission.admit_job(bearer_token(context), request.job)
        elif "session" in fields:
            await self._admission.admit_session(request.session, self._of_session)
        # Any other call is admitted by its handler, whose answer depends on the caller.

    def _placed(self, job: str) -> JobHost:
        """The host of `job` on this node; UnreachableError when there is none."""
        host = self._host_of(job)
        if host is None:
            raise UnreachableError(
                f"job {job} is not on this node: the control loop has not placed it here yet, or "
                f"it has ended"
            )
        return host

    def _of_session(self, sealed: str) -> tuple[JobHost, str]:
        """The host and the engine's id of a sealed session."""
        session = self._seal.open(sealed)
        for host in self._hosts().values():
            if host.engine.has_session(session):
                return host, session
        raise UnknownSessionError(f"session {session} is not known here; open a new one")
