"""Inspected processes on the wire."""

from __future__ import annotations

from holdfast_core.inspections import (
    GROUPS_MAX,
    MEMBERS_MAX,
    NAME_CHARACTERS_MAX,
    Frame,
    GroupCollectives,
    InspectedProcess,
    SessionActivity,
)
from holdfast_protos.inspections import processes_from_proto, processes_to_proto

GROUP = GroupCollectives(
    group="1 gloo", entered=7, pending=7, operation="all_reduce", size=2, members=(0, 1)
)
SESSION = SessionActivity(epoch=3, ranks=8, step=41, training="save", saving="copies")


def test_a_process_comes_back_as_it_was_sent() -> None:
    whole = InspectedProcess(
        rank=1,
        state="S",
        kernel="futex_wait",
        call="read of /data/0",
        helper="its child process 9 is stopped",
        frames=(Frame("/work/train.py", 3, "step"),),
        no_stack="none",
        hardware_fault="Xid 79",
        collectives=(GROUP,),
        session=SESSION,
    )
    alone = InspectedProcess(rank=2)
    assert processes_from_proto(processes_to_proto((whole, alone))) == (whole, alone)


def test_what_a_trainer_claims_of_its_collectives_and_session_is_bounded() -> None:
    large = GroupCollectives(
        group="\x1b" + "g" * 500, operation="o" * 500, members=tuple(range(MEMBERS_MAX + 1))
    )
    session = SessionActivity(epoch=1, ranks=1, step=1, training="t" * 500, saving="\n" * 500)
    sent = InspectedProcess(rank=0, collectives=(large,) * (GROUPS_MAX + 5), session=session)
    (found,) = processes_from_proto(processes_to_proto((sent,)))
    assert len(found.collectives) == GROUPS_MAX
    first, noted = found.collectives[0], found.session
    assert first.members == () and first.group.isprintable()
    assert len(first.group) == len(first.operation) == NAME_CHARACTERS_MAX
    assert noted is not None and noted.saving.isprintable()
    assert len(noted.training) == len(noted.saving) == NAME_CHARACTERS_MAX
