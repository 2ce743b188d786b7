"""`make bench NAME=...`: runs one of the benchmarks below, or lists them.

    python -m benchmarks operator --members 200 --jobs 20
    python -m benchmarks list

What a benchmark needs beside our own packages, `make bench` sets up before it calls this.
"""

from __future__ import annotations

import os
import sys

BENCHMARKS = {
    "snapshot": (
        "snapshot",
        "saves and restores, beside other packages; the default",
    ),
    "bulk": ("bulk_security", "bytes between daemons: plain, authenticated, encrypted"),
    "dependencies": ("dependencies", "what libraries would add to a daemon in place of our code"),
    "detectors": ("detectors", "what looking for hangs, slow ranks and wrong bytes costs a step"),
    "elastic": ("elastic", "uneven copies of experts beside expert parallelism"),
    "interference": (
        "interference",
        "what protection costs training on a slow network; needs root",
    ),
    "launching": ("launching", "the start of a launcher, until it can start workers"),
    "loss": ("loss", "the loss of the example model, with recoveries and without"),
    "operator": ("operator_scale", "the operator with thousands of members; needs root and Go"),
    "papers": ("papers", "the model of failures, beside figures that papers published"),
    "parity": ("parity_kernels", "how fast parity is computed, beside XOR"),
    "persist": ("persist", "writing into durable storage, beside the bare write path"),
    "policies": ("policies", "what partial snapshots save, for the sizes of real models"),
    "recovery": ("recovery", "each phase of a recovery, with processes that stay and without"),
    "redundancy": ("redundancy", "parity from the network, beside parity from replicas"),
    "resizing": ("resizing", "a sharded model over fewer nodes, and over more again"),
    "s3": ("object_storage", "our requests to S3, beside those of obstore; needs Go"),
    "sparse": ("sparse", "sparse windows, and pipeline stages that repeat steps alone"),
    "steptimes": ("step_times", "what measuring the parts of a step costs that step"),
    "windows": ("windows", "what restoring a window repeats: training, or the optimizer"),
}
"""Module of each benchmark in this package, and what it measures."""


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names with the other arguments.

    The process becomes the benchmark's, so that the processes which that starts import its module
    and not this one. Returns only if there is nothing to run: 0 for `list`, 2 for an unknown name.
    """
    name, *rest = arguments or ["list"]
    if name == "list":
        print('make bench NAME=... ARGS="..." measures:')
        for each, (_, measured) in BENCHMARKS.items():
            print(f"  {each:13} {measured}")
        return 0
    if name not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        print(f"There is no benchmark {name!r}: NAME is one of {names}.", file=sys.stderr)
        return 2
    module = f"benchmarks.{BENCHMARKS[name][0]}"
    os.execv(sys.executable, [sys.executable, "-m", module, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
