"""The report of a benchmark run for machines, which needs no package that draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.measure import Figure, Outcome
from benchmarks.targets import TARGETS, Target


def verdict(target: Target, figure: Figure) -> bool | None:
    """Whether the target is met; None without a target."""
    return None if target.at_most is None else figure.value <= target.at_most


def write_json(
    path: Path,
    rows: Mapping[str, Figure],
    peers: Mapping[str, Outcome],
    facts: Mapping[str, object],
    skipped: Mapping[str, str],
) -> None:
    """Write each row's key with its figure, the same for each peer under `peers`, the spread and
    the floor of each figure under `details`, and its target under `targets`."""
    report = {
        **{key: figure.value for key, figure in rows.items()},
        "peers": {
            name: {key: figure.value for key, figure in outcome.rows.items()}
            for name, outcome in peers.items()
        },
        "targets": {
            target.key: {"at_most": target.at_most, "met": verdict(target, rows[target.key])}
            for target in TARGETS
            if target.key in rows
        },
        "details": rows,
        "peer_details": {name: outcome.rows for name, outcome in peers.items()},
        "skipped": skipped,
        "machine": facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
