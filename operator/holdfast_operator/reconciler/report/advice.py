"""What people can do after a recovery, so that it is the last of its kind. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_core.node_failures import FailureKind
from holdfast_operator.reconciler.observe.views import BlamedNode, ControlState
from holdfast_operator.reconciler.report.end_reasons import ADVICE

_EXAMINE = (
    "Keep work away from {node} (kubectl cordon {node}) until its hardware has been examined: its "
    "kernel log, its devices, and what holdfast preflight finds there."
)
_ADVICE = {
    FailureKind.HARDWARE_FAULT: _EXAMINE,
    FailureKind.FAILED_CHECK: _EXAMINE,
    FailureKind.LOST_NODE: "Find out why {node} was lost; holdfast nodes shows its other failures.",
    FailureKind.HANG: "See the stacks in the log of the daemon on {node}.",
    FailureKind.LOST_RANK: "See what the failed rank wrote (holdfast why, or its log on {node}).",
    FailureKind.FAILED_START: "See what was written last (holdfast why, or the log on {node}).",
}


def advice_for(blamed: Sequence[BlamedNode], state: ControlState, ended_epoch: int) -> str:
    """What to do about the end of `ended_epoch`, in a sentence; empty where nothing is known.

    Args:
        blamed: what counts against nodes.
    """
    if state.shortage is not None and state.shortage.epoch == ended_epoch:
        return f"{ADVICE[:1].upper()}{ADVICE[1:]}."
    known = [each for each in blamed if each.kind in _ADVICE]
    return _ADVICE[known[0].kind].format(node=known[0].node) if known else ""
