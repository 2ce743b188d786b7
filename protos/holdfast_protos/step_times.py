"""Encode and decode how ranks divide their steps, bounded: the times come from trainers."""

from __future__ import annotations

from holdfast_core.stragglers import StepTimes, bounded_times
from holdfast_protos import values_pb2


def times_to_proto(value: StepTimes) -> values_pb2.StepTimes:
    """Encode the times of a window."""
    return values_pb2.StepTimes(
        window=value.window,
        steps=value.steps,
        stage=value.stage,
        step_s=value.step_s,
        own_s=value.own_s,
        own_spread_s=value.own_spread_s,
        wait_s=value.wait_s,
        data_s=value.data_s,
        processor_s=value.processor_s,
    )


def times_from_proto(message: values_pb2.StepTimes) -> StepTimes | None:
    """Decode the times of a window; None if they cannot be those of any."""
    return bounded_times(
        StepTimes(
            window=message.window,
            steps=message.steps,
            stage=message.stage,
            step_s=message.step_s,
            own_s=message.own_s,
            own_spread_s=message.own_spread_s,
            wait_s=message.wait_s,
            data_s=message.data_s,
            processor_s=message.processor_s,
        )
    )
