"""Which of two memberships of a job is newer, and which one a daemon's report lacks."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast_core.snapshots.membership import Membership
from holdfast_operator.reconciler.observe.views import JobView


def version(membership: Membership) -> tuple[int, int]:
    """Sort key of the memberships of a job: a newer one is greater."""
    return membership.epoch, membership.revision


def is_newer(ours: Membership, theirs: JobView | None) -> bool:
    """Whether a daemon that reports `theirs` has an older membership than `ours`, or none."""
    if theirs is None or theirs.membership is None:
        return True
    return version(theirs.membership) < version(ours)


def completed(view: JobView, before: JobView | None, known: Membership | None) -> JobView:
    """Add the membership that `view` leaves out: a daemon does not repeat a membership that it has
    already sent on this stream."""
    if view.membership is not None:
        return view
    if known is not None and (known.epoch, known.revision) == (view.epoch, view.revision):
        return replace(view, membership=known)
    if before is None or before.epoch != view.epoch:
        return view
    return replace(view, membership=before.membership)
