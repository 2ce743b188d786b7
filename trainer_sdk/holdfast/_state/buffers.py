"""Buffers whose form has changed since the program started.

A program that starts again has the buffers of its start, but a snapshot has those of its step: an
observer gets a shape with the first batch, a cache is registered in a forward pass, statistics are
dropped. So for each buffer whose form has changed, a snapshot records its form when the program
started. If the present program started with the same form, a restore gives the buffer the form of
the snapshot. Otherwise it is a different program, and the restore fails.
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
"""Name of each buffer whose form has changed → its form when the program started, its present form,
and the type of its device."""


class BufferForms:
    """The forms of a model's persistent buffers, compared with their forms when the program
    started. A process that stays uses the same object in all of its worlds."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """Take the present forms as those of the program's start."""
        self._first, self._modules = self._present()

    def first_form(self, path: str) -> str:
        """Return the form of the buffer at `path` when the program started."""
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
        """Check that a restore could create the present buffers.

        Raises:
            InvalidJobError: a buffer is in a module that the program added during training, or had
                no shape when the program started. The message names it.
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
    """Return the form of a tensor's part on this rank, such as `float32[4, 8]`."""
    if torch.nn.parameter.is_lazy(tensor):
        return _LAZY
    local = raw(tensor)
    return form(dtype_name(local.dtype), tuple(local.shape))


def form(dtype: str, shape: Sequence[int]) -> str:
    """Return the form of a tensor with this dtype and shape."""
    return f"{dtype}{list(shape)}"


def _buffer_forms(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path and the form of each persistent buffer, including buffers that are None."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if key not in module._non_persistent_buffers_set:
                name = f"{path}.{key}" if path else key
                yield name, NONE if buffer is None else form_of(buffer)


def put_form(model: nn.Module, path: str, dtype: str, shape: Sequence[int], device: str) -> None:
    """Give the buffer at `path` this form, with arbitrary content. Register it if it does not
    exist.

    Args:
        device: type of its device; empty for the device of its module's tensors.

    Raises:
        LayoutMismatchError: the buffer is distributed.
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
        old.data = made  # Keep the object: other modules and the program may refer to it.
    elif key in module._buffers:
        module._buffers[key] = made
    else:
        vars(module).pop(key, None)  # The program may have a placeholder in its place.
        module.register_buffer(key, made)


def drop_buffer(model: nn.Module, path: str, how: str) -> None:
    """Set the buffer at `path` to None or, if `how` is `ABSENT`, unregister it."""
    head, _, key = path.rpartition(".")
    buffers: dict[str, Any] = model.get_submodule(head)._buffers
    buffers[key] = None
    if how == ABSENT:
        del buffers[key]


def _first_tensor(module: nn.Module, model: nn.Module) -> torch.Tensor:
    beside = (*module.parameters(), *module.buffers(), *model.parameters())
    return next(iter(beside))
