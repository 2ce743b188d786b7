"""Longer micro-batches of a pipeline stage that logs its messages, against the same without a log.

A micro-batch is a chain of products of matrices that takes some 10 ms, forward and backward. The
stage sends an activation and receives a gradient, of 32 MiB each, and logs both. Nothing is
sent: only the log is measured.

- `micro_batch_logged`: messages are copied on a side stream and hashed by a thread, with those that
  arrive after the last micro-batch; `ratio` is in percent;
- `micro_batch_logged_waiting`: the training thread waits for each message and hashes it, as it does
  by default.

    python -m benchmarks.gpu.boundary_logs --out FILE.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.results import Goal, Results, in_turn, run, settle
from benchmarks.measure import timed
from holdfast._elastic.boundary_log import BoundaryLog, Crossing, Key
from holdfast._elastic.message_copies import SideCopies, bytes_of

LIMIT_S = 25.0
MICRO_BATCHES = 16
MICRO_BATCH_S = 0.01
TOKENS, HIDDEN = 8192, 2048
SMALL_TOKENS, SMALL_HIDDEN = 64, 32
PRODUCTS_MAX = 4096
LONGER = Goal(limit=2.0)


class Stage:
    """A stage that computes; its messages are bfloat16 [tokens, hidden]."""

    def __init__(self, device: torch.device, tokens: int, hidden: int) -> None:
        made = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.weight = made(hidden, hidden) / hidden**0.5
        self.activation, self.gradient = made(tokens, hidden), made(tokens, hidden)
        self.products = 1
        """Number of products of matrices in a micro-batch."""

    def micro_batches(self, log: Callable[[Crossing, int, torch.Tensor], None]) -> None:
        """Queue all micro-batches of a step, and log their messages."""
        for number in range(MICRO_BATCHES):
            self._compute(self.activation)
            log(Crossing.ACTIVATION, number, self.activation)
            self._compute(self.gradient)
            log(Crossing.GRADIENT, number, self.gradient)

    def _compute(self, message: torch.Tensor) -> None:
        for _ in range(max(self.products // 2, 1)):
            message.copy_(message @ self.weight)


def measure(results: Results) -> None:
    """Measure all figures."""
    sizes = (SMALL_TOKENS, SMALL_HIDDEN) if results.small else (TOKENS, HIDDEN)
    stage = Stage(results.device, *sizes)
    results.state("message_bytes", stage.activation.nbytes)
    if not (results.on_gpu or results.small):
        results.skip("micro_batch_logged", "needs a CUDA device")
        return
    if not results.small:
        _calibrate(results, stage)
    if results.on_gpu:
        results.attempt("micro_batch_logged", partial(_compare, results, stage, waits=False))
    else:
        results.skip("micro_batch_logged", "needs a CUDA device")
    results.attempt("micro_batch_logged_waiting", partial(_compare, results, stage, waits=True))


def _calibrate(results: Results, stage: Stage) -> None:
    """Give a micro-batch as many products as take `MICRO_BATCH_S`."""

    def step() -> None:
        stage.micro_batches(_nothing)
        settle(results.device)

    step()
    while timed(step) < MICRO_BATCHES * MICRO_BATCH_S and stage.products < PRODUCTS_MAX:
        stage.products *= 2
    results.state("products", stage.products)


def _compare(results: Results, stage: Stage, *, waits: bool) -> None:
    log, step = BoundaryLog(4 * MICRO_BATCHES * stage.activation.nbytes), 0
    copies = SideCopies()

    def add(crossing: Crossing, number: int, message: torch.Tensor) -> None:
        key = Key(step, crossing, number)
        if waits and crossing is Crossing.ACTIVATION:
            log.add_sent(1, key, bytes_of(message))
        elif waits:
            log.add_received(1, key, bytes_of(message))
        elif crossing is Crossing.ACTIVATION:
            log.add_sent_later(1, key, message.nbytes, copies.begin(message))
        else:
            log.add_received_later(1, key, message.nbytes, copies.begin(message))

    def logged() -> None:
        nonlocal step
        step += 1
        log.begin(step)
        stage.micro_batches(add)
        log.complete(step)
        assert log.nbytes  # waits for the last messages, so that none is copied beside the floor

    pairs = in_turn(
        logged, lambda: stage.micro_batches(_nothing), results.device, results.repetitions
    )
    each = [(ours / MICRO_BATCHES, floor / MICRO_BATCHES) for ours, floor in pairs]
    name = "micro_batch_logged_waiting" if waits else "micro_batch_logged"
    results.longer(name, each, "the micro-batch without a log", None if waits else LONGER)


def _nothing(crossing: Crossing, number: int, message: torch.Tensor) -> None:
    """Log nothing."""


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.boundary_logs", str(__doc__), measure, limit_s=LIMIT_S))
