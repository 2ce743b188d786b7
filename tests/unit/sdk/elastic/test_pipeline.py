"""The boundaries of a stage: what is refused, and what a replay answers without any other rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from on_device import OnDevice
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast._elastic import message_copies
from holdfast._elastic.boundary_log import (
    EVERYONE,
    BoundaryLog,
    Crossing,
    Key,
    decode_part,
    encode_part,
)
from holdfast._elastic.message_copies import Copied, SideCopies, bytes_of
from holdfast._elastic.pipeline import (
    MICROBATCHES_MAX,
    SCHEDULES_FROM,
    BoundaryReplay,
    Pipeline,
)
from holdfast._elastic.stage_group import StageGroup
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import Full, PartialExperts, Policy, Selective, SparseWindows
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.topology import Topology

TOPOLOGY = Topology(dp=1, pp=2)
PLAN = ReplayPlan(scope=(0,), line=0, target=1, sources={0: (1,)}, shared_by=1)


class FakeWork:
    """A tensor that another rank sends, which has come when it was waited for."""

    def __init__(self, flat: torch.Tensor, came: list[int]) -> None:
        self.flat, self.came = flat, came

    def wait(self) -> None:
        self.came.append(len(self.came) + 1)
        self.flat.fill_(self.came[-1])


class FakeWorld:
    """World without process groups. What comes of a rank is 1, then 2, and so on."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size
        self.any_size = self.stays = False
        self.timeout_s = 1.0
        self.parts: list[list[int]] = []
        self.came: list[int] = []
        self.sent: list[tuple[int, list[int]]] = []

    def group(self, parts: Any) -> None:
        assert sorted(rank for part in parts for rank in part) == list(range(self.size))

    def form_group(self, parts: Any, carrier: Pipeline) -> None:
        del carrier
        self.parts = [list(part) for part in parts]

    def start_send(self, flat: torch.Tensor, to: int) -> FakeWork:
        self.sent.append((to, flat.tolist()))
        return FakeWork(torch.empty(1), [])

    def start_receive(self, flat: torch.Tensor, source: int) -> FakeWork:
        del source
        return FakeWork(flat, self.came)


def make(rank: int, topology: Topology = TOPOLOGY) -> Pipeline:
    world: Any = FakeWorld(rank, topology.world_size)
    return Pipeline(world, topology, log_bytes=1000)


@pytest.mark.parametrize("rank", range(6))
def test_stages_are_those_of_the_topology(rank: int) -> None:
    pipeline = make(rank, Topology(dp=2, pp=3))
    assert pipeline.stage == rank // 2
    assert pipeline.is_first == (rank < 2)
    assert pipeline.is_last == (rank >= 4)


def test_one_stage_is_no_pipeline() -> None:
    with pytest.raises(InvalidJobError, match="has one pipeline stage"):
        make(0, Topology(dp=2))


def test_a_process_has_one_stage_in_worlds_of_one_size_only() -> None:
    world: Any = FakeWorld(0)
    world.any_size = True
    with pytest.raises(InvalidJobError, match="leave any_size out"):
        Pipeline(world, TOPOLOGY, log_bytes=1000)


def test_there_is_nothing_beyond_the_ends() -> None:
    first, last, tensor = make(0), make(1), torch.zeros(2)
    for call in (first.send_gradient, first.receive_activation):
        with pytest.raises(InvalidJobError, match="stage 0 of 2 has no stage -1 beside it"):
            call(0, tensor)
    for call in (last.send_activation, last.receive_gradient):
        with pytest.raises(InvalidJobError, match="stage 1 of 2 has no stage 2 beside it"):
            call(0, tensor)


def test_a_tensor_to_receive_into_is_contiguous() -> None:
    with pytest.raises(InvalidJobError, match="that is not contiguous"):
        make(0).receive_gradient(0, torch.zeros(2, 3).T)


@pytest.mark.parametrize("number", [1.5, "0", None, -1, MICROBATCHES_MAX])
def test_micro_batches_have_numbers(number: Any) -> None:
    with pytest.raises(InvalidJobError, match="micro-batches are numbered"):
        make(0).receive_gradient(number, torch.zeros(1))


def test_tensors_of_one_micro_batch_are_told_apart_by_their_order() -> None:
    """As in a model that passes a mask on beside what it has computed."""
    sender, again = make(0), make(1)
    sender.world.send = lambda flat, to: None  # type: ignore[method-assign]
    sender.begin(1)
    sent: list[Any] = [np.int64(0), 1, torch.tensor(0), 0]
    for number in sent:
        value = float(len(sender.log.part_for([1], after=0, to=1).sent))
        sender.send_activation(number, torch.full((2,), value))
    sender.complete(1)
    part = decode_part(encode_part(sender.log.part_for([1], after=0, to=1)))
    again.replay = BoundaryReplay(PLAN, {0: part})
    again.begin(1)
    wanted: list[Any] = [0, 0, 1, np.int8(0)]
    given = [again.receive_activation(number, torch.zeros(2)) for number in wanted]
    assert [tensor[0].item() for tensor in given] == [0.0, 2.0, 1.0, 3.0]
    assert again.end_replay() == ""


def test_a_session_is_for_the_stages_of_its_pipeline() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InvalidJobError, match="topology dp1·ep1·tp1·pp2, but topology= is None"):
        holdfast.init(model=model, optimizer=torch.optim.SGD(model.parameters()), pipeline=make(0))


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(TOPOLOGY.world_size))


def init_with_log(socket: Path, settings: holdfast.Settings) -> None:
    """Begin a session of the first rank, whose stages log their messages."""
    model, pipeline = nn.Linear(1, 1), make(0)
    holdfast.init(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        topology=TOPOLOGY,
        world=pipeline.world,
        pipeline=pipeline,
        socket=socket,
        settings=settings,
    )


@pytest.mark.usefixtures("first_rank")
@pytest.mark.parametrize("policy", [PartialExperts(loss_limit=1.0), Selective(experts=1)])
def test_stages_whose_log_could_never_be_read_are_refused(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidJobError,
        match=f"{type(policy).__name__} leaves experts out .* use snapshot.policy.type Full",
    ):
        init_with_log(tmp_path / "socket", holdfast.Settings(policy=policy))


def test_stages_without_a_pipeline_are_of_worlds_of_one_size_too() -> None:
    world: Any = FakeWorld(0)
    world.any_size = True
    model = nn.Linear(1, 1)
    with pytest.raises(InvalidJobError, match="leave any_size out"):
        holdfast.init(
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            topology=TOPOLOGY,
            world=world,
        )


@pytest.mark.usefixtures("deterministic", "first_rank")
@pytest.mark.parametrize("go_on_live", [True, False])
@pytest.mark.parametrize("policy", [Full(), SparseWindows(window=3)])
def test_a_log_that_nobody_would_read_for_another_reason_is_only_warned_of(
    policy: Policy,
    go_on_live: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("holdfast._init.ElasticSession", lambda *given, **named: None)
    settings = holdfast.Settings(policy=policy, go_on_live=go_on_live)
    init_with_log(tmp_path / "socket", settings)
    assert ("no stage recovers alone" in caplog.text) == (not go_on_live)


class AllRanks(DistributedDataParallel):
    """Wraps a stage as accelerate's `prepare` does, without the group that this needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_a_stage_that_is_averaged_with_other_stages_is_refused() -> None:
    model, pipeline = AllRanks(nn.Linear(1, 1)), make(0)
    with pytest.raises(InvalidJobError, match=r"wrap the module by `world\.ddp"):
        holdfast.init(
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            topology=TOPOLOGY,
            world=pipeline.world,
            pipeline=pipeline,
        )


@pytest.mark.parametrize("wrong", ["", "activation", "gradient", "sum"])
def test_a_replay_is_answered_by_the_log_of_the_neighbour(wrong: str) -> None:
    output, gradient = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    log = BoundaryLog(1000)  # of rank 1
    log.begin(1)
    total = torch.tensor(5.0)
    log.add_sent(0, Key(1, Crossing.GRADIENT, 0), gradient.view(torch.uint8).numpy().tobytes())
    log.add_sent(EVERYONE, Key(1, Crossing.SHARED, 0), total.numpy().tobytes())
    sent = output.view(torch.uint8).numpy().tobytes()
    log.add_received(0, Key(1, Crossing.ACTIVATION, 0), sent)
    log.complete(1)

    pipeline = make(0)
    pipeline.replay = BoundaryReplay(PLAN, {1: log.part_for([0, EVERYONE], after=0, to=1)})
    pipeline.begin(1)
    pipeline.send_activation(0, output + (wrong == "activation"))
    number = int(wrong == "gradient")
    found = pipeline.receive_gradient(number, torch.zeros(2, dtype=torch.bfloat16))
    assert found.equal(gradient) == (wrong != "gradient")
    if wrong != "sum":
        assert pipeline.add_up(torch.tensor(0.0)) == 5
    pipeline.log.complete(1)
    differs = {
        "": "",
        "activation": "rank 0: activation 0 of step 1 is not the message that rank 1 had received",
        "gradient": "rank 0: gradient 1 of step 1 has 4 bytes now, but 0 are logged",
        "sum": "rank 0: shared 0 of step 1, a sum of all ranks, was not repeated",
    }
    assert pipeline.end_replay() == differs[wrong]
    assert pipeline.end_replay() == ""
    kept = pipeline.log.part_for([1], after=0, to=1)  # a neighbour may need it in its turn
    assert [message.key.crossing for message in kept.sent] == [Crossing.ACTIVATION]
    assert len(kept.received) == 1


# --- tensors of torch's schedules ---------------------------------------------------------------


def group_of(pipeline: Pipeline) -> StageGroup:
    """Group of the two ranks of `pipeline`."""
    return StageGroup("1", pipeline.world.rank, [0, 1], pipeline)


def schedule(pipeline: Pipeline, tensor: torch.Tensor) -> list[list[int]]:
    """A step in which a schedule sends a tensor twice, and receives two."""
    group, first, second = group_of(pipeline), torch.zeros(1), torch.zeros(1)
    pipeline.begin(1)
    works = [group.recv([first], 1), group.send([tensor], 1)]
    works += [group.send([tensor + 1], 1), group.recv([second], 1)]
    works[-1].wait()  # which ends the wait for the one before, as old versions of torch need it
    assert first.any()
    for work in works:
        work.wait()
    pipeline.complete(1)
    return [each.view(torch.uint8).tolist() for each in (first, second)]


@pytest.mark.skipif(torch.__version__ < SCHEDULES_FROM, reason="torch_group refuses it")
def test_groups_for_torch_are_those_of_pipelines() -> None:
    pipeline = make(0, Topology(dp=2, pp=3))
    pipeline.torch_group()
    world: Any = pipeline.world
    assert world.parts == [[0, 2, 4], [1, 3, 5]]
    assert pipeline.is_ring


@pytest.mark.parametrize("wrong", ["", "sent"])
def test_a_schedule_is_repeated_from_the_neighbours_log(wrong: str) -> None:
    lost, kept = make(0), make(1)
    world: Any = lost.world
    found = schedule(lost, torch.ones(1))
    assert found == [[1] * 4, [2] * 4]
    assert [to for to, _ in world.sent] == [1, 1]
    mine = lost.log.part_for([1], after=0, to=1)

    # What rank 1 has logged of the same messages.
    kept.begin(1)
    for number, data in enumerate(found):
        kept.log.add_sent(0, Key(1, Crossing.TENSOR, number), bytes(data))
    for message in mine.sent:
        kept.log.add_received(0, message.key, message.data)
    kept.complete(1)
    parts = {1: kept.log.part_for([0, EVERYONE], after=0, to=1)}

    again = make(0)
    again.replay = BoundaryReplay(PLAN, parts)
    assert schedule(again, torch.ones(1) * (2 if wrong else 1)) == found
    world = again.world
    assert not world.sent and not world.came
    text = "rank 0: tensor 0 of step 1 is not the message that rank 1 had received" if wrong else ""
    assert again.end_replay() == text
    if not wrong:
        assert again.log.part_for([1], after=0, to=1) == mine


def test_a_step_that_leaves_a_tensor_unreceived_is_refused() -> None:
    pipeline = make(0)
    pipeline.begin(1)
    group_of(pipeline).recv([torch.zeros(1)], 1)
    with pytest.raises(InvalidJobError, match="has not waited for 1 of the tensors from rank 1"):
        pipeline.complete(1)
    pipeline.begin(1)  # nothing is left of a step that was cut off
    pipeline.complete(1)


def test_stages_that_ask_others_for_shapes_are_refused() -> None:
    group, options = group_of(make(0)), dist.AllreduceOptions()
    opens = torch.zeros(1)
    group.allreduce([opens], options).wait()  # a sum, to open connections
    options.reduceOp = dist.ReduceOp.MIN
    group.allreduce([torch.ones(1)], options).wait()
    with pytest.raises(InvalidJobError, match="input_args and output_args"):
        group.allreduce([torch.zeros(1)], options)
    pickled = torch.zeros(3, dtype=torch.uint8)
    for call in (group.send, group.recv):
        with pytest.raises(InvalidJobError, match="input_args and output_args"):
            call([pickled], 1)


def test_what_opens_connections_is_no_message() -> None:
    pipeline = make(0)
    group, world = group_of(pipeline), pipeline.world
    pipeline.begin(1)
    taken = torch.ones(1, dtype=torch.int32)
    group.recv([taken], 1).wait()
    assert taken.item() == 0
    group.send([taken], 1).wait()
    pipeline.complete(1)
    fake: Any = world
    assert not fake.sent and not fake.came
    assert not pipeline.log.part_for([1], after=0, to=1).sent
    with pytest.raises(InvalidJobError, match="int32 tensor with one element"):
        group.send([torch.ones(1, dtype=torch.int32)], 1)


def test_what_a_schedule_keeps_of_an_ended_world_holds_no_transfer() -> None:
    pipeline = make(0)
    pipeline.begin(1)
    group = group_of(pipeline)
    kept = [group.recv([torch.zeros(1)], 1), group.send([torch.zeros(1)], 1)]
    assert all(each.work is not None for each in pipeline._on_way)
    on_way = list(pipeline._on_way)
    pipeline.drop()
    assert [each.work for each in on_way] == [None] * len(kept)


class DeviceWorld(FakeWorld):
    """World whose tensors are on a device. It only queues work."""

    def send(self, flat: torch.Tensor, to: int) -> None:
        del flat, to

    def receive(self, flat: torch.Tensor, source: int) -> None:
        del source
        flat.fill_(7)

    def add_up(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


class OnCuda(OnDevice):
    """Plays a tensor on a CUDA device."""

    is_cuda = True


def pipeline_on(world: FakeWorld, *, log_on_side_stream: bool = True) -> Pipeline:
    any_world: Any = world
    made = Pipeline(any_world, TOPOLOGY, log_bytes=1000, log_on_side_stream=log_on_side_stream)
    made.begin(1)
    return made


def test_messages_of_a_device_are_logged_without_a_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = list[Callable[[], bytes]]()
    go_on = threading.Event()

    def queue_copy(self: SideCopies, tensor: torch.Tensor) -> Callable[[], bytes]:
        del self
        assert isinstance(tensor, OnCuda)
        data = bytes_of(tensor.held)  # as of now, whatever the program does next

        def wait() -> bytes:
            assert go_on.wait(30)
            return data

        copies.append(wait)
        return wait

    monkeypatch.setattr(SideCopies, "_queue_copy", queue_copy)
    monkeypatch.setattr(OnDevice, "waits", 0)
    pipeline = pipeline_on(DeviceWorld(0))
    out, into, total = (OnCuda(torch.full((4,), float(i))) for i in (1, 2, 3))
    pipeline.send_activation(0, out)
    out.zero_()
    pipeline.receive_gradient(0, into)
    pipeline.add_up(total)
    pipeline.complete(1)
    assert (OnDevice.waits, len(copies)) == (0, 3)
    [thread] = [one for one in threading.enumerate() if one.name == "holdfast-log"]
    assert thread.daemon, "a device that hangs keeps no process from ending"
    go_on.set()
    part = pipeline.log.part_for([1, EVERYONE], after=0, to=1)
    assert [message.data for message in part.sent] == [
        bytes_of(torch.full((4,), 1.0)),
        bytes_of(torch.full((4,), 6.0)),
    ]
    received = bytes_of(into.held)
    assert [digest for _, digest in part.received] == [xxhash.xxh3_64_intdigest(received)]


@pytest.mark.parametrize("device", [OnDevice, OnCuda])
def test_messages_are_copied_by_the_training_thread_unless_it_is_a_cuda_device_that_is_asked(
    device: type[OnDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: SideCopies, tensor: torch.Tensor) -> Future[Copied]:
        raise AssertionError("no side stream is asked for")

    monkeypatch.setattr(SideCopies, "begin", never)
    pipeline = pipeline_on(DeviceWorld(0), log_on_side_stream=device is OnDevice)
    pipeline.send_activation(0, device(torch.ones(3)))
    pipeline.receive_gradient(0, device(torch.ones(3)))
    pipeline.complete(1)
    [sent] = pipeline.log.part_for([1], after=0, to=1).sent
    assert sent.checked_bytes() == bytes_of(torch.ones(3))


@pytest.mark.parametrize("refusal", ["memory", "stream", "thread"])
def test_a_rank_whose_device_or_process_is_full_waits_from_then_on(
    refusal: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[str]()

    def refuse(*given: object) -> Any:
        del given
        asked.append(refusal)
        if refusal == "memory":
            raise torch.OutOfMemoryError("no memory is left")
        raise RuntimeError("can't start new thread" if refusal == "thread" else "CUDA error")

    if refusal == "thread":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    else:
        monkeypatch.setattr(SideCopies, "_queue_copy", refuse)
    pipeline = pipeline_on(DeviceWorld(0))
    for number in range(3):
        pipeline.send_activation(number, OnCuda(torch.full((3,), float(number))))
    pipeline.complete(1)
    sent = pipeline.log.part_for([1], after=0, to=1).sent
    wanted = [bytes_of(torch.full((3,), float(number))) for number in range(3)]
    assert [message.checked_bytes() for message in sent] == wanted
    assert len(asked) == 1, "to ask frees all that the device's allocator has cached"
    assert caplog.text.count("by the training thread, which takes longer") == 1


@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_the_bytes_of_a_message_are_copied(nbytes: int) -> None:
    arrived = (torch.arange(nbytes) + 7).to(torch.uint8)
    data = message_copies._copied(arrived)
    arrived.zero_()
    assert data == bytes((number + 7) % 256 for number in range(nbytes))
    assert not any(bytes(nbytes)), "no bytes object that others have was written"
