"""Cost of a save on the training thread when the state is many small tensors.

`many_save_ms` is the call where one module holds all parameters; in `many_modules_ms`, as many
belong to the modules of a deep model. `many_read` is the least that any such call takes: to read
the address and the version counter of each tensor once; `many_cached` is what that takes if no
tensor has to be fetched from memory. Within the call, `many_moved` reads both to find out whether a
tensor has moved, `many_noted` notes the rest of what shows whether training overtakes the save, and
`many_extras` collects what is no tensor. On the saver's thread, `many_forms` is the search for
tensors that are read differently, before the copy, and `many_checked` compares with the notes,
after the copy.

All this is work of one thread, which waits for nothing. So it is measured in CPU time of that
thread, in which other work on the machine counts less.

    python -m benchmarks.many_tensors --out FILE
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

import holdfast
from benchmarks.floors import SHARED_MEMORY
from benchmarks.measure import Figure, Outcome, encode, milliseconds, ratio
from holdfast._session.protected import ProtectedSession
from holdfast._state.capture import LiveState
from holdfast._state.collect import collect_with, states_of
from holdfast._state.extras import encode_extras
from holdfast._state.in_place import InPlaceCheck
from holdfast.testing import FakeDaemon

TENSORS = 20_000
PER_PARAMETER = 4
"""Tensors per parameter: the parameter, its two moments and its count of steps."""

PER_BLOCK = 16
"""Parameters per `Block`."""

IN_CACHE = 250
"""Number of tensors that the processor's cache holds. It divides `TENSORS`."""

ELEMENTS = 64
REPETITIONS = 15
WARM_UPS = 3
WITHIN_S = 60.0

NOTES = {
    "many_read": "address and version of each tensor, read once",
    "many_cached": "as many of few tensors, which are in the processor's cache",
    "many_moved": "has a tensor moved? Reads both",
    "many_noted": "other notes that show whether training overtakes the save",
    "many_extras": "what is no tensor: flags, modes, random generators",
    "many_forms": "is one read differently? On the saver's thread",
    "many_checked": "comparison with them, on the saver's thread",
}
"""Part of a save → what it is."""


class Block(nn.Module):
    """A layer of a deep model, with sixteen parameters of up to 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkvo"})
        self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.0))


def measure() -> Outcome:
    """All rows."""
    one = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(TENSORS // PER_PARAMETER))
    rows = _measure(one)
    deep = nn.ModuleList(Block() for _ in range(TENSORS // PER_PARAMETER // PER_BLOCK))
    calls = _saves(deep, _stepped(deep), lambda *_: None)
    rows["many_modules_ms"] = milliseconds(
        calls, f"the call, with {len([*deep.modules()])} modules"
    )
    return Outcome(rows=rows)


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of `model` that has stepped once."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _saves(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[LiveState, int], None]
) -> list[float]:
    """Measure calls of `save`, in seconds. Each is followed by `after`, which gets the step."""
    saves: list[float] = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        session = holdfast.init(model=model, optimizer=optimizer, daemon=FakeDaemon(directory))
        assert isinstance(session, ProtectedSession)
        with session:
            session.prepare()
            for step in range(1, WARM_UPS + REPETITIONS + 1):
                began_s = time.thread_time()
                handle = session.save(step)
                saves.append(time.thread_time() - began_s)
                handle.committed.result(WITHIN_S)
                after(session.live, step)
    return saves[WARM_UPS:]


def _measure(model: nn.Module) -> dict[str, Figure]:
    """Rows of the call and of its parts."""
    optimizer = _stepped(model)
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*(parameter.detach() for parameter in model.parameters()), *states]
    cached = tensors[:IN_CACHE] * (len(tensors) // IN_CACHE)
    parts: dict[str, list[float]] = {key: [] for key in NOTES}

    def time_parts(live: LiveState, step: int) -> None:
        parts["many_read"].append(_timed(partial(_read, tensors)))
        parts["many_cached"].append(_timed(partial(_read, cached)))
        began_s = time.thread_time()
        versions = live.unmoved_versions()
        parts["many_moved"].append(time.thread_time() - began_s)
        parts["many_noted"].append(_timed(partial(InPlaceCheck, live.watched, versions)))
        parts["many_extras"].append(_timed(partial(_extras, live, step)))
        parts["many_forms"].append(_timed(InPlaceCheck(live.watched).check_forms))
        parts["many_checked"].append(_timed(InPlaceCheck(live.watched).check))

    saves = _saves(model, optimizer, time_parts)
    rows = {"many_save_ms": milliseconds(saves, f"the call, with {len(tensors)} small tensors")}
    for key, note in NOTES.items():
        rows[key] = ratio(parts[key][WARM_UPS:], saves, "× save()", note)
    return rows


def _timed(action: Callable[[], object]) -> float:
    """Seconds of CPU time that `action` took."""
    began_s = time.thread_time()
    action()
    return time.thread_time() - began_s


def _extras(live: LiveState, step: int) -> bytes:
    return encode_extras(collect_with(live, states_of(live, {}), step, live.of_tensors))


def _read(tensors: Sequence[torch.Tensor]) -> None:
    """Read the address and the version counter of each tensor."""
    for tensor in tensors:
        tensor.data_ptr()
        tensor._version  # noqa: B018


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_bytes(encode(measure()))


if __name__ == "__main__":
    main()
