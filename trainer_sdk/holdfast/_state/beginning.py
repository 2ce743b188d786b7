"""State at the beginning of a step, put back when the step is cut off before its vote.

A forward and a backward pass leave parameters and optimizer states alone. What else they may change
is small: random generators, stateful objects, buffers, parameter groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful, collect, put_back
from holdfast._state.extras import decode_extras, encode_extras
from holdfast._state.in_place import InPlaceCheck
from holdfast_core.errors import HoldfastError, LayoutMismatchError


class Beginning:
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

    def check(self) -> None:
        """Check that no parameter and no optimizer state has changed since.

        Raises:
            LayoutMismatchError: one has; the message names it.
        """
        if self._live.changed():
            raise LayoutMismatchError("tensors were replaced since the step began")
        name = self._unchanged.changed()
        if name is not None:
            raise LayoutMismatchError(f"{name} was changed since the step began")

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
