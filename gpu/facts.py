"""Print, as JSON, the machine that a session runs on: device, driver, memory, versions.

A process of its own: importing torch on a machine whose driver does not answer may hang.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

QUERY = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
QUERY_LIMIT_S = 20
PACKAGES = ("torch", "triton", "numpy", "safetensors", "grpcio", "xxhash", "dlrover", "pytest")


def facts() -> dict[str, object]:
    """What figures depend on, by name; of what cannot be found out, why."""
    found: dict[str, object] = {
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total,
        "locked_memory_bytes_max": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],  # -1: none
        "nvidia_smi": _nvidia_smi(),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def devices() -> dict[str, object]:
    """What torch knows of the CUDA devices, and how long its import took."""
    begin = time.perf_counter()
    import torch  # noqa: PLC0415  # the other facts are printed when this fails or hangs

    found: dict[str, object] = {"import_torch_s": round(time.perf_counter() - begin, 2)}
    found["cuda"] = torch.version.cuda or "absent"
    found["cuda_devices"] = torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"device_{index}"] = properties.name
        found[f"device_{index}_bytes"] = properties.total_memory
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
    print(json.dumps(devices()), flush=True)
