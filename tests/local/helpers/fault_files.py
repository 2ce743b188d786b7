"""The files by which a test makes a process of a run fail: `staying_trainer.Faults` reads them."""

from __future__ import annotations

from pathlib import Path


def fail_at(directory: Path, who: int | str, point: str, what: str = "SIGKILL") -> None:
    """Have a process suffer a fault at its next arrival at a point.

    Args:
        who: whose fault it is, as `Faults` of that process was told: its rank or its pid.
        what: a signal for the process itself, or a signal and the pid that gets it.
    """
    written = directory / f"fault-{who}.tmp"
    written.write_text(f"{point} {what}")
    written.replace(directory / f"fault-{who}")


def pending_faults(directory: Path) -> list[Path]:
    """The faults that have not happened yet."""
    return [path for path in directory.glob("fault-*") if path.suffix != ".tmp"]
