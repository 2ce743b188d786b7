"""`make chaos`: break a cluster of real daemons at random, for as long as is wanted.

Prints the seed first and a line for each fault; writes `report.json` and `report.html`. In the last
part of the time, jobs are held up or spoilt by one of their ranks or nodes, and the report counts
how often the right one was named. Ends with 1 when an invariant did not hold, or a culprit was not
named, was named wrongly, or in words that do not say what had been done to it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import chaos_records
import chaos_report
import daemons
from certificate_makers import expired, made
from chaos_cluster import Surroundings, may_mount
from chaos_culprits import Culprits, present
from chaos_run import Chaos
from redis_process import RedisServer
from versitygw import S3Server

from holdfast_protos.connections.identity import Role


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="how long (default 30)")
    add("--seed", type=int, help="what is broken follows from it (default: drawn)")
    add("--first", type=int, default=0, help="number of the first round (default 0)")
    add("--rounds", type=int, help="end after so many rounds")
    add(
        "--culprits",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="part of the time in which culprits are to be named (default 0.25)",
    )
    add("--report", type=Path, default=Path("build/chaos"), help="where the report goes")
    options = parser.parse_args()
    if not 0 <= options.culprits <= 1:
        parser.error(f"--culprits {options.culprits}: give a share from 0 to 1")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # mounts and daemons end with us
    options.report.mkdir(parents=True, exist_ok=True)
    chaos_records.clear(options.report)
    rounds = itertools.islice(itertools.count(options.first), options.rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hft-chaos-") as scratch:
        daemons.warm_up("holdfast_storage.s3")
        chaos = Chaos(seed, prepare(Path(scratch)), say=_say)
        chaos.records = options.report
        culprits = Culprits(seed, say=_say, kinds=present(_say))
        until = time.monotonic() + 60 * options.minutes
        try:
            chaos.run(rounds, until=until - 60 * options.minutes * options.culprits)
            if options.culprits:
                culprits.run(until=until)
        except KeyboardInterrupt:
            print("interrupted; the report is about what was done until now")
        finally:
            chaos.surroundings.end()
    chaos_report.write(chaos, options.report, culprits)
    print(chaos_report.verdict(chaos))
    if culprits.faults:
        print(culprits.verdict)
    print(f"report: {options.report}/report.html")
    return 1 if chaos.violations or culprits.missed else 0


def prepare(scratch: Path) -> Surroundings:
    """What this machine lets be broken; says what it does not."""
    around = Surroundings(mounts=may_mount(scratch / "probe"))
    if not around.mounts:
        print("no tmpfs can be filled: mounting one needs root")
    if binary := shutil.which("redis-server"):
        around.redis = RedisServer(binary, scratch)
        around.redis.start()
    else:
        print("no Redis is broken: redis-server is not installed")
    try:
        around.objects = S3Server(scratch / "objects")
    except (RuntimeError, OSError) as error:
        print(f"no object storage is broken: {error}")
    good = scratch / "identity"
    made(good, Role.DAEMON)
    around.certificates = good
    around.wrong = {
        "a certificate of another CA": made(scratch / "others", Role.DAEMON),
        "a certificate that has expired": expired(good, Role.DAEMON),
    }
    return around


def _say(line: str) -> None:
    print(line, flush=True)
