"""Which nodes a job is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from samples import make_job

from holdfast_core.node_failures import CLEAN, Rating
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.control.server import ControlServer
from holdfast_operator.kube.client.amounts import Amounts
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.cluster.candidates import SETTLE_S, CandidateNodes
from holdfast_operator.kube.cluster.nodes import Wants, read_node, wants_of
from holdfast_operator.kube.cluster.room import Room, read_placed
from holdfast_operator.reconciler.observe.views import NodeView


def node(name: str, **spec: object) -> Object:
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "allocatable": {"gpu": "8"},
    }
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": spec,
        "status": status,
    }


class ConnectedServer(ControlServer):
    """A Control server whose daemons on the given nodes are connected."""

    def __init__(self, clock: object, *names: str) -> None:
        super().__init__(heartbeat_s=1.0, clock=lambda: 0.0, on_evidence=lambda jobs: None)
        self.awaited: dict[str, frozenset[str]] = {}
        self.connected = {
            name: NodeView(name=name, connected=True, heartbeat_at=0.0) for name in names
        }

    def nodes(self) -> dict[str, NodeView]:
        return self.connected

    def view(self, name: str, job: str) -> NodeView | None:
        return self.connected.get(name)

    def awaited_on(self, name: str) -> frozenset[str]:
        return self.awaited.get(name, frozenset())


@dataclass
class Region:
    """Nodes, some of which have daemons."""

    connected: tuple[str, ...]
    unconnected: tuple[str, ...] = ()
    requests: dict[str, Amounts] = field(default_factory=dict)
    ratings: dict[str, Rating] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.server = ConnectedServer(None, *self.connected)
        self.cache: Cache[object] = Cache(read_node, lambda before, now: None)
        for name in (*self.connected, *self.unconnected):
            self.cache.put(node(name))
        self.room = Room()
        self.candidates = CandidateNodes(
            self.server,
            self.cache,  # type: ignore[arg-type]
            self.room,
            daemon_returns=lambda name, heartbeat_at: False,
            requests_of=lambda key: self.requests.get(key, ()),
            rating_of=lambda name: self.ratings.get(name, CLEAN),
            clock=lambda: self.now,
        )
        self.now = SETTLE_S

    def place(self, job: str, *names: str) -> None:
        """A job's members live on these nodes."""
        members = tuple(
            Member(index=i, node=n, memory_id="m", peer_address="a:1", bulk_address="a:2")
            for i, n in enumerate(names)
        )
        groups = (tuple(range(len(names))),)
        self.server.publish(
            Membership(job=job, epoch=1, members=members, nproc_per_node=1, groups=groups)
        )
        self.now += 1.0

    def shown(self, *near: str, others: int = 9, wants: Wants | None = None) -> list[str]:
        wants = wants or wants_of(make_job())
        return sorted(self.candidates.views("team.moe", wants, near, others))


def test_a_job_sees_its_own_nodes_and_no_more_than_it_can_use() -> None:
    region = Region(("n0", "n1", "n2", "n3"))
    assert region.shown("n3", others=2) == ["n0", "n1", "n3"]
    assert region.shown("n3", others=0) == ["n3"]


def test_nodes_that_other_jobs_use_are_offered_last() -> None:
    region = Region(("n0", "n1", "n2", "n3"))
    region.place("team.other", "n0", "n1")
    assert region.shown(others=2) == ["n2", "n3"]


def test_nodes_that_have_failed_are_offered_after_those_that_other_jobs_use() -> None:
    bad = Rating(2.0, "2 failures in 3 hours")
    region = Region(("n0", "n1", "n2", "n3"), ratings={"n2": bad})
    region.place("team.other", "n0", "n1")
    assert region.shown(others=3) == ["n0", "n1", "n3"]
    views = region.candidates.views("team.moe", wants_of(make_job()), (), 9)
    assert len(views) == 4, "they are offered"
    assert views["n2"].rating == bad and views["n0"].rating == CLEAN


def test_a_problem_that_a_nodes_conditions_name_counts_against_it() -> None:
    region = Region(("n0", "n1", "n2"), ratings={"n0": Rating(2.0, "2 failures in 3 hours")})
    for name in ("n0", "n1"):
        raw = node(name)
        raw["metadata"]["resourceVersion"] = "2"
        raw["status"]["conditions"] += [
            {"type": "GpuMemWatch", "status": "True", "message": "ECC"},
            {"type": "KernelDeadlock", "status": "False"},
        ]
        region.cache.put(raw)
    views = region.candidates.views("team.moe", wants_of(make_job()), (), 9)
    ratings = {name: view.rating for name, view in views.items()}
    assert ratings == {
        "n0": Rating(3.0, "2 failures in 3 hours, condition GpuMemWatch"),
        "n1": Rating(1.0, "condition GpuMemWatch"),
        "n2": CLEAN,
    }
    assert all(view.schedulable for view in views.values())
    assert region.shown(others=1) == ["n2"] and region.shown(others=2) == ["n1", "n2"]


def test_a_node_without_room_beside_other_jobs_is_not_offered() -> None:
    region = Region(("n0", "n1"), requests={"team.other": (("gpu", 6.0),)})
    region.place("team.other", "n0", "n1")
    container = {"name": "t", "command": ["x"], "resources": {"limits": {"gpu": "4"}}}
    wants = wants_of(make_job({"containers": [container]}))
    assert region.shown(wants=wants) == []
    region.requests["team.other"] = (("gpu", 4.0),)
    assert region.shown(wants=wants) == ["n0", "n1"]


def test_a_node_where_an_agent_of_another_job_waits_is_taken() -> None:
    region = Region(("n0", "n1"), requests={"team.other": (("gpu", 6.0),)})
    region.server.awaited["n1"] = frozenset({"team.other"})
    container = {"name": "t", "command": ["x"], "resources": {"limits": {"gpu": "4"}}}
    wants = wants_of(make_job({"containers": [container]}))
    assert region.shown(wants=wants) == ["n0"]


def test_its_own_requests_do_not_stand_in_a_jobs_way() -> None:
    region = Region(("n0",), requests={"team.moe": (("gpu", 8.0),)})
    region.place("team.moe", "n0")
    container = {"name": "t", "command": ["x"], "resources": {"limits": {"gpu": "8"}}}
    wants = wants_of(make_job({"containers": [container]}))
    assert region.candidates.views("team.moe", wants, ["n0"], 0)["n0"].schedulable


def pod(name: str, node: str, gpus: int) -> Object:
    container = {"resources": {"requests": {"gpu": str(gpus)}}}
    return {
        "metadata": {"namespace": "other", "name": name, "resourceVersion": "1"},
        "spec": {"nodeName": node, "containers": [container]},
    }


def test_pods_of_others_take_their_room_until_they_have_gone() -> None:
    region = Region(("n0", "n1"))
    container = {"name": "t", "command": ["x"], "resources": {"limits": {"gpu": "4"}}}
    wants = wants_of(make_job({"containers": [container]}))
    cache = Cache(read_placed, region.room.change)
    for name in ("a", "b"):
        cache.put(pod(name, "n1", 3))
    assert region.shown(wants=wants) == ["n0"]
    cache.remove("other", "a")
    assert region.shown(wants=wants) == ["n0", "n1"]
    assert region.shown(wants=wants_of(make_job())) == ["n0", "n1"], "it asks for nothing"


def test_nodes_whose_daemons_have_not_connected_are_shown_while_they_may_still_come() -> None:
    region = Region(("n0",), unconnected=("n1",))
    assert region.shown() == ["n0"]
    region.now = SETTLE_S - 0.1
    assert region.shown() == ["n0", "n1"]


def test_a_member_node_whose_object_is_gone_is_shown_as_gone() -> None:
    region = Region(("n0",))
    views = region.candidates.views("team.moe", wants_of(make_job()), ["lost"], 0)
    assert views["lost"].gone
