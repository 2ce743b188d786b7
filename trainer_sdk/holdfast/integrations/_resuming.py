"""State that is restored before the object that holds it exists."""

from __future__ import annotations

from typing import Any

from holdfast._state.collect import Stateful


class KeptState:
    """Stateful object that stands for one which is made after the restore."""

    def __init__(self) -> None:
        self._object: Stateful | None = None
        self._restored: list[Any] = []

    def attach(self, item: Stateful) -> None:
        """Stand for `item` from now on, and give it what was restored."""
        self._object = item
        if self._restored:
            item.load_state_dict(self._restored.pop())

    def state_dict(self) -> Any:
        """State of the object; it has to be attached."""
        assert self._object is not None, "a save before anything was attached"
        return self._object.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep the state for the object."""
        self._restored = [state_dict]
