"""Imported before everything else of the SDK: says what to install where torch is missing."""

from __future__ import annotations

from holdfast_core.packages import PackageGroup, needing

with needing("import holdfast", PackageGroup.TRAINER):
    import torch  # noqa: F401  # looked for, not used
