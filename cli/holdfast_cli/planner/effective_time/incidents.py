"""When a simulated job loses processes and nodes, and when nodes come: by chance, or from a trace.

Chance is a function that the caller passes in, so that one seed gives one history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, log

from holdfast_core.errors import InvalidJobError

Draw = Callable[[], float]
"""Function that returns the next number of a seeded generator, from 0 up to but without 1."""

DrawOf = Callable[[int], Draw]
"""Function from a seed to a generator of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Something that happens to a job."""

    at_s: float
    nodes: int
    """Nodes that come, or (below 0) are lost; 0: only processes fail."""


def poisson(mtbf_s: float, node_losses: float, draw: Draw) -> Iterator[Incident]:
    """Endless failures with exponential times between them.

    Args:
        mtbf_s: mean time between failures of the whole job; infinite: none.
        node_losses: portion of them that take a node with them.

    Raises:
        InvalidJobError: when `mtbf_s` is not longer than 0.
    """
    if not mtbf_s > 0:
        raise InvalidJobError(f"mtbf_s={mtbf_s}: give a time longer than 0")
    now_s = 0.0
    while mtbf_s < inf:
        now_s -= mtbf_s * log(1 - draw())
        yield Incident(at_s=now_s, nodes=-1 if draw() < node_losses else 0)


def parse_trace(text: str) -> tuple[Incident, ...]:
    """The incidents of a trace. Each is a line `seconds,change`, where the change is a number of
    nodes that come (+2) or are lost (-1), or 0 for failed processes. `#` begins a comment.

    Raises:
        InvalidJobError: names the first line of another form, or with an earlier time.
    """
    incidents: list[Incident] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        at, comma, change = content.partition(",")
        try:
            incident = Incident(at_s=float(at), nodes=int(change))
        except ValueError:
            comma = ""
        if not comma or not 0 <= incident.at_s < inf:
            raise InvalidJobError(
                f"line {number} of the trace is {line!r}; write seconds,change like 2040,-4"
            )
        if incidents and incident.at_s < incidents[-1].at_s:
            raise InvalidJobError(f"line {number} of the trace is earlier than the one before it")
        incidents.append(incident)
    return tuple(incidents)
