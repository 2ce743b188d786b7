"""Messages between stages are logged with the values that they had when they were sent."""

from __future__ import annotations

import pytest
import torch
from machines import Machine, random_bytes

from holdfast._elastic.boundary_log import BoundaryLog, Crossing, Key
from holdfast._elastic.message_copies import SideCopies, bytes_of

WAIT_S = 30.0
NBYTES = 8 << 20


@pytest.fixture(autouse=True)
def _only_devices(machine: Machine) -> None:
    if not machine.is_cuda:
        pytest.skip("messages in host memory are copied at once")


def test_a_message_has_the_value_of_the_work_before_it_and_not_of_the_work_after_it(
    machine: Machine,
) -> None:
    copies = SideCopies()
    tensor, wanted = random_bytes(machine, NBYTES), random_bytes(machine, NBYTES, seed=2)
    copies.begin(tensor).result(WAIT_S)  # loads all kernels, which may wait
    machine.later(lambda: tensor.copy_(wanted))
    copy = copies.begin(tensor)
    tensor.fill_(3)
    assert not copy.done()
    data, _ = copy.result(WAIT_S)
    assert data == bytes_of(wanted)


@pytest.mark.parametrize("form", ["scalar", "turned", "expanded", "empty"])
def test_messages_of_every_form_have_the_bytes_that_waiting_for_them_gives(
    machine: Machine, form: str
) -> None:
    copies, base = SideCopies(), torch.arange(64.0, device=machine.kind).reshape(8, 8)
    tensor = {
        "scalar": base.sum(),
        "turned": base.t(),
        "expanded": base[:1].expand(8, 8),
        "empty": base[:0],
    }[form].requires_grad_()
    data, _ = copies.begin(tensor).result(WAIT_S)
    assert data == bytes_of(tensor)
    assert not copies._refused


def test_a_log_of_messages_from_a_device_is_that_of_waiting_for_them(machine: Machine) -> None:
    logs = [BoundaryLog(100 * NBYTES, keeps_received=True) for _ in range(2)]
    copies, tensor = SideCopies(), random_bytes(machine, NBYTES)
    for step in range(1, 9):
        for log in logs:
            log.begin(step)
        for number in range(4):
            key = Key(step, Crossing.ACTIVATION, number)
            logs[1].add_sent_later(1, key, NBYTES, copies.begin(tensor))
            logs[1].add_received_later(2, key, NBYTES, copies.begin(tensor))
            data = bytes_of(tensor)
            logs[0].add_sent(1, key, data)
            logs[0].add_received(2, key, data)
            tensor += number + 1
        for log in logs:
            log.complete(step)
    assert not copies._refused
    assert logs[0].nbytes == logs[1].nbytes
    for rank in (1, 2):
        assert logs[0].part_to_return(rank) == logs[1].part_to_return(rank)
