"""`JobEngine`: every input of a job on this node, and the queries that adapters make.

An input changes the memory, which is then settled (`convergence`): that yields the effects to carry
out. Adapters answer requests by querying the state (`opened`, `committed`, `restore_state`,
`world_state`) again after each change, so a lost event never leaves a request hanging.

Adapters use only these queries: the memory is private to the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.corruption import Divergence, Proof
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import (
    AccessDeniedError,
    CorruptError,
    InvalidJobError,
    ProtocolError,
    RankInUseError,
    SnapshotSkippedError,
    StaleEpochError,
    StepOrderError,
    UnknownSessionError,
    UnreachableError,
    UnsavedError,
)
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.inspections import GroupCollectives, InspectedProcess
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import (
    SLOTS_MAX,
    SLOTS_MIN,
    decode_layout,
    decode_manifest,
    encode_layout,
    layout_id,
    manifest_digest,
    piece_count,
)
from holdfast_core.snapshots.manifests import ExpertVersion, Manifest, ParityEntry
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.states import EndReason, RestoreSource
from holdfast_core.stragglers import StepTimes
from holdfast_daemon.engine import (
    answers,
    completions,
    leader,
    overview,
    persist_leader,
    persisting,
    upkeep,
)
from holdfast_daemon.engine.answers import (
    EpochProgress,
    Granted,
    OpenedSession,
    RestoreState,
    WorldState,
)
from holdfast_daemon.engine.convergence import Convergence
from holdfast_daemon.engine.effects import Completion, Effect, SaveEpoch, Seal
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.overview import HeldOverview, JobOverview
from holdfast_daemon.engine.slots import ArenaView, ParityState, SlotState
from holdfast_daemon.engine.state import (
    Follower,
    Inspection,
    JobMemory,
    RankRecord,
    SavePace,
    TrainerSession,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Pauses, in seconds, before a daemon sends reports and directives again, or retries."""

    resend_s: float = 1.0
    """Pause before reports and directives are repeated, since any may be lost, while something is
    unsettled."""
    idle_resend_s: float = 5.0
    """Pause before reports and directives are repeated while all is settled."""
    retry_s: float = 0.25
    """Pause before a failed build or rebuild is tried again."""


class JobEngine:
    """One job on one node. Not thread-safe: call it from one thread."""

    def __init__(
        self, *, job: str, node: str, memory_id: str, incarnation: int, settings: EngineSettings
    ) -> None:
        self.memory = JobMemory(job=job, node=node, memory_id=memory_id, incarnation=incarnation)
        self._convergence = Convergence(self.memory)
        self._settings = settings
        self._sessions_made = self._followers_made = 0

    # --- what happened: membership and peers ------------------------------------------------------

    def adopt(
        self,
        *,
        membership: Membership | None,
        line: Line | None,
        retained: Generation | None,
        arenas: Sequence[tuple[int, bytes, int, dict[int, tuple[bytes, bytes]], bool]],
        parities: Sequence[tuple[int, int, ParityEntry]],
        now: float,
    ) -> list[Effect]:
        """Take over the arenas and parity of an earlier daemon. Nothing counts as held before it is
        verified.

        Args:
            arenas: for each, (rank, encoded layout, number of slots, {slot: (encoded manifest,
                places)}, whether a living process holds the claim).
            parities: for each, (lane, slot, entry).
        """
        memory = self.memory
        # Arenas and their sealed snapshots, unverified. Steps must increase across the restart too.
        for rank, encoded, slots, sealed, claimed in arenas:
            arena = _arena(rank, encoded)
            arena.allocated(slots)
            memory.arenas[(rank, arena.layout_id)] = arena
            for slot in arena.slots if claimed else ():
                # Whichever slot the earlier daemon granted: its trainer may still be writing.
                slot.state = SlotState.GRANTED
            for index, (data, places) in sealed.items():
                manifest = decode_manifest(data)
                slot = arena.slots[index]
                slot.places = places
                slot.state, slot.generation = SlotState.SEALED, manifest.generation
                slot.manifest, slot.encoded = manifest, data
                slot.digest = manifest_digest(data)
                record = memory.rank(rank)
                record.passed = max(record.passed or manifest.generation, manifest.generation)
        # Parity blocks, unverified.
        for lane, index, entry in parities:
            parity = memory.lane_slots(lane)[index]
            parity.state, parity.generation = ParityState.READY, entry.generation
            parity.entry = entry
        # The saved epoch, with the leader's announcements that must survive a restart.
        if membership is not None:
            self._enter(membership)
            for rank in memory.my_ranks():
                memory.rank(rank).last_sign = now
            if line is not None and memory.current is not None:
                memory.direct(
                    leader.with_announced(membership, memory.current.directive, line, retained)
                )
        return self._convergence.settle(now)

    def claim_ended(self, arena: ArenaView, now: float) -> list[Effect]:
        """Reclaim the slots of an earlier daemon's trainer, which is gone."""
        for slot in arena.slots:
            if slot.state is SlotState.GRANTED and slot.generation is None:
                slot.clear()
        return self._convergence.settle(now)

    def set_membership(self, membership: Membership, now: float) -> list[Effect]:
        """Take a membership from the control loop. An older membership is ignored, and so is a
        membership that names another memory for this node."""
        memory = self.memory
        current = memory.membership
        mine = membership.member_on(memory.node)
        if mine is not None and membership.member(mine).memory_id != memory.memory_id:
            memory.note(
                JobEvent.MEMBERSHIP_FOR_OTHER_MEMORY, detail=membership.member(mine).memory_id
            )
        elif current is None or membership.epoch > current.epoch:
            self._enter(membership)
            memory.out.insert(0, SaveEpoch(membership=membership, line=None, retained=None))
            for rank in memory.my_ranks():
                memory.rank(rank).last_sign = now
        elif membership.epoch == current.epoch and membership.revision > current.revision:
            epoch = memory.revise(membership)
            self._convergence.resend()
            memory.out.append(
                SaveEpoch(
                    membership=membership,
                    line=epoch.line if epoch else None,
                    retained=epoch.retained if epoch else None,
                )
            )
        return self._convergence.settle(now)

    def on_report(self, report: MemberReport, now: float) -> list[Effect]:
        """Take a peer's report. A newer epoch fences this daemon; a report of an older epoch is
        ignored, and so is one from a sender that is not a member."""
        memory = self.memory
        if not self._see_epoch(report.epoch):
            if not self.is_member(report.member):
                return []
            previous = memory.reports.get(report.member)
            if report.epoch < memory.epoch or (previous and previous.order >= report.order):
                return []
            memory.reports[report.member] = report
        return self._convergence.settle(now)

    def on_directive(self, directive: Directive, now: float) -> list[Effect]:
        """Merge a directive of the leader into the current one."""
        memory = self.memory
        if not self._see_epoch(directive.epoch):
            if directive.epoch < memory.epoch or memory.current is None:
                return []
            merged = leader.merge(memory.current.directive, directive)
            if merged == memory.current.directive:
                return []
            self._convergence.direct(memory.current, merged)
        return self._convergence.settle(now)

    def on_peer_epoch(self, epoch: int, now: float) -> list[Effect]:
        """Take the epoch with which a peer answered: a newer one fences this daemon."""
        return self._convergence.settle(now) if self._see_epoch(epoch) else []

    def on_suspect(self, epoch: int, rank: int, generation: Generation, now: float) -> list[Effect]:
        """Handle a member's complaint that bytes from this daemon are wrong. If they are of a
        snapshot held here, verify it again. Otherwise the rank was rebuilt wrong from parity held
        here, although the block matches its digests: give the block up, so that the next epoch
        starts from something else."""
        snapshot = self.memory.sealed(rank, generation)
        if epoch == self.memory.epoch and snapshot is not None:
            upkeep.verify_slot(self.memory, *snapshot)
        elif epoch == self.memory.epoch:
            upkeep.give_up_parity_of(self.memory, rank, generation)
        return self._convergence.settle(now)

    def scrub(self, now: float, *, snapshot: bool, index: int, slot: int) -> list[Effect]:
        """Verify once more the snapshot of rank `index`, or the parity block of lane `index`, in
        slot `slot`; it stays in use meanwhile."""
        memory = self.memory
        for arena, sealed in memory.slots() if snapshot else ():
            if (arena.rank, sealed.index) == (index, slot) and sealed.state is SlotState.SEALED:
                upkeep.verify_slot(memory, arena, sealed)
        parity = memory.parities.get((index, slot))
        if not snapshot and parity is not None and parity.state is ParityState.READY:
            upkeep.verify_parity(memory, parity)
        return self._convergence.settle(now)

    def request_persist(self, now: float) -> list[Effect]:
        """Request that the newest generation be persisted soon.

        Raises:
            InvalidJobError: the job has no durable tier.
        """
        persisting.request(self.memory)
        return self._convergence.settle(now)

    def on_completion(self, event: Completion, now: float) -> list[Effect]:
        """Apply the result of an effect."""
        completions.apply(
            self.memory, event, completions.Times(now=now, retry_at=now + self._settings.retry_s)
        )
        return self._convergence.settle(now)

    def tick(self, now: float) -> list[Effect]:
        """Act on the passing of time: retry, and repeat reports and directives that may have been
        lost."""
        pause_s = self._settings.idle_resend_s if self.settled else self._settings.resend_s
        self._convergence.repeat_after(pause_s, now)
        return self._convergence.settle(now)

    # --- what happened: trainers ------------------------------------------------------------------

    def hello(
        self, rank: int, store_address: str, world: str = "", now: float = 0.0
    ) -> tuple[Membership, list[Effect]]:
        """The membership that a worker of the world behind `store_address` belongs to. The worker
        counts as arrived in that world, unless the store may still belong to an earlier epoch.

        Args:
            world: name of the worker's world, where no agent has formed it.

        Raises:
            StaleEpochError: that world has ended.
            UnreachableError, InvalidJobError: the rank does not live here, or not yet; or the epoch
                of its world has not begun.
        """
        epoch = self._epoch_with(rank)
        if world and epoch.membership.external:
            return epoch.membership, self._enter_world(epoch, rank, world, now)
        rendezvous = epoch.directive.rendezvous
        if store_address and rendezvous and store_address != rendezvous:
            raise StaleEpochError(
                f"rank {rank} of {self.memory.job}: its training world {store_address} has ended; "
                f"epoch {epoch.number} meets at {rendezvous}"
            )
        if not store_address or rendezvous:
            self.memory.rank(rank).arrived_in = epoch.number
        return epoch.membership, []

    def _enter_world(self, epoch: Epoch, rank: int, world: str, now: float) -> list[Effect]:
        """Let a worker enter the epoch with its world. An epoch belongs to the first world that
        arrives; the world's first rank names it.

        Raises:
            UnreachableError: the first rank has not arrived yet, or the epoch belongs to another
                world. In the second case the control loop is asked for the next epoch.
        """
        memory, name = self.memory, epoch.directive.rendezvous
        first = rank == epoch.membership.ranks_of(epoch.membership.leader).start
        effects: list[Effect] = []
        if not name and first:
            effects, name = self.publish_store(epoch.number, world, now), world
        if name == world:
            memory.rank(rank).arrived_in = epoch.number
            return effects
        if not name:
            raise UnreachableError(
                f"rank {rank} of {memory.job}: epoch {epoch.number} waits for the first rank of "
                f"its world"
            )
        memory.agent_waiting = True
        raise UnreachableError(
            f"rank {rank} of {memory.job}: epoch {epoch.number} belongs to an earlier training "
            f"world; the control loop begins the next one"
        )

    def open(
        self,
        *,
        rank: int,
        epoch: int,
        layout: bytes,
        largest_slot_bytes: int,
        pid: int,
        now: float,
    ) -> tuple[str, list[Effect]]:
        """Begin a session; `opened` returns it once its arena is allocated.

        Raises:
            StaleEpochError, InvalidJobError, RankInUseError, CorruptError, LayoutMismatchError.
        """
        memory = self.memory
        self._check_epoch(epoch, f"rank {rank}")
        current = self._epoch_with(rank)
        plain = decode_layout(layout)
        largest = max(largest_slot_bytes, plain.slot_bytes)
        world = current.membership.world
        plain = replace(plain, largest_slot_bytes=largest, since=world.since)
        arena = _arena(rank, encode_layout(plain))
        if (plain.rank, plain.world_size) != (world.world_rank(rank), world.size):
            raise InvalidJobError(
                f"world rank {world.world_rank(rank)} of {world.size} opens a session with the "
                f"layout of rank {plain.rank} of {plain.world_size}"
            )
        record = memory.rank(rank)
        holder = record.session
        if holder is not None and holder.claimed:
            raise RankInUseError(
                f"rank {rank} of {memory.job} is held by process {holder.pid}; it must end before "
                f"another process can take its place"
            )
        if holder is not None:
            memory.sessions.pop(holder.id, None)
        self._sessions_made += 1
        session = TrainerSession(
            id=f"{memory.job}/{memory.incarnation}/{self._sessions_made}",
            rank=rank,
            epoch=epoch,
            layout_id=arena.layout_id,
            pid=pid,
        )
        memory.sessions[session.id] = record.session = session
        record.arrived_in = epoch
        upkeep.release(memory, current)
        upkeep.allocate(memory, current, memory.arenas.get((rank, arena.layout_id), arena))
        return session.id, self._convergence.settle(now)

    def claimed(self, session_id: str, now: float) -> list[Effect]:
        """Record that the trainer holds the arena's lock: no other process writes into the arena
        any more."""
        session = self._session(session_id)
        session.claimed = True
        record = self.memory.rank(session.rank)
        record.last_sign, record.unprotected_in = now, 0
        self._take_back(session.rank)
        self.memory.note(
            JobEvent.SESSION_OPENED,
            rank=session.rank,
            detail=f"process {session.pid}",
            stayed=record.stayed(session),
        )
        return self._convergence.settle(now)

    def grant(
        self,
        session_id: str,
        *,
        epoch: int,
        step: int,
        now: float,
        base: Generation | None = None,
        unchanged: bytes = b"",
        first_step: int = 0,
    ) -> tuple[Granted, list[Effect]]:
        """Grant a slot for the snapshot of `step`, with places for its pieces. An earlier grant of
        the rank is taken back: its trainer failed to give it back, or never learned of it.

        Args:
            base: the snapshot from which the trainer wants to carry pieces over; unless it is held
                here, verified and in this layout, everything has to be written.
            unchanged: bit map of those pieces.
            first_step: first step of the window that ends with `step`, of which the trainer has
                completed no more; 0 for a snapshot of one step.

        Raises:
            SnapshotSkippedError: no slot is free now; training continues without this snapshot.
            StepOrderError, StaleEpochError, UnknownSessionError.
        """
        memory, session = self.memory, self._session(session_id)
        self._check_epoch(epoch, f"rank {session.rank}")
        # The request is valid: an open session of this epoch, and a step after all earlier ones.
        if first_step > step:
            raise StepOrderError(
                f"rank {session.rank} asks for a window from step {first_step} to step {step}; a "
                f"window ends with its last step"
            )
        if session.epoch != epoch or not session.claimed:
            raise UnknownSessionError(f"session {session_id} has no claim in epoch {epoch}")
        generation, record = Generation(epoch, step), memory.rank(session.rank)
        if record.passed is not None and generation <= record.passed:
            raise StepOrderError(
                f"rank {session.rank} asks to save step {step} after step {record.passed.step} of "
                f"epoch {record.passed.epoch}; steps must increase"
            )
        if memory.fenced:
            raise StaleEpochError(
                f"epoch {epoch} has ended: a peer is in epoch {memory.epoch_seen}"
            )
        current = memory.current
        if current is None or current.line is None:
            raise SnapshotSkippedError("the recovery line of this epoch is not decided yet")
        # From here on the step counts as requested, even if no slot is free.
        record.passed = generation
        record.last_step, record.last_sign = first_step or step, now
        arena = memory.arenas[(session.rank, session.layout_id)]
        self._take_back(session.rank)
        slot = upkeep.slot_to_write(memory, current, arena)
        if slot is None:
            memory.note(JobEvent.SKIPPED, rank=session.rank, generation=generation, detail="slots")
            self._convergence.settle_into(now)
            raise SnapshotSkippedError(_why_no_slot(arena, of_window=first_step > 0))
        # Choose the places of the pieces, and remember what is carried over until the commit.
        carried_from = arena.whole(base)
        slot.places = arena.places_for(slot, carried_from, unchanged)
        slot.state, slot.generation, slot.first_step = SlotState.GRANTED, generation, first_step
        if carried_from is not None and carried_from.manifest is not None:
            slot.unchanged, slot.base_digests = unchanged, carried_from.manifest.digests
        granted = Granted(slot=slot.index, places=slot.places, carried=carried_from is not None)
        return granted, self._convergence.settle(now)

    def commit(
        self,
        session_id: str,
        *,
        epoch: int,
        step: int,
        slot: int,
        payload_bytes: int,
        extras_bytes: int,
        digests: bytes,
        nan_units: tuple[str, ...],
        experts: tuple[ExpertVersion, ...] = (),
        now: float,
    ) -> list[Effect]:
        """Seal the filled slot; `committed` then returns the digest. Repeating it is harmless."""
        memory, session = self.memory, self._session(session_id)
        self._check_epoch(epoch, f"rank {session.rank}")
        generation = Generation(epoch, step)
        arena = memory.arenas[(session.rank, session.layout_id)]
        # The slot was granted for this step; a repeated commit changes nothing.
        if not 0 <= slot < len(arena.slots):
            raise CorruptError(f"rank {session.rank} commits slot {slot}, which does not exist")
        target = arena.slots[slot]
        if target.generation != generation or target.state not in (
            SlotState.GRANTED,
            SlotState.SEALING,
            SlotState.SEALED,
        ):
            raise UnknownSessionError(
                f"rank {session.rank}: slot {slot} was not granted for step {step}"
            )
        if target.state is not SlotState.GRANTED:
            return []
        layout = arena.layout
        if not layout.extras_offset + extras_bytes == payload_bytes <= layout.slot_bytes:
            raise CorruptError(
                f"rank {session.rank} commits {payload_bytes} bytes, {extras_bytes} of them "
                f"extras; its layout has {layout.extras_offset} bytes of tensors in slots of "
                f"{layout.slot_bytes} bytes"
            )
        # Seal it: the manifest describes the pieces written and those carried over.
        target.places = target.places[: piece_count(payload_bytes, layout.piece_bytes)]
        manifest = Manifest(
            job=memory.job,
            rank=layout.rank,
            world_size=layout.world_size,
            generation=generation,
            layout_id=arena.layout_id,
            payload_bytes=payload_bytes,
            extras_offset=layout.extras_offset,
            extras_bytes=extras_bytes,
            piece_bytes=layout.piece_bytes,
            digests=target.all_digests(digests),
            nan_units=nan_units,
            experts=experts,
            first_step=target.first_step,
        )
        target.filled(manifest)
        memory.rank(session.rank).last_sign = now
        memory.out.append(
            Seal(
                rank=session.rank,
                layout_id=arena.layout_id,
                slot=slot,
                manifest=manifest,
                encoded=target.encoded,
                places=target.places,
            )
        )
        return self._convergence.settle(now)

    def abort(self, session_id: str, *, epoch: int, step: int, now: float) -> list[Effect]:
        """Free a granted slot that the trainer gives back."""
        session = self._session(session_id)
        self._take_back(session.rank, Generation(epoch, step))
        return self._convergence.settle(now)

    def _take_back(self, rank: int, generation: Generation | None = None) -> None:
        """Free what is granted to a rank: for the snapshot of `generation`, or for any."""
        for arena, slot in self.memory.slots():
            granted = arena.rank == rank and slot.state is SlotState.GRANTED
            if granted and generation in (None, slot.generation):
                slot.clear()

    def session_ended(self, session_id: str, *, clean: bool, now: float) -> list[Effect]:
        """End a session: the trainer has closed it, or its process is gone."""
        memory = self.memory
        session = memory.sessions.get(session_id)
        if session is None:
            return []
        self._forget(session)
        record = memory.rank(session.rank)
        self._take_back(session.rank)
        if not clean and session.epoch == memory.epoch:
            record.lost_in = memory.epoch
            memory.note(
                JobEvent.RANK_LOST, rank=session.rank, detail=f"process {session.pid} ended"
            )
        return self._convergence.settle(now)

    def progress(
        self,
        session_id: str,
        *,
        step: int,
        now: float,
        skipped: int = 0,
        failed: int = 0,
        failure: str = "",
        failure_code: str = "",
        pace: SavePace | None = None,
        loss: LossReport | None = None,
        plan: PlanReport | None = None,
        times: StepTimes | None = None,
        divergence: Divergence | None = None,
    ) -> None:
        """Record a rank's sign of life and the state of its saves.

        Raises:
            ProtocolError: the plan is of an epoch after that of the session. The newest plan is
                shown, so it would hide those to come.
        """
        session = self._session(session_id)
        if plan is not None and plan.epoch > session.epoch:
            raise ProtocolError(
                f"rank {session.rank} reports an expert plan of epoch {plan.epoch} in a session "
                f"of epoch {session.epoch}"
            )
        record = self.memory.rank(session.rank)
        # A worker that stays may still report steps of the epoch that has ended.
        if step > record.last_step and session.epoch == self.memory.epoch:
            record.last_step, record.last_sign = step, now
        record.skipped, record.failed = skipped, failed
        record.failure, record.failure_code = failure, failure_code
        record.pace = pace or SavePace()
        record.loss, record.plan = loss, plan
        if session.epoch == self.memory.epoch:
            record.times = (session.epoch, times)
            # The report of an earlier epoch is kept until this one has another.
            if divergence is not None or record.divergence[0] == session.epoch:
                record.divergence = (session.epoch, divergence)

    def follows(self, rank: int, pid: int, size: int = 0) -> int:
        """Record that the worker of `rank` follows its worlds from now on, until `unfollows`.

        Args:
            size: number of ranks of the only worlds that it can stay for; 0: it can in any.

        Returns:
            The number of its stream, which replaces any earlier one of the rank.

        Raises:
            UnreachableError, InvalidJobError: the rank does not live here, or not yet.
            AccessDeniedError: nobody would ever form a new world around it.
        """
        if self._epoch_with(rank).membership.external:
            raise AccessDeniedError(
                f"another controller makes the pods of {self.memory.job} (spec.trainer.external), "
                f"and starts all processes again when one is lost; none can stay: call "
                f"holdfast.elastic.init with stay=False"
            )
        self._followers_made += 1
        record, follower = self.memory.rank(rank), self.memory.rank(rank).follower
        if follower is None or follower.pid != pid:
            record.began_alone = False
        record.follower = Follower(self._followers_made, pid, size, since=self.memory.epoch)
        return self._followers_made

    def begins_alone(self, rank: int, *, held_beside: bool = False) -> None:
        """Record that the process of `rank` has begun from the beginning, and that what its member
        holds is nowhere else.

        Args:
            held_beside: whether another rank, perhaps of its member, holds what this rank holds.
        """
        record = self.memory.rank(rank)
        record.began_alone, record.held_beside = True, held_beside

    @property
    def following_lanes(self) -> list[int]:
        """Lanes of this node whose workers follow their worlds."""
        ranks = self.memory.my_ranks()
        return [lane for lane, rank in enumerate(ranks) if self.memory.rank(rank).follower]

    def unfollows(self, rank: int, number: int) -> None:
        """Record that the stream `number` of `rank` has ended; one that was replaced is ignored."""
        record = self.memory.rank(rank)
        if record.follower is not None and record.follower.number == number:
            record.follower = None

    def agent_waits(self, after_epoch: int) -> bool:
        """Record that this member's agent has left the world of `after_epoch` and waits for the
        next.

        Returns:
            Whether that is new.
        """
        if after_epoch != self.memory.epoch or self.memory.agent_waiting:
            return False
        self.memory.agent_waiting = True
        return True

    def worker_exited(
        self,
        epoch: int,
        world_rank: int,
        exit_code: int,
        last_lines: str = "",
        reason: EndReason = EndReason.UNKNOWN,
        kernel_messages: str = "",
    ) -> None:
        """Record that a worker of `epoch` failed, the end of its stderr, the reason, and what the
        kernel wrote about it. Failures in an ended epoch are ignored, since workers are killed
        then, unless memory was short, or the hardware had a fault.
        Raises as `rank_in_world` does."""
        if epoch == self.memory.epoch:
            record = self.memory.rank(self.rank_in_world(world_rank))
            record.exited, record.last_lines = (epoch, exit_code), last_lines
            record.exit_reason, record.kernel_messages = reason, kernel_messages
            record.unprotected_in = 0
        if reason is EndReason.OOM_KILLED and epoch <= self.memory.epoch:
            record = self.memory.rank(self.rank_of_lane(world_rank))
            record.oom_killed_in = max(record.oom_killed_in, epoch)
        if reason is EndReason.HARDWARE_FAULT and epoch <= self.memory.epoch:
            record = self.memory.rank(self.rank_of_lane(world_rank))
            record.hardware_fault_in = max(record.hardware_fault_in, epoch)
            if record.exited[0] != self.memory.epoch:
                record.kernel_messages = kernel_messages

    def worked(self, epoch: int, world_ranks: Collection[int], now: float) -> None:
        """Record that an agent recently saw workers of `epoch` at work, and no others. Does nothing
        when that epoch has ended. Raises as `rank_in_world` does.

        For a worker that has never saved, work is progress, as it was before its first step: its
        script did not agree to report steps."""
        if epoch == self.memory.epoch:
            ranks = [self.rank_in_world(each) for each in set(world_ranks)]
            self.memory.work_reported_at = now
            for rank in ranks:
                record = self.memory.rank(rank)
                record.worked = (epoch, now)
                if record.unprotected_in == epoch and record.failure_code == UnsavedError.code:
                    record.last_sign = now

    def inspect(self, epoch: int, number: int, now: float) -> None:
        """Have the launcher inspect the processes of this node, unless it was asked for this
        inspection, or a later one, or the epoch has ended."""
        known = self.memory.inspection
        if epoch == self.memory.epoch and (known is None or known.number < number):
            self.memory.inspection = Inspection(number=number, asked_at=now)

    @property
    def awaited_inspection(self) -> int:
        """Number of the inspection that the launcher has not answered yet; 0 if there is none."""
        asked = self.memory.inspection
        return asked.number if asked is not None and asked.processes is None else 0

    def inspected(
        self, epoch: int, number: int, processes: Sequence[InspectedProcess], now: float
    ) -> list[Effect]:
        """Record the launcher's answer to an inspection; the ranks are world ranks. Does nothing
        when nobody waits for it. Raises as `rank_in_world` does."""
        asked = self.memory.inspection
        if epoch != self.memory.epoch or asked is None or number != self.awaited_inspection:
            return []
        by_rank = {self.rank_in_world(each.rank): each for each in processes}
        found = tuple(
            structs.replace(
                each, rank=rank, collectives=tuple(map(self._with_ranks, each.collectives))
            )
            for rank, each in sorted(by_rank.items())
        )
        self.memory.inspection = replace(asked, processes=found)
        for each in found:
            self.memory.note(JobEvent.INSPECTED, rank=each.rank, detail=each.in_words)
        return self._convergence.settle(now)

    def _with_ranks(self, group: GroupCollectives) -> GroupCollectives:
        """`group` with the ranks of its members, which are given as world ranks; without members if
        one is not in the world."""
        world = self._present().membership.world
        try:
            members = tuple(sorted(map(world.rank_of, group.members)))
        except IndexError:
            members = ()
        return structs.replace(group, members=members)

    def trained(
        self,
        rank: int,
        *,
        epoch: int,
        step: int,
        now: float,
        skipped: int = 0,
        failed: int = 0,
        failure: str = "",
        failure_code: str = "",
        closed: bool = False,
    ) -> list[Effect]:
        """Record the progress of a rank that has no session, because its saves are refused.

        Args:
            closed: the rank trains no more.

        Raises:
            StaleEpochError: `epoch` has ended.
        """
        self._check_epoch(epoch, f"rank {rank}")
        record = self.memory.rank(rank)
        if record.session is not None and record.session.claimed:
            return []  # its own reports count
        if closed:
            record.unprotected_in = 0
        else:
            if step > record.last_step or record.unprotected_in != epoch:
                record.last_step, record.last_sign = max(step, record.last_step), now
            record.unprotected_in = epoch
        record.skipped, record.failed = skipped, failed
        record.failure, record.failure_code = failure, failure_code
        return self._convergence.settle(now)

    def publish_store(
        self, epoch: int, address: str, now: float, store_key: str = ""
    ) -> list[Effect]:
        """Announce the address of the world's store, which the first member's agent serves, and its
        key, if it has one."""
        memory = self.memory
        self._check_epoch(epoch, "the agent")
        if memory.current is not None:
            memory.direct(
                replace(memory.current.directive, rendezvous=address, store_key=store_key)
            )
        return self._convergence.settle(now)

    def restore_given(self, rank: int, state: RestoreState) -> None:
        """Record that the trainer of `rank` was given the line of `state` to restore from."""
        assert state.line is not None
        self.memory.rank(rank).restored = (state.line.generation, state.source)

    def no_replay(self, rank: int, why: str) -> None:
        """Record why lost ranks do not recover alone, as the trainer of `rank` stated."""
        self.memory.rank(rank).no_replay = why

    def went_live(
        self,
        rank: int,
        epoch: int,
        step: int,
        repeated_after: int | None,
        now: float,
        source: RestoreSource = RestoreSource.LIVE,
    ) -> list[Effect]:
        """Record that the trainer of `rank` continues live after `step`.

        Args:
            repeated_after: step that it restored, and after which it repeated steps, alone; None
                if it kept its state.
            source: source of what it restored alone; LIVE if it kept its state.

        Raises:
            StaleEpochError: the epoch has ended.
        """
        self._check_epoch(epoch, f"rank {rank}")
        record = self.memory.rank(rank)
        if not any(each.is_live for each in self.memory.ranks.values()):
            self.memory.note(JobEvent.WENT_LIVE, rank=rank, generation=Generation(epoch, step))
        record.restored = (Generation(epoch, step), source)
        record.repeated_after = repeated_after
        return self._convergence.settle(now)

    # --- questions: the job -----------------------------------------------------------------------

    @property
    def job(self) -> str:
        return self.memory.job

    @property
    def epoch(self) -> int:
        """Number of the newest membership; 0 before there is one."""
        return self.memory.epoch

    @property
    def membership(self) -> Membership | None:
        """The newest membership; None before there is one."""
        return self.memory.membership

    @property
    def takes_part(self) -> bool:
        """Whether the newest membership has a member on this node."""
        return self.memory.current is not None

    @property
    def ranks(self) -> range:
        """The ranks that live here."""
        return self.memory.my_ranks()

    @property
    def verified(self) -> bool:
        """Whether everything held here has been verified in this epoch."""
        return self.memory.verified

    @property
    def has_tier(self) -> bool:
        """Whether the job has a durable tier."""
        membership = self.memory.membership
        return membership is not None and membership.tier is not None

    @property
    def wants_persist(self) -> bool:
        """Whether a generation requested on this node is still to be persisted."""
        return self.memory.persist.wanted is not None

    def is_due_soon(self, now: float) -> bool:
        """Whether the protected generation should be persisted soon, as far as this daemon
        knows."""
        return persist_leader.is_due_soon(self.memory, now)

    def overview(self) -> JobOverview:
        """The state of the job now, as a frozen value."""
        return overview.overview(self.memory)

    def held(self) -> HeldOverview:
        """The contents of slots and parity blocks now."""
        return overview.held(self.memory)

    def evidence(self) -> tuple[object, ...]:
        """The state that the control loop may act upon: changes to it are reported at once."""
        return overview.evidence(self.memory)

    @property
    def rebuilds(self) -> bool:
        """Whether snapshots are being rebuilt or loaded here, which fills this node's links."""
        return bool(self.memory.rebuilds)

    @property
    def settled(self) -> bool:
        """Whether repeating reports can wait: the line is announced, and nothing is in progress."""
        epoch = self.memory.current
        if epoch is None or epoch.line is None or self.memory.rebuilds:
            return False
        newest = max(
            (s.generation for _, s in self.memory.slots() if s.generation is not None),
            default=None,
        )
        return newest is None or newest == epoch.retained

    def is_member(self, member: int) -> bool:
        """Whether the job has this member in this epoch."""
        membership = self.memory.membership
        return membership is not None and any(m.index == member for m in membership.members)

    @property
    def adopted_claims(self) -> list[ArenaView]:
        """Arenas that a trainer of an earlier daemon held when this daemon started, and that no
        session of this daemon has claimed since."""
        return [arena for arena in self.memory.arenas.values() if arena.has_unknown_writer]

    # --- questions: trainers and agents -----------------------------------------------------------

    def has_session(self, session_id: str) -> bool:
        """Whether the session is open."""
        return session_id in self.memory.sessions

    def watched(self, session_id: str) -> EpochProgress | None:
        """Progress to report to a session now; None once it has ended."""
        session = self.memory.sessions.get(session_id)
        return None if session is None else answers.watched(self.memory, session)

    def opened(self, session_id: str) -> OpenedSession | None:
        """The session once its arena is allocated, None while it is being allocated.

        Raises:
            MemoryBudgetError, StorageError: the arena could not be allocated; the session is gone.
            UnknownSessionError: no such session.
        """
        session = self._session(session_id)
        if session.error is not None:
            self._forget(session)
            raise session.error
        arena = self.memory.arenas.get((session.rank, session.layout_id))
        if arena is None or not session.allocated:
            return None
        # What a rank reported in another world has that one's ranks, and digests of other sums.
        epoch, earlier = self.memory.rank(session.rank).divergence
        membership = self.memory.membership
        is_of_world = membership is not None and membership.since <= epoch < session.epoch
        if not is_of_world or (earlier is not None and earlier.proof is not Proof.NONE):
            earlier = None
        return OpenedSession(session=session, arena=arena, earlier=earlier)

    def committed(self, session_id: str, *, epoch: int, step: int) -> int | None:
        """The manifest's digest once the snapshot is sealed; None while it is being sealed.

        Raises:
            SnapshotSkippedError: it could not be sealed.
        """
        session = self._session(session_id)
        for arena, slot in self.memory.slots():
            if arena.rank == session.rank and slot.generation == Generation(epoch, step):
                if slot.state is SlotState.SEALING:
                    return None
                if slot.state is SlotState.SEALED:
                    return slot.digest
        retained = self.memory.current.retained if self.memory.current is not None else None
        if retained is not None and retained >= Generation(epoch, step):
            return 0
        why = self.memory.rank(session.rank).seal_error or "the slot was freed"
        raise SnapshotSkippedError(f"step {step} was not sealed: {why}")

    def rank_in_world(self, world_rank: int, epoch: int | None = None) -> int:
        """The rank of this node that torch numbers `world_rank` in the present world. Trainers know
        no other number.

        Args:
            epoch: epoch in which the worker acts; None if it does not state one.

        Raises:
            StaleEpochError: `epoch` has ended, or the rank had this number in an earlier world.
            UnreachableError: this node takes part in no epoch, or not yet in `epoch`; or the pods
                are another controller's, which may have changed places.
            InvalidJobError: the rank does not live here.
        """
        memory = self.memory
        if epoch is not None:
            self._check_epoch(epoch, f"world rank {world_rank}")
        here = self._present()
        world, rank = here.membership.world, here.ranks[here.membership.lane_of(world_rank)]
        first = world.world_rank(here.ranks.start)
        if world.world_rank(rank) == world_rank:
            return rank
        hosts = f"hosts ranks {first}..{first + world.nproc_per_node - 1} of {memory.job}"
        if here.membership.external and epoch is None:
            raise UnreachableError(
                f"rank {world_rank} is not on node {memory.node}, which {hosts} in epoch "
                f"{here.number}: the ranks of a pod must follow from its number (torchrun "
                f"--node-rank), and the next epoch begins once all pods have a node"
            )
        if world.since > 0:
            raise StaleEpochError(
                f"a worker of an earlier world calls itself rank {world_rank}: since epoch "
                f"{world.since} there are {world.size} ranks, and node {memory.node} {hosts}"
            )
        raise InvalidJobError(f"rank {world_rank} is not on node {memory.node}, which {hosts}")

    def rank_of_lane(self, world_rank: int) -> int:
        """The rank of this node with the lane of `world_rank`, which may count in an earlier world
        if there has been one.

        Raises:
            UnreachableError: this node takes part in no epoch.
            InvalidJobError: the rank does not live here, and the job has had no other world.
        """
        epoch = self._present()
        if not epoch.membership.since:
            return self.rank_in_world(world_rank)
        return epoch.ranks[epoch.membership.lane_of(world_rank)]

    def restore_state(self, rank: int, epoch: int) -> RestoreState:
        """Where `rank` starts in this epoch, or how far the decision has come.

        Raises:
            StaleEpochError: the epoch has ended.
            NoRecoveryLineError: training has continued without this rank's restore.
        """
        self._check_epoch(epoch, f"rank {rank}")
        return answers.restore_state(self.memory, self._epoch_with(rank), rank)

    def world_state(self, after_epoch: int) -> WorldState | None:
        """The world of an epoch newer than `after_epoch`, or None while there is none."""
        return answers.world_state(self.memory, after_epoch)

    def followed_world(self, rank: int, number: int) -> WorldState | None:
        """The current world, for the stream `number` of `rank`; None while this daemon is fenced.

        Raises:
            RankInUseError: a newer stream has replaced this one.
            UnreachableError, InvalidJobError: the rank no longer lives here.
        """
        self._epoch_with(rank)
        follower = self.memory.rank(rank).follower
        if follower is None or follower.number != number:
            holder = f"process {follower.pid}" if follower is not None else "no process"
            raise RankInUseError(
                f"{holder} follows the worlds of rank {rank} of {self.memory.job} now, in place of "
                f"this one"
            )
        return self.world_state(0)

    # --- inside -----------------------------------------------------------------------------------

    def _check_epoch(self, epoch: int, who: str) -> None:
        memory = self.memory
        if epoch > memory.epoch:
            raise UnreachableError(
                f"{who} of {memory.job} acts in epoch {epoch}, but node {memory.node} is still in "
                f"epoch {memory.epoch}"
            )
        if epoch < memory.epoch:
            raise StaleEpochError(
                f"{who} of {memory.job} acts in epoch {epoch}; the current epoch is {memory.epoch}"
            )

    def _epoch_with(self, rank: int) -> Epoch:
        """The current epoch, in which `rank` lives here.

        Raises:
            UnreachableError: this node takes part in no epoch.
            InvalidJobError: the rank does not live here.
        """
        memory, epoch = self.memory, self._present()
        mine = epoch.ranks
        if rank not in mine:
            raise InvalidJobError(
                f"rank {rank} is not on node {memory.node}, which hosts ranks "
                f"{mine.start}..{mine.stop - 1} of {memory.job}"
            )
        return epoch

    def _present(self) -> Epoch:
        """The current epoch; UnreachableError when this node takes part in none."""
        memory = self.memory
        if memory.current is None:
            raise UnreachableError(
                f"node {memory.node} is not a member of {memory.job} yet; it waits for its "
                f"membership from the control loop"
            )
        return memory.current

    def _session(self, session_id: str) -> TrainerSession:
        session = self.memory.sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id} is not known; open a new one")
        return session

    def _forget(self, session: TrainerSession) -> None:
        self.memory.sessions.pop(session.id, None)
        record: RankRecord = self.memory.rank(session.rank)
        if record.session is session:
            record.session = None

    def _enter(self, membership: Membership) -> None:
        """Begin an epoch: everything must be verified, reported and decided again."""
        memory = self.memory
        memory.persist.begin_epoch(persisting.moved(memory.membership, membership))
        memory.begin_epoch(membership)
        memory.note(JobEvent.EPOCH_BEGAN, detail=str(membership.epoch))

    def _see_epoch(self, epoch: int) -> bool:
        """Note a peer's `epoch`; return whether it is newer than this daemon's, which fences it."""
        memory = self.memory
        if epoch > memory.epoch_seen:
            memory.epoch_seen = epoch
            if memory.membership is not None and epoch > memory.epoch:
                memory.note(JobEvent.FENCED, detail=f"a peer is in epoch {epoch}")
        return epoch > memory.epoch


def _why_no_slot(arena: ArenaView, *, of_window: bool) -> str:
    """Why no slot can be granted, in words.

    Args:
        of_window: whether the slot is for a sparse window.
    """
    if arena.free_slot() is not None:
        return f"the last free slot of rank {arena.rank} is for a rebuild of it"
    why = f"every slot of rank {arena.rank} is in use ({arena.uses}): protection is behind"
    if not of_window or len(arena.slots) > SLOTS_MIN:
        return why
    return (
        f"{why}. With {SLOTS_MIN} slots, a window is left out while the previous one is being "
        f"protected: set snapshot.slots to {SLOTS_MAX}, and memoryPerNode to what they need"
    )


def _arena(rank: int, encoded: bytes) -> ArenaView:
    layout = decode_layout(encoded)
    encoded = encode_layout(layout)  # one encoding, whatever the sender's
    return ArenaView(rank=rank, layout_id=layout_id(encoded), layout=layout, encoded=encoded)
