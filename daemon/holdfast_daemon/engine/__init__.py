"""The snapshot engine: a sans-I/O state machine, one per job on a node.

`JobEngine` consumes inputs (a trainer's request, a peer's message, a membership, the end of an
effect, the passing of time) and returns the effects to carry out. It uses no clock, no socket and
no file itself, so the simulator runs this very code.

`job` defines the inputs and the queries; `state`, `slots` and `epoch` hold the memory. An input
changes the memory, and `convergence` then settles it with functions that look at all of it and
start what is missing: `upkeep`, `rebuilding`, `loading`, `persisting`. `leader` and
`persist_leader` make the decisions that only a leader makes; `answers` and `overview` only read. No
code outside this folder depends on the layout of the memory.
"""

from holdfast_daemon.engine.answers import EpochProgress, OpenedSession, RestoreState, WorldState
from holdfast_daemon.engine.job import EngineSettings, JobEngine
from holdfast_daemon.engine.overview import HeldOverview, JobOverview
from holdfast_daemon.engine.state import Inspection, SavePace

__all__ = [
    "EngineSettings",
    "EpochProgress",
    "HeldOverview",
    "Inspection",
    "JobEngine",
    "JobOverview",
    "OpenedSession",
    "RestoreState",
    "SavePace",
    "WorldState",
]
