"""How many nodes a job lacks. A placeholder waits for each, so that autoscalers add one. Pure."""

from __future__ import annotations

from holdfast_operator.reconciler.observe.lookups import suspension_of
from holdfast_operator.reconciler.observe.views import ControlState, Shortage
from holdfast_operator.reconciler.report import conditions as judge
from holdfast_operator.reconciler.rules import Observation


def shortage_of(observation: Observation, state: ControlState) -> Shortage:
    """Compute the members for which the cluster has no node now.

    None is missing for a node whose daemon has not spoken yet. Jobs whose pods another controller
    makes, or a gang's scheduler places all together, show their needs by those pods.
    """
    spec, membership = observation.job.spec, state.membership
    if not observation.pods.needs_placeholders(observation.job):
        return Shortage()
    if state.outcome is not None or suspension_of(observation.job, observation.cluster) is not None:
        return Shortage()
    there = {node.name for node in observation.candidates(state)}
    if membership is None:
        if (
            judge.unsupported(observation.job, observation.cluster, observation.locations)
            is not None
        ):
            return Shortage()
        nodes = observation.cluster.nodes.values()
        there |= {node.name for node in nodes if node.schedulable and not node.gone}
    else:
        homes = {member.node for member in membership.members}
        if len(homes) == spec.nodes and state.no_replacement_since is None:
            return Shortage()
        kept = (observation.cluster.nodes.get(name) for name in homes)
        there |= {
            node.name for node in kept if node is not None and observation.may_return(node, state)
        }
        there |= {node for _, node in state.joining}
    count = max(0, spec.nodes - len(there))
    return Shortage(count=count, beside=tuple(sorted(there)) if count else ())
