"""Silent corruption: which of several replicas has the wrong bytes.

Replicas hold the same bytes after each step. A device that computes wrongly, or memory in which a
bit flips, makes one of them differ, and nothing else fails. The ranks find that out when they
compare digests of what they share (`holdfast._agree.replica_check`), but a difference alone does
not show who is wrong:

- Of three or more replicas, the ones that a strict majority contradicts are wrong.
- Of two, both repeat the steps since the last time they were equal. A computation that is repeated
  from the same state gives the same bytes, so the one whose earlier bytes do not come again was
  wrong. If nobody's bytes come again, nothing is known: training is not deterministic, or the wrong
  values had already reached all replicas before they were compared. Nor is it if everybody's do:
  the script computes different things on these ranks, or a device is wrong in the same way each
  time.

Digests are equal or they are not: there is no tolerance. They come from trainers, and are bounded
where they are received. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.units import UnitKey

HISTORY_MAX = 256
"""Compared steps of which a rank remembers its digests. Steps before them cannot be judged when
they are repeated."""
RANKS_MAX = 64
"""Ranks that a divergence names. Where more hold a unit, the first ones are named."""
UNIT_CHARACTERS_MAX = 256
STEP_MAX = 2**63 - 1
RANK_MAX = 2**32 - 1
DIGEST_MAX = 2**64 - 1


class Proof(StrEnum):
    """How the wrong ranks of a divergence are known."""

    NONE = "None"
    """They are not: as many replicas hold these bytes as hold others, and nothing was repeated."""
    MAJORITY = "Majority"
    """A strict majority of the replicas hold the same bytes, and others than they do."""
    REPEATED = "Repeated"
    """They did not get the same bytes when the steps were repeated, and others did."""
    UNDECIDED = "Undecided"
    """They are not, although the steps were repeated."""
    REEXECUTED = "Reexecuted"
    """They computed other gradients in one of three executions of one step, and had not received
    the difference from other ranks. Nobody is wrong if that is not certain: `ranks` are then those
    in which the difference began. Training went on with what two executions agreed on."""
    ELSEWHERE = "RepeatedElsewhere"
    """They got other bytes for a sample of their own work, or of another rank's, than two other
    ranks of the same kind, and the same each time. Nobody is wrong if there was no third rank to
    decide: `ranks` are then the two in question. How long this has been so is not known."""
    CHANGED = "Changed"
    """Their parameters or optimizer states changed before the optimizer stepped, which they did not
    in earlier steps."""
    UNREPEATABLE = "Unrepeatable"
    """Nobody is wrong: a step does not give the same gradients again, or the script changes
    parameters before the optimizer. No further step is executed again."""

    @property
    def names(self) -> bool:
        """Whether it shows which ranks are wrong."""
        return self in (Proof.MAJORITY, Proof.REPEATED, Proof.CHANGED) or self.may_name

    @property
    def may_name(self) -> bool:
        """Whether it shows which ranks are wrong, or else in which ones to look."""
        return self in (Proof.REEXECUTED, Proof.ELSEWHERE)

    @property
    def is_of_executions(self) -> bool:
        """Whether it comes from a checked step, without replicas."""
        return self in (Proof.CHANGED, Proof.UNREPEATABLE) or self.may_name


class Compared(Struct, frozen=True, array_like=True, gc=False):
    """One rank's digests of what it shares with others after one step."""

    step: int
    dense: int
    experts: int


class Divergence(Struct, frozen=True, kw_only=True, gc=False):
    """A comparison in which replicas differed. All ranks conclude the same but the `history`."""

    step: int
    """Step after which they differed."""
    equal_step: int | None = None
    """Newest step before that after which they were equal, or whose check found nothing; None if
    there is none in the session."""
    unit: str
    """First unit whose replicas differed."""
    units: int = 1
    """Number of such units."""
    ranks: tuple[int, ...]
    """World ranks that hold the unit, the first `RANKS_MAX` of them."""
    wrong: tuple[int, ...] = ()
    """World ranks that hold wrong bytes of this unit or another one, the first `RANKS_MAX`."""
    proof: Proof = Proof.NONE
    compared_all: bool = False
    """Whether every save is compared before its commit. If so, each generation is from before the
    divergence, and its steps can be repeated from there."""
    history: tuple[Compared, ...] = ()
    """Digests of one rank after the newest compared steps, the last one that of `step`."""

    @property
    def essence(self) -> Divergence:
        """What all ranks conclude."""
        return replace(self, history=())

    def compared_at(self, step: int) -> Compared | None:
        """The rank's digests after `step`; None if it does not remember any."""
        return next((each for each in self.history if each.step == step), None)


def bounded_divergence(found: Divergence) -> Divergence | None:
    """`found` if it can be what a comparison showed, else None."""
    try:
        UnitKey.parse(found.unit[:UNIT_CHARACTERS_MAX])
    except (HoldfastError, ValueError):
        return None
    steps = [found.step, *(each.step for each in found.history)]
    digests = [digest for each in found.history for digest in (each.dense, each.experts)]
    sane = (
        len(found.unit) <= UNIT_CHARACTERS_MAX
        and all(0 <= step <= STEP_MAX for step in steps)
        and (found.equal_step is None or 0 <= found.equal_step < found.step)
        and 1 <= found.units <= RANK_MAX
        and (1 if found.proof.is_of_executions else 2) <= len(found.ranks) <= RANKS_MAX
        and len(found.wrong) <= RANKS_MAX
        and (found.proof.names == bool(found.wrong) or found.proof.may_name)
        and all(0 <= rank <= RANK_MAX for rank in (*found.ranks, *found.wrong))
        and all(0 <= digest <= DIGEST_MAX for digest in digests)
        and len(found.history) <= HISTORY_MAX
    )
    return found if sane else None


def contradicted(stated: Mapping[int, int | None]) -> frozenset[int] | None:
    """The replicas of a unit that a strict majority contradicts; None without such a majority.

    Args:
        stated: rank → digest of the unit; None for a rank that does not have it.
    """
    digest, count = Counter(stated.values()).most_common(1)[0]
    if 2 * count <= len(stated):
        return None
    return frozenset(rank for rank, each in stated.items() if each != digest)


def outvoted(units: Sequence[Mapping[int, int | None]]) -> frozenset[int]:
    """The ranks that majorities contradict, if that explains all differences; else none.

    Args:
        units: for each unit that differs, rank → digest of it.
    """
    minorities = [contradicted(stated) for stated in units]
    wrong = frozenset[int]().union(*(each for each in minorities if each is not None))
    for stated in units:
        if len({digest for rank, digest in stated.items() if rank not in wrong}) != 1:
            return frozenset()
    return wrong


def changed(first: Mapping[int, int], again: Mapping[int, int]) -> frozenset[int]:
    """The replicas that were wrong once, given that all of them repeated the same steps from the
    same state; none if that does not show it.

    Args:
        first: rank → its digest after the step when it was first executed.
        again: the same when it was repeated.
    """
    if first.keys() != again.keys():
        return frozenset()
    right = {digest for rank, digest in first.items() if again[rank] == digest}
    wrong = frozenset(rank for rank, digest in first.items() if again[rank] != digest)
    return wrong if len(right) == 1 else frozenset()
