"""`make bench NAME=windows`: what restoring a window repeats: training, or its optimizer.

The same small model trains with both kinds of windows, in one process and in turn; where training
is repeated, once with the gradients of frozen units and once without. Measured: the time of a step
of which the save is waited for, beside one without a session; the time from the call of `restore`
until the state after the window's last step is there, in steps of training; and the time of a
repeated step. All must bring back the bytes that the run had after the window's last step.

Writes build/bench/windows.json; the exit code is 1 when bytes differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import holdfast
from benchmarks.machine import facts
from benchmarks.measure import timed
from holdfast._digests import digest_of
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import Repeats, SparseWindows

ROOT = Path(__file__).resolve().parents[1]
LAYERS, EXPERTS, WIDTH, TOKENS = 2, 4, 512, 512
WINDOW, WAIT_S = 4, 60.0
KINDS = {
    "Training": (Repeats.TRAINING, False),
    "Training, session.backward": (Repeats.TRAINING, True),
    "Optimizer": (Repeats.OPTIMIZER, False),
}
"""Label → what a recovery repeats, and whether the loop calls `session.backward`."""


class Layer(nn.Module):
    """Experts of which every token uses all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + torch.stack([expert(tokens).tanh() for expert in self.experts]).mean(0)


class Training:
    """A model and its optimizer, with or without a session."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(LAYERS))})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.backward: Callable[[torch.Tensor], None] = torch.autograd.backward

    def step(self, number: int) -> None:
        """Train step `number`."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randn(TOKENS, WIDTH, generator=generator)
        layers: Any = self.model["layers"]
        for layer in layers:
            tokens = layer(tokens)
        self.optimizer.zero_grad()
        self.backward(tokens.square().mean())
        self.optimizer.step()

    def session(self, daemon: FakeDaemon, kind: str) -> holdfast.Session:
        """Open a session with windows."""
        repeats, leaves_out = KINDS[kind]
        session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=daemon,
            settings=holdfast.Settings(
                policy=SparseWindows(window=WINDOW, repeats=repeats), start_wait_s=WAIT_S
            ),
        )
        if leaves_out:
            self.backward = session.backward
        return session

    def digest(self) -> int:
        """Digest of parameters and optimizer state."""
        states = (self.optimizer.state[p] for p in self.model.parameters())
        held = (state[key] for state in states for key in sorted(state))
        return digest_of([*self.model.parameters(), *held])


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One run with each kind of window, and a recovery from it."""

    step_s: float
    """Step without a session."""
    saved_step_s: dict[str, float]
    """Step of which the save is waited for, for each kind."""
    whole_s: dict[str, float]
    """From `restore` to the state after the window's last step."""
    repeated_s: dict[str, float]
    """A repeated step with its `save`, where training is repeated."""
    same: dict[str, bool]
    """Whether that is the state of the run."""


def measure(steps: int) -> Sample:
    """Train `steps` steps without a session and with each kind, and recover."""
    alone = Training(0)
    seconds = [timed(partial(alone.step, n)) for n in range(1, steps + 1)]
    saved_step_s, whole_s, repeated_s, same = {}, {}, {}, {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            saved_step_s[kind], digests = _run(Path(path), kind, steps)
            whole_s[kind], repeated, last, digest = _recover(Path(path), kind)
            same[kind] = digest == digests[last]
            if repeated:
                repeated_s[kind] = statistics.mean(repeated)
    return Sample(
        step_s=statistics.median(seconds),
        saved_step_s=saved_step_s,
        whole_s=whole_s,
        repeated_s=repeated_s,
        same=same,
    )


def _run(path: Path, kind: str, steps: int) -> tuple[float, dict[int, int]]:
    training = Training(0)
    session = training.session(FakeDaemon(path), kind)
    session.restore()
    seconds, digests = [], {}
    for number in range(1, steps + 1):

        def step(number: int = number) -> None:
            training.step(number)
            session.save(number).staged.result(WAIT_S)

        seconds.append(timed(step))
        digests[number] = training.digest()
    session.close()
    return statistics.median(seconds[1 + WINDOW :]), digests


def _recover(path: Path, kind: str) -> tuple[float, list[float], int, int]:
    training = Training(1)
    daemon = FakeDaemon(path, epoch=2)
    last = max(daemon.sealed()).step
    session = training.session(daemon, kind)
    begin = time.perf_counter()
    done = session.restore() or 0

    def step(number: int) -> None:
        training.step(number)
        session.save(number)

    repeated = [timed(partial(step, number)) for number in range(done + 1, last + 1)]
    seconds = time.perf_counter() - begin
    digest = training.digest()
    session.close()
    return seconds, repeated, last, digest


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bench NAME=windows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--repetitions", type=int, default=7, help="runs of each kind (default %(default)s)")
    add("--steps", type=int, default=1 + 3 * WINDOW, help="steps of a run (default %(default)s)")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "windows.json")
    options = parser.parse_args(argv)
    machine = facts()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    samples = [measure(options.steps) for _ in range(options.repetitions)]
    table = Table(
        "what a recovery repeats",
        "step with its save, × without",
        "whole after, steps",
        "repeated step, × without session",
    )
    figures = {}
    for kind in KINDS:
        saved = [one.saved_step_s[kind] / one.step_s for one in samples]
        whole = [one.whole_s[kind] / one.step_s for one in samples]
        again = [one.repeated_s[kind] / one.step_s for one in samples if kind in one.repeated_s]
        figures[kind] = {"saved_step": saved, "whole_after_steps": whole, "repeated_step": again}
        table.add_row(kind, _spread(saved), _spread(whole), _spread(again) if again else "")
    plain, without = list(KINDS)[:2]
    shorter = [one.repeated_s[without] / one.repeated_s[plain] for one in samples]
    right = all(all(one.same.values()) for one in samples)
    console = Console()
    console.print(table)
    step_ms = 1000 * statistics.median(one.step_s for one in samples)
    console.print(f"window of {WINDOW} steps, {step_ms:.0f} ms each; one thread computes")
    console.print(f"repeated step without gradients of frozen units, × with: {_spread(shorter)}")
    console.print("the bytes are those of the run" if right else "[red]BYTES DIFFER[/]")
    report = {
        "figures": figures,
        "repeated_step_without": shorter,
        "samples": samples,
        "machine": machine,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    console.print(f"wrote {options.output}", soft_wrap=True)
    return 0 if right else 1


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
