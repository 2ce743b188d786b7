"""The loop over training steps: `for step in session.steps(total): with step: …`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from holdfast._causes import drop_frames
from holdfast._state.collect import seed_generators


class SavingSession(Protocol):
    """The part of a session that a restarting loop needs."""

    def restore(self) -> int | None:
        """Load the recovery line; return the last completed step, or None."""

    def save(self, step: int) -> object:
        """Begin to capture the state after `step`."""


class Runner(Protocol):
    """The session as the loop over steps uses it. The loop calls these methods on the training
    thread."""

    def begin_steps(self) -> int:
        """Restore before the first step; return the number of completed steps."""

    def begin(self, step: int) -> None:
        """Note that the body of `step` is about to run."""

    def complete(self, step: int) -> bool:
        """Save the state after `step`. Return False if its world has ended, so that the loop has to
        `go_back`."""

    def survives(self, error: Exception) -> bool:
        """Whether the loop continues in the next world after `error` has ended a step."""

    def go_back(self) -> int:
        """Enter the next world and recover there; return the number of completed steps."""

    def finish_steps(self) -> bool:
        """Wait until all ranks have completed all steps. Return False if steps must be run
        again."""


class RestartRunner:
    """Runner for a process that ends with its world, and that is then started again."""

    def __init__(self, session: SavingSession) -> None:
        self._session = session

    def begin_steps(self) -> int:
        return self._session.restore() or 0

    def begin(self, step: int) -> None:
        del step

    def complete(self, step: int) -> bool:
        self._session.save(step)
        return True

    def survives(self, error: Exception) -> bool:
        del error
        return False

    def go_back(self) -> int:
        raise AssertionError("a process that ends with its world never goes back")

    def finish_steps(self) -> bool:
        return True


class TrainStep(int):
    """The number of the step to run, counted from 1. `with step:` runs the step, and then saves the
    state after it."""

    resumed: bool
    """Whether this is the first step after a recovery. The script must then make new iterators over
    its data."""
    _runner: Runner
    _seed: int | None
    _completed: bool | None
    _raised: str
    """The error that ended the body, if the loop cannot continue after it; for the message."""

    @classmethod
    def _of(cls, number: int, runner: Runner, resumed: bool, seed: int | None) -> TrainStep:
        made = cls(number)
        made.resumed, made._runner, made._seed = resumed, runner, seed
        made._completed, made._raised = None, ""
        return made

    def __enter__(self) -> TrainStep:
        if self._seed is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            seed_generators(self._seed, int(self), rank)
        self._runner.begin(int(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            self._completed = self._runner.complete(int(self))
            return False
        if not isinstance(error, Exception) or not self._runner.survives(error):
            self._raised = f"{type(error).__name__}: {error}"
            return False
        drop_frames(error)
        self._completed = False
        return True


def steps_of(runner: Runner, total: int, seed: int | None = None) -> Iterator[TrainStep]:
    """Yield the steps to run, up to `total`. The caller runs each one in `with step:`; see
    `Session.steps`."""
    done, resumed = runner.begin_steps(), True
    while True:
        # Run the steps that are left. A step whose world ended leaves this inner loop.
        while done < total:
            step = TrainStep._of(done + 1, runner, resumed, seed)
            yield step
            if step._raised:
                raise RuntimeError(
                    f"step {done + 1} was not completed: its body raised {step._raised}, which was "
                    f"caught outside of `with step:`; let it end the process, which then starts "
                    f"again, or catch it within the body"
                )
            if step._completed is None:
                raise RuntimeError(
                    f"step {done + 1} was not run: write `with step:` around the loop's body"
                )
            if not step._completed:
                break
            done, resumed = done + 1, False
        # All steps are complete here; end only once they are complete on every rank.
        else:
            if runner.finish_steps():
                return
        # Recover in the next world, and continue after the step to which that leads.
        done, resumed = runner.go_back(), True
