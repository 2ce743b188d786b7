"""`make simulate`: run seeded schedules by hand."""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from simulation.cluster import Cluster
from simulation.options import Options

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.membership import Redundancy


def run_schedules(
    first_seed: int,
    count: int,
    *,
    steps: int,
    faults: int,
    redundancy: Redundancy = Redundancy.RAIM5,
    losses: int = 1,
    tier: bool | None = None,
    worlds: bool | None = None,
    slots: int | None = None,
    policy: PolicyType | None = None,
) -> Counter[str]:
    """Run `count` schedules; the summed counts of their events.

    Args:
        losses: number of members that a group may lose at once; see `Options`.
        tier: whether there is a durable tier; None for every eighth schedule.
        worlds: whether members leave and come; None for every eighth schedule.
        slots: slots of each rank's arena; None for a number that each seed chooses.
        policy: of snapshots; None for one that each seed chooses.

    Raises:
        AssertionError: when an invariant broke; the message begins with the seed.
    """
    total: Counter[str] = Counter()
    with _collecting_seldom():
        for seed in range(first_seed, first_seed + count):
            cluster = Cluster(
                Options(
                    seed=seed,
                    steps=steps,
                    faults=faults,
                    redundancy=redundancy,
                    losses=losses,
                    tier=tier,
                    worlds=worlds,
                    slots=slots,
                    policy=policy,
                )
            )
            try:
                cluster.run()
            except Exception as error:
                why = f"seed {seed} failed: {error!r}\n{cluster.describe()}"
                raise AssertionError(why) from error
            total.update(cluster.counts)
    return total


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage less often: a schedule makes many objects and few cycles."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make simulate",
        description="Run a whole simulated cluster on a virtual clock, one schedule per seed, and "
        "check after each fault that no byte and no recovery line is lost.",
        epilog="A failing seed is printed; run it alone with --first SEED --count 1.",
    )
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="number of seeds (default 1000)")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each schedule")
    parser.add_argument("--faults", type=int, default=4, help="faults of each schedule")
    parser.add_argument(
        "--redundancy", type=Redundancy, default=Redundancy.RAIM5, help="RAIM6, Replication"
    )
    parser.add_argument(
        "--losses", type=int, default=1, help="nodes of a group that are lost at once, up to"
    )
    parser.add_argument(
        "--slots", type=int, help="slots of each rank (default: 2 or 3, as the seed chooses)"
    )
    parser.add_argument("--log", action="store_true", help="print the events of the last schedule")
    parser.add_argument(
        "--tier", action="store_true", help="a durable tier in all of them (default: every eighth)"
    )
    parser.add_argument(
        "--worlds",
        action="store_true",
        help="members leave and come in all of them (default: in every eighth)",
    )
    options = parser.parse_args()
    tier = True if options.tier else None
    worlds = True if options.worlds else None
    if options.log:
        cluster = Cluster(
            Options(
                seed=options.first,
                steps=options.steps,
                faults=options.faults,
                redundancy=options.redundancy,
                losses=options.losses,
                tier=tier,
                worlds=worlds,
                slots=options.slots,
            )
        )
        cluster.run()
        print("\n".join(cluster.log))
        return 0
    total = run_schedules(
        options.first,
        options.count,
        steps=options.steps,
        faults=options.faults,
        redundancy=options.redundancy,
        losses=options.losses,
        tier=tier,
        worlds=worlds,
        slots=options.slots,
    )
    print(f"{options.count} schedules, seeds {options.first}..{options.first + options.count - 1}")
    for name, count in sorted(total.items()):
        print(f"  {name:20} {count}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
