"""Which change would gain most for a job, by what `holdfast plan` knows of it.

The plan's own sizes, rates and failures are taken; what only `holdfast simulate` asks for has that
command's defaults.
"""

from __future__ import annotations

from holdfast_cli.planner.effective_time.assumed_policies import AssumedCosts
from holdfast_cli.planner.effective_time.policy_models import Cluster, PolicyModel, Workload
from holdfast_cli.planner.effective_time.runs import TrainingRun, simulate_runs
from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import Assumptions
from holdfast_cli.planner.models.recommending import DETECT_S, FAILURES, RESTART_S, RUNS
from holdfast_cli.planner.models.seated_experts import fewest_nodes, survives_in_seats
from holdfast_cli.planner.seeds import generator
from holdfast_cli.planner.simulation.inputs import (
    REFORM_S,
    REPLACEMENT,
    SLOWER,
    STORAGE_BYTES_S,
    duration_of,
    job_setting,
    possible_policies,
    stored_every_s,
)
from holdfast_cli.planner.simulation.levers import Levers, compare_levers
from holdfast_core.job.parsing import MoETrainingJob


def levers_of_plan(job: MoETrainingJob, sizes: ModelSizes, assumed: Assumptions) -> Levers:
    """The job as its document has it, and the changes to it, at the plan's rate of failures.

    Args:
        sizes: of a model with experts.
    """
    spec = job.spec
    node_s, process_s = assumed.node_losses_per_s, assumed.process_failures_per_s
    mtbf_s = 1 / (spec.nodes * (node_s + process_s))
    unit_s = next((unit for unit in (3600.0, 60.0) if mtbf_s >= 10 * unit), 1.0)
    mtbf_s = max(1, round(mtbf_s / unit_s)) * unit_s  # as people write it
    workload = Workload(
        step_s=assumed.step_s, stages=spec.parallelism.pp, micro_batches=spec.parallelism.pp
    )
    experts = max(len(units) for units in sizes.by_layer.values())
    cluster = Cluster(
        nodes=spec.nodes,
        spares=spec.failure_policy.spares,
        detect_s=DETECT_S,
        restart_s=RESTART_S,
        replacement_s=duration_of(REPLACEMENT),
        node_losses=node_s / (node_s + process_s),
        reform_s=REFORM_S,
        join_wait_s=spec.failure_policy.join_wait_seconds,
        least_nodes=spec.least_nodes if spec.may_shrink else fewest_nodes(job, experts),
        copy_nodes=spec.copy_nodes,
    )
    costs = AssumedCosts(
        expert_bytes=sum(sizes.experts.values()),
        other_bytes=sizes.other_bytes,
        experts_per_layer=experts,
        moe_layers=len(sizes.by_layer),
        copy_bytes_s=assumed.copy_bytes_s,
        network_bytes_s=assumed.network_bytes_s,
        storage_bytes_s=STORAGE_BYTES_S,
        losses=spec.redundancy.losses,
        group_nodes=min(spec.redundancy.group_size(spec.nodes), spec.nodes),
        stored_every_s=stored_every_s(job, assumed.step_s),
        slower=SLOWER,
        survives=survives_in_seats(job, (1 / experts,) * experts),
        seated_on=fewest_nodes(job, experts),
    )

    def simulate(model: PolicyModel, workload: Workload, cluster: Cluster) -> list[TrainingRun]:
        return simulate_runs(
            model,
            workload,
            cluster,
            mtbf_s,
            runs=RUNS,
            length_s=FAILURES * mtbf_s,
            draw_of=generator,
        )

    setting = job_setting(job, workload, cluster, costs)
    return compare_levers(setting, possible_policies(job), mtbf_s, mtbf_s, simulate)
