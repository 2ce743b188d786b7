"""Encode and decode inspected processes, bounded: their texts come from trainers."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.inspections import (
    FRAMES_MAX,
    GROUPS_MAX,
    MEMBERS_MAX,
    Frame,
    GroupCollectives,
    InspectedProcess,
    SessionActivity,
    bounded_process,
)
from holdfast_protos import values_pb2


def processes_to_proto(
    processes: Iterable[InspectedProcess], frames_max: int = FRAMES_MAX
) -> list[values_pb2.InspectedProcess]:
    """Encode processes, with at most `frames_max` frames of each."""
    return [
        values_pb2.InspectedProcess(
            rank=each.rank,
            state=each.state,
            kernel=each.kernel,
            call=each.call,
            helper=each.helper,
            frames=[
                values_pb2.StackFrame(file=f.file, line=f.line, function=f.function)
                for f in each.frames[:frames_max]
            ],
            no_stack=each.no_stack,
            hardware_fault=each.hardware_fault,
            collectives=[
                values_pb2.GroupCollectives(
                    group=g.group,
                    entered=g.entered,
                    pending=g.pending,
                    operation=g.operation,
                    size=g.size,
                    members=g.members,
                )
                for g in each.collectives
            ],
            session=None if each.session is None else _session_to_proto(each.session),
        )
        for each in processes
    ]


def processes_from_proto(
    messages: Iterable[values_pb2.InspectedProcess], frames_max: int = FRAMES_MAX
) -> tuple[InspectedProcess, ...]:
    """Decode processes, with texts and stacks of bounded size."""
    return tuple(
        bounded_process(
            InspectedProcess(
                rank=each.rank,
                state=each.state,
                kernel=each.kernel,
                call=each.call,
                helper=each.helper,
                frames=tuple(
                    Frame(frame.file, frame.line, frame.function)
                    for frame in each.frames[:frames_max]
                ),
                no_stack=each.no_stack,
                hardware_fault=each.hardware_fault,
                collectives=tuple(
                    GroupCollectives(
                        group=g.group,
                        entered=g.entered,
                        pending=g.pending,
                        operation=g.operation,
                        size=g.size,
                        members=tuple(g.members[: MEMBERS_MAX + 1]),
                    )
                    for g in each.collectives[:GROUPS_MAX]
                ),
                session=_session_from_proto(each.session) if each.HasField("session") else None,
            ),
            frames_max,
        )
        for each in messages
    )


def _session_to_proto(session: SessionActivity) -> values_pb2.SessionActivity:
    return values_pb2.SessionActivity(
        epoch=session.epoch,
        ranks=session.ranks,
        step=session.step,
        training=session.training,
        saving=session.saving,
    )


def _session_from_proto(message: values_pb2.SessionActivity) -> SessionActivity:
    return SessionActivity(
        epoch=message.epoch,
        ranks=message.ranks,
        step=message.step,
        training=message.training,
        saving=message.saving,
    )
