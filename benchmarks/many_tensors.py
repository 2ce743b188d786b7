"""Cost of a save on the training thread when the state is many small tensors.

`many_save_ms` is the call. `many_read` is the least that any such call takes: to read the address
and the version counter of each tensor once. Within the call, `many_moved` reads both to find out
whether a tensor has moved, and `many_noted` notes the rest of what shows whether training overtakes
the save. On the saver's thread, `many_forms` is the search for tensors that are read differently,
before the copy, and `many_checked` compares with the notes, after the copy.

    python -m benchmarks.many_tensors --out FILE
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

import holdfast
from benchmarks.floors import SHARED_MEMORY
from benchmarks.measure import Figure, Outcome, encode, milliseconds, ratio, timed
from holdfast._session.protected import ProtectedSession
from holdfast._state.in_place import InPlaceCheck
from holdfast.testing import FakeDaemon

TENSORS = 20_000
PER_PARAMETER = 4
"""Tensors per parameter: the parameter, its two moments and its count of steps."""

ELEMENTS = 64
REPETITIONS = 15
WARM_UPS = 3
WITHIN_S = 60.0


def measure() -> Outcome:
    """All rows."""
    parameters = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(TENSORS // PER_PARAMETER)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*(parameter.detach() for parameter in parameters), *states]
    saves: list[float] = []
    read: list[float] = []
    moved: list[float] = []
    noted: list[float] = []
    forms: list[float] = []
    checked: list[float] = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        session = holdfast.init(
            model=nn.ParameterList(parameters), optimizer=optimizer, daemon=FakeDaemon(directory)
        )
        assert isinstance(session, ProtectedSession)
        with session:
            session.prepare()
            for step in range(1, WARM_UPS + REPETITIONS + 1):
                began_s = time.perf_counter()
                handle = session.save(step)
                saves.append(time.perf_counter() - began_s)
                handle.committed.result(WITHIN_S)
                read.append(timed(partial(_read, tensors)))
                live, began_s = session.live, time.perf_counter()
                versions = live.unmoved_versions()
                moved.append(time.perf_counter() - began_s)
                noted.append(timed(partial(InPlaceCheck, live.watched, versions)))
                forms.append(timed(InPlaceCheck(live.watched).check_forms))
                checked.append(timed(InPlaceCheck(live.watched).check))
    return Outcome(rows=_rows(saves, read, moved, noted, forms, checked))


def _read(tensors: Sequence[torch.Tensor]) -> None:
    """Read the address and the version counter of each tensor."""
    for tensor in tensors:
        tensor.data_ptr()
        tensor._version  # noqa: B018


def _rows(
    saves: Sequence[float],
    read: Sequence[float],
    moved: Sequence[float],
    noted: Sequence[float],
    forms: Sequence[float],
    checked: Sequence[float],
) -> dict[str, Figure]:
    def of_save(seconds: Sequence[float], note: str) -> Figure:
        return ratio(seconds[WARM_UPS:], saves[WARM_UPS:], "× save()", note)

    return {
        "many_save_ms": milliseconds(saves[WARM_UPS:], f"the call, with {TENSORS} small tensors"),
        "many_read": of_save(read, "address and version of each tensor, read once"),
        "many_moved": of_save(moved, "has a tensor moved? Reads both"),
        "many_noted": of_save(noted, "other notes that show whether training overtakes the save"),
        "many_forms": of_save(forms, "is one read differently? On the saver's thread"),
        "many_checked": of_save(checked, "comparison with them, on the saver's thread"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_bytes(encode(measure()))


if __name__ == "__main__":
    main()
