"""The log of a stage's boundaries: its bound, what is dropped, and what a replay does with it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import msgspec
import pytest
import torch
import xxhash

from holdfast._elastic import boundary_log
from holdfast._elastic.boundary_log import (
    EVERYONE,
    BoundaryLog,
    Crossing,
    Key,
    LogPart,
    Message,
    decode_part,
    encode_part,
)
from holdfast._elastic.message_copies import Copied
from holdfast._elastic.pipeline import BoundaryReplay
from holdfast_core.errors import CorruptError
from holdfast_core.protection.replaying import ReplayPlan

ME, BELOW = 0, 2
PLAN = ReplayPlan(scope=(ME,), line=1, target=2, sources={ME: (BELOW,)}, shared_by=BELOW)


def key(step: int, number: int = 0, crossing: Crossing = Crossing.GRADIENT) -> Key:
    return Key(step, crossing, number)


def run_steps(log: BoundaryLog, steps: int, nbytes: int = 10) -> None:
    """Log one message in each step."""
    for step in range(1, steps + 1):
        log.begin(step)
        log.add_sent(ME, key(step), bytes([step]) * nbytes)
        log.add_received(ME, key(step, crossing=Crossing.ACTIVATION), bytes([step]) * nbytes)
        log.complete(step)


def steps_of(part: LogPart) -> list[int]:
    return [message.key.step for message in part.sent]


def test_a_part_has_the_messages_of_its_ranks_and_steps() -> None:
    log = BoundaryLog(1000)
    run_steps(log, 4)
    log.begin(5)
    log.add_sent(1, key(5), b"to another rank")
    part = log.part_for([ME], after=1, to=3)
    assert steps_of(part) == [2, 3]
    assert [message.data for message in part.sent] == [b"\2" * 10, b"\3" * 10]
    assert part.received == tuple(
        (key(step, crossing=Crossing.ACTIVATION), xxhash.xxh3_64_intdigest(bytes([step]) * 10))
        for step in (2, 3)
    )
    assert (log.first, log.last) == (1, 4)


def test_the_oldest_steps_make_room() -> None:
    log = BoundaryLog(35)
    run_steps(log, 6)
    assert log.nbytes == 30
    assert (log.first, log.last) == (4, 6)
    assert steps_of(log.part_for([ME], after=0, to=6)) == [4, 5, 6]


def test_a_step_that_does_not_fit_leaves_an_empty_log() -> None:
    log = BoundaryLog(5)
    run_steps(log, 3)
    assert (log.nbytes, log.first, log.last) == (0, 4, 3)


def test_protected_steps_are_dropped() -> None:
    log = BoundaryLog(1000)
    run_steps(log, 5)
    log.drop_to(3)
    log.drop_to(2)  # older news
    assert (log.nbytes, log.first, log.last) == (20, 4, 5)


def test_a_step_that_was_cut_off_is_logged_anew() -> None:
    log = BoundaryLog(1000)
    run_steps(log, 2)
    log.begin(3)
    log.add_sent(ME, key(3), b"cut off")
    log.begin(3)
    log.add_sent(ME, key(3), b"again")
    assert [m.data for m in log.part_for([ME], after=2, to=3).sent] == [b"again"]
    assert log.nbytes == 25


def test_a_log_that_begins_anew_knows_nothing_of_before() -> None:
    log = BoundaryLog(1000)
    run_steps(log, 3)
    log.restart(7)
    assert (log.nbytes, log.first, log.last) == (0, 8, 7)


def exchanged(steps: int) -> dict[int, BoundaryLog]:
    """The logs of ranks 0, 1 and 2 of a pipeline, of steps with a message in each direction and a
    sum."""
    logs = {rank: BoundaryLog(1000, keeps_received=True) for rank in range(3)}
    for step in range(1, steps + 1):
        for log in logs.values():
            log.begin(step)
        for one, other in ((0, 1), (1, 2), (1, 0), (2, 1)):
            crossing = Crossing.ACTIVATION if one < other else Crossing.GRADIENT
            data = bytes([step, one, other])
            logs[one].add_sent(other, key(step, crossing=crossing), data)
            logs[other].add_received(one, key(step, crossing=crossing), data)
        for log in logs.values():
            log.add_sent(EVERYONE, key(step, crossing=Crossing.SHARED), bytes([step]))
            log.complete(step)
    return logs


def returned(logs: dict[int, BoundaryLog]) -> dict[int, LogPart]:
    """What the neighbours of rank 1 return to it."""
    return {rank: decode_part(encode_part(logs[rank].part_to_return(1))) for rank in (0, 2)}


def test_neighbours_return_all_that_a_log_had_held() -> None:
    logs = exchanged(4)
    logs[0].begin(5)
    logs[0].add_sent(1, key(5), b"of a step that is cut off")
    new = BoundaryLog(1000, keeps_received=True)
    new.restart(4)
    new.refill(returned(logs))
    assert (new.first, new.last, new.nbytes) == (1, 4, logs[1].nbytes)
    for rank in (0, 2):
        of_ranks = [rank, EVERYONE]
        part, whole = (log.part_for(of_ranks, after=0, to=4) for log in (new, logs[1]))
        assert set(part.sent) == set(whole.sent)
        assert set(part.received) == set(whole.received)
        again, before = (log.part_to_return(rank) for log in (new, logs[1]))
        assert set(again.copies) == set(before.copies)
    new.begin(5)
    new.complete(5)
    assert (new.first, new.last) == (1, 5)


def test_a_log_is_returned_as_far_back_as_all_neighbours_reach_and_within_its_bound() -> None:
    logs = exchanged(4)
    logs[2].drop_to(2)
    new = BoundaryLog(1000, keeps_received=True)
    new.restart(4)
    new.refill(returned(logs))
    assert (new.first, new.last) == (3, 4)
    one = logs[1].nbytes // 4
    small = BoundaryLog(2 * one, keeps_received=True)
    small.restart(4)
    small.refill(returned(exchanged(4)))
    assert small.first == 3 and small.nbytes <= 2 * one
    assert len(small.part_for([0], after=0, to=4).sent) == 2


def test_nothing_is_returned_of_another_step_or_with_a_wrong_checksum() -> None:
    parts = returned(exchanged(4))
    new = BoundaryLog(1000, keeps_received=True)
    new.restart(5)
    new.refill(parts)
    assert (new.first, new.last, new.nbytes) == (6, 5, 0)
    new.restart(4)
    [first, *others] = parts[2].copies
    wrong = (msgspec.structs.replace(first, data=b"other"), *others)
    with pytest.raises(CorruptError):
        new.refill({**parts, 2: msgspec.structs.replace(parts[2], copies=wrong)})
    assert (new.first, new.last, new.nbytes) == (5, 4, 0)


def test_received_messages_are_not_kept_unless_it_is_asked_for() -> None:
    log = BoundaryLog(1000)
    run_steps(log, 3)
    assert log.nbytes == 30
    assert not log.part_to_return(ME).copies


def given(
    *messages: tuple[Key, torch.Tensor], received: tuple[tuple[Key, int], ...] = ()
) -> LogPart:
    data = [(name, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in messages]
    sent = tuple(Message(name, each, xxhash.xxh3_64_intdigest(each)) for name, each in data)
    part = LogPart(sent, received)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=LogPart)


def test_a_replay_takes_what_was_sent_and_compares_what_it_sends() -> None:
    gradient, total = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    sum_key, out = key(2, crossing=Crossing.SHARED), key(2, crossing=Crossing.ACTIVATION)
    part = given((key(2), gradient), (sum_key, total), received=((out, 5),))
    replay = BoundaryReplay(PLAN, {BELOW: part})
    assert replay.has(BELOW)
    assert not replay.has(1)
    into = torch.zeros(2)
    replay.take(BELOW, key(2), into)
    assert into.equal(gradient)
    replay.take(EVERYONE, sum_key, into[:1])
    assert into[0] == 3
    replay.compare(BELOW, out, 5)
    replay.end()
    assert replay.divergence == ""


@pytest.mark.parametrize("what", ["another digest", "never received", "twice"])
def test_a_replay_that_sends_something_else_differs(what: str) -> None:
    out = key(2, crossing=Crossing.ACTIVATION)
    received = () if what == "never received" else ((out, 5),)
    replay = BoundaryReplay(PLAN, {BELOW: given(received=received)})
    if what == "twice":
        replay.compare(BELOW, out, 5)
    replay.compare(BELOW, out, 6 if what == "another digest" else 5)
    assert replay.divergence == "activation 0 of step 2 is not the message that rank 2 had received"


def test_a_replay_that_asks_for_something_else_differs() -> None:
    replay = BoundaryReplay(PLAN, {BELOW: given((key(2), torch.zeros(2)))})
    into = torch.ones(3)
    replay.take(BELOW, key(2), into)
    assert replay.divergence == "gradient 0 of step 2 has 12 bytes now, but 8 are logged"
    assert not into.any()


def test_a_replay_that_leaves_something_out_differs() -> None:
    replay = BoundaryReplay(PLAN, {BELOW: given((key(2), torch.zeros(2)))})
    replay.end()
    assert replay.divergence == "gradient 0 of step 2, with rank 2, was not repeated"


def test_a_log_with_a_wrong_byte_is_not_used() -> None:
    part = LogPart((Message(key(2), b"other bytes", 1),))
    with pytest.raises(CorruptError, match="gradient 0 of step 2 does not match its checksum"):
        BoundaryReplay(PLAN, {BELOW: part})


class Copying:
    """Messages that devices are copying, which arrive when the test says so."""

    def __init__(self, log: BoundaryLog) -> None:
        self.log = log
        self.on_way: list[tuple[Future[Copied], bytes]] = []

    def send(self, step: int, data: bytes, number: int = 0) -> None:
        self.on_way.append((Future(), data))
        self.log.add_sent_later(ME, key(step, number), len(data), self.on_way[-1][0])

    def receive(self, step: int, data: bytes) -> None:
        self.on_way.append((Future(), data))
        name = key(step, crossing=Crossing.ACTIVATION)
        self.log.add_received_later(ME, name, len(data), self.on_way[-1][0])

    def arrive(self) -> None:
        for copy, data in self.on_way:
            copy.set_result((data, xxhash.xxh3_64_intdigest(data)))
        self.on_way.clear()


def test_messages_of_devices_are_logged_like_others_once_they_are_copied() -> None:
    logs = [BoundaryLog(35, keeps_received=True) for _ in range(2)]
    copying = Copying(logs[1])
    for step in range(1, 7):
        for log in logs:
            log.begin(step)
        data = bytes([step]) * 5
        logs[0].add_sent(ME, key(step), data)
        logs[0].add_received(ME, key(step, crossing=Crossing.ACTIVATION), data)
        copying.send(step, data)
        copying.receive(step, data)
        for log in logs:
            log.complete(step)
        if step % 2:
            copying.arrive()
    copying.arrive()
    for read in ("first", "last", "nbytes"):
        assert getattr(logs[0], read) == getattr(logs[1], read)
    parts = [log.part_for([ME], after=0, to=6) for log in logs]
    assert parts[0] == parts[1]
    assert logs[0].part_to_return(ME) == logs[1].part_to_return(ME)


def test_who_reads_the_log_waits_for_what_is_being_copied() -> None:
    log = BoundaryLog(1000)
    copying = Copying(log)
    log.begin(1)
    copying.send(1, b"one")
    copying.send(1, b"two", number=1)
    log.complete(1)
    timer = threading.Timer(0.0, copying.arrive)
    timer.start()
    assert [message.data for message in log.part_for([ME], after=0, to=1).sent] == [b"one", b"two"]
    timer.join()


def test_messages_of_a_step_that_was_cut_off_do_not_arrive_in_the_next_one() -> None:
    log = BoundaryLog(1000)
    copying = Copying(log)
    log.begin(1)
    copying.send(1, b"kept")
    log.complete(1)
    log.begin(2)
    copying.send(2, b"cut off")
    log.begin(2)
    copying.send(2, b"again")
    copying.arrive()
    assert [m.data for m in log.part_for([ME], after=0, to=2).sent] == [b"kept", b"again"]
    copying.send(2, b"late", number=1)
    log.restart(5)
    copying.arrive()
    assert (log.nbytes, log.first, log.last) == (0, 6, 5)


def test_a_copy_that_fails_costs_its_step_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = BoundaryLog(1000)
    copying = Copying(log)
    for step in (1, 2, 3):
        log.begin(step)
        copying.send(step, bytes(4))
        log.complete(step)
    copying.on_way.pop(1)[0].set_exception(RuntimeError("launch failed"))
    copying.arrive()
    assert (log.first, log.last, log.nbytes) == (3, 3, 4)
    assert "gradient 0 of step 2 cannot be logged" in caplog.text


@pytest.mark.parametrize("again", [True, False])
def test_a_copy_that_fails_in_a_step_that_is_cut_off_costs_nothing(again: bool) -> None:
    log = BoundaryLog(1000)
    copying = Copying(log)
    for step in (1, 2):
        log.begin(step)
        copying.send(step, bytes(4))
        copying.arrive()
        log.complete(step)
    log.begin(3)
    copying.send(3, bytes(4))
    copying.on_way.pop()[0].set_exception(RuntimeError("launch failed"))
    assert (log.first, log.last) == (1, 2)
    if again:
        log.begin(3)
        copying.send(3, bytes(4))
        copying.arrive()
    log.complete(3)
    assert (log.first, log.last) == ((1, 3) if again else (4, 3))


def test_a_rank_waits_when_too_much_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_log, "ON_WAY_BYTES_MAX", 25)
    log = BoundaryLog(1000)
    copying = Copying(log)
    log.begin(1)
    copying.send(1, bytes(10))
    copying.send(1, bytes(10), number=1)
    first = copying.on_way[0][0]
    timer = threading.Timer(0.0, copying.arrive)
    assert not first.done()
    timer.start()
    copying.send(1, bytes(10), number=2)
    assert first.done()
    timer.join()
