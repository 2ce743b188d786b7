"""Generates the SDK's module of the settings that a job gives its trainers, from the job's types.

The module is generated rather than built at run time, so that editors and type checkers show each
setting with its explanation.
"""

from __future__ import annotations

import textwrap
from enum import Enum

from msgspec import inspect

from holdfast_core.job.schema import SETTINGS
from holdfast_core.job.settings import JobSetting
from holdfast_operator.crd.schema import describe

_HEAD = '''\
"""Settings that a job gives its trainers.

Generated from core/holdfast_core/job by `make crds`; not edited by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
'''
_CLASS = '''

@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """Settings that a session takes from its job where the script leaves them at None. Each is
    equal on all ranks."""

'''


def settings_module() -> str:
    """Text of the module."""
    enums = {setting.type for setting in SETTINGS if issubclass(setting.type, Enum)}
    imports = sorted(f"from {enum.__module__} import {enum.__name__}\n" for enum in enums)
    head = _HEAD + ("\n" if imports else "") + "".join(imports)
    return head + _CLASS + "".join(map(_attribute, SETTINGS))


def _attribute(setting: JobSetting) -> str:
    """One attribute with its docstring."""
    default = setting.default
    otherwise = str(default) if isinstance(default, Enum) else repr(default)
    text = (
        f'"""{describe(inspect.type_info(setting.kind))} None takes the job\'s `{setting.path}`, '
        f'through `{setting.variable}`{"" if default is None else f", or {otherwise}"}."""'
    )
    lines = textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")
    return f"    {setting.name}: {setting.type.__name__} | None = None\n" + "\n".join(lines) + "\n"
