"""Writer for `dcp.async_save` into the memory tier: `HoldfastWriter`.

A script that already saves through torch.distributed.checkpoint passes it as `storage_writer` and
keeps its loop. The session captures its live model, optimizers and `stateful` instead of the state
dict. The tensors are the same, so staging copies nothing here, and the session's hook keeps the
optimizer from changing them too early. A state dict with other state is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast._daemon.handles import SaveHandle
from holdfast._session.interface import Session
from holdfast._state.capture import LiveState
from holdfast._state.dtensors import local_of
from holdfast_core.errors import HoldfastError, InvalidJobError


class HoldfastWriter(StorageWriter, AsyncStager):
    """Writer that makes the memory tier a storage of `dcp.async_save`:
    `dcp.async_save({"step": step, **state}, storage_writer=HoldfastWriter(session))`.

    The state dict must have the number of completed steps under `step`. The future that
    `async_save` returns is done when the snapshot is committed, so that it survives this process. A
    skipped snapshot does not fail the future, because training must not end for it: `handle`, the
    session's counters and the log show the reason.

    Args:
        session: the session from `holdfast.init`. Call its `restore` to load.
        strict: whether a skipped snapshot fails the future.

    Raises:
        InvalidJobError: in `async_save`, if the state dict lacks `step` or has state that the
            session does not capture. In `dcp.save`, which is not supported: use `session.save`.
    """

    _synchronize_after_execute = False

    def __init__(self, session: Session, *, strict: bool = False) -> None:
        self._session = session
        self._strict = strict
        self.handle: SaveHandle | None = None
        """Handle of the newest `async_save`."""

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the snapshot. Return an empty state dict, so that torch saves nothing itself."""
        step = state_dict.get("step")
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            step = int(step)
        if not isinstance(step, int):
            raise InvalidJobError(
                'the state dict has no number "step"; add the completed steps: {"step": step, ...}'
            )
        if (holds := self._session.holds) is not None:
            check_covered(state_dict, holds.live, holds.stateful)
        self.handle = self._session.save(step)
        return {}

    def synchronize_staging(self) -> None:
        """Wait until tensors may change, as the session's hook on the optimizer does."""
        self._session.wait_staged()

    def close(self) -> None:
        """Do nothing: the writer holds no resources, and the caller closes the session."""

    # --- torch's interface ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        del checkpoint_id  # the step identifies a snapshot

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args, kwargs
        if self.handle is None:
            raise InvalidJobError("HoldfastWriter works with dcp.async_save only")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        del plan, planner
        assert self.handle is not None
        written: Future[list[WriteResult]] = Future()
        error = self.handle.committed.exception()
        if error is not None and (self._strict or not isinstance(error, HoldfastError)):
            written.set_exception(error)  # type: ignore[arg-type]  # typed for Exception
        else:
            written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        del metadata, results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return True


def check_covered(
    state_dict: Mapping[str, Any], live: LiveState, stateful: Mapping[str, object]
) -> None:
    """Check that the session captures everything in `state_dict`: its tensors must be the live
    tensors, and entries without tensors must be in `stateful`.

    Raises:
        InvalidJobError: the session does not capture an entry; the message names it.
    """
    mappings = (states for holders in live.holders for states in holders.states())
    states = [state for mapping in mappings for state in mapping.values()]
    tensors = [*live.model.parameters(), *live.model.buffers(), *_tensors(states)]
    known = {local_of(tensor).untyped_storage().data_ptr() for tensor in tensors}
    for key, value in state_dict.items():
        if key == "step" or key in stateful:
            continue
        found = [local_of(t).untyped_storage().data_ptr() for t in _tensors(value)]
        if not found and isinstance(value, Mapping) and "param_groups" in value:
            continue  # an optimizer without state
        if not found or not known.issuperset(found):
            raise InvalidJobError(
                f"the state dict's {key!r} has state that the session does not capture; pass it to "
                f"holdfast.init in stateful, under that name, or leave it out"
            )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
