"""How the daemons of a job converge: memberships, reports, directives, and the upkeep they cause.

Every input ends in `_settle`, which runs the level-triggered upkeep until nothing changes and tells
leader and parity group what is new. The requests of trainers are in `job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from holdfast_core.errors import InvalidJobError
from holdfast_core.layouts import (
    decode_layout,
    decode_manifest,
    encode_layout,
    layout_id,
    manifest_digest,
)
from holdfast_core.values import (
    Directive,
    Generation,
    Line,
    Membership,
    ParityEntry,
    Report,
)
from holdfast_daemon.effects import Completion, Effect, SaveEpoch, SendDirective, SendReport
from holdfast_daemon.engine import (
    completions,
    leader,
    loading,
    persist_leader,
    persisting,
    rebuilding,
    reporting,
    upkeep,
)
from holdfast_daemon.engine.loading_state import Loading
from holdfast_daemon.engine.slots import ArenaView, ParityState, SlotState
from holdfast_daemon.engine.state import JobMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How often a daemon repeats itself."""

    resend_s: float = 1.0
    """While something is unsettled: reports and directives are repeated, since any may be lost."""
    idle_resend_s: float = 5.0
    """While all is settled."""
    retry_s: float = 0.25
    """Before a failed build or rebuild is tried again."""


class Convergence:
    """The part of a job's engine that needs no trainer."""

    def __init__(
        self, *, job: str, node: str, memory_id: str, incarnation: int, settings: EngineSettings
    ) -> None:
        self.memory = JobMemory(job=job, node=node, memory_id=memory_id, incarnation=incarnation)
        self._settings = settings
        self._sent_directive: Directive | None = None
        self._repeated_at = self._latest = float("-inf")
        self._said: reporting.News | None = None
        """In the newest report; None when it must be said again."""
        self._led: tuple[Membership, Directive, list[Report]] | None = None
        """From what a leader concluded nothing new the last time."""

    # --- what happened: membership and peers ------------------------------------------------------

    def adopt(
        self,
        *,
        membership: Membership | None,
        line: Line | None,
        retained: Generation | None,
        arenas: Sequence[tuple[int, bytes, dict[int, tuple[bytes, bytes]], bool]],
        parities: Sequence[tuple[int, int, ParityEntry]],
        now: float,
    ) -> list[Effect]:
        """Take over what an earlier daemon left. Nothing counts as held before it is verified.

        Args:
            arenas: (rank, encoded layout, {slot: (encoded manifest, places)}, whether a living
                process holds the claim) of each.
            parities: (lane, slot, entry) of each.
        """
        memory = self.memory
        for rank, encoded, sealed, claimed in arenas:
            arena = self._arena(rank, encoded)
            arena.ready = True
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
        for lane, index, entry in parities:
            parity = memory.lane_slots(lane)[index]
            parity.state, parity.generation = ParityState.READY, entry.generation
            parity.entry = entry
        if membership is not None:
            self._enter(membership)
            for rank in memory.my_ranks():
                memory.rank(rank).last_sign = now
            if line is not None and memory.directive is not None:
                memory.directive = leader.told(membership, memory.directive, line, retained)
        return self._settle(now)

    @property
    def adopted_claims(self) -> list[ArenaView]:
        """Arenas that a trainer of an earlier daemon held when this one started, and that no
        session of ours has claimed since."""
        return [arena for arena in self.memory.arenas.values() if arena.has_unknown_writer]

    def claim_ended(self, arena: ArenaView, now: float) -> list[Effect]:
        """The trainer of an earlier daemon is gone: its slots can be used again."""
        for slot in arena.slots:
            if slot.state is SlotState.GRANTED and slot.generation is None:
                slot.clear()
        return self._settle(now)

    def set_membership(self, membership: Membership, now: float) -> list[Effect]:
        """A membership from the control loop. Older ones, and ones that name another memory for
        this node, are ignored."""
        memory = self.memory
        known = memory.membership
        mine = membership.member_on(memory.node)
        if mine is not None and membership.place(mine).memory_id != memory.memory_id:
            memory.note("membership_for_other_memory", detail=membership.place(mine).memory_id)
        elif known is None or membership.epoch > known.epoch:
            self._enter(membership)
            memory.out.insert(0, SaveEpoch(membership=membership, line=None, retained=None))
            for rank in memory.my_ranks():
                memory.rank(rank).last_sign = now
        elif membership.epoch == known.epoch and membership.revision > known.revision:
            memory.membership = membership
            self._said = self._sent_directive = None
            memory.out.append(
                SaveEpoch(membership=membership, line=memory.line, retained=memory.retained)
            )
        return self._settle(now)

    def on_report(self, report: Report, now: float) -> list[Effect]:
        """A peer's report. A newer epoch than ours fences us; an older one is ignored, and so is
        one of somebody who is no member."""
        memory = self.memory
        if not self._see_epoch(report.epoch):
            if not self.is_member(report.member):
                return []
            known = memory.reports.get(report.member)
            if report.epoch < memory.epoch or (known and known.order >= report.order):
                return []
            memory.reports[report.member] = report
        return self._settle(now)

    def is_member(self, member: int) -> bool:
        """Whether the job has this member in this epoch."""
        membership = self.memory.membership
        return membership is not None and any(m.index == member for m in membership.members)

    def on_directive(self, directive: Directive, now: float) -> list[Effect]:
        """The leader's word."""
        memory = self.memory
        if not self._see_epoch(directive.epoch):
            if directive.epoch < memory.epoch or memory.directive is None:
                return []
            merged = leader.merge(memory.directive, directive)
            if merged == memory.directive:
                return []
            self._direct(merged)
        return self._settle(now)

    def on_peer_epoch(self, epoch: int, now: float) -> list[Effect]:
        """A peer answered with its own epoch."""
        return self._settle(now) if self._see_epoch(epoch) else []

    def on_suspect(self, epoch: int, rank: int, generation: Generation, now: float) -> list[Effect]:
        """A member received bytes of ours that are wrong. Of our own snapshot: look again. Of
        another's, which comes out wrong of our parity although that matches its digests: give the
        parity up, so that the next epoch goes on from something else."""
        held = self.memory.sealed(rank, generation)
        if epoch == self.memory.epoch and held is not None:
            upkeep.verify_slot(self.memory, *held)
        elif epoch == self.memory.epoch:
            upkeep.give_up_parity_of(self.memory, rank, generation)
        return self._settle(now)

    def scrub(self, now: float, *, snapshot: bool, index: int, slot: int) -> list[Effect]:
        """Look again at the snapshot of rank `index`, or the parity block of lane `index`, in slot
        `slot`; it stays in use meanwhile."""
        memory = self.memory
        for arena, held in memory.slots() if snapshot else ():
            if (arena.rank, held.index) == (index, slot) and held.state is SlotState.SEALED:
                upkeep.verify_slot(memory, arena, held)
        parity = memory.parities.get((index, slot))
        if not snapshot and parity is not None and parity.state is ParityState.READY:
            upkeep.verify_parity(memory, parity)
        return self._settle(now)

    def request_persist(self, now: float) -> list[Effect]:
        """Somebody wants the newest generation in the durable tier soon.

        Raises:
            InvalidJobError: the job has none.
        """
        persisting.request(self.memory)
        return self._settle(now)

    def on_completion(self, event: Completion, now: float) -> list[Effect]:
        """An effect ended."""
        completions.apply(
            self.memory, event, completions.Times(now=now, retry_at=now + self._settings.retry_s)
        )
        return self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passed: retry, and repeat reports and directives that may have been lost."""
        settled = self.settled
        pause = self._settings.idle_resend_s if settled else self._settings.resend_s
        if now - self._repeated_at >= pause:  # however much else was said since, to some
            self._said = self._sent_directive = None
            self._repeated_at = now
        return self._settle(now)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether repeating reports can wait: a line is told, and nothing is on its way."""
        directive = self.memory.directive
        if directive is None or directive.line is None or self.memory.rebuilds:
            return False
        newest = max(
            (s.generation for _, s in self.memory.slots() if s.generation is not None),
            default=None,
        )
        return newest is None or newest == directive.retained

    def _enter(self, membership: Membership) -> None:
        """Begin an epoch: everything must be verified, reported and decided anew."""
        memory = self.memory
        memory.persist.begin_epoch(persisting.moved(memory.membership, membership))
        memory.membership, memory.me = membership, membership.member_on(memory.node)
        memory.epoch_seen = max(memory.epoch_seen, membership.epoch)
        memory.directive = Directive(job=memory.job, epoch=membership.epoch)
        memory.reports = {}
        memory.retry_at = {}
        memory.loading = Loading()
        memory.wrong_rebuilds, memory.parity_failure = {}, ""
        memory.agent_waiting = False
        for _, slot in memory.slots():
            slot.verified = slot.verifying = False
        for parity in memory.parities.values():
            parity.verified = parity.verifying = False
        for record in memory.ranks.values():
            record.last_step, record.restored = 0, None
        memory.note("epoch_began", detail=str(membership.epoch))

    def _settle(self, now: float) -> list[Effect]:
        self._settle_into(now)
        effects, self.memory.out = self.memory.out, []
        return effects

    def _settle_into(self, now: float) -> None:
        memory = self.memory
        if now < self._latest:  # a clock that jumped back must not stretch a pause
            memory.retry_at.clear()
            memory.persist.clock_went_back(now)
            self._repeated_at = float("-inf")
        self._latest = now
        if memory.membership is None:
            return
        if memory.me is None:
            self._leave()
            return
        for _ in range(4):
            upkeep.verify(memory)
            loading.forget_failures(memory, now)
            self._report()
            before = (memory.directive, len(memory.out))  # what was said so far changes nothing
            if memory.leads and memory.directive is not None:
                self._lead(memory.membership, memory.directive, now)
                self._direct(persist_leader.lead(memory, now))
            persisting.write(memory, now)
            upkeep.release(memory)
            rebuilding.rebuild(memory, now)
            upkeep.protect(memory, now)
            if before == (memory.directive, len(memory.out)):
                break
        self._send_directive()

    def _lead(self, membership: Membership, directive: Directive, now: float) -> None:
        """Conclude what follows from the reports; from the same reports nothing new does."""
        memory = self.memory
        known = (membership, directive, list(memory.reports.values()))
        if directive.line is not None and known == self._led:
            return
        look = partial(loading.consult, memory, now=now)
        self._direct(leader.lead(membership, memory.reports, directive, look))
        self._led = known if memory.directive is directive else None

    def _leave(self) -> None:
        """This node is no longer a member: what it holds serves nobody."""
        memory = self.memory
        for arena, slot in memory.slots():
            if slot.state is SlotState.SEALED:
                upkeep.free_slot(memory, arena, slot)
        for parity in memory.parities.values():
            if parity.state is ParityState.READY:
                upkeep.free_parity(memory, parity)

    def _direct(self, directive: Directive) -> None:
        """Take the leader's word, and keep it on disk before acting on it."""
        memory = self.memory
        if directive == memory.directive or memory.membership is None:
            return
        known = memory.directive
        memory.directive = directive
        if known is None or (known.line, known.retained) != (directive.line, directive.retained):
            memory.out.append(
                SaveEpoch(
                    membership=memory.membership,
                    line=directive.line,
                    retained=directive.retained,
                )
            )
        if directive.line is not None and (known is None or known.line is None):
            memory.note("line", generation=directive.line.generation, detail=directive.line.reason)
        if directive.protected is not None and (
            known is None or known.protected != directive.protected
        ):
            memory.note("protected", generation=directive.protected)
        for generation in set(directive.dead) - set(known.dead if known else ()):
            memory.note("dead", generation=generation)
        persisting.tell(memory, known)

    def _report(self) -> None:
        """Tell the leader and the parity group what changed, each what it acts on."""
        memory = self.memory
        membership, me = memory.membership, memory.me
        if membership is None or me is None:
            return
        said, known = reporting.news(memory), self._said
        if said == known:
            return
        report = reporting.report(memory, me, said)
        self._said = said
        memory.reports[me] = report
        members = {membership.leader}
        if known is None or said.told_to_group() != known.told_to_group():
            members |= set(membership.group_of(me))
        for member in sorted(members - {me}):
            memory.out.append(SendReport(to=membership.place(member), report=report))

    def _send_directive(self) -> None:
        memory = self.memory
        if not memory.leads or memory.directive is None or memory.membership is None:
            return
        directive = memory.directive
        if directive == self._sent_directive:
            return
        if directive.line is None and not directive.rendezvous and directive.load is None:
            return
        self._sent_directive = directive
        for place in memory.membership.members:
            if place.index != memory.me:
                memory.out.append(SendDirective(to=place, directive=directive))

    def _see_epoch(self, epoch: int) -> bool:
        """Whether `epoch` is newer than ours, which fences us."""
        memory = self.memory
        if epoch > memory.epoch_seen:
            memory.epoch_seen = epoch
            if memory.membership is not None and epoch > memory.epoch:
                memory.note("fenced", detail=f"a peer is in epoch {epoch}")
        return epoch > memory.epoch

    def _arena(self, rank: int, encoded: bytes) -> ArenaView:
        layout = decode_layout(encoded)
        encoded = encode_layout(layout)  # one spelling, whatever the sender's
        if layout.rank != rank:
            raise InvalidJobError(f"rank {rank} opens with the layout of rank {layout.rank}")
        return ArenaView(rank=rank, layout_id=layout_id(encoded), layout=layout, encoded=encoded)
