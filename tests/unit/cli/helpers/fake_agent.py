"""A miniature agent as a process: one child process for each rank, which counts steps.

Ranks do not wait for each other. When a child dies, the agent ends the others, reports that it is
waiting in a file that its node's fake daemon reads, and begins again with the next epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast_core.snapshots.membership import Membership
from holdfast_protos import codec, values_pb2

PAUSE_S = 0.01
FULL = "full"
"""File in the directory of the run; while it exists, no agent has room to start its ranks."""


def read_world(root: Path) -> Membership | None:
    try:
        data = (root / "world.json").read_bytes()
    except FileNotFoundError:
        return None
    return codec.membership_from_proto(values_pb2.Membership.FromString(data))


def rank_main(root: Path, rank: int, epoch: int, steps: int) -> int:
    """Count steps up to `steps`, as the child process of a rank does."""
    path = root / "ranks" / f"{rank}.json"
    for step in range(1 if epoch > 1 else 0, steps + 1):
        progress = {"epoch": epoch, "pid": os.getpid(), "step": step, "closed": step == steps}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(progress))
        temporary.replace(path)
        time.sleep(PAUSE_S)
    return 0


def agent_main(root: Path, job: str, node: str, steps: int) -> int:
    left = 0
    (root / "agent").write_text(json.dumps({"pid": os.getpid(), "job": job}))
    while True:
        world = read_world(root)
        member = None if world is None else world.member_on(node)
        if world is None or member is None or world.epoch <= left:
            time.sleep(PAUSE_S)
            continue
        left = world.epoch
        children = [
            subprocess.Popen([sys.executable, __file__, "rank", root, *map(str, (r, left, steps))])
            for r in world.ranks_of(member)
        ]
        if attend(root, children, left):
            return 0
        for child in children:
            child.kill()
            child.wait()


def attend(root: Path, children: list[subprocess.Popen[bytes]], epoch: int) -> bool:
    """Wait for the children: whether all of them ended well before the epoch ended."""
    while True:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return True
        world = read_world(root)
        if world is not None and world.epoch > epoch:
            return False
        if any(code not in (None, 0) for code in codes):
            (root / f"waiting-{epoch}").touch()
            return False
        time.sleep(PAUSE_S)


def wait_for_room(full: Path, wait_file: Path) -> None:
    """Wait, and report it in `wait_file`, while a file exists that stands for a full /dev/shm."""
    if full.exists():
        wait_file.write_text("NoRoom: the disk is full\n")
    while full.exists():
        time.sleep(PAUSE_S)
    wait_file.unlink(missing_ok=True)


def main() -> int:
    if sys.argv[1] == "rank":
        rank, epoch, steps = map(int, sys.argv[3:])
        return rank_main(Path(sys.argv[2]), rank, epoch, steps)
    parser = argparse.ArgumentParser()
    names = ("--socket", "--job", "--nodes", "--nproc", "--member-node", "--exit-file")
    for name in (*names, "--wait-file"):
        parser.add_argument(name, required=True)
    parser.add_argument("--ready-file")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = Path(options.socket).parent
    wait_for_room(Path(options.exit_file).parents[1] / FULL, Path(options.wait_file))
    if options.ready_file is not None:
        Path(options.ready_file).touch()
    code = agent_main(root, options.job, options.member_node, int(options.command[-1]))
    Path(options.exit_file).write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main())
