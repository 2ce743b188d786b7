"""What held up a job that hung, with the innermost calls of the ranks that did.

A status and an event have room for some calls of some ranks; whole stacks are in the catalogue and
in the logs of daemons. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.inspections import Frame, InspectedProcess
from holdfast_core.job.status import HangStatus, HungRankStatus

RANKS_MAX = 4
CALLS_MAX = 8
CALL_CHARACTERS_MAX = 64
"""Characters of one call: together, a status has at most 2 KiB of calls."""
FOLDERS_SHOWN = 2
"""Parts of a file's path that are shown, from its end."""


def hung_rank(process: InspectedProcess, member: int, node: str) -> HungRankStatus:
    """The innermost calls of a rank, of bounded size."""
    return HungRankStatus(
        rank=process.rank,
        member=member,
        node=node,
        calls=tuple(_call(frame) for frame in process.frames[:CALLS_MAX]),
    )


def stacks_in_words(hang: HangStatus) -> list[str]:
    """A line for each rank whose calls are known, the innermost call first."""
    return [
        f"rank {each.rank} on {each.node}: {' < '.join(each.calls)}"
        for each in hang.ranks or ()
        if each.calls
    ]


def _call(frame: Frame) -> str:
    file = "/".join(frame.file.split("/")[-FOLDERS_SHOWN:])
    text = f"{frame.function} ({file}:{frame.line})"
    return text if len(text) <= CALL_CHARACTERS_MAX else f"{text[: CALL_CHARACTERS_MAX - 1]}…"


def hang_from(document: object) -> HangStatus | None:
    """Read `.status.lastHang`, as far as this version knows it; None without one."""
    if not isinstance(document, dict) or not document.get("text"):
        return None
    ranks: Iterable[object] = document.get("ranks") or ()
    return HangStatus(
        text=str(document["text"]),
        epoch=document.get("epoch"),
        kind=document.get("kind"),
        detected_at=document.get("detectedAt"),
        ranks=tuple(
            HungRankStatus(
                rank=each.get("rank", 0),
                member=each.get("member"),
                node=each.get("node") or "?",
                calls=tuple(map(str, each.get("calls") or ())),
            )
            for each in ranks
            if isinstance(each, dict)
        ),
    )
