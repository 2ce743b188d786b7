"""Keeps the processes of a local run: a daemon on every living node, and agents where they are
wanted.

It does what a kubelet does for pods: it adopts processes that an earlier control loop started, and
observes exits by pidfd. It decides nothing about the job: a daemon that dies is started again, an
agent is not.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path

from holdfast_cli.local.commands import Commands
from holdfast_cli.local.directory import (
    AgentRecord,
    DaemonRecord,
    NodeRecord,
    RunDirectory,
    RunRecord,
)
from holdfast_cli.local.processes import (
    KILLED,
    ProcessId,
    is_alive,
    kill_marked,
    send,
    spawn,
    wait_exit,
)
from holdfast_core.errors import HoldfastError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.last_lines import WINDOW_BYTES, decoded_end, last_lines, secrets_among
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    EventReason,
    StandbyView,
)

BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 10.0
STEADY_S = 30.0
"""Seconds of life after which the next restart of a daemon has the shortest pause again."""
GRACE_S = 8.0
"""Seconds between SIGTERM and SIGKILL: longer than the launcher gives its workers."""


_AgentKey = tuple[str, int]
"""Node and attempt of an agent."""


class Supervisor:
    """All processes of a run.

    Args:
        on_change: called when an agent has ended, or a daemon that is not started again.
        post: records an event of the run: (reason, message, warning).
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        run: RunRecord,
        job: MoETrainingJob,
        commands: Commands,
        on_change: Callable[[], None],
        post: Callable[[str, str, bool], None],
    ) -> None:
        self._directory, self.run, self._job, self._commands = directory, run, job, commands
        self._on_change, self._post = on_change, post
        self._exits: dict[_AgentKey, int] = {}
        self._last_lines: dict[_AgentKey, str] = {}
        self._waiting: dict[_AgentKey, str] = {}
        self._daemon_changed_at: dict[str, float] = {}
        self._daemons_watched: set[str] = set()
        """Nodes whose daemons have not been seen to end."""
        self._kept: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    # --- beginning ----------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt living processes, kill those that were not recorded, and start the rest."""
        self._kill_unrecorded()
        for node in self.run.nodes.values():
            if self.is_dead(node.name):
                node.daemon, node.agents, node.standby = None, {}, None
                continue
            for agent in node.all_agents:
                self._background(self._watch_agent(node, agent))
                if agent.stopping:
                    self._background(self._end_agent(agent))
        self.keep_daemons()
        self._directory.write_record(self.run)

    def keep_daemons(self) -> None:
        """Start keeping a daemon on each living node that has none: the run has just begun, or the
        node was lost and is back."""
        for node in self.run.nodes.values():
            if node.name not in self._kept and not self._stopping and not self.is_dead(node.name):
                self._kept.add(node.name)
                self._background(self._keep_daemon(node))

    def _kill_unrecorded(self) -> None:
        """Kill processes that are not recorded: a control loop may have died between starting a
        process and recording it. Processes below recorded agents carry the same marks and stay."""
        for node in self.run.nodes.values():
            if node.daemon is None or not is_alive(node.daemon.process):
                kill_marked(self._directory.mark(node.name, "daemon"))
            known = {agent.attempt for agent in node.all_agents}
            for attempt in range(1, node.attempts + 2):
                if attempt not in known:
                    kill_marked(self._directory.mark(node.name, "agent", attempt))

    def is_dead(self, node: str) -> bool:
        """Whether the node was lost and is not back."""
        return self._directory.is_dead(node)

    def daemon_changed_at(self, node: str) -> float:
        """Time when the node's daemon was last started or was seen to have ended, in monotonic
        seconds."""
        return self._daemon_changed_at.get(node, float("-inf"))

    def daemon_runs(self, node: str) -> bool:
        """Whether the node's daemon has not been seen to end: `daemon_changed_at` changes when it
        is."""
        return node in self._daemons_watched

    # --- daemons ------------------------------------------------------------------------------

    async def _keep_daemon(self, node: NodeRecord) -> None:
        """Start the node's daemon whenever it does not run, until the node is lost."""
        pause_s = BACKOFF_S_MIN
        while not self._stopping and not self.is_dead(node.name):
            if node.daemon is None or not is_alive(node.daemon.process):
                self._start_daemon(node)
            began = time.monotonic()
            assert node.daemon is not None
            self._daemons_watched.add(node.name)
            code = await wait_exit(node.daemon.process)
            self._daemons_watched.discard(node.name)
            self._daemon_changed_at[node.name] = time.monotonic()
            if self._stopping or self.is_dead(node.name):
                break
            self._post(EventReason.DAEMON_EXITED, self._daemon_exit_text(node, code), True)
            pause_s = BACKOFF_S_MIN if time.monotonic() - began > STEADY_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_S_MAX)
        node.daemon = None
        if not self._stopping:
            node.agents = {}  # they were lost with the node
        self._kept.discard(node.name)
        self._on_change()

    def _start_daemon(self, node: NodeRecord) -> None:
        command = self._commands.daemon(self._directory, self.run, node)
        log = self._directory.log(f"daemon-{node.name}")
        attempt = node.daemon.attempt + 1 if node.daemon is not None else 1
        process = spawn(command.arguments, command.environment, log)
        node.daemon = DaemonRecord(process=process, attempt=attempt)
        self._daemon_changed_at[node.name] = time.monotonic()
        self._directory.write_record(self.run)

    def _daemon_exit_text(self, node: NodeRecord, code: int | None) -> str:
        how = _how(code)
        if code is None or code < 0:
            return f"the daemon of {node.name} {how}; starting it again"
        log = self._directory.log(f"daemon-{node.name}")
        line = last_lines(end_of(log)).rpartition("\n")[2]
        return f"the daemon of {node.name} {how}: {line} (log: {log})"

    async def restart_daemons(self) -> None:
        """End all daemons, so that they are started again with the changed settings."""
        for node in self.run.nodes.values():
            if node.daemon is not None:
                await self._end_process(node.daemon.process)

    # --- agents -------------------------------------------------------------------------------

    def agents(self, dead: Collection[str]) -> tuple[AgentView, ...]:
        """All agents except those on `dead` nodes."""
        return tuple(
            self._agent_view(node.name, member, agent)
            for node in self.run.nodes.values()
            if node.name not in dead
            for member, agent in sorted(node.agents.items())
        )

    def _agent_view(self, node: str, member: int, agent: AgentRecord) -> AgentView:
        state, code = self._state_of(node, agent)
        ended = (node, agent.attempt) in self._exits
        return AgentView(
            member=member,
            node=node,
            state=state,
            exit_code=code,
            message="" if ended else self._why_waiting(node, member, agent),
            last_lines=self._last_lines.get((node, agent.attempt), "") if code else "",
        )

    def standbys(self, dead: Collection[str]) -> tuple[StandbyView, ...]:
        """All standby agents except those on `dead` nodes."""
        return tuple(
            self._standby_view(node.name, node.standby)
            for node in self.run.nodes.values()
            if node.standby is not None and node.name not in dead
        )

    def _standby_view(self, node: str, agent: AgentRecord) -> StandbyView:
        state, code = self._state_of(node, agent)
        ready = self._directory.ready_file(node, agent.attempt).exists()
        lines = self._last_lines.get((node, agent.attempt), "") if code else ""
        return StandbyView(node=node, state=state, ready=ready, exit_code=code, last_lines=lines)

    def _state_of(self, node: str, agent: AgentRecord) -> tuple[AgentState, int | None]:
        """State of an agent, and its exit code if it has ended by itself."""
        if agent.stopping:
            return AgentState.STOPPING, None
        code = self._exits.get((node, agent.attempt))
        if code is None:
            return AgentState.RUNNING, None
        # as a shell and a kubelet report it
        return AgentState.EXITED, 128 - code if code < 0 else code

    def _why_waiting(self, node: str, member: int, agent: AgentRecord) -> str:
        """Reason why the launcher cannot start its workers yet. An event reports each new
        reason."""
        try:
            why = self._directory.wait_file(node, agent.attempt).read_text().strip()
        except (OSError, UnicodeDecodeError):
            why = ""
        before = self._waiting.pop((node, agent.attempt), "")
        if why:
            self._waiting[(node, agent.attempt)] = why
            if not before:
                self._post("WorkersWait", f"those of member {member} on {node}: {why}", True)
        return why

    def start_agent(self, member: int, name: str) -> None:
        """Start the member's agent on a node, unless it runs there or the node is lost. A standby
        agent that waits there becomes the member's agent."""
        node = self.run.nodes[name]
        if self._stopping or member in node.agents or self.is_dead(name):
            return
        standby = node.standby
        if standby is not None and self._state_of(name, standby)[0] is AgentState.RUNNING:
            node.agents[member], node.standby = standby, None
            self._hand_over_log(name, member)
            self._directory.write_record(self.run)
            return
        agent = self._spawn_agent(node, f"member-{member}")
        if agent is not None:
            node.agents[member] = agent
            self._watch(node, agent)

    def start_standby(self, name: str) -> None:
        """Start a standby agent on a node, unless one runs there or the node is lost."""
        node = self.run.nodes[name]
        if self._stopping or node.standby is not None or self.is_dead(name):
            return
        agent = self._spawn_agent(node, f"standby-{name}", standby=True)
        if agent is not None:
            node.standby = agent
            self._watch(node, agent)

    def _spawn_agent(
        self, node: NodeRecord, log: str, *, standby: bool = False
    ) -> AgentRecord | None:
        """Start a launcher. If it cannot be started, an event reports the reason."""
        node.attempts += 1
        command = self._commands.agent(
            self._directory, self.run, self._job, node, attempt=node.attempts, standby=standby
        )
        try:
            process = spawn(command.arguments, command.environment, self._directory.log(log))
        except HoldfastError as error:
            self._post("AgentNotStarted", str(error), True)
            return None
        return AgentRecord(process=process, attempt=node.attempts)

    def _hand_over_log(self, node: str, member: int) -> None:
        """Make the log of a standby agent the member's log; the member's previous log is renamed
        with a number. The process continues to write to its file."""
        log = self._directory.log(f"member-{member}")
        earlier = (
            self._directory.log(f"member-{member}.{number}") for number in itertools.count(1)
        )
        with suppress(OSError):
            log.rename(next(path for path in earlier if not path.exists()))
        with suppress(OSError):
            self._directory.log(f"standby-{node}").rename(log)

    def stop_agent(self, member: int, name: str) -> None:
        """Stop the member's agent on a node, and forget it."""
        node = self.run.nodes[name]
        agent = node.agents.get(member)
        if agent is not None:
            self._stop(node, agent)

    def stop_standby(self, name: str) -> None:
        """Stop the standby agent on a node, and forget it."""
        node = self.run.nodes[name]
        if node.standby is not None:
            self._stop(node, node.standby)

    def _stop(self, node: NodeRecord, agent: AgentRecord) -> None:
        if (node.name, agent.attempt) in self._exits:
            self._forget(node, agent)
        elif not agent.stopping:
            agent.stopping = True
            self._background(self._end_agent(agent))
        self._directory.write_record(self.run)

    def fence(self, name: str) -> None:
        """Kill all agents on a node. Its daemon, if it lives, is fenced by its epoch."""
        for agent in self.run.nodes[name].all_agents:
            send(agent.process, signal.SIGKILL)
        self._background(asyncio.to_thread(kill_marked, self._directory.mark(name, "agent")))

    def _watch(self, node: NodeRecord, agent: AgentRecord) -> None:
        """Record a new agent and watch it."""
        self._directory.write_record(self.run)
        self._background(self._watch_agent(node, agent))

    async def _watch_agent(self, node: NodeRecord, agent: AgentRecord) -> None:
        code = await wait_exit(agent.process)
        if code is None:
            code = await self._written_exit_code(node, agent)
        if any(each is agent for each in node.all_agents):
            waited = agent is node.standby
            if agent.stopping or self._stopping or (waited and self.is_dead(node.name)):
                self._forget(node, agent)
                self._directory.write_record(self.run)
            else:
                self._exits[(node.name, agent.attempt)] = code
                self._note_exit(node, agent, code)
            self._on_change()
        # An agent that was killed leaves workers behind.
        mark = self._directory.mark(node.name, "agent", agent.attempt)
        await asyncio.to_thread(kill_marked, mark)

    def _note_exit(self, node: NodeRecord, agent: AgentRecord, code: int) -> None:
        """Keep the last lines of an agent, and report the failure of a member's."""
        member = next((m for m, each in node.agents.items() if each is agent), None)
        log = self._directory.log(f"standby-{node.name}" if member is None else f"member-{member}")
        lines = last_lines(end_of(log), secrets_among(self._job.env))
        self._last_lines[(node.name, agent.attempt)] = lines
        if member is not None and code != 0 and not self.is_dead(node.name):
            self._post("AgentExited", f"the agent of member {member} {_how(code)} ({log})", True)

    async def _written_exit_code(self, node: NodeRecord, agent: AgentRecord) -> int:
        """Exit code that the launcher wrote to its file, for a process that is not a child of this
        process."""
        try:
            return int(self._directory.exit_file(node.name, agent.attempt).read_text())
        except (OSError, ValueError):
            return KILLED

    async def _end_agent(self, agent: AgentRecord) -> None:
        await self._end_process(agent.process)
        self._on_change()

    def _forget(self, node: NodeRecord, agent: AgentRecord) -> None:
        node.agents = {member: each for member, each in node.agents.items() if each is not agent}
        if node.standby is agent:
            node.standby = None
        for kept in (self._exits, self._last_lines, self._waiting):
            kept.pop((node.name, agent.attempt), None)
        files = self._directory
        for file in (files.exit_file, files.wait_file, files.ready_file):
            file(node.name, agent.attempt).unlink(missing_ok=True)

    # --- the end ------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End all started processes, agents first, and free the nodes' memory."""
        self._stopping = True
        nodes = list(self.run.nodes.values())
        agents = [agent.process for node in nodes for agent in node.all_agents]
        await asyncio.gather(*(self._end_process(process) for process in agents))
        daemons = [node.daemon.process for node in nodes if node.daemon is not None]
        await asyncio.gather(*(self._end_process(process) for process in daemons))
        await asyncio.to_thread(kill_marked, self._directory.mark())
        await self._reap()
        for node in nodes:
            shutil.rmtree(node.root, ignore_errors=True)

    async def detach(self) -> None:
        """Stop watching; all processes keep running."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end_process(self, process: ProcessId) -> None:
        """End a process: SIGTERM, then SIGKILL. The task that watches the process reaps it."""
        if not send(process, signal.SIGTERM):
            return
        send(process, signal.SIGCONT)
        deadline = time.monotonic() + GRACE_S
        while is_alive(process):
            if time.monotonic() >= deadline:
                send(process, signal.SIGKILL)
            await asyncio.sleep(0.02)

    async def _reap(self) -> None:
        """Wait until the watching tasks have seen their processes end; cancel the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while self._tasks:
                    await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.detach()

    def _background(self, work: Coroutine[object, object, object]) -> None:
        async def run() -> None:
            try:
                await work
            except HoldfastError as error:
                self._post("SupervisionFailed", str(error), True)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def end_of(log: Path) -> str:
    """The end of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            # One byte more than is looked at shows whether the first line is cut.
            file.seek(max(0, file.seek(0, 2) - WINDOW_BYTES - 1))
            return decoded_end(file.read())
    except OSError:
        return ""


def _how(code: int | None) -> str:
    if code is None:
        return "ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
