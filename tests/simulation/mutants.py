"""Plants bugs in a copy of the sources and asks the simulation to find them: `make mutants`.

A simulation that finds nothing may be blind. Each mutant breaks one rule of the protocol; a mutant
that survives is a hole in the simulation, or a rule that another one already enforces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core", "protos", "daemon")
ENGINE = "daemon/holdfast_daemon/engine"
SCHEDULES = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One planted bug: `before` becomes `after`, in each of the edits."""

    name: str
    edits: tuple[tuple[str, str, str], ...]


MUTANTS = (
    Mutant(
        name="free the old generation when the new one is complete, not when it is protected",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "    retained = protected\n",
                "    retained = _newest([g for g in current "
                "if recovery.is_complete(membership, holdings, g)], protected)\n",
            ),
        ),
    ),
    Mutant(
        name="decide the line before every daemon has verified what it holds",
        edits=((f"{ENGINE}/leader.py", "not reports[m].verified for m", "False for m"),),
    ),
    Mutant(
        name="protect the newest generation first",
        edits=(
            (
                f"{ENGINE}/upkeep.py",
                "return sorted(held or set())",
                "return sorted(held or set(), reverse=True)",
            ),
        ),
    ),
    Mutant(
        name="call a generation protected without the parity of one member",
        edits=(
            (
                "core/holdfast_core/recovery.py",
                "for owner in (place.index for place in membership.members)",
                "for owner in (place.index for place in membership.members[1:])",
            ),
        ),
    ),
    Mutant(
        name="count what was adopted as verified",
        edits=(
            (
                f"{ENGINE}/state.py",
                "if slot.state is SlotState.SEALED and slot.verified and",
                "if slot.state is SlotState.SEALED and",
            ),
            (
                f"{ENGINE}/answers.py",
                "if held is None or not held[1].verified:",
                "if held is None:",
            ),
        ),
    ),
    Mutant(
        name="forget what was announced, and trust reports that are not verified",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "for member, r in reports.items() if r.verified}",
                "for member, r in reports.items()}",
            ),
            (
                f"{ENGINE}/convergence.py",
                "leader.told(membership, memory.directive, line, retained)",
                "leader.told(membership, memory.directive, line, None)",
            ),
        ),
    ),
    Mutant(
        name="keep nothing beside the line when an epoch begins",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "previous = replace(previous, line=line, protected=kept, retained=kept)",
                "previous = replace(previous, line=line)",
            ),
        ),
    ),
    Mutant(
        name="give slots away that a trainer may still be writing into",
        edits=(
            (
                f"{ENGINE}/convergence.py",
                "        for _, slot in memory.slots():\n",
                "        for _, slot in memory.slots():\n"
                "            if slot.state is SlotState.GRANTED:\n"
                "                slot.clear()\n",
            ),
        ),
    ),
)


def survives(mutant: Mutant) -> str:
    """How the simulation fares with `mutant`: the first line of its complaint, empty when none."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in SOURCES:
            shutil.copytree(ROOT / name, copy / name)
        for file, before, after in mutant.edits:
            path = copy / file
            text = path.read_text()
            if before not in text:
                raise SystemExit(f"{mutant.name}: {file} has changed; mend the mutant")
            path.write_text(text.replace(before, after, 1))
        command = ["-m", "holdfast_daemon.simulation", "--steps", "8", "--count", str(SCHEDULES)]
        result = subprocess.run(
            [sys.executable, "-P", *command],
            env={**os.environ, "PYTHONPATH": ":".join(str(copy / name) for name in SOURCES)},
            capture_output=True,
            text=True,
            check=False,
        )
    found = [line for line in result.stderr.splitlines() if line.startswith("AssertionError: seed")]
    return found[0][:60] if found else ""


def main() -> int:
    """Print how each mutant fares; 1 when one survives."""
    survivors = 0
    for mutant in MUTANTS:
        complaint = survives(mutant)
        survivors += not complaint
        print(f"{'found   ' if complaint else 'SURVIVED'} {mutant.name}  {complaint}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
