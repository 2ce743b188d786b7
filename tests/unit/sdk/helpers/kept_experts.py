"""What a restore may leave of a state with experts under a policy that leaves experts out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

State = Mapping[str, torch.Tensor]


def steps_of_experts(
    found: State, noted: Sequence[State], expert_of: Callable[[str], str]
) -> dict[str, int]:
    """Check that each expert is as after one step, not all as after the newest, and that all other
    state is as after the newest.

    Args:
        found: tensors by name, as restored.
        noted: the same after each step.
        expert_of: name of a tensor → name of its expert; empty for other tensors.

    Returns:
        Each expert → the newest such step, as an index of `noted`.
    """
    newest = noted[-1]
    assert found.keys() == newest.keys()
    of_none = [name for name in newest if not expert_of(name)]
    assert [name for name in of_none if not torch.equal(found[name], newest[name])] == []
    steps = {}
    for expert in sorted({expert_of(name) for name in newest} - {""}):
        held = [name for name in newest if expert_of(name) == expert]
        fitting = [
            step
            for step, state in enumerate(noted)
            if all(torch.equal(found[name], state[name]) for name in held)
        ]
        assert fitting, f"{expert} is of no single step"
        steps[expert] = fitting[-1]
    assert min(steps.values()) < len(noted) - 1, "nothing was left out"
    return steps
