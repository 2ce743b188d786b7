"""The command lines of a local run's processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast_cli._environment import process_environment
from holdfast_cli.local.directory import NodeRecord, RunDirectory, RunRecord
from holdfast_cli.local.processes import MARK
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.references import resolve_words
from holdfast_operator.control.certificates import Certificates
from holdfast_protos.connections.identity import Role

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Where torch's communication listens: all members are on this machine, so nobody else need reach
them. By default it listens where the machine's name leads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Command line and environment of a process."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """Makes the commands of daemons and agents."""

    daemon_program: tuple[str, ...] = (sys.executable, "-m", "holdfast_daemon")
    agent_program: tuple[str, ...] = (sys.executable, "-m", "holdfast.launch")
    redis_url: str = ""
    budget_bytes: int = 1 << 30
    """Memory for snapshots that each daemon may use."""

    def daemon(self, directory: RunDirectory, run: RunRecord, node: NodeRecord) -> Command:
        """Command of the daemon of `node`."""
        arguments = [
            *self.daemon_program,
            *("--root", node.root),
            *("--node", node.name),
            *("--host", node.host),
            *("--control", f"{run.control_host}:{run.control_port}"),
            *("--budget", str(self.budget_bytes)),
            *("--metrics-port", "0"),
            "--storage-anywhere",  # that the user who runs it may write to
            *self._security(directory, run),
            *("--log-file", str(directory.log(f"daemon-{node.name}"))),
        ]
        if self.redis_url:
            arguments += ["--redis", self.redis_url]
        environment = process_environment() | {MARK: directory.mark(node.name, "daemon")}
        return Command(arguments=tuple(arguments), environment=environment)

    def _security(self, directory: RunDirectory, run: RunRecord) -> tuple[str, ...]:
        if run.insecure:
            return ("--insecure",)
        tls = Certificates(directory.tls).directory(Role.DAEMON)
        return ("--tls", str(tls), "--auth", "token-files", "--tokens", str(directory.tokens))

    def agent(
        self,
        directory: RunDirectory,
        run: RunRecord,
        job: MoETrainingJob,
        node: NodeRecord,
        *,
        attempt: int,
        standby: bool = False,
    ) -> Command:
        """Command of an agent on `node`, which runs the job's trainer once a member lives there. A
        standby agent reports when it could start the trainer. References to variables are resolved
        as the kubelet resolves them in a pod, which has the same variables."""
        socket = str(directory.socket(node.name))
        variables = {
            **job.env,
            "HOLDFAST_SOCKET": socket,
            "HOLDFAST_TOKEN_FILE": str(directory.token_file),
            **job.variables,
        }
        workplace = Path(run.working_directory, str(job.container.get("workingDir", "")))
        arguments = [
            *("env", "-C", str(workplace)),
            *self.agent_program,
            *("--socket", socket),
            *("--job", job.key),
            *("--nodes", str(job.spec.nodes)),
            *("--nproc", str(job.spec.nproc_per_node)),
            *("--member-node", node.name),
            *("--exit-file", str(directory.exit_file(node.name, attempt))),
            *("--wait-file", str(directory.wait_file(node.name, attempt))),
            *(("--ready-file", str(directory.ready_file(node.name, attempt))) if standby else ()),
            *job.launcher_options,
            "--",
            *resolve_words(job.command, variables),
        ]
        environment = {
            "PYTHONUNBUFFERED": "1",
            **_LOOPBACK,
            **process_environment(),
            **variables,
            MARK: directory.mark(node.name, "agent", attempt),
        }
        return Command(arguments=tuple(arguments), environment=environment)
