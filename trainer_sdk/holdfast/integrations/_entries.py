"""The loop of a framework, entered again from its top after each recovery.

A framework owns its loop, so a process that stays cannot jump to a step of it. But it can unwind
out of the loop and enter it again: all ranks do, those that stayed and those that are new, so that
all of them make the same collectives again (the constructor of DDP, the preparation of loaders).
The model, the optimizer and everything that was imported stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast._causes import drop_frames
from holdfast._elastic.sampler import ElasticSampler
from holdfast._elastic.session import ElasticSession
from holdfast._elastic.world import World
from holdfast._session.interface import Session
from holdfast._state.collect import RandomGenerators
from holdfast._state.conventions import has_seats
from holdfast._state.extras import UnsupportedValueError, encode_extras
from holdfast._steps import RestartRunner, Runner
from holdfast_core.errors import InvalidJobError, StaleEpochError

T = TypeVar("T")
_LOG = logging.getLogger("holdfast")


def what_can_be_saved(callback: object, state: dict[str, Any]) -> dict[str, Any]:
    """Return the `state` of a callback; nothing, with a warning, if a snapshot cannot carry it."""
    try:
        encode_extras(state)
    except UnsupportedValueError as error:
        _LOG.warning("the state of %s is not saved: %s", type(callback).__name__, error)
        return {}
    return state


def check_model(framework: str, model: nn.Module, arguments: Mapping[str, object]) -> None:
    """Refuse what only a loop of one's own can train.

    Args:
        framework: its name, for messages.
        arguments: further ones of `holdfast.init`.

    Raises:
        InvalidJobError: the model has experts in seats, or stages have a log.
    """
    if has_seats(model):
        raise InvalidJobError(
            f"{framework} reduces gradients as if all ranks had the same experts, and those of "
            f"holdfast.moe have copies on some: train them in a loop of your own, as in "
            f"examples/train_moe_elastic.py"
        )
    if arguments.get("pipeline") is not None:
        raise InvalidJobError(
            f"pipeline=…: {framework} cannot repeat the steps of a stage alone; leave it out, so "
            f"that all ranks go back together, or write a loop of your own, as in "
            f"examples/train_moe_pipeline.py"
        )


class Entries:
    """The entries into the loop of a framework.

    Args:
        session: of this process.
        in_closures: whether the framework computes gradients within the `step` of an optimizer, in
            a closure. It then calls `before_update`.
    """

    def __init__(self, session: Session, *, in_closures: bool = False) -> None:
        self.session = session
        self._stays = session if isinstance(session, ElasticSession) else None
        if self._stays is not None and in_closures:
            self._stays.vote_in_closures()
        self._runner: Runner = self._stays or RestartRunner(session)
        self._begun: int | None = None

    def begin(self, step: int) -> None:
        """Note that `step` begins now, unless it has begun already."""
        if self._begun != step:
            self._begun = step
            self._runner.begin(step)

    def before_update(self) -> None:
        """Called when the gradients of a step are complete, before they change anything.

        Raises:
            UnreachableError: its world has ended; let it end the framework's loop.
        """
        if self._stays is not None:
            self._stays.before_update()

    def complete(self, step: int) -> None:
        """Save the state after `step`.

        Raises:
            StaleEpochError: its world has ended; let it end the framework's loop.
        """
        self._begun = None
        if not self._runner.complete(step):
            raise StaleEpochError(f"the training world has ended after step {step}")

    def run(
        self,
        enter: Callable[[int, bytes], T],
        unwind: Callable[[], None],
        history: Callable[[], bytes] | None = None,
    ) -> T:
        """Restore, run the framework's loop to its end on all ranks, and return what it returns.

        Args:
            enter: runs the loop, given the number of completed steps, and what `history` returned
                on a rank that has lived through them.
            unwind: drops what refers to the groups of a world, after its end.
            history: returns what a new rank takes from one that stayed; empty on a new rank. None
                on all ranks if there is nothing to take.
        """
        done = self._runner.begin_steps()
        while True:
            try:
                lived = self._share(history()) if done and history is not None else b""
                result = enter(done, lived)
                if self._runner.finish_steps():
                    return result
            except Exception as error:
                if not self._runner.survives(error):
                    raise
                drop_frames(error)
            self._begun = None
            unwind()
            done = self._runner.go_back()

    def _share(self, own: bytes) -> bytes:
        """Return `own`, or that of the lowest rank which has any. Collective."""
        if self._stays is None:
            return own
        having = [bool(one) for one in self._stays.gather(b"1" if own else b"")]
        if all(having) or not any(having):
            return own
        giver = having.index(True)
        given = self._stays.gather(own if self._stays.rank == giver else b"")[giver]
        return own or given


class Protection:
    """What the callbacks for all frameworks have in common."""

    _world: World | None
    """The world in which this process stays; None if it ends with its world."""
    _sampler: ElasticSampler | None
    """The samples of this rank in a job whose global batch is the same in any world; None if the
    framework divides the data."""
    _pass = 0
    """Number of the present pass within its step, counted from 0."""
    _entries: Entries | None = None
    """The entries into the framework's loop while there is a session; None otherwise."""
    _generators: RandomGenerators | None = None
    """States of the random generators after the step to which a recovery has led, until the loop
    comes to the next batch: frameworks draw random numbers on the way."""

    @property
    def session(self) -> Session | None:
        """The session, from the restore to the end of training; None before and after. Its
        `counters.loss` has what recoveries cost in tokens."""
        return None if self._entries is None else self._entries.session

    def _check_size(self, framework: str, accumulated: int, how: str) -> None:
        """Check what concerns worlds of another size.

        Args:
            framework: its name, for messages.
            accumulated: number of passes of a step, as the user has set it.
            how: the setting with that number.
        """
        if self._world is not None and self._world.any_size:
            raise InvalidJobError(
                f"holdfast.elastic.init(any_size=True): {framework} keeps the number of ranks with "
                f"which it began; leave any_size out, so that processes start again in a world of "
                f"another size"
            )
        if self._sampler is not None and accumulated not in (1, self._sampler.plan.passes):
            raise InvalidJobError(
                f"{how} is {accumulated} beside sampler=…, which gives the number of passes of a "
                f"step: leave it out, and let micro_batch of the sampler be what fits one pass"
            )

    def _weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Weigh the mean `loss` of the present pass, in place, so that a framework which divides it
        by the number of passes, and averages over ranks, has the mean of the global batch."""
        assert self._sampler is not None
        plan = self._sampler.plan
        return loss.mul_(plan.micro_batches[self._pass].averaged_weight * plan.passes)

    def _put_back_generators(self) -> None:
        """Let the random generators continue after that step."""
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None

    def _close(self) -> None:
        """End the session, if there is one."""
        if self._entries is not None:
            self._entries.session.close()
            self._entries = None
