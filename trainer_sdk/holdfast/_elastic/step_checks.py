"""Now and then, check one step, to find a rank that computes wrongly.

Shards have no replica with which to compare them. But a forward and a backward pass change nothing
that could not be put back (`step_start`), so a step can be cut off before its optimizer changes
anything, and run again from the same bytes. If the ranks do not get the same gradients again, they
run it a third time: what two executions agree on is right, and training goes on with that. Which
rank was wrong follows from what the ranks gave to each other (`holdfast_core.reexecution`).

All ranks execute a step again for the same reasons, which they exchange, and no rank does so alone.

A device that is wrong in the same way each time agrees with itself. So other ranks repeat samples
of the step as well (`repeated_work`), also where the step itself cannot be executed again.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from holdfast._agree.exchange import Exchange
from holdfast._digests import digest_of
from holdfast._elastic.recording import Recorder
from holdfast._elastic.repeated_work import Comparison, RepeatedWork
from holdfast._elastic.step_start import StepStart
from holdfast._session.interface import TrainingState
from holdfast._state.dtensors import local_of
from holdfast_core.corruption import RANKS_MAX, Divergence, Proof
from holdfast_core.reexecution import Difference, Execution, difference, judge, odd_one
from holdfast_core.repeated_work import Verdict, agreed
from holdfast_core.snapshots.layouts import TensorRole

_log = logging.getLogger("holdfast")

_OF_PARAMETERS = (TensorRole.COMPUTE, TensorRole.MASTER)
WARM_UP_STEPS = 10
"""Steps after a recovery of which none is checked: programs do some things once, such as forming
buckets of gradients."""
EXECUTIONS = 3
"""Executions of a step in which ranks get different gradients."""
PASSED_OVER_MAX = 2
"""Steps in a row that were to be checked but had no optimizer step, after which none is checked."""
_TIMED_STEPS = 15
"""Newest steps that were not checked, whose times are known."""


class StepAgainError(Exception):
    """A step is cut off, because it is run again."""


class _Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank states after one execution."""

    executions: int
    """Number of executions of this step so far."""
    equal: bool
    """Whether this one is like the first."""
    cost_s: float
    """Time that the check has taken so far: all executions, and comparing them."""
    step_s: float
    """Time of a step that is not checked, up to its vote."""
    changed: str = ""
    """Tensor that has changed although no optimizer has stepped; empty if none has."""
    is_written: bool = False
    """Whether an operation of torch has written to a tensor since then."""
    unit: str = ""
    """Unit of that tensor, or any unit of this rank."""
    problem: str = ""
    """Why this rank cannot repeat the step; empty if it can."""


_STATEMENT = msgspec.json.Decoder(_Statement)
_DIGESTS = msgspec.json.Decoder(list[int])
_DIFFERENCE = msgspec.json.Decoder(Difference)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check has shown."""

    divergence: Divergence
    spoils: str = ""
    """Why the state of all ranks is wrong from this step on; empty if it is right."""


class StepChecks:
    """When the steps of one process are executed again, and what that shows.

    Args:
        share: part of the training time to spend on it, above 0. Equal on all ranks.
        executes_again: whether a step can be executed again. If not, only its state, and samples of
            its work, are checked. Equal on all ranks.
    """

    def __init__(self, share: float, *, executes_again: bool = True) -> None:
        self._share, self._executes_again = share, executes_again
        self._due: int | None = None
        """Step to check next; None if none is."""
        self._clean = 0
        """Checked steps since the recovery in which nothing was found."""
        self._clean_step: int | None = None
        """The newest of them."""
        self._left_out = 0
        """First executions of a step that are not compared, because they are never like the later
        ones."""
        self._origins: tuple[int, ...] = ()
        """Ranks in which the difference began that was found since then; empty before one."""
        self._passed_over = 0
        """Steps in a row that were to be checked, in which no optimizer stepped."""
        self._work = RepeatedWork()
        self._repeats_elsewhere = True
        """Whether ranks still repeat each other's work in this world."""
        self._compared: dict[int, int] = {}
        """Rank → newest step in which other ranks got the same bytes for samples of its work."""
        self._has_told_missing = False
        self._shown = Verdict()
        """What all checks since the recovery have shown of each other's work."""
        self._reported: set[tuple[int, ...]] = set()
        """Ranks that were found wrong in each other's work since the recovery."""
        self._plain_s = deque[float](maxlen=_TIMED_STEPS)
        """Times of the newest steps that were not checked."""
        self._recorder: Recorder | None = None
        """The record of the execution that runs now."""
        self._step = 0
        """The step that is being checked; 0 between checks."""
        self._executions: list[Execution] = []
        self._starts: list[StepStart] = []
        """The state at the beginning of each of them."""
        self._began_s = self._first_s = 0.0
        """Times at which this execution, and the first one, began."""
        self._finding: Finding | None = None
        """What the newest check has shown, until it is taken."""

    @property
    def _pause(self) -> int:
        """Steps to the next check while nobody knows how long one takes."""
        return max(WARM_UP_STEPS, math.ceil(1 / self._share))

    def restart(self, step: int) -> None:
        """Check a step some time after `step`, to which all ranks have come by a recovery. All of
        them call this, also those that have kept their state."""
        self.stop()
        self._forget()
        self._due = step + self._pause
        self._clean, self._origins, self._passed_over = 0, (), 0
        self._clean_step, self._left_out = None, 0
        self._work = RepeatedWork()  # which counts its checks, equally on all ranks
        self._repeats_elsewhere = True
        self._compared.clear()
        self._has_told_missing = False
        self._shown = Verdict()
        self._reported.clear()

    @property
    def records(self) -> bool:
        """Whether an execution is recorded now."""
        return self._recorder is not None

    def wants(self, step: int) -> bool:
        """Whether this rank wants to check `step`."""
        return self._due is not None and step >= self._due

    def is_due(self, step: int) -> bool:
        """Whether this rank has recorded `step`, and wants to check it."""
        return self.wants(step) and self.records

    def note_time(self, step_s: float) -> None:
        """Note how long a step took up to its vote, unless it is checked."""
        if not self._step:
            self._plain_s.append(step_s)

    def pass_over(self, step: int) -> None:
        """Do not check `step`, in which no optimizer has stepped. Where this happens again and
        again, check none: gradients that add up over several steps cannot be put back."""
        if self._step != step:
            return
        self.postpone(step)
        self._passed_over += 1
        if self._passed_over == PASSED_OVER_MAX:
            self._due = None
            _log.warning(
                "steps are not executed again: no optimizer steps in those that could be checked, "
                "because gradients add up over several steps"
            )

    def begin(self, step: int, start: StepStart | None) -> None:
        """Record the execution of `step` that begins, which is to be checked.

        Args:
            start: the state at its beginning; None if it could not be noted.
        """
        self.stop()
        if start is None:
            self._forget()
            return
        if step != self._step:
            self._forget()
            self._step = step
        self._began_s = time.monotonic()
        self._first_s = self._first_s or self._began_s
        self._starts.append(start)
        keeps = bool(self._executions) or not self._executes_again
        recorder = Recorder(self._work.begin(keeps=keeps))
        recorder.begin()
        self._recorder = recorder

    def stop(self) -> None:
        """End the record of the execution that has ended."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end()

    def paused(self) -> AbstractContextManager[None]:
        """Record nothing of what Holdfast itself communicates within the block."""
        return nullcontext() if self._recorder is None else self._recorder.paused()

    def postpone(self, step: int) -> None:
        """Check a later step, because not all ranks want to check `step`."""
        self._forget()
        if self._due is not None:
            self._due = step + self._pause

    def take_finding(self) -> Finding | None:
        """Return what the newest check has shown, once; None if nothing was wrong."""
        finding, self._finding = self._finding, None
        return finding

    def _forget(self) -> None:
        self._work.drop()
        self._executions.clear()
        self._starts.clear()
        self._step, self._first_s = 0, 0.0

    def compare(self, exchange: Exchange, holds: TrainingState, optimizers: Iterable[Any]) -> bool:
        """Compare the present execution with those before, once its gradients are complete. Return
        whether the step is to be run again. Collective.

        Raises:
            UnreachableError: a rank does not take part.
        """
        ended_s = time.monotonic()
        own = self._state(holds, optimizers, ended_s)
        stated = [_STATEMENT.decode(text) for text in exchange.gather(msgspec.json.encode(own))]
        executions, step = stated[0].executions, self._step
        self._passed_over = 0
        # A rank cannot repeat the step, or joined meanwhile: nothing can be compared.
        if any(each.problem or each.executions != executions for each in stated):
            problem = next((each.problem for each in stated if each.problem), "ranks have changed")
            _log.warning("step %d is not executed again: %s", step, problem)
            self.postpone(step)
            return False
        # Parameters or states have changed before the optimizer: nothing can be put back.
        if changed := {rank: each for rank, each in enumerate(stated) if each.changed}:
            self._find_changed(step, changed)
            self._conclude(step, stated[0])
            return False
        compared = executions - self._left_out
        if self._executes_again:
            unequal = not all(each.equal for each in stated)
            if compared < 2 or (compared < EXECUTIONS and unequal):
                return True
            if compared == EXECUTIONS:
                self._judge(step, exchange, stated)
        work: Comparison | None = None
        if self._finding is None and self._repeats_elsewhere and len(stated) > 1:
            work = self._compare_work(step, exchange, holds, optimizers, stated)
        is_same = work is None or work.verdict == Verdict()
        if self._finding is None and is_same:
            self._clean, self._clean_step = self._clean + 1, step
        self._conclude(step, stated[0], work.cost_s if work else 0.0)
        return False

    def _compare_work(
        self,
        step: int,
        exchange: Exchange,
        holds: TrainingState,
        optimizers: Iterable[Any],
        stated: Sequence[_Statement],
    ) -> Comparison:
        """Let other ranks repeat samples of the step, and conclude from that. Collective."""

        def units(parameter: torch.Tensor) -> str:
            return _unit_finder(holds)(parameter)  # which may fail, so only where that is caught

        found = self._work.compare(exchange, holds.rank, [*optimizers], units)
        if missing := [rank for rank, count in enumerate(found.samples) if not count]:
            self._tell_missing(step, missing)
        if found.verdict == Verdict():
            self._compared.update({r: step for r, count in enumerate(found.samples) if count})
        before, self._shown = self._shown, agreed(self._shown, found.verdict)
        shown = self._shown
        if shown.different:
            self._repeats_elsewhere = False
            _log.warning(
                "ranks do not repeat each other's work any more: ranks %s get other bytes than "
                "others of the same kind, which one fault does not explain; their devices or "
                "libraries may be different (first difference: %s)",
                list(shown.different),
                found.text,
            )
            return found
        if found.verdict.candidates and not before.candidates:
            _log.warning(
                "step %d: %s of ranks %s gave other bytes on another rank of the same kind; "
                "another check has to find this as well",
                step,
                found.text,
                list(shown.candidates),
            )
        is_decided = shown.wrong or len(shown.candidates) > 1
        if not (found.verdict.candidates and before.candidates and is_decided):
            return found
        if shown.candidates in self._reported:
            return found
        self._reported.add(shown.candidates)
        _log.error(
            "step %d: %s computes wrongly: %s gave other bytes on another rank of the same kind, "
            "and the same each time",
            step,
            f"rank {shown.wrong[0]}" if shown.wrong else f"one of ranks {list(shown.candidates)}",
            found.text,
        )
        unit = found.unit or stated[shown.candidates[0]].unit
        self._report(step, Proof.ELSEWHERE, shown.candidates, wrong=shown.wrong, unit=unit)
        return found

    def _tell_missing(self, step: int, ranks: Sequence[int]) -> None:
        """Log once after a recovery that nothing of the work of `ranks` was compared."""
        if not self._has_told_missing:
            self._has_told_missing = True
            _log.warning(
                "step %d: no work of %d ranks was repeated on another rank, rank %d first: no "
                "other rank has the same device and software, or nothing that they execute can be "
                "compared; a check that finds nothing says nothing of their devices",
                step,
                len(ranks),
                ranks[0],
            )

    def _conclude(self, step: int, first: _Statement, more_s: float = 0.0) -> None:
        """End the check of `step`, and choose the next one.

        Args:
            first: what rank 0 has stated, so that all ranks choose the same.
            more_s: time that the check has taken since then, equal on all ranks.
        """
        self._forget()
        if self._due is not None:
            cost_s = max(first.cost_s + more_s - first.step_s, 0.0) / self._share
            self._due = step + max(1, math.ceil(cost_s / max(first.step_s, 1e-6)))

    def _state(self, holds: TrainingState, optimizers: Iterable[Any], ended_s: float) -> _Statement:
        """What this rank states of the present execution, which is added to the others."""
        changed = problem = unit = ""
        equal = is_written = False
        recorder = self._recorder
        assert recorder is not None
        try:
            units = _units_of(holds)
            unit = next(iter(units.values()), "")
            changed = self._starts[-1].first_changed() or ""
            changed = changed or self._starts[0].first_changed_until(self._starts[-1]) or ""
            is_written = self._starts[-1].was_written()
            unit = units.get(changed, unit)
            recorder.complete()
            self._work.end(recorder.operations)
            execution = Execution(
                given=tuple(recorder.given),
                gradients=_digest_gradients(optimizers, holds) if self._executes_again else {},
                whole=recorder.whole,
                taken=recorder.taken,
            )
            self._executions.append(execution)
            first = self._executions[: self._left_out + 1][-1]
            equal = execution.made == first.made
        except Exception as error:  # torch may raise anything, and training has to go on
            problem = f"{type(error).__name__}: {error}"
            self._executions.append(Execution())
        now_s = time.monotonic()
        return _Statement(
            executions=len(self._executions),
            equal=equal,
            cost_s=now_s - self._first_s,
            step_s=statistics.median(self._plain_s or [ended_s - self._began_s]),
            changed=changed,
            is_written=is_written,
            unit=unit,
            problem=problem,
        )

    def _find_changed(self, step: int, changed: Mapping[int, _Statement]) -> None:
        """Conclude from tensors that have changed although no optimizer had stepped. A script that
        changes them itself increments their version counters, or does so in each step; so it is a
        fault if no counter rose, and earlier checks saw none."""
        rank, first = next(iter(changed.items()))
        if len(changed) > 1 or first.is_written or not self._clean:
            _log.warning(
                "steps are not executed again any more: %s of rank %d changes before the optimizer "
                "steps",
                first.changed,
                rank,
            )
            self._report(step, Proof.UNREPEATABLE, sorted(changed), unit=first.unit)
            return
        why = (
            f"{first.changed} of rank {rank} has changed before the optimizer stepped in step "
            f"{step}, so its memory is not reliable; wrong values have reached all ranks"
        )
        _log.error("%s", why)
        self._report(step, Proof.CHANGED, [rank], wrong=[rank], unit=first.unit, spoils=why)

    def _judge(self, step: int, exchange: Exchange, stated: list[_Statement]) -> None:
        """Conclude from three executions that are not all equal. Collective."""
        executions = self._executions[self._left_out :]
        own = msgspec.json.encode([each.digest() for each in executions])
        digests = [_DIGESTS.decode(text) for text in exchange.gather(own)]
        pair = odd_one(digests)
        if pair is None:
            differing = [rank for rank, (_, two, three) in enumerate(digests) if two != three]
            self._find_unrepeatable(step, differing, stated[differing[0]].unit)
            return
        odd, right = (executions[at] for at in pair)
        texts = exchange.gather(msgspec.json.encode(difference(odd, right)))
        found = judge([_DIFFERENCE.decode(text) for text in texts])
        before, self._origins = self._origins, found.origins
        unit = found.unit or stated[found.origins[0]].unit
        # Programs do some things once, and then it is no fault that all ranks differ. Some do them
        # whenever their loop is entered again: then the first execution is like no other one, and
        # the later ones are compared.
        is_once = not self._clean and 1 < len(found.origins) == len(stated)
        if is_once and pair[0] == 0 and not self._left_out:
            self._left_out, self._origins = 1, before
            _log.info("the first execution of a step is not compared: on no rank is it like others")
            return
        # Faults are rare: if another rank differs soon after, the training is the cause.
        if is_once or before not in ((), found.origins):
            self._find_unrepeatable(step, found.origins, unit)
            return
        # Until a check was clean, nothing shows that the steps of this training can be repeated.
        wrong = found.wrong if self._clean else ()
        _log.error(
            "step %d: %s in one of three executions; training goes on with what the other two "
            "agree on",
            step,
            f"rank {wrong[0]} computed wrongly"
            if wrong
            else f"ranks {list(found.origins)} got other bytes",
        )
        self._report(step, Proof.REEXECUTED, found.origins, wrong=wrong, unit=unit)

    def _find_unrepeatable(self, step: int, ranks: Iterable[int], unit: str) -> None:
        """Conclude that executions differ because of the training itself."""
        _log.warning(
            "steps are not executed again any more: the gradients of step %d were different when "
            "it was executed again, so training is not deterministic",
            step,
        )
        self._report(step, Proof.UNREPEATABLE, ranks, unit=unit)

    def _report(
        self,
        step: int,
        proof: Proof,
        ranks: Iterable[int],
        *,
        wrong: Iterable[int] = (),
        unit: str,
        spoils: str = "",
    ) -> None:
        of = tuple(ranks)[:RANKS_MAX]
        equal_step = self._clean_step
        if proof is Proof.ELSEWHERE:  # a check that compared none of their work says nothing
            known = [self._compared[rank] for rank in of if rank in self._compared]
            equal_step = min(known) if len(known) == len(of) else None
        divergence = Divergence(
            step=step,
            equal_step=equal_step,
            unit=unit,
            ranks=of,
            wrong=tuple(wrong),
            proof=proof,
            compared_all=True,
        )
        self._finding = Finding(divergence=divergence, spoils=spoils)
        if proof in (Proof.UNREPEATABLE, Proof.CHANGED):
            self._due = None


def _units_of(holds: TrainingState) -> dict[str, str]:
    """The unit of each tensor of this rank, by its name."""
    return {source.name: str(source.unit) for source in holds.live.sources()}


def _unit_finder(holds: TrainingState) -> Callable[[torch.Tensor], str]:
    """A function that returns the unit of a parameter; empty if that is not known."""
    units = _units_of(holds)
    of_address = {
        source.tensor.data_ptr(): units[source.name]
        for source in holds.live.sources()
        if source.role in _OF_PARAMETERS and source.tensor.numel()
    }
    return lambda parameter: of_address.get(local_of(parameter.detach()).data_ptr(), "")


def _digest_gradients(optimizers: Iterable[Any], holds: TrainingState) -> dict[str, int]:
    """Digest the gradients that the optimizers are about to apply, by the unit of their parameter
    where that is known."""
    unit_of = _unit_finder(holds)
    digests = dict[str, Any]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or not isinstance(gradient, torch.Tensor):
                    continue
                digest = digests.setdefault(unit_of(parameter), xxhash.xxh3_64())
                digest.update(digest_of([local_of(gradient.detach())]).to_bytes(8, "little"))
    return {unit: digest.intdigest() for unit, digest in digests.items()}
