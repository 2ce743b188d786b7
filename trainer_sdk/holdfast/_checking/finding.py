"""The search for state that lives beside a session: what a training process holds, and its session
does not capture.

A script that forgets to name its scheduler trains on after a restart as if nothing had happened.
The session cannot know of the scheduler; but the process that is checked holds it, in a variable of
the script or in an attribute of a framework's trainer. So the variables of the script and of all
functions that run are searched, breadth first, and what is found is named by the shortest way to
it. What no variable leads to is found by the garbage collector, if it can be.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from holdfast._checking.digesting import digest_of_value
from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful
from holdfast._state.nested import is_optimizer, with_nested
from holdfast_core.restart_check import Beside

_OBJECTS_MAX = 200_000
_ITEMS_MAX = 1_000
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.Tensor, np.ndarray)
_OURS = "holdfast."
_COLLECTED = (LRScheduler, torch.optim.Optimizer)
"""Classes whose objects are looked for wherever they are."""
_STARTERS = ("runpy", "multiprocessing")
"""Packages whose functions have started the script."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("scheduler", (LRScheduler,)),
    ("gradient scaler", (torch.amp.GradScaler,)),
    ("generator", _GENERATORS),
    ("data loader", (DataLoader,)),
    ("sampler", (Sampler,)),
    ("module", (nn.Module,)),
)


def find_beside(
    live: LiveState, stateful: Mapping[str, Stateful], frame: FrameType
) -> tuple[Beside, ...]:
    """Find the objects with a state of their own that a session does not capture.

    Args:
        live, stateful: what the session captures.
        frame: frame of the training thread whose callers' variables are searched.
    """
    known = _known(live, stateful)
    found: dict[int, tuple[str, str, Any]] = {}
    for thing, name in _reachable(_roots(frame)):
        kind = _kind_of(thing)
        if kind and id(thing) not in known and not _is_global(thing):
            found.setdefault(id(thing), (kind, name, thing))
    if _unnamed(known | found.keys()):
        gc.collect()  # What nothing refers to any more is no state.
        for thing in _unnamed(known | found.keys()):
            found[id(thing)] = (_kind_of(thing), f"of type {type(thing).__name__}", thing)
    beside = [*_buffers(live.model)]
    tensors = {id(tensor) for tensor in chain(live.model.parameters(), live.model.buffers())}
    parts = {
        id(part)
        for kind, _, thing in found.values()
        if kind == "module"
        for part in islice(thing.modules(), 1, None)
    }
    parts |= {
        id(getattr(thing, part, None))
        for kind, _, thing in found.values()
        if kind in ("data loader", "sampler")
        for part in ("sampler", "batch_sampler")
    }
    for kind, name, thing in found.values():
        if kind == "sampler" and id(thing) in parts:
            continue
        if kind == "data loader" and id(thing.sampler) in known:
            continue
        if kind == "module" and (id(thing) in parts or not _own_tensors(thing, tensors)):
            continue
        if kind == "optimizer" and any(id(one) in known for one in with_nested(thing)):
            continue  # It wraps one of the session's.
        beside.append(
            Beside(
                kind=kind,
                name=name,
                type=type(thing).__qualname__,
                digest=_digest(kind, thing, tensors),
            )
        )
    return tuple(beside)


def _unnamed(named: set[int]) -> list[Any]:
    """Optimizers and schedulers of this process whose `id` is not in `named`."""
    # Asked of the type, because `__class__` of an object may be a property that raises.
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), _COLLECTED) and id(thing) not in named
    ]


def _known(live: LiveState, stateful: Mapping[str, Stateful]) -> set[int]:
    """`id`s of what the session captures."""
    known = {id(module) for module in live.model.modules()}
    for optimizer in live.optimizers:
        known |= {id(one) for one in with_nested(optimizer)}
    for item in stateful.values():
        known.add(id(item))
        known |= {id(held) for held in getattr(item, "__dict__", {}).values()}
    return known


def _kind_of(thing: object) -> str:
    """Kind of an object with a state of its own; empty for all others."""
    for kind, types in _KINDS:
        if issubclass(type(thing), types):
            return kind
    try:
        return "optimizer" if is_optimizer(thing) else ""
    except Exception:  # Attributes of an object of the script's may raise anything.
        return ""


def _is_global(thing: object) -> bool:
    """Whether a session captures it as a generator of the whole process, or it draws from the
    operating system."""
    if isinstance(thing, random.SystemRandom):
        return True
    ours = (torch.default_generator, getattr(random, "_inst", None), np.random.mtrand._rand)
    return any(thing is one for one in (*ours, *torch.cuda.default_generators))


def _own_tensors(module: nn.Module, known: set[int]) -> list[torch.Tensor]:
    """Parameters and buffers of `module` that are not of the session's model."""
    return [t for t in chain(module.parameters(), module.buffers()) if id(t) not in known]


def _buffers(model: nn.Module) -> Iterator[Beside]:
    """Yield the buffers of the model that are not persistent."""
    for path, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None:
                name = f"{path}.{key}" if path else key
                yield Beside(
                    kind="buffer",
                    name=name,
                    type="not persistent",
                    digest=digest_of_value(buffer),
                )


def _digest(kind: str, thing: Any, known: set[int]) -> str:
    """Digest the state of an object; empty if it has none to compare."""
    if kind == "generator":
        return digest_of_value(thing)
    if kind == "module":
        return digest_of_value(_own_tensors(thing, known))
    if kind in ("data loader", "sampler"):
        return ""  # What counts is the data that comes of it.
    try:
        return digest_of_value(thing.state_dict())
    except Exception:  # An object of the script's may raise anything.
        return ""


# --- the variables of the process -----------------------------------------------------------------


def _roots(frame: FrameType) -> list[tuple[object, str]]:
    """The variables of the script's module and, from the outermost on, of the functions that
    run."""
    main = vars(sys.modules["__main__"])
    roots = [(value, name) for name, value in main.items() if not name.startswith("__")]
    frames = []
    walked: FrameType | None = frame
    while walked is not None:
        frames.append(walked)
        walked = walked.f_back
    for one in reversed(frames):
        module = str(one.f_globals.get("__name__", ""))
        if one.f_globals is main and one.f_code.co_name == "<module>":
            continue
        if f"{module}.".startswith(_OURS) or module.split(".", maxsplit=1)[0] in _STARTERS:
            continue
        where = one.f_code.co_name
        roots += [(value, f"{name} of {where}()") for name, value in one.f_locals.items()]
    return roots


def _reachable(roots: list[tuple[object, str]]) -> Iterator[tuple[object, str]]:
    """Yield each object that variables lead to, with its name, the nearest first."""
    seen: set[int] = set()
    kept: list[object] = []  # So that no `id` is used twice.
    queue = deque(roots)
    while queue and len(seen) < _OBJECTS_MAX:
        thing, name = queue.popleft()
        if id(thing) in seen or isinstance(thing, _PLAIN):
            continue
        if f"{type(thing).__module__}.".startswith(_OURS) and not _kind_of(thing):
            continue
        seen.add(id(thing))
        kept.append(thing)
        yield thing, name
        queue.extend(_parts_of(thing, name))


def _parts_of(thing: object, name: str) -> Iterator[tuple[object, str]]:
    head, of, where = name.partition(" of ")
    if isinstance(thing, ModuleType):
        if _is_of_script(thing):
            yield from ((v, f"{head}.{k}{of}{where}") for k, v in list(vars(thing).items()))
    elif isinstance(thing, Mapping):
        if type(thing).__module__ in ("builtins", "collections"):
            items = islice(list(thing.items()), _ITEMS_MAX)
            yield from ((v, f"{head}[{k!r}]{of}{where}") for k, v in items if _is_plain_key(k))
    elif isinstance(thing, list | tuple | deque):
        parts = enumerate(islice(list(thing), _ITEMS_MAX))
        yield from ((v, f"{head}[{i}]{of}{where}") for i, v in parts)
    elif isinstance(thing, MethodType):
        yield thing.__self__, f"{head}{of}{where}"
    elif isinstance(thing, FunctionType):
        names = thing.__code__.co_freevars
        for key, cell in zip(names, thing.__closure__ or (), strict=False):
            try:
                yield cell.cell_contents, f"{key} of {thing.__name__}()"
            except ValueError:  # It is not set yet.
                continue
    elif isinstance(held := getattr(thing, "__dict__", None), dict):
        skipped = ("_parameters", "_buffers") if isinstance(thing, nn.Module) else ()
        for key, value in list(held.items()):
            if key == "_modules" and isinstance(thing, nn.Module):
                yield from ((v, f"{head}.{k}{of}{where}") for k, v in value.items())
            elif key not in skipped:
                yield value, f"{head}.{key}{of}{where}"


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str | int)


def _is_of_script(module: ModuleType) -> bool:
    """Whether a module lies in the script's folder, or below it."""
    file, folder = getattr(module, "__file__", None), sys.path[0]
    if not file or "site-packages" in file:
        return False
    return bool(folder) and Path(folder) in Path(file).parents
