"""Inputs of `holdfast plan`: sizes of the model, and bandwidths.

They come from flags, from the job, from a local run or from a measurement. Errors name the flag.
This module computes no plan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import Assumptions
from holdfast_cli.planner.planning import COPY_BYTES_S, DAY_S, NETWORK_BYTES_S, SentAtBoundaries
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.recompute import state_entries
from holdfast_core.job.names import job_file_name
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.snapshots import LossyPolicy, PartialExperts, Selective
from holdfast_core.snapshots.layouts import Layout, decode_layout
from holdfast_core.snapshots.units import UnitKey, UnitKind

_MEASURED_BYTES = 256 * 1024**2
_MEASUREMENTS = 5


def model_of(options: argparse.Namespace, job: MoETrainingJob) -> ModelSizes | None:
    """The sizes of the job's model; None if no flag gives any.

    Raises:
        InvalidJobError: when flags contradict each other or the job, or one is missing.
        StorageError: when a run cannot be read.
    """
    given = [
        flag
        for flag, value in (
            ("--expert-bytes", options.expert_bytes),
            ("--other-bytes", options.other_bytes),
            ("--moe-layers", options.moe_layers),
            ("--experts-per-layer", options.experts_per_layer),
        )
        if value is not None
    ]
    if not given and options.like_run is None:
        needs = _policy_flags(options)
        if needs:
            raise InvalidJobError(
                f"{needs[0]} compares policies, which requires the model's sizes: give "
                f"--expert-bytes and --other-bytes, or --like-run"
            )
        return None
    for flag, value in (
        ("--bytes-per-rank", options.bytes_per_rank),
        ("--snapshot-seconds", options.snapshot_seconds),
    ):
        if value is not None:
            raise InvalidJobError(f"{flag} follows from the model's sizes; leave it out")
    if options.like_run is not None:
        if given:
            raise InvalidJobError(f"--like-run gives the sizes of the model; leave {given[0]} out")
        return sizes_of_run(options.like_run, job)
    return _of_flags(options, job)


def sent_of(options: argparse.Namespace) -> SentAtBoundaries | None:
    """The data that ranks send over boundaries of stages; None if no flag gives it.

    Raises:
        InvalidJobError: when one of the flags is missing.
    """
    activation_bytes, micro_batches = options.activation_bytes, options.micro_batches
    if activation_bytes is None and micro_batches is None and not options.log_received:
        return None
    if activation_bytes is None or micro_batches is None:
        raise InvalidJobError(
            "--activation-bytes and --micro-batches count the logs together (with --log-received, "
            "also what ranks receive): give both, or none"
        )
    return SentAtBoundaries(
        activation_bytes=activation_bytes,
        micro_batches=micro_batches,
        log_received=options.log_received,
    )


def _policy_flags(options: argparse.Namespace) -> list[str]:
    return [
        flag
        for flag, value in (
            ("--plot", options.plot),
            ("--partial-experts", options.partial_experts),
            ("--copy-bandwidth", options.copy_bandwidth),
            ("--network-bandwidth", options.network_bandwidth),
            ("--measure-copy", options.measure_copy or None),
            ("--routing-skew", options.routing_skew or None),
        )
        if value is not None
    ]


def _of_flags(options: argparse.Namespace, job: MoETrainingJob) -> ModelSizes:
    model = job.spec.model
    layers = options.moe_layers or (model.num_moe_layers if model else None)
    experts = options.experts_per_layer or (model.num_experts if model else None)
    for flag, value, field in (
        ("--moe-layers", layers, "numMoELayers"),
        ("--experts-per-layer", experts, "numExperts"),
        ("--expert-bytes", options.expert_bytes, ""),
        ("--other-bytes", options.other_bytes, ""),
    ):
        if value is None:
            also = f" (or spec.model.{field} in the job)" if field else ""
            raise InvalidJobError(
                f"{flag} is missing{also}; policies cannot be compared without it"
            )
    assert layers is not None and experts is not None
    ep = job.spec.parallelism.ep
    if experts % ep:
        raise InvalidJobError(
            f"--experts-per-layer {experts} cannot be divided by the job's ep = {ep}; every rank "
            f"holds the same number of experts"
        )
    return ModelSizes.even(
        layers=layers,
        experts=experts,
        expert_bytes=options.expert_bytes,
        other_bytes=options.other_bytes,
    )


def assumptions_of(
    options: argparse.Namespace, job: MoETrainingJob, sizes: ModelSizes
) -> Assumptions:
    """Assumptions for the comparison of policies.

    Raises:
        InvalidJobError: when a flag does not fit the model.
    """
    most = max((len(units) for units in sizes.by_layer.values()), default=0)
    asked = options.partial_experts
    if asked is not None and asked > most:
        raise InvalidJobError(
            f"--partial-experts {asked}: a layer has {most} experts; give 1 to {most}"
        )
    chosen = job.spec.snapshot.policy.chosen
    policy: LossyPolicy = PartialExperts()
    selective = Selective()
    match chosen:
        case Selective():
            selective = chosen
        case LossyPolicy():
            policy = chosen
    if options.measure_copy:
        if options.copy_bandwidth is not None:
            raise InvalidJobError("--copy-bandwidth and --measure-copy: give one of them")
        copy_bytes_s = measured_copy_bytes_s()
    else:
        copy_bytes_s = options.copy_bandwidth or COPY_BYTES_S
    node_mtbf_days, process_mtbf_days = mtbf_days_of(options, job)
    return Assumptions(
        copy_bytes_s=copy_bytes_s,
        network_bytes_s=options.network_bandwidth or NETWORK_BYTES_S,
        step_s=options.step_seconds,
        node_losses_per_s=1 / (node_mtbf_days * DAY_S),
        process_failures_per_s=1 / (process_mtbf_days * DAY_S),
        first_k=asked or policy.first_k,
        loss_limit=policy.loss_limit,
        selective_loss_limit=selective.loss_limit,
        routing_skew=options.routing_skew,
    )


def mtbf_days_of(options: argparse.Namespace, job: MoETrainingJob) -> tuple[float, float]:
    """Mean days between losses of a node, and between failures of its processes: from the command
    line, else from the job."""
    interval = job.spec.snapshot.interval
    return (
        options.node_mtbf_days or interval.node_mtbf_days,
        options.process_mtbf_days or interval.process_mtbf_days,
    )


def sizes_of_run(path: Path, job: MoETrainingJob) -> ModelSizes:
    """The sizes of the model that a local run of the job trains, from the layouts of its snapshots.

    Raises:
        InvalidJobError: when there is no such run, or not every rank has saved yet.
        StorageError: when its record cannot be decoded.
        CorruptError: when a layout cannot be read.
    """
    experts: dict[UnitKey, int] = {}
    other_bytes = 0
    layouts = (layout for layouts in layouts_of_run(path, job).values() for layout in layouts)
    for entry in (entry for layout in layouts for entry in state_entries(layout)):
        unit = UnitKey.parse(entry.unit)
        if unit.kind is UnitKind.EXPERT:
            experts[unit] = experts.get(unit, 0) + entry.nbytes
        else:
            other_bytes += entry.nbytes
    return ModelSizes(experts=experts, other_bytes=other_bytes)


def layouts_of_run(path: Path, job: MoETrainingJob) -> dict[str, list[Layout]]:
    """Node → the newest layouts of the ranks there, of a local run of the job.

    Raises:
        InvalidJobError, StorageError, CorruptError: as `sizes_of_run`.
    """
    record = RunDirectory(path, job.key).read_record()
    if record is None:
        raise InvalidJobError(
            f"--like-run {path}: no run is in progress there; `holdfast run` prints its directory"
        )
    newest: dict[int, tuple[int, str, Layout]] = {}
    for node in record.nodes.values():
        arenas = Path(node.root) / "jobs" / job_file_name(record.job) / "arenas"
        for written_ns, layout in _layouts(arenas):
            if layout.rank not in newest or newest[layout.rank][0] < written_ns:
                newest[layout.rank] = (written_ns, node.name, layout)
    world = max((layout.world_size for _, _, layout in newest.values()), default=0)
    if not world or len(newest) < world:
        raise InvalidJobError(
            f"--like-run {path}: {len(newest)} of {world or 'its'} ranks have saved; try again "
            f"when the run has completed a step"
        )
    by_node: dict[str, list[Layout]] = {}
    for _, name, layout in newest.values():
        by_node.setdefault(name, []).append(layout)
    return by_node


def _layouts(arenas: Path) -> Iterator[tuple[int, Layout]]:
    """Each layout below the directory, with the time when it was written."""
    for path in arenas.glob("*/layout.json"):
        try:
            yield path.stat().st_mtime_ns, decode_layout(path.read_bytes())
        except FileNotFoundError:  # replaced by a newer one just now
            continue


def measured_copy_bytes_s() -> float:
    """Measure a plain copy in this machine's memory, by one thread and into pages in use. Returns
    the best of several rates, in bytes per second."""
    source = np.ones(_MEASURED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best_s = float("inf")
    for _ in range(_MEASUREMENTS):
        started = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - started)
    return _MEASURED_BYTES / best_s
