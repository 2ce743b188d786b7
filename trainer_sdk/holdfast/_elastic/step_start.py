"""The state at the start of a step, to which training returns if the step is cut off before its
vote.

A forward and a backward pass should not change parameters or optimizer states. Everything else that
they may change is small: random generators, stateful objects, buffers, parameter groups.

That parameters and optimizer states did not change is verified, because a script may write to a
parameter in its forward pass, such as the bias of a router, and writes through `.data` and numpy
increment no counter. So each step starts with a digest of all of their bytes, and after a change
training returns to the recovery line. Large optimizer states on a device are not digested, because
reading them would take too much of a step. Torch's counters watch them, and an optimizer that steps
within the backward pass also changes parameters, which are digested (decision 0087).
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
"""Largest optimizer state on a device that is digested: step counters, and the states of biases and
norms."""


class StepStart:
    """The state at construction. Only the training thread uses it.

    Args:
        step: number of completed steps.
        state_bytes_max: largest optimizer state on a device that is digested.

    Raises:
        HoldfastError: `stateful` holds a value that cannot be encoded, or tensors cannot be found.
    """

    @torch.no_grad()
    def __init__(
        self,
        live: LiveState,
        stateful: Mapping[str, Stateful],
        step: int,
        state_bytes_max: int = STATE_BYTES_MAX,
    ) -> None:
        self._live, self._stateful = live, stateful
        buffers = [source.tensor for source in live.sources() if source.eager]
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._extras = encode_extras(collect(live, stateful, step))
        self._unchanged = InPlaceCheck(live.watched)
        self._compared = live.compared_tensors(state_bytes_max)
        self._marks = {name: mark_of(tensor) for name, tensor in self._compared.items()}

    def check(self) -> None:
        """Check that no parameter and no optimizer state has changed since construction. This reads
        all of them.

        Raises:
            LayoutMismatchError: a tensor has changed; the message names it.
        """
        name = self.first_changed()
        if name is not None:
            raise LayoutMismatchError(f"{name} was changed since the step began")

    def first_changed(self) -> str | None:
        """Return the name of a parameter or an optimizer state that has changed since construction;
        None if there is none. This reads all of them.

        Raises:
            LayoutMismatchError: tensors were replaced.
        """
        if self._live.has_changed():
            raise LayoutMismatchError("tensors were replaced since the step began")
        return self._unchanged.first_changed() or self._differing()

    def was_written(self) -> bool:
        """Whether an operation of torch has written to a tensor since construction: no fault of the
        memory does."""
        return self._unchanged.was_written()

    def first_changed_until(self, later: StepStart) -> str | None:
        """Return the name of a parameter or an optimizer state that has changed from this to the
        `later` beginning of the same step; None if there is none."""
        both = ((name, mark, later._marks.get(name)) for name, mark in self._marks.items())
        return next((name for name, m, n in both if n is not None and not same_mark(m, n)), None)

    def _differing(self) -> str | None:
        """Return the name of a tensor whose bytes have changed; None if there is none."""
        both = ((name, tensor, self._marks[name]) for name, tensor in self._compared.items())
        return next((name for name, tensor, m in both if not same_mark(mark_of(tensor), m)), None)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the state at construction.

        Raises:
            LayoutMismatchError: a parameter or an optimizer state has changed, or an object fails
                to load its own state.
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
