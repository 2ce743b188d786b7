"""Writes the files of the chart that are made from something else; `--check` compares instead.

    python charts/chart_files.py

Helm reads nothing outside the chart, so that the custom resource is copied. This script is outside
of the packages because it may know both the daemon and the operator, which may not know each other.
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
    """Path below the chart → what belongs there.

    Raises:
        ValueError: when something that they are made from is incomplete.
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
    """0 when the files are written, or are what they should be."""
    parser = argparse.ArgumentParser(description="Write the generated files of the chart.")
    parser.add_argument("--check", action="store_true", help="only say which are out of date")
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
