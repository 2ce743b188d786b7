"""What the site has beside the files of docs/: pages made of the README, the changelog and the
guide for contributors, one per public module, and one per source file that a document links to.

Links between documents are written as they work in the repository. Here they are led to where the
target is in the site; mkdocs then checks each of them. Must not reach the network.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
SDK = ROOT / "trainer_sdk"
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
DECISIONS = "decisions/README.md"
LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[#)])")
FROM_ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^>]*>')
LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown"}


def on_config(config: Any) -> Any:
    """List the decisions."""
    names = [f"decisions/{path.name}" for path in _decisions()]
    config.nav[-1]["Decisions"] = [DECISIONS, *names]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of docs/."""
    documents = {path: path.read_text("utf-8") for path in (ROOT / "docs").glob("**/*.md")}
    for name, uri in TOP.items():
        documents[ROOT / name] = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, uri, content=documents[ROOT / name]))
    for module in _public_modules():
        page = f"---\ntitle: {module}\n---\n\n::: {module}\n"
        files.append(File.generated(config, f"api/{module}.md", content=page))
    linked = {
        target
        for path, text in documents.items()
        for link in LINK.findall(text)
        if (target := _target(path, link)) is not None and _uri(target).startswith("source/")
    }
    for path in sorted(linked):
        generated = File.generated(config, _uri(path), content=_source_page(path))
        generated.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(generated)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where their targets are in the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    if uri == DECISIONS:
        markdown += "\n" + "".join(f"- [{_title(path)}]({path.name})\n" for path in _decisions())
    name = next((name for name, top in TOP.items() if top == uri), f"docs/{uri}")

    def lead(match: re.Match[str]) -> str:
        target = _target(ROOT / name, match[0])
        return match[0] if target is None else os.path.relpath(_uri(target), Path(uri).parent)

    return LINK.sub(lead, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads something from another host."""
    if found := FROM_ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))


def _title(document: Path) -> str:
    return document.read_text("utf-8").splitlines()[0].removeprefix("# ")


def _target(document: Path, link: str) -> Path | None:
    """The file or folder of the repository that `link` in `document` means, if it exists."""
    path = Path(os.path.normpath(document.parent / link))
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _uri(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if name == "docs/decisions":
        name += "/README.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return TOP.get(name, f"source/{name}.md")


def _source_page(path: Path) -> str:
    heading = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*.py"))
        return heading + "".join(f"- `{name}`\n" for name in names)
    return f"{heading}````{LANGUAGES.get(path.suffix, '')}\n{path.read_text('utf-8')}\n````\n"


def _public_modules() -> list[str]:
    """Modules of the SDK without an underscore that have something public of their own."""
    found = []
    for path in sorted(SDK.glob("holdfast/**/*.py")):
        parts = path.relative_to(SDK).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if "._" not in name and _has_names(path):
            found.append(name)
    return found


def _has_names(path: Path) -> bool:
    """Whether the module defines or hands on anything."""
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text("utf-8")).body)
