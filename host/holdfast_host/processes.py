"""Checks in a process of their own, with a time limit, and what its end says about the machine.

An instruction that ends the process, or memory that never answers, is a result as well. Nothing
here takes a thread: whoever waits asks `is_over`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from holdfast_host.results import Outcome, Result, read_result

KILL_S = 5.0
"""Time within which a process ends that is killed, unless the kernel does not let go of it."""
STOP_S = 1.0
"""Time that is waited for the end of a process whose results nobody needs any more."""
OUTPUT_BYTES_MAX = 64 << 20
"""Bytes that are read of what that process has written."""
OF_PROCESSORS = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE}
"""Signals for what an instruction did."""
JITTER = 0.25
"""Part of the pause between two rounds of checks by which it may be shorter or longer."""


def pause_s(period_s: float) -> float:
    """The pause until the next round of checks that are made every `period_s` seconds: launchers,
    or daemons, that started together do not check together."""
    return period_s * random.uniform(1 - JITTER, 1 + JITTER)


class CheckProcess:
    """A process that makes checks, from the construction on.

    Args:
        module: what the process runs; writes its results as lines (`results.write_results`).
        options: its command line.
        names: the checks that it makes, in order.
        limit_s: time within which all of them must have ended.
        beside: whether there is other work, which goes first. A process that does not end in time
            then proves nothing: it may have had too little of the processors.
    """

    def __init__(
        self,
        module: str,
        options: Sequence[str],
        names: Sequence[str],
        *,
        limit_s: float,
        beside: bool,
    ) -> None:
        self._names, self._limit_s, self._beside = tuple(names), limit_s, beside
        self._until = time.monotonic() + limit_s
        self._problem = ""
        """Why the process could not be started."""
        with ExitStack() as opened:
            try:
                # In memory, and not in a pipe: nobody reads it before the end, and NCCL may write
                # much.
                output = os.fdopen(os.memfd_create("node-checks"), "rb")
                self._output = opened.enter_context(output)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                )
                opened.pop_all()
            except OSError as error:
                self._problem = f"no process can be started: {error.strerror}"

    def is_over(self) -> bool:
        """Whether `results` would not wait for the process."""
        return self.has_ended() or time.monotonic() > self._until

    def has_ended(self) -> bool:
        """Whether there is no process any more: the kernel may keep one beyond its time."""
        return bool(self._problem) or self._process.poll() is not None

    def results(self) -> list[Result]:
        """Wait for the results, for the time limit at most. If an instruction ended the process, or
        it did not end, the check that it was at has failed."""
        if self._problem:
            return [Result("all", Outcome.NOT_CHECKED, self._problem)]
        try:
            self._process.wait(max(0.0, self._until - time.monotonic()))
            outcome, end = self._end()
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel does not let go of it
                self._process.wait(KILL_S)
            outcome = Outcome.NOT_CHECKED if self._beside else Outcome.FAILED
            end = f"did not end within {self._limit_s:.0f} s"
        written = os.pread(self._output.fileno(), OUTPUT_BYTES_MAX, 0)
        self._output.close()
        lines = written.decode(errors="replace").splitlines()
        found = [result for line in lines if (result := read_result(line)) is not None]
        if end and len(found) < len(self._names):
            check = self._names[len(found)]
            found.append(Result(check, outcome, f"the process that checks {end}"))
        return found

    def stop(self) -> None:
        """End the process, if it has not ended."""
        if not self._problem:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._output.close()

    def _end(self) -> tuple[Outcome, str]:
        """What the end of the process says about the machine, and how it ended; empty if as
        usual."""
        code = self._process.returncode
        if code < 0:
            # Other signals come from others, as that for a lack of memory does.
            broken = -code in OF_PROCESSORS
            return (
                Outcome.FAILED if broken else Outcome.NOT_CHECKED,
                f"was ended by signal {-code}",
            )
        return Outcome.NOT_CHECKED, f"ended with code {code}" if code else ""
