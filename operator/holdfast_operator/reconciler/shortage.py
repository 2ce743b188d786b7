"""How many nodes a job lacks: for each of them a pod waits, so that autoscalers add one. Pure."""

from __future__ import annotations

from holdfast_core.job.schema import Gang
from holdfast_operator.reconciler import conditions as judge
from holdfast_operator.reconciler.lookups import suspension_of
from holdfast_operator.reconciler.steps import Look
from holdfast_operator.reconciler.views import ControlState


def missing_nodes(look: Look, state: ControlState) -> int:
    """Number of members for which the cluster has no node now.

    None is missing for a node whose daemon has not spoken yet. Jobs whose pods another controller
    makes, or a gang's scheduler places all together, show their needs by those pods.
    """
    spec, membership = look.job.spec, state.membership
    if spec.trainer.external or spec.scheduling.gang not in (Gang.NONE, Gang.KUEUE):
        return 0
    if state.outcome is not None or suspension_of(look.job, look.observed) is not None:
        return 0
    ready = {node.name for node in look.candidates(state)}
    if membership is None:
        if judge.unsupported(look.job, look.observed, look.locations) is not None:
            return 0
        nodes = look.observed.nodes.values()
        may_come = {node.name for node in nodes if node.schedulable and not node.gone}
        return max(0, spec.nodes - len(ready | may_come))
    homes = {member.node for member in membership.members}
    if len(homes) == spec.nodes and state.no_replacement_since is None:
        return 0
    kept = {
        name
        for name in homes
        if (node := look.observed.nodes.get(name)) is not None and look.may_return(node, state)
    }
    return max(0, spec.nodes - len(kept | ready | {node for _, node in state.joining}))
