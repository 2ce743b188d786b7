"""As on a node of Kubernetes: sockets beside the memory, a daemon without rights, a new address."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from combinations import Combination
from daemons import DaemonProcess
from faulty_daemon import become
from harness import RawCluster, RawJob
from raw_trainer import RawTrainer
from waiting import WAIT_S, wait_for

DAEMON_UID, TRAINER_UID = 65532, 1000

_forking = multiprocessing.get_context("forkserver")


def test_trainers_find_sockets_that_lie_beside_the_memory(
    cluster: RawCluster, combination: Combination
) -> None:
    daemon = cluster.make_node()
    daemon.socket_dir = cluster.directory / "sockets"
    daemon.start()
    assert cluster.wait_beat("n0").trainer_socket == str(daemon.socket_dir / "daemon.sock")
    cluster.start_nodes(1)
    job = combination.job(cluster, ["n0", "n1"])
    job.form()
    job.start_trainers()
    assert job.trainers[0].arena_socket == str(daemon.socket_dir / "arena.sock")
    newest = job.train()
    sockets = sorted(path.name for path in daemon.socket_dir.iterdir())
    assert sockets == ["arena.sock", "daemon.sock"]
    assert not [path for path in daemon.root.iterdir() if path.is_socket()]

    daemon.kill()
    assert sorted(path.name for path in daemon.socket_dir.iterdir()) == sockets, "left behind"
    cluster.restart("n0")
    job.readdress()
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


def test_two_daemons_share_neither_memory_nor_sockets(cluster: RawCluster) -> None:
    first = cluster.make_node()
    first.socket_dir = cluster.directory / "sockets"
    first.start()
    cluster.wait_beat(first.node)
    for root, words in ((first.root, "another daemon runs on"), (None, "another daemon serves at")):
        second = cluster.make_node(root=root)
        second.socket_dir = first.socket_dir
        second.plain = True
        second.start()
        assert second.process is not None
        assert second.process.wait(WAIT_S * 3) == 2
        assert words in second.log.read_text()
    assert first.status()["node"] == first.node, "the first one is still reached"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_that_comes_back_at_another_address_loses_nothing(
    cluster: RawCluster, number: int, combination: Combination
) -> None:
    """A rollout of the DaemonSet: the new pod has another IP, and the memory of the old one."""
    job = combination.job(cluster, cluster.start_nodes(3))
    job.form()
    job.start_trainers()
    newest = job.train(2)
    moved, before = job.daemon(1), cluster.wait_beat("n1")
    moved.kill(number)
    cluster.control.forget("n1")
    moved.host = moved.host.replace("127.78.", "127.79.")
    moved.start()
    after = cluster.wait_beat("n1")
    assert (after.memory_id, after.incarnation) == (before.memory_id, before.incarnation + 1)
    assert after.peer_address.rpartition(":")[0] != before.peer_address.rpartition(":")[0]
    job.readdress()
    wait_for("what was adopted", lambda: moved.job(job.name).get("protected") == str(newest))
    job.trainers[1].reopen()
    assert job.train() == job.generation, "its peers reach it, and it reaches them"
    newest = job.generation

    # What it holds is whole: another node is lost, and rebuilt with its part.
    job.daemon(0).lose()
    (job.nodes[0],) = cluster.start_nodes(1)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes of other users")
def test_a_daemon_without_rights_serves_trainers_of_other_users(cluster: RawCluster) -> None:
    daemon = cluster.make_node("--socket-mode", "666")
    daemon.uid = DAEMON_UID
    daemon.socket_dir = cluster.directory / "sockets"
    daemon.log.touch()
    for path, mode in ((daemon.root, 0o700), (daemon.socket_dir, 0o755), (daemon.log, 0o600)):
        path.mkdir(mode) if path != daemon.log else None
        os.chown(path, DAEMON_UID, DAEMON_UID)
    daemon.start()
    cluster.wait_beat(daemon.node)
    assert daemon.process is not None
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    assert f"Uid:\t{DAEMON_UID}\t{DAEMON_UID}" in status
    assert "CapEff:\t0000000000000000" in status
    cluster.start_nodes(1)
    job = RawJob(cluster, ["n0", "n1"])
    job.form()
    other = job.make_trainer(1)
    other.join(job.epoch)
    other.restore()
    other.open()

    ours, theirs = _forking.Pipe()
    process = _forking.Process(
        target=_train_as, args=(TRAINER_UID, _of_another(job, daemon), job.epoch, theirs)
    )
    process.start()
    theirs.close()
    assert ours.recv() == "open"
    other.save(1)
    arena = next((daemon.root / "jobs").rglob("arena"))
    assert arena.stat().st_uid == DAEMON_UID
    assert arena.stat().st_blocks * 512 >= arena.stat().st_size, "not all of it is allocated"
    ours.send(str(arena))
    assert ours.recv() == ["PermissionError", "PermissionError"]
    job.step = 1
    job.wait_protected(1)
    ours.send("end")
    process.join(WAIT_S)
    assert process.exitcode == 0
    other.die()


def _of_another(job: RawJob, daemon: DaemonProcess) -> tuple[str, int, int, str, str]:
    """What the other process makes its trainer of: a daemon's handle cannot be sent."""
    assert daemon.socket_dir is not None
    return job.name, job.size, job.nbytes, str(daemon.socket_dir), daemon.host


def _train_as(
    uid: int, named: tuple[str, int, int, str, str], epoch: int, pipe: Connection
) -> None:
    """Rank 0, as a process of user `uid`; tries the arena's path besides."""
    job, size, nbytes, socket_dir, host = named
    daemon = DaemonProcess(
        node="n0", control_port=0, root=Path("/nowhere"), host=host, socket_dir=Path(socket_dir)
    )
    daemon.stub()  # imports what that user may not be able to read
    become(uid)
    trainer = RawTrainer(daemon, job, 0, size, nbytes, nbytes + 5000 * size)
    trainer.join(epoch)
    trainer.restore()
    trainer.open()
    assert trainer.save(1)
    pipe.send("open")
    path, outcomes = pipe.recv(), []
    for what in (path, str(Path(path).parent)):
        try:
            os.close(os.open(what, os.O_RDONLY))
            outcomes.append("opened")
        except OSError as error:
            outcomes.append(type(error).__name__)
    pipe.send(outcomes)
    assert pipe.recv() == "end"
    trainer.die()
