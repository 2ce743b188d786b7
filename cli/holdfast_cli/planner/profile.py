"""A profile of a job: what `holdfast simulate` takes from measurements instead of assumptions.

MoEvement's simulator takes its costs from profiled runs (appendix C): times of micro-batches and
stages, an affine model of collectives, the optimizer's time, sizes and bandwidths. A profile holds
these, each optional, with its unit in its name. `holdfast profile` writes one from a local run in
progress; what a run does not show (the times of single stages, a cluster's collectives) is filled
in by hand. This module measures nothing.
"""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast_cli.planner.effective_time.policy_models import pipeline_step_s
from holdfast_cli.planner.effective_time.skew import skewness
from holdfast_core.errors import InvalidJobError, StorageError

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Portion = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of the all-reduce of gradients: T(m, p) = α(p) + β(p) · m (MoEvement appendix C), with
    the constants of the job's own group size p."""

    alpha_s: NotNegative
    """Time that does not depend on the size."""
    beta_s_byte: NotNegative
    """Time of each byte."""
    gradient_bytes: Positive
    """m: gradients of one rank."""
    hidden: Portion = 0.0
    """Portion of this time that overlaps with computation."""

    @property
    def seconds(self) -> float:
        """T_sync: the part that computation does not hide."""
        return (1 - self.hidden) * (self.alpha_s + self.beta_s_byte * self.gradient_bytes)


class JobProfile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Measurements of one job; None or empty for what was not measured."""

    gpus: Count | None = None
    """GPUs of the job that was measured."""
    step_s: Positive | None = None
    """A step as a whole; or the parts below, of which it consists."""
    pipelines_s: list[Annotated[list[Positive], Meta(min_length=1)]] = []
    """For each data-parallel pipeline, the times of its stages: forward, backward and local
    communication of one micro-batch (t_s)."""
    micro_batches: Count | None = None
    """Micro-batches that pass through a pipeline in a step (M)."""
    sync_s: NotNegative | None = None
    """Time that reducing gradients adds to a step; or `all_reduce`."""
    all_reduce: AllReduce | None = None
    update_s: NotNegative = 0.0
    """Time of the optimizer (T_update)."""
    expert_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Training state of one expert of one layer: weights, masters, optimizer."""
    other_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Training state of everything but the experts, in one copy."""
    experts_per_layer: Count | None = None
    moe_layers: Count | None = None
    expert_tokens: list[list[NotNegative]] = []
    """For each layer, the tokens of its experts."""
    copy_bytes_s: Positive | None = None
    """Rate at which the ranks of a node copy into its memory."""
    network_bytes_s: Positive | None = None
    """Rate at which a node gets bytes of others for protection."""
    storage_bytes_s: Positive | None = None
    """Rate from a node to storage."""
    snapshot_portion: NotNegative | None = None
    """Portion by which a snapshot whose copy hides makes a step longer."""
    frozen_saves: Portion | None = None
    """Portion of a step that a frozen expert saves while a window is repeated."""
    detect_s: NotNegative | None = None
    """Time from a failure until it is known."""
    restart_s: NotNegative | None = None
    """Time from there to the first step."""
    reform_s: NotNegative | None = None
    """The same, to go on with other nodes in place."""

    @property
    def stages(self) -> int | None:
        """Stages of a pipeline; None where their times were not measured."""
        return len(self.pipelines_s[0]) if self.pipelines_s else None

    @property
    def iteration_s(self) -> float | None:
        """Time of a step: as measured, or T_iter = max over pipelines of T_pipeline + T_sync +
        T_update, with T_pipeline = (M + S - 1) · max t_s (MoEvement appendix C). None where neither
        was measured."""
        if self.step_s is not None or not self.pipelines_s:
            return self.step_s
        assert self.micro_batches is not None
        sync_s = self.all_reduce.seconds if self.all_reduce else self.sync_s or 0.0
        return pipeline_step_s(
            max(max(stages_s) for stages_s in self.pipelines_s),
            stages=len(self.pipelines_s[0]),
            micro_batches=self.micro_batches,
            sync_s=sync_s,
            update_s=self.update_s,
        )

    def check(self) -> None:
        """Check what single fields cannot show.

        Raises:
            InvalidJobError: when fields contradict each other or miss one another.
        """
        parts = {
            "pipelines_s": bool(self.pipelines_s),
            "sync_s": self.sync_s is not None,
            "all_reduce": self.all_reduce is not None,
            "update_s": not isclose(self.update_s, 0.0),
        }
        given = [name for name, is_given in parts.items() if is_given]
        if self.step_s is not None and given:
            raise InvalidJobError(
                f"step_s is the whole step and {given[0]} a part of one; leave step_s out, or all "
                f"of {', '.join(parts)}"
            )
        if given and not self.pipelines_s:
            raise InvalidJobError(
                f"{given[0]} is a part of a step, which also needs pipelines_s: for each pipeline "
                f"the list of its stages' times"
            )
        if self.pipelines_s and self.micro_batches is None:
            raise InvalidJobError("pipelines_s needs micro_batches: how many pass in a step")
        if self.sync_s is not None and self.all_reduce is not None:
            raise InvalidJobError("sync_s and all_reduce: give one of them")
        lengths = sorted({len(stages_s) for stages_s in self.pipelines_s})
        if len(lengths) > 1:
            raise InvalidJobError(
                f"pipelines_s has pipelines of {lengths[0]} and of {lengths[-1]} stages; all "
                f"pipelines have the same number"
            )
        for layer, tokens in enumerate(self.expert_tokens):
            try:
                skewness(tokens)
            except InvalidJobError as error:
                raise InvalidJobError(f"expert_tokens[{layer}]: {error}") from error
        if (self.expert_bytes is None) != (self.other_bytes is None):
            raise InvalidJobError("expert_bytes and other_bytes: give both, or neither")


_PROFILE = msgspec.json.Decoder(JobProfile)


def read_profile(path: Path) -> JobProfile:
    """The profile in a file.

    Raises:
        StorageError: when the file cannot be read.
        InvalidJobError: names the field that is unknown, out of range, missing or contradicted.
    """
    try:
        profile = _PROFILE.decode(path.read_bytes())
    except OSError as error:
        raise StorageError(
            f"--profile {path} cannot be read: {error.strerror}; holdfast profile writes one"
        ) from error
    except msgspec.DecodeError as error:
        raise InvalidJobError(
            f"--profile {path}: {error}; the fields are {', '.join(JobProfile.__struct_fields__)}"
        ) from error
    try:
        profile.check()
    except InvalidJobError as error:
        raise InvalidJobError(f"--profile {path}: {error}") from error
    return profile


def encode_profile(profile: JobProfile) -> bytes:
    """The profile as JSON for people to edit; unmeasured fields are left out."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
