"""`make bench NAME=windows`: what restoring a window repeats: training, or its optimizer.

The same small model trains with both kinds of windows, in one process and in turn. Measured: the
time of a step of which the save is waited for, beside one without a session; and the time from the
call of `restore` until the state after the window's last step is there, in steps of training. Both
kinds must bring back the bytes that the run had after that step.

Writes build/bench/windows.json; the exit code is 1 when bytes differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
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

    def step(self, number: int) -> None:
        """Train step `number`."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randn(TOKENS, WIDTH, generator=generator)
        layers: Any = self.model["layers"]
        for layer in layers:
            tokens = layer(tokens)
        self.optimizer.zero_grad()
        tokens.square().mean().backward()
        self.optimizer.step()

    def session(self, daemon: FakeDaemon, repeats: Repeats) -> holdfast.Session:
        """Open a session with windows."""
        return holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=daemon,
            settings=holdfast.Settings(
                policy=SparseWindows(window=WINDOW, repeats=repeats), start_wait_s=WAIT_S
            ),
        )

    def digest(self) -> int:
        """Digest of parameters and optimizer state."""
        states = (self.optimizer.state[p] for p in self.model.parameters())
        held = (state[key] for state in states for key in sorted(state))
        return digest_of([*self.model.parameters(), *held])


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One run with each kind of window, and a recovery from it."""

    step_s: float
    """Step without a session."""
    saved_step_s: dict[Repeats, float]
    """Step of which the save is waited for."""
    whole_s: dict[Repeats, float]
    """From `restore` to the state after the window's last step."""
    same: dict[Repeats, bool]
    """Whether that is the state of the run."""


def measure(steps: int) -> Sample:
    """Train `steps` steps without a session and with each kind, and recover."""
    alone = Training(0)
    seconds = [timed(partial(alone.step, n)) for n in range(1, steps + 1)]
    saved_step_s, whole_s, same = {}, {}, {}
    for repeats in Repeats:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            saved_step_s[repeats], digests = _run(Path(path), repeats, steps)
            whole_s[repeats], last, digest = _recover(Path(path), repeats)
            same[repeats] = digest == digests[last]
    return Sample(
        step_s=statistics.median(seconds), saved_step_s=saved_step_s, whole_s=whole_s, same=same
    )


def _run(path: Path, repeats: Repeats, steps: int) -> tuple[float, dict[int, int]]:
    training = Training(0)
    session = training.session(FakeDaemon(path), repeats)
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


def _recover(path: Path, repeats: Repeats) -> tuple[float, int, int]:
    training = Training(1)
    daemon = FakeDaemon(path, epoch=2)
    last = max(daemon.sealed()).step
    session = training.session(daemon, repeats)
    begin = time.perf_counter()
    done = session.restore() or 0
    for number in range(done + 1, last + 1):
        training.step(number)
        session.save(number)
    seconds = time.perf_counter() - begin
    digest = training.digest()
    session.close()
    return seconds, last, digest


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
    table = Table("what a recovery repeats", "step with its save, × without", "whole after, steps")
    figures = {}
    for repeats in Repeats:
        saved = [one.saved_step_s[repeats] / one.step_s for one in samples]
        whole = [one.whole_s[repeats] / one.step_s for one in samples]
        figures[repeats.value] = {"saved_step": saved, "whole_after_steps": whole}
        table.add_row(repeats.value, _spread(saved), _spread(whole))
    right = all(all(one.same.values()) for one in samples)
    console = Console()
    console.print(table)
    step_ms = 1000 * statistics.median(one.step_s for one in samples)
    console.print(f"window of {WINDOW} steps, {step_ms:.0f} ms each; one thread computes")
    console.print("the bytes are those of the run" if right else "[red]BYTES DIFFER[/]")
    report = {"figures": figures, "samples": samples, "machine": machine}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    console.print(f"wrote {options.output}", soft_wrap=True)
    return 0 if right else 1


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
