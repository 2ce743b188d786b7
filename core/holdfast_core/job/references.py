"""References to environment variables in a container's words, resolved as the kubelet does.

`$(NAME)` in `command`, `args` and values of `env` stands for a variable, `$$` for a dollar sign. A
reference to a variable that does not exist, or that comes later in `env`, stays as it is written.
References to references can expand a short text enormously, so the result is limited to the size
that Linux passes to a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast_core.errors import InvalidJobError

CHARACTERS_MAX = 1 << 21
"""Characters of all words, or of all variables, of a program: Linux gives it 2 MiB for both."""


def resolve(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its references to `variables` resolved.

    Raises:
        InvalidJobError: it is too long.
    """
    parts, at, room = [], 0, CHARACTERS_MAX
    while (dollar := text.find("$", at)) >= 0:
        parts.append(text[at:dollar])
        what, at = text[dollar : dollar + 2], dollar + 2
        if what == "$$":
            what = "$"
        elif what == "$(":
            end = text.find(")", at)
            if end < 0:
                # Nor is any later reference complete; dollar signs may be escaped nevertheless.
                return "".join((*parts, what, text[at:].replace("$$", "$")))
            name, at = text[at:end], end + 1
            what = variables.get(name, f"$({name})")
            room = _take(room, what)
        parts.append(what)
    return "".join((*parts, text[at:]))


def resolve_words(words: Iterable[str], variables: Mapping[str, str]) -> Sequence[str]:
    """A command line with its references to `variables` resolved. Raises as `resolve`."""
    resolved, room = [], CHARACTERS_MAX
    for word in words:
        resolved.append(resolve(word, variables))
        room = _take(room, resolved[-1])
    return resolved


def resolve_env(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The variables of a container's `env`, as far as the document has their values (no
    `valueFrom`), with references to earlier ones resolved. Raises as `resolve`."""
    variables: dict[str, str] = {}
    room = CHARACTERS_MAX
    for entry in entries:
        if "valueFrom" not in entry:
            variables[entry["name"]] = resolve(entry.get("value", ""), variables)
            room = _take(room, variables[entry["name"]])
    return variables


def _take(room: int, text: str) -> int:
    """What is left of `room` after `text`."""
    if len(text) > room:
        raise InvalidJobError(
            f"with its references to variables resolved, the trainer's container has more than "
            f"{CHARACTERS_MAX} characters in env, or in command and args: Linux starts no such "
            f"program; look for variables that repeat each other"
        )
    return room - len(text)
