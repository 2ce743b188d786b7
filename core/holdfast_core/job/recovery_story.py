"""One recovery in sentences: what happened, how training continued, what it cost, what to do.

People read the same sentences in an event of the job (`kubectl describe`) and in `holdfast why`.
Pure.
"""

from __future__ import annotations

from holdfast_core.job.status import RecoveryStatus
from holdfast_core.last_lines import within_bytes
from holdfast_core.quantities import format_count
from holdfast_core.states import RestoreSource

_SOURCES = {
    RestoreSource.LIVE: "in the state that the surviving processes had; nothing was restored",
    RestoreSource.LOCAL: "restored from memory of the same nodes",
    RestoreSource.PARITY: "rebuilt from other nodes, by parity or replicas",
    RestoreSource.STORAGE: "loaded from durable storage",
    RestoreSource.NONE: "from the beginning, because nothing was protected yet",
}
_CAUSE_BYTES_MIN = 100


def recovery_in_words(recovery: RecoveryStatus, bytes_max: int | None = None) -> str:
    """The story of `recovery`.

    Args:
        bytes_max: bytes of UTF-8 that it may take: the cause is cut to what the rest leaves of
            them, because it is told elsewhere, too.
    """
    rest = " ".join(_after_the_cause(recovery))
    cause = recovery.cause or "something was lost"
    if bytes_max is not None:
        left = bytes_max - len(rest.encode()) - len(". ")
        cause = within_bytes(cause, max(left, _CAUSE_BYTES_MIN))
    text = f"{cause}. {rest}"
    return text if bytes_max is None else within_bytes(text, bytes_max)


def _after_the_cause(recovery: RecoveryStatus) -> list[str]:
    if recovery.seconds is None:
        return ["The ranks are not all at work again yet."]
    text = f"All ranks were at work again after {recovery.seconds:.1f} s"
    if recovery.restored_step is not None:
        text += f", after step {recovery.restored_step}"
    source = RestoreSource.of(recovery.source or "")
    text += f" ({_SOURCES[source]})." if source in _SOURCES else "."
    sentences = [text]
    if (lost := recovery.lost_steps) is not None:
        again = f"{format_count(lost, 'step')} had to be trained again."
        sentences.append(again if lost else "No step was lost.")
    sentences += [f"{each[:1].upper()}{each[1:]}." for each in (recovery.replay,) if each]
    return [*sentences, *([recovery.advice] if recovery.advice else [])]
