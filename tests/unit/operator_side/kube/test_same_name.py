"""A job that is made again under the name of one that was deleted: it begins anew, whatever daemons
that were away meanwhile still hold of the earlier one."""

from __future__ import annotations

from copy import deepcopy

import pytest
from samples import job_resource
from small_cluster import SmallCluster, on_a_cluster

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.resources import JOBS
from holdfast_operator.reconciler.observe.versions import completed
from holdfast_operator.reconciler.observe.views import JobView

EARLIER = job_resource(nprocPerNode=1, parallelism={"dp": 2})
KEY = "{namespace}.{name}".format(**EARLIER["metadata"])
NODES = 3


def made_again() -> Object:
    """The same document, as the API server takes it for another object."""
    found = deepcopy(EARLIER)
    found["metadata"]["uid"] = "uid of the later job"
    return found


def held(cluster: SmallCluster, node: str) -> str:
    """Identity of the job that the node's daemon holds something of."""
    membership = cluster.daemons[node].memberships.get(KEY)
    return "" if membership is None else membership.uid


async def leave_behind(cluster: SmallCluster, away: list[str]) -> None:
    """Run the earlier job to epoch 2, and delete it while daemons are away."""
    cluster.apply(EARLIER)
    await cluster.runs(EARLIER)
    for daemon in cluster.daemons.values():
        if KEY in daemon.memberships:
            daemon.protected[KEY] = Generation(1, 7)
            daemon.beat()
    cluster.lose_rank(cluster.job(EARLIER)["status"]["members"][0]["node"], KEY)
    await cluster.until(lambda: cluster.job(EARLIER)["status"].get("epoch") == 2)
    await cluster.runs(EARLIER)
    for node in away:
        await cluster.disconnect(node)
        cluster.cordon(node)
    cluster.delete(EARLIER)
    await cluster.until(lambda: not cluster.api.made(JOBS))
    cluster.collect_garbage()
    for daemon in cluster.daemons.values():
        daemon.at_work.discard(KEY)  # its pod was deleted
    assert EARLIER["metadata"]["uid"] in {held(cluster, node) for node in away}


@pytest.mark.parametrize("away", [["n1"], ["n0", "n1", "n2"]], ids=["one", "all"])
@pytest.mark.parametrize("later", [False, True], ids=["back at once", "back later"])
def test_a_job_made_again_begins_anew(away: list[str], *, later: bool) -> None:
    async def test(cluster: SmallCluster) -> None:
        await leave_behind(cluster, away)
        again = made_again()
        cluster.add_node("n3")
        cluster.add_node("n4")
        if not later:
            for node in away:
                cluster.connect(node)
        cluster.apply(again)
        await cluster.runs(again)
        for node in away if later else ():
            cluster.connect(node)
        status = cluster.job(again)["status"]
        assert (status["epoch"], status["restarts"]) == (1, 0)
        assert not status.get("protectedStep")
        await cluster.until_reported(
            lambda: (
                {held(cluster, node) for node in cluster.daemons} <= {"", again["metadata"]["uid"]}
            )
        )
        assert cluster.phase(again) == "Running"
        assert cluster.job(again)["status"]["epoch"] == 1

    on_a_cluster(test, NODES)


def test_memory_of_the_earlier_job_is_freed_while_the_later_one_waits() -> None:
    async def test(cluster: SmallCluster) -> None:
        await leave_behind(cluster, ["n1"])
        again = made_again()
        again["spec"]["suspend"] = True
        cluster.apply(again)
        await cluster.until(lambda: cluster.phase(again) == "Suspended")
        cluster.connect("n1")
        await cluster.until_reported(lambda: cluster.server.nodes()["n1"].connected)
        assert held(cluster, "n1") == EARLIER["metadata"]["uid"]
        cluster.fleet.free_earlier()
        await cluster.until_reported(lambda: not held(cluster, "n1"))

    on_a_cluster(test, NODES)


@pytest.mark.parametrize(("uid", "is_told"), [("later", True), ("", True), ("earlier", False)])
def test_a_report_without_its_membership_is_of_the_job_that_it_names(
    uid: str, *, is_told: bool
) -> None:
    """A daemon of an earlier version names none."""
    member = Member(index=0, node="n", memory_id="m", peer_address="a:1", bulk_address="a:2")
    ours = Membership(
        job=KEY, uid="later", epoch=7, members=(member,), nproc_per_node=1, groups=((0,),)
    )
    report = JobView(uid=uid, epoch=7, revision=0)
    told = ours if is_told else None
    assert completed(report, None, ours).membership == told
    before = JobView(uid="later", epoch=7, membership=ours)
    assert completed(report, before, None).membership == told
