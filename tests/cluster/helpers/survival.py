"""The example job on the test cluster, with faults: each is injected, survived and accounted for.

The trainer's own log says what training did; the job's status and events say what the operator did.
Knows nothing that a user of the cluster could not know, but how to break the machine.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from beside import Beside, safe_step
from cluster import Cluster
from holdfast_system import NAMESPACE, Holdfast, Job
from jobs import OUTPUT, lend_folder, make_folder, trainer_job
from machine import ClusterError

from holdfast_cli.demo.report import FaultReport, Injected, LoggedStep, account, read_log
from holdfast_cli.local import Recovery
from holdfast_operator.kube.job.status import recoveries_of

RUN_S, RECOVERY_S = 600.0, 240.0
DETECTION: dict[str, Any] = {
    "heartbeatSeconds": 0.5,
    "missedHeartbeats": 10,
    "replaceSeconds": 0,
    "hangSeconds": 60,
}
DETECTION_S = 5.0
"""When `DETECTION` calls a silent node lost: a machine that plays all nodes may itself hold up a
daemon for seconds."""
PATIENT: dict[str, Any] = DETECTION | {"missedHeartbeats": 30}
"""The same, where each recovery is accounted for: no machine holds up a daemon for so long."""

OUTPUTS = ("--log-file", f"{OUTPUT}/log.jsonl", "--hash-file", f"{OUTPUT}/sha256")
"""Arguments of examples that name the files which they write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault of a script."""

    kind: str
    at: float
    """Share of all steps that are done when it happens."""
    inject: Callable[[Run], str]
    """Does it; returns what was hit, in words."""
    restarts: bool = True
    """Training is stopped by it, and begins a new epoch."""
    after: Callable[[Run], None] = lambda run: None
    """What is done once it was survived, such as giving a node its power back."""


@dataclass(slots=True)
class Run:
    """One run of the job, under a name of its own."""

    cluster: Cluster
    name: str
    steps: int
    say: Callable[[str], None] = print
    stays: bool = False
    """Whether processes of ranks that are not lost stay."""
    arguments: tuple[str, ...] = ()
    """More for the trainer's command line."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Fields of the job's spec that replace those of the example."""
    detection: dict[str, Any] = field(default_factory=lambda: DETECTION)
    """When nodes are lost and ranks hang."""
    example: str = "moe-job.yaml"
    """File of the example."""
    outputs: tuple[str, ...] = OUTPUTS
    beside: tuple[Beside, ...] = ()
    """Smaller jobs that train beside it, until it has ended."""
    job: Job = field(init=False)
    injected: list[Injected] = field(default_factory=list)
    faults: list[FaultReport] = field(default_factory=list)
    protected: dict[str, int] = field(default_factory=dict)
    """Kind of fault → the newest protected step that the status knew before it."""
    behind: dict[str, int] = field(default_factory=dict)
    """Kind of fault → by how many steps parity was behind training then, as the status showed."""
    recoveries: dict[str, list[Recovery]] = field(default_factory=dict)
    """Kind of fault → the recoveries that were decided upon from then on."""
    safe_beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Status of each job beside it before the operator was killed."""
    broken: str = ""
    """The node that the last fault hit."""
    struck_at: float = 0.0
    """When the last fault happened, a Unix time in s."""
    lasting: ExitStack = field(default_factory=ExitStack)
    """Faults that last: they end with the run at the latest."""

    def __post_init__(self) -> None:
        self.job = Job(self.cluster, self._document())

    @property
    def holdfast(self) -> Holdfast:
        return Holdfast(self.cluster)

    @property
    def folder(self) -> Path:
        """Where the trainer writes; the same on every node."""
        return self.cluster.home / "shared" / self.name

    def _document(self) -> dict[str, Any]:
        document = trainer_job(
            self.name,
            example=self.example,
            steps=self.steps,
            memory="1500Mi",
            arguments=(*self.outputs, *["--stay"][: self.stays], *self.arguments),
            **self.spec,
        )
        document["spec"]["failurePolicy"]["detection"] = self.detection
        lend_folder(document["spec"]["trainer"]["template"]["spec"], self.folder)
        return document

    def log(self) -> list[LoggedStep]:
        return read_log(self.folder / "log.jsonl")

    def begin(self) -> None:
        """Start the job, with nothing left of an earlier one of its name."""
        make_folder(self.folder)
        with suppress(ClusterError):
            self.job.delete()
        self.job.apply()

    def carry_out(self, script: Sequence[Fault] = ()) -> str:
        """Run the job to its end, with the faults of `script`; the hash of its final state.

        Raises:
            ClusterError: when a fault was not survived, or the job did not end well.
        """
        self.begin()
        for each in self.beside:
            each.begin()
        job = self.job
        with self.lasting:
            for fault in script:
                self._inject(job, fault)
        for each in self.beside:
            each.runs_on()
            each.job.delete()
        job.wait("the job to end", lambda status: status.get("phase") == "Complete", RUN_S)
        return (self.folder / "sha256").read_text().strip()

    def strike(self) -> None:
        """Let the fault happen now: what was done before was looking for something to hit."""
        self.struck_at = time.time()

    def _inject(self, job: Job, fault: Fault) -> None:
        step = max(1, int(fault.at * self.steps))
        before = job.wait(
            f"step {step}, protected",
            lambda s: s.get("phase") == "Running" and s.get("protectedStep", 0) >= step,
            RUN_S,
        )
        self.protected[fault.kind] = before["protectedStep"]
        self.behind[fault.kind] = max(0, before["step"] - before["protectedStep"])
        self.strike()
        what = fault.inject(self)
        at = self.struck_at
        last = [line for line in self.log() if line.time <= at][-1]
        done = Injected(kind=fault.kind, what=what, step=last.step, epoch=last.epoch, time=at)
        self.injected.append(done)
        count = before.get("recoveries", 0) + fault.restarts

        def survived(status: dict[str, Any]) -> bool:
            on = status.get("phase") in ("Running", "Complete")
            enough = status.get("recoveries", 0) >= count
            safe = status.get("protectedStep", 0) > done.step + 1
            steps = _steps_since(at, recoveries_in(status), self.log())
            if status.get("phase") == "Complete" and not (enough and safe):
                raise ClusterError(
                    f"{self.name} ended before {what} was survived, which was at step {done.step} "
                    f"of {self.steps}; protected: {status.get('protectedStep')}. Give it more steps"
                )
            return on and enough and safe and bool(steps)

        recoveries = recoveries_in(job.wait(f"{what} to be survived", survived, RECOVERY_S))
        self.recoveries[fault.kind] = [each for each in recoveries if each.decided_at >= at]
        report = account(done, self.log(), recoveries, job.events())
        self.faults.append(report)
        self.say(
            f"  {what}: noticed after {report.detected_seconds} s, next step after "
            f"{report.recovery_seconds} s, {report.lost_steps} steps lost, from {report.source}"
        )
        fault.after(self)


def _steps_since(
    at: float, recoveries: Sequence[Recovery], log: Sequence[LoggedStep]
) -> list[LoggedStep]:
    """Steps that were trained after `at`, and after the recoveries that were decided since."""
    epochs = [each.epoch for each in recoveries if each.decided_at >= at]
    return [line for line in log if line.time > at and line.epoch >= max(epochs, default=0)]


def recoveries_in(status: dict[str, Any]) -> list[Recovery]:
    """The recoveries in a job's status, with the epochs that they began."""
    return [replace(each, epoch=_epoch_in(each.cause)) for each in recoveries_of(status)]


def _epoch_in(cause: str) -> int:
    found = re.search(r"in epoch (\d+)", cause)
    return int(found[1]) if found else 0


# --- what can happen ------------------------------------------------------------------------------


def kill_rank(run: Run) -> str:
    rank = run.job.rank_process(2)
    run.strike()
    os.kill(rank, signal.SIGKILL)
    return "rank 2"


def delete_pod(run: Run) -> str:
    pod, _ = run.job.member(1)
    run.strike()
    run.cluster.kubectl("delete", "pod", pod, "-n", run.job.namespace, "--wait=false")
    return f"pod {pod}"


def kill_daemon(run: Run) -> str:
    _, node = run.job.member(1)
    run.holdfast.kill(run.holdfast.daemon_on(node))
    return f"daemon on {node}"


def kill_node(run: Run) -> str:
    run.broken = _node_without_operator(run)
    run.strike()
    run.cluster.kill_node(run.broken)
    return f"power of {run.broken}"


def boot_node(run: Run) -> None:
    run.cluster.boot_node(run.broken)
    run.holdfast.wait_daemon(run.broken)


def kill_operator(run: Run) -> str:
    """In the middle of a recovery, which another replica has to finish."""
    recoveries, rank = run.job.status().get("recoveries", 0), run.job.rank_process(0)
    run.safe_beside = {each.name: each.runs_on() for each in run.beside}
    run.strike()
    os.kill(rank, signal.SIGKILL)
    run.job.wait("a recovery", lambda s: s.get("recoveries", 0) > recoveries, 30.0)
    leader = run.holdfast.wait_leader()
    run.holdfast.kill(leader)
    return "rank 0, then the operator"


def check_beside(run: Run) -> None:
    """See that the jobs beside the broken one went on in their epochs, as if nothing had been.

    Raises:
        ClusterError: when one did not.
    """
    for each in run.beside:
        before = run.safe_beside[each.name]
        after = each.runs_on(safe_step(before))
        if after["epoch"] != before["epoch"]:
            raise ClusterError(f"{each.name} began epoch {after['epoch']}, with another leader")
        run.say(f"  {each.name} trained on, from step {before['step']} to {after['step']}")


def partition(run: Run) -> str:
    run.broken = _node_without_operator(run)
    run.strike()
    run.cluster.partition(run.broken)
    return f"network of {run.broken}"


def heal(run: Run) -> None:
    run.cluster.heal(run.broken)
    run.cluster.wait_ready([run.broken])
    run.holdfast.wait_daemon(run.broken)


def drain(run: Run) -> str:
    _, run.broken = run.job.member(1)
    run.cluster.kubectl(
        *("drain", run.broken, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
        *("--pod-selector", "app.kubernetes.io/component=trainer", "--timeout=120s"),
    )
    return f"drain of {run.broken}"


def uncordon(run: Run) -> None:
    run.cluster.kubectl("uncordon", run.broken)


def roll_out(run: Run) -> str:
    """A new version of the daemons, node after node, as an administrator does it."""
    for node in run.cluster.nodes:
        pod = run.holdfast.daemon_on(node)
        run.cluster.kubectl("delete", "pod", pod, "-n", NAMESPACE)
        run.holdfast.wait_daemon(node)
    return "all daemons, in turn"


def delete_redis(run: Run) -> str:
    pods = run.holdfast.redis()
    run.cluster.kubectl("delete", "pod", *pods, "-n", NAMESPACE, "--wait=false")
    return "Redis"


def _node_without_operator(run: Run) -> str:
    """A member's node that the leading operator is not on, since what is to be seen is how soon it
    acts, not how soon another one takes its place; nor a job whose loss nothing could make good."""
    leader = run.cluster.get("pod", run.holdfast.wait_leader(), "-n", NAMESPACE)
    spared = {leader["spec"]["nodeName"], *(n for b in run.beside for n in b.irreplaceable())}
    homes: list[str] = [member["node"] for member in run.job.status()["members"]]
    return next(node for node in reversed(homes) if node not in spared)


DEMO = (
    Fault(kind="kill-rank", at=0.15, inject=kill_rank),
    Fault(kind="delete-pod", at=0.3, inject=delete_pod),
    Fault(kind="kill-daemon", at=0.45, inject=kill_daemon, restarts=False),
    Fault(kind="kill-node", at=0.6, inject=kill_node, after=boot_node),
    Fault(kind="kill-operator", at=0.75, inject=kill_operator, after=check_beside),
)
"""What `make cluster-demo` does."""

EVERYTHING = (
    Fault(kind="kill-rank", at=0.04, inject=kill_rank),
    Fault(kind="delete-pod", at=0.09, inject=delete_pod),
    Fault(kind="kill-daemon", at=0.14, inject=kill_daemon, restarts=False),
    Fault(kind="delete-redis", at=0.16, inject=delete_redis, restarts=False),
    Fault(kind="kill-node", at=0.19, inject=kill_node, after=boot_node),
    Fault(kind="kill-operator", at=0.25, inject=kill_operator),
    Fault(kind="rollout", at=0.3, inject=roll_out, restarts=False),
    Fault(kind="partition", at=0.35, inject=partition, after=heal),
    Fault(kind="drain", at=0.4, inject=drain, after=uncordon),
)
"""Training goes on during some: so it must not end first."""
