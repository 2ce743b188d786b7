"""Buffers whose form differs from the one that they have whenever the program starts.

A program that starts again has the buffers of its beginning, and a snapshot has those of its step:
observers get a shape with the first batch, a cache is registered in a forward pass, statistics are
dropped. So a snapshot records for each buffer whose form has changed what it was when the program
began, and a restore gives it the snapshot's form where the program began alike. Otherwise the
program itself is another one, and that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast._state.dtensors import is_dtensor, raw
from holdfast._state.extras import dtype_name, dtype_of_name
from holdfast_core.errors import InvalidJobError, LayoutMismatchError

ABSENT = "absent"
"""Form of a buffer that is not registered."""
NONE = "None"
"""Form of a buffer that is registered as None."""
_LAZY = "lazy"

ChangedBuffers = Mapping[str, Sequence[str]]
"""Name of each buffer whose form has changed → its form when the program began, its present form,
and the type of its device."""


class BufferForms:
    """Forms of a model's persistent buffers, compared with those that they have whenever the
    program starts: a process that stays goes from world to world with the same ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """Take the present forms."""
        self._first, self._modules = self._present()

    def first_form(self, path: str) -> str:
        """Form that the buffer at `path` has when the program starts."""
        return self._first.get(path, ABSENT)

    def _present(self) -> tuple[dict[str, str], frozenset[str]]:
        modules = frozenset(path for path, _ in self._model.named_modules())
        return dict(_buffer_forms(self._model)), modules

    def changed_forms(self) -> dict[str, tuple[str, str]]:
        """Map the path of each buffer whose form has changed to its first and its present form."""
        now = dict(_buffer_forms(self._model))
        return {
            path: (self.first_form(path), now.get(path, ABSENT))
            for path in self._first.keys() | now.keys()
            if self.first_form(path) != now.get(path, ABSENT)
        }

    def check(self) -> None:
        """Check that a restore could make the buffers that there are.

        Raises:
            InvalidJobError: when a buffer is in a module that the program adds while it trains, or
                had no shape at all when it began; the message names it.
        """
        for path in dict(_buffer_forms(self._model)):
            if self.first_form(path) == _LAZY:
                raise InvalidJobError(
                    f"{path} had no shape when the session restored: a program that starts again "
                    f"could not restore it; run a forward pass before holdfast.init"
                )
            if path.rpartition(".")[0] not in self._modules:
                raise InvalidJobError(
                    f"{path} is a buffer of a module that was not in the model when the session "
                    f"restored: a program that starts again could not restore it; add modules "
                    f"before session.restore()"
                )


def form_of(tensor: torch.Tensor) -> str:
    """Form of a tensor's part on this rank, such as `float32[4, 8]`."""
    if torch.nn.parameter.is_lazy(tensor):
        return _LAZY
    local = raw(tensor)
    return form(dtype_name(local.dtype), tuple(local.shape))


def form(dtype: str, shape: Sequence[int]) -> str:
    """Form of a tensor that is described."""
    return f"{dtype}{list(shape)}"


def _buffer_forms(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Path and form of each persistent buffer, those that are None included."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if key not in module._non_persistent_buffers_set:
                name = f"{path}.{key}" if path else key
                yield name, NONE if buffer is None else form_of(buffer)


def put_form(model: nn.Module, path: str, dtype: str, shape: Sequence[int], device: str) -> None:
    """Give the buffer at `path` this form, and arbitrary content; make it where there is none.

    Args:
        device: type of its device; empty for that of the tensors beside it.

    Raises:
        LayoutMismatchError: when the buffer is distributed.
    """
    head, _, key = path.rpartition(".")
    module = model.get_submodule(head)
    old = module._buffers.get(key)
    if old is not None and is_dtensor(old):
        raise LayoutMismatchError(f"{path} is distributed, and has another shape in the snapshot")
    beside = old if old is not None else _first_tensor(module, model)
    home = beside.device
    if device and device != home.type:
        home = torch.device(device)
    made = torch.empty(tuple(shape), dtype=dtype_of_name(dtype), device=home)
    if old is not None:
        old.data = made  # the same object: other modules, and the program, may refer to it
    elif key in module._buffers:
        module._buffers[key] = made
    else:
        vars(module).pop(key, None)  # a placeholder until then, as the program's own would be
        module.register_buffer(key, made)


def drop_buffer(model: nn.Module, path: str, how: str) -> None:
    """Remove the buffer at `path`: make it None, or unregister it where `how` is `ABSENT`."""
    head, _, key = path.rpartition(".")
    buffers: dict[str, Any] = model.get_submodule(head)._buffers
    buffers[key] = None
    if how == ABSENT:
        del buffers[key]


def _first_tensor(module: nn.Module, model: nn.Module) -> torch.Tensor:
    beside = (*module.parameters(), *module.buffers(), *model.parameters())
    return next(iter(beside))
