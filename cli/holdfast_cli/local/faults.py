"""Injects faults into a local run, for users who want to see a job survive.

Faults act on the running processes and files from outside, as real faults would, and bypass the
control loop. Only lost nodes and notices are marked in the run directory, because a virtual node
has neither hardware that could be gone nor a cloud that could announce it.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from holdfast_cli.local.directory import NodeRecord, RunDirectory
from holdfast_cli.local.processes import (
    MARK,
    ProcessId,
    identify,
    is_alive,
    kill_marked,
    send,
)
from holdfast_cli.local.status import NodeStatus, Status
from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.job.names import job_file_name
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout, decode_manifest


def signal_rank(directory: RunDirectory, status: Status, rank: int, number: signal.Signals) -> str:
    """Send a signal to a rank's process; returns a description of what was done.

    Raises:
        InvalidJobError: when there is no such rank, or its process is not known (yet).
    """
    process = _process_of(directory, status, rank)
    if not send(process, number):
        raise InvalidJobError(f"rank {rank}'s process {process.pid} has just ended; try again")
    return f"sent {number.name} to rank {rank} (pid {process.pid})"


def kill_daemon(directory: RunDirectory, node: str) -> str:
    """SIGKILL the daemon of a node; its memory stays.

    Raises:
        InvalidJobError: when there is no such node, or its daemon does not run.
    """
    record = directory.read_record()
    target = record.nodes.get(node) if record is not None else None
    if record is None or target is None:
        names = ", ".join(record.nodes) if record is not None else "none"
        raise InvalidJobError(f"no node {node!r} in {directory.path}; there are: {names}")
    if target.daemon is None or not send(target.daemon.process, signal.SIGKILL):
        raise InvalidJobError(f"node {node} has no living daemon now")
    return f"killed the daemon of {node} (pid {target.daemon.process.pid})"


def kill_node(directory: RunDirectory, node: str) -> str:
    """Lose a node: all its processes and its memory.

    Raises:
        InvalidJobError: when there is no such node, or it is lost already.
    """
    root = _living_node(directory, node).root
    directory.mark_dead(node)
    count = kill_marked(directory.mark(node))
    shutil.rmtree(root, ignore_errors=True)
    return f"lost node {node}: {count} processes killed, memory {root} removed"


def start_node(directory: RunDirectory, node: str) -> str:
    """Bring a lost node back, as a new machine of the same name: its memory is empty.

    Raises:
        InvalidJobError: when there is no such node, or it is not lost.
    """
    _recorded_node(directory, node)
    if not directory.is_dead(node):
        raise InvalidJobError(f"node {node} is not lost, so it cannot come back")
    directory.mark_back(node)
    return f"node {node} is back with empty memory; its daemon starts"


def notice(directory: RunDirectory, node: str) -> str:
    """Announce that a node will be lost, as a cloud announces it for a spot instance; the node
    stays.

    Raises:
        InvalidJobError: when there is no such node, or it is lost already.
    """
    _living_node(directory, node)
    directory.give_notice(node, "notice given by holdfast inject")
    return f"gave notice that node {node} will be taken away; it stays until kill-node"


def corrupt(directory: RunDirectory, status: Status, rank: int, *, parity: bool = False) -> str:
    """Flip one byte of the newest sealed snapshot of a rank, or of a parity block on its node.

    Raises:
        InvalidJobError: when there is no such rank, or nothing sealed.
    """
    member = status.local.member_of(rank)
    node = status.local.node(member.node) if member is not None else None
    if member is None or node is None:
        raise InvalidJobError(_no_rank(status, rank))
    files = Path(node.root) / "jobs" / job_file_name(directory.job_key)
    if parity:
        return _corrupt_parity(files, node)
    return _corrupt_arena(files, rank, node)


def _corrupt_arena(files: Path, rank: int, node: NodeStatus) -> str:
    sealed: list[tuple[Generation, Path, int, int]] = []
    for path in files.glob(f"arenas/{rank}-*/slot-*.manifest"):
        try:
            manifest = decode_manifest(path.read_bytes())
        except (OSError, CorruptError):
            continue
        slot = int(path.stem.removeprefix("slot-"))
        sealed.append((manifest.generation, path, slot, manifest.payload_bytes))
    if not sealed:
        raise InvalidJobError(f"rank {rank} has no sealed snapshot on {node.name} now")
    generation, path, slot, payload_bytes = max(sealed)
    arena = path.with_name("arena")
    slot_bytes = decode_layout(path.with_name("layout.json").read_bytes()).slot_bytes
    offset = slot * slot_bytes + payload_bytes // 2
    _flip(arena, offset)
    return f"flipped byte {offset} of {arena} (rank {rank}, generation {generation}, slot {slot})"


def _corrupt_parity(files: Path, node: NodeStatus) -> str:
    blocks = sorted(files.glob("parity/*.entry"), key=lambda path: path.stat().st_mtime_ns)
    if not blocks:
        raise InvalidJobError(f"node {node.name} holds no finished parity block now")
    block = blocks[-1].with_suffix(".block")
    offset = 0
    _flip(block, offset)
    return f"flipped byte {offset} of {block} on {node.name}"


def _living_node(directory: RunDirectory, node: str) -> NodeRecord:
    record = _recorded_node(directory, node)
    if directory.is_dead(node):
        raise InvalidJobError(f"node {node} is lost already")
    return record


def _recorded_node(directory: RunDirectory, node: str) -> NodeRecord:
    record = directory.read_record()
    if record is None or node not in record.nodes:
        names = ", ".join(record.nodes) if record is not None else "none"
        raise InvalidJobError(f"no node {node!r} in {directory.path}; there are: {names}")
    return record.nodes[node]


def _flip(path: Path, offset: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 0x01]), offset)
    finally:
        os.close(descriptor)


def _process_of(directory: RunDirectory, status: Status, rank: int) -> ProcessId:
    """Find the rank's living process; a pid that no longer belongs to this run is refused."""
    rank_status = status.local.rank(rank)
    if rank_status is None:
        raise InvalidJobError(_no_rank(status, rank))
    process = identify(rank_status.pid) if rank_status.pid else None
    if process is None or not _is_of_run(directory, process):
        raise InvalidJobError(f"rank {rank} has no living process now (state {rank_status.state})")
    return process


def _is_of_run(directory: RunDirectory, process: ProcessId) -> bool:
    wanted = f"{MARK}={directory.mark()}:".encode()
    try:
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(wanted) for variable in variables) and is_alive(process)


def _no_rank(status: Status, rank: int) -> str:
    ranks = sorted(each.rank for each in status.local.ranks)
    which = f"there are ranks {ranks}" if ranks else "no rank is known yet"
    return f"no rank {rank} in job {status.local.job} now; {which}"
