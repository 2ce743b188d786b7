"""`make fuzz`: the targets of the tests, for minutes instead of seconds.

With atheris (the extra `fuzz`) the bytes follow what they reach in the code; without it, damaged
seeds are drawn, from a number that is printed. A failure is written to `build/fuzz`, and
`--replay FILE` gives it to its target again.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fuzzing_mutations import BYTES_MAX, damaged

BUILD = Path("build/fuzz")
Attempt = Callable[[Any, bytes], None]
_WATCHED = ("holdfast_core", "holdfast_protos", "holdfast_daemon", "holdfast_operator", "holdfast")


def main(arguments: list[str] | None = None) -> int:
    """0 when nothing was found."""
    options = _options(arguments)
    guided = options.engine == "atheris" or (
        options.engine == "auto" and importlib.util.find_spec("atheris") is not None
    )
    atheris: Any = importlib.import_module("atheris") if guided and options.only else None
    # What is imported in here is watched, so that bytes which reach new code are kept.
    with atheris.instrument_imports(include=list(_WATCHED)) if atheris else nullcontext():
        table = importlib.import_module("fuzzing_targets")
        chosen = [target for target in table.TARGETS if options.only in ("", target.name)]
        for target in chosen if atheris else ():
            target.seeds()  # some import only then what they try
    if not chosen:
        print(f"no target is called {options.only}: {', '.join(t.name for t in table.TARGETS)}")
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        table.attempt(chosen[0], options.replay.read_bytes())
        print(f"{chosen[0].name}: read or refused")
        return 0
    seconds = 60 * options.minutes / len(chosen)
    if atheris:
        return _guided(atheris, chosen[0], table.attempt, seconds, options.seed)
    print(f"{len(chosen)} targets, {seconds:.0f} s each, {'atheris' if guided else 'random'}")
    failed = 0
    for target in chosen:
        if guided:
            failed += _child(target.name, seconds, options.seed)
        else:
            failed += _random(target, table.attempt, seconds, options.seed)
    print(f"{failed} of {len(chosen)} targets failed")
    return int(failed > 0)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--only", default="", metavar="TARGET", help="one of the targets")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--engine", choices=("auto", "random", "atheris"), default="auto")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="with --only: do this once")
    return parser.parse_args(arguments)


def _random(target: Any, attempt: Attempt, seconds: float, seed: int) -> int:
    """Damaged seeds for `seconds`; 1 when one of them was too much for the target."""
    rng, seeds, count = random.Random(seed), target.seeds(), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        data = damaged(seeds, rng)
        try:
            attempt(target, data)
        except Exception as error:
            file = BUILD / f"{target.name}.failed"
            file.write_bytes(data)
            print(f"{target.name}: FAILED after {count} (seed {seed}): {error!r:.400}\n  {file}")
            return 1
        count += 1
    print(f"{target.name}: {count} inputs (seed {seed})", flush=True)
    return 0


def _child(name: str, seconds: float, seed: int) -> int:
    """libFuzzer ends its process: each target has one of its own."""
    command = [sys.executable, __file__, "--engine", "atheris", "--only", name]
    command += ["--minutes", str(seconds / 60), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = [line for line in done.stderr.splitlines() if "DONE" in line]
    print(f"{name}: {summary[-1] if summary else 'FAILED'}", flush=True)
    if done.returncode:
        print(done.stdout[-2000:] + done.stderr[-4000:], flush=True)
    return int(done.returncode != 0)


def _guided(atheris: Any, target: Any, attempt: Attempt, seconds: float, seed: int) -> int:
    """Never returns: libFuzzer exits, with something else than 0 when it found something."""
    corpus, seeds = BUILD / "corpus" / target.name, target.seeds()
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(seeds):
        (corpus / f"seed-{i}").write_bytes(data)

    def mutate(data: bytes, size_max: int, number: int) -> bytes:
        """By libFuzzer, which knows what was reached, or by us, who know the formats."""
        rng = random.Random(number)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, size_max))
        return damaged([data, *seeds], rng)[:size_max]

    flags = [f"-max_total_time={max(int(seconds), 1)}", f"-seed={seed}", f"-max_len={BYTES_MAX}"]
    flags += ["-timeout=60", f"-artifact_prefix={BUILD}/{target.name}-", str(corpus)]
    atheris.Setup([sys.argv[0], *flags], lambda data: attempt(target, data), custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
