"""The kind of a rank: the device and the software on which the bits of its results depend.

Only ranks of one kind repeat each other's work. A rank of which something is not known has none.
"""

from __future__ import annotations

import logging
import os
import platform
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast._environment import read_numeric_variables

_log = logging.getLogger("holdfast")
_OF_PROCESSORS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_OF_ARM = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_LIBRARIES = ("nvidia-cublas", "nvidia-cudnn", "rocm-")
"""Beginnings of the names of packages whose versions torch does not state."""


def kind_of_rank() -> int | None:
    """Digest the kind of this rank. None if something of it is not known, and if its algorithms are
    chosen by their speed, so that two ranks of one kind need not choose the same ones."""
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        return None
    try:
        text = repr([_processor(), _software(), _flags(), _device()])
    except Exception as error:  # torch lacks it, or refuses to mix two generations of its flags
        _log.info("no other rank repeats the work of this one: its kind is not known: %s", error)
        return None
    _log.debug("the kind of this rank: %s", text)
    return xxhash.xxh3_64_intdigest(text.encode())


def _processor() -> object:
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    found = [
        line for line in lines if line.partition(":")[0].strip() in (*_OF_PROCESSORS, *_OF_ARM)
    ]
    if not found:
        raise LookupError("/proc/cpuinfo does not state the processor")
    threads = (torch.get_num_threads(), len(os.sched_getaffinity(0)))
    return platform.machine(), found, torch.backends.cpu.get_cpu_capability(), threads


def _software() -> object:
    built = torch.__config__.show()
    return torch.__version__, np.__version__, built, read_numeric_variables()


def _flags() -> object:
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
    )


@cache
def _libraries() -> object:
    named = {str(one.metadata["Name"]).lower(): one.version for one in distributions()}
    return sorted(each for each in named.items() if each[0].startswith(_LIBRARIES))


def _device() -> object:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        other = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        if other is not None and other.type != "cuda":
            raise LookupError(f"nothing is known of devices of type {other.type}")
        return None
    (driver,) = [path.read_text().splitlines()[0] for path in _DRIVERS if path.exists()]
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    products: Any = torch.backends.cuda.matmul
    return (
        (found.name, found.major, found.minor, found.multi_processor_count, found.total_memory),
        (torch.version.cuda, torch.version.hip, torch.backends.cudnn.version()),
        (driver, _libraries()),
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        getattr(products, "allow_fp16_accumulation", None),
        str(torch.backends.cuda.preferred_blas_library()),
    )
