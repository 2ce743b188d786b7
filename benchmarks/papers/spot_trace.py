"""Training on spot instances: 80 minutes in which nodes come and go (Lazarus §6.4).

Three systems replay one trace. DS uses whole expert-parallel groups and restarts from a checkpoint
at each change; DS(FT) goes on where each expert has a copy left; the elastic one does that too and
uses every node (Lazarus). Speeds are inferred, so that only the order of the systems can be claimed
and not their factors.

Which nodes are lost is drawn; how many and when is the trace's. The paper caps a trace of 32 nodes
to 10 and does not say how, so there are two ways here, both named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.papers.paper_checks import (
    Column,
    Origin,
    PaperTable,
    Value,
)
from holdfast_cli.planner.effective_time.incidents import Draw, DrawOf

CHANGES = (
    (0, 18), (1, 1), (3, 4), (5, 1), (6, 1), (7, 2), (11, 2), (13, 1), (24, 1), (25, 1), (34, -4),
    (43, 4), (51, -6), (53, -3), (54, -1), (55, -1), (57, -3), (59, -3), (61, 6), (65, 2), (67, 1),
    (69, 1), (70, 3), (71, 4), (77, -1), (79, -2), (80, 1),
)  # fmt: skip
"""Minute, and the change of the number of available nodes: the first 80 minutes of the trace of AWS
EC2 P3 instances that the paper replays."""

NODES = 10
"""Nodes that the paper caps the trace to."""
PEAK = 32
"""Most nodes that the trace has at a time."""
LEAST = 2
LENGTH_S = 80 * 60
JOIN_WAIT_S = 120.0
"""For which all systems wait for more nodes before they use new ones (§6.4)."""
SEATS = 6
"""Copies of experts that a node holds (§6.1)."""
COPIES_MIN = 2
"""f: least copies of an expert (§6.1)."""
SEQUENCES = 4
"""Sequences of a step on each node (§6.1)."""
STORAGE_BYTES_S = 1.25e9
"""The NFS server's 10 Gbit/s (§6.1)."""
STATE_BYTES = 14
"""State of a parameter: fp16, fp32 master and two moments, as table 2 has it."""
RECONFIGURE_S = 30.0
"""20 to 40 s (§6.2)."""
RESTART_S = 60.0
"""Start of all processes, without loading: inferred from 3 to 5 minutes that a fallback loses."""
EXPERTS_SHARE = 0.5
"""Portion of a step that evenly loaded experts take: inferred."""
SKEW = 1.0
"""Exponent of the experts' popularity: inferred; the trace of routing is not published."""
ELASTIC_LOAD = 1.135
"""Load of the busiest node by the mean, with copies by popularity, at that skew: inferred."""


class System(StrEnum):
    """What trains."""

    ELASTIC = "elastic (Lazarus)"
    FAULT_TOLERANT = "DS(FT)"
    RESTARTING = "DS"


class SpotReplay(StrEnum):
    """How the trace is capped to ten nodes."""

    SCALED = "scaled"
    """All numbers by 10 / 32, rounded."""
    EVENTS = "events"
    """Ten at first, sizes of changes kept, and from 2 to 10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotModel:
    """A model of the paper's table 1."""

    name: str
    parameters: float
    experts: int
    ep: int
    """Ranks of an expert-parallel group in DS."""
    step_s: float
    """Step with evenly loaded nodes: inferred from the steps that Lazarus trains in 30 minutes."""

    @property
    def stored_s(self) -> float:
        """Writing or reading the state in storage."""
        return self.parameters * STATE_BYTES / STORAGE_BYTES_S


MODELS = (
    SpotModel(name="GPT-S", parameters=521e6, experts=8, ep=2, step_s=0.55),
    SpotModel(name="GPT-L", parameters=1.7e9, experts=16, ep=4, step_s=0.8),
)


def sizes(replay: SpotReplay) -> tuple[tuple[float, int], ...]:
    """Time in seconds and number of nodes from then on, where it changes."""
    found: list[tuple[float, int]] = []
    available, clipped = 0, NODES
    for minute, change in CHANGES:
        available += change
        if replay is SpotReplay.SCALED:
            # Halves round up, as people do.
            nodes = int(NODES * available / PEAK + 0.5)
        else:
            clipped = min(NODES, max(LEAST, clipped + change if found else NODES))
            nodes = clipped
        if not found or found[-1][1] != nodes:
            found.append((60.0 * minute, nodes))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotRun:
    """One replay."""

    samples: float
    """Sequences that were trained and not lost."""
    seconds: Mapping[str, float]
    fallbacks: int
    """Returns to a checkpoint."""


TRAINING, STORING, RESTARTING, REFORMING = "training", "checkpoints", "restart", "reconfiguration"


@dataclass(kw_only=True, slots=True)
class _Spot:
    """A system in the middle of a replay."""

    model: SpotModel
    system: System
    draw: Draw
    load: float
    """Load of the busiest rank by the mean."""
    alive: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    now_s: float = 0.0
    ready_s: float = 0.0
    """When the recovery in progress ends."""
    samples: float = 0.0
    unsaved: float = 0.0
    """Samples since the newest checkpoint."""
    steps: float = 0.0
    """Steps since then."""
    fallbacks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    next_id: int = 0

    @property
    def every(self) -> int:
        """Steps from checkpoint to checkpoint (§6.1)."""
        return 50 if self.system is System.RESTARTING else 250

    def usable(self, nodes: int) -> int:
        if self.system is System.ELASTIC:
            return nodes if nodes * SEATS >= self.model.experts else 0
        return nodes // self.model.ep * self.model.ep

    def spend(self, what: str, lasts_s: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + lasts_s

    def train_until(self, until_s: float) -> None:
        start_s = min(max(self.now_s, self.ready_s), until_s)
        self.now_s = until_s
        left_s = until_s - start_s
        share = EXPERTS_SHARE
        step_s = self.model.step_s * (1 - share + share * self.load)
        while left_s > 0 and self.used:
            steps = min((self.every - self.steps), left_s / step_s)
            trained = steps * SEQUENCES * len(self.used)
            self.steps += steps
            self.samples += trained
            self.unsaved += trained
            self.spend(TRAINING, steps * step_s)
            left_s -= steps * step_s
            if self.steps < self.every:
                break
            stored_s = min(left_s, self.model.stored_s)
            self.spend(STORING, stored_s)
            left_s -= stored_s
            self.steps = self.unsaved = 0.0

    def lose(self, count: int) -> None:
        """Nodes are gone, drawn from those alive."""
        lost = {self.alive.pop(int(self.draw() * len(self.alive))) for _ in range(count)}
        if not lost & set(self.used):
            return
        kept = [node for node in self.used if node not in lost]
        live = self.system is not System.RESTARTING and self._covers(lost)
        if live and self.system is System.FAULT_TOLERANT:
            # Nodes that were left over are not taken in (§6.2).
            self.used = kept[: self.usable(len(kept))]
        else:
            self.used = self.alive[: self.usable(len(self.alive))]
        self._pause(live=live)

    def _covers(self, lost: set[int]) -> bool:
        """Whether a copy of every expert is left."""
        places = {node: place for place, node in enumerate(self.used)}
        gone = {places[node] for node in lost if node in places}
        if self.system is System.FAULT_TOLERANT:
            ep = self.model.ep
            left = {place % ep for place in range(len(self.used)) if place not in gone}
            return len(left) == ep
        first = 0
        for holders in holders_of_groups(self.model.experts, len(self.used)):
            if all(place in gone for place in range(first, first + holders)):
                return False
            first += holders
        return True

    def grow(self, count: int) -> None:
        """Nodes have waited long enough and take part."""
        self.alive += range(self.next_id, self.next_id + count)
        self.next_id += count
        if self.usable(len(self.alive)) > len(self.used):
            self.used = self.alive[: self.usable(len(self.alive))]
            if self.now_s > 0:
                self._pause(live=self.system is not System.RESTARTING)

    def _pause(self, *, live: bool) -> None:
        if live:
            lasts_s, what = RECONFIGURE_S, REFORMING
        else:
            lasts_s, what = RESTART_S + self.model.stored_s, RESTARTING
            self.samples -= self.unsaved
            self.fallbacks += 1
            self.steps = self.unsaved = 0.0
        end_s = min(self.now_s + lasts_s, float(LENGTH_S))
        self.spend(what, max(0.0, end_s - max(self.ready_s, self.now_s)))
        self.ready_s = max(self.ready_s, self.now_s + lasts_s)


def holders_of_groups(experts: int, nodes: int) -> tuple[int, ...]:
    """Nodes that hold each group of `SEATS` experts, least popular first (Lazarus §4.1).

    Seats go to the expert with most tokens for each copy, from `COPIES_MIN` copies on. A group is
    on as many nodes as its least popular expert has copies; the last one on those that are left.
    """
    seats = nodes * SEATS
    least = max(1, min(COPIES_MIN, seats // experts, nodes))
    copies = [least] * experts
    tokens = [1 / (experts - place) ** SKEW for place in range(experts)]  # ascending
    for _ in range(seats - least * experts):
        most = max(range(experts), key=lambda e: (tokens[e] / copies[e], -e))
        copies[most] += 1
    held = [copies[first] for first in range(0, experts, SEATS)]
    left = nodes - sum(held[:-1])
    return (*held[:-1], max(1, min(left, held[-1])))


def _busiest(model: SpotModel, draw: Draw) -> float:
    """Load of the busiest rank of an expert-parallel group by the mean, experts drawn to ranks."""
    tokens: list[float] = [1 / (place + 1) ** SKEW for place in range(model.experts)]
    for last in range(len(tokens) - 1, 0, -1):
        other = int(draw() * (last + 1))
        tokens[last], tokens[other] = tokens[other], tokens[last]
    each = model.experts // model.ep
    loads = [sum(tokens[at : at + each]) for at in range(0, model.experts, each)]
    return max(loads) * model.ep / sum(loads)


def replay_spot(model: SpotModel, system: System, replay: SpotReplay, draw: Draw) -> SpotRun:
    """Replay the trace with one system."""
    elastic = system is System.ELASTIC
    load = ELASTIC_LOAD if elastic else _busiest(model, draw)
    spot = _Spot(model=model, system=system, draw=draw, load=load)
    for at_s, change in _with_waits(sizes(replay)):
        if at_s >= LENGTH_S:
            break
        spot.train_until(at_s)
        if change > 0:
            spot.grow(change)
        else:
            spot.lose(-change)
    spot.train_until(LENGTH_S)
    return SpotRun(samples=spot.samples, seconds=spot.seconds, fallbacks=spot.fallbacks)


def _with_waits(sizes_at: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Losses at once, arrivals together `JOIN_WAIT_S` after the first of them. A loss takes nodes
    that still wait first."""
    nodes, waiting, join_s = 0, 0, 0.0
    for at_s, target in sizes_at:
        if waiting and join_s <= at_s:
            yield join_s, waiting
            nodes, waiting = nodes + waiting, 0
        change = target - nodes - waiting
        if not nodes:
            nodes = change
            yield at_s, change
        elif change > 0:
            join_s = join_s if waiting else at_s + JOIN_WAIT_S
            waiting += change
        else:
            spared = min(waiting, -change)
            waiting -= spared
            if change + spared:
                nodes += change + spared
                yield at_s, change + spared
    if waiting:
        yield join_s, waiting


def spot_tables(draw_of: DrawOf, runs: int) -> tuple[PaperTable, ...]:
    """The trace, and what the three systems train on it."""
    changes = PaperTable(
        title="Lazarus §6.4: the trace",
        columns=(Column(name="minute: change of nodes", origin=Origin.GIVEN),),
        rows=((" ".join(f"{minute}:{change:+d}" for minute, change in CHANGES),),),
    )
    nodes = PaperTable(
        title="Lazarus §6.4: nodes in both replays",
        columns=(
            Column(name="replay", origin=None),
            Column(name="minute: nodes", origin=Origin.INFERRED),
        ),
        rows=tuple(
            (replay, " ".join(f"{at_s / 60:.0f}:{count}" for at_s, count in sizes(replay)))
            for replay in SpotReplay
        ),
        notes=("the paper caps the trace to ten nodes and does not say how",),
    )
    computed = Origin.COMPUTED
    trained = PaperTable(
        title=f"Lazarus §6.4: 80 minutes on spot instances, {runs} draws of lost nodes",
        columns=(
            Column(name="replay", origin=None),
            Column(name="model", origin=None),
            Column(name="system", origin=None),
            Column(name="samples", origin=computed, digits=0),
            Column(name="95 % of draws", origin=computed),
            Column(name="elastic by it", origin=computed, digits=1),
            Column(name="paper's", origin=Origin.GIVEN),
            Column(name="fallbacks", origin=computed, digits=1),
            *(Column(name=f"{part}, %", origin=computed, digits=0) for part in _PARTS),
        ),
        rows=tuple(
            row
            for replay in SpotReplay
            for model in MODELS
            for row in _trained(replay, model, draw_of, runs)
        ),
        notes=(
            "claimed: elastic trains no less than DS(FT), and DS(FT) no less than DS; not by how "
            "much",
            "given: changes, intervals of 50 and 250 steps, NFS of 10 Gbit/s, 14 bytes for a "
            "parameter, 6 seats, 2 copies, 30 s (20 to 40) for a reconfiguration, 120 s until "
            "nodes join",
            f"inferred: steps of {MODELS[0].step_s:g} and {MODELS[1].step_s:g} s, half of them in "
            f"experts, popularity 1 / rank, {RESTART_S:g} s to start processes",
            "paper's: on its hardware, with a routing trace that is not published",
        ),
    )
    return (changes, nodes, trained)


PUBLISHED = {
    System.ELASTIC: ("1.0", "1.0"),
    System.FAULT_TOLERANT: ("1.2", "1.8"),
    System.RESTARTING: ("2.3", "3.4"),
}
"""How many times as many samples Lazarus trains, for both models (§6.4)."""

_PARTS = (TRAINING, STORING, RESTARTING, REFORMING)


def _trained(
    replay: SpotReplay, model: SpotModel, draw_of: DrawOf, runs: int
) -> Iterator[tuple[Value, ...]]:
    elastic = 0.0
    for system in System:
        found = [replay_spot(model, system, replay, draw_of(seed)) for seed in range(runs)]
        samples = sorted(run.samples for run in found)
        mean = sum(samples) / runs
        elastic = elastic or mean
        outside = int(runs * 0.025)
        yield (
            replay,
            model.name,
            system,
            mean,
            f"{samples[outside]:.0f} to {samples[-1 - outside]:.0f}",
            elastic / mean,
            PUBLISHED[system][MODELS.index(model)],
            sum(run.fallbacks for run in found) / runs,
            *(
                100 * sum(run.seconds.get(part, 0.0) for run in found) / runs / LENGTH_S
                for part in _PARTS
            ),
        )
