"""Real daemons measure their links, and say which one is narrow."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from harness import RawCluster, RawJob
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
