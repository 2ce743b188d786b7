"""Real daemons measure their links, and a node behind a narrow one takes no part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from harness import RawCluster, RawJob
from local_jobs import job_file
from waiting import wait_for

from holdfast_cli.local.directory import RunDirectory
from holdfast_core.node_failures import FailureKind
from holdfast_protos import trainer_pb2

MEMBERS, NARROW = 4, 2
CHECK_S = 60.0
WAIT_S = 350.0


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


TRAINS = """
import torch, holdfast
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
with holdfast.init(model=model, optimizer=torch.optim.AdamW(model.parameters())) as session:
    for step in range((session.restore() or 0) + 1, 4):
        session.save(step)
"""
RUN = """
import asyncio, json, sys
from pathlib import Path
from holdfast_cli.job_files import load_job
from holdfast_cli.local import LocalCluster, LocalSettings

folder = Path(sys.argv[1])

async def run():
    job = load_job(folder / "job.json")
    async with LocalCluster(job, LocalSettings(directory=folder / "run")) as cluster:
        outcome = await cluster.finished(timeout_s=float(sys.argv[2]))
        status = cluster.status
    failure = status.last_failure
    nodes = [member.node for member in status.local.members]
    causes = [each.cause for each in status.last_recoveries or ()]
    lines = failure.last_lines if failure is not None else ""
    (folder / "end.json").write_text(json.dumps([outcome, nodes, causes, lines]))

asyncio.run(run())
"""
NARROWS = """
ip link set lo up
tc qdisc add dev lo root handle 1: htb
tc class add dev lo parent 1: classid 1:2 htb rate 40mbit
tc filter add dev lo protocol ip parent 1: u32 match u32 0x7f4d0003 0xffff00ff at 16 flowid 1:2
"""
"""What the third node of a local run (127.77.*.3) is sent is limited to 5 MB/s."""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_a_node_behind_a_narrow_interface_takes_no_part_and_is_remembered(directory: Path) -> None:
    """With the kernel's own traffic control, in a network of the test's own."""
    tried = subprocess.run(
        ["unshare", "-n", "sh", "-ec", NARROWS], check=False, capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"no network with traffic control can be made: {tried.stderr.strip()}")
    (directory / "train.py").write_text(TRAINS)
    (directory / "run.py").write_text(RUN)
    document = job_file(
        "narrow",
        [sys.executable, str(directory / "train.py")],
        nodes=MEMBERS,
        env={"GLOO_SOCKET_IFNAME": "lo"},  # this network knows no names
        snapshot={"memoryPerNode": "16Mi"},
        redundancy={"type": "None"},
        failurePolicy={"spares": 1, "checkNodes": True},
    )
    (directory / "job.json").write_text(json.dumps(document))
    enter = f"{NARROWS}\nexec {sys.executable} {directory}/run.py {directory} {WAIT_S}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["unshare", "-n", "sh", "-ec", enter]
    subprocess.run(words, check=True, timeout=WAIT_S + 60, env=environment)
    outcome, nodes, causes, lines = json.loads((directory / "end.json").read_text())
    assert outcome == "Complete" and nodes == ["n0", "n1", "n4", "n3"]
    assert "did not take part, because a check of its node failed" in causes[0]
    assert "links: links of n2 to " in lines
    record = json.loads(RunDirectory(directory / "run", "").node_failures_file.read_text())
    assert [each["kind"] for each in record["n2"]] == [FailureKind.FAILED_CHECK.value]
