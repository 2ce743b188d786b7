"""Writes the generated files of the chart; `--check` compares them instead.

    python charts/chart_files.py

Helm reads nothing outside the chart, so the custom resource is copied into it. This script is
outside the packages because it imports both the daemon and the operator, which may not import each
other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml
from dashboards import dashboard
from values_schema import schema

from holdfast_daemon import metrics as daemon
from holdfast_operator.kube import metrics as operator

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "holdfast"
RESOURCE = "holdfast.dev_moetrainingjobs.yaml"


def files() -> dict[Path, str]:
    """Content of each generated file, by its path below the chart.

    Raises:
        ValueError: when a source of these files is incomplete.
    """
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    return {
        Path("values.schema.json"): _text(schema(values, yaml.safe_load(values))),
        Path("files/dashboard.json"): _text(
            dashboard([*daemon.DEFINITIONS, *operator.DEFINITIONS])
        ),
        Path("files/crds", RESOURCE): (ROOT / "crds" / RESOURCE).read_text(encoding="utf-8"),
    }


def _text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write or compare the files; return 0 when they are written, or up to date."""
    parser = argparse.ArgumentParser(description="Write the generated files of the chart.")
    parser.add_argument("--check", action="store_true", help="only list files that are out of date")
    check = parser.parse_args().check
    try:
        wanted = files()
    except ValueError as error:
        print(f"chart_files: {error}", file=sys.stderr)
        return 1
    stale = [
        name
        for name, text in wanted.items()
        if not (CHART / name).exists() or (CHART / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        if check:
            print(f"charts/holdfast/{name} is out of date: run 'make chart'", file=sys.stderr)
        else:
            (CHART / name).write_text(wanted[name], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
