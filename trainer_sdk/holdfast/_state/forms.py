"""Forms of a model's tensors that differ from those which the program has whenever it starts.

A program that starts again has the tensors of its beginning, and a snapshot has those of its step.
Buffers may differ: observers that get a shape with the first batch, a cache that is registered in a
forward pass, statistics that are dropped. So a snapshot records for each buffer whose form has
changed what it was when the program began, and a restore gives it the snapshot's form where the
program began alike. Otherwise the program itself is another one, and that is an error.

A parameter belongs to optimizers, and none of that could be recreated for one of another form: a
save that no restore could fit is refused when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast._state.dtensors import is_dtensor, raw
from holdfast._state.extras import dtype_name, dtype_named
from holdfast_core.errors import InvalidJobError, LayoutMismatchError

ABSENT = "absent"
"""Form of a buffer that is not registered."""
NONE = "None"
"""Form of a buffer that is registered as None."""
_LAZY = "lazy"

ChangedBuffers = Mapping[str, Sequence[str]]
"""Name of each buffer whose form has changed → its form when the program began, its present form,
and the type of its device."""


class ModelForms:
    """Forms of a model's parameters and persistent buffers, compared with those that the program
    has whenever it starts: a process that stays goes from world to world with the same ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters, self._buffers, self._modules = self._present()
        self._restores = False

    def begin(self) -> None:
        """Take the present forms, as the first restore finds them. Later restores find what the
        program has changed since."""
        if not self._restores:
            self._parameters, self._buffers, self._modules = self._present()
            self._restores = True

    def begun(self, path: str) -> str:
        """Form that the buffer at `path` has when the program starts."""
        return self._buffers.get(path, ABSENT)

    def _present(self) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
        modules = frozenset(path for path, _ in self._model.named_modules())
        return _parameter_forms(self._model), dict(_buffer_forms(self._model)), modules

    def changed_buffers(self) -> dict[str, tuple[str, str]]:
        """Map the path of each buffer whose form has changed to its first and its present form."""
        now = dict(_buffer_forms(self._model))
        return {
            path: (self.begun(path), now.get(path, ABSENT))
            for path in self._buffers.keys() | now.keys()
            if self.begun(path) != now.get(path, ABSENT)
        }

    def check(self) -> None:
        """Check that a restore could give the model the tensors that it has.

        Raises:
            InvalidJobError: when a parameter has another form than when the program began, or came
                or went, or a buffer is in a module that came; the message names it.
        """
        for path in (path for path, _ in _buffer_forms(self._model)):
            if path.rpartition(".")[0] not in self._modules:
                raise InvalidJobError(
                    f"{path} is a buffer of a module that was not in the model when the program "
                    f"began to train, so a restart could not restore it; give the model all its "
                    f"modules before holdfast.init"
                )
        now = _parameter_forms(self._model)
        for path in (*now, *self._parameters):
            first, form_now = self._parameters.get(path, ABSENT), now.get(path, ABSENT)
            if first == form_now:
                continue
            how = f"is {form_now}, and was {first}"
            if first == _LAZY:
                how = "had no shape"
            elif ABSENT in (first, form_now):
                how = "was not in the model" if first == ABSENT else "is gone, and was in the model"
            raise InvalidJobError(
                f"{path} {how} when the program began to train, so a restart could not restore it; "
                f"give the model all its parameters, in their shapes, before holdfast.init (of "
                f"lazy modules by a forward pass)"
            )


def _parameter_forms(model: nn.Module) -> dict[str, str]:
    return {path: form_of(one) for path, one in model.named_parameters()}


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
    made = torch.empty(tuple(shape), dtype=dtype_named(dtype), device=home)
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
