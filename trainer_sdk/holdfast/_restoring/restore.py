"""The restore of one rank: its own bytes from the arena, shared bytes from the ranks that captured
them.

All ranks agree three times, so that either every rank restores the same generation or every rank
raises: when each rank has found its snapshot, when it has verified and copied its own bytes, and
when it has finished. A rank that fails still takes part in the next agreement before it raises, so
that no other rank waits for it.

If another world captured the recovery line, each rank reads its bytes from several snapshots; see
`other_world`. The agreements are the same, but every byte is verified before the first one, so that
a corrupt snapshot leaves the live state unchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from holdfast._agree.exchange import Exchange
from holdfast._capture.partial_state import START, PartialState
from holdfast._capture.strategy import CaptureStrategy
from holdfast._capture.taking_over import RankTokens, take_over
from holdfast._capture.window_records import live_name
from holdfast._copying.collector import without_collector
from holdfast._copying.engine import CopyEngine, plan_copy
from holdfast._copying.strided import fill_strided
from holdfast._daemon.client import DaemonClient, Hello, RestoreDecision, RestoreRequest
from holdfast._restoring.comparing import difference
from holdfast._restoring.fit import (
    Offer,
    Wanted,
    cast_pairs,
    check_cover,
    entries_of,
    make_room,
    offers_within,
    own_offers,
    wanted_by,
)
from holdfast._restoring.live import HandOver, KeptExperts, packed_tensors
from holdfast._restoring.other_world import (
    OtherWorld,
    SnapshotOffer,
    WorldPlan,
    open_world,
    plan_world,
)
from holdfast._restoring.passing import Span, pass_on
from holdfast._restoring.reading import ReadSnapshot, read_snapshot
from holdfast._restoring.repeating import OptimizerReplay
from holdfast._restoring.replay import Replay, frame_source, frames_from
from holdfast._restoring.scatter import scatter
from holdfast._settings import Settings
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.casts import Pair, fill
from holdfast._state.collect import Stateful, put_back, put_back_groups
from holdfast._state.extras import decode_extras
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    InvalidJobError,
    LayoutMismatchError,
    NoRecoveryLineError,
    UnreachableError,
    by_code,
)
from holdfast_core.job.snapshots import Repeats
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.protection.standing import StandingVerdict
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES, Entry, Layout
from holdfast_core.states import RestorePhase, RestoreProgress, RestoreSource
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")
_RETRY_S = 0.2
_T = TypeVar("_T")


class RestoreStatement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells the others in an agreement."""

    code: str = ""
    """Code of this rank's error; empty if it has none."""
    message: str = ""
    generation: str = ""
    """Generation to restore, as `epoch.step`; empty for a fresh start."""
    offers: tuple[Offer, ...] = ()
    versions: dict[str, str] = {}
    """Expert in this rank's snapshot → the generation in which it was captured."""
    lost: dict[str, int] = {}
    """Expert → number of this rank's tokens whose updates the restored expert lacks."""
    assigned: dict[str, int] = {}
    """Layer → tokens of this rank, times the experts that each was sent to."""
    replenishes: bool = False
    """Whether this rank has lost tokens to make up for."""
    captured_by: int = 0
    """See `RestoreDecision.captured_by`."""
    snapshots: tuple[SnapshotOffer, ...] = ()
    """Snapshots of another world that this rank reads, and may pass on to others."""
    needs: tuple[Span, ...] = ()
    """Spans that this rank needs of all of these snapshots."""
    differs: str = ""
    """Why this rank's state is not that of the line, although it keeps it; see `Restore.attend`."""
    policy: bytes = b""
    """See `WorldPlan.policy`."""
    tokens: tuple[RankTokens, ...] = ()
    """See `WorldPlan.tokens`."""


_STATEMENT = msgspec.json.Decoder(RestoreStatement)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Result of a restore."""

    epoch: int
    step: int | None
    source: RestoreSource
    generation: Generation | None = None
    layout: Layout | None = None
    experts: PartialState = START
    """State with which the policy continues."""
    replay: Replay | None = None
    """Steps of a sparse window that training has yet to repeat, from `step` on; None for none."""
    replenishing: bool = False
    """Whether any rank has lost tokens to make up for. Equal on all ranks."""
    differs: str = ""
    """Why some rank that kept its state does not fit the line; equal on all ranks."""


@dataclass(slots=True)
class _Found:
    """The snapshot that this rank restores."""

    snapshot: ReadSnapshot
    entries: tuple[Entry, ...]
    extras: dict[str, Any]
    source: RestoreSource

    def close_later(self) -> None:
        self.snapshot.arena.close_later()


@dataclass(frozen=True, slots=True)
class _Copied:
    """A restore whose own bytes are in this rank's tensors."""

    sources: Mapping[str, TensorSource]
    """Live tensors by name, with the frames of a window."""
    casts: tuple[Pair, ...]
    """Weights that are yet to be rounded from their masters."""
    replay: Replay | None = None
    """Steps that training repeats with the frames in `sources`; None for none."""
    repeats: OptimizerReplay | None = None
    """Optimizer steps to repeat with the gradients in `sources`; None for none."""


@dataclass(frozen=True, kw_only=True)
class Restore:
    """One rank's part in restores. Every method that is marked Collective is called by all ranks,
    in the same order."""

    client: DaemonClient
    live: LiveState
    stateful: Mapping[str, Stateful]
    topology: Topology
    rank: int
    exchange: Exchange
    engine: CopyEngine
    settings: Settings
    policy: CaptureStrategy

    def run(self, no_replay: str = "", alone: ReplayPlan | None = None) -> Restored:
        """Run the restore; see `Session.restore`. Collective.

        Args:
            no_replay: why lost ranks do not recover alone, for the log and the status.
            alone: its ranks restore, and all others `attend`; None: all ranks restore.
        """
        self.live.begun.begin()
        self.engine.begin_test(PIECE_BYTES)  # The daemon has to be asked first.
        with without_collector():
            return self._run(no_replay, alone)

    def go_on(self, verdict: StandingVerdict, problem: str, kept: PartialState) -> Restored | None:
        """Bring this rank to the step of `verdict` from the live state of the ranks, without a
        restore; see `ProtectedSession.go_on`. Collective. Return None if any rank cannot.

        Args:
            kept: state of the policy in this rank's previous session.
        """
        _log.info("nothing is restored: %s", verdict.reason)
        epoch = self._hello().epoch
        experts = self._hand_over(epoch, verdict, problem, kept)
        if experts is None:
            return None
        return replace(
            _live_after(epoch, verdict.step),
            experts=experts.state,
            replenishing=self.policy.leaves_out and experts.replenishing,
        )

    def hand_over(
        self, verdict: StandingVerdict, kept: PartialState, apart: Collection[int]
    ) -> bool:
        """Give the new ranks of `verdict` their state while the ranks `apart` restore the recovery
        line. Collective. Return whether they have it; equal on all ranks.

        Args:
            kept: state of the policy in this rank's previous session.
        """
        return self._hand_over(self._hello().epoch, verdict, "", kept, apart) is not None

    def _hand_over(
        self,
        epoch: int,
        verdict: StandingVerdict,
        problem: str,
        kept: PartialState,
        apart: Collection[int] = (),
    ) -> KeptExperts | None:
        self.live.begun.begin()
        handing = HandOver(
            live=self.live,
            stateful=self.stateful,
            rank=self.rank,
            exchange=self.exchange,
            verdict=verdict,
            experts=kept,
            apart=apart,
        )
        with without_collector():
            return handing.run(epoch, problem)

    def live_after(self, step: int) -> Restored:
        """Describe a recovery that restored nothing, because all ranks have the state after
        `step`."""
        return _live_after(self._hello().epoch, step)

    def line(self) -> tuple[int, int, bool]:
        """Ask the daemon for the recovery line, from which lost ranks are to be restored alone.

        Returns:
            The step to which a restore brings training back; the step after which the state is
            whole (the first and the last step of a sparse window that repeats training, otherwise
            the same step twice); and whether the line is a sparse window.

        Raises:
            HoldfastError: ranks cannot be restored from the line alone.
        """
        found = self._find(self._hello().epoch)
        if found is None:
            raise NoRecoveryLineError("nothing was protected yet")
        found.close_later()
        if isinstance(found, OtherWorld):
            raise LayoutMismatchError(
                f"the line {found.generation} is of another world, of {found.ranks} ranks"
            )
        manifest, window = found.snapshot.manifest, found.snapshot.window
        step = manifest.generation.step
        if window is None and any(
            one.generation != manifest.generation for one in manifest.experts
        ):
            raise LayoutMismatchError(
                f"the line {manifest.generation} holds experts of older steps"
            )
        return (step if window is None else window.brings_back), step, window is not None

    def attend(self, plan: ReplayPlan) -> str:
        """Take part in the agreements of the ranks of `plan`, which restore alone, and give them
        the bytes that this rank captured for them. This rank's state does not change. Collective.

        Returns:
            Why the state of some rank is not that of the line; empty if all are, or if the ranks
            that restore repeat steps until they have reached it. Equal on all ranks.

        Raises:
            HoldfastError: a rank could not restore.
        """
        # First agreement: all ranks have found the same generation.
        found, error = _attempt(lambda: self._find(self._hello().epoch))
        generation, offers = "", tuple[Offer, ...]()
        if isinstance(found, _Found):
            generation = str(found.snapshot.manifest.generation)
            offers = self._offers(found, plan)
        try:
            own = RestoreStatement(generation=generation)
            first = self._agree(error, msgspec.structs.replace(own, offers=offers))
            # Compare while the others copy their bytes. They get this rank's bytes in any case: if
            # it differs, all ranks restore afterwards.
            sources, differs = packed_tensors(self.live), ""
            if plan.line == plan.target:
                assert isinstance(found, _Found), "line() has found it"
                differs = difference(
                    found.snapshot,
                    found.entries,
                    found.extras,
                    self.live,
                    self.stateful,
                    sources,
                    self.engine,
                )
        finally:
            if found is not None:
                found.close_later()
        # Second and third agreement: all ranks know whether any of them differs before one that
        # restores has all bytes.
        second = self._agree(None, msgspec.structs.replace(own, differs=differs))
        scatter(self.exchange, [one.offers for one in first], sources, self.rank)
        self._agree(None, own)
        return _first_difference(second)

    def _offers(self, found: _Found, alone: ReplayPlan | None) -> tuple[Offer, ...]:
        """List what this rank's snapshot has for other ranks that restore."""
        window = found.snapshot.window
        offers = own_offers(found.entries, self.live, self.topology, self.rank, window)
        return offers if alone is None else offers_within(offers, self.rank, alone.scope)

    def _run(self, no_replay: str, alone: ReplayPlan | None) -> Restored:
        # Find this rank's snapshot. Keep an error for the first agreement: a rank that raised here
        # would leave the others waiting.
        found: _Found | OtherWorld | None = None
        epoch = 0
        offers: tuple[Offer, ...] = ()
        error: HoldfastError | None = None
        try:
            hello = self._hello()
            epoch = hello.epoch
            found = self._find(epoch, no_replay)
            if isinstance(found, _Found) and self.exchange.together:
                offers = self._offers(found, alone)
        except HoldfastError as raised:
            error = raised
        # Restore together with the other ranks, from whichever world captured the line.
        try:
            if isinstance(found, OtherWorld):
                return self._from_world(epoch, found, error)
            return self._together(epoch, found, offers, error)
        finally:
            if found is not None:
                found.close_later()

    def _together(
        self,
        epoch: int,
        found: _Found | None,
        offers: tuple[Offer, ...],
        error: HoldfastError | None,
    ) -> Restored:
        """Restore what the present world captured. Collective.

        Args:
            found: this rank's snapshot; None for a fresh start.
            offers: ranges that this rank's snapshot has for other ranks.
            error: this rank's failure to find its snapshot, if it failed.
        """
        # First agreement: all ranks have found the same generation, and the same version of each
        # expert.
        generation = "" if found is None else str(found.snapshot.manifest.generation)
        state, versions = START, dict[str, str]()
        if found is not None:
            manifest = found.snapshot.manifest
            state = found.snapshot.experts.with_versions((*manifest.experts, *manifest.older))
            versions = state.own_versions(found.snapshot.layout, manifest.experts)
        own = RestoreStatement(generation=generation, offers=offers, versions=versions)
        statements = self._agree(error, own)
        # Raises on every rank or on none, because all ranks see the same statements.
        agreed = find_agreed_versions(one.versions for one in statements)
        if found is None:
            _log.info("epoch %d starts fresh", epoch)
            return Restored(epoch=epoch, step=None, source=RestoreSource.NONE)
        # Verify and copy this rank's own bytes, and count the tokens that its experts lose.
        all_offers = [one.offers for one in statements]
        chosen = found
        copied, error = _attempt(lambda: self._copy_own(chosen, all_offers))
        state, lost = state.return_experts(agreed)
        own = RestoreStatement(
            generation=generation,
            lost=lost,
            assigned={str(k): n for k, n in state.ledger.assignments.items()},
            replenishes=bool(state.replenishing.owed),
        )
        # Second agreement: every rank has its own bytes. Now ranks pass shared bytes on, and load
        # everything that is not a tensor.
        statements = self._agree(error, own)
        assert copied is not None
        scatter(self.exchange, all_offers, copied.sources, self.rank)
        _, error = _attempt(lambda: self._finish(chosen.extras, copied))
        # Third agreement: every rank has loaded all of it. Only now does this rank report success.
        self._agree(error, RestoreStatement(generation=generation))
        line = found.snapshot.manifest.generation
        losses, seen = [one.lost for one in statements], [one.assigned for one in statements]
        state = self.policy.state_after_restore(state, losses, seen, epoch=epoch, line=line)
        window = found.snapshot.window
        step = line.step if window is None else window.brings_back
        _log.info("epoch %d starts after step %d (%s)", epoch, step, found.source)
        return Restored(
            epoch=epoch,
            step=step,
            source=found.source,
            generation=line,
            layout=found.snapshot.layout,
            experts=state,
            replay=None if copied.replay is None or copied.replay.over else copied.replay,
            replenishing=self.policy.leaves_out and any(one.replenishes for one in statements),
            differs=_first_difference(statements),
        )

    def _from_world(self, epoch: int, world: OtherWorld, error: HoldfastError | None) -> Restored:
        """Restore what another world captured. Collective. This rank then has no snapshot of its
        own from which later saves could carry bytes over."""
        # First agreement: all ranks have opened and verified snapshots of the same generation.
        own = RestoreStatement(generation=str(world.generation), captured_by=world.ranks)
        offers, me = world.offers(), self.rank if self.exchange.together else 0
        held, other = _attempt(lambda: find_agreed_versions(world.versions))
        statements = self._agree(
            error or other,
            msgspec.structs.replace(own, snapshots=offers, versions=held or {}),
        )
        agreed = find_agreed_versions(one.versions for one in statements)
        # Plan which bytes this rank needs, and from which snapshots.
        all_offers = [one.snapshots for one in statements]

        def plan_it() -> WorldPlan:
            return plan_world(world, all_offers, self.live, self.topology, self.rank, agreed, me)

        plan, error = _attempt(plan_it)
        # Second agreement: every rank has a plan. Then the ranks pass the bytes on to each other.
        stated = own
        if plan is not None:
            stated = msgspec.structs.replace(
                own, needs=plan.spans(), policy=plan.policy, tokens=plan.tokens
            )
        statements = self._agree(error, stated)
        assert plan is not None
        wanted = [one.needs for one in statements]
        pass_on(self.exchange, wanted, plan.readers, world.placed_by_rank(), plan.filling(), me)
        # Third agreement: every rank has loaded all of it.
        _, error = _attempt(
            lambda: self._finish(plan.extras, _Copied(plan.sources, (), repeats=plan.repeats))
        )
        self._agree(error, own)
        # Take over the token counts of the old ranks whose places this rank has.
        counts = [tokens for statement in statements for tokens in statement.tokens]
        shared = PartialState.decode(statements[plan.readers[0]].policy)
        state = self.policy.state_after_restore(
            take_over(shared, (tokens for tokens in counts if tokens.rank in plan.takes_over)),
            [tokens.lost for tokens in counts],
            [tokens.assigned for tokens in counts],
            epoch=epoch,
            line=world.generation,
        )
        step = world.generation.step
        _log.info("epoch %d starts after step %d of %d ranks", epoch, step, world.ranks)
        return Restored(
            epoch=epoch,
            step=step,
            source=world.source,
            experts=state,
            replenishing=self.policy.leaves_out and any(tokens.owed for tokens in counts),
        )

    # --- what to restore --------------------------------------------------------------------------

    def _hello(self) -> Hello:
        """Wait until the daemon answers; return its answer.

        Raises:
            UnreachableError: it did not answer within `restore_timeout_s`.
            InvalidJobError: its training world has another number of ranks than the topology, or
                may come back with its ranks in other places, where windows cannot be repeated.
        """
        deadline = time.monotonic() + self.settings.restore_timeout_s
        while True:
            try:
                hello = self.client.hello()
                break
            except UnreachableError as error:
                if time.monotonic() >= deadline:
                    raise
                _log.info("waiting for the daemon: %s", error)
                time.sleep(_RETRY_S)
        if hello.world_size and hello.world_size != self.topology.world_size:
            raise InvalidJobError(
                f"the daemon's training world has {hello.world_size} ranks, but {self.topology} "
                f"describes {self.topology.world_size}"
            )
        if hello.external and self.settings.window and self.settings.repeats is Repeats.TRAINING:
            raise InvalidJobError(
                "another controller makes the pods (spec.trainer.external), which may change "
                "places, and the training steps of a sparse window are repeated only by ranks "
                "that are where they were: give holdfast.Settings a policy with "
                "repeats=Repeats.OPTIMIZER, or another policy"
            )
        return hello

    def _find(self, epoch: int, no_replay: str = "") -> _Found | OtherWorld | None:
        """Return this rank's snapshot of the recovery line, or the snapshots of another world that
        this rank reads; None for a fresh start."""
        decision = self._decide(epoch, no_replay)
        _log.info("recovery line: %s", decision.line.reason)
        timeout_s = self.settings.rpc_timeout_s
        if decision.line.generation is None:
            return None
        # Read several snapshots if another world captured the line, or if experts have seats: they
        # are found by their numbers, whichever rank captured them.
        if decision.captured_by or any(source.seats is not None for source in self.live.sources()):
            ranks = decision.captured_by or self.topology.world_size
            return open_world(decision, self.client, self.engine, timeout_s, ranks)
        # Otherwise read this rank's own snapshot, once it proves to be the one that was decided.
        (held,) = decision.snapshots
        manifest, layout = held.manifest, held.layout
        if manifest.generation != decision.line.generation or manifest.rank != self.rank:
            raise CorruptError(
                f"the daemon offers generation {manifest.generation} of rank {manifest.rank} to "
                f"rank {self.rank} for the line {decision.line.generation}"
            )
        if layout.topology != str(self.topology):
            raise LayoutMismatchError(
                f"the snapshot was taken with topology {layout.topology}, this session has "
                f"{self.topology}; restore with the same parallelism, or load a stored copy with "
                f"torch.distributed.checkpoint"
            )
        snapshot = read_snapshot(self.client, held, timeout_s)
        try:
            entries = entries_of(layout, self.live, snapshot.window)
            return _Found(snapshot, entries, decode_extras(snapshot.extras), decision.source)
        except HoldfastError:
            snapshot.arena.close()
            raise

    def _decide(self, epoch: int, no_replay: str = "") -> RestoreDecision:
        """Wait until the daemon decides what to restore; return its decision.

        While the daemon reports that it waits for storage there is no deadline: a process that gave
        up would only use up the job's restarts.
        """
        phase = RestorePhase.UNKNOWN

        def follow(progress: RestoreProgress) -> None:
            nonlocal phase
            phase = progress.phase
            _log.info("restore: %s", progress)

        deadline = time.monotonic() + self.settings.restore_timeout_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.1)
                request = RestoreRequest(epoch=epoch, no_replay=no_replay)
                return self.client.restore(request, left_s, follow)
            except UnreachableError as error:  # the daemon restarts
                if phase.waits_for_storage:
                    deadline = time.monotonic() + self.settings.restore_timeout_s
                    phase = RestorePhase.UNKNOWN
                if time.monotonic() >= deadline:
                    raise
                _log.info("asking the daemon again where to start: %s", error)
                time.sleep(_RETRY_S)

    # --- bytes ------------------------------------------------------------------------------------

    def _copy_own(self, found: _Found, all_offers: Sequence[tuple[Offer, ...]]) -> _Copied:
        """Allocate what is missing, verify this rank's payload and copy it into the tensors."""
        # Make sure that the snapshots of all ranks together fill every tensor.
        snapshot, window = found.snapshot, found.snapshot.window
        wanted = wanted_by(self.rank, found.entries, all_offers)
        check_cover(wanted, self.live)
        # Make room for the live tensors; optimizer states may not exist yet.
        put_back_groups(self.live, found.extras)
        of_frames = {name: live_name(name, window) for name in wanted}
        of_live = {name: item for name, item in wanted.items() if not of_frames[name][0]}
        sources = make_room(self.live, of_live, found.extras)
        # Make room for the frames of a window: compute weights or gradients of its steps.
        casts = cast_pairs(of_live, sources)
        frames: list[tuple[int, str, Wanted, TensorSource | None]] = []
        for frame, (slot, name) in of_frames.items():
            if slot:
                item, beside = wanted[frame], sources[name]
                if len(item.casts) < len(item.ranges):
                    sources[frame] = frame_source(item, beside)
                frames.append((slot, name, item, sources.get(frame)))
        replay = repeats = None
        if window is not None:
            loads = frames_from(window, frames)
            if window.repeats is Repeats.OPTIMIZER:
                gradients = [load.weights for load in loads]
                repeats = OptimizerReplay(live=self.live, record=window, gradients=gradients)
            else:
                replay = Replay(live=self.live, record=window, frames=loads, step=window.first)
        # Verify each piece and copy it, in one pass over the payload.
        ranges = [
            (entry.offset, entry.start, sources[entry.tensor].part(entry.start, entry.nbytes))
            for entry in found.entries
            if not entry.cast_of
        ]
        plan = plan_copy(ranges, (), snapshot.manifest.piece_bytes)
        snapshot.restore(self.engine, plan)
        return _Copied(sources, casts, replay, repeats)

    def _finish(self, extras: Mapping[str, Any], copied: _Copied) -> None:
        """Complete the restored state, once the shared bytes are here as well: round weights from
        their masters, fill strided tensors, repeat optimizer steps, load the extras."""
        for pair in copied.casts:
            fill(pair)
        for source in copied.sources.values():
            if source.staging is not None:
                fill_strided(source.tensor, source.staging)
        if copied.repeats is not None:
            copied.repeats.run()
        put_back(self.live, self.stateful, extras)

    # --- agreement --------------------------------------------------------------------------------

    def _agree(self, error: HoldfastError | None, own: RestoreStatement) -> list[RestoreStatement]:
        """Exchange statements with all ranks and return them. Collective.

        Raises:
            HoldfastError: on every rank: some rank failed, or daemons named different lines.
        """
        if error is not None:
            own = msgspec.structs.replace(own, code=error.code, message=str(error))
        texts = self.exchange.gather(msgspec.json.encode(own))
        statements = [_STATEMENT.decode(text) for text in texts]
        failed = {r: one for r, one in enumerate(statements) if one.code}
        # Raise the first rank's error everywhere; alone, this rank raises its own.
        if failed:
            if len(statements) == 1 and error is not None:
                raise error
            first = failed[min(failed)]
            raise by_code(
                first.code,
                f"restore failed on ranks {sorted(failed)} of {len(statements)}: rank "
                f"{min(failed)}: {first.message}",
            ) from error
        # Refuse lines that differ: ranks would train on from different states.
        if len({one.generation for one in statements}) > 1:
            lines = {r: one.generation or "a fresh start" for r, one in enumerate(statements)}
            raise NoRecoveryLineError(f"ranks received different recovery lines: {lines}")
        if len({one.captured_by for one in statements}) > 1:
            worlds = {r: one.captured_by for r, one in enumerate(statements)}
            raise NoRecoveryLineError(
                f"daemons differ about the number of ranks that captured the line: {worlds}; 0 is "
                f"the present world"
            )
        return statements


def _first_difference(statements: Sequence[RestoreStatement]) -> str:
    """Why the first rank that differs from the line does; empty if none does."""
    found = ((rank, one.differs) for rank, one in enumerate(statements) if one.differs)
    return next((f"rank {rank}: {why}" for rank, why in found), "")


def _live_after(epoch: int, step: int) -> Restored:
    """Describe a recovery that restored nothing: all ranks have the state after `step`."""
    _log.info("epoch %d goes on live after step %d", epoch, step)
    return Restored(epoch=epoch, step=step, source=RestoreSource.LIVE)


def find_agreed_versions(of_snapshots: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Find the version of each expert that the ranks restore.

    Args:
        of_snapshots: the versions of the experts in each snapshot that a rank restores from.

    Raises:
        CorruptError: ranks hold parts of one expert in different versions.
    """
    agreed: dict[str, str] = {}
    for versions in of_snapshots:
        for unit, version in versions.items():
            if agreed.setdefault(unit, version) != version:
                raise CorruptError(
                    f"ranks hold parts of {unit} of different generations, {agreed[unit]} and "
                    f"{version}; restore another generation"
                )
    return agreed


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, HoldfastError | None]:
    """Return the result of `work`, or its error: this rank can then report the error to the other
    ranks before it raises."""
    try:
        return work(), None
    except HoldfastError as error:
        return None, error
    except Exception as error:  # raised by the user's load_state_dict, or by torch
        failure = LayoutMismatchError(
            f"the state cannot be loaded: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return None, failure
