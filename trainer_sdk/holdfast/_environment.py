"""The environment variables of the SDK. No other module of it reads or writes the environment.

torchrun sets the rank, and the runner of the job sets the daemon's socket. Explicit arguments of
`holdfast.init` have precedence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.elastic import ElasticVariable
from holdfast_core.job.failures import REFORM_S
from holdfast_core.job.schema import SETTINGS
from holdfast_core.job.settings import read_variables
from holdfast_core.job.snapshots import PolicySpec
from holdfast_core.last_lines import secrets_among

_POLICY = msgspec.json.Decoder(PolicySpec)
_ELASTIC = msgspec.json.Decoder(ElasticVariable)
_NUMERIC = (
    *("CUBLAS", "CUDNN", "NVIDIA_TF32", "ROCBLAS", "HIPBLAS", "MIOPEN"),
    *("MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "ATEN_", "TORCH_BLAS", "TORCH_CUDNN"),
    *("TORCH_LINEAR", "TORCH_ALLOW_TF32", "DISABLE_ADDMM"),
)
"""Beginnings of the names of variables that change the bits of products of matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The values of this process's environment variables."""

    socket: Path | None
    """`HOLDFAST_SOCKET`: the daemon's Unix socket; None if no daemon protects this process."""
    job: str
    """`HOLDFAST_JOB`."""
    rank: int
    """`RANK`."""
    world_size: int
    """`WORLD_SIZE`."""
    local_rank: int
    """`LOCAL_RANK`."""
    local_world_size: int
    """`LOCAL_WORLD_SIZE`."""
    store_address: str
    """`MASTER_ADDR:MASTER_PORT` of the training world's store; empty outside torchrun."""
    run_id: str
    """`TORCHELASTIC_RUN_ID`: the job's key if Holdfast's rendezvous has formed the world."""
    copy_threads: int | None
    """`HOLDFAST_COPY_THREADS`."""
    token_file: Path | None
    """`HOLDFAST_TOKEN_FILE`: file with the token that proves to the daemon which pod this is; None
    if the daemon requires no token."""
    reform_s: float
    """`HOLDFAST_REFORM_SECONDS`: time within which a process that stays must join its new world."""
    policy: PolicySpec
    """`HOLDFAST_POLICY`: the job's `snapshot.policy`, as JSON."""
    recoveries_per_day: float | None
    """`HOLDFAST_RECOVERIES_PER_DAY`: expected rate; None if the interval is fixed."""
    settings: Mapping[str, Any]
    """The job's values for `JobSettings` by name, each from its own variable."""
    nccl_stays: bool
    """`HOLDFAST_NCCL_STAYS`: whether process groups of NCCL stay as objects; 0 or 1."""
    elastic: ElasticVariable | None
    """`HOLDFAST_ELASTIC`: the job's `spec.elastic`, as JSON; None if it has none."""


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment of this process, or `variables` instead.

    Raises:
        InvalidJobError: a number or the policy cannot be parsed, or a daemon is named without a
            job.
    """
    found = os.environ if variables is None else variables
    socket, job = found.get("HOLDFAST_SOCKET", ""), found.get("HOLDFAST_JOB", "")
    if socket and not job:
        raise InvalidJobError(
            f"HOLDFAST_SOCKET={socket} names a daemon, but HOLDFAST_JOB is not set; set both"
        )
    address, port = found.get("MASTER_ADDR", ""), found.get("MASTER_PORT", "")
    threads = found.get("HOLDFAST_COPY_THREADS")
    return Environment(
        socket=Path(socket) if socket else None,
        job=job,
        rank=_number(found, "RANK", 0),
        world_size=_number(found, "WORLD_SIZE", 1),
        local_rank=_number(found, "LOCAL_RANK", 0),
        local_world_size=_number(found, "LOCAL_WORLD_SIZE", 1),
        store_address=f"{address}:{port}" if address and port else "",
        run_id=found.get("TORCHELASTIC_RUN_ID", ""),
        token_file=read_token_file(found),
        reform_s=_rate(found, "HOLDFAST_REFORM_SECONDS") or REFORM_S,
        policy=_policy(found.get("HOLDFAST_POLICY", "")),
        recoveries_per_day=_rate(found, "HOLDFAST_RECOVERIES_PER_DAY"),
        settings=read_variables(SETTINGS, found),
        nccl_stays=_number(found, "HOLDFAST_NCCL_STAYS", 0) != 0,
        elastic=_elastic(found.get("HOLDFAST_ELASTIC", "")),
        copy_threads=None if threads is None else _number(found, "HOLDFAST_COPY_THREADS", 0),
    )


def read_local_rank() -> int:
    """Read `LOCAL_RANK`: the number of this process among the workers of its node."""
    return _number(os.environ, "LOCAL_RANK", 0)


def read_secrets() -> tuple[str, ...]:
    """Return the values of this process's environment that must not be shown."""
    return secrets_among(os.environ)


def read_numeric_variables() -> dict[str, str]:
    """Return the variables on which the libraries of matrix products make their bits depend. Paths
    of their logs, which may hold the name of a host, are not among them."""
    found = {k: v for k, v in os.environ.items() if k.startswith(_NUMERIC)}
    return {k: found[k] for k in sorted(found) if "LOG" not in k and "VERBOSE" not in k}


def read_preload() -> tuple[str, ...]:
    """Read `HOLDFAST_PRELOAD`: names of modules, separated by commas, that a launcher imports
    before it forks workers."""
    names = os.environ.get("HOLDFAST_PRELOAD", "").split(",")
    return tuple(stripped for name in names if (stripped := name.strip()))


def read_check_directory() -> Path | None:
    """Read `HOLDFAST_CHECK`: directory for the records of `holdfast check`; None if this process is
    not checked."""
    found = os.environ.get("HOLDFAST_CHECK", "")
    return Path(found) if found else None


def read_stack_directory() -> Path | None:
    """Read `HOLDFAST_STACKS`: directory in which this process offers its stack to its launcher;
    None if it has none of ours."""
    found = os.environ.get("HOLDFAST_STACKS", "")
    return Path(found) if found else None


def read_token_file(variables: Mapping[str, str] | None = None) -> Path | None:
    """Read `HOLDFAST_TOKEN_FILE` of this process, or of `variables` instead."""
    found = (os.environ if variables is None else variables).get("HOLDFAST_TOKEN_FILE", "")
    return Path(found) if found else None


def set_for_workers(
    *, socket: Path, job: str, nproc: int, reform_s: float, stacks: Path | None
) -> None:
    """Set the environment variables for this process's agent and its workers."""
    os.environ["HOLDFAST_STACKS"] = str(stacks or "")
    os.environ["HOLDFAST_SOCKET"] = str(socket)
    os.environ["HOLDFAST_REFORM_SECONDS"] = str(reform_s)
    os.environ["HOLDFAST_JOB"] = job
    # All nodes start equally many workers. So the agent need not ask for their numbers through the
    # store, where it would wait for a node that was just lost.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    # Torchrun does the same.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _policy(text: str) -> PolicySpec:
    try:
        return _POLICY.decode(text) if text else PolicySpec()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJobError(
            f"HOLDFAST_POLICY={text!r} is not a job's snapshot.policy: {error}"
        ) from error


def _elastic(text: str) -> ElasticVariable | None:
    try:
        return _ELASTIC.decode(text) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJobError(
            f"HOLDFAST_ELASTIC={text!r} is not a job's spec.elastic: {error}"
        ) from error


def _rate(variables: Mapping[str, str], name: str) -> float | None:
    text = variables.get(name)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidJobError(f"{name}={text!r} is not a number; set it to above 0") from None


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise InvalidJobError(f"{name}={text!r} is not a number; set it to 0 or more")
    return int(text)
