"""Removal of sets that need not be kept, in an order in which no crash leaves a wrong set."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from holdfast_core.durable.choice import MARK_FILE
from holdfast_core.durable.retention import Removal, SetState, choose_removals
from holdfast_core.durable.sets import LATEST_FILE, MANIFEST_FILE, parse_set_name
from holdfast_core.snapshots.generations import Generation
from holdfast_storage.finding import Findings, Looked
from holdfast_storage.roots import TierRoot

_RANK_FILE = re.compile(r"rank-[0-9]{5,7}\.safetensors", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """Sets and files that were removed."""

    sets: tuple[Removal, ...]
    files: int
    """Number of files removed, including those that belong to no set."""
    bytes: int
    unfinished: int
    """Number of abandoned temporary files and multipart uploads."""


def clean(
    root: TierRoot,
    findings: Findings,
    *,
    keep: int,
    keep_every: int,
    idle_since_s: float,
    writing: Collection[Generation],
) -> Cleaned:
    """Remove from `root` the sets that `choose_removals` chooses, files of complete sets that their
    manifests do not name, and files begun before `idle_since_s` and never finished."""
    removals = choose_removals(
        [each.found for each in findings.sets],
        keep=keep,
        keep_every=keep_every,
        idle_since_s=idle_since_s,
        writing=writing,
    )
    going = {removal.generation for removal in removals}
    files = nbytes = 0
    for looked in reversed(findings.sets):
        names = _ours(looked) if looked.found.generation in going else _extra(looked, idle_since_s)
        # The manifest goes first, by itself: from here on this is no set, whatever happens.
        for batch in ([n for n in names if n == MANIFEST_FILE], names - {MANIFEST_FILE}):
            if batch:
                root.delete(sorted(looked.items[name].path for name in batch))
        files += len(names)
        nbytes += sum(looked.items[name].bytes for name in names)
    return Cleaned(
        sets=removals,
        files=files,
        bytes=nbytes,
        unfinished=_discard(root, findings.job, idle_since_s, writing),
    )


def _ours(looked: Looked) -> set[str]:
    """Names of the files that Holdfast wrote; files of others stay."""
    return {name for name in looked.items if name == MANIFEST_FILE or _RANK_FILE.fullmatch(name)}


def _extra(looked: Looked, idle_since_s: float) -> set[str]:
    if looked.found.state is not SetState.COMPLETE or looked.stored is None:
        return set()
    named = {MANIFEST_FILE, *(file.file for file in looked.stored.files)}
    return {name for name in _ours(looked) - named if looked.items[name].modified_s < idle_since_s}


def _discard(root: TierRoot, job: str, idle_since_s: float, writing: Collection[Generation]) -> int:
    count = 0
    for each in root.unfinished(job):
        names = each.path.split("/")[1:]
        generation = parse_set_name(names[0]) if len(names) == 2 else None
        is_set_file = names[-1] == MANIFEST_FILE or _RANK_FILE.fullmatch(names[-1])
        ours = (generation is not None and is_set_file) or names in ([LATEST_FILE], [MARK_FILE])
        if ours and generation not in writing and each.modified_s < idle_since_s:
            root.discard(each)
            count += 1
    return count
