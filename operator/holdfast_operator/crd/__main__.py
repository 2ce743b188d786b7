"""`python -m holdfast_operator.crd` prints the resource. With `--reference PAGE` it prints the page
with its reference regenerated; with `--settings`, the SDK's module of settings."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from holdfast_operator.crd.reference import page
from holdfast_operator.crd.schema import definition
from holdfast_operator.crd.settings import settings_module

HEADER = "# Generated from core/holdfast_core/job by `make crds`; not edited by hand.\n"


class _Dumper(yaml.SafeDumper):
    """YAML dumper that repeats equal parts instead of naming them (`&id001`)."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def definition_text() -> str:
    """The CustomResourceDefinition as a YAML file."""
    return HEADER + yaml.dump(
        definition(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=96
    )


def main(arguments: list[str]) -> int:
    """Print what the arguments ask for; return 2 when they are invalid."""
    match arguments:
        case []:
            sys.stdout.write(definition_text())
        case ["--reference", path]:
            sys.stdout.write(page(Path(path).read_text(encoding="utf-8")))
        case ["--settings"]:
            sys.stdout.write(settings_module())
        case _:
            usage = "usage: python -m holdfast_operator.crd [--reference PAGE | --settings]"
            print(usage, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
