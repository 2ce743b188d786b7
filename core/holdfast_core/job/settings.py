"""Fields of a job that its trainers get as settings.

A field becomes one by `extra={"setting": True}` in its `Meta`: pods get its value in an environment
variable, and `holdfast.Settings` has an attribute of the same name, with which a script can
override it. Everything else follows: a job whose pods another controller makes, which get no
variables, cannot set it, and its value cannot change while pods run (`holdfast_core.job.rules`). No
I/O: the SDK reads the environment.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

import msgspec

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import bare_type, metas, reword, suggest


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetting:
    """One such field: a number, a text, true or false, or one word of an enum."""

    path: str
    """Path below `spec`, such as `snapshot.compareReplicasEvery`."""
    attributes: tuple[str, ...]
    """Attributes that lead to it from the spec."""
    kind: Any
    """Annotated type, with limits and description; without None."""
    default: Any
    """Value without a variable; None where the document may leave the field out."""

    @property
    def name(self) -> str:
        """Name of the setting, which no other has."""
        return self.attributes[-1]

    @property
    def type(self) -> type[Any]:
        """Type of the value."""
        bare: type[Any] = bare_type(self.kind)
        return bare

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"HOLDFAST_{self.name.upper()}"

    def value_in(self, spec: object) -> Any:
        """Value of the field in a job's `Spec`."""
        return reduce(getattr, self.attributes, spec)

    def to_text(self, value: Any) -> str:
        """Value of the variable; `read` makes the same of it."""
        if isinstance(value, Enum):
            return str(value.value)
        return str(int(value)) if isinstance(value, bool) else str(value)

    def read(self, text: str) -> Any:
        """Value that the variable gives by `text`.

        Raises:
            InvalidJobError: it gives none, or one out of the field's limits.
        """
        return self._checked(text, self.variable, strict=False)

    def check(self, value: object) -> None:
        """Check a value that a script gives.

        Raises:
            InvalidJobError: it is none of this type, or out of the field's limits.
        """
        self._checked(value, self.name, strict=True)

    def _checked(self, value: object, name: str, *, strict: bool) -> Any:
        try:
            return msgspec.convert(value, self.kind, strict=strict)
        except msgspec.ValidationError as error:
            raise InvalidJobError(
                f"{name}={value!r}: {reword(error)}; {suggest(self.kind)}"
            ) from None


def settings_of(kind: type[msgspec.Struct]) -> tuple[JobSetting, ...]:
    """Settings in a part of a job, such as its `Spec`, in their order there."""
    settings = tuple(_settings(kind, (), ""))
    names = [setting.name for setting in settings]
    assert len(set(names)) == len(names), "two settings have one name"
    return settings


def variables_of(settings: tuple[JobSetting, ...], spec: object) -> dict[str, str]:
    """Environment variables for those whose value in `spec` is not the default: the job's image may
    be too old to know the others."""
    values = ((setting, setting.value_in(spec)) for setting in settings)
    return {
        setting.variable: setting.to_text(value)
        for setting, value in values
        if value != setting.default
    }


def read_variables(
    settings: tuple[JobSetting, ...], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Value of each setting by its name, from the environment `variables`.

    Raises:
        InvalidJobError: a variable cannot be read.
    """
    return {
        setting.name: setting.read(variables[setting.variable])
        if setting.variable in variables
        else setting.default
        for setting in settings
    }


def _settings(
    kind: type[msgspec.Struct], attributes: tuple[str, ...], path: str
) -> Iterator[JobSetting]:
    for field in msgspec.structs.fields(kind):
        here, there = f"{path}{field.encode_name}", (*attributes, field.name)
        if any((meta.extra or {}).get("setting") for meta in metas(field.type)):
            union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
            given = next(filter(metas, typing.get_args(field.type))) if union else field.type
            setting = JobSetting(path=here, attributes=there, kind=given, default=field.default)
            assert issubclass(setting.type, bool | int | float | str), f"{here}: {setting.type}"
            assert not field.required, f"{here}: a setting has a default"
            yield setting
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _settings(field.type, there, f"{here}.")
