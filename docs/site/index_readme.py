"""The README as a package index shows it, where its links to files of the repository lead nowhere.

    python docs/site/index_readme.py TREE

rewrites TREE/README.md before distributions are made of the tree. Links lead to the source of this
version where `project.urls` in TREE/pyproject.toml has a `Source`; otherwise they become plain
text.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

LINK = re.compile(r"\[([^\[\]]+)\]\((?![a-z]+:)([^()]+)\)")
"""A link with a relative target: its text, which may go over several lines, and the target."""


def for_index(readme: str, source: str | None, version: str) -> str:
    """The text of the README with links that work anywhere, or none.

    Args:
        source: address of the repository; None: it has none that is known.
    """
    if source is None:
        return LINK.sub(r"\1", readme)
    return LINK.sub(rf"[\1]({source.rstrip('/')}/blob/v{version}/\2)", readme)


def main(tree: Path) -> None:
    project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
    readme = tree / "README.md"
    source = project.get("urls", {}).get("Source")
    text = for_index(readme.read_text("utf-8"), source, project["version"])
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
