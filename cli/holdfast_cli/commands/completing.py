"""Completes words of the command line for kubectl, which asks the plugin itself.

A shell completes `holdfast` with a script that contains all its words (shtab). kubectl has a script
of its own: for `kubectl holdfast …` it runs `kubectl_complete-holdfast` with the words after its
name, of which the last is to be completed. It reads one candidate per line, with a description
after a tab, and then a directive for the shell, as cobra defines them.

This module runs at each press of the tab key, so it must neither contact a cluster nor import what
the commands need.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILES = 0
"""Directive: the shell completes files beside the candidates."""
NO_FILES = 4

Subcommands = argparse._SubParsersAction
Found = Iterator[tuple[str, str]]


@dataclass(kw_only=True, slots=True)
class _Position:
    """Position of a word in the command line."""

    parser: argparse.ArgumentParser
    arguments: list[argparse.Action]
    """Those that still come, in order."""
    option: argparse.Action | None = None
    """Whose value the word is."""


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The text that kubectl reads to complete the last of `words`."""
    *before, begun = words or [""]
    position = _walk(parser, before)
    action = position.option
    if action is None and begun.startswith("-"):
        candidates, directive = _options(position.parser), NO_FILES
    else:
        if action is None and position.arguments:
            action = position.arguments[0]
        candidates, directive = _values(action), _directive(action)
    lines = [
        f"{name}\t{text}" if text else name for name, text in candidates if name.startswith(begun)
    ]
    return "\n".join([*lines, f":{directive}"])


def _walk(parser: argparse.ArgumentParser, words: Sequence[str]) -> _Position:
    position = _enter(parser)
    for word in words:
        if position.option is not None:
            position.option = None
        elif word.startswith("-"):
            name, given, _ = word.partition("=")
            action = position.parser._option_string_actions.get(name)
            if action is not None and action.nargs != 0 and not given:
                position.option = action
        elif position.arguments:
            action = position.arguments.pop(0)
            if isinstance(action, Subcommands) and word in action.choices:
                position = _enter(action.choices[word])
    return position


def _enter(parser: argparse.ArgumentParser) -> _Position:
    arguments = [each for each in parser._actions if not each.option_strings]
    return _Position(parser=parser, arguments=arguments)


def _options(parser: argparse.ArgumentParser) -> Found:
    formatter = parser._get_formatter()
    for action in parser._actions:
        for name in action.option_strings:
            yield name, formatter._expand_help(action) if action.help else ""


def _values(action: argparse.Action | None) -> Found:
    if isinstance(action, Subcommands):
        yield from ((each.dest, each.help or "") for each in action._get_subactions())
    elif action is not None:
        yield from ((str(choice), "") for choice in action.choices or ())


def _directive(action: argparse.Action | None) -> int:
    """The directive that allows files where an argument may be one: a path, or a job, which may be
    given by its file."""
    if action is None or action.choices:
        return NO_FILES
    return FILES if action.type is Path or action.metavar in {"FILE", "DIR", "JOB"} else NO_FILES
