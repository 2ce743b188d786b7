"""Models with experts, for tests of all code that plans with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.tables import Expert, ExpertTable, MoeLayer
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind


def unit(layer: int, expert: int) -> UnitKey:
    return UnitKey(layer, UnitKind.EXPERT, expert)


def generation(step: int) -> Generation:
    return Generation(0, step)


def world(
    counts: Sequence[int], *, shares: int = 1, stages: int = 1, nbytes: int = 100
) -> ExpertTable:
    """A table whose layers have `counts` experts, dealt to stages and shares in consecutive
    runs."""
    layers = []
    for layer, count in enumerate(counts):
        stage = layer * stages // len(counts)
        experts = tuple(
            Expert(
                unit=unit(layer, index),
                nbytes=nbytes,
                gradient_bytes=nbytes // 5,
                owners=(stage * shares + index * shares // count,),
                stage=stage,
                share=index * shares // count,
            )
            for index in range(count)
        )
        layers.append(MoeLayer(layer=layer, stage=stage, experts=experts))
    return ExpertTable(layers=tuple(layers), dense_bytes=1000)


def after_full_snapshot(table: ExpertTable) -> ExpertLedger:
    """The ledger of a job whose first snapshot captured everything."""
    return ExpertLedger.start(table.units).captured(generation(0), table.units)


def taken_by_share(table: ExpertTable, units: Sequence[UnitKey]) -> dict[tuple[int, int], int]:
    """The number of `units` that each (stage, share) captures, including those that capture
    none."""
    taken = {(expert.stage, expert.share): 0 for expert in table.experts}
    for expert in table.experts:
        taken[expert.stage, expert.share] += expert.unit in units
    return taken


def taken_by_layer(table: ExpertTable, units: Sequence[UnitKey]) -> Mapping[int, int]:
    """The number of `units` in each layer."""
    return {m.layer: sum(e.unit in units for e in m.experts) for m in table.layers}


@st.composite
def even_worlds(draw: st.DrawFn) -> ExpertTable:
    """Worlds in which all shares hold equally many experts of each layer."""
    shares, stages = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    per_share = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=6))
    return world([n * shares for n in per_share], shares=shares, stages=stages)


@st.composite
def any_worlds(draw: st.DrawFn) -> ExpertTable:
    """Worlds with different and indivisible numbers of experts."""
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    stages = draw(st.integers(1, min(2, len(counts))))
    return world(counts, shares=draw(st.integers(1, 4)), stages=stages)
