"""Process groups that each world makes again, and what a `World` asks of its groups.

Groups that libraries keep cannot be made again for them; `staying_groups` keeps these as objects,
where torch can give them new connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.distributed as dist

from holdfast._elastic import groups
from holdfast._elastic.groups import MeetingPoint
from holdfast._elastic.stage_group import Carrier

Forming = Callable[[str | None], AbstractContextManager[None]]
"""Context in which groups of a backend are formed; None is the backend of training."""


class WorldGroups(Protocol):
    """All process groups of this process, from one world to the next."""

    stay: bool
    """Whether groups stay as objects, also those that libraries made."""
    always_wakes: bool
    """Whether a thread has to end collectives with their world in any case."""
    form_s: float
    """Time that forming a group may take once all ranks have met."""

    def form(self, point: MeetingPoint, *, epoch: int, rank: int, size: int) -> None:
        """Form the default group, and those that stay. Collective.

        Args:
            point: meeting point of the world.
            epoch: its membership epoch.

        Raises:
            StaleEpochError: the world has ended.
            HoldfastError: ranks do not fit together.
            RuntimeError: a rank was lost meanwhile.
        """

    def split(
        self,
        parts: Sequence[Sequence[int]],
        rank: int,
        carrier: Carrier | None,
        kept: dist.ProcessGroup | None,
    ) -> dist.ProcessGroup:
        """Form one group for each part, and return that of `rank`. Collective.

        Args:
            carrier: sends and receives for these groups; None for torch's own.
            kept: what this returned for the same parts in the world before, if it is to stay.
        """

    @property
    def forming(self) -> Forming:
        """Context in which Holdfast forms groups of its own in the present world."""

    def is_other(self, rank: int, size: int) -> bool:
        """Whether groups stay, but are those of another rank than `rank` of `size`."""

    def begin(self, step: int) -> None:
        """Note that `step` begins."""

    def go_back_to(self, step: int) -> None:
        """Undo that groups were made after `step`, because these steps are repeated."""

    def wake(self, epoch: int, waited: Sequence[dist.ProcessGroup]) -> None:
        """End the collectives of world `epoch`, which has ended. Any thread.

        Args:
            waited: groups in which torch waits by itself.
        """

    def leave(self, given: Sequence[dist.ProcessGroup]) -> None:
        """Leave the present world, which wakes the ranks that wait for this one.

        Args:
            given: groups that were given to the script, which may have kept them.
        """

    def close(self) -> None:
        """Destroy all groups, after `leave`. A world that follows begins without groups."""


class RemadeGroups:
    """Groups that are made again in each world.

    Args:
        backend: torch's backend for training's collectives.
        timeout_s: time that each collective may take.
    """

    stay = False
    form_s = groups.FORM_S

    def __init__(self, backend: str, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self.always_wakes = groups.has_nccl(backend)
        # Gloo crashes when one thread closes the connections of a group and another drops it.
        self._lock = threading.Lock()
        self._point: MeetingPoint | None = None
        self._epoch = 0

    def form(self, point: MeetingPoint, *, epoch: int, rank: int, size: int) -> None:
        del rank, size  # as the meeting point says
        self._point, self._epoch = point, epoch
        point.form(self._backend, self._timeout_s)

    def split(
        self,
        parts: Sequence[Sequence[int]],
        rank: int,
        carrier: Carrier | None,
        kept: dist.ProcessGroup | None,
    ) -> dist.ProcessGroup:
        del kept
        forming: AbstractContextManager[None] = nullcontext()
        if self._point is not None:
            self._point.meet()
            forming = self._point.forming(self._backend)
        with forming:
            return groups.split(parts, rank, self._timeout_s, carrier)

    @property
    def forming(self) -> Forming:
        assert self._point is not None, "a world with other ranks has formed its groups"
        return self._point.forming

    def is_other(self, rank: int, size: int) -> bool:
        del rank, size
        return False

    def begin(self, step: int) -> None:
        del step

    def go_back_to(self, step: int) -> None:
        del step

    def wake(self, epoch: int, waited: Sequence[dist.ProcessGroup]) -> None:
        with self._lock:
            if self._point is not None and self._epoch == epoch:
                groups.wake()
                for group in waited:
                    groups.disconnect(group)

    def leave(self, given: Sequence[dist.ProcessGroup]) -> None:
        with self._lock:
            self._point = None
            groups.leave(given)

    def close(self) -> None:
        pass
