"""A thread that compares replicas again in every n-th save.

Replicas share the capture of their common state. So if they have diverged, their snapshot is a
mixture that no rank ever had. The first save compares them (`_agree.replicas`), and every n-th save
compares them again with the same digests: all ranks exchange digests before such a save is
committed. If digests differ, no rank commits, so no daemon ever has a complete generation. Until a
later comparison has found the replicas equal, no rank commits anything. Saves between the last
comparison that found replicas equal and the first that did not were not checked, and may be
mixtures.

A save is compared only if every rank could hash its tensors. Otherwise its generation cannot become
complete, and the next save is compared instead. All ranks reach this conclusion from the same data.

Ranks exchange digests in the order in which the training loop calls its saves, on a process group
that nothing else uses. Neither training nor the copies wait for the exchange. They hand over their
digests, or the fact that they have none, and the saver waits for the verdict once its bytes are
staged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import msgspec
import xxhash

from holdfast._agree.exchange import Exchange
from holdfast._agree.replicas import UnitDigests, differing, differing_copies
from holdfast._agree.rounds import Round, Rounds
from holdfast_core.errors import HoldfastError, ReplicasDivergedError, SnapshotSkippedError
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")


class _Statement(msgspec.Struct, frozen=True):
    """The statement of a rank on a save; `dense` and `experts` are None if it did not take it."""

    dense: int | None = None
    """Digest over the digests of all shared units that are not experts."""
    experts: int | None = None
    """Digest over the digests of all shared experts. The digests of single units are sent only if
    these differ."""
    seated: dict[str, int] = {}
    """Digests of the experts in this rank's seats. Other ranks may have other experts."""

    @classmethod
    def of(cls, digests: UnitDigests | None) -> _Statement:
        if digests is None:
            return cls()
        dense, experts = xxhash.xxh3_64(), xxhash.xxh3_64()
        for name, digest in sorted(digests.shared.items()):
            expert = UnitKey.parse(name).kind is UnitKind.EXPERT
            (experts if expert else dense).update(f"{name} {digest}\n".encode())
        return cls(dense.intdigest(), experts.intdigest(), digests.seated)


_STATEMENT = msgspec.json.Decoder(_Statement)
_DIGESTS = msgspec.json.Decoder(UnitDigests)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The conclusion of all ranks on a save."""

    number: int
    missing: tuple[int, ...] = ()
    """Ranks that did not take the save."""
    differing: tuple[tuple[UnitKey, tuple[int, ...]], ...] = ()


class ReplicaCheck:
    """One rank's part in the comparisons. The thread runs from the first `save` to `close`.

    Args:
        exchange: exchange between all ranks that is used for nothing else.
        every: number of saves from one comparison to the next; 0 for no comparisons.
    """

    def __init__(self, exchange: Exchange, topology: Topology, every: int) -> None:
        self._exchange = exchange
        self._topology = topology
        self._every = every if exchange.together else 0
        self.problem: HoldfastError | None = None
        """Why nothing is committed; None if the newest comparison found replicas equal."""
        self._rounds = Rounds("holdfast-comparing", self._next, self._give_up)
        self._steps: dict[int, int] = {}
        """Number → step of each called save that may still be compared."""
        self._digests: dict[int, UnitDigests | None] = {}
        self._due = 0
        """Number of the save to compare next."""
        self._awaited = -1
        """Number of the newest compared save, whose verdict the saver awaits."""
        self._verdict: _Verdict | None = None
        """The verdict on that save; None until it is reached."""
        self._equal_step: int | None = None
        """Newest step at which replicas were found equal."""

    # --- called by the training thread ------------------------------------------------------------

    def on_save_called(self, number: int, step: int) -> None:
        """Note that save `number`, of `step`, was called, whether or not it was skipped."""
        if not self._every:
            return
        with self._rounds.change():
            if not self._rounds.has_started:
                self._due = number + self._every - 1
                self._rounds.start()
            for old in [n for n in self._steps if n < min(self._due, number)]:
                del self._steps[old]
                self._digests.pop(old, None)
            if not self._rounds.failed:
                self._steps[number] = step

    def on_save_failed(self, step: int) -> None:
        """Note that the save of `step` failed: if this rank has not handed over its digests for
        that step, it never will. Any thread may call it."""
        with self._rounds.change():
            for number, called in self._steps.items():
                if called == step:
                    self._digests.setdefault(number, None)

    # --- called by the saver ----------------------------------------------------------------------

    def due(self, number: int, wait_s: float) -> bool:
        """Whether save `number` is compared. If so, the saver calls `hand_over`, or
        `on_save_failed`.

        Args:
            wait_s: time to wait for the previous comparison, on whose result this depends.

        Raises:
            ReplicasDivergedError: replicas differed in the last comparison, and this save does not
                compare them again.
            SnapshotSkippedError: the previous comparison is not over.
        """
        if not self._every:
            return False
        with self._rounds.changed:
            if not self._rounds.wait_for(lambda: self._due >= number, wait_s):
                raise SnapshotSkippedError(
                    f"not all ranks handed over their digests of an earlier save within "
                    f"{wait_s:.1f} s; training went on"
                )
            compared = not self._rounds.failed and self._due == number
            if not compared and self.problem is not None:
                raise self.problem
            if compared:
                self._await(number)
            return compared

    def hand_over(self, number: int, digests: UnitDigests) -> None:
        """Hand over this rank's digests for save `number`, which must be due."""
        with self._rounds.change():
            self._await(number)
            self._digests.setdefault(number, digests)

    def _await(self, number: int) -> None:
        """From now on keep the verdict on save `number`, which may come before this rank's
        digests."""
        if self._awaited != number:
            self._awaited, self._verdict = number, None

    def settle(self, number: int) -> None:
        """Wait until replicas are known to be equal in save `number`; return at once if it was not
        due. The saver calls it before each commit.

        Raises:
            ReplicasDivergedError: replicas differ.
            SnapshotSkippedError: some rank will not commit the save.
        """
        with self._rounds.changed:
            if self._awaited != number:
                return
            self._rounds.wait_for(lambda: self._verdict is not None)
            verdict = self._verdict
            if self.problem is not None:
                raise self.problem
            if verdict is None:
                raise SnapshotSkippedError(
                    "not all ranks handed over their digests, so this save is neither compared nor "
                    "complete"
                )
            if verdict.missing:
                raise SnapshotSkippedError(
                    f"ranks {list(verdict.missing)} did not take this save, so it is "
                    f"neither compared nor complete; the next one will be"
                )

    def close(self, timeout_s: float) -> None:
        """Take part in the comparisons of all saves that were called, within about `timeout_s`."""
        self._rounds.close(timeout_s)

    # --- the thread -------------------------------------------------------------------------------

    def _next(self) -> Round | None:
        """Return the next comparison, once this rank has handed over its digests for it, or never
        will."""
        due, called = self._due, self._steps
        settled = due in self._digests or self._rounds.closing or max(called, default=-1) > due
        if due not in called or not settled:
            return None
        return partial(self._compare, due, self._digests.get(due))

    def _compare(self, number: int, digests: UnitDigests | None) -> None:
        """Run one comparison, and record its verdict. Collective."""
        verdict = self._find_verdict(number, digests)
        with self._rounds.change():
            self._take(verdict)
            if verdict.number == self._awaited:
                self._verdict = verdict
            self._due += 1 if verdict.missing else self._every

    def _find_verdict(self, number: int, digests: UnitDigests | None) -> _Verdict:
        """Compare the statements of all ranks. Collective."""
        # Exchange one digest for all units of a kind, and see which ranks took the save.
        own = _Statement.of(digests)
        statements = [
            _STATEMENT.decode(text) for text in self._exchange.gather(msgspec.json.encode(own))
        ]
        missing = tuple(rank for rank, one in enumerate(statements) if one.dense is None)
        present = [rank for rank in range(len(statements)) if rank not in missing]
        # Compare them within each group of replicas.
        groups = {(self._topology.dense_replicas(rank), "dense") for rank in present}
        groups |= {(self._topology.expert_replicas(rank), "experts") for rank in present}
        equal = all(
            len({getattr(statements[rank], kind) for rank in group if rank in present}) == 1
            for group, kind in groups
        )
        if equal and not differing_copies(dict(enumerate(one.seated for one in statements))):
            return _Verdict(number, missing)
        # They differ: exchange the digests of all units to find which ones.
        texts = self._exchange.gather(msgspec.json.encode(digests or UnitDigests()))
        units = {rank: _DIGESTS.decode(text) for rank, text in enumerate(texts)}
        wrong = differing({rank: units[rank] for rank in present}, self._topology)
        return _Verdict(number, missing, tuple((unit, tuple(ranks)) for unit, ranks in wrong))

    def _take(self, verdict: _Verdict) -> None:
        """Set or clear the problem by the verdict of a comparison."""
        step = self._steps[verdict.number]
        if verdict.differing:
            self.problem = self._divergence_error(verdict, step)
        elif not verdict.missing:
            if self.problem is not None:
                _log.warning("step %d: replicas hold the same bytes again", step)
            self.problem, self._equal_step = None, step

    def _divergence_error(self, verdict: _Verdict, step: int) -> ReplicasDivergedError:
        unit, ranks = verdict.differing[0]
        more = len(verdict.differing) - 1
        others = f" ({more} more units differ)" if more else ""
        last_equal = "the first save" if self._equal_step is None else f"step {self._equal_step}"
        return ReplicasDivergedError(
            f"unit {unit}: ranks {list(ranks)} are replicas and no longer equal: at step {step} "
            f"rank {ranks[0]} holds different bytes from ranks {list(ranks[1:])}{others}; they "
            f"were equal at {last_equal}. No snapshot is taken until a later comparison finds them "
            f"equal; snapshots protected since {last_equal} may be mixtures of them. Look for what "
            f"the ranks do differently: a gradient that is not reduced, a kernel, a device"
        )

    def _give_up(self, error: Exception) -> None:
        """End the comparisons in this world, because an exchange failed. Snapshots continue, since
        a mixture is less likely than a loss."""
        _log.warning("replicas are no longer compared: %s", error)
        self._steps.clear()
        self._digests.clear()
