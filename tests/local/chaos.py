"""`make chaos`: break a cluster of real daemons at random, for as long as is wanted.

Prints the seed first and a line for each fault; writes `report.json` and `report.html`. Ends with 1
when an invariant did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import chaos_report
from chaos_run import Chaos
from chaos_world import may_mount
from redis_process import RedisServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="how long (default 30)")
    add("--seed", type=int, help="what is broken follows from it (default: drawn)")
    add("--first", type=int, default=0, help="number of the first round (default 0)")
    add("--rounds", type=int, help="end after so many rounds")
    add("--report", type=Path, default=Path("build/chaos"), help="where the report goes")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # mounts and daemons end with us
    options.report.mkdir(parents=True, exist_ok=True)
    rounds = itertools.islice(itertools.count(options.first), options.rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hft-chaos-") as scratch:
        chaos = prepare(seed, Path(scratch))
        chaos.stories = options.report
        try:
            chaos.run(rounds, until=time.monotonic() + 60 * options.minutes)
        except KeyboardInterrupt:
            print("interrupted; the report is about what was done until now")
        finally:
            if chaos.redis is not None:
                chaos.redis.kill()
    chaos_report.write(chaos, options.report)
    print(chaos_report.verdict(chaos))
    print(f"report: {options.report}/report.html")
    return 1 if chaos.violations else 0


def prepare(seed: int, scratch: Path) -> Chaos:
    """A run over what this machine lets be broken; says what it does not."""
    present = set()
    if may_mount(scratch / "probe"):
        present.add("mount")
    else:
        print("no tmpfs can be filled: mounting one needs root")
    redis = None
    if binary := shutil.which("redis-server"):
        redis = RedisServer(binary, scratch)
        redis.start()
        present.add("redis")
    else:
        print("no Redis is broken: redis-server is not installed")
    return Chaos(seed, frozenset(present), redis, say=_say)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
