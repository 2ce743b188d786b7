"""What storage holds of a job, and whether it is the one that the job's copies were put into."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.stored_line import Found
from holdfast_daemon.stored_sets import TierSets
from holdfast_storage.marking import is_marked


class MarkedSets(TierSets):
    """`TierSets` that look for the mark where there is no set: a set is mark enough."""

    def find(self) -> Found:
        found = super().find()
        if found.copies or found.unreadable:
            return found
        return replace(found, marked=is_marked(self._place, self._job))
