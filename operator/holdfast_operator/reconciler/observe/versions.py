"""Which of two memberships of a job is newer, and which one a daemon's report lacks; and which
reports are of an earlier job of the same name."""

from __future__ import annotations

from dataclasses import replace as with_fields

from msgspec.structs import replace

from holdfast_core.snapshots.membership import Membership, are_two_jobs
from holdfast_operator.reconciler.observe.views import ClusterView, JobView


def version(membership: Membership) -> tuple[int, int]:
    """Sort key of the memberships of a job: a newer one is greater."""
    return membership.epoch, membership.revision


def is_newer(ours: Membership, theirs: JobView | None) -> bool:
    """Whether a daemon that reports `theirs` has an older membership than `ours`, or none, or that
    of an earlier job of the name: epochs of two jobs cannot be compared."""
    if theirs is None or theirs.membership is None or are_two_jobs(ours.uid, theirs.uid):
        return True
    return version(theirs.membership) < version(ours)


def completed(view: JobView, before: JobView | None, known: Membership | None) -> JobView:
    """Add the membership that `view` leaves out: a daemon does not repeat a membership that it has
    already sent on this stream."""
    if view.membership is not None:
        return view
    said = (view.epoch, view.revision)
    is_of_job = known is not None and not are_two_jobs(known.uid, view.uid)
    if known is not None and is_of_job and (known.epoch, known.revision) == said:
        return replace(view, membership=known)
    if before is None or before.epoch != view.epoch or are_two_jobs(before.uid, view.uid):
        return view
    return replace(view, membership=before.membership)


def without_earlier_jobs(observed: ClusterView, uid: str) -> ClusterView:
    """`observed` without reports of earlier jobs of the name, whose daemons have not heard yet that
    these have ended: nothing of them is adopted, waited for or trained from."""
    strange = {
        name: replace(node, job=None)
        for name, node in observed.nodes.items()
        if node.job is not None and are_two_jobs(uid, node.job.uid)
    }
    return with_fields(observed, nodes={**observed.nodes, **strange}) if strange else observed
