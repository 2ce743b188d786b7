"""The replay of a job's worlds ends with the bytes of the trainer that it repeats."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ports import reserve_port
from ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SMALL = ("--dim", "32", "--layers", "1", "--experts", "4", "--seq", "32", "--ep", "1")


def load(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def train(rank: int, port: int, arguments: list[str]) -> None:
    """A rank of two of the trainer, as torchrun would start it."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    load("train_moe").main(arguments)


def replay(rank: int, worlds: list[tuple[int, int]], folder: str, hash_file: str) -> None:
    script = load("replay_moe")
    args = load("train_moe").parse_args([*SMALL, "--hash-file", hash_file])
    script.replay(rank, args, worlds, folder)


def replayed(tmp_path: Path, *worlds: tuple[int, int]) -> str:
    """Hash of the state after `worlds`, each with a number of ranks and of steps."""
    folder = tmp_path / "-".join(f"{ranks}x{steps}" for ranks, steps in worlds)
    folder.mkdir()
    run_ranks(replay, (list(worlds), str(folder), str(folder / "hash")), 2)
    return (folder / "hash").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replay_has_the_bytes_of_the_trainer_only_with_the_same_worlds(tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps", "4", "--hash-file", str(tmp_path / "trained")]
    run_ranks(train, (reserve_port(), arguments), 2)
    trained = (tmp_path / "trained").read_text()
    assert replayed(tmp_path, (2, 4)) == trained
    assert replayed(tmp_path, (2, 1), (2, 3)) == trained
    assert replayed(tmp_path, (2, 2), (1, 1), (2, 1)) != trained


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_joins_a_replay_has_the_state_of_those_before_it(tmp_path: Path) -> None:
    """Ranks with one state count once in the hash: with no step left to train, it is that of the
    world before."""
    assert replayed(tmp_path, (1, 2), (2, 0)) == replayed(tmp_path, (1, 2))
