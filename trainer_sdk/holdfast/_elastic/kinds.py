"""The kind of a rank: the device and the software on which the bits of its results depend.

Only ranks of one kind repeat each other's work. What is not known of a kind makes it another one.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast._environment import read_numeric_variables

_log = logging.getLogger("holdfast")
_OF_PROCESSORS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")


def kind_of_rank() -> int | None:
    """Digest the kind of this rank. None if its algorithms are chosen by their speed, so that two
    ranks of one kind need not choose the same ones."""
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        return None
    text = repr([_try(each) for each in (_processor, _software, _flags, _device)])
    _log.debug("the kind of this rank: %s", text)
    return xxhash.xxh3_64_intdigest(text.encode())


def _try(read: Callable[[], object]) -> object:
    try:
        return read()
    except Exception as error:  # torch lacks it, or refuses to mix two generations of its flags
        return f"{read.__name__}: {error}"


def _processor() -> object:
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    found = [line for line in lines if line.partition(":")[0].strip() in _OF_PROCESSORS]
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


def _device() -> object:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    products: Any = torch.backends.cuda.matmul
    cuda: Any = torch._C
    return (
        (found.name, found.major, found.minor, found.multi_processor_count, found.total_memory),
        (torch.version.cuda, torch.version.hip, torch.backends.cudnn.version()),
        cuda._cuda_getDriverVersion() if hasattr(cuda, "_cuda_getDriverVersion") else None,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        str(torch.backends.cuda.preferred_blas_library()),
    )
