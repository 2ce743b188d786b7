"""A training run whose snapshots carry gradients, and a peer that brings its replica forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import PartialExperts
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, decode_layout
from holdfast_core.snapshots.pieces import runs
from holdfast_daemon.parity.changes import changed_pieces
from holdfast_daemon.parity.recomputing import Forward, Recomputed

ALL = PartialExperts(experts_per_layer=4, recompute=True)
WAIT_S = 20.0
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Stack(nn.Module):
    """Four stacked experts, and a dense layer."""

    def __init__(self, dtype: torch.dtype, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": Weights(width)})])
        self.head = nn.Linear(width, width)
        self.to(dtype)


class Weights(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(4, width, width))
        self.w_out = nn.Parameter(torch.randn(4, width, 2 * width))


class Run:
    """A training run of random gradients under a policy, and a peer with a replica."""

    def __init__(
        self,
        daemon: FakeDaemon,
        optimizer: Optimizers,
        *,
        dtype: torch.dtype = torch.float32,
        policy: PartialExperts = ALL,
        seed: int = 3,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.model, self.daemon = Stack(dtype).to(device), daemon
        self.optimizer = optimizer(self.model.parameters())
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            daemon=daemon,
            settings=holdfast.Settings(policy=policy, reopen_backoff_s=0.0),
        )
        self.counted = Recomputed()
        self.step = 0

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def save(self) -> None:
        self.step += 1
        self.session.save(self.step).protected.result(WAIT_S)

    def both(self, *, steps: int = 1) -> tuple[int, int]:
        """Train and save; then (bytes that changed, bytes that a peer fetches) in whole pieces,
        after it was seen that the peer gets the right ones."""
        for _ in range(steps):
            self.train()
        self.save()
        old, new = (self.daemon.sealed()[Generation(1, s)] for s in (self.step - 1, self.step))
        layout = self.layout
        size, payload = layout.piece_bytes, bytearray(self.payload(self.step - 1))
        older, wanted = bytes(payload), self.payload(self.step)
        room = max(len(payload), len(wanted))
        payload.extend(bytes(room - len(payload)))
        forward = Forward(layout, old.manifest, new.manifest, self.counted)
        changed = list(changed_pieces(old.manifest, new.manifest, 0, room))
        withheld = forward.withheld(changed)
        fetched = [piece for piece in changed if piece not in withheld]
        for piece in fetched:
            payload[piece * size : (piece + 1) * size] = wanted[piece * size : (piece + 1) * size]
        view = memoryview(payload)
        more = forward.compute(view, memoryview(older), withheld, lambda: None)
        for piece in more:
            view[piece * size : (piece + 1) * size] = wanted[piece * size : (piece + 1) * size]
        assert bytes(payload[: len(wanted)]) == wanted
        return len(changed) * size, (len(fetched) + len(more)) * size

    @property
    def layout(self) -> Layout:
        held = self.daemon.sealed()[Generation(1, self.step)]
        return decode_layout((held.home / "layout.json").read_bytes())

    def payload(self, step: int) -> bytes:
        held, layout = self.daemon.sealed()[Generation(1, step)], self.layout
        arena = (held.home / "arena").read_bytes()
        size, end = layout.piece_bytes, held.manifest.payload_bytes
        parts = [
            arena[run.slot * layout.slot_bytes + at * size :][:size]
            for run in runs(held.piece_map, 0, -(-end // size))
            for at in range(run.first, run.end)
        ]
        return b"".join(parts)[:end]
