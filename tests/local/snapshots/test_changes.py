"""What protection sends over the network when a snapshot carries pieces over."""

from __future__ import annotations

from harness import RawCluster, RawJob
from raw_trainer import EXTRAS_BYTES, PIECE_BYTES
from waiting import wait_for

RECEIVED = "holdfast_received_bytes_total"
FOR_PARITY = "holdfast_protection_bytes_total"
PULSES = "holdfast_loop_lag_seconds_count"


def test_protection_sends_the_changed_bytes(cluster: RawCluster) -> None:
    job = RawJob(cluster, cluster.start_nodes(3), nbytes=1_200_000)
    job.form()
    job.start_trainers()
    whole = written = 0
    for _ in range(6):
        job.train()
        for trainer in job.trainers:
            payload = trainer.nbytes + EXTRAS_BYTES
            whole += payload
            written += payload - len(trainer.carried) * PIECE_BYTES
    assert written < 0.75 * whole

    daemons = [job.daemon(member) for member in range(job.size)]
    before = [daemon.metric(PULSES) for daemon in daemons]

    def are_counted() -> bool:
        """Two pulses later all is in the metrics: they are brought up to date with each."""
        return all(d.metric(PULSES) >= n + 2 for d, n in zip(daemons, before, strict=True))

    wait_for("two pulses", are_counted)
    received = sum(daemon.metric(RECEIVED) for daemon in daemons)
    assert 0.95 * written <= received <= 1.05 * written, (received, written, whole)
    assert sum(daemon.metric(FOR_PARITY) for daemon in daemons) == received
