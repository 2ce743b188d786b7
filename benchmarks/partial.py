"""Time of a snapshot of some experts beside a full one: `partial_staged`, `partial_committed`, and
the same with 2 and 4 experts of each layer.

One process saves the same state in turn through two sessions, each with an arena of its own: one
captures every unit, the other some experts of each layer and everything else. The figures are the
ratio of the times over the ratio of the captured bytes: 1 means time in proportion to bytes. The
excess, `partial_over`, does not grow with the bytes. Its floor, `partial_over_floor`, is the time
of two calls to the daemon that request nothing, after as long a pause, because a save makes two.

Experts are left out where all of them would take too long, so the state is as large as memory
allows, up to four times `--bytes`.

    python -m benchmarks.partial --bytes N --out FILE
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import msgspec
import psutil
import torch

import holdfast
from benchmarks.cluster import Cluster
from benchmarks.measure import WARM_UPS, Figure, Outcome, encode, milliseconds, ratio, timed
from benchmarks.states import EXPERTS, State
from benchmarks.trainer_worker import timed_save
from holdfast_core.job.snapshots import PartialExperts, PolicySpec, PolicyType
from holdfast_core.snapshots.layouts import SLOTS_MAX
from holdfast_core.snapshots.membership import Redundancy
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc

CHOSEN = (1, 2, 4)
"""Numbers of experts of each layer in a snapshot."""

REPETITIONS = 15
STATE = 4
"""Largest ratio of the state to `--bytes`."""

MEMORY_SHARE = 0.85
"""Portion of the available memory that may be used."""

SILENCE_S = 0.1
"""Pause before a bare call: about as long as a save copies."""

WITHIN_S = 300.0
GIB = 1 << 30


class Taken(msgspec.Struct, kw_only=True):
    """Seconds of each save of one session, from the call."""

    captured_bytes: int
    """Bytes of the captured tensors, in each save but the first."""
    staged: list[float] = []
    committed: list[float] = []


class Compared(msgspec.Struct, kw_only=True):
    """Results of one process that saves through two sessions."""

    full: Taken
    some: Taken
    calls: list[float]
    """Seconds of two bare calls."""

    @property
    def share(self) -> float:
        return self.some.captured_bytes / self.full.captured_bytes

    def figure(self, name: str) -> Figure:
        """Time of `some` as a ratio to its share of the time of `full`."""
        return ratio(
            getattr(self.some, name),
            [self.share * seconds for seconds in getattr(self.full, name)],
            "× its bytes",
            note=f"{self.share:.0%} of {self.full.captured_bytes / GIB:.1f} GiB",
        )

    def over(self) -> list[float]:
        """Seconds by which `some` exceeds its share, until committed."""
        pairs = zip(self.some.committed, self.full.committed, strict=True)
        return [some - self.share * full for some, full in pairs]


def measure(nbytes: int, directory: Path) -> Outcome:
    """Measure all rows; workers write their results to `directory`."""
    room = int(MEMORY_SHARE * psutil.virtual_memory().available)
    total_bytes = min(STATE * nbytes, room // (1 + 2 * SLOTS_MAX))
    found = {k: _compare(k, total_bytes, directory / f"partial-{k}.json") for k in CHOSEN}
    rows = {}
    for k, compared in found.items():
        for name in ("staged", "committed"):
            key = f"partial_{name}" if k == 1 else f"partial_{k}_{name}"
            rows[key] = compared.figure(name)
    everything = [seconds for compared in found.values() for seconds in compared.over()]
    rows["partial_over"] = milliseconds(everything)
    calls = [seconds for compared in found.values() for seconds in compared.calls]
    rows["partial_over_floor"] = milliseconds(calls)
    first = found[CHOSEN[0]]
    return Outcome(
        rows=rows,
        facts={
            "full_bytes": first.full.captured_bytes,
            "partial_bytes": first.some.captured_bytes,
        },
    )


def _compare(k: int, total_bytes: int, out: Path) -> Compared:
    """Compare a full snapshot with one of `k` experts of each layer."""
    # Alignment adds less than a tenth to the slots.
    with Cluster(2 * SLOTS_MAX * total_bytes * 11 // 10) as cluster:
        daemon = cluster.start("node-0")
        for job in _jobs(k):
            cluster.control.place(job, 1, [daemon.node], redundancy=Redundancy.NONE)
        command = [sys.executable, "-m", "benchmarks.partial", "--bytes", str(total_bytes)]
        command += ["--out", str(out), "--save", str(k), "--socket", str(daemon.socket)]
        subprocess.run(command, check=True, timeout=WITHIN_S)
    return msgspec.json.decode(out.read_bytes(), type=Compared)


def _jobs(k: int) -> dict[str, PolicySpec]:
    some = PartialExperts(experts_per_layer=k)
    return {
        "full": PolicySpec(),
        "some": PolicySpec(type=PolicyType.PARTIAL_EXPERTS, partial_experts=some),
    }


def save_in_turn(socket: Path, total_bytes: int, k: int) -> Compared:
    """Save the same state through both sessions, without overlap."""
    state = State(total_bytes)
    experts = sum(t.nbytes for name, t in state.tensors.items() if ".experts." in name)
    sessions: list[tuple[holdfast.Session, Taken]] = []
    for job, policy in _jobs(k).items():
        os.environ["HOLDFAST_POLICY"] = msgspec.json.encode(policy).decode()
        session = holdfast.init(
            model=state.model, optimizer=state.optimizer, socket=socket, job=job
        )
        if session.restore() is not None:
            raise RuntimeError("a new job restored something")
        session.prepare()
        left_out = EXPERTS - k if policy.partial_experts else 0
        taken = Taken(captured_bytes=state.nbytes - experts * left_out // EXPERTS)
        sessions.append((session, taken))
    for turn in range(1 + WARM_UPS + REPETITIONS):  # the first save captures every expert
        for session, taken in sessions:
            _, _, staged, committed = timed_save(session, state, turn + 1)
            if turn > WARM_UPS:
                taken.staged.append(staged)
                taken.committed.append(committed)
    for session, _ in sessions:
        session.close()
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        hello = trainer_pb2_grpc.TrainerStub(channel).Hello
        calls = [_call(hello) + _call(hello) for _ in range(WARM_UPS + REPETITIONS)]
    (_, full), (_, some) = sessions
    return Compared(full=full, some=some, calls=calls[WARM_UPS:])


def _call(hello: Callable[..., object]) -> float:
    """Seconds of a call to a daemon that requests nothing, after a pause."""
    time.sleep(SILENCE_S)
    request = trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job="full")
    return timed(lambda: hello(request))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save", type=int, metavar="K", help="be the process that saves")
    parser.add_argument("--socket", type=Path)
    options = parser.parse_args()
    if options.save is None:
        options.out.write_bytes(encode(measure(options.bytes, options.out.parent)))
        return
    torch.set_num_threads(1)
    taken = save_in_turn(options.socket, options.bytes, options.save)
    options.out.write_bytes(msgspec.json.encode(taken))


if __name__ == "__main__":
    main()
