"""The state of a program when it starts, and the differences that a restore must apply to it.

A program that starts again has its model as it builds it: with the layers that it freezes at the
start, in the modes in which it starts, and without the modules that it adds later. So a snapshot
records how the model differs from that: which parameters were frozen or unfrozen since, and which
modules are in another mode. A restore applies these differences. Saves refuse differences that a
restore could not apply: parameters that have appeared, vanished or changed their form.

The mode of a module decides how a step changes buffers (BatchNorm), and whether it draws random
numbers (Dropout). A snapshot records the modes at the time of the save. But if the whole model is
in another mode than in the last step, as in an evaluation, it records the modes of that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from holdfast._state.buffers import BufferForms
from holdfast._state.conventions import plain_name
from holdfast._state.dtensors import raw
from holdfast._state.groups import ParamGroups
from holdfast._state.own_values import OwnValues
from holdfast_core.snapshots.names import TensorName

_trains = attrgetter("requires_grad")
_mode = attrgetter("training")

_Form = tuple[tuple[int, ...] | None, torch.dtype]


class ProgramStart:
    """The state of a program at construction, or at the first restore. Snapshots describe the
    differences from it. A process that stays uses the same object in all of its worlds.

    Args:
        gathered: `id` of each parameter that has its elements only when they are needed.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], gathered: Container[int] = ()
    ) -> None:
        self._model, self._gathered = model, gathered
        self.groups = ParamGroups(optimizers)
        self.values = OwnValues(optimizers, model)
        """Values that optimizers keep in attributes of their own."""
        self.forms = BufferForms(model)
        """Forms of buffers."""
        self._restores = False
        self._stepped: tuple[bool, list[nn.Module], list[bool]] | None = None
        """The mode of the model in the newest step, its modules, and their modes."""
        self._note()

    def _note(self) -> None:
        self._forms = self._present_forms()
        self._trained = {
            name: p.requires_grad for name, p in _parameters_by_name(self._model).items()
        }
        self._paths: list[str] = []
        self._modules: list[nn.Module] = []
        self._remember({})

    def _remember(self, names: Mapping[int, str]) -> None:
        """Remember the parameters and modules, so that no save has to walk through them."""
        parameters = _parameters_by_name(self._model)
        self._parameters = [*parameters.values()]
        self._names = [names.get(id(one), name) for name, one in parameters.items()]
        self._first = [self._trained.get(name, True) for name in parameters]
        modules = [*self._model.modules()]
        if self._modules != modules:
            # Encode the paths as texts of names, because paths may contain any character.
            named = self._model.named_modules()
            self._paths = [str(TensorName(plain_name(path))) for path, _ in named]
            self._modules = modules

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the model that the program trains when it starts."""
        return [
            p
            for name, p in _parameters_by_name(self._model).items()
            if self._trained.get(name, True)
        ]

    def begin(self) -> None:
        """Take the present state as that of the program's start. Only the first call has an effect:
        the first restore makes it, and before later ones the program has changed its state."""
        if not self._restores:
            self.groups.begin()
            self.values.begin()
            self.forms.begin()
            self._note()
            self._restores = True

    def follow(self, replaced: Mapping[int, torch.Tensor]) -> None:
        """Note that the model was built again, as a program would that starts in a world of this
        size.

        Args:
            replaced: `id` of each parameter of the old model → parameter of the new one.
        """
        self.groups.follow(replaced)
        self.forms.begin()
        self._forms = self._present_forms()

    def look(self, names: Mapping[int, str]) -> str:
        """Inspect the model again, because its tensors have changed. Return why a program that
        starts again could not restore it; empty if it could.

        Args:
            names: `id` of each parameter → its name.
        """
        self._remember(names)
        forms = self._present_forms()
        for name, (shape, dtype) in forms.items():
            first, then = self._forms.get(name, (None, None))
            if then is None:
                return (
                    f"the model has {name} {list(shape or ())}, and had not when the session "
                    f"restored: a program that starts again could not restore it; add modules, "
                    f"parametrizations and pruning masks before session.restore()"
                )
            if first is None:
                return (
                    f"{name} had no shape when the session restored: a program that starts again "
                    f"could not restore it; run a forward pass before holdfast.init"
                )
            if (first, then) != (shape, dtype):
                return (
                    f"{name} is {dtype}{list(shape or ())}, and was {then}{list(first)} when the "
                    f"session restored: a program that starts again could not restore it; change "
                    f"it before session.restore()"
                )
        gone = next((name for name in self._forms if name not in forms), None)
        if gone is not None:
            return (
                f"the model no longer has {gone}, which it had when the session restored: a "
                f"program that starts again could not restore it; remove it before "
                f"session.restore()"
            )
        return ""

    def _present_forms(self) -> dict[str, _Form]:
        """Return the shape on this rank and the dtype of each parameter that is captured. The shape
        is None if the parameter has none yet."""
        forms: dict[str, _Form] = {}
        for name, one in _parameters_by_name(self._model).items():
            if id(one) in self._gathered:
                continue
            local = raw(one)
            shape = None if nn.parameter.is_lazy(local) else tuple(local.shape)
            forms[name] = (shape, local.dtype)
        return forms

    # --- differences ------------------------------------------------------------------------------

    def note_modes(self) -> None:
        """Note the modes of the modules in a step."""
        self._stepped = self._model.training, self._modules, [*map(_mode, self._modules)]

    def differences(self) -> dict[str, Any]:
        """Describe how the model differs from the program's start, and the modes of its modules."""
        with torch._C.DisableTorchFunctionSubclass():  # see `inventory.versions_of`
            trains = [*map(_trains, self._parameters)]
        changed: dict[str, bool] = {}
        if trains != self._first:
            rows = zip(self._names, trains, self._first, strict=True)
            changed = {name: now for name, now, before in rows if now != before}
        modes = [*map(_mode, self._modules)]
        mode = self._model.training
        newest = self._stepped
        if newest is not None and newest[1] is self._modules and newest[0] != mode:
            mode, _, modes = newest
        others: list[str] = []
        if modes.count(mode) != len(modes):
            others = [path for path, one in zip(self._paths, modes, strict=True) if one != mode]
        return {"trains": changed, "mode": mode, "other_mode": others}

    def put_back_trains(self, saved: Mapping[str, Any]) -> None:
        """Freeze and unfreeze parameters: as the snapshot says, or else as at the start."""
        changed = saved["trains"]
        for name, one, first in zip(self._names, self._parameters, self._first, strict=True):
            wanted = changed.get(name, first)
            if one.requires_grad != wanted:
                one.requires_grad_(wanted)

    def put_back_modes(self, saved: Mapping[str, Any]) -> None:
        """Set the modes of modules to those of a snapshot."""
        others, mode = set(saved["other_mode"]), saved["mode"]
        for path, module in zip(self._paths, self._modules, strict=True):
            module.training = mode != (path in others)


def _parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    named = list(model.named_parameters())
    counts = Counter(plain_name(path) for path, _ in named)
    return {path if counts[plain_name(path)] > 1 else plain_name(path): one for path, one in named}
