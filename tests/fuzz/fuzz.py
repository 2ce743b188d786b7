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
from pathlib import Path

from fuzzing_mutations import BYTES_MAX, damaged
from fuzzing_targets import TARGETS, Target, attempt

BUILD = Path("build/fuzz")
_PARSERS = ("holdfast_core", "holdfast_protos", "holdfast_daemon", "holdfast_operator", "holdfast")


def main(arguments: list[str] | None = None) -> int:
    """0 when nothing was found."""
    options = _options(arguments)
    chosen = [target for target in TARGETS if options.only in ("", target.name)]
    if not chosen:
        print(f"no target is called {options.only}: {', '.join(t.name for t in TARGETS)}")
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        return _one(chosen[0], options.replay.read_bytes())
    guided = options.engine == "atheris" or (
        options.engine == "auto" and importlib.util.find_spec("atheris") is not None
    )
    seconds = 60 * options.minutes / len(chosen)
    print(f"{len(chosen)} targets, {seconds:.0f} s each, {'atheris' if guided else 'random'}")
    if guided and options.only:
        return _guided(chosen[0], seconds, options.seed)
    failed = 0
    for target in chosen:
        failed += _child(target, options) if guided else _random(target, seconds, options.seed)
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


def _one(target: Target, data: bytes) -> int:
    attempt(target, data)
    print(f"{target.name}: {len(data)} bytes are read or refused")
    return 0


def _random(target: Target, seconds: float, seed: int) -> int:
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


def _child(target: Target, options: argparse.Namespace) -> int:
    """libFuzzer ends its process: each target has one of its own."""
    share = options.minutes / len(TARGETS)
    command = [sys.executable, __file__, "--engine", "atheris", "--only", target.name]
    command += ["--minutes", str(share), "--seed", str(options.seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "DONE" in line or "ERROR" in line]
    print(f"{target.name}: {said[-1] if said else done.stderr[-400:]}", flush=True)
    if done.returncode:
        print(done.stdout[-2000:] + done.stderr[-4000:], flush=True)
    return int(done.returncode != 0)


def _guided(target: Target, seconds: float, seed: int) -> int:
    """Never returns: libFuzzer exits, with something else than 0 when it found something."""
    atheris = importlib.import_module("atheris")
    _instrument(atheris)
    corpus = BUILD / "corpus" / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(data)
    flags = [f"-max_total_time={max(int(seconds), 1)}", f"-seed={seed}", f"-max_len={BYTES_MAX}"]
    flags += ["-timeout=60", f"-artifact_prefix={BUILD}/{target.name}-", str(corpus)]
    atheris.Setup([sys.argv[0], *flags], lambda data: attempt(target, data))
    atheris.Fuzz()
    return 0


def _instrument(atheris: object) -> None:
    """Watch the code of ours that the targets reach, loaded as it is."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _PARSERS:
            continue
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == name and hasattr(value, "__code__"):
                atheris.instrument_func(value)  # type: ignore[attr-defined]


if __name__ == "__main__":
    raise SystemExit(main())
