"""Tokens that this rank routed, added up on the device of their counts.

The training thread should not wait for a count on a device: it is added to a sum on that device,
behind the work queued there. All sums are fetched at once when numbers are needed: by the saver's
thread, and after a recovery by the capacities of a step (`_capture.capacity`).

This module must not read a number from a tensor outside `read`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast_core.snapshots.units import UnitKey, UnitKind


class Tokens:
    """Sums of counts, by layer and expert.

    Args:
        parts: parts of one in which they are added up; 1 for counts that are whole numbers.
    """

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._counts: dict[int, list[int]] = {}
        self._assignments: dict[int, int] = {}
        self._sums: dict[tuple[int, bool, int, torch.device], torch.Tensor] = {}
        """Layer, whether its assignments are the sum of its counts, experts, device → int64
        [experts]."""

    def add(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        """Add counts; see `Session.count_tokens`."""
        if isinstance(counts, torch.Tensor):
            with torch.no_grad():
                flat = counts.reshape(-1)
                if self._parts > 1:
                    flat = (flat.to(torch.float64) * self._parts).round()
                key = (layer, assignments is None, flat.numel(), flat.device)
                if key in self._sums:
                    self._sums[key] += flat.to(torch.int64)
                else:
                    self._sums[key] = flat.to(torch.int64, copy=True)
        else:
            numbers = [round(n * self._parts) for n in counts]
            self._add(layer, numbers, assigns=assignments is None)
        if assignments is not None:
            self._assignments[layer] = self._assignments.get(layer, 0) + assignments

    def drop(self, layer: int) -> None:
        """Forget what was added for a layer."""
        self._counts.pop(layer, None)
        self._assignments.pop(layer, None)
        self._sums = {key: sums for key, sums in self._sums.items() if key[0] != layer}

    @property
    def layers(self) -> frozenset[int]:
        """Layers for which anything was added."""
        return frozenset([*self._counts, *(key[0] for key in self._sums)])

    def empty_copy(self) -> Tokens:
        """Sums of the same kind to which nothing was added."""
        return Tokens(self._parts)

    def read(self) -> tuple[dict[UnitKey, int], dict[int, int]]:
        """Read the sums; waits once for each device.

        Returns:
            (expert → tokens that it processed, layer → tokens times the experts that each was sent
            to, dropped ones included).
        """
        for (layer, assigns, _, _), numbers in self._fetch():
            self._add(layer, numbers, assigns=assigns)
        self._sums = {}
        counts = {
            UnitKey(layer, UnitKind.EXPERT, expert): count
            for layer, numbers in self._counts.items()
            for expert, count in enumerate(numbers)
        }
        return counts, self._assignments

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return bool(self._counts or self._sums)

    def _add(self, layer: int, numbers: Sequence[int], *, assigns: bool) -> None:
        known = self._counts.setdefault(layer, [])
        known += [0] * (len(numbers) - len(known))
        for expert, count in enumerate(numbers):
            known[expert] += count
        if assigns:
            self._assignments[layer] = self._assignments.get(layer, 0) + sum(numbers)

    def _fetch(self) -> list[tuple[tuple[int, bool, int, torch.device], list[int]]]:
        """Fetch the sums as numbers, in one transfer for each device."""
        found = []
        for device in {key[-1] for key in self._sums}:
            here = [(key, sums) for key, sums in self._sums.items() if key[-1] == device]
            numbers: list[int] = torch.cat([sums for _, sums in here]).tolist()
            at = 0
            for key, sums in here:
                found.append((key, numbers[at : at + sums.numel()]))
                at += sums.numel()
        return found
