"""`JobEngine`: the requests of trainers and agents, and the questions that adapters ask.

Requests are answered by questions about the state (`opened`, `committed`, `restore_state`,
`world_state`), which an adapter asks again after each change: so a request never hangs on an event
that was lost.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.errors import (
    CorruptError,
    InvalidJobError,
    RankInUseError,
    SnapshotSkippedError,
    StaleEpochError,
    StepOrderError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.layouts import (
    decode_layout,
    encode_layout,
    encode_manifest,
    manifest_digest,
    piece_count,
)
from holdfast_core.loss_reports import LossReport
from holdfast_core.values import ExpertVersion, Generation, Manifest
from holdfast_daemon.effects import Effect, Seal
from holdfast_daemon.engine import answers, upkeep
from holdfast_daemon.engine.answers import Granted, Opened, RestoreState, WorldState
from holdfast_daemon.engine.convergence import Convergence
from holdfast_daemon.engine.slots import SlotState
from holdfast_daemon.engine.state import RankRecord, Session


class JobEngine(Convergence):
    """One job on one node. Not thread-safe: call it from one thread."""

    _sessions_made = 0

    # --- what happened: trainers ------------------------------------------------------------------

    def hello(self, rank: int, store_address: str) -> int:
        """The epoch that a worker of the world behind `store_address` belongs to."""
        memory = self.memory
        self._check_rank(rank)
        assert memory.directive is not None
        rendezvous = memory.directive.rendezvous
        if store_address and rendezvous and store_address != rendezvous:
            raise StaleEpochError(
                f"rank {rank} of {memory.job}: its training world {store_address} has ended; epoch "
                f"{memory.epoch} meets at {rendezvous}"
            )
        return memory.epoch

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
        """Begin a session; `opened` tells when its arena is there.

        Raises:
            StaleEpochError, InvalidJobError, RankInUseError, CorruptError, LayoutMismatchError.
        """
        memory = self.memory
        self._check_epoch(epoch, f"rank {rank}")
        self._check_rank(rank)
        plain = decode_layout(layout)
        largest = max(largest_slot_bytes, plain.slot_bytes)
        arena = self._arena(rank, encode_layout(replace(plain, largest_slot_bytes=largest)))
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
        session = Session(
            id=f"{memory.job}/{memory.incarnation}/{self._sessions_made}",
            rank=rank,
            epoch=epoch,
            layout_id=arena.layout_id,
            pid=pid,
        )
        memory.sessions[session.id] = record.session = session
        upkeep.release(memory)
        upkeep.allocate(memory, memory.arenas.get((rank, arena.layout_id), arena))
        return session.id, self._settle(now)

    def opened(self, session_id: str) -> Opened | None:
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
        return Opened(session=session, arena=arena)

    def claimed(self, session_id: str, now: float) -> list[Effect]:
        """The trainer holds the arena's lock: no other process writes into it any more."""
        session = self._session(session_id)
        session.claimed = True
        record = self.memory.rank(session.rank)
        record.last_sign = now
        for arena, slot in self.memory.slots():
            if arena.rank == session.rank and slot.state is SlotState.GRANTED:
                slot.clear()
        self.memory.note("session_opened", rank=session.rank, detail=f"process {session.pid}")
        return self._settle(now)

    def grant(
        self,
        session_id: str,
        *,
        epoch: int,
        step: int,
        now: float,
        base: Generation | None = None,
        unchanged: bytes = b"",
    ) -> tuple[Granted, list[Effect]]:
        """A slot for the snapshot of `step`, and where in the arena its pieces go.

        Args:
            base: the snapshot from which the trainer wants to carry pieces over; when it is not
                here, whole, in this layout, everything has to be written.
            unchanged: bit map of those pieces.

        Raises:
            SnapshotSkippedError: no slot now; training goes on without this snapshot.
            StepOrderError, StaleEpochError, UnknownSessionError.
        """
        memory, session = self.memory, self._session(session_id)
        self._check_epoch(epoch, f"rank {session.rank}")
        if session.epoch != epoch or not session.claimed:
            raise UnknownSessionError(f"session {session_id} holds no claim in epoch {epoch}")
        generation = Generation(epoch, step)
        record = memory.rank(session.rank)
        if record.passed is not None and generation <= record.passed:
            raise StepOrderError(
                f"rank {session.rank} asks to save step {step} after step {record.passed.step} of "
                f"epoch {record.passed.epoch}; steps must grow"
            )
        if memory.fenced:
            raise StaleEpochError(
                f"epoch {epoch} has ended: a peer is in epoch {memory.epoch_seen}"
            )
        if memory.directive is None or memory.directive.line is None:
            raise SnapshotSkippedError("the recovery line of this epoch is not decided yet")
        record.passed = generation
        record.last_step, record.last_sign = step, now
        arena = memory.arenas[(session.rank, session.layout_id)]
        slot = upkeep.slot_to_write(memory, arena)
        if slot is None:
            memory.note("skipped", rank=session.rank, generation=generation, detail="slots")
            self._settle_into(now)
            raise SnapshotSkippedError(
                f"every slot of rank {arena.rank} is in use ({arena.uses}): protection is behind"
            )
        held = arena.whole(base)
        slot.places = arena.places_for(slot, held, unchanged)
        slot.state, slot.generation = SlotState.GRANTED, generation
        if held is not None and held.manifest is not None:
            slot.unchanged, slot.base_digests = unchanged, held.manifest.digests
        granted = Granted(slot=slot.index, places=slot.places, carried=held is not None)
        return granted, self._settle(now)

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
        """The slot is filled: seal it. `committed` tells when; repeating it is harmless."""
        memory, session = self.memory, self._session(session_id)
        self._check_epoch(epoch, f"rank {session.rank}")
        generation = Generation(epoch, step)
        arena = memory.arenas[(session.rank, session.layout_id)]
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
                f"rank {session.rank} commits {payload_bytes} bytes with {extras_bytes} of extras; "
                f"its layout has tensors of {layout.extras_offset} and slots of {layout.slot_bytes}"
            )
        target.places = target.places[: piece_count(payload_bytes, layout.piece_bytes)]
        manifest = Manifest(
            job=memory.job,
            rank=session.rank,
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
        )
        target.state, target.manifest = SlotState.SEALING, manifest
        target.encoded = encode_manifest(manifest)
        target.digest = manifest_digest(target.encoded)
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
        return self._settle(now)

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
        directive = self.memory.directive
        if directive and directive.retained and directive.retained >= Generation(epoch, step):
            return 0
        why = self.memory.rank(session.rank).seal_error or "the slot was given up"
        raise SnapshotSkippedError(f"step {step} was not sealed: {why}")

    def abort(self, session_id: str, *, epoch: int, step: int, now: float) -> list[Effect]:
        """The trainer gives a granted slot back."""
        session = self._session(session_id)
        for arena, slot in self.memory.slots():
            if (
                arena.rank == session.rank
                and slot.state is SlotState.GRANTED
                and slot.generation == Generation(epoch, step)
            ):
                slot.clear()
        return self._settle(now)

    def session_ended(self, session_id: str, *, clean: bool, now: float) -> list[Effect]:
        """The trainer closed its session, or its process is gone."""
        memory = self.memory
        session = memory.sessions.get(session_id)
        if session is None:
            return []
        self._forget(session)
        record = memory.rank(session.rank)
        for arena, slot in memory.slots():
            if arena.rank == session.rank and slot.state is SlotState.GRANTED:
                slot.clear()
        if not clean and session.epoch == memory.epoch:
            record.lost_in = memory.epoch
            memory.note("rank_lost", rank=session.rank, detail=f"process {session.pid} ended")
        return self._settle(now)

    def progress(
        self,
        session_id: str,
        *,
        step: int,
        now: float,
        skipped: int = 0,
        failed: int = 0,
        failure: str = "",
        loss: LossReport | None = None,
    ) -> None:
        """A sign of life of a rank, and how its saves fare."""
        record = self.memory.rank(self._session(session_id).rank)
        if step > record.last_step:
            record.last_step, record.last_sign = step, now
        record.skipped, record.failed, record.failure = skipped, failed, failure
        record.loss = loss

    def agent_waits(self, after_epoch: int) -> None:
        """This member's agent left the world of `after_epoch` and waits for the next one."""
        if after_epoch == self.memory.epoch:
            self.memory.agent_waiting = True

    def worker_exited(self, epoch: int, rank: int, exit_code: int, last_lines: str = "") -> None:
        """The agent saw a worker of `epoch` fail, and kept the end of its stderr. Of an ended epoch
        it says nothing: workers are killed then.

        Raises:
            InvalidJobError: the rank does not live here.
        """
        if epoch == self.memory.epoch:
            self._check_rank(rank)
            record = self.memory.rank(rank)
            record.exited, record.last_lines = (epoch, exit_code), last_lines

    def publish_store(self, epoch: int, address: str, now: float) -> list[Effect]:
        """The agent of the first member serves the world's store."""
        memory = self.memory
        self._check_epoch(epoch, "the agent")
        if memory.directive is not None:
            memory.directive = replace(memory.directive, rendezvous=address)
        return self._settle(now)

    # --- questions --------------------------------------------------------------------------------

    def restore_state(self, rank: int, epoch: int) -> RestoreState:
        """Where `rank` starts in this epoch, or how far finding out has come.

        Raises:
            StaleEpochError: the epoch has ended.
            NoRecoveryLineError: training has gone on without this rank's restore.
        """
        self._check_epoch(epoch, f"rank {rank}")
        self._check_rank(rank)
        return answers.restore_state(self.memory, rank)

    def world_state(self, after_epoch: int) -> WorldState | None:
        """The world of an epoch newer than `after_epoch`, or None while there is none."""
        return answers.world_state(self.memory, after_epoch)

    # --- inside -----------------------------------------------------------------------------------

    def _check_epoch(self, epoch: int, who: str) -> None:
        memory = self.memory
        if epoch > memory.epoch:
            raise UnreachableError(
                f"{who} of {memory.job} acts in epoch {epoch}, of which node {memory.node} has not "
                f"heard yet; it is in epoch {memory.epoch}"
            )
        if epoch < memory.epoch:
            raise StaleEpochError(
                f"{who} of {memory.job} acts in epoch {epoch}; the epoch is {memory.epoch}"
            )

    def _check_rank(self, rank: int) -> None:
        memory = self.memory
        if memory.membership is None or memory.me is None:
            raise UnreachableError(
                f"node {memory.node} is not a member of {memory.job} yet; the control loop has not "
                f"said where it stands"
            )
        if rank not in memory.my_ranks():
            mine = memory.my_ranks()
            raise InvalidJobError(
                f"rank {rank} does not live on node {memory.node}, which hosts ranks "
                f"{mine.start}..{mine.stop - 1} of {memory.job}"
            )

    def _session(self, session_id: str) -> Session:
        session = self.memory.sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id} is not known; open a new one")
        return session

    def _forget(self, session: Session) -> None:
        self.memory.sessions.pop(session.id, None)
        record: RankRecord = self.memory.rank(session.rank)
        if record.session is session:
            record.session = None
