"""State at the beginning of a step, put back when the step is cut off before its vote.

A forward and a backward pass leave parameters and optimizer states alone. What else they may change
is small: random generators, stateful objects, buffers, parameter groups.

That they were left alone is proved: a script may write to a parameter in its forward pass, such as
the bias of a router, and `.data` and numpy increment no counter. So each step begins with a digest
of every byte of them; a change leads to the recovery line. Large optimizer states on a device are
left out, since reading them costs too much of a step: torch's counters watch over them, and an
optimizer that steps within the backward pass changes parameters, too (decision 0087).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast._digests import mark_of, same_mark
from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful, collect, put_back
from holdfast._state.extras import decode_extras, encode_extras
from holdfast._state.in_place import InPlaceCheck
from holdfast_core.errors import HoldfastError, LayoutMismatchError

STATE_BYTES_MAX = 64 * 2**10
"""Largest optimizer state on a device that is compared whole: step counters, and those of biases
and norms."""


class StepStart:
    """The state at construction, on the training thread.

    Args:
        step: number of completed steps.

    Raises:
        HoldfastError: `stateful` holds a value that cannot be encoded, or tensors cannot be found.
    """

    @torch.no_grad()
    def __init__(self, live: LiveState, stateful: Mapping[str, Stateful], step: int) -> None:
        self._live, self._stateful = live, stateful
        buffers = [source.tensor for source in live.sources() if source.eager]
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._extras = encode_extras(collect(live, stateful, step))
        self._unchanged = InPlaceCheck(live.watched)
        self._compared = live.compared_tensors(STATE_BYTES_MAX)
        self._marks = {name: mark_of(tensor) for name, tensor in self._compared.items()}

    def check(self) -> None:
        """Check that no parameter and no optimizer state has changed since; it reads them.

        Raises:
            LayoutMismatchError: one has; the message names it.
        """
        if self._live.has_changed():
            raise LayoutMismatchError("tensors were replaced since the step began")
        name = self._unchanged.first_changed() or self._differing()
        if name is not None:
            raise LayoutMismatchError(f"{name} was changed since the step began")

    def _differing(self) -> str | None:
        """Name of a tensor with other bytes than at construction; None when there is none."""
        both = ((name, tensor, self._marks[name]) for name, tensor in self._compared.items())
        return next((name for name, tensor, m in both if not same_mark(mark_of(tensor), m)), None)

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back what the step may have changed.

        Raises:
            LayoutMismatchError: a parameter or an optimizer state has changed as well, or an object
                does not load its own state.
        """
        self.check()
        for buffer, before in self._buffers:
            buffer.copy_(before)
        try:
            put_back(self._live, self._stateful, decode_extras(self._extras))
        except HoldfastError:
            raise
        except Exception as error:  # raised by the user's load_state_dict
            raise LayoutMismatchError(
                f"the state before the step cannot be loaded: {type(error).__name__}: {error}"
            ) from error
