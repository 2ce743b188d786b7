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

A comparison in which replicas differ also concludes which rank is wrong, if that is known
(`holdfast_core.corruption`): at once where a majority of the replicas holds the same bytes, and
otherwise once the steps since the last generation are repeated in another epoch. For that the
report of each rank contains its digests of the newest compared steps, and its daemon hands them to
the next session.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import xxhash

from holdfast._agree.exchange import Exchange
from holdfast._agree.replicas import UnitDigests, differing, differing_copies, replicas_of
from holdfast._agree.rounds import Round, Rounds
from holdfast_core.corruption import (
    HISTORY_MAX,
    RANKS_MAX,
    Compared,
    Divergence,
    Proof,
    changed,
    outvoted,
)
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
    earlier: Divergence | None = None
    """Divergence of an earlier epoch, up to whose step this epoch repeats steps."""
    before: Compared | None = None
    """Digests of this rank after the same step in that epoch."""

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
    divergence: Divergence | None = None
    """What these differences show, or what the repeated steps do; None if neither is there."""
    repeats: bool = False
    """Whether further steps are repeated of which earlier digests are known."""


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
        self.divergence: Divergence | None = None
        """What the comparisons have shown; None while replicas are equal, unless repeated steps
        have shown who was wrong in an earlier epoch. Any thread may read it."""
        self._history: deque[Compared] = deque(maxlen=HISTORY_MAX)
        """Own digests of the newest compared steps."""
        self._earlier: Divergence | None = None
        """Own report of an earlier epoch, while its steps are repeated."""

    @property
    def compares_all(self) -> bool:
        """Whether every save is compared, also the first one. Any thread may ask."""
        return self._every == 1

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

    def expect_repeated(self, earlier: Divergence | None, step: int) -> None:
        """Take this rank's own report of a divergence in an earlier epoch, from the daemon. It is
        of no use if that epoch did not end with a return to a generation from before it.

        Args:
            step: step of the save for which the session was opened.
        """
        if earlier is None or step > earlier.step:
            return
        if not (earlier.compared_all and self.compares_all):
            return
        with self._rounds.change():
            if not self._history:
                self._earlier = earlier

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
        step = self._steps[number]
        own = self._statement(step, digests)
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
        # Steps that are repeated may show who was wrong when they were first executed.
        earlier = next((each.earlier for each in statements if each.earlier is not None), None)
        repeated = frozenset[int]()
        if earlier is not None and not missing and step <= earlier.step:
            repeated = frozenset().union(*(_repeated(statements, *each) for each in groups))
        repeats = earlier is not None and (step < earlier.step or bool(missing))
        if equal and not differing_copies(dict(enumerate(one.seated for one in statements))):
            if earlier is None or repeats:
                return _Verdict(number, missing, repeats=repeats)
            return _Verdict(number, divergence=_judged(earlier, repeated))
        # They differ: exchange the digests of all units to find which ones.
        texts = self._exchange.gather(msgspec.json.encode(digests or UnitDigests()))
        units = {rank: _DIGESTS.decode(text) for rank, text in enumerate(texts)}
        held = {rank: units[rank] for rank in present}
        wrong = differing(held, self._topology)
        if not wrong:
            return _Verdict(number, missing, repeats=repeats)
        stated = [_stated(held, unit, ranks[0], self._topology) for unit, ranks in wrong]
        divergence = Divergence(
            step=step,
            equal_step=self._equal_step,
            unit=str(wrong[0][0]),
            units=len(wrong),
            ranks=tuple(sorted(stated[0])[:RANKS_MAX]),
            compared_all=self.compares_all,
        )
        if outvoting := outvoted(stated):
            divergence = _with_wrong(divergence, outvoting, Proof.MAJORITY)
        elif earlier is not None and step <= earlier.step:
            divergence = _judged(divergence, repeated)
        found = tuple((unit, tuple(ranks)) for unit, ranks in wrong)
        return _Verdict(number, missing, found, divergence)

    def _statement(self, step: int, digests: UnitDigests | None) -> _Statement:
        """This rank's statement on the save of `step`, which it remembers."""
        own, earlier = _Statement.of(digests), self._earlier
        if own.dense is not None and own.experts is not None:
            self._history.append(Compared(step=step, dense=own.dense, experts=own.experts))
        if earlier is None:
            return own
        before = earlier.compared_at(step)
        return msgspec.structs.replace(own, earlier=earlier.essence, before=before)

    def _take(self, verdict: _Verdict) -> None:
        """Set or clear the problem by the verdict of a comparison."""
        step, divergence = self._steps[verdict.number], verdict.divergence
        if divergence is None:
            if not verdict.missing and self.problem is not None:
                self.divergence = None  # they are equal again
        elif not verdict.differing or self.problem is None or self._is_better(divergence):
            # Of replicas that go on to differ, the first comparison counts: gradients spread what
            # is wrong. Only one that names somebody counts more than one that could not.
            self.divergence = msgspec.structs.replace(divergence, history=tuple(self._history))
        if not verdict.repeats:
            self._earlier = None
        if verdict.differing:
            self.problem = self._divergence_error(verdict, step)
        elif not verdict.missing:
            if self.problem is not None:
                _log.warning("step %d: replicas hold the same bytes again", step)
            self.problem, self._equal_step = None, step

    def _is_better(self, found: Divergence) -> bool:
        known = self.divergence
        return bool(found.wrong) and (known is None or not known.wrong)

    def _divergence_error(self, verdict: _Verdict, step: int) -> ReplicasDivergedError:
        unit, ranks = verdict.differing[0]
        more = len(verdict.differing) - 1
        others = f" ({more} more units differ)" if more else ""
        equal = "no comparison of this session has found them equal"
        if self._equal_step is not None:
            equal = f"they were equal at step {self._equal_step}"
        elif not self.compares_all:
            equal = "they were equal at the first save"
        if not self.compares_all:
            equal += ", and snapshots protected since then may be mixtures of them"
        divergence = verdict.divergence
        assert divergence is not None
        who = "as many hold these bytes as others, so nobody knows which are wrong"
        if divergence.wrong:
            who = f"ranks {list(divergence.wrong)} are wrong ({divergence.proof})"
        return ReplicasDivergedError(
            f"unit {unit}: ranks {list(ranks)} are replicas and no longer equal: at step {step} "
            f"rank {ranks[0]} holds different bytes from ranks {list(ranks[1:])}{others}; "
            f"{equal}; {who}. No snapshot is taken until a later comparison finds them equal. "
            f"Look for what the ranks do differently: a gradient that is not reduced, a kernel, a "
            f"device"
        )

    def _give_up(self, error: Exception) -> None:
        """End the comparisons in this world, because an exchange failed. Snapshots continue, since
        a mixture is less likely than a loss."""
        _log.warning("replicas are no longer compared: %s", error)
        self._steps.clear()
        self._digests.clear()


def _stated(
    held: Mapping[int, UnitDigests], unit: UnitKey, rank: int, topology: Topology
) -> dict[int, int | None]:
    """Rank → its digest of `unit`, of those that hold replicas of the one that `rank` holds; None
    where it has none."""
    name = str(unit)
    if name in held[rank].seated:
        return {r: each.seated[name] for r, each in held.items() if name in each.seated}
    replicas = replicas_of(topology, rank, unit)
    return {r: held[r].shared.get(name) for r in replicas if r in held}


def _repeated(
    statements: Sequence[_Statement], group: tuple[int, ...], kind: str
) -> frozenset[int]:
    """Ranks of a group of replicas whose bytes were wrong before this step was repeated, or are
    now."""
    first = {r: getattr(one, kind) for r in group if (one := statements[r].before) is not None}
    again = {r: getattr(statements[r], kind) for r in group}
    if len({*first.values(), *again.values()}) == 1:
        return frozenset()
    return changed(first, again)


def _judged(divergence: Divergence, wrong: frozenset[int]) -> Divergence:
    """`divergence` with what repeated steps have shown of it."""
    return _with_wrong(divergence, wrong, Proof.REPEATED if wrong else Proof.UNDECIDED)


def _with_wrong(divergence: Divergence, wrong: frozenset[int], proof: Proof) -> Divergence:
    named = tuple(sorted(wrong)[:RANKS_MAX])
    return msgspec.structs.replace(divergence, wrong=named, proof=proof)
