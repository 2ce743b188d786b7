"""`holdfast plan --experts`: reads its inputs, plans the copies of experts, prints and draws."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast_cli.planner.copies_view import MemorySurvival, copies_view
from holdfast_cli.planner.models.expected_loss import shares_of
from holdfast_cli.planner.plan_inputs import mtbf_days_of
from holdfast_cli.planner.planning import DAY_S, parity_groups
from holdfast_cli.plotting import needs_matplotlib
from holdfast_core.elastic_experts.plans import (
    PLANNED_MAX,
    ExpertPlan,
    ExpertRoom,
    LossCost,
    PlanRules,
    seats_needed,
)
from holdfast_core.elastic_experts.survival import loss_cases
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.job.elastic import MIN_COPIES, Allocation, Placement
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.units import UnitKey, UnitKind

_TOKENS = 1_000_000
"""Tokens of a layer, where shares are given: only ratios matter."""
_TOKENS_MAX = 1_000_000_000_000
LOADS_BYTES_MAX = 1 << 23
"""Largest file of loads: a million experts."""
_LOADS = msgspec.json.Decoder(list[list[int]])


def plan_copies(options: argparse.Namespace, job: MoETrainingJob) -> int:
    """Carry out `holdfast plan --experts`; returns the exit code.

    Raises:
        InvalidJobError: when experts do not fit the seats, or inputs contradict each other.
        StorageError: when a file cannot be read or written.
    """
    for name, degree in (("tp", job.spec.parallelism.tp), ("pp", job.spec.parallelism.pp)):
        if degree > 1:
            raise InvalidJobError(
                f"--experts with spec.parallelism.{name} = {degree}: copies are planned for jobs "
                f"whose ranks each hold whole experts; that is, tp and pp of 1"
            )
    loads = _loads(options, job)
    nodes, nproc = job.spec.nodes, job.spec.nproc_per_node
    given, days = job.spec.elastic, mtbf_days_of(options, job)[0]
    rules = PlanRules(
        min_copies=options.min_copies or (given.min_copies if given else MIN_COPIES),
        allocation=Allocation(
            options.allocation or (given.allocation if given else Allocation.MIN_MAX)
        ),
        placement=Placement(options.placement or (given.placement if given else Placement.AUTO)),
        cost=LossCost(
            node_losses_per_s=1 / (days * DAY_S),
            together_s=options.replace_seconds,
            fallback_s=options.fallback_seconds,
        ),
    )
    seats = options.seats or (given.seats_per_rank if given else 0)
    needed = seats_needed(len(loads[0]), nodes, nproc, rules.min_copies)
    plan = rules.plan(loads, ExpertRoom(nodes=nodes, rank_seats=seats or needed, nproc=nproc))
    console = Console(width=max(Console().width, 100))
    console.print(copies_view(job.key, plan, _in_memory(job, plan)))
    if options.plot is not None:
        with needs_matplotlib():
            from holdfast_cli.planner.copies_plot import write_copies_plot  # noqa: PLC0415
        write_copies_plot(options.plot, plan, title=job.key)
        print(f"wrote {options.plot}")
    return 0


def _loads(options: argparse.Namespace, job: MoETrainingJob) -> list[list[int]]:
    """Tokens of each expert of each layer."""
    if options.loads is not None:
        for flag, value in (
            ("--moe-layers", options.moe_layers),
            ("--experts-per-layer", options.experts_per_layer),
            ("--routing-skew", options.routing_skew or None),
        ):
            if value is not None:
                raise InvalidJobError(f"{flag} follows from --loads; leave it out")
        return _loads_of(options.loads)
    model = job.spec.model
    layers = options.moe_layers or (model.num_moe_layers if model else None)
    experts = options.experts_per_layer or (model.num_experts if model else None)
    if layers is None or experts is None:
        raise InvalidJobError(
            "copies are planned for a model: give --moe-layers and --experts-per-layer, or "
            "spec.model in the job, or --loads"
        )
    if layers * experts > PLANNED_MAX:
        raise InvalidJobError(
            f"{layers} layers of {experts} experts: copies are planned for at most {PLANNED_MAX} "
            f"experts in all"
        )
    loads = []
    for layer in range(layers):
        units = [UnitKey(layer, UnitKind.EXPERT, expert) for expert in range(experts)]
        shares = shares_of(units, options.routing_skew)
        loads.append([round(_TOKENS * shares[unit]) for unit in units])
    return loads


def _loads_of(path: Path) -> list[list[int]]:
    try:
        with path.open("rb") as file:
            data = file.read(LOADS_BYTES_MAX + 1)
    except OSError as error:
        raise StorageError(f"--loads {path} cannot be read: {error.strerror}") from error
    try:
        return read_loads(data)
    except InvalidJobError as error:
        raise InvalidJobError(f"--loads {path}: {error}") from error


def read_loads(data: bytes) -> list[list[int]]:
    """Tokens of each expert, layer by layer, from JSON.

    Raises:
        InvalidJobError: when it is not that, or larger than a plan can be.
    """
    if len(data) > LOADS_BYTES_MAX:
        raise InvalidJobError(f"the file has more than {LOADS_BYTES_MAX} bytes")
    try:
        loads = _LOADS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJobError(
            f"{error}; write a list for each layer with the tokens of each of its experts, like "
            f"[[120, 30], [75, 75]]"
        ) from error
    if not loads or not all(loads):
        raise InvalidJobError("give at least one layer, and experts in each")
    most = max(map(max, loads))
    if most > _TOKENS_MAX:
        raise InvalidJobError(f"{most} tokens of an expert; give at most {_TOKENS_MAX}")
    return loads


def _in_memory(job: MoETrainingJob, plan: ExpertPlan) -> MemorySurvival | None:
    """Survival of snapshots in memory, and of either them or live copies."""
    groups = parity_groups(job)
    if not groups:
        return None
    cases = loss_cases(plan.room.nodes)
    fatal = cases.fatal_to_groups(groups, job.spec.redundancy.losses)
    return MemorySurvival(
        snapshots=cases.survival(fatal),
        either=cases.survival(fatal.both(plan.chosen.fatal)),
    )
