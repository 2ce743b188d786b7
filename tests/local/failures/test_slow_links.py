"""Real daemons measure their links, and say which one is narrow: a node whose links are keeps out
of the job, and one whose links become so is reported."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import local_jobs
import pytest
from harness import RawCluster, RawJob
from local_jobs import short_folder
from waiting import wait_for

from holdfast_protos import trainer_pb2

MEMBERS, NARROW = 4, 2
CHECK_S = 60.0


class NarrowLink:
    """Passes connections on to `target`, and what it answers at about 2 MB/s."""

    PART_BYTES, PART_S = 16 << 10, 0.008

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, sink, part_s in ((near, far, 0.0), (far, near, self.PART_S)):
                    work = (source, sink, part_s)
                    threading.Thread(target=self._pass_on, args=work, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, part_s: float) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(self.PART_BYTES):
                self._closed.wait(part_s)  # as long as the bytes take
                sink.sendall(data)

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def job(cluster: RawCluster) -> Iterator[RawJob]:
    """A job whose daemon n2 answers others over a narrow link."""
    made = RawJob(cluster, cluster.start_nodes(MEMBERS))
    node = made.nodes[NARROW]
    link = NarrowLink(cluster.wait_beat(node).bulk_address)
    made.bulk_addresses[node] = link.address
    yield made
    link.close()


def test_daemons_report_the_node_that_sends_over_a_narrow_link_and_it_is_not_refused(
    cluster: RawCluster, job: RawJob
) -> None:
    job.form()
    for node in job.nodes:
        wait_for("the job", partial(cluster.daemons[node].job, job.name))

    def check(node: str) -> trainer_pb2.CheckLinksReply:
        request = trainer_pb2.CheckLinksRequest(job=job.name)
        return cluster.daemons[node].stub().CheckLinks(request, timeout=CHECK_S)

    with ThreadPoolExecutor(MEMBERS) as pool:
        replies = list(pool.map(check, job.nodes))
    assert not any(reply.failure or reply.not_checked for reply in replies), replies
    for member, node in enumerate(job.nodes):
        state = wait_for("its links", partial(cluster.control.state, node, job.name))
        assert state is not None and state.links.number > 0
        rates = {rate.peer: rate.bytes_s for rate in state.links.rates}
        assert rates.keys() == set(range(MEMBERS)) - {member}
        if member != NARROW:
            assert rates[NARROW] < min(rate for peer, rate in rates.items() if peer != NARROW) / 10


# --- a whole job ----------------------------------------------------------------------------------

SPEAKS_FROM_ITS_ADDRESS = """
import sys
if "holdfast_daemon" in sys.orig_argv:
    import functools, socket
    from holdfast_daemon.net import links
    host = sys.orig_argv[sys.orig_argv.index("--host") + 1]
    dial = socket.create_connection
    socket.create_connection = functools.partial(dial, source_address=(host, 0))
    links.PERIOD_S = 3.0
"""
"""Runs in each Python process: daemons dial from the address of their node, as they do on nodes of
their own, so that the network knows whom it slows down; and they measure more often."""

TRAINS = """
import time, torch, holdfast
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
with holdfast.init(model=model, optimizer=torch.optim.AdamW(model.parameters())) as session:
    step = session.restore() or 0
    while True:
        dist.barrier()
        time.sleep(0.2)
        step += 1
        session.save(step)
"""

RUNS = """
import asyncio, json, subprocess, sys, time
from pathlib import Path
from local_jobs import make_job
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_cli.local.node_record import read_record
from holdfast_core.job.status import Phase

folder, narrow, patience_s = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
job = make_job(
    "narrow",
    [sys.executable, str(folder / "train.py")],
    nodes=4,
    snapshot={"memoryPerNode": "16Mi"},
    failurePolicy={"spares": 1, "checkNodes": True},
)


async def run():
    async with LocalCluster(job, LocalSettings(directory=folder / "run", standbys=0)) as cluster:
        def trains(status):
            nodes = {member.node for member in status.local.members}
            return status.phase is Phase.RUNNING and status.step and "n2" not in nodes

        await cluster.wait_for(trains, timeout_s=patience_s)
        nodes = [member.node for member in cluster.status.local.members]
        subprocess.run(narrow, check=True)
        slow = lambda status: [e.message for e in status.local.events if e.reason == "SlowLinks"]
        await cluster.wait_for(slow, timeout_s=patience_s)
        [recovery] = cluster.status.last_recoveries
        record, _ = read_record(cluster.directory.node_failures_file, time.time())
        failures = {node: [each.kind.value for each in found] for node, found in record.items()}
        lines = cluster.status.last_failure.last_lines
        return [nodes, recovery.cause, lines, failures, slow(cluster.status)]


print(json.dumps(asyncio.run(run())))
"""
"""Runs the job in a network of its own, and makes the links of another node narrow once it
trains."""


def narrow_link(network: str, node: int) -> list[list[str]]:
    """Commands that send what goes to or comes from this node of a local run through the class of
    `network` that is narrow: the last part of its address is by one larger."""
    add = (
        f"tc -n {network} filter add dev lo parent 1: protocol ip u32 match u32 {node + 1:#x} 0xff"
    )
    return [f"{add} at {place} flowid 1:4".split() for place in (12, 16)]


@pytest.fixture
def network() -> Iterator[str]:
    """A network of its own, with a class for 1 MB/s; its name."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, and the commands ip and tc (iproute2)")
    name = f"hftest-{os.getpid()}"
    commands = (
        f"ip netns add {name}",
        f"ip -n {name} link set lo up",
        f"tc -n {name} qdisc add dev lo root handle 1: htb default 0",
        f"tc -n {name} class add dev lo parent 1: classid 1:4 htb rate 8mbit burst 128k",
    )
    try:
        for command in commands:
            if subprocess.run(command.split(), check=False).returncode:
                pytest.skip(f"this machine cannot do: {command}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_a_node_behind_a_narrow_link_takes_no_part_and_one_that_becomes_so_is_reported(
    network: str,
) -> None:
    for command in narrow_link(network, 2):
        subprocess.run(command, check=True)
    later = ["sh", "-c", " && ".join(map(" ".join, narrow_link(network, 1)))]
    with short_folder() as folder:
        (folder / "sitecustomize.py").write_text(SPEAKS_FROM_ITS_ADDRESS)
        (folder / "train.py").write_text(TRAINS)
        (folder / "run.py").write_text(RUNS)
        paths = [str(folder), str(Path(local_jobs.__file__).parent)]
        command = ["ip", "netns", "exec", network, sys.executable, str(folder / "run.py")]
        done = subprocess.run(
            [*command, str(folder), json.dumps(later), "200"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            check=True,
        )
    nodes, cause, lines, failures, slow = json.loads(done.stdout)
    assert nodes == ["n0", "n1", "n4", "n3"]
    assert "did not take part, because a check of its node failed (code 82)" in cause
    assert "this node does not take part: links: links of n2 to " in lines
    assert failures == {"n2": ["FailedCheck"]}
    assert slow[0].startswith("links of n1 to ")
