"""How many tokens each expert has processed, and how many of them its captured versions hold.

Selection and loss accounting share this history. For each expert it counts the tokens whose updates
are in the live weights, and keeps that count for each captured version; so the loss of a return to
a version is a difference (`L_i` of PEC eq. 4, TokensLost of MoEtion eq. 6).

The ledger is part of the training state: it is captured with the extras of a snapshot, so that a
recovery restores the ledger of the restored step. In the SDK, each rank has one for the tokens that
it routed itself; choices that all ranks must share use `experts.counts`. Values are frozen; each
change returns a new ledger.

It must not decide what is captured, and it does not count tokens that are executed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.experts.tables import layer_of
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind

_FORMAT = 1


class TokenHistory(Protocol):
    """The history that selection by tokens needs: the ledger, or counts that all ranks share."""

    def unsaved(self, unit: UnitKey) -> int:
        """Tokens since the expert's newest version: P[i][j] of MoEtion algorithm 1."""

    def age(self, unit: UnitKey) -> int:
        """Snapshots since the one that captured the expert: 0 right after it."""

    @property
    def uncaptured(self) -> frozenset[UnitKey]:
        """Experts without any version."""


@dataclass(frozen=True, slots=True)
class Version:
    """One captured version of an expert."""

    generation: Generation
    number: int
    """Number of the snapshot in the job's life, from 0."""
    tokens: int
    """The ledger's count for the expert when it was captured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLedger:
    """Tokens and versions of each expert."""

    snapshots: int
    """Number of snapshots planned so far, which is the number of the next one."""
    tokens: Mapping[UnitKey, int]
    """Tokens whose updates the live expert holds."""
    versions: Mapping[UnitKey, tuple[Version, ...]]
    """The captured versions of each expert, oldest first."""
    assignments: Mapping[int, int]
    """For each layer, tokens times their experts (N_tokens · TopK), dropped ones included."""

    @classmethod
    def start(cls, units: Iterable[UnitKey]) -> ExpertLedger:
        """The ledger before the first step.

        Raises:
            InvalidJobError: when a unit is no expert.
        """
        experts = sorted(set(units))
        other = next((unit for unit in experts if unit.kind is not UnitKind.EXPERT), None)
        if other is not None:
            raise InvalidJobError(f"unit {other} is not an expert; the ledger counts only experts")
        return cls(
            snapshots=0,
            tokens=dict.fromkeys(experts, 0),
            versions=dict.fromkeys(experts, ()),
            assignments=dict.fromkeys((layer_of(unit) for unit in experts), 0),
        )

    # --- what happens -----------------------------------------------------------------------------

    def routed(
        self, counts: Mapping[UnitKey, int], assignments: Mapping[int, int] | None = None
    ) -> ExpertLedger:
        """The ledger after a step, or several.

        Args:
            counts: for each expert the tokens that it processed, of one rank or summed over several
                (`merge_counts`); experts without tokens may be missing.
            assignments: for each layer, tokens times the experts that each was sent to; by default
                the sum of the counts, as if no token had been dropped.

        Raises:
            InvalidJobError: when an expert or layer is unknown, or a count is below 0.
        """
        tokens, layers = dict(self.tokens), dict(self.assignments)
        for unit, count in counts.items():
            if unit not in tokens or count < 0:
                raise InvalidJobError(
                    f"{count} tokens for unit {unit}: give counts of at least 0 for the experts "
                    f"that the ledger was started with"
                )
            tokens[unit] += count
            if assignments is None:
                layers[layer_of(unit)] += count
        for layer, count in (assignments or {}).items():
            if layer not in layers or count < 0:
                raise InvalidJobError(
                    f"{count} assignments in layer {layer}: give counts of at least 0 for the "
                    f"layers {sorted(layers)}"
                )
            layers[layer] += count
        return replace(self, tokens=tokens, assignments=layers)

    def captured(
        self, generation: Generation, units: Iterable[UnitKey], *, keep: int = 0
    ) -> ExpertLedger:
        """The ledger after a snapshot of these experts was planned for the current step.

        Args:
            keep: the number of newest versions to keep of each of these experts; 0 keeps all.

        Raises:
            InvalidJobError: when an expert is unknown, or the generation is not newer than its
                newest version.
        """
        versions = dict(self.versions)
        for unit in units:
            held = versions.get(unit)
            if held is None or (held and held[-1].generation >= generation):
                raise InvalidJobError(
                    f"unit {unit} cannot be captured in generation {generation}: "
                    + (
                        "the ledger does not contain it"
                        if held is None
                        else (
                            f"it was already captured in {held[-1].generation}, and a newer "
                            f"generation must follow"
                        )
                    )
                )
            newest = (*held, Version(generation, self.snapshots, self.tokens[unit]))
            versions[unit] = newest[-keep:]
        return replace(self, versions=versions, snapshots=self.snapshots + 1)

    def failed(self, generation: Generation) -> ExpertLedger:
        """The ledger after the snapshot of `generation` was skipped or lost: its experts are as old
        as before it."""
        return replace(
            self,
            versions={
                unit: tuple(version for version in held if version.generation != generation)
                for unit, held in self.versions.items()
            },
        )

    def begun_anew(self) -> ExpertLedger:
        """The ledger when no snapshot of before counts any more, because experts have changed
        ranks: the next one captures all of them."""
        return replace(self, versions=dict.fromkeys(self.versions, ()))

    def pruned(self, kept: Mapping[UnitKey, Collection[Generation]]) -> ExpertLedger:
        """The ledger without versions that no longer exist.

        Args:
            kept: for each expert the generations of the versions that memory or storage holds; the
                newest version stays in any case.
        """
        return replace(
            self,
            versions={
                unit: tuple(v for v in held if v.generation in kept.get(unit, ()) or v is held[-1])
                for unit, held in self.versions.items()
            },
        )

    def reminded(self, versions: Mapping[UnitKey, Iterable[Version]]) -> ExpertLedger:
        """The ledger with versions that were pruned from it although storage may still hold them.
        Versions that it has stay as they are; experts that it does not have are left out."""
        known = dict(self.versions)
        for unit, added in versions.items():
            if unit in known:
                by_generation = {version.generation: version for version in added}
                by_generation |= {version.generation: version for version in known[unit]}
                known[unit] = tuple(by_generation[g] for g in sorted(by_generation))
        return replace(self, versions=known)

    def recovered(
        self, restored: Mapping[UnitKey, Generation]
    ) -> tuple[ExpertLedger, dict[UnitKey, int]]:
        """The ledger after a recovery, and the tokens that each expert lost by it.

        Call it on the ledger of the restored step. An expert whose version is of that step lost
        nothing; tokens of later steps are executed again, so they are not lost either.

        Args:
            restored: for each expert the generation of the version that it was restored from.

        Raises:
            InvalidJobError: when an expert is missing, or its version is not in the ledger.
        """
        tokens, versions = dict(self.tokens), dict(self.versions)
        for unit, held in self.versions.items():
            generation = restored.get(unit)
            mark = next((v for v in held if v.generation == generation), None)
            if mark is None:
                raise InvalidJobError(
                    f"unit {unit} was restored from {generation or 'nothing'}, but the ledger "
                    f"has its versions {[str(v.generation) for v in held]}; restore the ledger "
                    f"of the same step as the snapshot"
                )
            tokens[unit] = mark.tokens
            versions[unit] = held[: held.index(mark) + 1]
        lost = {unit: self.tokens[unit] - tokens[unit] for unit in tokens}
        return replace(self, tokens=tokens, versions=versions), lost

    # --- the questions of selection: `TokenHistory` -----------------------------------------------

    def unsaved(self, unit: UnitKey) -> int:
        """Tokens since the expert's newest version: P[i][j] of MoEtion algorithm 1."""
        held = self.versions[unit]
        return self.tokens[unit] - (held[-1].tokens if held else 0)

    def age(self, unit: UnitKey) -> int:
        """Snapshots since the one that captured the expert: 0 right after it."""
        held = self.versions[unit]
        return self.snapshots - (held[-1].number + 1 if held else 0)

    @property
    def uncaptured(self) -> frozenset[UnitKey]:
        """Experts without any version. No generation can be restored until they are captured, so
        the next snapshot captures them, whatever the policy."""
        return frozenset(unit for unit, held in self.versions.items() if not held)

    # --- as a value -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for extras, catalogues and JSON."""
        return {
            "format": _FORMAT,
            "snapshots": self.snapshots,
            "tokens": {str(unit): count for unit, count in self.tokens.items()},
            "versions": {
                str(unit): [[str(v.generation), v.number, v.tokens] for v in held]
                for unit, held in self.versions.items()
            },
            "assignments": {str(layer): count for layer, count in self.assignments.items()},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ExpertLedger:
        """The ledger that `to_dict` wrote.

        Raises:
            CorruptError: when it did not, or a different version of Holdfast did.
        """
        check_format("expert ledger", document, _FORMAT)
        try:
            return cls(
                snapshots=int(document["snapshots"]),
                tokens={UnitKey.parse(unit): int(n) for unit, n in document["tokens"].items()},
                versions={
                    UnitKey.parse(unit): tuple(
                        Version(Generation.parse(generation), int(number), int(tokens))
                        for generation, number, tokens in held
                    )
                    for unit, held in document["versions"].items()
                },
                assignments={int(layer): int(n) for layer, n in document["assignments"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, InvalidJobError) as error:
            raise CorruptError(f"the expert ledger cannot be read: {error!r}") from error


def merge_counts(*counts: Mapping[UnitKey, int]) -> dict[UnitKey, int]:
    """The counts of several ranks or steps, summed by expert."""
    merged: dict[UnitKey, int] = {}
    for mapping in counts:
        for unit, count in mapping.items():
            merged[unit] = merged.get(unit, 0) + count
    return merged


def check_format(what: str, document: Mapping[str, Any], expected: int) -> None:
    """Refuse a stored value of another format.

    Raises:
        CorruptError: when it is of another format, which the message names.
    """
    given = document.get("format") if isinstance(document, Mapping) else None
    if given != expected:
        raise CorruptError(
            f"{what} of format {given!r}: this version of Holdfast reads format {expected}; use "
            f"the version that wrote it, or remove it and lose its counts"
        )
