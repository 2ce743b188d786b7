"""Words of `kubectl holdfast`, completed from the parser alone."""

from __future__ import annotations

import pytest

from holdfast_cli.commands.completing import complete
from holdfast_cli.main import build_parser

FILES, NO_FILES = ":0", ":4"


@pytest.mark.parametrize(
    "line, words, directive",
    [
        ("st", {"status"}, NO_FILES),
        ("s", {"status", "suspend", "simulate"}, NO_FILES),
        ("inject kill-", {"kill-rank", "kill-daemon", "kill-node"}, NO_FILES),
        ("status --w", {"--watch"}, NO_FILES),
        ("status -n team-a --w", {"--watch"}, NO_FILES),
        ("status --namespace=team-a --w", {"--watch"}, NO_FILES),
        ("-", {"-h", "--help", "--version"}, NO_FILES),
        ("demo --policy S", {"Selective", "Sparse"}, NO_FILES),
        ("demo --quick --restart --st", {"--steps", "--stages"}, NO_FILES),
        ("completion ", {"bash", "zsh", "tcsh"}, NO_FILES),
        ("status ", set(), FILES),
        ("status --dir ", set(), FILES),
        ("status -n ", set(), NO_FILES),
        ("run job.yaml ", set(), NO_FILES),
        ("nonsense ", set(), NO_FILES),
    ],
)
def test_words_are_completed_where_they_stand(line: str, words: set[str], directive: str) -> None:
    *found, last = complete(build_parser(), line.split(" ")).splitlines()
    assert ({each.partition("\t")[0] for each in found}, last) == (words, directive)


def test_candidates_have_their_help() -> None:
    parser = build_parser()
    (command, _) = complete(parser, ["persi"]).splitlines()
    assert command.startswith("persist\twrite the newest generation")
    (option, _) = complete(parser, ["run", "job.yaml", "--sta"]).splitlines()
    assert option.endswith("(default: 1)")
