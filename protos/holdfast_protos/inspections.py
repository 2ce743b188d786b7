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
            ),
            frames_max,
        )
        for each in messages
    )
