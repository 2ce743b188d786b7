"""Inputs of `holdfast simulate`, each with its origin: a flag, the job, a report of a benchmark, a
local run, or an assumption. This module simulates nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import msgspec

from holdfast_cli.planner.effective_time.assumed_policies import (
    SEATED,
    AssumedCosts,
    PolicyKind,
)
from holdfast_cli.planner.effective_time.incidents import Incident, parse_trace
from holdfast_cli.planner.effective_time.policy_models import (
    Cluster,
    Workload,
    pipeline_step_s,
)
from holdfast_cli.planner.effective_time.skew import draw_popularity, skewness
from holdfast_cli.planner.models.recommending import DETECT_S, RESTART_S
from holdfast_cli.planner.models.seated_experts import Survives, fewest_nodes, survives_in_seats
from holdfast_cli.planner.plan_inputs import sizes_of_run
from holdfast_cli.planner.planning import COPY_BYTES_S, NETWORK_BYTES_S
from holdfast_cli.planner.profile import JobProfile, read_profile
from holdfast_cli.planner.seeds import generator
from holdfast_cli.planner.simulation.levers import STORED_EVERY_S, JobSetting
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.snapshots import (
    LossyPolicy,
    PartialExperts,
    Repeats,
    Selective,
    SparseWindows,
)
from holdfast_core.quantities import format_rate

MTBFS = "2h,1h,30m,20m,10m"
"""Those of MoEvement's table 3."""
STORAGE_BYTES_S = 1e9
STEP_S = 5.0
REFORM_S = 2.0
SLOWER = 0.02
REPLACEMENT = "30m"
GPU_PARAMETERS = 41_000_000
"""Parameters for each GPU where no size is given: 671 G on 16,384, as in figure 11 of MoEvement."""
STATE_BYTES = 14
EXPERTS_SHARE = 0.97
EXPERTS, LAYERS = 64, 27
SPARES_SHARE = 0.01

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

ASSUMED, JOB, FLAG = "assumed", "the job", "given"


@dataclass(kw_only=True, slots=True)
class Inputs:
    """All inputs of a simulation, and the origin of each."""

    workload: Workload
    cluster: Cluster
    costs: AssumedCosts
    mtbfs_s: tuple[float, ...]
    trace: tuple[Incident, ...]
    """Empty unless a trace is replayed."""
    kinds: tuple[PolicyKind, ...]
    possible: frozenset[PolicyKind]
    """Policies that this job can ask for."""
    job: JobSetting
    """The job as its document has it, with its own interval, window and K."""
    stay_restart_s: float | None
    """Time of a restart if processes stay; None where they do, or it is not known."""
    runs: int
    first_seed: int
    """Seeds are this one and those after it, one for each run."""
    length_s: float
    explained: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, value and source of each input, for people."""


def duration_of(text: str) -> float:
    """Seconds of `10m`, `2h`, `1.5d` or `90`.

    Raises:
        InvalidJobError: for anything else, or a time that is not longer than 0.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise InvalidJobError(f"{text!r} is not a time; write 90s, 10m, 2h or 1.5d")
    return seconds


def duration_text(seconds: float) -> str:
    """`seconds` as flags take them, in the largest unit that divides them."""
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds >= _UNITS[unit] or unit == "s")
    if seconds % _UNITS[unit] and unit != "s":
        unit = "hms"["dhm".index(unit)]
    return f"{seconds / _UNITS[unit]:g} {'min' if unit == 'm' else unit}"


class _Report(msgspec.Struct, frozen=True):
    """The relevant figures of a report of `make bench NAME=recovery` or `make bench`."""

    stay_node_noticed: float | None = None
    stay_node_after_noticed: float | None = None
    restart_node_noticed: float | None = None
    restart_node_after_noticed: float | None = None
    stay_fewer_after_noticed: float | None = None
    overhead: float | None = None
    """Percent."""


_REPORT = msgspec.json.Decoder(_Report)


class Sources:
    """Looks inputs up in the flags, then in the profile of the job, then in reports of benchmarks,
    then among assumptions, and remembers the origin of each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.explained: list[tuple[str, str, str]] = []
        self.stay_restart_s: float | None = None
        """Time of a restart if processes stay, where they do not and a report has it."""
        self._measured: dict[str, tuple[float, str]] = {}
        for path in options.costs or ():
            self._read(path)
        self.profile = JobProfile()
        if options.profile is not None:
            self.profile = read_profile(options.profile)
            self._take_profile(str(options.profile))

    def _take_profile(self, source: str) -> None:
        profile = self.profile
        values = {
            "step": profile.iteration_s,
            "copy": profile.copy_bytes_s,
            "network": profile.network_bytes_s,
            "storage": profile.storage_bytes_s,
            "slower": profile.snapshot_portion,
            "detect": profile.detect_s,
            "restart": profile.restart_s,
            "reform": profile.reform_s,
        }
        self._measured |= {
            name: (value, source) for name, value in values.items() if value is not None
        }

    def _read(self, path: Path) -> None:
        try:
            report = _REPORT.decode(path.read_bytes())
        except OSError as error:
            raise StorageError(
                f"--costs {path} cannot be read: {error.strerror}; make bench NAME=recovery writes "
                f"build/bench/recovery.json"
            ) from error
        except msgspec.DecodeError as error:
            raise InvalidJobError(
                f"--costs {path} is not a report of make bench or make bench NAME=recovery: {error}"
            ) from error
        restart = self._options.processes == "restart"
        if restart and report.stay_node_after_noticed is not None:
            self.stay_restart_s = report.stay_node_after_noticed
        noticed = report.restart_node_noticed if restart else report.stay_node_noticed
        after = report.restart_node_after_noticed if restart else report.stay_node_after_noticed
        values = {
            "detect": noticed,
            "restart": after,
            "reform": report.stay_fewer_after_noticed,
            "slower": None if report.overhead is None else max(0.0, report.overhead) / 100,
        }
        known = {name: (value, str(path)) for name, value in values.items() if value is not None}
        if not known:
            raise InvalidJobError(
                f"--costs {path} holds none of the figures that are used: give the recovery.json "
                f"of make bench NAME=recovery or the snapshot.json of make bench"
            )
        self._measured |= known

    def rate(self, name: str, flag: float | None, assumed: float) -> float:
        """A rate of a node in bytes per second."""
        value, source = self._look_up(name, flag, assumed)
        self.explain(f"{name}, a node", format_rate(value), source)
        return value

    def _look_up(self, name: str, flag: float | None, assumed: float) -> tuple[float, str]:
        """The value of an input, and its origin."""
        if flag is not None:
            return float(flag), FLAG
        return self._measured.get(name, (assumed, ASSUMED))

    def number(self, name: str, flag: float | None, assumed: float, what: str, unit: str) -> float:
        """The value of an input in its unit; a portion is shown in %."""
        value, source = self._look_up(name, flag, assumed)
        shown = f"{100 * value:.3g} %" if unit == "%" else f"{value:.3g} {unit}".strip()
        self.explain(what, shown, source)
        return value

    def explain(self, what: str, value: str, source: str) -> None:
        """Remember an input for the printed list."""
        self.explained.append((what, value, source))


def inputs_of(options: argparse.Namespace, job: MoETrainingJob) -> Inputs:
    """All inputs of the simulation of a job.

    Raises:
        InvalidJobError: when flags contradict each other or the job, or a value is out of range.
        StorageError: when a file cannot be read.
    """
    sources = Sources(options)
    nproc = job.spec.nproc_per_node
    gpus = options.gpus or job.world_size
    if gpus % nproc:
        raise InvalidJobError(
            f"--gpus {gpus} cannot be divided by the job's nprocPerNode = {nproc}; every node has "
            f"the same number"
        )
    nodes = gpus // nproc
    from_where = FLAG if options.gpus else JOB
    sources.explain("GPUs", f"{gpus} on {nodes} nodes", from_where)
    measured_gpus = sources.profile.gpus
    if measured_gpus not in (None, gpus):
        # Steps and rates are taken as they are: nothing here scales them.
        sources.explain("profile", f"measured on {measured_gpus} GPUs", str(options.profile))
    workload = _workload(options, job, sources)
    costs = _costs(options, job, gpus, workload.step_s, sources)
    cluster = _cluster(options, job, nodes, sources)
    cluster = replace(cluster, least_nodes=max(cluster.least_nodes, costs.seated_on))
    trace: tuple[Incident, ...] = ()
    if options.trace is not None:
        try:
            trace = parse_trace(options.trace.read_text(encoding="utf-8"))
        except OSError as error:
            raise StorageError(f"--trace {options.trace}: {error.strerror}") from error
        sources.explain("failures and nodes that come", str(options.trace), FLAG)
    mtbfs_s = tuple(duration_of(text) for text in (options.mtbf or MTBFS).split(","))
    length_s = duration_of(options.length)
    return Inputs(
        workload=workload,
        cluster=cluster,
        costs=costs,
        mtbfs_s=tuple(sorted(set(mtbfs_s), reverse=True)),
        trace=trace,
        kinds=_kinds_of(options.policies),
        possible=possible_policies(job),
        job=job_setting(job, workload, cluster, costs),
        stay_restart_s=sources.stay_restart_s,
        runs=options.runs,
        first_seed=options.seed,
        length_s=length_s,
        explained=sources.explained,
    )


def possible_policies(job: MoETrainingJob) -> frozenset[PolicyKind]:
    """Policies that the job can ask for. With `minNodes` below `nodes` whole snapshots are
    simulated, and windows of gradients; sparse windows need every step."""
    if job.spec.elastic is not None:
        windows = {PolicyKind.SPARSE_GRADS}
        kinds = set(SEATED) - windows
    elif job.spec.may_shrink:
        kinds, windows = {PolicyKind.FEWER}, {PolicyKind.FEWER_GRADS}
    else:
        kinds = {PolicyKind.FULL, PolicyKind.PARTIAL, PolicyKind.SELECTIVE}
        windows = {PolicyKind.SPARSE_GRADS, PolicyKind.SPARSE_GLOBAL}
    if job.spec.snapshot.interval.steps == 1:
        kinds |= windows
    return frozenset(kinds)


def job_setting(
    job: MoETrainingJob, workload: Workload, cluster: Cluster, costs: AssumedCosts
) -> JobSetting:
    """The job as its document has it."""
    policy = job.spec.snapshot.policy.chosen
    kind = PolicyKind.FULL
    match policy:
        case PartialExperts():
            kind = PolicyKind.PARTIAL
            costs = replace(costs, first_experts=policy.first_k)
        case Selective():
            kind = PolicyKind.SELECTIVE
        case SparseWindows():
            catches_up = policy.repeats is Repeats.OPTIMIZER
            kind = PolicyKind.SPARSE_GRADS if catches_up else PolicyKind.SPARSE_GLOBAL
            costs = (
                replace(costs, window_max=policy.window_steps)
                if policy.adapts
                else replace(costs, window_steps=policy.window_steps)
            )
    if job.spec.elastic is not None:
        kind = PolicyKind.ELASTIC if kind is PolicyKind.FULL else kind
        if not job.spec.may_shrink:  # Processes wait with their copies.
            cluster = replace(cluster, least_nodes=cluster.nodes)
    elif job.spec.may_shrink:
        windows = kind is PolicyKind.SPARSE_GRADS
        kind = PolicyKind.FEWER_GRADS if windows else PolicyKind.FEWER
    interval = job.spec.snapshot.interval
    steps = interval.steps if isinstance(interval.steps, int) else 0
    costs = replace(costs, interval_steps=steps)
    if isinstance(policy, LossyPolicy):
        costs = replace(costs, loss_limit=policy.loss_limit)
    return JobSetting(kind=kind, costs=costs, workload=workload, cluster=cluster)


def _kinds_of(text: str) -> tuple[PolicyKind, ...]:
    if text == "all":
        return tuple(PolicyKind)
    asked = text.split(",")
    unknown = [name for name in asked if name not in set(PolicyKind)]
    if unknown:
        raise InvalidJobError(
            f"--policies {unknown[0]}: there is no such policy; give all, or some of "
            f"{', '.join(PolicyKind)}"
        )
    return tuple(kind for kind in PolicyKind if kind in asked)


def _workload(options: argparse.Namespace, job: MoETrainingJob, sources: Sources) -> Workload:
    profile = sources.profile
    stages = options.stages or profile.stages or job.spec.parallelism.pp
    micro_batches = options.micro_batches or profile.micro_batches or stages
    if profile.stages and stages != profile.stages:
        raise InvalidJobError(
            f"--stages {stages}: pipelines_s of {options.profile} has {profile.stages} stages; "
            f"leave the flag out, or profile that pipeline"
        )
    if options.micro_batch_seconds is not None:
        if options.step_seconds is not None:
            raise InvalidJobError("--step-seconds and --micro-batch-seconds: give one of them")
        step_s = pipeline_step_s(
            options.micro_batch_seconds,
            stages=stages,
            micro_batches=micro_batches,
            sync_s=options.sync_seconds,
            update_s=options.update_seconds,
        )
        sources.explain(
            "step", f"{step_s:.3g} s", f"(M + S - 1) x {options.micro_batch_seconds:g} s + the rest"
        )
    else:
        step_s = sources.number("step", options.step_seconds, STEP_S, "step", "s")
    if stages > 1 or micro_batches > 1:
        source = "as many micro-batches as stages: assumed"
        if options.micro_batches:
            source = FLAG
        elif profile.micro_batches:
            source = str(options.profile)
        sources.explain("stages, micro-batches", f"{stages}, {micro_batches}", source)
    return Workload(step_s=step_s, stages=stages, micro_batches=micro_batches)


def _costs(
    options: argparse.Namespace, job: MoETrainingJob, gpus: int, step_s: float, sources: Sources
) -> AssumedCosts:
    sizes = _sizes(options, job, gpus, sources)
    copy_bytes_s, network_bytes_s = memory_rates_of(options, sources)
    storage_bytes_s = sources.rate("storage", options.storage_bandwidth, STORAGE_BYTES_S)
    losses = job.spec.redundancy.losses
    sources.explain(
        "redundancy", f"{job.spec.redundancy.type.value}, covers {losses} of a group", JOB
    )
    stored_every_s = _stored_every_s(job, step_s, sources)
    slower = slower_of(options, sources)
    popularity = _popularity(options, sizes.experts_per_layer, sources)
    survives = _survives(options, job, popularity, gpus, sizes.experts_per_layer, sources)
    return AssumedCosts(
        expert_bytes=sizes.expert_bytes,
        other_bytes=sizes.other_bytes,
        experts_per_layer=sizes.experts_per_layer,
        moe_layers=sizes.moe_layers,
        copy_bytes_s=copy_bytes_s,
        network_bytes_s=network_bytes_s,
        storage_bytes_s=storage_bytes_s,
        losses=losses,
        group_nodes=min(
            job.spec.redundancy.group_size(job.spec.nodes), gpus // job.spec.nproc_per_node
        ),
        stored_every_s=stored_every_s,
        slower=slower,
        popularity=popularity,
        survives=survives,
        seated_on=fewest_nodes(job, sizes.experts_per_layer),
        frozen_saves=_frozen_saves(options, sources),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Sizes of the model, with the meaning of `AssumedCosts`."""

    expert_bytes: int
    other_bytes: int
    experts_per_layer: int
    moe_layers: int


def _sizes(options: argparse.Namespace, job: MoETrainingJob, gpus: int, sources: Sources) -> _Sizes:
    """Sizes of the model: from flags, a run in progress, the profile, or assumed for the GPUs."""
    model, profile = job.spec.model, sources.profile
    experts, layers = EXPERTS, LAYERS
    shape_source = ASSUMED
    if model is not None:
        experts, layers, shape_source = model.num_experts, model.num_moe_layers, JOB
    if profile.experts_per_layer or profile.moe_layers:
        experts = profile.experts_per_layer or experts
        layers = profile.moe_layers or layers
        shape_source = str(options.profile)
    if options.experts_per_layer or options.moe_layers:
        experts = options.experts_per_layer or experts
        layers = options.moe_layers or layers
        shape_source = FLAG
    given = [options.expert_bytes, options.other_bytes]
    if options.like_run is not None:
        if any(given) or options.parameters:
            raise InvalidJobError(
                "--like-run gives the sizes of the model; leave --parameters, --expert-bytes and "
                "--other-bytes out"
            )
        sizes = sizes_of_run(options.like_run, job)
        by_layer = sizes.by_layer
        layers = max(1, len(by_layer))
        experts = max((len(units) for units in by_layer.values()), default=1)
        expert_bytes, other_bytes = sum(sizes.experts.values()), sizes.other_bytes
        source = shape_source = str(options.like_run)
    elif any(given):
        if not all(size is not None for size in given):
            raise InvalidJobError("--expert-bytes and --other-bytes: give both")
        expert_bytes, other_bytes = options.expert_bytes * experts * layers, options.other_bytes
        source = FLAG
    elif profile.expert_bytes is not None and not options.parameters:
        assert profile.other_bytes is not None
        expert_bytes, other_bytes = profile.expert_bytes * experts * layers, profile.other_bytes
        source = str(options.profile)
    else:
        parameters = options.parameters or GPU_PARAMETERS * gpus
        state = parameters * STATE_BYTES
        expert_bytes = round(state * EXPERTS_SHARE)
        other_bytes = state - expert_bytes
        source = f"{STATE_BYTES} B for each of {parameters / 1e9:.3g} G parameters"
        source += "" if options.parameters else f": {ASSUMED}"
    total = expert_bytes + other_bytes
    share = expert_bytes / total if total else 0.0
    sources.explain("training state", f"{_amount(total)}, {share:.0%} in experts", source)
    sources.explain("experts", f"{experts} in each of {layers} layers", shape_source)
    return _Sizes(
        expert_bytes=expert_bytes,
        other_bytes=other_bytes,
        experts_per_layer=experts,
        moe_layers=layers,
    )


def _stored_every_s(job: MoETrainingJob, step_s: float, sources: Sources) -> float:
    every_s = stored_every_s(job, step_s)
    if not every_s:
        sources.explain("copies in storage", "none: without memory, training begins anew", JOB)
        return every_s
    interval = job.spec.persistence.interval if job.spec.persistence else None
    measured = interval is None or (interval.minutes is None and interval.steps is None)
    source = ASSUMED if measured else JOB
    sources.explain("copies in storage", f"every {duration_text(round(every_s))}", source)
    return every_s


def stored_every_s(job: MoETrainingJob, step_s: float) -> float:
    """Time between copies in storage, assumed where measurements decide; 0 where the job keeps
    none."""
    persistence = job.spec.persistence
    if persistence is None:
        return 0.0
    interval = persistence.interval
    if interval.minutes is not None:
        return 60.0 * interval.minutes
    return STORED_EVERY_S if interval.steps is None else interval.steps * step_s


def _popularity(options: argparse.Namespace, experts: int, sources: Sources) -> tuple[float, ...]:
    """Portions of the experts of a layer; empty where they are equal."""
    tokens = sources.profile.expert_tokens
    skew, source = options.skewness, FLAG
    if skew is None and tokens:
        skew = sum(map(skewness, tokens)) / len(tokens)
        source = str(options.profile)
    if not skew:
        return ()
    popularity = draw_popularity(skew, experts, generator(options.seed))
    drawn, top = skewness(popularity), max(popularity)
    value = f"{skew:.3g} (drawn: {drawn:.3g}, an expert gets up to {top:.0%})"
    sources.explain("skewness of routing", value, source)
    return popularity


def _survives(
    options: argparse.Namespace,
    job: MoETrainingJob,
    popularity: tuple[float, ...],
    gpus: int,
    experts: int,
    sources: Sources,
) -> Survives | None:
    """Survival of the job's experts in seats, for as many nodes as are simulated."""
    survives = survives_in_seats(job, popularity or (1 / experts,) * experts)
    if survives is not None:
        nodes = gpus // job.spec.nproc_per_node
        chances = ", ".join(f"{survives(nodes, lost):.0%}" for lost in (1, 2, 3) if lost <= nodes)
        source = JOB if not options.skewness else f"the job, and {FLAG}"
        sources.explain("experts in seats outlive 1, 2, 3 lost nodes", chances, source)
    return survives


def _frozen_saves(options: argparse.Namespace, sources: Sources) -> float:
    """Portion of a step that frozen experts save where a window is repeated."""
    saves, source = options.frozen_saves, FLAG
    if saves is None:
        saves, source = sources.profile.frozen_saves, str(options.profile)
    if saves is None:
        return 0.0
    sources.explain("frozen experts save, of a step", f"{saves:.0%}", source)
    return float(saves)


def _amount(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= 10 * size:
            return f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"


def memory_rates_of(options: argparse.Namespace, sources: Sources) -> tuple[float, float]:
    """Rates in bytes per second at which a node copies into memory, and sends to others."""
    return (
        sources.rate("copy", options.copy_bandwidth, COPY_BYTES_S),
        sources.rate("network", options.network_bandwidth, NETWORK_BYTES_S),
    )


def slower_of(options: argparse.Namespace, sources: Sources) -> float:
    """Portion by which a snapshot lengthens a step."""
    percent = options.slower_percent
    flag = None if percent is None else percent / 100
    return sources.number("slower", flag, SLOWER, "a step with a snapshot is longer by", "%")


def _cluster(
    options: argparse.Namespace, job: MoETrainingJob, nodes: int, sources: Sources
) -> Cluster:
    interval = job.spec.snapshot.interval
    spares = options.spares
    source = FLAG
    if spares is None and options.gpus is None:
        spares, source = job.spec.failure_policy.spares, JOB
    elif spares is None:
        spares, source = max(1, round(nodes * SPARES_SHARE)), f"1 %: {ASSUMED}"
    sources.explain("spares", str(spares), source)
    node, process = interval.node_mtbf_days, interval.process_mtbf_days
    losses = options.node_losses
    if losses is None:
        losses = process / (node + process)
    sources.explain(
        "failures that take a node with them",
        f"{losses:.0%}",
        FLAG if options.node_losses is not None else "nodeMtbfDays and processMtbfDays of the job",
    )
    detect_s, restart_s, reform_s = repair_of(options, sources)
    replacement_s = duration_of(options.replacement)
    if options.trace is None:
        source = ASSUMED if options.replacement == REPLACEMENT else FLAG
        sources.explain("until a lost node is replaced", duration_text(replacement_s), source)
    return Cluster(
        nodes=nodes,
        spares=spares,
        detect_s=detect_s,
        restart_s=restart_s,
        replacement_s=inf if options.trace is not None else replacement_s,
        node_losses=losses,
        reform_s=reform_s,
        join_wait_s=job.spec.failure_policy.join_wait_seconds,
        least_nodes=job.spec.least_nodes if job.spec.may_shrink and not options.gpus else 1,
        copy_nodes=1 if options.gpus else job.spec.copy_nodes,
    )


def repair_of(options: argparse.Namespace, sources: Sources) -> tuple[float, float, float]:
    """Seconds of detection, of a restart, and of a reform in place."""
    stays = "processes stay" if options.processes == "stay" else "all processes start again"
    number = sources.number
    detect_s = number("detect", options.detect_seconds, DETECT_S, "detection of a lost node", "s")
    restart_s = number(
        "restart", options.restart_seconds, RESTART_S, f"restart after it, {stays}", "s"
    )
    reform_s = number(
        "reform", options.reform_seconds, REFORM_S, "to go on with other nodes, in place", "s"
    )
    return detect_s, restart_s, reform_s
