"""The snapshot engine: a sans-I/O state machine, one per job on a node.

`JobEngine` takes what happened (a request of a trainer, a message of a peer, a membership, the end
of an effect, time) and returns the effects to carry out. It touches nothing itself: no clock, no
socket, no file, so that the simulator runs this very code.

`job` has the inputs and the questions, `state`, `slots` and `epoch` what is remembered. An input
changes that, and `convergence` brings it to rest with functions that look at the whole of it and
start what is missing: `upkeep`, `rebuilding`, `loading`, `persisting`. `leader` and
`persist_leader` have what only a leader decides; `answers` and `overview` read. Nothing outside
this folder depends on what is remembered, or how.
"""

from holdfast_daemon.engine.answers import EpochProgress, OpenedSession, RestoreState, WorldState
from holdfast_daemon.engine.job import EngineSettings, JobEngine
from holdfast_daemon.engine.overview import HeldOverview, JobOverview

__all__ = [
    "EngineSettings",
    "EpochProgress",
    "HeldOverview",
    "JobEngine",
    "JobOverview",
    "OpenedSession",
    "RestoreState",
    "WorldState",
]
