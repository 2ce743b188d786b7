"""An optimizer that is sharded as DeepSpeed's ZeRO shards: all parameters of a group lie one behind
the other in a flat tensor, of which each rank optimizes an equal part, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import holdfast


class FlatOptimizer:
    """Adam over the flat masters of this rank.

    Args:
        groups: parameters of each group.
        gathers: whether parameters have their elements only between `gather` and the end of the
            step, as in stage 3.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], *, gathers: bool = False) -> None:
        self.gathers = gathers
        self._shapes = {p: p.shape for parameters in groups for p in parameters}
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._groups = groups
        self.masters: list[torch.Tensor] = []
        self.ranges: list[holdfast.FlatTensor] = []
        for parameters in groups:
            whole = self._flattened([p.data for p in parameters])
            part = whole.chunk(self.ranks)[rank].clone()
            low, end = rank * part.numel(), (rank + 1) * part.numel()
            ranges, at = [], 0
            for p in parameters:
                first, last = max(at, low), min(at + p.numel(), end)
                if first < last or gathers:
                    ranges.append(
                        holdfast.FlatRange(
                            parameter=p,
                            first=first - at if first < last else 0,
                            count=max(last - first, 0),
                            at=first - low if first < last else 0,
                            shape=tuple(p.shape) if gathers else None,
                        )
                    )
                at += p.numel()
            self.masters.append(part)
            self.ranges.append(holdfast.FlatTensor(tensor=part, ranges=ranges))
        self.inner = torch.optim.AdamW([{"params": [one]} for one in self.masters], lr=0.01)
        self.release()

    def gather(self) -> None:
        """Give the parameters their elements. Collective."""
        for parameters, master in zip(self._groups, self.masters, strict=True):
            for p, part in zip(
                parameters, self.divided(self.gathered(master), parameters), strict=True
            ):
                p.data = part.to(p.dtype).clone()

    def release(self) -> None:
        """Take the elements from parameters that are gathered when they are needed."""
        for p in self._shapes if self.gathers else ():
            p.data = torch.empty(0, dtype=p.dtype)

    def _flattened(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor of all elements, padded so that each rank has equally many."""
        flat = torch.cat([one.float().reshape(-1) for one in tensors])
        return nn.functional.pad(flat, (0, -flat.numel() % self.ranks))

    def step(self) -> None:
        """Update the parameters from gradients that are equal on all ranks."""
        for parameters, master in zip(self._groups, self.masters, strict=True):
            rank = dist.get_rank() if self.ranks > 1 else 0
            flat = self._flattened(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            )
            master.grad = flat.chunk(self.ranks)[rank].clone()
        self.inner.step()
        with torch.no_grad():
            for parameters, master in zip(self._groups, self.masters, strict=True):
                whole = self.gathered(master)
                for p, part in zip(parameters, self.divided(whole, parameters), strict=True):
                    p.copy_(part)
        self.release()

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks. Collective."""
        if self.ranks == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part)
        return torch.cat(parts)

    def divided(
        self, whole: torch.Tensor, parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """The elements of each parameter, in its shape."""
        shapes = [self._shapes[p] for p in parameters]
        parts = whole[: sum(shape.numel() for shape in shapes)].split([s.numel() for s in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def state(self, names: dict[nn.Parameter, str]) -> dict[str, torch.Tensor]:
        """Masters and states by parameter. Collective."""
        found: dict[str, torch.Tensor] = {}
        for parameters, master in zip(self._groups, self.masters, strict=True):
            held = {"master": master, **self.inner.state[master]}
            for key, value in held.items():
                if value.shape != master.shape:
                    found |= {f"{names[p]}.{key}": value.clone() for p in parameters}
                    continue
                parts = self.divided(self.gathered(value), parameters)
                for p, part in zip(parameters, parts, strict=True):
                    found[f"{names[p]}.{key}"] = part.clone()
        return found
